"""Re-run every notebook through nbval, each alone in an empty directory: `make notebooks`.

Cells tagged nbval-check-output are compared with what is stored; every other cell must run without an error,
and every claim is a check inside the notebook. Time and peak memory of each notebook are held to their bars.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
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


def run(path: Path) -> bool:
    """Run one notebook; print its outcome, its time and the peak memory of its kernel."""
    with tempfile.TemporaryDirectory() as empty:
        shutil.copy(path, empty)
        start = time.perf_counter()
        child = subprocess.Popen([*PYTEST, "--rootdir", empty, path.name], cwd=empty)
        _, status, usage = os.wait4(
            child.pid, 0
        )  # the usage of the child and of those it waited for: the kernel
        child.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    peak = usage.ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)  # bytes there, kilobytes on Linux
    name = path.relative_to(ROOT)
    print(f"{name}: {seconds:.0f} s, peak memory {peak:.2f} GB", flush=True)
    if seconds > SECONDS:
        print(f"{name}: slower than its bar of {SECONDS} s", flush=True)
    if peak > GIGABYTES:
        print(f"{name}: larger than its bar of {GIGABYTES} GB", flush=True)
    return child.returncode == 0 and seconds <= SECONDS and peak <= GIGABYTES


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="notebooks (default: all)")
    os.environ["RC_LIB_STATIC"] = "1"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Idle OpenMP threads spin by default; beside another process that makes small tensors ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    paths = [p.resolve() for p in parser.parse_args().paths] or notebooks()
    failed = [path for path in paths if not run(path)]
    print(f"{len(paths) - len(failed)} passed, {len(failed)} failed", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
