import errno
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from rc_lib import checkpoints, generators, results, training, training_plan
from rc_lib.san import SAN

ROOT = Path(__file__).parents[1]
ROWS = torch.Generator().manual_seed(3)
X = torch.randn(211, 5, generator=ROWS)
Y = X.argmax(1) % 3


@pytest.fixture(autouse=True)
def one_thread():
    """The same number of threads is part of the promise; one is the fastest for networks this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_flush(monkeypatch):
    """A busy disk may take a second to flush, and some runs here save at every step.

    What a process has written survives the process; flushing is for failures of power.
    """
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Small(nn.Module):
    """A classifier with dropout, initialised from a seed of its own."""

    def __init__(self, seed=0, dropout=0.2, width=17, dtype=torch.float32):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.inner = nn.Parameter(torch.randn(5, width, generator=draw).to(dtype) / 3)
        self.outer = nn.Parameter(torch.randn(width, 3, generator=draw).to(dtype) / 3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(torch.relu(x.to(self.inner.dtype) @ self.inner)) @ self.outer


def loss(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def accuracy(model):
    return {"accuracy": (model(X).argmax(1) == Y).double().mean()}


def fit(model=None, loss=loss, data=(X, Y), epochs=5, batch_size=32, **options):
    model = model or Small()
    return model, training.fit(model, loss, data, epochs=epochs, batch_size=batch_size, **options)


def weights(model):
    return checkpoints.digest(model.state_dict())


class Crash(Exception):
    pass


def crashing(after, loss=loss):
    """Return a loss that fails when it is called once more than ``after`` times."""
    calls = iter(range(after))

    def crashed(*batch):
        if next(calls, None) is None:
            raise Crash
        return loss(*batch)

    return crashed


# What is computed


def test_one_step_by_hand():
    """One AdamW step from m = v = 0 moves w to (1 - lr·decay) w - lr·g/(|g| + eps)."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, 2.0)
    x = torch.tensor([[3.0], [1.0]], dtype=torch.float64)
    history = training.fit(
        model, lambda m, x: m(x).square().mean(), [x], epochs=1, batch_size=2, lr=0.25, weight_decay=0.5
    )
    assert history.loss == [20.0]  # ((2·3)² + (2·1)²)/2
    assert model.weight.item() == pytest.approx(2 * (1 - 0.125) - 0.25, rel=1e-9)  # eps/|g| is 1e-8/20


def test_the_loop_is_the_plain_loop():
    """The same as a loop written out here with torch's own AdamW, scheduler and clipping."""
    steps, warmup = 7 * 4, 5
    model, history = fit(
        Small(dropout=0.0),
        epochs=4,
        lr=0.02,
        schedule="cosine",
        warmup=warmup,
        clip=0.5,
        weight_decay=0.1,
        seed=11,
    )
    plain = Small(dropout=0.0)
    order = torch.Generator().manual_seed(11)
    torch.randint(2**62, (), generator=order)
    optimiser = torch.optim.AdamW(plain.parameters(), lr=0.02, weight_decay=0.1)
    rise = torch.optim.lr_scheduler.LinearLR(optimiser, 1 / warmup, 1.0, warmup - 1)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps - warmup)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimiser, [rise, fall], [warmup])
    means = []
    for _ in range(4):
        total = 0.0
        for rows in torch.randperm(len(X), generator=order).split(32):
            value = loss(plain, X[rows], Y[rows])
            optimiser.zero_grad()
            value.backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimiser.step()
            schedule.step()
            total += value.item() * len(rows)
        means.append(total / len(X))
    assert history.loss == pytest.approx(means, rel=1e-5)
    # The fused optimiser rounds in another order: 28 steps of float32 roundings on weights of order 1.
    torch.testing.assert_close(model.inner, plain.inner, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", training_plan.SCHEDULES)
def test_the_rate_rises_and_falls(schedule):
    factors = [training_plan.rate(step, 13, schedule, 3) for step in range(13)]
    assert factors[:4] == pytest.approx([1 / 3, 2 / 3, 1, 1])
    falling = {
        "constant": [1] * 10,
        "linear": [1 - k / 10 for k in range(10)],
        "cosine": [0.5 + 0.5 * math.cos(math.pi * k / 10) for k in range(10)],
    }
    assert factors[3:] == pytest.approx(falling[schedule])
    assert min(factors) > 0


def test_every_row_is_drawn_once_an_epoch_together_and_in_another_order():
    rows = torch.arange(23)
    seen = []

    def watching(model, i, double):
        assert torch.equal(double, 2 * i)
        seen.append(i.tolist())
        return model.outer.sum()

    fit(Small(), watching, (rows, 2 * rows), epochs=3, batch_size=7)
    assert [len(each) for each in seen] == [7, 7, 7, 2] * 3
    epochs = [[i for each in seen[4 * k : 4 * k + 4] for i in each] for k in range(3)]
    assert all(sorted(each) == list(range(23)) for each in epochs)
    assert len({tuple(each) for each in [*epochs, list(range(23))]}) == 4


def test_the_epoch_s_loss_is_the_mean_over_rows():
    values = torch.tensor([1.0, 2.0, 6.0])
    still = nn.Linear(1, 1)
    history = training.fit(
        still, lambda m, v: v.mean() + 0 * m.weight.sum(), [values], epochs=1, batch_size=2
    )
    assert history.loss == [3.0]


def test_the_same_seed_gives_the_same_bits_and_another_does_not():
    runs = [fit(seed=seed) for seed in (0, 0, 1)]
    assert weights(runs[0][0]) == weights(runs[1][0]) != weights(runs[2][0])
    assert runs[0][1] == runs[1][1] != runs[2][1]


def test_nothing_of_the_global_generator_matters_or_changes():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, _ = fit()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert weights(fit()[0]) == weights(first)
    with pytest.raises(Crash):
        fit(loss=crashing(3))
    torch.manual_seed(6)
    after = torch.get_rng_state()
    with pytest.raises(Crash):
        fit(loss=crashing(3))
    assert torch.equal(torch.get_rng_state(), after)


def test_order_and_dropout_are_independent_streams():
    """The order of rows does not depend on how much dropout draws."""

    def orders(model):
        seen = []

        def watching(m, i):
            seen.append(i.tolist())
            return m(X[i]).sum()

        fit(model, watching, (torch.arange(len(X)),), epochs=2)
        return seen

    assert orders(Small(dropout=0.0)) == orders(Small(dropout=0.5))


def test_dropout_is_on_in_training_and_off_in_metrics():
    modes = []

    def watching(model, x, y):
        modes.append(model.training)
        return loss(model, x, y)

    def metrics(model):
        assert not model.training
        assert not torch.is_grad_enabled()
        assert torch.equal(model(X), model(X))
        return {"ok": 1}

    model, _ = fit(Small().eval(), watching, metrics=metrics)
    assert modes == [True] * 5 * 7
    assert not model.training


def test_metrics_change_nothing_even_if_they_draw():
    plain, history = fit()

    def drawing(model):
        torch.rand(100)
        return {"x": 1.0}

    watched, other = fit(metrics=drawing)
    assert weights(plain) == weights(watched)
    assert history.loss == other.loss


def test_metrics_are_plain_numbers_every_few_epochs_and_at_the_end():
    model, history = fit(metrics=accuracy, every=2)
    assert history.metrics["epoch"] == [2, 4, 5]
    assert all(type(each) is float for each in history.metrics["accuracy"] + history.loss)
    assert history.metrics["accuracy"][-1] == accuracy(model)["accuracy"].item()
    assert (history.epochs, history.stopped, len(history.loss)) == (5, False, 5)
    assert json.loads(json.dumps(vars(history)))["loss"] == history.loss
    assert history.seconds > 0


def test_stop_ends_the_run():
    asked = []

    def stop(found):
        asked.append(found)
        return found["epoch"] >= 4

    _, history = fit(epochs=50, metrics=accuracy, every=2, stop=stop)
    assert (history.epochs, history.stopped, len(history.loss)) == (4, True, 4)
    assert [set(each) for each in asked] == [{"epoch", "accuracy", "loss"}] * 2
    assert asked[-1]["loss"] == history.loss[-1]
    _, without = fit(epochs=50, stop=lambda found: found["loss"] < 1.5)
    assert without.epochs < 50
    assert without.metrics == {}


def test_it_learns():
    _, history = fit(Small(width=64), epochs=40, lr=0.02, schedule="cosine", metrics=accuracy, every=40)
    assert history.loss[-1] < 0.5 * history.loss[0]
    assert history.metrics["accuracy"][0] > 0.9


def test_double_precision_and_frozen_parameters():
    model = Small(dtype=torch.float64)
    model.inner.requires_grad_(False)
    before = model.inner.clone()
    _, history = fit(model)
    assert torch.equal(model.inner, before)
    assert model.outer.dtype == torch.float64
    assert history.loss[-1] < history.loss[0]


def test_the_bar_is_on_the_error_stream_and_only_if_asked_for(capsys):
    fit(progress=True)
    told = capsys.readouterr()
    assert told.out == ""
    assert "35/35" in told.err
    assert "loss=" in told.err
    fit()
    assert capsys.readouterr().err == ""


# Checkpoints


@pytest.mark.parametrize("after", [0, 3, 7, 8, 20, 34])
def test_a_crash_at_any_step_is_resumed_to_the_same_bits(tmp_path, after):
    options = {"metrics": accuracy, "every": 2, "schedule": "linear", "warmup": 3, "clip": 1.0}
    whole, history = fit(**options, checkpoint=tmp_path / "whole", save_seconds=0)
    path = tmp_path / "run"
    with pytest.raises(Crash):
        fit(loss=crashing(after), **options, checkpoint=path, save_seconds=0)
    resumed, other = fit(**options, checkpoint=path, save_seconds=1e9)
    assert weights(resumed) == weights(whole) == weights(fit(**options)[0])
    assert history == other
    assert_same(content(tmp_path / "whole"), content(path))


def content(path):
    """Return a checkpoint's content but for the time that it took."""
    found = checkpoints.unpack(path.read_bytes())
    del found["state"]["history"]["seconds"]
    return found


def assert_same(a, b):
    """Compare two nested contents, every bit of the tensors included."""
    if isinstance(a, torch.Tensor):
        assert checkpoints.digest({"": a}) == checkpoints.digest({"": b})
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert a == b


def test_losses_read_late_give_the_same(monkeypatch, tmp_path):
    """On another device losses are read in groups; the groups do not show in what comes out."""
    reading = training._Run.read

    def late(run):
        if len(run.unread) >= 4 or run.batch == run.plan.steps:
            reading(run)

    whole, history = fit()
    monkeypatch.setattr(training._Run, "read", late)
    late_model, late_history = fit()
    assert weights(whole) == weights(late_model)
    assert history == late_history


def test_a_finished_run_is_given_back_at_once(tmp_path):
    path = tmp_path / "run"
    model, history = fit(metrics=accuracy, checkpoint=path)
    written = path.read_bytes()
    again, other = fit(loss=crashing(0), metrics=accuracy, checkpoint=path)
    assert weights(again) == weights(model)
    assert history == other
    assert history.seconds == other.seconds
    assert not again.training
    same, _ = fit(model, loss=crashing(0), metrics=accuracy, checkpoint=path)
    assert same is model
    assert path.read_bytes() == written


def test_an_early_stop_is_remembered(tmp_path):
    path = tmp_path / "run"
    _, history = fit(stop=lambda found: found["epoch"] == 2, checkpoint=path)
    _, again = fit(loss=crashing(0), stop=lambda found: False, checkpoint=path)
    assert again == history
    assert again.stopped


def test_time_adds_up_over_attempts(tmp_path):
    def slow(*batch):
        time.sleep(0.01)
        return loss(*batch)

    with pytest.raises(Crash):
        fit(loss=crashing(20, slow), checkpoint=tmp_path / "run", save_seconds=0)
    _, history = fit(checkpoint=tmp_path / "run")
    assert history.seconds >= 0.2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"epochs": 6}, r"epochs=5 \(now 6\)"),
        ({"batch_size": 31}, r"batch_size=32 \(now 31\)"),
        ({"lr": 0.5}, r"lr=0\.001 \(now 0\.5\)"),
        ({"seed": 1}, r"seed=0 \(now 1\)"),
        ({"schedule": "linear"}, r"schedule='constant' \(now 'linear'\)"),
        ({"clip": 1.0}, r"clip=None \(now 1\.0\)"),
        ({"model": Small(width=19)}, "architecture="),
        ({"model": Small(dtype=torch.float64)}, "architecture="),
        ({"model": Small(dropout=0.3)}, "architecture="),
        ({"data": (X + 1e-6, Y)}, "data="),
        ({"data": (X, Y.int())}, "data="),
        ({"model": Small(seed=1)}, "other initial weights"),
    ],
    ids=lambda each: None if isinstance(each, str) else "-".join(each),
)
def test_another_run_s_checkpoint_is_refused(tmp_path, options, named):
    path = tmp_path / "run"
    fit(checkpoint=path)
    written = path.read_bytes()
    with pytest.raises(checkpoints.CheckpointError, match=named):
        fit(**options, checkpoint=path)
    assert path.read_bytes() == written


def test_networks_that_differ_only_in_how_they_compute_differ():
    networks = [
        SAN(1, 1, 4, skip=True, norm="post"),
        SAN(1, 1, 4, skip=True, norm="pre"),
        SAN(1, 1, 4, skip=False, norm="post"),
        SAN(1, 1, 4, skip=True, norm="post", eps=1e-6),
        SAN(1, 1, 4, skip=True, norm="post", dropout=0.1),
    ]
    plan = training_plan.Plan(1, 1, 1.0, 0.0, "constant", 0, None, 0, 1, 7)
    told = {training_plan.settings(plan, each, [X])["architecture"] for each in networks}
    assert len(told) == len(networks)
    same = training_plan.settings(plan, SAN(1, 1, 4, skip=True, norm="post").eval(), [X])["architecture"]
    assert same in told


def test_a_damaged_checkpoint_is_told_and_kept(tmp_path):
    path = tmp_path / "run"
    fit(checkpoint=path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(checkpoints.CheckpointError, match="delete it to start anew"):
        fit(checkpoint=path)
    assert path.exists()


def test_an_unwritable_folder_is_told_before_the_first_step(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(results.ResultError, match="Not a directory"):
        fit(loss=crashing(0), checkpoint=tmp_path / "file" / "run")

    def refuse(*args):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "replace", refuse)  # modes of folders do not bind the superuser
    with pytest.raises(results.ResultError, match=r"cannot write .*run: Permission denied"):
        fit(loss=crashing(0), checkpoint=tmp_path / "run")


def test_a_disk_that_fills_up_loses_nothing_written(tmp_path, monkeypatch):
    path = tmp_path / "run"
    flush, calls = os.fsync, iter(range(12))

    def filling(descriptor):
        if next(calls, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", filling)
        with pytest.raises(results.ResultError, match="No space left on device; what was stored before"):
            fit(checkpoint=path, save_seconds=0)
    # The first save is before the first step, so the twelfth is after the eleventh: 7 steps are an epoch.
    assert content(path)["state"]["position"] == [1, 4]
    assert [each.name for each in tmp_path.iterdir()] == ["run"]
    assert weights(fit(checkpoint=path)[0]) == weights(fit()[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, bad):
    calls = iter(range(100))

    def diverging(model, x, y):
        return loss(model, x, y) * (bad if next(calls) == 9 else 1)

    path = tmp_path / "run"
    with pytest.raises(FloatingPointError, match=rf"loss is {bad} at step 10 of 35 \(epoch 2, batch 3\)"):
        fit(loss=diverging, checkpoint=path, save_seconds=0)
    assert content(path)["state"]["position"] == [1, 2]
    assert all(each.isfinite().all() for each in content(path)["state"]["model"].values())
    assert weights(fit(checkpoint=path)[0]) == weights(fit()[0])


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    calls = iter(range(100))

    def diverging(model, x, y):
        # sqrt(0) is finite, but its slope is not: the loss shows nothing before the next step.
        return loss(model, x, y) + ((model.outer * 0).sum().sqrt() if next(calls) == 9 else 0)

    path = tmp_path / "run"
    with pytest.raises(training.DivergedError, match=r"outer holds NaN .* after step 10 of 35"):
        fit(loss=diverging, checkpoint=path, save_seconds=0)
    assert content(path)["state"]["position"] == [1, 2]


def test_the_last_step_is_checked_without_a_checkpoint():
    calls = iter(range(100))

    def diverging(model, x, y):
        return loss(model, x, y) + ((model.outer * 0).sum().sqrt() if next(calls) == 34 else 0)

    with pytest.raises(training.DivergedError, match="after step 35 of 35"):
        fit(loss=diverging)


# Killed for good


def long_run(folder, name, save_seconds):
    """Train a network with dropout for a second or two; what the victims below do."""
    torch.set_num_threads(1)
    folder = Path(folder)
    model = nn.Sequential(SAN(2, 2, 8, skip=True, norm="post", dropout=0.1, dtype=torch.float32))
    tokens = torch.randn(300, 3, 8, generator=torch.Generator().manual_seed(1))

    def spread(model, x, target):
        return (model(x) - target.flip(1)).square().mean()

    history = training.fit(
        model,
        spread,
        (tokens, tokens),
        epochs=8,
        batch_size=13,
        schedule="cosine",
        warmup=5,
        seed=2,
        metrics=lambda m: {"size": m(tokens).square().mean()},
        checkpoint=folder / name,
        save_seconds=save_seconds,
    )
    final = {**vars(history), "seconds": 0, "weights": weights(model)}
    (folder / f"{name}.json").write_text(json.dumps(final))


def forked(work, *arguments, after=None, patch=None):
    """Do the work in a child; kill it ``after`` seconds unless it is done. Return whether it was killed."""
    child = os.fork()
    if child == 0:
        if patch:
            setattr(os, *patch)
        work(*arguments)
        os._exit(0)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL


def warm_up():
    """Import what torch imports late: the victims, forked afterwards, are then killed in training."""
    os.fsync = lambda descriptor: None  # as in the fixture above
    fit(epochs=1)


def killed_at_random(folder):
    """Kill a run at ten random moments, then let it end; beside it one that is left in peace."""
    warm_up()
    start = time.monotonic()
    forked(long_run, folder, "whole", 0)
    seconds, moments = time.monotonic() - start, random.Random(0)
    killed, positions = 0, []
    for k in range(10):
        # On average half the run's time in all; savings at every step and now and then take turns.
        after = moments.uniform(0, seconds / 10)
        killed += forked(long_run, folder, "run", 0 if k % 2 else 0.02, after=after)
        path = Path(folder, "run")
        positions.append(checkpoints.unpack(path.read_bytes())["state"]["position"] if path.exists() else [])
    forked(long_run, folder, "run", 0.02)
    print(json.dumps({"killed": killed, "positions": positions}))


def killed_while_writing(folder):
    """Kill a run in the very calls that make a file whole: one flush, one rename."""
    warm_up()
    forked(long_run, folder, "whole", 0)
    for name in ("fsync", "replace"):
        done, calls = getattr(os, name), iter(range(60))

        def kill(*arguments, done=done, calls=calls):
            if next(calls, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            done(*arguments)

        assert forked(long_run, folder, "run", 0, patch=(name, kill))
    left = [each.name for each in Path(folder).glob(".run.*.tmp")]
    forked(long_run, folder, "run", 1)
    print(json.dumps({"left": left, "swept": len(checkpoints.sweep(Path(folder, "run"), older=-1))}))


def victims(work, folder):
    """Run one of the above in a process that imports torch once and forks its victims."""
    code = f"import sys; from tests.test_training import {work} as work; work(sys.argv[1])"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert_same(
        json.loads((folder / "whole.json").read_text()), json.loads((folder / "run.json").read_text())
    )
    assert_same(content(folder / "whole"), content(folder / "run"))
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_run_killed_ten_times_ends_with_the_same_bits(tmp_path):
    found = victims("killed_at_random", tmp_path)
    assert found["killed"] == 10
    assert found["positions"] == sorted(found["positions"])
    assert any(position and position[1] > 0 for position in found["positions"])  # within an epoch too


@pytest.mark.slow
def test_a_run_killed_while_it_writes_leaves_a_whole_checkpoint(tmp_path):
    found = victims("killed_while_writing", tmp_path)
    assert found["swept"] == len(found["left"]) == 2


# Bad arguments


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"epochs": 0}, ValueError, "epochs must be at least 1"),
        ({"epochs": 1.5}, TypeError, "epochs must be a whole number"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"every": 0}, ValueError, "every"),
        ({"lr": 0.0}, ValueError, "lr must be finite and positive"),
        ({"lr": math.nan}, ValueError, "lr must be finite"),
        ({"lr": "fast"}, TypeError, "lr must be a number"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay must be finite and at least 0"),
        ({"clip": 0}, ValueError, "clip must be finite and positive"),
        ({"schedule": "step"}, ValueError, "schedule must be one of 'constant', 'cosine', 'linear'"),
        ({"warmup": -1}, ValueError, "warmup"),
        ({"warmup": 35}, ValueError, "warmup must be below the run's 35 steps, but is 35"),
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": 2**62}, ValueError, "seed must be below"),
        ({"save_seconds": -1}, ValueError, "save_seconds"),
        ({"save_seconds": math.inf}, ValueError, "save_seconds must be finite"),
        ({"device": "nowhere"}, ValueError, "device='nowhere' cannot be used here"),
        ({"data": ()}, TypeError, "data must be a sequence of one or more tensors"),
        ({"data": X}, TypeError, "data must be a sequence"),
        ({"data": (X, [1])}, TypeError, r"data\[1\] must be a torch tensor"),
        ({"data": (X, Y[1:])}, ValueError, r"data\[1\] must have 211 rows as data\[0\] has"),
        ({"data": (X[:0], Y[:0])}, ValueError, r"data\[0\] must have one or more rows"),
        ({"data": (torch.tensor(1.0),)}, ValueError, r"data\[0\] must have one or more rows"),
        ({"data": (torch.full((7, 2), math.nan),)}, ValueError, r"data\[0\] must be finite"),
        ({"model": nn.ReLU()}, ValueError, "no parameter that requires a gradient"),
        ({"model": "net"}, TypeError, "model must be a torch module"),
        ({"loss": 3}, TypeError, "loss must be a function"),
        ({"metrics": 3}, TypeError, "metrics must be a function"),
        ({"stop": 3}, TypeError, "stop must be a function"),
        ({"loss": lambda m, x, y: 1.0}, ValueError, "loss must return a scalar tensor"),
        ({"loss": lambda m, x, y: m(x)}, ValueError, r"loss must return .* of shape \(32, 3\)"),
        ({"loss": lambda m, x, y: x.sum()}, ValueError, "loss must return .* depends on the model"),
        ({"metrics": lambda m: {"loss": 1.0}}, ValueError, "must not be called 'epoch' or 'loss'"),
        ({"metrics": lambda m: 0.5}, TypeError, "metrics must return a dict of numbers, but returned float"),
        (
            {"metrics": lambda m: {"a": None}},
            TypeError,
            r"metrics must return .* returned dict \{'a': None\}",
        ),
        ({"metrics": lambda m: {"a": "1"}}, TypeError, "metrics must return a dict of numbers"),
        ({"metrics": lambda m: {"a": X}}, TypeError, "metrics must return a dict of numbers"),
        ({"checkpoint": 3}, TypeError, "checkpoint must be a file's path, but is int 3"),
        ({"checkpoint": ""}, TypeError, "checkpoint must be a file's path, but is str ''"),
    ],
    ids=lambda each: None if isinstance(each, str | type) else "-".join(each),
)
def test_bad_arguments_are_named(plain_types, tmp_path, options, error, named):
    with pytest.raises(error, match=named):
        fit(**{"model": Small(), "checkpoint": None, **options})


def test_weights_that_begin_infinite_are_refused():
    model = Small()
    with torch.no_grad():
        model.outer[2, 1] = math.inf
    with pytest.raises(ValueError, match="model must hold finite weights, but outer"):
        fit(model)


def test_metrics_that_change_their_names_are_refused():
    names = iter("ab")
    with pytest.raises(ValueError, match="metrics must return the same names"):
        fit(metrics=lambda model: {next(names): 1.0})


def test_numpy_numbers_are_as_good(plain_types, tmp_path):
    options = {"epochs": np.int64(2), "lr": np.float64(0.01), "seed": np.int32(4), "weight_decay": 0}
    first, _ = fit(**options, checkpoint=tmp_path / "run")
    again, _ = fit(epochs=2, lr=0.01, seed=4, weight_decay=0.0, checkpoint=tmp_path / "run")
    assert weights(first) == weights(again)


# The generators


class FakeDevice:
    """Stands for an accelerator's module: three devices with one number each as their state."""

    def __init__(self):
        self.numbers = [1, 2, 3]

    def device_count(self):
        return 3

    def get_rng_state(self, device):
        return torch.tensor(
            self.numbers[torch.device(device).index if isinstance(device, str) else _at(device)]
        )

    def set_rng_state(self, state, device):
        self.numbers[_at(device)] = int(state)

    def manual_seed(self, value):
        self.numbers[0] = value

    def manual_seed_all(self, value):
        self.numbers = [value] * 3


def _at(device):
    return device if isinstance(device, int) else device.index


def test_generators_take_no_seed_that_they_do_not_hold():
    for bad in (-1, 2**62):
        with pytest.raises(ValueError, match="value must be"):
            generators.seed(torch.device("cpu"), bad)


def test_an_accelerator_s_generators_are_lent_too(monkeypatch):
    fake, device = FakeDevice(), torch.device("cuda", 1)
    monkeypatch.setattr(torch, "cuda", fake)
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    before = torch.get_rng_state()
    with generators.lent(device):
        generators.seed(device, 7)
        assert fake.numbers == [7, 7, 7]
        stored = generators.states(device)
        assert set(stored) == {"cpu", "cuda"}
        generators.seed(device, 8)
        generators.set_states(device, stored)
        assert fake.numbers == [8, 7, 8]
        assert torch.initial_seed() == 7
    assert fake.numbers == [1, 2, 3]
    assert torch.equal(torch.get_rng_state(), before)
