"""What the networks of section 4 learn: sets of tokens with a label for every token (paper, section 4).

A ``Task`` is data and nothing else: ``Examples`` to train on, ``Examples`` to test on, and what must be known
to build a network for it and to read an accuracy: the levels of chance, of the most frequent class, and the
best that can be reached.  ``sorting``, ``convex_hull`` and ``memorization`` make one each, from a seed alone;
``two_arcs`` is figure 3's, a regression.  ``rc_lib.token_classifier`` builds the networks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from rc_lib import checks


@dataclass(frozen=True)
class Examples:
    """``N`` sets of ``n`` tokens, with a label for every token.

    Args:
        inputs: Symbols, int64 ``[N, n]``, or coordinates, floating point ``[N, n, c]``.
        labels: The class of every token, int64 ``[N, n]``.
        real: ``False`` on padding, bool ``[N, n]``; inputs and labels there mean nothing.

    Raises:
        TypeError: a tensor of another type.
        ValueError: shapes that do not fit each other, a set without a real token, or a real token with a
            negative label or a coordinate that is not finite.
    """

    inputs: Tensor
    labels: Int[Tensor, "N n"]
    real: Bool[Tensor, "N n"]

    def __post_init__(self):
        for name, wanted in (("labels", torch.int64), ("real", torch.bool)):
            value = getattr(self, name)
            if not isinstance(value, Tensor) or value.dtype != wanted:
                raise TypeError(
                    f"{name} must be a {str(wanted).removeprefix('torch.')} tensor, "
                    f"but is {checks.describe(value)}"
                )
        symbols = isinstance(self.inputs, Tensor) and self.inputs.dtype == torch.int64
        if not symbols:
            checks.floats("inputs", self.inputs)
        if self.inputs.ndim != (2 if symbols else 3):
            raise ValueError(
                f"inputs must be int64 [N, n] or floating point [N, n, c], "
                f"but is {checks.describe(self.inputs)}"
            )
        for name in ("labels", "real"):
            if getattr(self, name).shape != self.inputs.shape[:2]:
                raise ValueError(
                    f"{name} is {checks.describe(getattr(self, name))}; expected "
                    f"{tuple(self.inputs.shape[:2])}, the first two axes of inputs"
                )
        if not self.real.is_meta:
            self._check_values()

    def _check_values(self) -> None:
        _refuse("real", ~self.real.any(1), self.real, "mark one token or more of every set")
        _refuse("labels", self.real & (self.labels < 0), self.labels, "be 0 or more on real tokens")
        if self.inputs.is_floating_point():
            bad = self.real[..., None] & ~torch.isfinite(self.inputs)
            _refuse("inputs", bad, self.inputs, "be finite on real tokens")

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def take(self, indices: slice | int | Sequence[int] | Tensor) -> "Examples":
        """Select some of the sets.

        Args:
            indices: A slice, one index (which gives one set), a list of indices or an index tensor.

        Returns:
            The ``Examples`` selected, in that order.

        Raises:
            IndexError: an index out of range.
        """
        if isinstance(indices, int):
            indices = [indices]
        if not isinstance(indices, slice | Tensor):
            indices = torch.as_tensor(list(indices), dtype=torch.long)
        return Examples(self.inputs[indices], self.labels[indices], self.real[indices])

    def trim(self) -> "Examples":
        """Drop the last columns that are padding in every set; a batch of short sets is then cheaper.

        Returns:
            The ``Examples`` with ``n`` as short as they allow (one column where there are no sets).
        """
        columns = torch.nonzero(self.real.any(0))
        n = int(columns.max()) + 1 if len(columns) else 1
        return Examples(self.inputs[:, :n], self.labels[:, :n], self.real[:, :n])

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Examples":
        """Move to a device, and convert coordinates to another floating-point type.

        Args:
            device: Where to; ``None`` stays.
            dtype: Type of coordinates; ``None`` keeps it.  Symbols, labels and ``real`` keep theirs.

        Returns:
            The ``Examples`` there.

        Raises:
            TypeError: ``dtype`` is no floating-point type.
        """
        if dtype is not None and dtype not in checks.FLOATS:
            raise TypeError(f"dtype must be a floating-point type, but is {dtype}")
        cast = dtype if self.inputs.is_floating_point() else None
        inputs = self.inputs.to(device=device, dtype=cast)
        return Examples(inputs, self.labels.to(device=device), self.real.to(device=device))


def _refuse(name: str, bad: Tensor, values: Tensor, expected: str) -> None:
    """Say where the first bad value is, if there is one."""
    if bool(bad.any()):
        where = torch.nonzero(bad)[0].tolist()
        found = checks.describe(values[tuple(where)].tolist())
        raise ValueError(f"{name} must {expected}, but {name}{where} is {found}")


def require(name: str, examples: Any) -> Examples:
    """Require ``Examples`` with at least one set.

    Args:
        name: The argument's name, for the message.
        examples: The value to check.

    Returns:
        ``examples`` itself.

    Raises:
        TypeError: they are no ``Examples``.
        ValueError: there is no set, and so no real token.
    """
    if not isinstance(examples, Examples):
        raise TypeError(f"{name} must be Examples, but is {checks.describe(examples)}")
    if not len(examples):
        raise ValueError(f"{name} has no real token: there are no sets")
    return examples


@dataclass(frozen=True)
class Task:
    """A task: what to train on, what to test on, and what accuracy means there.

    Attributes:
        name: ``"sorting"``, ``"convex_hull"`` or ``"memorization"``.
        train: The sets to train on.
        test: The sets to test on; ``memorization`` tests on the training sets themselves.
        classes: Number of classes.
        symbols: Size of the vocabulary of integer inputs, or ``None`` for coordinates.
        features: Coordinates per token, or ``None`` for symbols.
        positions: Whether a network is told the position of each token.
        chance: Accuracy of guessing all classes alike, one over their number.
        majority: Accuracy on ``test`` of always answering the class most frequent in ``train``.
        ceiling: No network without positions that treats its tokens alike can be right more often on
            ``test``; 1 where nothing limits it.
        words: The text of every symbol, where symbols are words.
    """

    name: str
    train: Examples
    test: Examples
    classes: int
    symbols: int | None
    features: int | None
    positions: bool
    chance: float
    majority: float
    ceiling: float = 1.0
    words: tuple[str, ...] | None = None

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Task":
        """Move ``train`` and ``test`` as ``Examples.to`` does.

        Args:
            device: Where to; ``None`` stays.
            dtype: Type of coordinates; ``None`` keeps it.

        Returns:
            The ``Task`` there; where ``test`` is ``train``, it still is.

        Raises:
            TypeError: ``dtype`` is no floating-point type.
        """
        train = self.train.to(device, dtype)
        test = train if self.test is self.train else self.test.to(device, dtype)
        return replace(self, train=train, test=test)


def majority(train: Examples, test: Examples) -> float:
    """Accuracy on ``test`` of always answering the class most frequent in ``train`` (padding left out).

    Args:
        train: Where the class is chosen; of classes equally frequent the smallest.
        test: Where the answer is judged.

    Returns:
        The share of real tokens of ``test`` with that class.

    Raises:
        TypeError: either is no ``Examples``.
        ValueError: either has no set, and so no real token.
    """
    require("train", train)
    require("test", test)
    answer = torch.bincount(train.labels[train.real]).argmax()
    return float((test.labels[test.real] == answer).double().mean())
