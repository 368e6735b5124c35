"""Patterns that a rule about positions alone restricts: masks and pooling (after the paper).

When all tokens are equal each row is uniform over the keys that it sees.  Rows that see different keys are
different rows, so ``P_∞`` has rank above 1 and the residual shrinks by a factor per layer: order 1.
"""

import math
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from rc_lib import checks, masks
from rc_lib.variants.arithmetic import Array, like, softmax
from rc_lib.variants.pattern import Pattern


class Causal(Pattern):
    """Softmax over the token itself and those before it (Vaswani et al. 2017).

    ``P_∞`` is triangular with diagonal ``1, 1/2, …, 1/n``: its second eigenvalue is 1/2.
    """

    def own_mask(self, n: int) -> Bool[Tensor, "n n"]:
        """Lower triangle ``True``; see ``rc_lib.masks.causal``."""
        return masks.causal(n)


class Window(Pattern):
    """Softmax over the tokens nearby, ``|i − j| ≤ (width − 1) / 2`` (Longformer, Beltagy et al. 2020).

    Args:
        *args: As ``Pattern``.
        width: An odd number.
        **kwargs: As ``Pattern``.
    """

    def __init__(self, *args: Any, width: int = 3, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.width = width
        self.own_mask(1)

    def own_mask(self, n: int) -> Bool[Tensor, "n n"]:
        """A band; see ``rc_lib.masks.window``."""
        return masks.window(n, self.width)


class Strided(Pattern):
    """Softmax over the last ``stride`` tokens and every ``stride``-th one before (Child et al. 2019).

    The two sets of keys are in one head, their "merged" form: ``i − j ≤ stride`` or a multiple of it.

    Args:
        *args: As ``Pattern``.
        stride: A number of tokens; by default ``√n``, rounded.
        **kwargs: As ``Pattern``.
    """

    def __init__(self, *args: Any, stride: int | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.stride = None if stride is None else checks.positive_int("stride", stride)

    def own_mask(self, n: int) -> Bool[Tensor, "n n"]:
        """Causal, and nearby or a whole number of strides away."""
        stride = self.stride or round(math.sqrt(n))
        i = torch.arange(n)
        back = i[:, None] - i
        return (back >= 0) & ((back <= stride) | (back % stride == 0))


class BigBird(Pattern):
    """Softmax over a window, a few global tokens and random ones (Zaheer et al. 2020), token by token.

    The first ``globals_`` tokens see all and are seen by all.  All heads share the random keys.

    Args:
        *args: As ``Pattern``.
        width: Width of the window, odd.
        globals_: Number of global tokens.
        random: Number of random keys of each token.
        seed: Decides the random keys.
        **kwargs: As ``Pattern``.
    """

    def __init__(
        self,
        *args: Any,
        width: int = 3,
        globals_: int = 1,
        random: int = 1,
        seed: int | torch.Generator = 0,
        **kwargs: Any,
    ):
        super().__init__(*args, seed=seed, **kwargs)
        self.width = width
        self.globals_ = checks.positive_int("globals_", globals_, minimum=0)
        self.random = checks.positive_int("random", random, minimum=0)
        self.seed = int(torch.randint(2**31, (), generator=self._draw.generator))
        self.own_mask(1)

    def own_mask(self, n: int) -> Bool[Tensor, "n n"]:
        """Window, global rows and columns, and the random keys; the same at every call."""
        may = masks.window(n, self.width)
        may[: self.globals_] = True
        may[:, : self.globals_] = True
        draw = torch.rand(n, n, generator=torch.Generator().manual_seed(self.seed))
        return may.scatter(1, draw.topk(min(self.random, n), -1).indices, True)


class Pooling(Window):
    """The mean over the tokens nearby, whatever they are (PoolFormer: MetaFormer, Yu et al. 2022).

    PoolFormer subtracts the token itself, because a skip adds it again; here that is the skip's business.
    """

    def matrix(self, X: Array, W_Q: Array, W_K: Array, b_Q: Array, b_K: Array, may: Array | None) -> Array:
        """Uniform rows over the allowed keys."""
        return softmax(like(X, torch.zeros(self.heads, X.shape[-2], X.shape[-2])), may)
