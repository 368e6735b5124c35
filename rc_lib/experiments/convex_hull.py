"""Figure 4, convex hull: which of ten points in the plane are corners of their hull (paper, section 4)."""

from rc_lib.experiments.interface import Arrays, Context, Settings, Unit
from rc_lib.experiments.token_tasks import experiment, unit_runner
from rc_lib.tasks import convex_hull

_NETWORK = {"depth": 6, "heads": 3, "dim": 84}

PRESETS = {
    "quick": {
        **_NETWORK,
        "data": {"train": 2000, "test": 300},
        "epochs": 6,
        "batch_size": 50,
        "lr": 2e-3,
        "every": 2,
        "paths": [5, 20],
        "repeats": 5,
        "sampled_sets": 100,
    },
    "paper": {
        **_NETWORK,
        "data": {"train": 10_000, "test": 1000},
        "epochs": 12,
        "batch_size": 100,
        "lr": 2e-3,
        "every": 2,
        "paths": [5, 20, 100],
        "repeats": 5,
        "sampled_sets": 300,
    },
}
PRESETS["choices"] = {
    **PRESETS["paper"],
    "choices": {
        "ours": {},
        "full gain": {"gain": 1.0},
        "pre-norm": {"norm": "pre"},
        "dropout": {"dropout": 0.1},
        "few epochs": {"epochs": 2},
        "slow": {"lr": 1e-4, "epochs": 5},
    },
}


def run_unit(settings: Settings, unit: Unit, context: Context) -> Arrays:
    """Train and measure one seed.

    Args:
        settings: a preset with its seeds.
        unit: one of ``token_tasks.units(settings)``.
        context: where to compute.

    Returns:
        The arrays of ``token_tasks.unit_runner``.
    """
    return unit_runner(convex_hull.make, settings, unit, context)


EXPERIMENT = experiment(
    "convex_hull", "figure 4: which path lengths of a trained SAN find a convex hull", PRESETS, run_unit
)
