"""Patterns with a weight for each position: Linformer and Synthesizers (after the paper).

They show what decides the order.  Row ``i`` of the random Synthesizer is its own whatever the tokens are:
order 1.  The dense one's row follows its own token to first order, while the rows agree when the tokens do:
order 2.  Linformer's row sums follow the token to first order as well, and carry the common token with
them: order 1, unless its projections are averages.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rc_lib import checks
from rc_lib.variants.arithmetic import Array, like, relu, softmax
from rc_lib.variants.pattern import Pattern, project, scaled_scores


class SynthesizerRandom(Pattern):
    """A learned matrix in place of the scores, the same for all inputs (Tay et al. 2020)."""

    sized = True

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.table = self.weight(self.heads, self.tokens, self.tokens)

    def matrix(self, X: Array, W_Q: Array, W_K: Array, b_Q: Array, b_K: Array, may: Array | None) -> Array:
        """The softmax of the learned matrix."""
        return softmax(like(X, self.table), may)


class SynthesizerDense(Pattern):
    """Each token computes its row of scores alone: ``relu(X A + 1aᵀ) B + 1bᵀ`` (Tay et al. 2020).

    Args:
        *args: As ``Pattern``, with ``tokens``.
        hidden: Width of the hidden layer; by default ``4 dim``.  If all its units are off at the common
            token, the rows stop moving, and the residual becomes exactly 0.
        **kwargs: As ``Pattern``.
    """

    sized = True

    def __init__(self, *args: Any, hidden: int | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        m = 4 * self.dim if hidden is None else checks.positive_int("hidden", hidden)
        self.A, self.a = self.weight(self.heads, self.dim, m, std=1 / math.sqrt(self.dim)), self._bias(m)
        self.B, self.b = (
            self.weight(self.heads, m, self.tokens, std=1 / math.sqrt(m)),
            self._bias(self.tokens),
        )

    def _bias(self, size: int) -> nn.Parameter:
        """Not zero, so that a token near 0 does not sit on the kink of all its hidden units."""
        return self.weight(self.heads, size, std=0.5)

    def scores(self, X: Array, Q: Array, K: Array) -> Array:
        """The row of each token, from this token only."""
        hidden = relu(project(X, like(X, self.A), like(X, self.a)))
        return hidden @ like(X, self.B) + like(X, self.b)[:, None, :]


class Linformer(Pattern):
    """Keys and values projected to ``rank`` tokens: ``P = softmax(Q (E K)ᵀ/√d_qk) F`` (Wang et al. 2020).

    The heads share ``E, F [rank, n]``, Gaussian of variance ``1/rank``.  Equal tokens then have unequal
    projected keys (their sizes are the row sums of ``E``), and the rows of ``P`` do not sum to 1.  A mask has
    no meaning after the projection, and is refused.

    The order of collapse is 1.  If the rows of ``E`` sum to 1, equal tokens have equal keys; if those of
    ``F`` do, row sums are constant.  Either of the two makes the order 2, both make it 3.

    Args:
        *args: As ``Pattern``, with ``tokens``.
        rank: How many projected tokens; by default half of ``tokens``, rounded up.
        **kwargs: As ``Pattern``.
    """

    sized = True
    stochastic = False

    def __init__(self, *args: Any, rank: int | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        n = self.tokens
        self.rank = (n + 1) // 2 if rank is None else checks.positive_int("rank", rank)
        self.E, self.F = self._projections()

    def _projections(self) -> tuple[nn.Parameter, nn.Parameter]:
        std = 1 / math.sqrt(self.rank)
        return self.weight(self.rank, self.tokens, std=std), self.weight(self.rank, self.tokens, std=std)

    def matrix(self, X: Array, W_Q: Array, W_K: Array, b_Q: Array, b_K: Array, may: Array | None) -> Array:
        """The softmax over projected keys, and the projection of the values."""
        if may is not None:
            raise ValueError("mask is given, but Linformer mixes the keys before attending: it can mask none")
        K = like(X, self.E) @ project(X, W_K, b_K)
        return softmax(scaled_scores(project(X, W_Q, b_Q), K)) @ like(X, self.F)


class LinformerPooled(Linformer):
    """Linformer with mean pooling for its projections, one of the paper's options (Wang et al. 2020).

    ``E = F`` averages ``rank`` runs of neighbours.  Equal tokens have equal pooled keys and rows sum to 1, so
    that the order is 3 again.
    """

    stochastic = True

    def _projections(self) -> tuple[nn.Parameter, nn.Parameter]:
        pool = averages(self.rank, self.tokens).to(self._draw.dtype)
        return nn.Parameter(pool), nn.Parameter(pool.clone())


def averages(rank: int, n: int) -> Float[Tensor, "rank n"]:
    """The matrix of means over ``rank`` runs of neighbours, as equal in length as can be.

    Args:
        rank: How many runs, ``n`` at most.
        n: The number of tokens.

    Returns:
        ``[rank, n]``; each row sums to 1.

    Raises:
        ValueError: more runs than tokens.
    """
    if rank > n:
        raise ValueError(f"rank must be at most {n}, the number of tokens, but is {rank}")
    run = torch.arange(n) * rank // n
    member = (run == torch.arange(rank)[:, None]).double()
    return member / member.sum(-1, keepdim=True)
