"""One unit of an experiment of section 8 as a parcel that any process can compute, and its device."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rc_lib.experiments.interface import Arrays, Context, Settings, Unit


class SweepError(RuntimeError):
    """A sweep cannot go on: workers that cannot be reached, do not fit, or die; what is finished is kept."""


@dataclass(frozen=True)
class Job:
    """A unit with all that computing it takes.

    Attributes:
        name: of the unit's file in the store, without its ending.
        run_unit: the experiment's.
        settings: of the run.
        unit: the unit.
        context: where and how.
    """

    name: str
    run_unit: Callable[[Settings, Unit, Context], Arrays]
    settings: Settings
    unit: Unit
    context: Context

    def compute(self) -> tuple[Arrays, float]:
        """Compute the unit.

        Returns:
            Its arrays, and the seconds that it took.
        """
        start = time.perf_counter()
        arrays = self.run_unit(self.settings, self.unit, self.context)
        return arrays, time.perf_counter() - start


@dataclass(frozen=True)
class Done:
    """A computed unit on its way to the store.

    Attributes:
        job: what was asked.
        arrays: its result.
        seconds: what it took.
    """

    job: Job
    arrays: Arrays
    seconds: float


def _missing(device: torch.device) -> str | None:
    """Return why this machine has no such device, or None when it has."""
    if device.type == "mps":
        return None if torch.backends.mps.is_available() else "this machine or PyTorch has no Metal (mps)"
    if device.type != "cuda":
        return None
    if not torch.backends.cuda.is_built():
        return "this PyTorch was built without CUDA"
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device (torch.cuda.is_available() is False)"
    count = torch.cuda.device_count()
    return f"there are {count} CUDA devices, counted from 0" if (device.index or 0) >= count else None


def check_device(name: str) -> None:
    """Refuse a device that this process cannot compute on.

    Args:
        name: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or ``"mps"``.

    Raises:
        ValueError: no such device, and why.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"device={name!r}: expected cpu, cuda, cuda:N or mps")
    reason = _missing(device)
    if reason:
        raise ValueError(f"device={name!r}: {reason}")
