"""DSpine in JAX: block-parallel drafters for speculative decoding.

Pure model and decoding mathematics; loops over data live in ``train`` and ``serve``.
Arrays carry their axes as a suffix: B batch, S context length, N anchors (blocks) of a
sequence, K block size, T query tokens, D model width, H query heads, G key/value heads,
C head dim, F MLP width, V vocabulary rows, L draft layers, M tapped target layers,
R transfer-space width, P candidates of a slot.
"""

__version__ = "0.1.0"
