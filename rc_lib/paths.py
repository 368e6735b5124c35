"""The path decomposition: a network as a sum over paths (paper, section 2.1, Theorem 2.1).

A path is a tuple ``(h_1, ..., h_L)``, first layer first: ``h_l`` in ``1..H`` is a head, and ``0`` the skip,
which only networks with skips have.  Its length is the number of its real heads.  Its output is

    ``P^L_{h_L} ··· P^1_{h_1} X W^1_{h_1} ··· W^L_{h_L}``,     ``W_h = W_V,h W_O,h``,     ``P_0 = W_0 = I``,

with the attention matrices of the full forward pass ("frozen"), the last layer's outermost on the left.

``sum_over_paths`` is the definition, one path at a time; ``sum_by_length`` gives the same sums, exactly,
for networks with more paths than could ever be listed (ours).  How LayerNorm and MLPs enter is said in
``rc_lib.frozen``.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rc_lib import checks
from rc_lib.frozen import PATH_LIMIT, PathSpectrum, freeze
from rc_lib.frozen import Frozen as Frozen
from rc_lib.frozen import freeze_trace as freeze_trace


def count_by_length(depth: int, heads: int, skip: bool) -> list[int]:
    """Number of paths of each length, ``C(L, k) H^k`` with skips (paper, section 3), as exact integers.

    Args:
        depth: The number of layers ``L``, 0 or more (depth 0 has one path, of length 0).
        heads: The number of heads ``H`` per layer.
        skip: Whether a path may skip a layer; otherwise every path has length ``L``.

    Returns:
        ``L + 1`` integers of any size, for the lengths ``0..L``.

    Raises:
        ValueError: ``depth`` is negative or ``heads`` below 1.
        TypeError: ``depth`` or ``heads`` is no whole number, or ``skip`` no boolean.
    """
    L, H = _sizes(depth, heads)
    checks.boolean("skip", skip)
    return [math.comb(L, k) * H**k if skip or k == L else 0 for k in range(L + 1)]


def count_paths(depth: int, heads: int, skip: bool) -> int:
    """Number of paths: ``H^L``, or ``(H + 1)^L`` with skips (paper, Theorem 2.1), an exact integer.

    Args:
        depth: The number of layers ``L``, 0 or more.
        heads: The number of heads ``H`` per layer.
        skip: Whether a path may skip a layer.

    Returns:
        An integer of any size.

    Raises:
        ValueError: ``depth`` is negative or ``heads`` below 1.
        TypeError: ``depth`` or ``heads`` is no whole number, or ``skip`` no boolean.
    """
    L, H = _sizes(depth, heads)
    return (H + 1 if checks.boolean("skip", skip) else H) ** L


def length_distribution(depth: int, heads: int) -> Float[Tensor, " lengths"]:
    """Share of the paths that has each length, with skips: the Binomial(L, H/(H+1)) law (paper, section 3).

    Each share is the quotient of two exact integers, rounded once, so no depth overflows.

    Args:
        depth: The number of layers ``L``, 0 or more.
        heads: The number of heads ``H`` per layer.

    Returns:
        ``[L + 1]`` in float64, for the lengths ``0..L``; they sum to 1.

    Raises:
        ValueError: ``depth`` is negative or ``heads`` below 1.
        TypeError: ``depth`` or ``heads`` is no whole number.
    """
    total = count_paths(depth, heads, True)
    shares = [count / total for count in count_by_length(depth, heads, True)]
    return torch.tensor(shares, dtype=torch.float64)


def all_paths(depth: int, heads: int, skip: bool, length: int | None = None) -> Iterator[tuple[int, ...]]:
    """Every path, one at a time and never as a list (paper, Theorem 2.1).

    Args:
        depth: The number of layers ``L``, 0 or more (depth 0 has one path, the empty one).
        heads: The number of heads ``H`` per layer, numbered ``1..H``.
        skip: Whether a path may skip a layer, written 0.
        length: Only the paths with this many real heads; ``None`` means all.

    Returns:
        An iterator of tuples ``(h_1, ..., h_L)``, first layer first: ``H^L`` of them, or ``(H + 1)^L``.

    Raises:
        ValueError: a size out of range, or a ``length`` above ``depth``.
        TypeError: a size is no whole number, or ``skip`` no boolean.
    """
    L, H = _sizes(depth, heads)
    checks.boolean("skip", skip)
    if length is None:
        return product(range(0 if skip else 1, H + 1), repeat=L)
    if checks.positive_int("length", length, minimum=0) > L:
        raise ValueError(f"length must be at most depth={L}, but is {length}")
    return _paths_of_length(L, H, length) if skip or length == L else iter(())


def _paths_of_length(L: int, H: int, k: int) -> Iterator[tuple[int, ...]]:
    for layers in combinations(range(L), k):
        for heads in product(range(1, H + 1), repeat=k):
            path = [0] * L
            for l, h in zip(layers, heads, strict=True):
                path[l] = h
            yield tuple(path)


def _sizes(depth: int, heads: int) -> tuple[int, int]:
    return checks.positive_int("depth", depth, minimum=0), checks.positive_int("heads", heads)


@torch.no_grad()
def path_output(
    san: Any,
    X: Float[Tensor, "*batch n d"],
    path: Sequence[int],
    mask: Bool[Tensor, "..."] | None = None,
    key_padding_mask: Bool[Tensor, "*batch n"] | None = None,
    source: int = 0,
) -> Float[Tensor, "*batch n d"]:
    """One path's output, ``P^L_{h_L} ··· P^1_{h_1} X W^1_{h_1} ··· W^L_{h_L}`` (paper, Theorem 2.1).

    Runs the network once to freeze its attention; for many paths call ``freeze`` once and its ``path``.

    Args:
        san: A ``SAN`` of any kind.
        X: Tokens, ``[*batch, n, d]``.
        path: One head a layer, first layer first: ``1..H``, or 0 for the skip.
        mask: ``[n, n]``, ``[*batch, n, n]`` or ``[*batch, H, n, n]``, ``True`` = may attend.
        key_padding_mask: ``[*batch, n]``, ``True`` for real tokens.
        source: Where the path starts: 0 is the input, ``m`` the ``m``-th MLP, after which only the later
            layers have an entry in ``path``.

    Returns:
        ``[*batch, n, d]``, without biases.

    Raises:
        ValueError: a head that does not exist, a skip where there is none, the wrong number of entries;
            ``X`` or a mask that does not fit.
        TypeError: an entry that is no whole number; another dtype than the weights'.
    """
    return freeze(san, X, mask, key_padding_mask).path(path, source)


def sum_over_paths(
    san: Any,
    X: Float[Tensor, "*batch n d"],
    mask: Bool[Tensor, "..."] | None = None,
    key_padding_mask: Bool[Tensor, "*batch n"] | None = None,
    limit: int = PATH_LIMIT,
) -> PathSpectrum:
    """Add up every path, one at a time, sorted by length (paper, Theorem 2.1): slow, but the definition.

    Args:
        san: A ``SAN`` of any kind.
        X: Tokens, ``[*batch, n, d]``.
        mask: ``[n, n]``, ``[*batch, n, n]`` or ``[*batch, H, n, n]``, ``True`` = may attend.
        key_padding_mask: ``[*batch, n]``, ``True`` for real tokens.
        limit: The largest number of paths to list.

    Returns:
        The spectrum; its ``total`` is the network's output, its ``sources`` are given if there are MLPs.

    Raises:
        ValueError: there are more than ``limit`` paths (the message says how many); ``X`` or a mask does
            not fit.
        TypeError: another dtype than the weights', or a mask that is not boolean.
    """
    return freeze(san, X, mask, key_padding_mask).sum_over_paths(limit)


def sum_by_length(
    san: Any,
    X: Float[Tensor, "*batch n d"],
    mask: Bool[Tensor, "..."] | None = None,
    key_padding_mask: Bool[Tensor, "*batch n"] | None = None,
    by_source: bool = False,
) -> PathSpectrum:
    """Add up all paths of each length at once, exactly, by ``T_k ← [T_k +] Σ_h P_h T_{k-1} W_h`` (ours).

    At most ``L(L+1)/2`` applications of a layer stand for all ``(H+1)^L`` paths.

    Args:
        san: A ``SAN`` of any kind.
        X: Tokens, ``[*batch, n, d]``.
        mask: ``[n, n]``, ``[*batch, n, n]`` or ``[*batch, H, n, n]``, ``True`` = may attend.
        key_padding_mask: ``[*batch, n]``, ``True`` for real tokens.
        by_source: Whether to keep the terms apart by their source too (input and each MLP).

    Returns:
        The spectrum; its ``total`` is the network's output, to rounding error.

    Raises:
        ValueError: ``X`` is empty, not finite or of the wrong width, a mask does not fit, or the forward
            pass overflowed.
        TypeError: another dtype than the weights', or a mask that is not boolean.
    """
    return freeze(san, X, mask, key_padding_mask).sum_by_length(by_source)
