import argparse
import dataclasses
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from rc_lib import __main__ as cli
from rc_lib import checkpoints, experiments, results
from rc_lib.experiments import runner

CALLS = []


def units(settings):
    return [{"model": model, "seed": seed} for model in settings["models"] for seed in settings["seeds"]]


def run_unit(settings, unit, context):
    if (settings["fail"], unit["seed"]) == ("boom", 2):
        raise ValueError("unit 2 went wrong")
    CALLS.append((unit["model"], unit["seed"]))
    time.sleep(settings.get("sleep", 0.0))
    return {"y": np.array([unit["seed"] * settings["factor"]])}


def combine(settings, units, arrays):
    return {"y": np.stack([each["y"] for each in arrays])}, {"units": [dict(unit) for unit in units]}


SETTINGS = {"factor": 10.0, "models": ["a", "b"], "fail": ""}
EXPERIMENT = experiments.Experiment(
    name="toy",
    about="ten times the seed",
    presets={"quick": SETTINGS, "broken": {**SETTINGS, "fail": "boom"}, "slow": {**SETTINGS, "sleep": 0.3}},
    units=units,
    run_unit=run_unit,
    combine=combine,
    weight=lambda unit: 3.0 if unit["model"] == "b" else 1.0,
    describe=lambda result: f"sum {result.arrays['y'].sum():.0f}",
)


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(experiments.MODULES, "toy", "tests.test_main")
    CALLS.clear()


def test_run_stores_what_load_finds(tmp_path, capsys):
    assert cli.main(["run", "toy", "--seeds", "0-2", "--out", str(tmp_path)]) == 0
    found = results.load("toy", folder=tmp_path, scale="quick", seeds=[0, 1, 2])
    assert found.arrays["y"].tolist() == [[0.0], [10.0], [20.0]] * 2
    assert found.settings == {**SETTINGS, "scale": "quick", "seeds": [0, 1, 2]}
    assert found.tables["units"][4] == {"model": "b", "seed": 1}
    out, err = capsys.readouterr()
    assert out.strip() == str(found.path)
    assert "toy 100%" in err
    assert "left" in err
    assert [path.name for path in tmp_path.iterdir()] == [found.path.name]


def test_a_stored_result_is_not_run_again_unless_asked(tmp_path, capsys):
    for extra, calls in ([], 2), ([], 2), (["--again"], 4):
        assert cli.main(["run", "toy", "--seeds", "4", "--out", str(tmp_path), *extra]) == 0
        assert len(CALLS) == calls
    assert "stored already" in capsys.readouterr().out


def test_a_damaged_result_is_run_again(tmp_path, capsys):
    cli.main(["run", "toy", "--seeds", "4", "--out", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"half a")
    assert cli.main(["list", "--out", str(tmp_path)]) == 0
    assert "damaged" in capsys.readouterr().out
    assert cli.main(["run", "toy", "--seeds", "4", "--out", str(tmp_path)]) == 0
    assert results.read(path).arrays["y"].tolist() == [[40.0], [40.0]]


def test_a_failed_run_goes_on_where_it_stopped(tmp_path, capsys, monkeypatch):
    assert cli.main(["run", "toy", "--scale", "broken", "--seeds", "0-3", "--out", str(tmp_path)]) == 1
    assert "unit 2 went wrong" in capsys.readouterr().err
    assert CALLS == [("a", 0), ("a", 1)]
    assert results.files(folder=tmp_path) == []
    part = next(path for path in (tmp_path / ".parts").rglob("*.npz") if results.read(path).arrays["y"] == 10)
    part.write_bytes(b"damaged")
    monkeypatch.setattr(cli.experiments, "get", lambda name: healed)
    healed = dataclasses.replace(EXPERIMENT, run_unit=lambda s, u, c: run_unit({**s, "fail": ""}, u, c))
    assert cli.main(["run", "toy", "--scale", "broken", "--seeds", "0-3", "--out", str(tmp_path)]) == 0
    assert CALLS[2:] == [("a", 1), ("a", 2), ("a", 3), ("b", 0), ("b", 1), ("b", 2), ("b", 3)]
    assert not (tmp_path / ".parts").exists()


def test_other_seeds_and_other_settings_do_not_share_wrongly(tmp_path):
    cli.main(["run", "toy", "--scale", "broken", "--seeds", "1,2", "--out", str(tmp_path)])
    CALLS.clear()
    cli.main(["run", "toy", "--scale", "broken", "--seeds", "1,3,2", "--out", str(tmp_path)])
    assert CALLS == [("a", 3)]
    CALLS.clear()
    cli.main(["run", "toy", "--scale", "quick", "--seeds", "1", "--out", str(tmp_path)])
    assert CALLS == [("a", 1), ("b", 1)]


def test_parts_of_other_versions_are_not_trusted(tmp_path, monkeypatch):
    cli.main(["run", "toy", "--scale", "broken", "--seeds", "0,2", "--out", str(tmp_path)])
    monkeypatch.setattr(results, "versions", lambda: {"rc_lib": "another"})
    CALLS.clear()
    cli.main(["run", "toy", "--scale", "broken", "--seeds", "0,2", "--out", str(tmp_path)])
    assert CALLS == [("a", 0)]


# A shell starts background jobs with interrupts ignored, and children inherit that: undo it.
KILLED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {root!r})
from rc_lib import __main__, experiments
experiments.MODULES["toy"] = "tests.test_main"
sys.exit(__main__.main(["run", "toy", "--scale", "slow", "--seeds", "0-9", "--out", {out!r}]))
"""


@pytest.mark.parametrize(("signal_number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_killed_run_keeps_every_finished_unit(tmp_path, signal_number, code):
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    script = KILLED.format(root=root, out=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.rglob("*.npz"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal_number)
    process.communicate()
    assert process.returncode == code
    kept = len(list(tmp_path.rglob("*.npz")))
    assert kept >= 2
    assert cli.main(["run", "toy", "--scale", "slow", "--seeds", "0-9", "--out", str(tmp_path)]) == 0
    assert len(CALLS) == 20 - kept


def test_list_and_show(tmp_path, capsys):
    assert cli.main(["list", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "toy (quick, broken, slow): ten times the seed" in out
    assert "none" in out
    cli.main(["run", "toy", "--seeds", "0-2", "--out", str(tmp_path)])
    cli.main(["run", "toy", "--seeds", "3", "--out", str(tmp_path)])
    capsys.readouterr()
    assert cli.main(["list", "--out", str(tmp_path)]) == 0
    assert "quick, seeds 0,1,2," in capsys.readouterr().out
    assert cli.main(["show", "toy", "--seeds", "3", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert '"factor": 10.0' in out
    assert "y: float64 [2, 1]" in out
    assert "sum 60" in out
    assert cli.main(["show", "toy", "--out", str(tmp_path)]) == 1
    assert "2 stored results fit, add settings (in a terminal --scale or --seeds)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "toy", "--seeds", "x"], "'x' is no list of seeds"),
        (["run", "toy", "--seeds", "4-0"], "names no seed"),
        (["run", "toy", "--seeds", "1,1"], "twice"),
        (["run", "toy", "--seeds", "-1"], "seeds"),
        (["run", "toy", "--seeds", "99999999999999999999"], "each of seeds must be below 2**62"),
        (["run", "toy", "--seeds", "²"], "no list of seeds"),
        (["run", "toy", "--scale", "huge"], "toy knows broken, quick, slow"),
        (["run", "nothing"], "unknown experiment 'nothing'; there is convex-hull, figure2"),
        (["run", "toy", "--seed", "0-2"], "'0-2' is no seed"),
        (["run", "toy", "--seed", "1", "--seeds", "2"], "argument --seeds: not allowed with argument --seed"),
        (["run", "toy", "--workers", "0"], "'0' is no number of processes"),
        (["run", "toy", "--workers", "2", "--scheduler", "tcp://x:1"], "not allowed with argument --workers"),
        (["run", "toy", "--device", "gpu"], "device='gpu': expected cpu, cuda, cuda:N or mps"),
        (["run", "toy", "--device", "cuda:7777"], "device='cuda:7777'"),
        (["run", "toy", "--out", ""], "argument --out: '' is no folder"),
        (["list", "--out", ""], "argument --out: '' is no folder"),
        (["walk"], "invalid choice: 'walk'"),
        ([], "required"),
    ],
)
def test_a_wrong_command_gets_one_sentence_and_code_2(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert err.startswith("python -m rc_lib")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "nothing"], "no result of this name"),
        (["show", "missing-file.npz"], "no such file"),
        (["run", "toy", "--out", "{file}/x"], "cannot write {file}/x: Not a directory"),
        (["run", "toy", "--out", "{file}-", "--scheduler", "tcp://127.0.0.1:9"], "tcp://127.0.0.1:9"),
    ],
)
def test_what_fails_gets_one_sentence_and_code_1(words, message, capsys, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert cli.main([word.format(file=tmp_path / "file") for word in words]) == 1
    err = capsys.readouterr().err
    assert message.format(file=tmp_path / "file") in err
    assert err.startswith("python -m rc_lib: ")  # and no bar above it
    assert err.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_told_before_the_first_unit(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    computed = []
    monkeypatch.setattr(runner, "_run_units", lambda *arguments: computed.append(arguments))
    with pytest.raises(results.ResultError, match=r"cannot write .*: Not a directory"):
        experiments.run(EXPERIMENT, "quick", [0], tmp_path / "file")
    assert not computed


def test_seeds():
    assert cli.parse_seeds("0-4") == [0, 1, 2, 3, 4]
    assert cli.parse_seeds("7") == [7]
    assert cli.parse_seeds("0-1, 9,5-6") == [0, 1, 9, 5, 6]
    with pytest.raises(argparse.ArgumentTypeError):
        cli.parse_seeds("")


def test_settings_refuse_bad_seeds(plain_types):
    for seeds, error, message in (
        ([], ValueError, r"seeds=\[\]: expected one or more, each once"),
        ([1, 1], ValueError, r"seeds=\[1, 1\]: expected one or more, each once"),
        ([0, -1], ValueError, "each of seeds must be at least 0, but is -1"),
        ([0.5], TypeError, "each of seeds must be a whole number, but is float"),
        (3, TypeError, "seeds must be a sequence, but is int 3"),
    ):
        with pytest.raises(error, match=message):
            EXPERIMENT.settings("quick", seeds)


def test_an_experiment_has_a_name_that_is_known(plain_types):
    with pytest.raises(TypeError, match="name must be a string, but is NoneType"):
        experiments.get(None)


def interrupt(*words, **options):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["run", "toy"],
            "finished units and trainings' last checkpoints are kept: the same command goes on from there",
        ),
        (
            ["run", "toy", "--scheduler", "tcp://x:1"],
            "finished units are kept: the same command goes on from there",
        ),
        (
            ["run", "toy", "--no-resume"],
            "finished units and trainings' last checkpoints are kept: "
            "the same command without --no-resume goes on from there",
        ),
        (["list"], ""),
    ],
)
def test_an_interrupted_command_says_what_is_kept(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "run", interrupt)
    monkeypatch.setattr(results, "files", interrupt)
    assert cli.main([*words, "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "interrupted" + (f"; {message}" if message else "") + "\n"


def test_a_damaged_checkpoint_names_the_way_out(capsys, tmp_path, monkeypatch):
    def resume(settings, unit, context):
        return checkpoints.load(context.checkpoint, {}) or {"y": np.ones(1)}

    broken = dataclasses.replace(EXPERIMENT, run_unit=resume)
    monkeypatch.setattr(experiments, "get", lambda name: broken)
    parts = runner.Parts(broken, broken.settings("quick", [0]), tmp_path)
    parts.make()
    parts.job(parts.units[0], "cpu", False).context.checkpoint.write_bytes(b"half a")
    words = ["run", "toy", "--seed", "0", "--out", str(tmp_path)]
    assert cli.main(words) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("delete it to start anew (--no-resume drops it)")
    assert cli.main([*words, "--no-resume"]) == 0


def test_help_is_fast_and_names_the_commands():
    done = subprocess.run(
        [sys.executable, "-m", "rc_lib", "--help"], capture_output=True, text=True, check=True
    )
    assert "{run,list,show}" in done.stdout


def test_one_seed_is_short_for_seeds(tmp_path):
    assert cli.main(["run", "toy", "--seed", "7", "--out", str(tmp_path)]) == 0
    assert results.load("toy", folder=tmp_path).settings["seeds"] == [7]
    assert cli.main(["show", "toy", "--seed", "7", "--out", str(tmp_path)]) == 0
    assert cli._parser().parse_args(["run", "toy"]).seeds == [0, 1, 2, 3, 4]
    assert cli._parser().parse_args(["show", "toy"]).seeds is None


def test_names_are_spoken_with_hyphens(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(experiments.MODULES, "toy_sweep", "tests.test_experiments_runner")
    for name in ("toy-sweep", "toy_sweep"):
        assert cli.main(["run", name, "--seed", "0", "--out", str(tmp_path)]) == 0
        assert cli.main(["show", name, "--out", str(tmp_path)]) == 0
    assert cli.main(["list", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "  toy-sweep (quick): random numbers" in out
    assert "toy-sweep-" not in out  # files keep their underscore
    assert len(results.files("toy_sweep", tmp_path)) == 1


def test_no_resume_computes_finished_units_anew(tmp_path, capsys):
    words = ["run", "toy", "--scale", "broken", "--seeds", "1,2", "--out", str(tmp_path)]
    assert cli.main(words) == 1
    assert cli.main([*words, "--resume"]) == 1
    assert CALLS == [("a", 1)]
    assert cli.main([*words, "--no-resume"]) == 1
    assert CALLS == [("a", 1), ("a", 1)]


def test_the_terminal_hands_its_options_on(tmp_path, monkeypatch):
    handed = {}
    monkeypatch.setattr(experiments, "run", lambda *words, **options: handed.update(options) or tmp_path)
    words = ["run", "toy", "--out", str(tmp_path)]
    plain = {"device": "cpu", "resume": True, "workers": 0, "scheduler": None, "bars": False}
    for extra, changed in (
        ([], {}),
        (["--no-resume", "--workers", "3"], {"resume": False, "workers": 3}),
        # A cluster's workers have the device, so this machine is not asked for it.
        (["--scheduler", "tcp://h:1", "--device", "cuda:7"], {"scheduler": "tcp://h:1", "device": "cuda:7"}),
    ):
        assert cli.main([*words, *extra]) == 0
        assert callable(handed.pop("begin"))
        assert handed == {**plain, **changed}


# 1 + 1 + 3 + 3 of weight took 45 s of computing; 3 of weight is left: 45 / 8 * 3 = 16.9 s, or half of that
# side by side; on a cluster 16 s went by in all: 16 / 8 * 3 = 6 s.
@pytest.mark.parametrize(("lanes", "expected"), [(1, "00:16"), (2, "00:08"), (None, "00:06")])
def test_the_time_left_is_that_of_the_weight_left(lanes, expected):
    bar = cli._Progress(EXPERIMENT, EXPERIMENT.settings("quick", [0, 1, 2]), lanes)
    bar.begin()
    bar.bar.start_t -= 16.0
    bar({"model": "a", "seed": 0}, 0.0)  # stored: says nothing about the speed
    assert bar.left() == "?"
    bar({"model": "a", "seed": 1}, 5.0)
    bar({"model": "a", "seed": 2}, 4.0)
    bar({"model": "b", "seed": 0}, 18.0 - 0.5)
    bar({"model": "b", "seed": 1}, 18.0 + 0.5)
    assert bar.left() == expected
    bar.close()


def test_help_says_what_is_the_default(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["run", "--help"])
    assert stop.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "go on from what an unfinished run left (the default)" in out
    for word in ("--seed SEED", "--device", "--resume, --no-resume", "--workers N", "--scheduler ADDRESS"):
        assert word in out
