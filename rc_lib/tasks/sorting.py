"""Sorting: say for every position which symbol stands there once the sequence is sorted (paper, section 4).

Symbols are the numbers ``0 .. symbols - 1`` in their natural order.  The label of position ``i`` is the
``i``-th smallest symbol of the sequence, whatever stands at ``i`` now: for 3 1 3 0 the labels are 0 1 3 3.

**Ties.**  A label is a symbol, not the place where it came from, so equal symbols have one sorted sequence:
how ties are broken cannot matter.  ``repeats=False`` draws sequences without any.

**Which sequences.**  All sequences allowed are equally likely.  No sequence occurs twice, and none of
``test`` is in ``train``; a space too small for that is refused.  The paper's setting is the default: 1000
sequences of 8 symbols out of 10, here with repeats, of 100 million.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from rc_lib import checks
from rc_lib.tasks import Examples, Task, majority
from rc_lib.weights import generator


def make(
    seed: int = 0,
    train: int = 1000,
    test: int = 1000,
    symbols: int = 10,
    length: int = 8,
    repeats: bool = True,
) -> Task:
    """Make the task.

    Args:
        seed: 0 or more; the sequences depend on it and on nothing else.
        train: Number of sequences to train on.
        test: Number of sequences to test on.
        symbols: Size of the alphabet, 2 or more; also the number of classes.
        length: Symbols in a sequence; without repeats at most ``symbols``.
        repeats: Whether a sequence may hold a symbol more than once.

    Returns:
        The ``Task``; networks get learned positions, without which no position could know its rank.

    Raises:
        ValueError: a number below its least, ``length > symbols`` without repeats, or fewer than
            ``train + test`` different sequences in all.
        TypeError: an argument of another type.
    """
    train, test = checks.positive_int("train", train), checks.positive_int("test", test)
    symbols, length = checks.positive_int("symbols", symbols, 2), checks.positive_int("length", length)
    checks.boolean("repeats", repeats)
    _require_space(train + test, symbols, length, repeats)

    def draw(count: int, source: torch.Generator) -> Tensor:
        if repeats:
            return torch.randint(symbols, (count, length), generator=source)
        return torch.rand(count, symbols, dtype=torch.float64, generator=source).argsort(-1)[:, :length]

    seen: set[tuple[int, ...]] = set()
    learn = _examples(_distinct(draw, train, generator(seed, "sorting.train"), seen))
    judge = _examples(_distinct(draw, test, generator(seed, "sorting.test"), seen))
    return Task(
        "sorting",
        learn,
        judge,
        classes=symbols,
        symbols=symbols,
        features=None,
        positions=True,
        chance=1 / symbols,
        majority=majority(learn, judge),
    )


def _require_space(wanted: int, symbols: int, length: int, repeats: bool) -> None:
    if not repeats and length > symbols:
        raise ValueError(
            f"length={length} exceeds symbols={symbols}: without repeats a sequence has at most as many"
        )
    space = symbols**length if repeats else math.perm(symbols, length)
    if space < wanted:
        raise ValueError(
            f"train + test = {wanted} different sequences are needed, but symbols={symbols}, "
            f"length={length}, repeats={repeats} allow {space}"
        )


def _distinct(
    draw: Callable[[int, torch.Generator], Tensor],
    count: int,
    source: torch.Generator,
    seen: set[tuple[int, ...]],
) -> Int[Tensor, "count length"]:
    """Draw until there are ``count`` sequences not seen before; ``seen`` grows by them."""
    kept: list[tuple[int, ...]] = []
    while len(kept) < count:
        for row in map(tuple, draw(max(count, 16), source).tolist()):
            if row not in seen and len(kept) < count:
                seen.add(row)
                kept.append(row)
    return torch.tensor(kept)


def _examples(sequences: Int[Tensor, "N n"]) -> Examples:
    return Examples(sequences, sequences.sort(-1).values, torch.ones_like(sequences, dtype=torch.bool))
