"""The experiments of section 8 behind one small interface, so that a terminal can run any of them.

An experiment is cut into units of work (one model, one variant, one seed) that do not know of each other.
Each finished unit is stored at once, so a run that was killed goes on where it stopped. Units take and give
plain values, so that they may as well be computed by other processes.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from rc_lib import results

Settings = Mapping[str, Any]
Unit = Mapping[str, Any]
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Experiment:
    """What an experiment tells the runner.

    Attributes:
        name: lower-case letters, digits and underscores.
        about: one line for ``list``.
        presets: settings by scale, e.g. ``{"quick": {...}, "paper": {...}}``; JSON values.
        units: from the settings (the preset's, ``scale`` and ``seeds``) to the units of work, JSON values.
        run_unit: from the settings and one unit to that unit's arrays.
        combine: from the settings, the units and their arrays, in the same order, to the result's arrays
            and tables.
        weight: a unit's cost relative to the others', for the estimate of the time that is left.
        describe: the stored result in a few lines of text, for ``show``.
    """

    name: str
    about: str
    presets: Mapping[str, Settings]
    units: Callable[[Settings], Sequence[Unit]]
    run_unit: Callable[[Settings, Unit], Arrays]
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
            ValueError: an unknown scale; seeds that are none, negative, above 2**62 or given twice.
        """
        if scale not in self.presets:
            raise ValueError(f"scale={scale!r}: {self.name} knows {', '.join(sorted(self.presets))}")
        seeds = list(seeds)
        if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
            raise ValueError(f"seeds={seeds}: expected one or more non-negative integers, each once")
        if max(seeds) >= 2**62:
            raise ValueError(f"seeds={seeds}: expected numbers below 2**62, torch's generators hold no more")
        return {**self.presets[scale], "scale": scale, "seeds": seeds}


# An experiment's module is imported when it is asked for: `list` need not load transformers.
MODULES: dict[str, str] = {"figure2": "rc_lib.experiments.figure2"}


def get(name: str) -> Experiment:
    """Return an experiment by name.

    Args:
        name: a key of ``MODULES``, whose module holds an ``EXPERIMENT``.

    Returns:
        The experiment.

    Raises:
        ValueError: no experiment of this name.
    """
    if name not in MODULES:
        raise ValueError(f"unknown experiment {name!r}; there is {', '.join(sorted(MODULES))}")
    return import_module(MODULES[name]).EXPERIMENT


def _parts_folder(experiment: Experiment, settings: Settings, folder: Path) -> Path:
    # Units are shared by runs that differ in nothing but the seeds asked for.
    shared = {key: value for key, value in settings.items() if key != "seeds"}
    return folder / ".parts" / results.file_name(experiment.name, shared).removesuffix(".npz")


def _stored_part(name: str, unit: Unit, parts: Path) -> results.Result | None:
    try:
        part = results.read(parts / results.file_name(name, unit))
    except (results.UnknownResultError, results.CorruptResultError):
        return None  # computed now, and a damaged file replaced
    return part if part.versions == results.versions() else None


def _run_units(
    experiment: Experiment, settings: Settings, parts: Path, progress: Callable[[Unit, float], None]
) -> list[results.Result]:
    """Return every unit's part, computing and storing those that are not stored yet."""
    done = []
    for unit in experiment.units(settings):
        part = _stored_part(experiment.name, unit, parts)  # asked for late: another process may have made it
        if part is None:
            start = time.perf_counter()
            arrays = experiment.run_unit(settings, unit)
            seconds = time.perf_counter() - start
            part = results.read(results.save(experiment.name, unit, arrays, seconds=seconds, folder=parts))
            progress(unit, seconds)
        else:
            progress(unit, 0.0)
        done.append(part)
    return done


def _make(folder: Path) -> None:
    """Create the folder ahead of the first unit, so that one that cannot be written is told at once."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise results.ResultError(f"cannot write {folder}: {error.strerror or error}") from error


def run(
    experiment: Experiment,
    scale: str,
    seeds: Sequence[int],
    folder: str | Path | None = None,
    progress: Callable[[Unit, float], None] = lambda unit, seconds: None,
) -> Path:
    """Run an experiment to its end, going on from the units that an earlier run finished, and store it.

    Args:
        experiment: from ``get``, or the reader's own.
        scale: one of its presets.
        seeds: one repetition each.
        folder: where to store; the book's ``results`` unless given. Finished units wait there in ``.parts``.
        progress: called after each unit with the unit and the seconds it took (0 when it was stored).

    Returns:
        The stored result's file.

    Raises:
        ValueError: an unknown scale or bad seeds.
        results.ResultError: the folder cannot be written; finished units are kept.
    """
    settings = experiment.settings(scale, seeds)
    folder = Path(folder or results.default_folder())
    parts = _parts_folder(experiment, settings, folder)
    _make(parts)
    done = _run_units(experiment, settings, parts, progress)
    units = experiment.units(settings)
    arrays, tables = experiment.combine(settings, units, [part.arrays for part in done])
    seconds = sum(part.seconds for part in done)
    path = results.save(experiment.name, settings, arrays, tables, seconds=seconds, folder=folder)
    _tidy(parts)
    return path


def _tidy(parts: Path) -> None:
    # Another run may be writing beside us, or be tidying the same folder.
    shutil.rmtree(parts, ignore_errors=True)
    with contextlib.suppress(OSError):
        parts.parent.rmdir()
