"""Section 8: one training loop for every experiment; killed at any moment, it goes on as if nothing had been.

A run depends on its arguments alone: the rows are shuffled by a generator of their own, dropout draws from
torch's global one, which is seeded inside and given back as it was. A checkpoint holds the weights, the
optimiser's moments, the position in the schedule and both generators' states, so a resumed run ends with the
same bits as one that was left in peace (same machine, same number of threads).
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from rc_lib import checkpoints, checks, generators, training_plan
from rc_lib.training_plan import Plan

Loss = Callable[..., Tensor]
Metrics = Callable[[nn.Module], dict[str, float]]
Stop = Callable[[dict[str, float]], bool]

# A loss on another device is read so many steps late: to read it at once would make the device wait.
READ_EVERY = 64


class DivergedError(FloatingPointError):
    """The loss or a weight is no longer a finite number; the message says at which step."""


@dataclass
class History:
    """What happened in a training run, in plain numbers.

    Attributes:
        loss: mean training loss of each epoch, over its rows, as measured while the weights moved.
        metrics: lists of equal length by name; ``"epoch"`` says after how many epochs they were measured.
        seconds: time spent training, that of interrupted attempts up to their last checkpoint included;
            left out when two histories are compared.
        epochs: how many epochs were run.
        stopped: whether ``stop`` ended the run.
    """

    loss: list[float] = field(default_factory=list)
    metrics: dict[str, list[float | int]] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)
    epochs: int = 0
    stopped: bool = False


def _trained(model: Any) -> list[nn.Parameter]:
    """Return the parameters to train, or refuse the model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, but is {checks.describe(model)}")
    found = [each for each in model.parameters() if each.requires_grad]
    if not found:
        raise ValueError("model has no parameter that requires a gradient: there is nothing to train")
    name = _not_finite(model)
    if name is not None:
        raise ValueError(f"model must hold finite weights, but {name} has NaN or infinite ones")
    return found


def _not_finite(model: nn.Module) -> str | None:
    """Return the name of the first parameter that holds NaN or infinity; the device is asked once."""
    names = dict(model.named_parameters())
    good = torch.stack([torch.isfinite(each).all() for each in names.values()]).tolist()
    return next((name for name, fine in zip(names, good, strict=True) if not fine), None)


def _device(device: str | torch.device | None, parameters: Sequence[Tensor]) -> torch.device:
    """Return where to train, or refuse a device that is not there."""
    if device is None:
        return parameters[0].device
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"device={str(device)!r} cannot be used here: {reason}") from error


class _Run:
    """A run's state: what a checkpoint holds, and the steps that change it."""

    def __init__(self, model: nn.Module, data: Sequence[Tensor], plan: Plan, device: torch.device) -> None:
        self.model, self.plan, self.device = model, plan, device
        self.data = [each.to(device) for each in data]
        self.initial = checkpoints.digest(model.state_dict())
        self.parameters = _trained(model)
        fused = True if device.type in ("cpu", "cuda") else None
        self.optimiser = torch.optim.AdamW(
            self.parameters, lr=plan.lr, weight_decay=plan.weight_decay, fused=fused
        )
        self.history = History()
        self.epoch, self.batch = 0, 0
        self.losses: list[float] = []
        self.unread: list[Tensor] = []
        self.order = torch.Generator().manual_seed(plan.seed)
        generators.seed(device, int(torch.randint(2**62, (), generator=self.order)))
        self.begin_epoch()

    @property
    def finished(self) -> bool:
        return self.history.stopped or self.epoch == self.plan.epochs

    def begin_epoch(self) -> None:
        self.shuffle = self.order.get_state()
        self.rows = torch.randperm(self.plan.rows, generator=self.order).to(self.device)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "initial": self.initial,
            "history": vars(self.history),
            "position": [self.epoch, self.batch],
            "losses": self.losses,
            "shuffle": self.shuffle,
            "dropout": generators.states(self.device),
        }

    def restore(self, state: dict[str, Any], path: Path) -> None:
        if self.initial not in (state["initial"], checkpoints.digest(state["model"])):
            raise checkpoints.CheckpointError(
                f"{path} was begun with other initial weights than the model has now; "
                "build the model afresh from the same seed, give another file or delete it"
            )
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.initial = state["initial"]
        self.history = History(**state["history"])
        self.epoch, self.batch = state["position"]
        self.losses = list(state["losses"])
        self.order.set_state(state["shuffle"])
        self.begin_epoch()
        generators.set_states(self.device, state["dropout"])

    def step(self, loss: Loss) -> None:
        """Draw the next batch and move the weights."""
        plan, number = self.plan, self.epoch * self.plan.steps + self.batch
        for group in self.optimiser.param_groups:
            group["lr"] = plan.rate(number)
        rows = self.rows[self.batch * plan.batch_size : (self.batch + 1) * plan.batch_size]
        value = _scalar(loss(self.model, *(each.index_select(0, rows) for each in self.data)))
        self.unread.append(value.detach())
        if self.device.type == "cpu" or len(self.unread) == READ_EVERY:
            self.read()
        self.optimiser.zero_grad(set_to_none=True)
        value.backward()
        if plan.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, plan.clip)
        self.optimiser.step()
        self.batch += 1

    def read(self) -> None:
        """Take the losses off the device and refuse the first that is not finite."""
        new = torch.stack(self.unread).tolist() if self.unread else []
        self.unread.clear()
        for value in new:
            if not math.isfinite(value):
                raise DivergedError(f"the loss is {value} at {self.where(len(self.losses))}")
            self.losses.append(value)

    def where(self, batch: int) -> str:
        number = self.epoch * self.plan.steps + batch
        return f"step {number + 1} of {self.plan.total} (epoch {self.epoch + 1}, batch {batch + 1})"

    def check_weights(self) -> None:
        """Refuse to keep weights that are not finite."""
        self.read()
        name = _not_finite(self.model)
        if name is not None:
            raise DivergedError(f"{name} holds NaN or infinite weights after {self.where(self.batch - 1)}")

    def end_epoch(self, metrics: Metrics | None, stop: Stop | None) -> None:
        self.check_weights()
        plan = self.plan
        total = math.fsum(size * value for size, value in zip(plan.sizes, self.losses, strict=True))
        self.history.loss.append(total / plan.rows)
        self.epoch, self.batch, self.losses = self.epoch + 1, 0, []
        self.history.epochs = self.epoch
        if self.epoch % plan.every == 0 or self.epoch == plan.epochs:
            self.measure(metrics, stop)
        self.begin_epoch()

    def measure(self, metrics: Metrics | None, stop: Stop | None) -> None:
        """Evaluate, with dropout off and generators of its own, and ask whether to stop."""
        found: dict[str, float] = {"epoch": self.epoch}
        if metrics is not None:
            found |= _evaluated(self.model, metrics, self.device)
            kept = self.history.metrics or {name: [] for name in found}
            if kept.keys() != found.keys():
                raise ValueError(f"metrics must return the same names each time: {list(kept)}, {list(found)}")
            self.history.metrics = {name: [*kept[name], found[name]] for name in found}
        if stop is not None:
            self.history.stopped = bool(stop({**found, "loss": self.history.loss[-1]}))


def _scalar(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.ndim != 0 or not value.requires_grad:
        raise ValueError(
            "loss must return a scalar tensor that depends on the model's parameters, "
            f"but returned {checks.describe(value)}"
        )
    return value


def _numbers(answer: Any) -> dict[str, float]:
    """Return what ``metrics`` answered as plain numbers by name, or refuse it."""
    try:
        if any(isinstance(text, str) for text in answer.values()):
            raise TypeError("float would read a text")
        return {name: float(value) for name, value in answer.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        told = checks.describe(answer)
        raise TypeError(f"metrics must return a dict of numbers, but returned {told}") from error


def _evaluated(model: nn.Module, metrics: Metrics, device: torch.device) -> dict[str, float]:
    model.eval()
    with torch.no_grad(), generators.lent(device):
        found = _numbers(metrics(model))
    if {"epoch", "loss"} & found.keys():
        raise ValueError("metrics must not be called 'epoch' or 'loss': these are the loop's own")
    return found


def fit(
    model: nn.Module,
    loss: Loss,
    data: Sequence[Tensor],
    *,
    epochs: int,
    batch_size: int,
    lr: float | int = 1e-3,
    weight_decay: float | int = 0.01,
    schedule: str = "constant",
    warmup: int = 0,
    clip: float | int | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    metrics: Metrics | None = None,
    every: int = 1,
    stop: Stop | None = None,
    checkpoint: str | Path | None = None,
    save_seconds: float | int = 5.0,
    progress: bool = False,
) -> History:
    """Train a model in place with AdamW.

    Args:
        model: any module; it ends on ``device`` and in evaluation mode.
        loss: from the model and a batch (one tensor for each in ``data``) to a scalar, its mean over the
            batch's rows.
        data: tensors with the same number of rows, which are drawn together in a new order every epoch.
        epochs: how often every row is drawn.
        batch_size: rows in a step; an epoch's last batch may have fewer.
        lr: learning rate.
        weight_decay: AdamW's, on every parameter.
        schedule: ``"constant"``, ``"cosine"`` or ``"linear"``, see ``training_plan.rate``.
        warmup: steps over which the learning rate rises linearly.
        clip: bound on the norm of the gradient of all parameters together.
        seed: of the order of the rows and of dropout; the initial weights are the model's own.
        device: where to train; where the model's parameters are unless given.
        metrics: evaluated in evaluation mode, without gradients; what it draws from torch's global
            generator changes nothing in the training.
        every: epochs between evaluations; there is one after the last epoch too.
        stop: asked after every evaluation, with its numbers, ``"loss"`` (that epoch's) and ``"epoch"``
            beside them; an answer of True ends the run.
        checkpoint: a file to resume from and to save to: at the start, every ``save_seconds`` and at the
            end. Once the run has finished, a further call gives the finished state at once.
        save_seconds: seconds between checkpoints, also within an epoch; 0 saves after every step.
        progress: whether to draw a bar with an estimate of the time that is left on the error stream.

    Returns:
        The losses and metrics.

    Raises:
        TypeError: an argument, or what ``metrics`` returns, is of the wrong kind; the message names it.
        ValueError: an argument's value is out of range, data holds NaN or infinity, nothing can be trained,
            ``loss`` returns no scalar, or the names of the metrics change.
        DivergedError: the loss or a weight became NaN or infinite; the last checkpoint is kept.
        CheckpointError: the checkpoint is damaged, or of other settings, data, architecture or weights.
            The functions ``loss``, ``metrics`` and ``stop`` are not compared.
        ResultError: a checkpoint cannot be written; the one before is untouched.
    """
    rows = training_plan.rows(data)
    plan = Plan(epochs, batch_size, lr, weight_decay, schedule, warmup, clip, seed, every, rows)
    save_seconds = training_plan.number("save_seconds", save_seconds)
    checks.boolean("progress", progress)
    if not (checkpoint is None or isinstance(checkpoint, str | Path)) or checkpoint == "":
        raise TypeError(f"checkpoint must be a file's path, but is {checks.describe(checkpoint)}")
    for name, value in {"loss": loss, "metrics": metrics, "stop": stop}.items():
        if not callable(value) and (value is not None or name == "loss"):
            raise TypeError(f"{name} must be a function, but is {checks.describe(value)}")
    where = _device(device, _trained(model))
    model.to(where)
    settings = training_plan.settings(plan, model, data) if checkpoint is not None else {}
    saver = _Saver(checkpoint, settings, save_seconds)
    with generators.lent(where):
        run = _Run(model, data, plan, where)
        saver.resume(run)
        _train(run, loss, metrics, stop, saver, progress)
    return run.history


class _Saver:
    """Saves a run now and then, and knows how to go on from what it saved."""

    def __init__(self, path: str | Path | None, settings: dict[str, Any], seconds: float) -> None:
        self.path = None if path is None else Path(path)
        self.settings, self.seconds = settings, seconds
        self.started = self.last = time.monotonic()
        self.before = 0.0

    def resume(self, run: _Run) -> None:
        if self.path is None:
            return
        checkpoints.sweep(self.path)
        state = checkpoints.load(self.path, self.settings)
        if state is None:
            self.save(run)  # a folder that cannot be written to is told now, not when there is much to lose
        else:
            run.restore(state, self.path)
            self.before = run.history.seconds

    def save(self, run: _Run) -> None:
        run.history.seconds = self.before + time.monotonic() - self.started
        if self.path is not None:
            run.check_weights()
            checkpoints.save(self.path, self.settings, run.state())
        self.last = time.monotonic()

    def tick(self, run: _Run) -> None:
        if self.path is not None and time.monotonic() - self.last >= self.seconds:
            self.save(run)


def _train(
    run: _Run, loss: Loss, metrics: Metrics | None, stop: Stop | None, saver: _Saver, progress: bool
) -> None:
    """Step until the run is finished; the model is in evaluation mode afterwards, whatever happens."""
    plan, done = run.plan, run.epoch * run.plan.steps + run.batch
    bar = tqdm(total=plan.total, initial=done, unit="step", file=sys.stderr, disable=not progress)
    try:
        with bar:
            while not run.finished:
                run.model.train()
                while run.batch < plan.steps:
                    run.step(loss)
                    bar.update()
                    if run.batch < plan.steps:
                        saver.tick(run)
                run.end_epoch(metrics, stop)
                bar.set_postfix(epoch=run.epoch, loss=f"{run.history.loss[-1]:.3g}", refresh=False)
                saver.save(run) if run.finished else saver.tick(run)
    finally:
        run.model.eval()
