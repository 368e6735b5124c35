"""The exact sum over all paths by length, against forward passes of the same network.

The bar: for 12 layers of 12 heads, 13^12 = 23,298,085,122,481 paths, in less time than eight traced forward
passes, and with a reconstruction error below 1e-10.

    python -m benchmarks.paths
"""

import time

import torch

from rc_lib.paths import count_paths, sum_by_length
from rc_lib.san import SAN

BAR = 8.0
ERROR_BAR = 1e-10


def seconds(*functions, repeats=9):
    """The fastest run of each function, taken in turns: the machine's other work can only slow a run down."""
    best = [float("inf")] * len(functions)
    for _ in range(repeats):
        for i, f in enumerate(functions):
            start = time.perf_counter()
            f()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def measure(n, d, norm, L=12, H=12):
    """Time of the sum in forward passes, and its relative error."""
    san = SAN(L, H, d, skip=True, norm=norm, bias_std=0.1)
    X = torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    forward, exact = seconds(lambda: san.trace(X), lambda: sum_by_length(san, X))
    total, output = sum_by_length(san, X).total, san(X).detach()
    return exact / forward, float((total - output).norm() / output.norm()), forward


def main():
    """Print the table; the exit status is 1 if a bar is missed."""
    print(f"L = 12, H = 12, skips: {count_paths(12, 12, True):,} paths; {torch.get_num_threads()} threads")
    print("   n    d  norm  forward [s]  sum / forward    error")
    missed = False
    for n, d in ((32, 96), (64, 192), (128, 384)):
        for norm in ("none", "post", "pre"):
            ratio, error, forward = measure(n, d, norm)
            missed |= ratio >= BAR or error >= ERROR_BAR
            print(f"{n:4} {d:4}  {norm}  {forward:11.4f}  {ratio:13.2f}  {error:7.0e}")
    print(f"bars: {BAR:g} forward passes, error {ERROR_BAR:g}: {'MISSED' if missed else 'met'}")
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
