"""The units of an experiment of section 8 on the workers of a Dask scheduler, which may come, go and die.

Needs the optional package ``distributed`` (``pip install "rc-lib[cluster]"``). Workers need rc_lib and the
same versions as here, but no common file system: arrays travel back and are stored by this process.
One unit is computed at a time in a worker process, whatever its number of threads, because torch's settings
and generators belong to the process; start workers with ``dask worker ADDRESS --nthreads 1``.
"""

import asyncio
import concurrent.futures
import socket
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rc_lib import results
from rc_lib.experiments.jobs import Done, Job, SweepError, check_device

# A unit that raised is tried again this often, perhaps on another worker (a full disk, a shared GPU);
# one whose worker died is tried again by the scheduler, whose own limit is three.
RETRIES = 2

_one_at_a_time = threading.Lock()


# ---- on a worker


def _facts(device: str) -> dict[str, str]:
    """Return the versions here, after a look for the device."""
    check_device(device)
    return results.versions()


def _compute(job: Job) -> tuple[Any, float, dict[str, str]]:
    """Compute a job, its checkpoint in the worker's own folder, which Dask removes after the worker's end."""
    from distributed import get_worker

    versions = _facts(job.context.device)
    checkpoint = job.context.checkpoint and Path(get_worker().local_directory) / job.context.checkpoint.name
    job = replace(job, context=replace(job.context, checkpoint=checkpoint))
    with _one_at_a_time:
        arrays, seconds = job.compute()
    if checkpoint:
        checkpoint.unlink(missing_ok=True)
    return arrays, seconds, versions


# ---- here


def _distributed() -> Any:
    try:
        import distributed
    except ImportError as error:
        raise SweepError('a scheduler needs Dask: pip install "rc-lib[cluster]"') from error
    return distributed


def _knock(address: str, where: tuple[str, int], seconds: float) -> None:
    """Raise OSError unless somebody is there who speaks first, as a scheduler does (not with TLS).

    A client that meets nobody leaves its event loop broken, and one that meets a silent server waits forever.
    """
    with socket.create_connection(where, timeout=seconds) as line:
        if not address.startswith("tls:") and not line.recv(1):
            raise ConnectionError("the line was closed at once")


def _connect(address: str, seconds: float) -> Any:
    """Return a client of the scheduler that has at least one worker."""
    distributed = _distributed()
    try:
        _knock(address, distributed.comm.get_address_host_port(address), seconds)
        client = distributed.Client(address, timeout=seconds, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise SweepError(f"scheduler={address!r}: no Dask scheduler answers there ({error})") from error
    try:
        client.wait_for_workers(1, timeout=seconds)
    except TimeoutError as error:
        client.close()
        raise SweepError(f"scheduler={address!r}: it has no workers") from error
    return client


def _check_versions(where: str, theirs: dict[str, str]) -> None:
    """Refuse a worker whose result would bear the wrong versions in its record."""
    ours = results.versions()
    differing = [f"{key} {theirs.get(key)}, here {ours[key]}" for key in ours if theirs.get(key) != ours[key]]
    if differing:
        raise SweepError(f"{where} has other versions: {'; '.join(differing)}; install the same on both")


def _check_workers(client: Any, device: str) -> None:
    for where, found in client.run(_facts, device, on_error="return").items():
        if isinstance(found, Exception):
            raise SweepError(f"the worker {where} cannot compute: {found}") from found
        _check_versions(f"the worker {where}", found)


def _cut_off() -> tuple[type[BaseException], ...]:
    """Return what waiting for a result raises when the scheduler has gone."""
    return (_distributed().comm.CommClosedError, asyncio.CancelledError, concurrent.futures.CancelledError)


def _result(future: Any, job: Job) -> Done:
    try:
        arrays, seconds, versions = future.result()
    except _distributed().KilledWorker as error:
        raise SweepError(f"unit {dict(job.unit)}: every worker that tried it died ({error})") from error
    except _cut_off() as error:
        raise SweepError(f"the scheduler was lost ({error}); the same command goes on from here") from error
    _check_versions("a worker that joined later", versions)
    return Done(job, arrays, seconds)


def on_cluster(
    jobs: Iterator[Job], address: str, device: str = "cpu", seconds: float = 5.0
) -> Iterator[Done]:
    """Compute jobs on the workers of a Dask scheduler.

    Args:
        jobs: all of them are submitted at once.
        address: of the scheduler, e.g. ``"tcp://10.0.0.1:8786"``.
        device: what each worker computes on.
        seconds: how long to wait for the scheduler and for a first worker.

    Yields:
        Each job's result once, as soon as there is one, in any order.

    Raises:
        SweepError: Dask is not installed, nobody answers, the scheduler is lost, no worker is there, a worker
            has other versions or not the device, or a unit's worker died again and again.
        Exception: what a unit raised every time it was tried. However this ends, what is submitted is taken
            back.
    """
    client, sweep = _connect(address, seconds), uuid.uuid4().hex
    try:
        _check_workers(client, device)
        waiting = {
            client.submit(_compute, job, key=f"{job.name}-{sweep}", retries=RETRIES, pure=False): job
            for job in jobs
        }
        for future in _distributed().as_completed(waiting, loop=client.loop):
            yield _result(future, waiting.pop(future))
            future.release()
    finally:
        client.close()
