"""The exact spectrum of path lengths against the paper's sampled protocol (section 4, figure 4).

Sorting's network (L = 6, H = 2, d = 48, post-norm, 729 paths) and 1000 sequences of 8 symbols, the same for
both.  The protocol draws 20 paths for each of 7 lengths, 5 times.  The bar: the exact spectrum, in float64
and with norms, residuals and its own error, takes at most a twentieth of the time of the protocol in float32,
the network's own type, where each path runs from the start as the paper says, at the better of two chunk
sizes.

Also reported, without a bar: the protocol in float64, and with what the drawn paths have in common run once
(``share=True``, the library's default), which is our own improvement.

    python -m benchmarks.path_effectiveness
"""

import copy
import statistics
import time

import torch

from rc_lib import path_effectiveness as pe
from rc_lib.tasks import sorting
from rc_lib.token_classifier import for_task

BAR = 20.0
ERROR_BAR = 1e-10
CHUNKS = (100, 500)


def seconds(function, repeats):
    """Processor time of each of some runs: the machine's other work counts little."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return times


def trained(task):
    """A network that has learned something in a second or two, so that no path is degenerate."""
    model = for_task(task, 6, 2, 48)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    draw = torch.Generator().manual_seed(0)
    for _ in range(150):
        batch = task.train.take(torch.randint(len(task.train), (100,), generator=draw))
        loss = torch.nn.functional.cross_entropy(model(batch.inputs).flatten(0, 1), batch.labels.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model


def main():
    """Print the times; 1 if a bar is missed."""
    task = sorting.make(seed=0)
    model, data = trained(task), task.test
    double = copy.deepcopy(model).double()
    found = pe.exact(model, data)
    before = seconds(lambda: pe.exact(model, data), 5)
    protocol = {}
    for name, net, share in (
        ("protocol, float32", model, False),
        ("protocol, float64", double, False),
        ("protocol, float32, shared", model, True),
    ):
        protocol[name] = min(
            seconds(lambda n=net, s=share, c=c: pe.sampled(n, data, 20, 5, chunk=c, share=s), 1)[0]
            for c in CHUNKS
        )
    # Half of the exact runs before the protocol and half after: a machine that slows down hurts both.
    exact = statistics.median(before + seconds(lambda: pe.exact(model, data), 5))
    print(f"accuracy {found.full:.3f}, {sum(found.counts)} paths, logits' error {found.reconstruction:.0e}")
    print(f"  {'exact spectrum, float64':28s} {exact:7.3f} s")
    for name, time_taken in protocol.items():
        print(f"  {name:28s} {time_taken:7.3f} s  {time_taken / exact:6.1f} times as long")
    missed = protocol["protocol, float32"] < BAR * exact or found.reconstruction > ERROR_BAR
    print(f"  bars: {BAR:g} times, error {ERROR_BAR:g}: {'MISSED' if missed else 'met'}")
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
