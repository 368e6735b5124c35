"""Figure 2: relative residual against depth in real transformers, and every rank metric (section 8).

BERT, ALBERT and XLNet at random initialisation, as in the paper's upper row; MiniLM and SmolLM2 trained
and at random initialisation, where the paper's lower row has weights that need a network.

Decisions of ours. (1) One seed is one set of weights, and the four variants of a model are measured on
the same weights and text, so that they differ by the ablation alone; the paper draws new weights for
every curve (its curves differ at layer 0 already). (2) Variants without skip run in float64, for their
residuals fall below what float32 resolves; the weights are the same, drawn in float32 and widened.
Variants with skip run in float32, and so does everything at scale "quick". (3) The text is not the
paper's, and for models at random initialisation it need not be: see ``rc_lib.corpus``.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rc_lib import data, norms, pretrained, rank, results
from rc_lib.experiments import Arrays, Context, Experiment, Settings, Unit

# The models of the paper's figure, and their names in it.
PAPER = {"bert-base": "BERT", "albert-base": "ALBERT", "xlnet-base": "XLNet"}

METRICS: dict[str, Callable[[Tensor], Tensor]] = {
    **rank.METRICS,
    "relative residual about the median": lambda X: rank.relative_residual(X, center="median"),
    "residual": lambda X: norms.composite_norm(rank.residual(X)),
}

# Relative cost of one unit: layers times width squared, for the estimate of the time left.
_WEIGHT = {"bert-base": 10.0, "albert-base": 10.0, "xlnet-base": 13.0, "minilm": 2.0, "smollm2": 20.0}

_SPREAD = {
    "random": ["bert-base", "albert-base", "xlnet-base"],
    "trained": [],
    "variants": ["SAN+skip", "transformer"],
    "excerpts": 4,
    "tokens": 128,
    "metric_excerpts": 0,
    "float64": False,
}

PRESETS = {
    "quick": {
        "random": ["bert-base", "albert-base", "xlnet-base", "minilm"],
        "trained": ["minilm"],
        "excerpts": 2,
        "tokens": 128,
        "metric_excerpts": 0,
        "float64": False,
    },
    "paper": {
        "random": ["bert-base", "albert-base", "xlnet-base", "minilm", "smollm2"],
        "trained": ["minilm", "smollm2"],
        "excerpts": 32,
        "tokens": 128,
        "metric_excerpts": 8,
        "float64": True,
    },
    # Few excerpts for many seeds: what the paper's one draw, and its text, are worth.
    "spread": _SPREAD,
    "prose": {**_SPREAD, "text": "prose"},
}


def dtype_of(settings: Settings, variant: str) -> torch.dtype:
    """Return the precision of a variant's forward pass: float64 where the residual can fall below float32's.

    Args:
        settings: a preset; with its ``float64`` off, everything runs in float32 and in half the memory.
        variant: a key of ``pretrained.VARIANTS``.

    Returns:
        ``torch.float32`` or ``torch.float64``.
    """
    low = settings["float64"] and not pretrained.VARIANTS[variant]["skip"]
    return torch.float64 if low else torch.float32


def units(settings: Settings) -> list[Unit]:
    """Cut the experiment: one unit is one model, one set of weights, one variant.

    Args:
        settings: a preset with its seeds.

    Returns:
        Units with keys ``model``, ``weights`` (``"trained"`` or ``"random"``), ``seed`` (-1 when trained, for
        nothing is drawn) and ``variant``; neighbours share their weights, so each set is made once, and
        float32 comes before float64.
    """
    sets = [(model, "trained", -1) for model in settings["trained"]]
    sets += [(model, "random", seed) for model in settings["random"] for seed in settings["seeds"]]
    return [
        {"model": model, "weights": weights, "seed": seed, "variant": variant}
        for model, weights, seed in sets
        for variant in settings.get("variants", ("SAN+skip", "transformer", "SAN", "SAN+MLP"))
    ]


_loaded: dict[tuple[str, str, int], Any] = {}


def _model(unit: Unit, dtype: torch.dtype, device: str) -> Any:
    """Return the unit's model. Neighbouring units share it, and there is never a second one in memory."""
    key = (unit["model"], unit["weights"], unit["seed"])
    if key not in _loaded:
        _loaded.clear()
        _loaded[key] = pretrained.load(key[0], trained=key[1] == "trained", seed=max(key[2], 0))
    if dtype == torch.float64 and device.startswith("mps"):
        device = "cpu"  # Metal has no float64
    return _loaded[key].to(
        device=device, dtype=dtype
    )  # in place, and exact both ways: the weights are float32 numbers


def _all_metrics(X: Tensor) -> Tensor:
    return torch.stack([metric(X).cpu().double() for metric in METRICS.values()], dim=-1)


def measure(model: Any, ids: Tensor, variant: str, metric_excerpts: int, chunk: int = 4) -> Arrays:
    """Measure every metric on the hidden states of one variant of a model, layer by layer.

    Args:
        model: from ``pretrained.load``, or any that ``pretrained.measure`` takes.
        ids: token ids ``[excerpts, tokens]``.
        variant: a key of ``pretrained.VARIANTS``.
        metric_excerpts: the metrics other than the relative residual are taken on this many of the excerpts.
        chunk: excerpts in one forward pass; memory grows with it.

    Returns:
        ``"relative residual"``: ``[excerpts, L+1]``; every other key of ``METRICS``:
        ``[metric_excerpts, L+1]``.
    """
    switches = pretrained.VARIANTS[variant]
    few, rest = ids[:metric_excerpts], ids[metric_excerpts:]
    found: Arrays = {}
    if len(few):
        values = pretrained.measure(model, few, _all_metrics, **switches, batch_size=chunk)
        found = {name: values[..., i].T.numpy() for i, name in enumerate(METRICS)}
    if len(rest):
        values = pretrained.measure(model, rest, **switches, batch_size=chunk).cpu().double().T.numpy()
        before = [found["relative residual"]] if found else []
        found["relative residual"] = np.concatenate([*before, values])
    return found


def run_unit(settings: Settings, unit: Unit, context: Context) -> Arrays:
    """Measure one variant of one model with one set of weights.

    Args:
        settings: a preset with its seeds.
        unit: one of ``units(settings)``.
        context: its device; a unit measures once and has nothing to resume.

    Returns:
        ``"relative residual"``: ``[excerpts, L+1]``; every other metric: ``[2, L+1]``, its mean and standard
        deviation over the first ``metric_excerpts`` excerpts; for SmolLM2 with nothing removed ``"loss"``,
        nats per token.
    """
    model = _model(unit, dtype_of(settings, unit["variant"]), context.device)
    kind = settings.get("text", "opening")
    ids = pretrained.tokens(model, n=settings["excerpts"], length=settings["tokens"], kind=kind)
    found = measure(model, ids, unit["variant"], settings["metric_excerpts"])
    arrays = {
        name: values if name == "relative residual" else np.stack([values.mean(0), values.std(0)])
        for name, values in found.items()
    }
    if (unit["model"], unit["variant"]) == ("smollm2", "transformer"):
        arrays["loss"] = np.array(pretrained.language_model_loss(model, ids))
    return {name: values.astype(np.float32) for name, values in arrays.items()}


def combine(
    settings: Settings, units: Sequence[Unit], parts: Sequence[Arrays]
) -> tuple[Arrays, dict[str, Any]]:
    """Stack the units of one model, weights and variant along a first axis, the seeds.

    Args:
        settings: a preset with its seeds.
        units: ``units(settings)``.
        parts: what ``run_unit`` returned for each.

    Returns:
        Arrays ``MODEL/WEIGHTS/VARIANT/METRIC``: ``[seeds, ...]`` (one "seed" when trained), and the axes.
    """
    stacks: dict[str, list[np.ndarray]] = {}
    for unit, part in zip(units, parts, strict=True):
        for metric, values in part.items():
            key = f"{unit['model']}/{unit['weights']}/{unit['variant']}/{metric}"
            stacks.setdefault(key, []).append(values)
    axes = {
        "relative residual": "seed, excerpt, layer",
        "other metrics": "seed, (mean, std) over excerpts, layer",
    }
    return {key: np.stack(values) for key, values in stacks.items()}, {"axes": axes}


def curves(
    result: results.Result,
    model: str,
    variant: str,
    weights: str = "random",
    metric: str = "relative residual",
) -> np.ndarray:
    """Return a stored metric against depth, averaged over the excerpts.

    Args:
        result: a stored figure 2.
        model: a name of ``pretrained.NAMES``.
        variant: a key of ``pretrained.VARIANTS``.
        weights: ``"random"`` or ``"trained"``.
        metric: a key of ``METRICS``.

    Returns:
        ``[seeds, L+1]``, float64.

    Raises:
        ValueError: the result has no such curve; the message lists the nearest that it has.
    """
    key = f"{model}/{weights}/{variant}/{metric}"
    if key not in result.arrays:
        known = sorted({each.rpartition("/")[0] for each in result.arrays})
        raise ValueError(
            f"{key!r} is not stored; there is {', '.join(known)}, each with {', '.join(METRICS)}"
        )
    values = result.arrays[key].astype(float)
    return values.mean(1) if metric == "relative residual" else values[:, 0]


def digitised(model: str, variant: str, weights: str = "random") -> np.ndarray:
    """Return the paper's curve, read off its published figure (reading error about 0.002).

    Args:
        model: a key of ``PAPER``.
        variant: a key of ``pretrained.VARIANTS``.
        weights: ``"random"`` or ``"trained"``.

    Returns:
        ``[13]``: the mean over its 32 excerpts at layers 0 to 12.

    Raises:
        ValueError: the paper draws no such curve.
    """
    if model not in PAPER or variant not in pretrained.VARIANTS:
        known = f"{', '.join(PAPER)} and {', '.join(pretrained.VARIANTS)}"
        raise ValueError(f"model={model!r}, variant={variant!r}: figure 2 has {known}")
    text = data.path("data/figure2_digitised.json").read_text(encoding="utf-8")
    panel = "at_initialization" if weights == "random" else "pretrained"
    return np.array(json.loads(text)["curves"][PAPER[model]][panel][variant])


def describe(result: results.Result) -> str:
    """Return the relative residual of every model and variant at a few layers, as text.

    Args:
        result: a stored figure 2.

    Returns:
        The mean over excerpts and seeds, as a table.
    """
    lines = ["relative residual, mean over excerpts and seeds, at layer 0, 1, 2, 3, half way and last"]
    for key in result.arrays:
        name, _, metric = key.rpartition("/")
        if metric == "relative residual":
            mean = result.arrays[key].astype(float).mean((0, 1))
            L = len(mean) - 1
            values = " ".join(f"{mean[l]:9.2g}" for l in (0, 1, 2, 3, L // 2, L))
            lines.append(f"  {name:32}{values}")
    return "\n".join(lines)


EXPERIMENT = Experiment(
    name="figure2",
    about="relative residual and every rank metric against depth in BERT, ALBERT, XLNet, MiniLM and SmolLM2",
    presets=PRESETS,
    units=units,
    run_unit=run_unit,
    combine=combine,
    weight=lambda unit: _WEIGHT[unit["model"]] * (1 + pretrained.VARIANTS[unit["variant"]]["mlp"]),
    describe=describe,
)
