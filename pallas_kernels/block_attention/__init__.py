"""Block attention (DESIGN 8)."""

from pallas_kernels.block_attention.ref import block_attention

__all__ = ["block_attention"]
