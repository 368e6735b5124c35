"""Torch's global random generators (those that dropout draws from): lent out, seeded, stored and given back.

No section of the paper: a training run seeds them and still leaves no trace in them. Besides the CPU's there
is one for each accelerator; a run on an accelerator may draw from both.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rc_lib import checks


@contextlib.contextmanager
def lent(device: torch.device) -> Iterator[None]:
    """Give the global generators back as they were when the block is left, by an error too.

    Args:
        device: where the block computes.

    Yields:
        Nothing.
    """
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        count = torch.get_device_module(device).device_count()
        with torch.random.fork_rng(devices=range(count), device_type=device.type):
            yield


def seed(device: torch.device, value: int) -> None:
    """Seed the CPU's generator and the device's.

    Args:
        device: where is computed.
        value: from 0 to below 2**62.

    Returns:
        Nothing.
    """
    torch.default_generator.manual_seed(checks.seed(value, "value"))
    if device.type != "cpu":
        module = torch.get_device_module(device)
        getattr(module, "manual_seed_all", module.manual_seed)(value)


def states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the CPU's generator and the device's.

    Args:
        device: where is computed.

    Returns:
        uint8 tensors on the CPU by kind of device, ``"cpu"`` among them.
    """
    found = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        found[device.type] = torch.get_device_module(device).get_rng_state(device)
    return found


def set_states(device: torch.device, values: Mapping[str, Tensor]) -> None:
    """Set the generators to states that ``states`` returned.

    Args:
        device: where is computed; another kind of device's state is left out.
        values: the states.

    Returns:
        Nothing.
    """
    torch.set_rng_state(values["cpu"])
    if device.type != "cpu" and device.type in values:
        torch.get_device_module(device).set_rng_state(values[device.type], device)
