"""Run the benchmarks that the book's speed claims rest on: ``make bench``, or ``python -m benchmarks paths``.

Every file beside this one is a benchmark with a ``main()`` that measures, prints, and returns 1 if a bar is
missed (else 0 or nothing).  All run on one thread: on the small matrices of the chapters a second one makes
times less repeatable and hardly shorter.
"""

import argparse
import importlib
import platform
from pathlib import Path

import torch


def names():
    """The benchmarks there are."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_"))


def main():
    """Run those asked for, or all; 1 if any of them missed its bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="python -m benchmarks")
    parser.add_argument(
        "names", nargs="*", metavar="name", help=f"any of {', '.join(names())} (default: all)"
    )
    wanted = parser.parse_args().names
    unknown = sorted(set(wanted) - set(names()))
    if unknown:
        parser.error(f"no benchmark named {', '.join(unknown)}; there are {', '.join(names())}")
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, one thread")
    missed = 0
    for name in wanted or names():
        print(f"\n{name}", flush=True)
        missed |= importlib.import_module(f"benchmarks.{name}").main() or 0
    return missed


if __name__ == "__main__":
    raise SystemExit(main())
