"""Operations with a hardware kernel: one folder each, ``ref.py`` is the fp32-careful jnp reference.

The name is historic: a kernel may be Pallas (TPU, GPU) or Triton through jax-triton. Models call
the function exported by the op's folder and never a kernel directly.
"""
