"""Other ways to normalise the scores: Sinkhorn, differential, shaped, off-by-one, sigmoid (after the paper).

Constant row sums are what the cubic step needs.  Sinkhorn and differential attention keep them; a softmax
with an extra 1 below, or a sigmoid, does not: a row sum that follows its query multiplies the *common* token
and turns into a residual of first order.
"""

import math
from typing import Any

import torch
from torch import nn

from rc_lib import checks
from rc_lib.variants.arithmetic import Array, beside, like, over_rows, sigmoid, softmax, where
from rc_lib.variants.pattern import Pattern, project, scaled_scores


class Sinkhorn(Pattern):
    """Columns and rows of ``e^scores`` normalised in turn, towards doubly stochastic (Sander et al. 2022).

    It begins and ends with the rows, so these sum to 1 exactly and the columns in the limit.  Under a mask
    that limit may not exist; under a causal one it is the identity.

    Args:
        *args: As ``Pattern``.
        iterations: How often columns and then rows are normalised, after the first softmax.
        **kwargs: As ``Pattern``.
    """

    def __init__(self, *args: Any, iterations: int = 5, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.iterations = checks.positive_int("iterations", iterations, minimum=0)

    def matrix(self, X: Array, W_Q: Array, W_K: Array, b_Q: Array, b_K: Array, may: Array | None) -> Array:
        """Sinkhorn's iteration."""
        P = super().matrix(X, W_Q, W_K, b_Q, b_K, may)
        for _ in range(self.iterations):
            P = over_rows(over_rows(P.swapaxes(-1, -2)).swapaxes(-1, -2))
        return P


class Differential(Pattern):
    """The difference of two softmaxes, ``softmax(Q_1 K_1ᵀ) − λ softmax(Q_2 K_2ᵀ)`` (Ye et al. 2025).

    Each takes one half of the head's queries and keys.  Rows sum to ``1 − λ``.  The paper makes ``λ`` from
    four learned vectors and normalises each head's value afterwards; here ``λ`` is one learned number a head.

    Args:
        *args: As ``Pattern``; ``head_dim`` must be even.
        subtract: Initial ``λ``.
        **kwargs: As ``Pattern``.
    """

    stochastic = False

    def __init__(self, *args: Any, subtract: float = 0.5, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for differential attention, but is {self.head_dim}")
        self.subtract = nn.Parameter(torch.full((self.heads, 1, 1), float(subtract), dtype=self._draw.dtype))

    def matrix(self, X: Array, W_Q: Array, W_K: Array, b_Q: Array, b_K: Array, may: Array | None) -> Array:
        """Both softmaxes under the same mask."""
        Q, K, half = project(X, W_Q, b_Q), project(X, W_K, b_K), self.head_dim // 2
        first = softmax(scaled_scores(Q[..., :half], K[..., :half]), may)
        return first - like(X, self.subtract) * softmax(scaled_scores(Q[..., half:], K[..., half:]), may)


class Shaped(Pattern):
    """``I + A − 11ᵀ/n`` with ``A`` the softmax at a temperature (shaped attention, Noci et al. 2023).

    The softmax less its value for equal tokens, around the identity: ``P_∞ = I``, so a small residual stays.
    Under a mask the uniform row is over the allowed keys, and the identity obeys the mask too.

    Args:
        *args: As ``Pattern``.
        temperature: Divides the scores.
        **kwargs: As ``Pattern``.
    """

    def __init__(self, *args: Any, temperature: float = 1.0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be finite and positive, but is {temperature}")
        self.temperature = float(temperature)

    def matrix(self, X: Array, W_Q: Array, W_K: Array, b_Q: Array, b_K: Array, may: Array | None) -> Array:
        """Identity, softmax and less the uniform rows."""
        S = scaled_scores(project(X, W_Q, b_Q), project(X, W_K, b_K)) / self.temperature
        identity = like(X, torch.eye(X.shape[-2]))
        identity = identity if may is None else where(may, identity, like(X, 0.0))
        return identity + softmax(S, may) - softmax(0 * S, may)


class OffByOne(Pattern):
    """``e^S_ij / (1 + Σ_k e^S_ik)``: a head may attend to nothing (Miller 2023).

    It is the softmax with one more key, of score and value 0, left out of the result.  With ``p`` the entry
    of ``P_∞`` and ``k`` the common key, a small residual about equal tokens ``x`` becomes

        ``n p (1 − n p) (R W_Q k/√d_qk) xᵀ W``  (``x`` with the bias of values added: ``xᵀ W_V + b_Vᵀ``)

    which has rank 1: each token keeps a multiple of what is left of the common one.
    """

    stochastic = False

    def matrix(self, X: Array, W_Q: Array, W_K: Array, b_Q: Array, b_K: Array, may: Array | None) -> Array:
        """The softmax less its share for nothing: ``A · t/(1 + t)`` with ``t`` the sum of ``e^S``."""
        S = scaled_scores(project(X, W_Q, b_Q), project(X, W_K, b_K))
        nothing = 0 * S[..., :1]
        S = S if may is None else where(may, S, like(X, -math.inf))
        return softmax(beside(S, nothing))[..., :-1]


class Sigmoid(Pattern):
    """``sigmoid(S_ij − log n)``, each entry for itself (Ramapuram et al. 2024).

    A small residual becomes ``n p (1 − p) (R W_Q k/√d_qk) xᵀ W``, as with ``OffByOne``.
    """

    stochastic = False

    def matrix(self, X: Array, W_Q: Array, W_K: Array, b_Q: Array, b_K: Array, may: Array | None) -> Array:
        """The sigmoid; zero where masked."""
        S = scaled_scores(project(X, W_Q, b_Q), project(X, W_K, b_K))
        P = sigmoid(S - math.log(X.shape[-2]))
        return P if may is None else where(may, P, like(X, 0.0))
