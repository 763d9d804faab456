"""Transition cache: table and walk (DESIGN 5.5, 8)."""

from pallas_kernels.transition.ref import greedy_walk, transition_table

__all__ = ["greedy_walk", "transition_table"]
