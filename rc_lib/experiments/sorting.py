"""Figure 4, sorting: 8 symbols out of 10, answered position by position (paper, section 4).

The paper does not say whether a symbol may repeat.  Here it may: a read-out that knows the position alone is
then right for about a third of the tokens, as the paper's paths of length 0 are; without repeats it would be
right for more than half.  Nor does it say how the network is trained; ``choices`` tries what is left open.
"""

import numpy as np
import torch

from rc_lib import checks
from rc_lib.experiments.interface import Arrays, Context, Settings, Unit
from rc_lib.experiments.token_tasks import experiment, unit_runner
from rc_lib.tasks import Task, sorting

_NETWORK = {"depth": 6, "heads": 2, "dim": 48, "dropout": 0.1}

PRESETS = {
    "quick": {
        **_NETWORK,
        "data": {"train": 1000, "test": 300},
        "epochs": 25,
        "batch_size": 50,
        "lr": 2e-3,
        "every": 5,
        "paths": [5, 20],
        "repeats": 5,
        "sampled_sets": 100,
    },
    "paper": {
        **_NETWORK,
        "data": {"train": 1000, "test": 1000},
        "epochs": 40,
        "batch_size": 50,
        "lr": 2e-3,
        "every": 10,
        "paths": [5, 20, 100],
        "repeats": 5,
        "sampled_sets": 300,
    },
}
# As the paper's scale, but symbols and positions start at the size of the normed states, as torch's own
# embedding does: the one choice under which the paper's protocol sees what the exact sums see.
PRESETS["unit_embedding"] = {**PRESETS["paper"], "init_std": 1.0}
PRESETS["choices"] = {
    **PRESETS["paper"],
    "choices": {
        "ours": {},
        "unit embedding": {"init_std": 1.0},
        "full gain": {"gain": 1.0},
        "both": {"init_std": 1.0, "gain": 1.0},
        "no dropout": {"dropout": 0.0},
        "pre-norm": {"norm": "pre"},
        "few epochs": {"epochs": 10},
        "slow": {"lr": 1e-4},
        "no repeats": {"data": {"train": 1000, "test": 1000, "repeats": False}},
    },
}


def position_only(task: Task) -> float:
    """Return the test accuracy of the best guess from the position alone (ours).

    Args:
        task: from ``rc_lib.tasks.sorting.make``.

    Returns:
        The share of test tokens that equal the most frequent training label of their position.

    Raises:
        TypeError: ``task`` is no ``Task``.
        ValueError: its tokens have no positions, or some are padding.
    """
    if not isinstance(task, Task):
        raise TypeError(f"task must be a Task, but is {checks.describe(task)}")
    if not (task.positions and task.train.real.all() and task.test.real.all()):
        raise ValueError(
            f"task must have a token at each of its positions, as sorting has, but is {task.name!r}"
        )
    guess = torch.mode(task.train.labels, dim=0).values
    return (task.test.labels == guess).double().mean().item()


def run_unit(settings: Settings, unit: Unit, context: Context) -> Arrays:
    """Train and measure one seed.

    Args:
        settings: a preset with its seeds.
        unit: one of ``token_tasks.units(settings)``.
        context: where to compute.

    Returns:
        The arrays of ``token_tasks.unit_runner``, and ``position_only``.
    """
    arrays = unit_runner(sorting.make, settings, unit, context)
    data = {**settings, **settings["choices"][unit["choice"]]}["data"]
    task = sorting.make(seed=unit["seed"], **data)
    return arrays | {"position_only": np.array(position_only(task))}


EXPERIMENT = experiment(
    "sorting", "figure 4: which path lengths of a trained SAN sort a sequence", PRESETS, run_unit
)
