"""LM head and top-P in one operation (DESIGN 8)."""

from pallas_kernels.topk_logits.ref import topk_logits

__all__ = ["topk_logits"]
