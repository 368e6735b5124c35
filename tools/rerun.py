"""Re-run every notebook through nbval, each alone in an empty directory: `make notebooks`.

Cells tagged nbval-check-output are compared with what is stored; every other cell must run without an error,
and every claim is a check inside the notebook. Time and peak memory of each notebook are held to their bars.
Other work on the machine only ever adds time, so a notebook that takes too long gets one more run, and its
faster run counts. A failed cell or too much memory counts at once.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from notebooks import ROOT, notebooks

SECONDS = 60  # a chapter is run by a reader who waits
GIGABYTES = 1.5  # what Binder gives, less its own share
PYTEST = [
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "--nbval-lax",
    "--nbval-current-env",
    "-p",
    "no:cacheprovider",
]


@dataclass
class Outcome:
    """One run of a notebook: whether its cells passed, its time, the peak memory of its kernel."""

    passed: bool
    seconds: float
    gigabytes: float

    def faults(self) -> list[str]:
        """What is wrong with the run, in words."""
        return (
            ["a cell failed"] * (not self.passed)
            + [f"larger than its bar of {GIGABYTES} GB"] * (self.gigabytes > GIGABYTES)
            + [f"slower than its bar of {SECONDS} s"] * (self.seconds > SECONDS)
        )


def run(path: Path) -> Outcome:
    """Run one notebook once."""
    with tempfile.TemporaryDirectory() as empty:
        shutil.copy(path, empty)
        start = time.perf_counter()
        child = subprocess.Popen([*PYTEST, "--rootdir", empty, path.name], cwd=empty)
        _, status, usage = os.wait4(
            child.pid, 0
        )  # the usage of the child and of those it waited for: the kernel
        child.returncode = os.waitstatus_to_exitcode(status)
    peak = usage.ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)  # bytes there, kilobytes on Linux
    return Outcome(child.returncode == 0, time.perf_counter() - start, peak)


def measured(path: Path, name: str) -> list[str]:
    """Run one notebook, print what it took, return its faults."""
    outcome = run(path)
    print(f"{name}: {outcome.seconds:.0f} s, peak memory {outcome.gigabytes:.2f} GB", flush=True)
    return [f"{name}: {fault}" for fault in outcome.faults()]


def faults(path: Path) -> list[str]:
    """Run one notebook, a second time if nothing but its time is wrong; return what is wrong at last."""
    name = str(path.relative_to(ROOT) if ROOT in path.parents else path.name)
    found = measured(path, name)
    if len(found) == 1 and "slower" in found[0]:
        print(f"{found[0]}; once more, in case the machine was busy", flush=True)
        found = measured(path, name)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="notebooks (default: all)")
    os.environ["RC_LIB_STATIC"] = "1"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    paths = [p.resolve() for p in parser.parse_args().paths] or notebooks()
    wrong = {path: found for path in paths if (found := faults(path))}
    for found in wrong.values():
        print(*found, sep="\n", flush=True)
    print(f"{len(paths) - len(wrong)} passed, {len(wrong)} failed", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
