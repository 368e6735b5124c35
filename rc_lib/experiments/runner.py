"""Running an experiment of section 8: finished units are stored at once, so a killed run goes on from there.

While a run is unfinished its units, and the checkpoints of trainings under way, wait in a folder ``.parts``
beside the results. The units can be computed here, by processes of this machine or by a Dask cluster;
what is stored is the same.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rc_lib import checks, results
from rc_lib.experiments import cluster, workers
from rc_lib.experiments.interface import Context, Experiment, Settings, Unit
from rc_lib.experiments.jobs import Done, Job, check_device

Progress = Callable[[Unit, float], None]

_STEM = re.compile(r"[a-z0-9][a-z0-9_]*-[0-9a-f]{12}")


def _stem(name: str, settings: Settings) -> str:
    return results.file_name(name, settings).removesuffix(".npz")


class Parts:
    """The unfinished work of one run: its units' files and checkpoints, in a folder of their own.

    Attributes:
        experiment: what is run.
        settings: its settings.
        units: its units.
        folder: where the parts are; runs that differ in nothing but their seeds share it.
    """

    def __init__(self, experiment: Experiment, settings: Settings, folder: Path):
        self.experiment, self.settings = experiment, settings
        self.units = list(experiment.units(settings))
        shared = {key: value for key, value in settings.items() if key != "seeds"}
        self.folder = folder / ".parts" / _stem(experiment.name, shared)

    def make(self) -> None:
        """Create the folder ahead of the first unit, so that one that cannot be written is told at once."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            asked = self.folder.parent.parent  # what the user knows of
            raise results.ResultError(f"cannot write {asked}: {error.strerror or error}") from error

    def name(self, unit: Unit) -> str:
        """Return the name of a unit's file, without its ending.

        Args:
            unit: one of ``units``.

        Returns:
            The experiment's name and a digest of the unit.
        """
        return _stem(self.experiment.name, unit)

    def read(self, unit: Unit) -> results.Result | None:
        """Return a stored unit.

        Args:
            unit: one of ``units``.

        Returns:
            None when it is not stored, is damaged, or was computed with other versions.
        """
        try:
            part = results.read(self.folder / f"{self.name(unit)}.npz")
        except (results.UnknownResultError, results.CorruptResultError):
            return None
        return part if part.versions == results.versions() else None

    def save(self, done: Done) -> results.Result:
        """Store a computed unit and remove its checkpoint.

        Args:
            done: the unit and its arrays.

        Returns:
            The unit as it reads from its file.
        """
        path = results.save(
            self.experiment.name, done.job.unit, done.arrays, seconds=done.seconds, folder=self.folder
        )
        if done.job.context.checkpoint:
            done.job.context.checkpoint.unlink(missing_ok=True)
        return results.read(path)

    def job(self, unit: Unit, device: str, progress: bool) -> Job:
        """Return what it takes to compute a unit.

        Args:
            unit: one of ``units``.
            device: where.
            progress: whether it may draw a bar of its own.

        Returns:
            A job whose checkpoint's name tells versions and devices apart, so neither resumes the other's.
        """
        name = self.name(unit)
        _, kind = _stem("on", {**results.versions(), "device": device}).split("-")
        checkpoint = self.folder / f"{name}-{self.folder.name[-12:]}-{kind}.checkpoint"
        context = Context(device, checkpoint, progress)
        return Job(name, self.experiment.run_unit, self.settings, unit, context)

    def drop(self) -> None:
        """Remove every file of this run's units, whole, damaged or half written, and the folder if empty."""
        ours = {self.name(unit) for unit in self.units} | {_stem(self.experiment.name, self.settings)}
        with contextlib.suppress(OSError):  # another run may be tidying beside us
            for path in list(self.folder.iterdir()):
                found = _STEM.search(path.name)
                if found and found[0] in ours:
                    path.unlink(missing_ok=True)
            self.folder.rmdir()
            self.folder.parent.rmdir()

    def finish(self, arrays: Any, tables: Any, seconds: float) -> Path:
        """Store the run's result and drop the parts.

        Args:
            arrays: from the experiment's ``combine``.
            tables: likewise.
            seconds: the units' time together.

        Returns:
            The result's file. It is written among the parts and then moved as a whole, so that a
            run that is killed leaves nothing half written among the results.
        """
        path = results.save(
            self.experiment.name, self.settings, arrays, tables, seconds=seconds, folder=self.folder
        )
        final = self.folder.parent.parent / path.name
        os.replace(path, final)
        self.drop()
        return final


def _computed(jobs: Iterator[Job], count: int, scheduler: str | None, device: str) -> Iterator[Done]:
    if scheduler is not None:
        return cluster.on_cluster(jobs, scheduler, device)
    if count:
        return workers.in_processes(jobs, count)
    return (Done(job, *job.compute()) for job in jobs)


def _run_units(
    parts: Parts,
    begin: Callable[[], None],
    progress: Progress,
    compute: Callable[[Iterator[Unit]], Iterator[Done]],
) -> dict:
    """Return every unit's part by name, computing and storing those that are not stored yet."""
    found = {}

    def missing() -> Iterator[Unit]:
        begin()  # who computes has been found, and draws the first unit
        for unit in parts.units:
            part = parts.read(unit)  # asked for late: another process may have made it
            if part is None:
                yield unit
            else:
                found[parts.name(unit)] = part
                progress(unit, 0.0)

    with contextlib.closing(compute(missing())) as computed:
        for done in computed:
            found[done.job.name] = parts.save(done)
            progress(done.job.unit, done.seconds)
    return found


def _check_places(count: int, scheduler: str | None, device: str) -> None:
    if checks.positive_int("workers", count, minimum=0) and scheduler is not None:
        raise ValueError(f"workers={count} and scheduler={scheduler!r}: expected one of the two")
    if scheduler is None:
        check_device(device)


def run(
    experiment: Experiment,
    scale: str,
    seeds: Sequence[int],
    folder: str | Path | None = None,
    progress: Progress = lambda unit, seconds: None,
    *,
    device: str = "cpu",
    resume: bool = True,
    workers: int = 0,
    scheduler: str | None = None,
    bars: bool = False,
    begin: Callable[[], None] = lambda: None,
) -> Path:
    """Run an experiment to its end, going on from the units that an earlier run finished, and store it.

    Args:
        experiment: from ``get``, or the reader's own.
        scale: one of its presets.
        seeds: one repetition each.
        folder: where to store; the book's ``results`` unless given. Finished units wait there in ``.parts``.
        progress: called after each unit with the unit and the seconds it took (0 when it was stored).
        device: what to compute on: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or ``"mps"``.
        resume: False drops what an unfinished run left, instead of going on from it.
        workers: processes of this machine that share the units, and its cores; 0 computes in this one.
            A script that asks for some needs ``if __name__ == "__main__":`` around what it runs.
        scheduler: the address of a Dask scheduler whose workers compute the units.
        bars: whether units computed in this process may draw a progress bar of their own.
        begin: called once, when the folder can be written and who computes has been found.

    Returns:
        The stored result's file.

    Raises:
        ValueError: an unknown scale, bad seeds, no such device, or workers that cannot import ``run_unit``.
        TypeError: an argument of another type.
        results.ResultError: the folder cannot be written; finished units are kept.
        SweepError: workers that cannot be reached, do not fit or die again and again.
    """
    settings = experiment.settings(scale, seeds)
    for name, value in {"resume": resume, "bars": bars}.items():
        checks.boolean(name, value)
    _check_places(workers, scheduler, device)
    parts = Parts(experiment, settings, Path(folder or results.default_folder()))
    if not resume:
        parts.drop()
    parts.make()
    own_bars = bars and not workers and scheduler is None

    def compute(units: Iterator[Unit]) -> Iterator[Done]:
        return _computed((parts.job(unit, device, own_bars) for unit in units), workers, scheduler, device)

    found = _run_units(parts, begin, progress, compute)
    done = [found[parts.name(unit)] for unit in parts.units]
    arrays, tables = experiment.combine(settings, parts.units, [part.arrays for part in done])
    return parts.finish(arrays, tables, sum(part.seconds for part in done))
