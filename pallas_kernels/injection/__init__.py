"""Adjacent causal injection (DESIGN 5.2, 5.3, 8)."""

from pallas_kernels.injection.ref import InjectionWeights, injection, unit, write

__all__ = ["InjectionWeights", "injection", "unit", "write"]
