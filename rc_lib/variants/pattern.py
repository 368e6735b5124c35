"""What an attention pattern is: tokens and a head's weights in, a matrix ``P`` per head out (ours).

The paper's layer is ``SA(X) = Σ_h P_h X W_h + 1 bᵀ`` with ``P_h`` the softmax of scores.  A ``Pattern`` puts
another matrix in the softmax's place and leaves the rest alone, so that a ``SAN``, its ``Trace`` and its
paths work with it.
"""

import math
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from rc_lib import checks
from rc_lib.heads import fit, pair
from rc_lib.masks import allowed
from rc_lib.variants.arithmetic import Array, softmax
from rc_lib.weights import Gaussian, sizes


def project(X: Array, W: Array, b: Array) -> Array:
    """Queries or keys of every head, ``X W_h + 1 b_hᵀ``, in either arithmetic.

    Args:
        X: Tokens, ``[*batch, n, d]``.
        W: One matrix per head, ``[H, d, k]``.
        b: One bias per head, ``[H, k]``.

    Returns:
        ``[*batch, H, n, k]``.
    """
    return X[..., None, :, :] @ W + b[:, None, :]


def scaled_scores(Q: Array, K: Array) -> Array:
    """``Q Kᵀ / √d_qk`` (paper, section 2), in either arithmetic.

    Args:
        Q: Queries, ``[..., n, d_qk]``.
        K: Keys, ``[..., m, d_qk]``.

    Returns:
        ``[..., n, m]``.
    """
    return Q @ K.swapaxes(-1, -2) / math.sqrt(Q.shape[-1])


class Pattern(nn.Module):
    """A rule that makes attention matrices; the base of all, and itself the paper's softmax of scores.

    A pattern with weights of its own draws them from a stream of its own: the same seed gives the same
    weights in every dtype.  Subclasses override ``scores`` (what goes into the softmax) or ``matrix``.

    Args:
        heads: The number of heads ``H``.
        dim: Features per token ``d``.
        head_dim: ``d_qk``; by default ``d / H``, which must then be whole.
        tokens: The number of tokens ``n``, for patterns that have a weight for each position (``sized``).
        seed: 0 or more, or a CPU generator to draw from.
        dtype: A floating-point type.

    Raises:
        ValueError: a size below 1, ``heads`` that do not divide ``dim`` without a ``head_dim``, or
            ``tokens`` missing where the pattern needs it.
        TypeError: a size that is no whole number.
    """

    #: Whether each row sums to 1.
    stochastic: ClassVar[bool] = True
    #: Whether the number of tokens is fixed when the pattern is made.
    sized: ClassVar[bool] = False

    def __init__(
        self,
        heads: int,
        dim: int,
        head_dim: int | None = None,
        tokens: int | None = None,
        *,
        seed: int | torch.Generator = 0,
        dtype: torch.dtype = torch.float64,
    ):
        super().__init__()
        self.heads, self.dim, self.head_dim, *_ = sizes(heads, dim, head_dim, None, None)
        if tokens is not None:
            checks.positive_int("tokens", tokens)
        elif self.sized:
            raise ValueError(f"{type(self).__name__} has a weight for each position: give tokens")
        self.tokens = tokens if self.sized else None
        self._draw = Gaussian(seed, dtype)

    def weight(self, *shape: int, std: float = 1.0) -> nn.Parameter:
        """Draw a trainable weight.

        Args:
            *shape: Its shape.
            std: Its standard deviation.

        Returns:
            The parameter.
        """
        return nn.Parameter(self._draw(shape, std))

    def scores(self, X: Array, Q: Array, K: Array) -> Array:
        """What goes into the softmax, in either arithmetic: here ``Q Kᵀ / √d_qk``.

        Args:
            X: Tokens, ``[*batch, n, d]``.
            Q: Queries, ``[*batch, H, n, d_qk]``.
            K: Keys, of the same shape.

        Returns:
            Something that broadcasts to ``[*batch, H, n, n]``.
        """
        return scaled_scores(Q, K)

    def own_mask(self, n: int) -> Bool[Tensor, "n n"] | None:
        """Who may attend to whom by the pattern's own rule.

        Args:
            n: The number of tokens.

        Returns:
            ``[n, n]``, ``True`` = may attend; ``None`` if the rule allows everything.
        """
        return None

    def matrix(self, X: Array, W_Q: Array, W_K: Array, b_Q: Array, b_K: Array, may: Array | None) -> Array:
        """The pattern's formula, in either arithmetic and without checks; ``forward`` has them.

        Args:
            X: Tokens, ``[*batch, n, d]``.
            W_Q: Query weights, ``[H, d, d_qk]``.
            W_K: Key weights, ``[H, d, d_qk]``.
            b_Q: Query bias, ``[H, d_qk]``.
            b_K: Key bias, ``[H, d_qk]``.
            may: Who may attend to whom, the pattern's own mask included; ``None`` allows everything.

        Returns:
            Something that broadcasts to ``[*batch, H, n, n]``.
        """
        return softmax(self.scores(X, project(X, W_Q, b_Q), project(X, W_K, b_K)), may)

    def forward(
        self,
        X: Float[Tensor, "*batch n d"],
        W_Q: Float[Tensor, "heads d d_qk"],
        W_K: Float[Tensor, "heads d d_qk"],
        b_Q: Float[Tensor, "heads d_qk"] | None = None,
        b_K: Float[Tensor, "heads d_qk"] | None = None,
        mask: Bool[Tensor, "..."] | None = None,
        key_padding_mask: Bool[Tensor, "*batch n"] | None = None,
    ) -> Float[Tensor, "*batch heads n n"]:
        """Attention matrices ``P_h``, ``[*batch, H, n, n]``; NaN in ``X`` passes through.

        Args:
            X: Tokens, ``[*batch, n, d]``.
            W_Q, W_K: Query and key weights, ``[H, d, d_qk]``.
            b_Q, b_K: Their biases, ``[H, d_qk]``; ``None`` means zero.
            mask: ``[n, n]``, ``[*batch, n, n]`` or ``[*batch, H, n, n]``, ``True`` = may attend.
            key_padding_mask: ``[*batch, n]``, ``True`` for real tokens.

        Returns:
            ``[*batch, H, n, n]``.  A row that may attend to nothing is zero.

        Raises:
            ValueError: the shapes do not fit each other or the pattern's.
            TypeError: not floating point, two dtypes, or a mask that is not boolean.
        """
        self._check(X, W_Q, W_K)
        b_Q, b_K = (W_Q.new_zeros(W_Q.shape[::2]) if b is None else b for b in (b_Q, b_K))
        pair("W_Q", W_Q, "b_Q", b_Q, {0: 0, 2: 1})
        pair("W_K", W_K, "b_K", b_K, {0: 0, 2: 1})
        may = self.allowed(X, mask, key_padding_mask)
        n = X.shape[-2]
        return self.matrix(X, W_Q, W_K, b_Q, b_K, may).expand(*X.shape[:-2], self.heads, n, n)

    def allowed(
        self,
        X: Float[Tensor, "*batch n d"],
        mask: Bool[Tensor, "..."] | None = None,
        key_padding_mask: Bool[Tensor, "*batch n"] | None = None,
    ) -> Bool[Tensor, "..."] | None:
        """The caller's masks and the pattern's own in one.

        Args:
            X: Tokens, ``[*batch, n, d]``.
            mask: ``[n, n]``, ``[*batch, n, n]`` or ``[*batch, H, n, n]``, ``True`` = may attend.
            key_padding_mask: ``[*batch, n]``, ``True`` for real tokens.

        Returns:
            Booleans that broadcast against ``[*batch, H, n, n]``; ``None`` if nothing is masked.

        Raises:
            ValueError: a mask's shape does not fit.
            TypeError: a mask is not boolean.
        """
        may, own = allowed(X, mask, key_padding_mask), self.own_mask(X.shape[-2])
        if may is not None and may.ndim > 2 and may.shape[-3] not in (1, self.heads):
            raise ValueError(f"mask is {checks.describe(mask)}, but there are {self.heads} heads")
        if own is None:
            return may
        own = own.to(X.device)
        return own if may is None else may & own

    def _check(self, X: Tensor, W_Q: Tensor, W_K: Tensor) -> None:
        """Require weights and tokens of the sizes that the pattern was made for."""
        fit(X, W_Q=W_Q, W_K=W_K)
        expected = (self.heads, self.dim, self.head_dim)
        for name, W in {"W_Q": W_Q, "W_K": W_K}.items():
            if W.shape != expected:
                raise ValueError(f"{name} is {checks.describe(W)}; the pattern was made for {expected}")
        if self.tokens is not None and X.shape[-2] != self.tokens:
            raise ValueError(
                f"X is {checks.describe(X)}; {type(self).__name__} was made for {self.tokens} tokens"
            )
