"""Figure 3: trajectories of two tokens under one trained layer, applied to its own output (section 8).

The paper draws one run of each of nine modules: SAN, SAN+MLP and SAN+skip at hidden sizes 32, 64 and 128.
Here each has several seeds, LayerNorm on (``"post"``, as in the authors' code) and off, and beside the
trajectories what explains them: by what factor an error on the circle grows in one step, and by what power
a small distance of the two tokens goes into the next.

Decisions of ours.  (1) All are trained alike, with AdamW at 1e-3 on a cosine, without weight decay.  (2) The
authors' code keeps the layer's own skip in its SAN, starts at small weights and trains at 1e-5, constant:
``"authors"`` does so; the other variants leave out one or two of the three, so that all eight combinations
are there.  (3) Training is in float32, unrolling in float64: the tokens come closer than float32 resolves.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from rc_lib import results, training
from rc_lib.experiments import Arrays, Context, Experiment, Settings, Unit
from rc_lib.tasks import two_arcs
from rc_lib.tasks.two_arcs import NextPoint

# What a variant changes: the module's switches, and the training.
_RATE = {"lr": 1e-5, "schedule": "constant"}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SAN": ({}, {}),
    "SAN+MLP": ({"mlp": True}, {}),
    "SAN+skip": ({"skip": True}, {}),
    "small start": ({"init": "bert"}, {}),
    "small rate": ({}, _RATE),
    "small start and rate": ({"init": "bert"}, _RATE),
    "inner skip": ({"inner_skip": True}, {}),
    "inner skip, small start": ({"inner_skip": True, "init": "bert"}, {}),
    "inner skip, small rate": ({"inner_skip": True}, _RATE),
    "authors": ({"inner_skip": True, "init": "bert"}, _RATE),
}
PAPER = ("SAN", "SAN+MLP", "SAN+skip")
APART = tuple(
    name for name in VARIANTS if name not in PAPER
)  # the authors' three ingredients, in all mixtures

_TRAINING = {"epochs": 60, "batch_size": 16, "lr": 1e-3, "schedule": "cosine"}

PRESETS: dict[str, Settings] = {
    "quick": {
        **_TRAINING,
        "steps": 300,
        "grid": [{"norm": "post", "variants": list(PAPER), "dims": [32]}],
    },
    "paper": {
        **_TRAINING,
        "steps": 300,
        "grid": [
            {"norm": "post", "variants": list(PAPER), "dims": [32, 64, 128]},
            {"norm": "none", "variants": list(PAPER), "dims": [32, 64, 128]},
            {"norm": "post", "variants": list(APART), "dims": [32, 64, 128]},
        ],
    },
}

# Values of a roll-out that ended early, or of an event that did not happen.
NEVER = -1


def kept_steps(steps: int) -> np.ndarray:
    """Return the steps whose states are stored: all of the first 40, then every fourth.

    Args:
        steps: the roll-out's length.

    Returns:
        Increasing integers from 0.
    """
    return np.concatenate([np.arange(min(40, steps + 1)), np.arange(40, steps + 1, 4)])


def units(settings: Settings) -> list[Unit]:
    """Cut the experiment: one unit is one training.

    Args:
        settings: a preset with its seeds.

    Returns:
        Units with keys ``variant``, ``norm``, ``dim`` and ``seed``.
    """
    return [
        {"variant": variant, "norm": part["norm"], "dim": dim, "seed": seed}
        for part in settings["grid"]
        for variant in part["variants"]
        for dim in part["dims"]
        for seed in settings["seeds"]
    ]


def train(settings: Settings, unit: Unit, context: Context | None = None) -> tuple[NextPoint, float]:
    """Train one module.

    Args:
        settings: a preset.
        unit: one of ``units``.
        context: where, and what to resume from; on the CPU with nothing to resume unless given.

    Returns:
        The module, in float64 on the CPU, and its mean squared error.
    """
    context = context or Context()
    switches, changes = VARIANTS[unit["variant"]]
    model = NextPoint(unit["dim"], norm=unit["norm"], seed=unit["seed"], **switches)
    chosen = {key: changes.get(key, settings[key]) for key in _TRAINING}
    training.fit(
        model,
        two_arcs.loss,
        two_arcs.pairs(),
        weight_decay=0.0,
        seed=unit["seed"],
        device=context.device,
        checkpoint=context.checkpoint,
        progress=context.progress,
        **chosen,
    )
    model = model.cpu().double()
    with torch.no_grad():
        return model, float(two_arcs.loss(model, *two_arcs.pairs(dtype=torch.float64)))


def measure(model: nn.Module, steps: int) -> Arrays:
    """Unroll a trained module and measure what explains its trajectories.

    Args:
        model: a ``NextPoint`` in float64, or any map of states with parameters.
        steps: how often it is applied.

    Returns:
        ``states`` ``[kept, 2, 2]`` and ``distance`` ``[steps+1]``, NaN after a divergence; the steps
        ``merged``, ``left`` (the circle, as opposite points) and ``diverged``, or ``NEVER``;
        ``first_error``, the distance of the first state from the right one; ``growth`` ``[4]``, of an error
        on the circle in one step, and its parts ``middle_growth`` and ``difference_growth`` ``[2]``;
        ``scale_growth``, its median along the arcs; ``order``.
    """
    run = two_arcs.unroll(model, steps)
    states, far = np.full((steps + 1, 2, 2), np.nan), np.full(steps + 1, np.nan)
    states[: len(run.states)], far[: len(run.states)] = run.states.numpy(), run.distance.numpy()
    events = {"merged": run.merged, "left": run.left(), "diverged": run.diverged}
    J = two_arcs.jacobians(model)
    blocks = {"growth": J, "middle_growth": J[:, :2, :2], "difference_growth": J[:, 2:, 2:]}
    found: dict[str, Any] = {
        "states": states[kept_steps(steps)],
        "distance": far,
        "first_error": float((run.states[1] - two_arcs.arcs()[1]).norm()) if len(run.states) > 1 else np.nan,
        **{name: two_arcs.error_growth(block).numpy() for name, block in blocks.items()},
        "scale_growth": float(two_arcs.scale_growth(model).median()),
        "order": two_arcs.collapse_order(model),
    }
    arrays = {name: np.asarray(value, dtype=np.float32) for name, value in found.items()}
    return arrays | {name: np.array(NEVER if step is None else step) for name, step in events.items()}


def run_unit(settings: Settings, unit: Unit, context: Context | None = None) -> Arrays:
    """Train one module and measure it.

    Args:
        settings: a preset with its seeds.
        unit: one of ``units(settings)``.
        context: device, checkpoint and progress bar of the training.

    Returns:
        ``measure``'s arrays and ``loss``.
    """
    model, loss = train(settings, unit, context)
    return {"loss": np.array(loss), **measure(model, settings["steps"])}


def combine(
    settings: Settings, units: Sequence[Unit], parts: Sequence[Arrays]
) -> tuple[Arrays, dict[str, Any]]:
    """Stack the units of one variant, norm and hidden size along a first axis, the seeds.

    Args:
        settings: a preset with its seeds.
        units: ``units(settings)``.
        parts: what ``run_unit`` returned for each.

    Returns:
        Arrays ``VARIANT/NORM/DIM/FIELD``: ``[seeds, ...]``, and what their axes are.
    """
    stacks: dict[str, list[np.ndarray]] = {}
    for unit, part in zip(units, parts, strict=True):
        for field, value in part.items():
            key = f"{unit['variant']}/{unit['norm']}/{unit['dim']}/{field}"
            stacks.setdefault(key, []).append(value)
    axes = {
        "states": "seed, kept step, token, coordinate",
        "distance": "seed, step",
        "growth, middle_growth, difference_growth": "seed, factors per step in falling order",
        "merged, left, diverged": "seed; -1: never",
        "other fields": "seed",
    }
    return {key: np.stack(values) for key, values in stacks.items()}, {"axes": axes}


def field(result: results.Result, variant: str, norm: str, dim: int, name: str) -> np.ndarray:
    """Return one field of a stored result.

    Args:
        result: a stored figure 3.
        variant: a key of ``VARIANTS``.
        norm: ``"post"`` or ``"none"``.
        dim: the hidden size.
        name: a field of ``run_unit``.

    Returns:
        ``[seeds, ...]``; numbers as float64, steps as integers.

    Raises:
        ValueError: the result has no such field; the message lists what it has.
    """
    key = f"{variant}/{norm}/{dim}/{name}"
    if key not in result.arrays:
        known = sorted({each.rpartition("/")[0] for each in result.arrays})
        raise ValueError(f"{key!r} is not stored; there is {', '.join(known)}")
    values = result.arrays[key]
    return values.astype(float) if values.dtype.kind == "f" else values


def predicted_stay(first_error: np.ndarray, growth: np.ndarray, tolerance: float = 0.1) -> np.ndarray:
    """Return how many steps a module should stay on the circle, from one step's error and its growth.

    Args:
        first_error: error of the first step, ``[...]``.
        growth: factor by which an error grows in a step, ``[...]``.
        tolerance: share of the radius that counts as off the circle.

    Returns:
        ``1 + log(tolerance · radius / first_error) / log(growth)``; infinite where nothing grows.
    """
    with np.errstate(divide="ignore"):
        ratio = np.log(tolerance * two_arcs.RADIUS / first_error) / np.log(np.maximum(growth, 1.0))
    return 1 + np.maximum(ratio, 0.0)


def _steps(values: np.ndarray) -> str:
    return " ".join("-" if value == NEVER else str(value) for value in values)


def describe(result: results.Result) -> str:
    """Return losses, merging and divergence of every module, as text.

    Args:
        result: a stored figure 3.

    Returns:
        A table with one line per variant, norm and hidden size; a dash stands for never.
    """
    lines = [
        "variant/norm/d: largest loss, growth of an error per step; step of merging | divergence by seed"
    ]
    for key in result.arrays:
        name, _, last = key.rpartition("/")
        if last == "loss":
            loss, growth = result.arrays[key].max(), np.median(result.arrays[f"{name}/growth"][:, 0])
            merged, diverged = (_steps(result.arrays[f"{name}/{event}"]) for event in ("merged", "diverged"))
            lines.append(f"  {name:20} {loss:8.1e} {growth:6.2f}   {merged} | {diverged}")
    return "\n".join(lines)


EXPERIMENT = Experiment(
    name="two_arcs",
    about="trajectories of two tokens under a trained layer applied to its own output",
    presets=PRESETS,
    units=units,
    run_unit=run_unit,
    combine=combine,
    weight=lambda unit: (1.0 + unit["dim"] / 128) * (2.0 if "MLP" in unit["variant"] else 1.0),
    describe=describe,
)
