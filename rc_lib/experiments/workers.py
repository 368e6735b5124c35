"""The units of an experiment of section 8 on several processes of this machine, any of which may be killed.

The processes are started afresh (spawn), so they share nothing but the jobs that they are sent: what they
compute does not depend on how many they are. A process that dies is replaced and its unit computed again.
"""

import contextlib
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from multiprocessing import connection, resource_tracker
from typing import Any

import torch
from tqdm import tqdm

from rc_lib.experiments.jobs import Done, Job, SweepError

# A unit whose process dies this often is what kills it.
ATTEMPTS = 3

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def threads_each(workers: int) -> int:
    """Return how many threads each of the workers may use.

    Args:
        workers: how many processes compute at once.

    Returns:
        The cores that this process may use, shared out; at least 1, at most what one process uses alone.
    """
    usable = getattr(os, "sched_getaffinity", None)
    cores = len(usable(0)) if usable else os.cpu_count() or 1
    return max(1, min(torch.get_num_threads(), cores // workers))


# ---- in a worker


def _end_with_parent() -> None:
    """End this process when its parent has ended, however it did: nobody waits for the unit any more."""
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _answer(parcel: bytes) -> bytes:
    """Return the arrays and seconds of a job, or the exception it raised, pickled by value."""
    try:
        return pickle.dumps(pickle.loads(parcel).compute())
    except Exception as error:
        error.add_note("in a worker process:\n" + traceback.format_exc())
        return _pickled(error)


def _pickled(error: Exception) -> bytes:
    try:
        parcel = pickle.dumps(error)
        pickle.loads(parcel)
    except Exception:  # an exception class that does not pickle: its words do
        return pickle.dumps(SweepError(f"{type(error).__name__}: {error}"))
    return parcel


def _serve(end: connection.Connection, threads: int) -> None:
    """Compute the jobs that arrive until none is sent any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    tqdm.set_lock(threading.RLock())  # its own lock is a semaphore, which a killed process would leave behind
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            end.send_bytes(_answer(end.recv_bytes()))


# ---- in the process that started them


@contextlib.contextmanager
def _starting(threads: int) -> Iterator[None]:
    """Let processes started here inherit the number of threads, and leave Ctrl-C to this one."""
    before = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    os.environ.update({name: str(threads) for name in _THREAD_VARIABLES})
    block = getattr(signal, "pthread_sigmask", lambda how, signals: None)
    resource_tracker.ensure_running()  # its start would lift the block
    block(getattr(signal, "SIG_BLOCK", None), {signal.SIGINT})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        block(getattr(signal, "SIG_UNBLOCK", None), {signal.SIGINT})  # a Ctrl-C that waited is raised here


@dataclass
class _Worker:
    process: Any
    end: connection.Connection
    job: Job | None  # None when it has stopped

    def give(self, job: Job) -> None:
        self.job = job
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died: told when it is heard
            self.end.send_bytes(pickle.dumps(job))

    def stop(self) -> None:
        self.job = None
        self.process.kill()
        self.process.join()
        self.end.close()


def _start(job: Job, threads: int, pool: list[_Worker]) -> None:
    """Start a process with its first job and put it into the pool, come what may after its start."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, threads), name="rc_lib worker")
    with _starting(threads):
        process.start()
        pool.append(_Worker(process, ours, job))
    theirs.close()  # or its end would not be heard
    pool[-1].give(job)


def _check_importable(job: Job) -> None:
    """Refuse a ``run_unit`` that a fresh process could not find."""
    function = job.run_unit
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    at_prompt = module == "__main__" and not hasattr(sys.modules["__main__"], "__file__")
    found = None if at_prompt or module is None else getattr(importlib.import_module(module), name, None)
    if found is not function:
        raise ValueError(
            f"run_unit={function!r}: worker processes import it by name, so it must be a function at the top "
            "level of a module or script (not of a notebook); or run without workers"
        )


def _lost(worker: _Worker, deaths: Counter[str]) -> None:
    """Count the death of a worker against its unit."""
    job = worker.job
    worker.stop()
    deaths[job.name] += 1
    if deaths[job.name] >= ATTEMPTS:
        raise SweepError(
            f"unit {dict(job.unit)}: its process died {ATTEMPTS} times, the last with exit code "
            f"{worker.process.exitcode} (-9 is often a lack of memory: try fewer workers)"
        )


def _go_on(worker: _Worker, jobs: Iterator[Job]) -> None:
    """Give a worker that is free the next job, or stop it."""
    job = next(jobs, None)
    if job is None:
        worker.stop()
    else:
        worker.give(job)


def _heard(worker: _Worker) -> Any:
    """Return what a worker sent, or None when it died instead."""
    try:
        return pickle.loads(worker.end.recv_bytes())
    except (EOFError, OSError):
        return None


def in_processes(jobs: Iterator[Job], count: int) -> Iterator[Done]:
    """Compute jobs on several processes of this machine.

    Args:
        jobs: drawn one at a time, when a process is free.
        count: how many processes.

    Yields:
        Each job's result as soon as there is one, in any order.

    Raises:
        ValueError: a ``run_unit`` that a fresh process cannot import.
        SweepError: a unit whose process died three times.
        Exception: what a unit raised. However this ends, the processes end with it.
    """
    threads, deaths = threads_each(count), Counter()
    pool: list[_Worker] = []
    try:
        for job in islice(jobs, count):
            _check_importable(job)
            _start(job, threads, pool)
        while pool:
            heard = connection.wait([worker.end for worker in pool])
            for worker in [each for each in pool if each.end in heard]:
                job, answer = worker.job, _heard(worker)
                if answer is None:
                    _lost(worker, deaths)
                    _start(job, threads, pool)
                elif isinstance(answer, Exception):
                    raise answer
                else:
                    _go_on(worker, jobs)
                    yield Done(job, *answer)
            pool = [worker for worker in pool if worker.job]
    finally:
        for worker in pool:
            worker.stop()
