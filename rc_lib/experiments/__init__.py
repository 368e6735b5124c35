"""The experiments of section 8 behind one small interface, so that a terminal can run any of them.

An experiment is cut into units of work (one model, one variant, one seed) that do not know of each other.
Each finished unit is stored at once, so a run that was killed goes on where it stopped. Units take and give
plain values, so that they may as well be computed by other processes.
"""

from importlib import import_module

from rc_lib import checks
from rc_lib.experiments.interface import Arrays as Arrays
from rc_lib.experiments.interface import Context as Context
from rc_lib.experiments.interface import Experiment as Experiment
from rc_lib.experiments.interface import Settings as Settings
from rc_lib.experiments.interface import Unit as Unit
from rc_lib.experiments.jobs import SweepError as SweepError
from rc_lib.experiments.jobs import check_device as check_device
from rc_lib.experiments.runner import run as run

# An experiment's module is imported when it is asked for: `list` need not load transformers.
MODULES: dict[str, str] = {
    "figure2": "rc_lib.experiments.figure2",
    "memorization": "rc_lib.experiments.memorization",
    "sorting": "rc_lib.experiments.sorting",
    "convex_hull": "rc_lib.experiments.convex_hull",
    "two_arcs": "rc_lib.experiments.two_arcs",
}


def spoken(name: str) -> str:
    """Return an experiment's name as a terminal shows it.

    Args:
        name: with underscores.

    Returns:
        The name with hyphens; ``get`` takes either.
    """
    return name.replace("_", "-")


def get(name: str) -> Experiment:
    """Return an experiment by name.

    Args:
        name: a key of ``MODULES``, whose module holds an ``EXPERIMENT``; hyphens stand for underscores.

    Returns:
        The experiment.

    Raises:
        ValueError: no experiment of this name.
        TypeError: ``name`` is no string.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, but is {checks.describe(name)}")
    key = name.replace("-", "_")
    if key not in MODULES:
        raise ValueError(f"unknown experiment {name!r}; there is {', '.join(map(spoken, sorted(MODULES)))}")
    return import_module(MODULES[key]).EXPERIMENT
