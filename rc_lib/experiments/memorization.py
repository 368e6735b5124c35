"""Figure 4, memorization: a random binary label for every token of 500 sentence pairs (paper, section 4).

The network sees no positions, so equal tokens of one pair get equal answers, whatever their labels: the best
accuracy that it can reach, the task's ``ceiling``, is below 1.  The paper draws no such line.
"""

from rc_lib.experiments.interface import Arrays, Context, Settings, Unit
from rc_lib.experiments.token_tasks import experiment, unit_runner
from rc_lib.tasks import memorization

_NETWORK = {"depth": 6, "heads": 2, "dim": 250, "weight_decay": 0.0}

PRESETS = {
    "quick": {
        **_NETWORK,
        "dim": 64,
        "data": {"pairs": 40, "max_tokens": 64},
        "epochs": 40,
        "batch_size": 10,
        "lr": 2e-3,
        "every": 10,
        "paths": [5, 20],
        "repeats": 5,
        "sampled_sets": 40,
    },
    "paper": {
        **_NETWORK,
        "data": {"pairs": 500, "max_tokens": 128},
        "epochs": 24,
        "batch_size": 16,
        "lr": 1e-3,
        "every": 4,
        "paths": [5, 20, 100],
        "repeats": 5,
        "sampled_sets": 40,
    },
}
# As the paper's scale, but embedding and attention weights start at unit size: the choice under which
# the paper's protocol sees most.
PRESETS["unit_start"] = {**PRESETS["paper"], "init_std": 1.0, "gain": 1.0}
# A fifth of the pairs: memorizing all of them anew for every choice would take hours.
PRESETS["choices"] = {
    **PRESETS["paper"],
    "data": {"pairs": 100, "max_tokens": 128},
    "epochs": 30,
    "every": 10,
    "choices": {
        "ours": {},
        "unit embedding": {"init_std": 1.0},
        "both": {"init_std": 1.0, "gain": 1.0},
        "dropout": {"dropout": 0.1},
        "few epochs": {"epochs": 15},
        "slow": {"lr": 3e-4, "epochs": 60},
        "fast": {"lr": 3e-3},
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
    return unit_runner(memorization.make, settings, unit, context)


EXPERIMENT = experiment(
    "memorization", "figure 4: which path lengths of a trained SAN recall random labels", PRESETS, run_unit
)
