"""Decoding, evaluation and export of trained drafters."""
