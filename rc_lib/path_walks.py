"""Draw paths as the paper does, and run a network along each of them (paper, section 4, figure 4).

A path is a tuple ``(h_1, ..., h_L)`` as in ``rc_lib.paths``: a head ``1..H``, or 0 for a layer left out.
Along it the network has neither skips nor other heads.  In each used layer

    ``T ↦ LN(P_h(T) (T W_V,h + 1 b_V,hᵀ) W_O,h + 1 b_Oᵀ)``,

where the attention ``P_h(T)`` is computed anew from the path's own state.

Choices that the protocol leaves open: a single head keeps its own value bias ``b_V,h`` and all of ``b_O``, as
if the layer had no other head.  The norms are the network's own, without gain and shift: after each used
layer if it is post-norm, before it if pre-norm, and once at the end; a network without norms gets none.
The draws are independent, so a path can be drawn twice, and counts twice.

The theorem's paths have attention and norms frozen at the full forward pass, and no biases; ``Walk`` runs
those too (``frozen=True``).
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rc_lib import checks
from rc_lib.attention import self_attention
from rc_lib.frozen import Frozen, Hop, freeze
from rc_lib.paths import count_by_length

Path = tuple[int, ...]
Step = Callable[[Tensor, int], Tensor]


def draw(depth: int, heads: int, length: int, paths: int, seed: int = 0, repeat: int = 0) -> list[Path]:
    """Draw paths of one length as the protocol does: layers without repetition, a head in each (figure 4).

    Every path of the length is equally likely.  The draws depend on the arguments alone, and fewer paths are
    the first ones of more.

    Args:
        depth: The number of layers ``L``, 0 or more.
        heads: The number of heads ``H``.
        length: The number of used layers, ``0..L``.
        paths: How many to draw, with repetition.
        seed: 0 or more.
        repeat: Which of the repeats, 0 or more.

    Returns:
        Tuples ``(h_1, ..., h_L)`` as in ``rc_lib.paths``: a head ``1..H``, or 0 for a layer that is left out.

    Raises:
        ValueError: a number out of range.
        TypeError: a number that is not whole.
    """
    L, H = checks.positive_int("depth", depth, minimum=0), checks.positive_int("heads", heads)
    key = [checks.seed(seed), checks.positive_int("repeat", repeat, minimum=0)]
    if checks.positive_int("length", length, minimum=0) > L:
        raise ValueError(f"length must be at most depth={L}, but is {length}")
    rng = np.random.default_rng([*key, length])
    drawn = []
    for _ in range(checks.positive_int("paths", paths)):
        path = np.zeros(L, dtype=int)
        path[rng.choice(L, length, replace=False)] = rng.integers(1, H + 1, length)
        drawn.append(tuple(path.tolist()))
    return drawn


def sizes(san: Any) -> tuple[int, int]:
    """Depth and heads of a network that the protocol fits.

    Args:
        san: A ``SAN``.

    Returns:
        ``L`` and ``H``.

    Raises:
        ValueError: the network has MLPs, or no skips.
    """
    if san.mlp:
        raise ValueError("the SAN has MLPs, which no path of the protocol goes through: call exact")
    if not san.skip and san.depth:
        raise ValueError("the SAN has no skips, so no path leaves a layer out: call exact")
    return san.depth, san.heads


class Walk:
    """The states of some sets of tokens along paths.

    Args:
        san: The network, with skips and without MLPs.
        X: Its input, ``[*batch, n, d]``.
        padding: ``[*batch, n]``, ``True`` for real tokens; ``None`` if all are.
        frozen: Whether to run the theorem's paths instead of the protocol's.
        share: Whether to run what paths have in common once; otherwise each runs from the start.

    Raises:
        ValueError: the network has MLPs, no skips or another pattern than softmax, or (frozen) its forward
            pass overflowed.
        TypeError: ``frozen`` or ``share`` is no boolean.
    """

    def __init__(
        self,
        san: Any,
        X: Float[Tensor, "*batch n d"],
        padding: Bool[Tensor, "*batch n"] | None = None,
        frozen: bool = False,
        share: bool = True,
    ):
        sizes(san)
        self.san, self.share, self.frozen = san, checks.boolean("share", share), None
        if checks.boolean("frozen", frozen):
            self.frozen = freeze(san, X, key_padding_mask=padding)
            self.steps = _frozen_steps(self.frozen)
        else:
            self.steps = [_recomputed_step(layer, padding) for layer in san.layers]
        self.path, self.states = [], [X]

    def along(self, path: Path) -> Float[Tensor, "*batch n d"]:
        """The state at the end of one path; what it shares with the path before is not run again."""
        same = 0
        while self.share and same < len(self.path) and self.path[same] == path[same]:
            same += 1
        del self.states[same + 1 :]
        for step, h in zip(self.steps[same:], path[same:], strict=True):
            self.states.append(step(self.states[-1], h))
        self.path = path
        return self.states[-1]

    def sums(self, drawn: list[list[Path]], counts: list[int]) -> Float[Tensor, "counts lists *batch n d"]:
        """Add up the final states of the first so many paths of each list.

        Args:
            drawn: Lists of paths, all as long as the largest count.
            counts: Numbers of paths in growing order.

        Returns:
            ``[counts, lists, *batch, n, d]``.
        """
        segment = np.searchsorted(counts, np.arange(counts[-1]), side="right").tolist()
        uses = [(path, (segment[i], r)) for r, paths in enumerate(drawn) for i, path in enumerate(paths)]
        weights = Counter(uses) if self.share else dict.fromkeys(range(len(uses)), 1)
        if self.share:
            uses = sorted(weights)
        parts = self.states[0].new_zeros(len(counts), len(drawn), *self.states[0].shape)
        for i, (path, place) in enumerate(uses):
            parts[place].add_(self.along(path), alpha=weights[path, place] if self.share else weights[i])
        for j in range(1, len(counts)):
            parts[j] += parts[j - 1]
        return parts

    def finish(
        self, sums: Float[Tensor, "lists *batch n d"], paths: int, length: int
    ) -> Float[Tensor, "lists *batch n d"]:
        """Make sums of paths fit for the read-out.

        Args:
            sums: Sums of final states.
            paths: How many paths are in each sum.
            length: Their length.

        Returns:
            The sums normalised; frozen, scaled up to all paths of the length, plus the bias path.
        """
        if self.frozen is not None:
            scale = count_by_length(*sizes(self.san), True)[length] / paths
            return sums * scale + self.frozen.bias()
        norm = self.san.final_norm
        if norm is None and self.san.depth:
            norm = self.san.layers[-1].norm1
        return sums if norm is None else _normalised(sums, norm)


def _recomputed_step(layer: Any, padding: Tensor | None) -> Step:
    """One layer as the protocol runs it: nothing, or one head alone and the norm without gain and shift."""
    a = layer.attention
    if a.pattern is not None:
        kind = type(a.pattern).__name__
        raise ValueError(f"model.san has the pattern {kind}: the protocol recomputes softmax attention only")

    def step(T: Tensor, h: int) -> Tensor:
        if h == 0:
            return T
        if layer.norm == "pre":
            T = _normalised(T, layer.norm1)
        weights = (W[h - 1 : h] for W in (a.W_Q, a.W_K, a.W_V, a.W_O, a.b_Q, a.b_K, a.b_V))
        Y = self_attention(T, *weights, a.b_O, key_padding_mask=padding)
        return _normalised(Y, layer.norm1) if layer.norm == "post" else Y

    return step


def _frozen_steps(frozen: Frozen) -> list[Step]:
    """One map per layer of a frozen network without MLPs: the head, or the skip, and the norms after it."""
    hops = [i for i, s in enumerate(frozen.steps) if isinstance(s, Hop)]
    ends = [*hops[1:], len(frozen.steps)]

    def layer(start: int, end: int) -> Step:
        def step(T: Tensor, h: int) -> Tensor:
            T = frozen.steps[start].head(T, h)
            for norm in frozen.steps[start + 1 : end]:
                T = norm.stats.linear(T)
            return T

        return step

    return [layer(start, end) for start, end in zip(hops, ends, strict=True)]


def _normalised(T: Tensor, norm: Any) -> Tensor:
    """LayerNorm without gain and shift."""
    return torch.nn.functional.layer_norm(T, T.shape[-1:], eps=norm.eps)
