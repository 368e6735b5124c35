"""What an experiment of section 8 is to the runner: presets, units of work, and how they are put together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rc_lib import checks, results

Settings = Mapping[str, Any]
Unit = Mapping[str, Any]
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Context:
    """Where and how a unit is computed. It may change a unit's numbers by rounding, and by nothing else.

    Attributes:
        device: a torch device, ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or ``"mps"``.
        checkpoint: a file that is the unit's alone, for a training to be resumed from; it is removed when the
            unit is stored. None: nothing to resume from.
        progress: whether the unit may draw a progress bar of its own.
    """

    device: str = "cpu"
    checkpoint: Path | None = None
    progress: bool = False


@dataclass(frozen=True)
class Experiment:
    """What an experiment tells the runner.

    To be computed by other processes, ``run_unit`` has to be a function that they can import: one at the top
    level of a module. Everything that it draws at random comes from its settings and unit, so that neither
    the order of the units nor the number of processes matters.

    Attributes:
        name: lower-case letters, digits and underscores.
        about: one line for ``list``.
        presets: settings by scale, e.g. ``{"quick": {...}, "paper": {...}}``; JSON values.
        units: from the settings (the preset's, ``scale`` and ``seeds``) to the units of work, JSON values.
        run_unit: from the settings, one unit and a ``Context`` to that unit's arrays.
        combine: from the settings, the units and their arrays, in the same order, to the result's arrays
            and tables.
        weight: a unit's cost relative to the others', for the estimate of the time that is left.
        describe: the stored result in a few lines of text, for ``show``.
    """

    name: str
    about: str
    presets: Mapping[str, Settings]
    units: Callable[[Settings], Sequence[Unit]]
    run_unit: Callable[[Settings, Unit, Context], Arrays]
    combine: Callable[[Settings, Sequence[Unit], Sequence[Arrays]], tuple[Arrays, dict[str, Any]]]
    weight: Callable[[Unit], float] = lambda unit: 1.0
    describe: Callable[[results.Result], str] = lambda result: ""

    def settings(self, scale: str, seeds: Sequence[int]) -> dict[str, Any]:
        """Return the settings of one run.

        Args:
            scale: a preset's name.
            seeds: non-negative integers, each once.

        Returns:
            The preset with ``scale`` and ``seeds`` beside it.

        Raises:
            ValueError: an unknown scale; seeds that are none, negative, too large or given twice.
            TypeError: ``seeds`` are no sequence of whole numbers.
        """
        if scale not in self.presets:
            raise ValueError(f"scale={scale!r}: {self.name} knows {', '.join(sorted(self.presets))}")
        seeds = [checks.seed(each, "each of seeds") for each in checks.listed("seeds", seeds)]
        if not seeds or len(set(seeds)) < len(seeds):
            raise ValueError(f"seeds={seeds}: expected one or more, each once")
        return {**self.presets[scale], "scale": scale, "seeds": seeds}
