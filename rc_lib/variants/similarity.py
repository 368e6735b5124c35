"""Other scores and scales under the softmax: distance, cosine, temperature, spectral norm (after the paper).

Scores may change as they like: as long as row-constant terms drop out and what is left about ``(i, j)`` is a
product of a variation of the query and one of the key, the order of collapse is 3.
"""

import math
from typing import Any

import torch
from torch import nn

from rc_lib import checks
from rc_lib.variants.arithmetic import Array, like, spectral_norm, sqrt, where
from rc_lib.variants.pattern import Pattern, scaled_scores


def _positive(name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be finite and positive, but is {value}")
    return float(value)


class L2Distance(Pattern):
    """Scores ``−|q_i − k_j|²/√d_qk`` with one weight for queries and keys (Kim et al. 2021).

    The paper ties ``W_K = W_Q``, which makes the layer Lipschitz; ``W_K`` and ``b_K`` are then not used.

    Args:
        *args: As ``Pattern``.
        tied: Whether the keys are the queries.
        **kwargs: As ``Pattern``.
    """

    def __init__(self, *args: Any, tied: bool = True, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.tied = checks.boolean("tied", tied)

    def scores(self, X: Array, Q: Array, K: Array) -> Array:
        """``(2 Q Kᵀ − |q_i|² − |k_j|²)/√d_qk``."""
        K = Q if self.tied else K
        q, k = (Q * Q).sum(axis=-1)[..., :, None], (K * K).sum(axis=-1)[..., None, :]
        return 2 * scaled_scores(Q, K) - (q + k) / math.sqrt(Q.shape[-1])


def unit_rows(A: Array) -> Array:
    """Rows divided by their length; a row of zeros stays.

    Args:
        A: ``[..., n, k]``.

    Returns:
        The same kind and shape.
    """
    squares = (A * A).sum(axis=-1, keepdims=True)
    return A / sqrt(where(squares == 0, like(A, 1.0), squares))


class Cosine(Pattern):
    """Scores ``g cos(q_i, k_j)`` with a learned ``g`` (query-key normalisation, Henry et al. 2020).

    Args:
        *args: As ``Pattern``.
        sharpness: Initial ``g``.
        **kwargs: As ``Pattern``.
    """

    def __init__(self, *args: Any, sharpness: float = 4.0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.sharpness = nn.Parameter(
            torch.full((self.heads, 1, 1), float(sharpness), dtype=self._draw.dtype)
        )

    def scores(self, X: Array, Q: Array, K: Array) -> Array:
        """``g`` times the cosines."""
        return like(X, self.sharpness) * (unit_rows(Q) @ unit_rows(K).swapaxes(-1, -2))


class Temperature(Pattern):
    """Scores divided by a temperature; below 1 attention is sharper, above 1 flatter.

    Args:
        *args: As ``Pattern``.
        temperature: A positive number.
        **kwargs: As ``Pattern``.
    """

    def __init__(self, *args: Any, temperature: float = 0.5, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.temperature = _positive("temperature", temperature)

    def scores(self, X: Array, Q: Array, K: Array) -> Array:
        """``Q Kᵀ/(τ √d_qk)``."""
        return scaled_scores(Q, K) / self.temperature


class SigmaReparam(Pattern):
    """Query and key weights at a learned spectral norm, ``(γ/σ(W)) W`` (σReparam, Zhai et al. 2023).

    The paper treats every linear map so; here it is the pattern's two.  Each head has its own ``γ``.

    Args:
        *args: As ``Pattern``.
        gamma: Initial spectral norm.
        **kwargs: As ``Pattern``.
    """

    def __init__(self, *args: Any, gamma: float = 1.0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        size = (2, self.heads, 1, 1)
        self.gamma = nn.Parameter(torch.full(size, _positive("gamma", gamma), dtype=self._draw.dtype))

    def matrix(self, X: Array, W_Q: Array, W_K: Array, b_Q: Array, b_K: Array, may: Array | None) -> Array:
        """The softmax with rescaled weights; the biases stay."""
        gamma = like(X, self.gamma)
        W_Q, W_K = gamma[0] * W_Q / spectral_norm(W_Q), gamma[1] * W_K / spectral_norm(W_K)
        return super().matrix(X, W_Q, W_K, b_Q, b_K, may)
