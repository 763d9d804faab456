"""The transfer space: a fixed low-width view of the target's LM-head rows (DESIGN 5.1).

``T[v] = sqrt(R) * unit((U[v] - mean) basis)`` with mean and basis from the token-frequency-weighted
mean and covariance of U. Weighting by frequency matters: centred by the plain vocabulary mean,
random *used* tokens keep a mean cosine of 0.62 to each other and the space teaches nothing.
Only mean and basis are stored. Training computes rows of T from gathered rows of U; a decoder makes the whole table once (``with_token_table``), so that
a round gathers its candidates' features instead of reading the basis and multiplying with it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels.injection import unit

TABLE_CHUNK = 8192  # rows of T made together


class Frozen(nnx.Variable):
    """A stored array that is never trained."""


class TransferSpace(nnx.Module):
    """mean [D] and basis [D,R], fp32, fixed before training."""

    def __init__(self, hidden_size: int, transfer_size: int):
        self.mean = Frozen(jnp.zeros((hidden_size,), jnp.float32))
        self.basis = Frozen(jnp.zeros((hidden_size, transfer_size), jnp.float32))
        self.table = None  # T of every token [V,R], once a decoder has made it

    def __call__(self, rows: jax.Array) -> jax.Array:
        """Features T of LM-head rows. rows [...,D] -> [...,R] fp32 of norm sqrt(R)."""
        centred = rows.astype(jnp.float32) - self.mean[...]
        return self.basis[...].shape[-1] ** 0.5 * unit(centred @ self.basis[...])

    def of_tokens(self, rows_VD: jax.Array, tokens: jax.Array) -> jax.Array:
        """Features T of token ids [...], U [V,D] given -> [...,R] fp32."""
        if self.table is None:
            return self(jnp.take(rows_VD, tokens, axis=0))
        return jnp.take(self.table[...], tokens, axis=0).astype(jnp.float32)


def token_table(transfer: TransferSpace, rows_VD: jax.Array, dtype) -> jax.Array:
    """T of every row of U [V,D] in ``dtype``, [V,R], without a second U in fp32. A write casts features to the stream's type, so that type loses nothing."""
    return jax.lax.map(lambda row_D: transfer(row_D).astype(dtype), rows_VD, batch_size=TABLE_CHUNK)


def build_transfer_space(
    rows_VD: np.ndarray, frequency_V: np.ndarray, transfer_size: int, *, whiten: bool, num_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Mean [D] and basis [D,R] (float32) from frequency-weighted statistics of U, in float64.

    Frequencies are token counts on the training answers; 0.5 is added to each. Rows >= num_tokens are
    padding and left out. ``whiten`` divides each direction by sqrt(eigenvalue + eps), eps = 0.01 x the
    mean eigenvalue. Eigenvector signs are fixed (largest entry positive) so that a rebuild is equal.
    Raises ValueError when shapes disagree.
    """
    if frequency_V.shape != rows_VD.shape[:1]:
        raise ValueError(f"token frequencies have shape {frequency_V.shape}, the LM head has {rows_VD.shape[0]} rows")
    rows = np.asarray(rows_VD[:num_tokens], np.float64)
    weight = np.asarray(frequency_V[:num_tokens], np.float64) + 0.5
    weight /= weight.sum()
    mean = weight @ rows
    centred = rows - mean
    eigenvalues, eigenvectors = np.linalg.eigh(centred.T @ (centred * weight[:, None]))
    top = np.argsort(eigenvalues)[::-1][:transfer_size]
    basis = eigenvectors[:, top]
    basis *= np.sign(basis[np.abs(basis).argmax(axis=0), np.arange(transfer_size)])
    if whiten:
        basis /= np.sqrt(np.maximum(eigenvalues[top], 0.0) + 0.01 * eigenvalues.mean())
    return mean.astype(np.float32), basis.astype(np.float32)
