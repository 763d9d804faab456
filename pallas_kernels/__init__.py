"""Operations with a hardware kernel: one folder each, ``ref.py`` is the fp32-careful jnp reference.

The name is historic: a kernel may be Pallas (TPU, GPU) or Triton through jax-triton. Models call
the function exported by the op's folder and never a kernel directly.

A folder has ``arg_specs.py``: ``arguments`` and ``bytes_moved`` at a model's sizes (``shapes.MODELS``), which tests and ``pallas_kernels.bench`` share, and
where the benchmark should not count every output ``used``. A module ``*_gpu.py`` whose launches can be tuned has ``LAUNCHES`` (kernel -> largest size ->
launch) and ``candidates`` for the benchmark's --scan. ``implementation`` of the exported function is None (what is fastest where it runs and right
everywhere), 'xla' (the reference) or a kernel by name, which raises NotImplementedError with the reason where it cannot serve; the folder's
``IMPLEMENTATIONS`` lists the names. ``dspine_jax.config.KernelConfig`` holds a choice for each operation.
"""
