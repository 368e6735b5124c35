"""Sweeps give the same numbers wherever their units are computed, whoever is killed on the way."""

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
import types
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch

from rc_lib import __main__ as cli
from rc_lib import experiments, results, training
from rc_lib.experiments import cluster, jobs, runner, workers

ROOT = Path(__file__).resolve().parents[1]


def units(settings):
    return [{"seed": seed} for seed in settings["seeds"]]


def note(settings, unit):
    """Write down that a process begins a unit; return how many have begun it."""
    folder = Path(settings["log"])
    (folder / f"{unit['seed']}-{os.getpid()}-{uuid.uuid4().hex}").touch()
    return len(list(folder.glob(f"{unit['seed']}-*")))


def run_unit(settings, unit, context):
    attempt = note(settings, unit) if settings["log"] else 1
    if unit["seed"] == 1 and settings["fate"] == "raise":
        raise ValueError("unit 1 went wrong")
    if unit["seed"] == 1 and settings["fate"] == "die" and attempt <= settings["deaths"]:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(settings["sleep"])
    drawn = torch.randn(5, 3, generator=torch.Generator().manual_seed(unit["seed"]))
    return {"y": (drawn.T @ drawn).numpy(), "device": np.array(context.device)}


def combine(settings, units, arrays):
    return {key: np.stack([each[key] for each in arrays]) for key in arrays[0]}, {}


PLAIN = {"log": "", "fate": "", "sleep": 0.0, "deaths": 1}
EXPERIMENT = experiments.Experiment(
    name="toy_sweep",
    about="random numbers",
    presets={"quick": PLAIN},
    units=units,
    run_unit=run_unit,
    combine=combine,
)


def toy(log="", **settings):
    return dataclasses.replace(EXPERIMENT, presets={"quick": {**PLAIN, "log": str(log), **settings}})


def attempts(log, seed):
    return len(list(Path(log).glob(f"{seed}-*")))


def computing_processes(log):
    """The processes that began a unit and still run."""
    found = {int(path.name.split("-")[1]) for path in Path(log).iterdir()} - {os.getpid()}
    return {pid for pid in found if alive(pid)}


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.fixture(scope="module")
def scheduler():
    """A Dask cluster of two worker processes."""
    with dask_cluster(2) as local:
        yield local


def dask_cluster(count):
    distributed = pytest.importorskip("distributed")
    # Port 0 is any free one: None would ask for 8787, and warn when another test's cluster has it.
    return distributed.LocalCluster(n_workers=count, threads_per_worker=1, dashboard_address="127.0.0.1:0")


@pytest.fixture
def log(tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    return folder


def same_bits(one, two):
    one, two = results.read(one), results.read(two)
    assert one.settings == two.settings
    assert one.arrays.keys() == two.arrays.keys()
    return all(one.arrays[key].tobytes() == two.arrays[key].tobytes() for key in one.arrays)


def test_wherever_units_are_computed_the_result_is_the_same(tmp_path, scheduler):
    places = {"here": {}, "one": {"workers": 1}}  # two are below, where one of them dies
    places["dask"] = {"scheduler": scheduler.scheduler_address}
    seen = {place: [] for place in places}
    paths = {
        place: experiments.run(
            EXPERIMENT, "quick", range(5), tmp_path / place, lambda u, s, p=place: seen[p].append(u), **where
        )
        for place, where in places.items()
    }
    expected = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))
    assert np.array_equal(results.read(paths["here"]).arrays["y"][3], (expected.T @ expected).numpy())
    for place, path in paths.items():
        assert same_bits(path, paths["here"]), place
        assert sorted(unit["seed"] for unit in seen[place]) == [0, 1, 2, 3, 4]
        assert [each.name for each in (tmp_path / place).iterdir()] == [path.name]


def test_a_killed_process_is_replaced_and_its_unit_computed_again(tmp_path, log):
    seen = []
    sweep = toy(log, fate="die", deaths=1)
    path = experiments.run(sweep, "quick", range(4), tmp_path, lambda u, s: seen.append(u["seed"]), workers=2)
    assert [attempts(log, seed) for seed in range(4)] == [1, 2, 1, 1]
    assert sorted(seen) == [0, 1, 2, 3]
    assert np.array_equal(results.read(path).arrays["y"], expected_y(range(4)))
    assert not computing_processes(log)


def expected_y(seeds):
    drawn = [torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return np.stack([(each.T @ each).numpy() for each in drawn])


def test_a_unit_that_kills_every_process_ends_the_run_and_loses_nothing(tmp_path, log, monkeypatch):
    monkeypatch.setattr(workers, "ATTEMPTS", 2)
    sweep = toy(log, fate="die", deaths=99)
    with pytest.raises(experiments.SweepError, match=r"unit \{'seed': 1\}: its process died 2 times.*-9"):
        experiments.run(sweep, "quick", [0, 1], tmp_path, workers=1)
    assert attempts(log, 1) == 2
    (kept,) = (tmp_path / ".parts").rglob("*.npz")
    assert results.read(kept).settings == {"seed": 0}


def test_what_a_unit_raises_in_a_process_is_raised_here(tmp_path, log):
    sweep = toy(log, fate="raise", sleep=90.0)
    start = time.monotonic()
    with pytest.raises(ValueError, match="unit 1 went wrong") as caught:
        experiments.run(sweep, "quick", [0, 1], tmp_path, workers=2)
    assert time.monotonic() - start < 60  # the other unit, asleep, is not waited for
    assert "in a worker process" in caught.value.__notes__[0]
    assert "line" in caught.value.__notes__[0]
    assert not computing_processes(log)


class _Stubborn(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.hook = lambda: text


def _raise_stubborn(settings, unit, context):
    raise _Stubborn("no pickle")


def test_an_error_that_does_not_pickle_still_says_what_it_said():
    job = jobs.Job("x", _raise_stubborn, {}, {}, experiments.Context())
    answer = workers.pickle.loads(workers._answer(workers.pickle.dumps(job)))
    assert (type(answer), str(answer)) == (experiments.SweepError, "_Stubborn: no pickle")


@pytest.mark.parametrize("where", [{"workers": 2}, {"workers": 1}])
def test_a_function_that_processes_cannot_import_is_refused(tmp_path, where):
    hidden = dataclasses.replace(EXPERIMENT, run_unit=lambda settings, unit, context: {})
    with pytest.raises(ValueError, match="worker processes import it by name"):
        experiments.run(hidden, "quick", [0], tmp_path, **where)


@pytest.mark.parametrize("name", sorted(experiments.MODULES))
def test_processes_can_import_every_experiment(name):
    experiment = experiments.get(name)
    (scale, *_), seeds = experiment.presets, [0]
    parts = runner.Parts(experiment, experiment.settings(scale, seeds), Path("nowhere"))
    workers._check_importable(parts.job(parts.units[0], "cpu", False))


@pytest.mark.parametrize("count", [0, 2])
def test_begin_is_told_once_before_the_first_unit(tmp_path, count):
    told, hear = [], {"progress": lambda unit, seconds: told.append(unit["seed"])}
    hear["begin"] = lambda: told.append("begin")
    experiments.run(EXPERIMENT, "quick", range(3), tmp_path, workers=count, **hear)
    assert told[0] == "begin"
    assert sorted(told[1:]) == [0, 1, 2]


def test_begin_is_not_told_when_nobody_computes(tmp_path):
    pytest.importorskip("distributed")
    told = []
    with pytest.raises(experiments.SweepError, match=r"tcp://127\.0\.0\.1:9"):
        experiments.run(
            EXPERIMENT,
            "quick",
            [0],
            tmp_path,
            scheduler="tcp://127.0.0.1:9",
            begin=lambda: told.append("begin"),
        )
    assert told == []


def test_places_that_exclude_each_other_are_refused(tmp_path, plain_types):
    with pytest.raises(ValueError, match="expected one of the two"):
        experiments.run(EXPERIMENT, "quick", [0], tmp_path, workers=1, scheduler="tcp://127.0.0.1:1")
    with pytest.raises(ValueError, match="workers must be at least 0, but is -1"):
        experiments.run(EXPERIMENT, "quick", [0], tmp_path, workers=-1)
    with pytest.raises(TypeError, match="workers must be a whole number, but is str 'two'"):
        experiments.run(EXPERIMENT, "quick", [0], tmp_path, workers="two")
    with pytest.raises(ValueError, match=r"device='tpu': expected cpu, cuda, cuda:N or mps"):
        experiments.run(EXPERIMENT, "quick", [0], tmp_path, device="tpu")


def test_the_cores_are_shared_out(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(7)), raising=False)
    assert [workers.threads_each(n) for n in (1, 2, 3, 7, 11)] == [7, 3, 2, 1, 1]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert [workers.threads_each(n) for n in (1, 3, 7)] == [2, 2, 1]


def _threads(settings, unit, context):
    return {"threads": np.array([torch.get_num_threads(), int(os.environ["OMP_NUM_THREADS"])])}


def test_a_process_has_its_share_of_threads_and_leaves_ours_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "threads_each", lambda count: 3)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    path = experiments.run(
        dataclasses.replace(EXPERIMENT, run_unit=_threads), "quick", [0], tmp_path, workers=1
    )
    assert results.read(path).arrays["threads"].tolist() == [[3, 3]]
    assert "OMP_NUM_THREADS" not in os.environ


# ---- devices


@pytest.mark.parametrize(
    ("name", "built", "count", "message"),
    [
        ("cuda", False, 0, "this PyTorch was built without CUDA"),
        ("cuda", True, 0, r"PyTorch finds no CUDA device \(torch.cuda.is_available\(\) is False\)"),
        ("cuda:2", True, 2, "there are 2 CUDA devices, counted from 0"),
        ("gpu", True, 2, "expected cpu, cuda, cuda:N or mps"),
        ("meta", True, 2, "expected cpu, cuda, cuda:N or mps"),
        ("", True, 2, "expected cpu, cuda, cuda:N or mps"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_the_reason(monkeypatch, name, built, count, message):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ValueError, match=rf"device='{name}': {message}"):
        experiments.check_device(name)


def test_devices_that_are_there_pass(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for name in ("cpu", "cuda", "cuda:1"):
        assert experiments.check_device(name) is None
    with pytest.raises(ValueError, match=r"device='mps': .* no Metal"):
        experiments.check_device("mps")


# ---- parts


def _checkpointed(settings, unit, context):
    assert context.checkpoint.parent.name.startswith("toy_sweep-")
    seen = context.checkpoint.read_text() if context.checkpoint.exists() else "nothing"
    context.checkpoint.write_text("half way")
    if unit["seed"] == 1 and seen == "nothing":
        raise ValueError("stopped half way")
    return {"seen": np.array(seen)}


def test_a_checkpoint_waits_in_the_parts_until_its_unit_is_stored(tmp_path):
    sweep = dataclasses.replace(EXPERIMENT, run_unit=_checkpointed)
    with pytest.raises(ValueError, match="half way"):
        experiments.run(sweep, "quick", [0, 1], tmp_path)
    left = [path.suffix for path in (tmp_path / ".parts").rglob("*.*") if path.is_file()]
    assert sorted(left) == [".checkpoint", ".npz"]
    path = experiments.run(sweep, "quick", [0, 1], tmp_path)
    assert results.read(path).arrays["seen"].tolist() == ["nothing", "half way"]
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_no_resume_drops_checkpoints_and_parts_of_this_run_alone(tmp_path):
    sweep = dataclasses.replace(EXPERIMENT, run_unit=_checkpointed)
    other = runner.Parts(sweep, sweep.settings("quick", [7]), tmp_path)
    for seeds in ([0, 1], [7, 1]):
        with pytest.raises(ValueError, match="half way"):
            experiments.run(sweep, "quick", seeds, tmp_path, resume=False)
    with pytest.raises(ValueError, match="half way"):  # nothing was resumed, so it stops half way again
        experiments.run(sweep, "quick", [0, 1], tmp_path, resume=False)
    assert other.read({"seed": 7}).settings == {"seed": 7}
    experiments.run(sweep, "quick", [0, 1], tmp_path)
    assert other.read({"seed": 7}).settings == {"seed": 7}  # another run's, kept


def test_checkpoints_of_other_versions_and_devices_have_other_names(tmp_path, monkeypatch):
    parts = runner.Parts(EXPERIMENT, EXPERIMENT.settings("quick", [0]), tmp_path)
    here = [parts.job({"seed": 0}, device, False).context.checkpoint for device in ("cpu", "cuda", "cpu")]
    assert here[0] == here[2] != here[1]
    monkeypatch.setattr(results, "versions", lambda: {"rc_lib": "another"})
    assert parts.job({"seed": 0}, "cpu", False).context.checkpoint not in here


def test_finishing_sweeps_away_what_killed_writers_left(tmp_path):
    parts = runner.Parts(EXPERIMENT, EXPERIMENT.settings("quick", [0]), tmp_path)
    parts.make()
    name = parts.name({"seed": 0})
    (parts.folder / f".{name}.npz.0123.tmp").touch()
    (parts.folder / f".{name}-a-b.checkpoint.4567.tmp").touch()
    path = experiments.run(EXPERIMENT, "quick", [0], tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


# ---- killing


def train_unit(settings, unit, context):
    """A training of some tenths of a second, saved after every step."""
    note(settings, unit)
    seed = unit["seed"]
    draws = torch.Generator().manual_seed(seed)
    x, w = torch.randn(64, 5, generator=draws), torch.randn(5, 3, generator=draws)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Dropout(0.1), torch.nn.Linear(7, 3))
    how = {"epochs": 8, "batch_size": 16, "seed": seed, "checkpoint": context.checkpoint, "save_seconds": 0.0}
    history = training.fit(model, slow_loss, [x, x @ w], **how)
    return {"loss": np.array(history.loss), "weight": model[2].weight.detach().numpy()}


def slow_loss(model, x, y):
    time.sleep(0.005)
    return torch.nn.functional.mse_loss(model(x), y)


TRAINED = dataclasses.replace(EXPERIMENT, name="toy_training", run_unit=train_unit)

# Starts the terminal's command as a process of its own, for every line that it is sent. It forks, having
# imported torch once, because ten starts from nothing would take most of the time.
# A shell starts background jobs with interrupts ignored, and children inherit that: undo it.
TERMINAL = """
import dataclasses, json, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv[1])
from rc_lib import __main__, experiments
from tests import test_experiments_runner as own

for line in sys.stdin:
    name, preset, words = json.loads(line)
    experiments.get = lambda key: dataclasses.replace(getattr(own, name), presets={"quick": preset})
    child = os.fork()
    if child == 0:
        sys.stdout = sys.stderr
        os._exit(__main__.main(["run", name, *words]))
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def terminal(tmp_path_factory):
    errors = tmp_path_factory.mktemp("terminal") / "stderr"
    pipe = subprocess.PIPE
    with open(errors, "w") as stream:
        command = [sys.executable, "-c", TERMINAL, str(ROOT)]
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stream, text=True)
    process.errors = errors
    with process:
        yield process
        process.stdin.close()


def start(terminal, name, preset, out, *words):
    """Run ten seeds from a terminal; return the process's id."""
    line = [name, preset, ["--seeds", "0-9", "--out", str(out), *words]]
    terminal.stdin.write(json.dumps(line) + "\n")
    terminal.stdin.flush()
    return int(terminal.stdout.readline())


def wait_for(condition, seconds=90.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_a_sweep_killed_at_ten_moments_ends_with_the_same_numbers(tmp_path, log, terminal):
    preset, moments, out = {**PLAIN, "log": str(log)}, random.Random(0), tmp_path / "out"
    codes = []
    for i in range(10):
        before = len(list(log.iterdir()))
        pid = start(terminal, "TRAINED", preset, out, *(["--workers", "2"] if i in (3, 6) else []))
        wait_for(lambda b=before, p=pid: len(list(log.iterdir())) > b or not alive(p))
        time.sleep(moments.uniform(0.0, 0.2))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        codes.append(int(terminal.stdout.readline()))
        wait_for(lambda: not computing_processes(log))  # workers end with the process that started them
        for path in out.rglob("*.npz"):
            results.read(path)  # whole, or CorruptResultError
    assert codes == [-signal.SIGKILL] * 10
    assert max(attempts(log, seed) for seed in range(10)) > 1  # units were begun again
    sweep = dataclasses.replace(TRAINED, presets={"quick": preset})
    path = experiments.run(sweep, "quick", range(10), out)
    assert [each.name for each in out.iterdir()] == [path.name]
    assert same_bits(path, experiments.run(sweep, "quick", range(10), tmp_path / "calm"))


LEAVES_NOTHING = """
import dataclasses, json, sys
sys.path.insert(0, sys.argv[1])
from rc_lib import experiments
from tests import test_experiments_runner as own

sweep = dataclasses.replace(own.TRAINED, presets={"quick": json.loads(sys.argv[2])})
experiments.run(sweep, "quick", [0], sys.argv[3], workers=1)
"""


def test_workers_leave_no_semaphore_behind(tmp_path, log):
    preset = json.dumps({**PLAIN, "log": str(log)})
    command = [sys.executable, "-c", LEAVES_NOTHING, str(ROOT), preset, str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stderr == ""  # Python's tracker of semaphores warns there of what killed processes left


def test_ctrl_c_stops_the_processes_and_keeps_what_is_stored(tmp_path, log, terminal):
    preset = {**PLAIN, "log": str(log), "sleep": 0.2}
    pid = start(terminal, "EXPERIMENT", preset, tmp_path / "out", "--workers", "2")
    wait_for(lambda: len(list((tmp_path / "out").rglob("*.npz"))) >= 2)
    kept = len(list((tmp_path / "out").rglob("*.npz")))
    os.kill(pid, signal.SIGINT)
    began = time.monotonic()
    assert int(terminal.stdout.readline()) == 130
    assert time.monotonic() - began < 10  # well below what the machine's load can add
    err = terminal.errors.read_text()
    assert err.splitlines()[-1].startswith(
        "interrupted; finished units and trainings' last checkpoints are kept"
    )
    assert "Traceback" not in err
    assert not computing_processes(log)
    seen = []
    sweep = dataclasses.replace(EXPERIMENT, presets={"quick": preset})
    experiments.run(sweep, "quick", range(10), tmp_path / "out", lambda u, seconds: seen.append(seconds))
    assert seen.count(0.0) >= kept


# ---- a Dask cluster


def test_a_cluster_that_loses_a_worker_loses_no_unit_and_counts_none_twice(tmp_path, log, scheduler):
    seen, killed = [], []

    def progress(unit, seconds):
        seen.append(unit["seed"])
        if not killed:  # mid-sweep: the other units are being computed, or wait
            killed.extend(sorted(computing_processes(log))[:1])
            os.kill(killed[0], signal.SIGKILL)

    sweep = toy(log, sleep=0.3)
    path = experiments.run(
        sweep, "quick", range(8), tmp_path, progress, scheduler=scheduler.scheduler_address
    )
    assert len(killed) == 1
    assert sorted(seen) == list(range(8))
    assert sum(attempts(log, seed) for seed in range(8)) > 8
    assert np.array_equal(results.read(path).arrays["y"], expected_y(range(8)))
    assert [each.name for each in tmp_path.iterdir() if each != log] == [path.name]


def test_what_a_unit_raises_on_a_cluster_is_raised_here_after_retries(tmp_path, log, scheduler):
    with pytest.raises(ValueError, match="unit 1 went wrong"):
        experiments.run(toy(log, fate="raise"), "quick", [1], tmp_path, scheduler=scheduler.scheduler_address)
    assert attempts(log, 1) == 1 + cluster.RETRIES


def test_a_checkpoint_on_a_cluster_stays_with_its_worker(tmp_path, scheduler):
    sweep = dataclasses.replace(EXPERIMENT, run_unit=_worker_checkpoint)
    path = experiments.run(sweep, "quick", [0], tmp_path / "out", scheduler=scheduler.scheduler_address)
    where = Path(str(results.read(path).arrays["where"][0]))
    assert tmp_path not in where.parents
    assert where.parent.is_dir()
    assert not where.exists()


def _worker_checkpoint(settings, unit, context):
    context.checkpoint.write_text("half way")
    return {"where": np.array(str(context.checkpoint))}


def test_other_versions_on_the_workers_are_refused(tmp_path, scheduler, monkeypatch):
    others = {**results.versions(), "rc_lib": "9.9", "torch": "1"}
    monkeypatch.setattr(results, "versions", lambda: others)
    message = r"other versions: rc_lib .*, here 9.9; torch .*, here 1;"
    with pytest.raises(experiments.SweepError, match=message):
        experiments.run(EXPERIMENT, "quick", [0], tmp_path, scheduler=scheduler.scheduler_address)
    monkeypatch.setattr(cluster, "_check_workers", lambda client, device: None)
    with pytest.raises(experiments.SweepError, match=r"a worker that joined later has other versions"):
        experiments.run(EXPERIMENT, "quick", [0], tmp_path, scheduler=scheduler.scheduler_address)


def test_a_device_that_the_workers_lack_is_refused(tmp_path, scheduler):
    if torch.cuda.is_available():
        pytest.skip("this machine's workers have the device")
    with pytest.raises(experiments.SweepError, match=r"the worker tcp.* cannot compute: device='cuda'"):
        experiments.run(
            EXPERIMENT, "quick", [0], tmp_path, device="cuda", scheduler=scheduler.scheduler_address
        )


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "nowhere", "", "tcp://"])
def test_an_address_where_nobody_answers_is_one_clear_error(tmp_path, address):
    pytest.importorskip("distributed")
    start = time.monotonic()
    with pytest.raises(experiments.SweepError, match=rf"scheduler='{address}': no Dask scheduler answers"):
        experiments.run(EXPERIMENT, "quick", [0], tmp_path, scheduler=address)
    assert time.monotonic() - start < 8


def test_a_server_that_is_no_scheduler_is_told_from_one():
    pytest.importorskip("distributed")
    with workers.connection.Listener(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.address[1]}"
        with pytest.raises(experiments.SweepError, match=r"no Dask scheduler answers there \(timed out\)"):
            next(cluster.on_cluster(iter([]), address, seconds=0.3))


def test_a_scheduler_without_workers_is_told():
    with dask_cluster(0) as empty, pytest.raises(experiments.SweepError, match="it has no workers"):
        next(cluster.on_cluster(iter([]), empty.scheduler_address, seconds=0.5))


def test_without_dask_the_command_that_installs_it_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.setitem(experiments.MODULES, "toy_sweep", "tests.test_experiments_runner")
    words = ["run", "toy-sweep", "--seed", "0", "--out", str(tmp_path), "--scheduler", "tcp://127.0.0.1:9"]
    assert cli.main(words) == 1
    assert 'pip install "rc-lib[cluster]"' in capsys.readouterr().err.splitlines()[-1]


class _Future:
    def __init__(self, error):
        self.error = error

    def result(self):
        raise self.error


def test_a_lost_scheduler_and_a_fatal_unit_are_told_in_a_sentence():
    distributed = pytest.importorskip("distributed")
    job = jobs.Job("x", run_unit, {}, {"seed": 3}, experiments.Context())
    for error in (distributed.comm.CommClosedError("gone"), asyncio.CancelledError("gone")):
        with pytest.raises(
            experiments.SweepError, match=r"the scheduler was lost .*; the same command goes on"
        ):
            cluster._result(_Future(error), job)
    died = distributed.KilledWorker("x", types.SimpleNamespace(address="tcp://w:1"), 3)
    with pytest.raises(experiments.SweepError, match=r"unit \{'seed': 3\}: every worker that tried it died"):
        cluster._result(_Future(died), job)
    with pytest.raises(OSError, match="the unit's own"):
        cluster._result(_Future(OSError("the unit's own")), job)
