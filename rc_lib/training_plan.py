"""Section 8: the numbers that a training run depends on, checked once, and its learning rate at each step.

The paper leaves learning rate, schedule and length of its trainings open; here they are all arguments.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rc_lib import checkpoints, checks

SCHEDULES = ("constant", "cosine", "linear")


def rate(step: int, total: int, schedule: str = "constant", warmup: int = 0) -> float:
    """Return the factor on the learning rate at one step.

    Args:
        step: the step, from 0.
        total: the number of steps in the run, above ``warmup``.
        schedule: after the warm-up, ``"constant"`` stays at 1, ``"linear"`` and ``"cosine"`` fall from 1
            towards the 0 that they would reach at step ``total``.
        warmup: over so many steps the factor rises linearly to 1; the first step already has 1/warmup.

    Returns:
        A number above 0 and at most 1.
    """
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / (total - warmup)
    if schedule == "linear":
        return 1 - done
    return (1 + math.cos(math.pi * done)) / 2 if schedule == "cosine" else 1.0


def number(name: str, value: Any, above: bool = False) -> float:
    """Require a finite number that is not negative.

    Args:
        name: the argument's name, for the message.
        value: the value to check.
        above: whether 0 is refused too.

    Returns:
        ``value`` as a ``float``.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative, infinite or NaN, or 0 where that is refused.
    """
    checks.boolean("above", above)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, but is {checks.describe(value)}")
    if not math.isfinite(value) or value < 0 or (above and value == 0):
        expected = "positive" if above else "at least 0"
        raise ValueError(f"{name} must be finite and {expected}, but is {value}")
    return float(value)


@dataclass
class Plan:
    """A run's numbers; a value out of range is refused with an error that names it.

    Attributes:
        epochs: how often every row is drawn.
        batch_size: rows in a step.
        lr: learning rate at factor 1.
        weight_decay: AdamW's.
        schedule: one of ``SCHEDULES``.
        warmup: steps over which the learning rate rises.
        clip: bound on the norm of the gradient, or None.
        seed: of the order of the rows and of dropout.
        every: epochs between evaluations.
        rows: how many rows the data have.
    """

    epochs: int
    batch_size: int
    lr: float | int
    weight_decay: float | int
    schedule: str
    warmup: int
    clip: float | int | None
    seed: int
    every: int
    rows: int

    def __post_init__(self) -> None:
        """Check every number, and make them plain ones: a checkpoint holds no NumPy scalars."""
        for name in ("epochs", "batch_size", "every"):
            setattr(self, name, checks.positive_int(name, getattr(self, name)))
        self.warmup = checks.positive_int("warmup", self.warmup, minimum=0)
        self.seed = checks.seed(self.seed)
        self.lr = number("lr", self.lr, above=True)
        self.weight_decay = number("weight_decay", self.weight_decay)
        self.clip = None if self.clip is None else number("clip", self.clip, above=True)
        checks.one_of("schedule", self.schedule, SCHEDULES)
        if self.warmup >= self.total:
            raise ValueError(f"warmup must be below the run's {self.total} steps, but is {self.warmup}")

    @property
    def steps(self) -> int:
        """How many batches an epoch has; the last may be smaller."""
        return -(-self.rows // self.batch_size)

    @property
    def total(self) -> int:
        """How many steps the run has unless it is stopped."""
        return self.epochs * self.steps

    @property
    def sizes(self) -> list[int]:
        """How many rows each batch of an epoch has."""
        last = self.rows - self.batch_size * (self.steps - 1)
        return [self.batch_size] * (self.steps - 1) + [last]

    def rate(self, step: int) -> float:
        """Return the learning rate at one step.

        Args:
            step: the step, from 0 over all epochs.

        Returns:
            ``lr`` times the schedule's factor.
        """
        return self.lr * rate(step, self.total, self.schedule, self.warmup)


def rows(data: Any) -> int:
    """Require tensors with the same number of rows.

    Args:
        data: one or more tensors with at least one dimension; floating-point ones must be finite.

    Returns:
        How many rows they have.

    Raises:
        TypeError: ``data`` is no sequence of tensors.
        ValueError: no rows, different numbers of rows, or an entry that is NaN or infinite.
    """
    if isinstance(data, Tensor) or not isinstance(data, Sequence) or not data:
        raise TypeError(f"data must be a sequence of one or more tensors, but is {checks.describe(data)}")
    for i, each in enumerate(data):
        if not isinstance(each, Tensor):
            raise TypeError(f"data[{i}] must be a torch tensor, but is {checks.describe(each)}")
        if each.ndim == 0 or len(each) == 0:
            raise ValueError(f"data[{i}] must have one or more rows, but is {checks.describe(each)}")
        if len(each) != len(data[0]):
            raise ValueError(
                f"data[{i}] must have {len(data[0])} rows as data[0] has, but is {checks.describe(each)}"
            )
        if each.is_floating_point():
            checks.finite(f"data[{i}]", each)
    return len(data[0])


def settings(plan: Plan, model: nn.Module, data: Sequence[Tensor]) -> dict[str, Any]:
    """Return what a run and the checkpoint that it resumes from must agree in.

    Args:
        plan: the run's numbers.
        model: its description as printed counts, its modules' plain attributes, and its weights' names,
            dtypes and shapes.
        data: every bit of it counts.

    Returns:
        The plan's numbers, and a digest each of the architecture and of the data.
    """
    architecture = checkpoints.digest({_described(model): torch.empty(0)})
    content = checkpoints.digest({str(i): each for i, each in enumerate(data)})
    return {**asdict(plan), "architecture": architecture[:16], "data": content[:16]}


def _described(model: nn.Module) -> str:
    """Return all that can be said of a module in words; an address in memory says nothing."""
    lines = [re.sub(r" at 0x[0-9a-f]+", "", repr(model))]
    for name, module in model.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str | None)}
        lines.append(f"{name} { {k: v for k, v in plain.items() if k != 'training' and k[0] != '_'} }")
    weights = [f"{name} {each.dtype} {tuple(each.shape)}" for name, each in model.state_dict().items()]
    return "\n".join(lines + weights)
