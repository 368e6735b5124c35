"""What the three experiments of figure 4 have in common: train on a task, then ask which path lengths answer.

One unit of work is one seed: its data, its weights, its order of batches and its draws of paths all come from
that seed.  ``choices`` in the settings is a dictionary of named variants of the training, each a dictionary
that overrides other settings; a preset that tries one way of training has one choice, ``"ours"``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.functional import cross_entropy

from rc_lib import path_effectiveness, results, training
from rc_lib.experiments.interface import Arrays, Context, Experiment, Settings, Unit
from rc_lib.tasks import Task
from rc_lib.token_classifier import TokenClassifier, for_task

#: How every network is trained unless a preset says otherwise.
TRAINING = {
    "schedule": "cosine",
    "warmup": 40,
    "clip": 1.0,
    "weight_decay": 0.01,
    "dropout": 0.0,
    "gain": 0.3,
    "init_std": 0.02,
    "norm": "post",
    "affine": False,
}

#: The lines that figure 4 compares the paths with.
BASELINES = ("chance", "majority", "ceiling")


def loss(model: TokenClassifier, inputs: Tensor, labels: Tensor, real: Tensor) -> Tensor:
    """Return the mean cross-entropy over the real tokens of a batch.

    Args:
        model: the network.
        inputs: ``[N, n]`` or ``[N, n, c]``.
        labels: ``[N, n]``.
        real: ``[N, n]``.

    Returns:
        A scalar, nats per token.
    """
    n = int(real.any(0).sum())  # padding beyond the batch's longest set costs time and changes nothing
    inputs, labels, real = inputs[:, :n], labels[:, :n], real[:, :n]
    return cross_entropy(model(inputs, real)[real], labels[real])


def build(settings: Settings, task: Task, seed: int) -> TokenClassifier:
    """Return the untrained network of a preset.

    Args:
        settings: a preset, with a choice's overrides applied.
        task: the data.
        seed: of the weights.

    Returns:
        A float32 network.
    """
    sizes = (settings[key] for key in ("depth", "heads", "dim"))
    switches = {key: settings[key] for key in ("norm", "dropout", "affine", "gain", "init_std")}
    return for_task(task, *sizes, seed=seed, **switches)


def train(
    settings: Settings, task: Task, seed: int, context: Context | None = None
) -> tuple[TokenClassifier, training.History]:
    """Train a preset's network on a task.

    Args:
        settings: a preset, with a choice's overrides applied.
        task: the data.
        seed: of the weights, the batches and the dropout.
        context: where to compute and where to keep the checkpoint.

    Returns:
        The trained network, in evaluation mode and on the context's device, and its history with
        the loss of every epoch and, every ``every`` epochs, the accuracy on the test set.
    """
    context = context or Context()
    model = build(settings, task, seed).to(context.device)
    test = task.test.to(context.device)
    data = task.train.to(context.device)
    keys = ("epochs", "batch_size", "lr", "weight_decay", "schedule", "warmup", "clip", "every")
    history = training.fit(
        model,
        loss,
        (data.inputs, data.labels, data.real),
        **{key: settings[key] for key in keys},
        seed=seed,
        device=context.device,
        metrics=lambda model: {"accuracy": path_effectiveness.accuracy(model, test)},
        checkpoint=context.checkpoint,
        progress=context.progress,
    )
    return model, history


def measure(settings: Settings, model: TokenClassifier, task: Task, seed: int) -> Arrays:
    """Measure both protocols on a trained network.

    Args:
        settings: a preset: ``paths`` (counts of paths), ``repeats`` and ``sampled_sets``, the number of test
            sets that the sampled protocols look at (None: all).
        model: the trained network.
        task: the data.
        seed: of the draws of paths.

    Returns:
        ``sampled`` and ``sampled_frozen`` ``[counts, L+1, repeats]``; ``alone``, ``cumulative``,
        ``leave_one_out``, ``norms`` and ``residuals`` ``[L+1]``; scalars ``train_accuracy``,
        ``test_accuracy``, ``bias``, ``reconstruction`` and those of ``BASELINES``.
    """
    some = task.test.take(slice(0, settings["sampled_sets"]))
    draws = {"paths": settings["paths"], "repeats": settings["repeats"], "seed": seed}
    arrays = {
        "sampled": path_effectiveness.sampled(model, some, **draws).numpy(),
        "sampled_frozen": path_effectiveness.sampled(model, some, **draws, frozen=True).numpy(),
        "train_accuracy": path_effectiveness.accuracy(model, task.train),
    }
    spectrum = path_effectiveness.exact(model, task.test)
    for key in ("alone", "cumulative", "leave_one_out", "norms", "residuals"):
        arrays[key] = getattr(spectrum, key).numpy()
    arrays |= {"test_accuracy": spectrum.full, "bias": spectrum.bias}
    arrays["reconstruction"] = spectrum.reconstruction
    arrays |= {key: getattr(task, key) for key in BASELINES}
    return {key: np.asarray(value, dtype=np.float64) for key, value in arrays.items()}


def chosen(settings: Settings, choice: str) -> dict[str, Any]:
    """Return the settings with one choice's overrides applied.

    Args:
        settings: a preset.
        choice: a key of its ``choices``.

    Returns:
        A flat dictionary.

    Raises:
        ValueError: no such choice.
    """
    if choice not in settings["choices"]:
        raise ValueError(f"choice={choice!r}: there is {', '.join(settings['choices'])}")
    return {**settings, **settings["choices"][choice]}


def units(settings: Settings) -> list[Unit]:
    """Return one unit for each choice of training and seed.

    Args:
        settings: a preset with its seeds.

    Returns:
        ``{"choice": ..., "seed": ...}`` each.
    """
    return [{"choice": choice, "seed": seed} for choice in settings["choices"] for seed in settings["seeds"]]


def unit_runner(make: Callable[..., Task], settings: Settings, unit: Unit, context: Context) -> Arrays:
    """Train and measure one seed; an experiment's ``run_unit`` is this with its task.

    Args:
        make: the task's ``make``.
        settings: a preset with its seeds; ``data`` holds the arguments of ``make``.
        unit: one of ``units(settings)``.
        context: where to compute.

    Returns:
        The arrays of ``measure``, with ``loss`` ``[epochs]``, ``curve`` ``[2, measurements]`` (epoch and test
        accuracy) and ``seconds``, the time of the training.
    """
    settings, seed = chosen(settings, unit["choice"]), unit["seed"]
    task = make(seed=seed, **settings["data"])
    model, history = train(settings, task, seed, context)
    arrays = measure(settings, model, task.to(context.device), seed)
    curve = [history.metrics["epoch"], history.metrics["accuracy"]]
    return arrays | {
        "loss": np.array(history.loss, dtype=np.float32),
        "curve": np.array(curve, dtype=np.float32),
        "seconds": np.array(history.seconds),
    }


def combine(
    settings: Settings, units: Sequence[Unit], parts: Sequence[Arrays]
) -> tuple[Arrays, dict[str, Any]]:
    """Stack the seeds of each choice along a first axis.

    Args:
        settings: a preset with its seeds.
        units: ``units(settings)``.
        parts: what ``run_unit`` returned for each.

    Returns:
        Arrays ``CHOICE/NAME`` with a first axis of seeds, and what the axes are.
    """
    stacks: dict[str, list[np.ndarray]] = {}
    for unit, part in zip(units, parts, strict=True):
        for name, values in part.items():
            stacks.setdefault(f"{unit['choice']}/{name}", []).append(values)
    axes = {"sampled": "seed, count of paths, length, repeat", "alone": "seed, length", "curve": "seed, ..."}
    return {key: np.stack(values) for key, values in stacks.items()}, {"axes": axes}


def stored(result: results.Result, choice: str = "ours") -> Arrays:
    """Return one choice's arrays of a stored result, by their plain names.

    Args:
        result: of one of the three experiments.
        choice: a key of its settings' ``choices``.

    Returns:
        The arrays of ``unit_runner`` with a first axis of seeds.

    Raises:
        ValueError: the result holds no such choice.
    """
    chosen(result.settings, choice)
    return {
        key.partition("/")[2]: value for key, value in result.arrays.items() if key.startswith(f"{choice}/")
    }


def describe(result: results.Result) -> str:
    """Return both protocols' accuracies by length, averaged over the seeds, as text.

    Args:
        result: of one of the three experiments.

    Returns:
        A table for each choice of training.
    """

    def row(name: str, values: np.ndarray) -> str:
        return f"  {name:22}" + " ".join(f"{value:6.3f}" for value in values)

    lines = []
    for choice in result.settings["choices"]:
        found = stored(result, choice)
        mean = {key: found[key].mean(0) for key in found}
        lines.append(
            f"{choice}: test accuracy {mean['test_accuracy']:.4f}, training {mean['train_accuracy']:.4f} "
            f"(ceiling {mean['ceiling']:.4f}, majority {mean['majority']:.4f}, chance {mean['chance']:.2f}), "
            f"{mean['seconds']:.0f} s of training a seed; by path length 0, 1, ...:"
        )
        for i, count in enumerate(result.settings["paths"]):
            lines.append(row(f"sampled, {count} paths", mean["sampled"][i].mean(-1)))
        lines += [row(name, mean[name]) for name in ("alone", "cumulative", "leave_one_out")]
    return "\n".join(lines)


def experiment(
    name: str,
    about: str,
    presets: Mapping[str, Settings],
    run_unit: Callable[[Settings, Unit, Context], Arrays],
) -> Experiment:
    """Return a task's experiment.

    Args:
        name: the experiment's name.
        about: one line for ``list``.
        presets: settings by scale, each with what ``TRAINING`` leaves open.
        run_unit: ``unit_runner`` with the task's ``make``, at the top level of a module.

    Returns:
        What the runner needs.
    """
    complete = {
        scale: {"choices": {"ours": {}}, **TRAINING, **settings} for scale, settings in presets.items()
    }
    return Experiment(
        name=name,
        about=about,
        presets=complete,
        units=units,
        run_unit=run_unit,
        combine=combine,
        describe=describe,
    )
