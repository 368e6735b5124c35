"""The residual flow against a plain forward pass in float64.

Claim: twelve layers (n = 32, d = 64, H = 4) in less than three plain forward passes' time.
"""

import statistics
import time

import torch

from rc_lib.masks import causal
from rc_lib.residual_flow import residual_flow
from rc_lib.san import SAN

BAR = 3.0
REPEATS = 50


def paired_times(*functions):
    """Median processor times in ms of functions that take turns, and of each one's ratio to the first."""
    times = []
    for _ in range(REPEATS):
        row = []
        for f in functions:
            start = time.process_time()
            f()
            row.append(1000 * (time.process_time() - start))
        times.append(row)
    columns = list(zip(*times, strict=True))
    ratios = [statistics.median(t / first for t, first in zip(c, columns[0], strict=True)) for c in columns]
    return [statistics.median(c) for c in columns], ratios


def cases():
    """Networks and inputs: the chapter's, with each switch, longer and wider, and in a batch."""
    yield "n=32 d=64 H=4 L=12", SAN(12, 4, 64), (32, 64), None
    yield "  causal mask", SAN(12, 4, 64), (32, 64), causal(32)
    yield "  skip, post-norm", SAN(12, 4, 64, skip=True, norm="post"), (32, 64), None
    yield "  transformer, pre-norm", SAN(12, 4, 64, skip=True, mlp=True, norm="pre"), (32, 64), None
    yield "  batch of 16", SAN(12, 4, 64), (16, 32, 64), None
    yield "n=128 d=256 H=8 L=12", SAN(12, 8, 256), (128, 256), None


@torch.no_grad()
def main():
    """Print one line for each case; 1 if the first, which the chapter claims, misses its bar."""
    missed = None
    print(f"  {'network':24s} {'forward':>10s} {'flow':>10s} {'ratio':>6s}   residual")
    for name, san, shape, mask in cases():
        X = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        flow = residual_flow(san, X, mask)

        def plain(san=san, X=X, mask=mask):
            san(X, mask)

        def log_scaled(san=san, X=X, mask=mask):
            residual_flow(san, X, mask)

        (forward, own), (_, ratio) = paired_times(plain, log_scaled)
        depth = flow.log10_norm[..., -1].flatten()[0].item()
        missed = ratio >= BAR if missed is None else missed
        print(f"  {name:24s} {forward:7.2f} ms {own:7.2f} ms {ratio:6.2f}   10^{depth:.1f}")
    print(f"  bar for the first: {BAR:g} forward passes: {'MISSED' if missed else 'met'}")
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
