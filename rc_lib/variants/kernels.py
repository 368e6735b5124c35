"""Patterns that compare features of queries and keys: linear attention and Performer (after the paper).

``P_ij ∝ φ(q_i)·φ(k_j)`` with positive features.  Divided by its row sums the pattern is ``1 sᵀ`` when all
tokens agree, and row ``i`` leaves ``s`` only by a product of what is special about ``q_i`` and about the
keys: order 3, as with the softmax.
"""

import math
from typing import Any

from torch import Tensor

from rc_lib import checks
from rc_lib.variants.arithmetic import Array, elu_plus_one, exp, largest, like, over_rows, where
from rc_lib.variants.pattern import Pattern, project


class Linear(Pattern):
    """Row-normalised linear attention, ``φ = elu + 1`` (Katharopoulos et al. 2020)."""

    def kernel(self, X: Array, W_Q: Array, W_K: Array, b_Q: Array, b_K: Array) -> Array:
        """``φ(Q) φ(K)ᵀ`` of every head.

        Args:
            X: Tokens, ``[*batch, n, d]``.
            W_Q: Query weights, ``[H, d, d_qk]``.
            W_K: Key weights.
            b_Q: Query bias, ``[H, d_qk]``.
            b_K: Key bias.

        Returns:
            ``[*batch, H, n, n]``, positive.
        """
        return elu_plus_one(project(X, W_Q, b_Q)) @ elu_plus_one(project(X, W_K, b_K)).swapaxes(-1, -2)

    def matrix(self, X: Array, W_Q: Array, W_K: Array, b_Q: Array, b_K: Array, may: Array | None) -> Array:
        """The kernel over its row sums."""
        return over_rows(self.kernel(X, W_Q, W_K, b_Q, b_K), may)


class LinearUnnormalised(Linear):
    """Linear attention without the division by its row sums (Qin et al. 2022, who put a norm after it).

    ``P = φ(Q) φ(K)ᵀ / (n d_qk)``: the row sums are 1 where queries and keys are 0, and follow the query to
    first order elsewhere.
    """

    stochastic = False

    def matrix(self, X: Array, W_Q: Array, W_K: Array, b_Q: Array, b_K: Array, may: Array | None) -> Array:
        """The kernel over a constant."""
        P = self.kernel(X, W_Q, W_K, b_Q, b_K) / (X.shape[-2] * W_Q.shape[-1])
        return P if may is None else where(may, P, like(X, 0.0))


def positive_features(A: Array, omega: Array) -> Array:
    """Logarithms of Performer's features, ``ω_mᵀ a − |a|²/2`` (Choromanski et al. 2021).

    For Gaussian ``ω_m``, the mean over ``m`` of ``exp`` of these at ``a`` times that at ``b`` has the
    expectation ``exp(a·b)``.

    Args:
        A: Queries or keys, ``[..., n, d_qk]``.
        omega: Directions, ``[H, d_qk, m]``.

    Returns:
        ``[..., n, m]``.
    """
    return A @ omega - (A * A).sum(axis=-1, keepdims=True) / 2


class Performer(Pattern):
    """Positive random features that estimate the softmax's kernel (FAVOR+, Choromanski et al. 2021).

    The directions are independent Gaussians (the paper makes them orthogonal to lower the variance, and adds
    1e-4 to the features, which is left out here).

    Args:
        *args: As ``Pattern``.
        features: How many random directions each head has.
        **kwargs: As ``Pattern``.
    """

    omega: Tensor

    def __init__(self, *args: Any, features: int = 16, **kwargs: Any):
        super().__init__(*args, **kwargs)
        shape = (self.heads, self.head_dim, checks.positive_int("features", features))
        self.register_buffer("omega", self._draw(shape, 1.0))

    def matrix(self, X: Array, W_Q: Array, W_K: Array, b_Q: Array, b_K: Array, may: Array | None) -> Array:
        """``φ(Q) φ(K)ᵀ`` over its row sums; queries and keys share the factor 1/√d_qk."""
        omega, root = like(X, self.omega), math.sqrt(math.sqrt(W_Q.shape[-1]))
        Q = positive_features(project(X, W_Q, b_Q) / root, omega)
        K = positive_features(project(X, W_K, b_K) / root, omega)
        # One factor a query, and one for all keys together, drop out of the normalised rows.
        return over_rows(exp(Q - largest(Q, 1)) @ exp(K - largest(K, 2)).swapaxes(-1, -2), may)
