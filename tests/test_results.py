import contextlib
import errno
import io
import os
import pickle
import resource
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch

from rc_lib import results

SETTINGS = {"scale": "paper", "seeds": [0, 1], "tokens": 128}


def store(folder, settings=SETTINGS, value=1.0, name="toy"):
    return results.save(name, settings, {"x": np.full((2, 3, 5), value)}, seconds=1.5, folder=folder)


def test_what_is_saved_is_read_back(tmp_path):
    arrays = {
        "float32": torch.tensor([[1.5, -2.0]], dtype=torch.float32),
        "int": [1, 2, 3],
        "text": np.array(["SAN", "SAN+MLP"]),
        "grad": torch.ones(2, requires_grad=True),
        "group/BERT SAN+skip": np.array(7.0),
    }
    path = results.save("toy", SETTINGS, arrays, {"axes": ["layer"]}, seconds=2.0, folder=tmp_path)
    found = results.load("toy", folder=tmp_path, **SETTINGS)
    assert found.path == path
    assert found.settings == SETTINGS
    assert found.tables == {"axes": ["layer"]}
    assert found.seconds == 2.0
    assert set(found.versions) >= {"rc_lib", "python", "torch", "numpy", "transformers"}
    assert set(found.arrays) == set(arrays)
    assert found.arrays["float32"].dtype == np.float32
    assert found.arrays["float32"].tolist() == [[1.5, -2.0]]
    assert found.arrays["text"].tolist() == ["SAN", "SAN+MLP"]
    assert found.arrays["group/BERT SAN+skip"] == 7.0


def test_numpy_opens_the_file_without_pickle(tmp_path):
    with np.load(store(tmp_path), allow_pickle=False) as archive:
        assert archive["x"].shape == (2, 3, 5)


def test_found_by_settings_in_any_order_and_by_a_part_of_them(tmp_path):
    store(tmp_path, {"scale": "quick", "seeds": [0]}, 1.0)
    store(tmp_path, {"scale": "paper", "seeds": [0]}, 2.0)
    store(tmp_path, {"scale": "paper", "seeds": [0, 1]}, 3.0)
    store(tmp_path, {"scale": "paper", "seeds": [0]}, 9.0, name="other")
    assert results.load("toy", folder=tmp_path, seeds=(0,), scale="paper").arrays["x"].max() == 2.0
    assert results.load("toy", folder=tmp_path, scale="quick").arrays["x"].max() == 1.0
    assert results.load("toy", folder=tmp_path, seeds=[0, 1]).arrays["x"].max() == 3.0
    with pytest.raises(results.UnknownResultError, match="2 stored results fit"):
        results.load("toy", folder=tmp_path, scale="paper")
    with pytest.raises(results.UnknownResultError, match=r"scale='huge'.*no stored result fits.*\"quick\""):
        results.load("toy", folder=tmp_path, scale="huge")
    store(tmp_path, {"scale": "quick", "seeds": [0], "lr": 0.5}, 1.0)
    with pytest.raises(results.UnknownResultError, match=r'; there is \{"lr": 0.5, "scale": "quick"'):
        results.load("toy", folder=tmp_path, scale="huge")  # scale and seeds would not tell them apart
    with pytest.raises(results.UnknownResultError, match=r"nothing.*rc_lib run"):
        results.load("nothing", folder=tmp_path)
    assert len(results.files("toy", tmp_path)) == 4
    assert results.files(folder=tmp_path / "missing") == []


def test_the_same_settings_replace_and_leave_no_litter(tmp_path):
    assert store(tmp_path, value=1.0) == store(tmp_path, value=2.0)
    assert len(list(tmp_path.iterdir())) == 1
    assert results.load("toy", folder=tmp_path).arrays["x"].max() == 2.0


def test_every_damage_is_noticed(tmp_path):
    path = store(tmp_path, value=3.7)
    whole = path.read_bytes()
    for damaged in (b"", b"no zip", whole[: len(whole) // 2], whole[:-1], whole[10:]):
        path.write_bytes(damaged)
        with pytest.raises(results.CorruptResultError, match="damaged"):
            results.read(path)
        with pytest.raises(results.CorruptResultError, match="damaged"):
            results.load("toy", folder=tmp_path, scale="paper")


def test_no_flipped_byte_gives_other_numbers(tmp_path):
    path = store(tmp_path, value=3.7)
    whole = path.read_bytes()
    # Every 7th byte: each kind of place in the zip (headers, record, array, directory) is hit many times.
    for position in range(0, len(whole), 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        with contextlib.suppress(results.CorruptResultError):
            assert results.read(path).arrays["x"].tolist() == np.full((2, 3, 5), 3.7).tolist()


def test_pickles_are_refused_both_ways(tmp_path):
    with pytest.raises(TypeError, match="x"):
        results.save("toy", {}, {"x": np.array([object()])}, seconds=0.0, folder=tmp_path)
    path = store(tmp_path)
    with zipfile.ZipFile(path) as archive:
        record = archive.read("record.json")
    evil = io.BytesIO()
    np.lib.format.write_array(evil, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    for content in (evil.getvalue(), pickle.dumps([1])):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("record.json", record)
            archive.writestr("x.npy", content)
        with pytest.raises(results.CorruptResultError, match="damaged"):
            results.read(path)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"folder": 1}, ValueError, "folder"),
        ({"x": float("nan")}, TypeError, "finite"),
        ({"x": object()}, TypeError, "JSON"),
    ],
)
def test_bad_settings(tmp_path, settings, error, message):
    with pytest.raises(error, match=message):
        results.save("toy", settings, {}, seconds=0.0, folder=tmp_path)


@pytest.mark.parametrize("name", ["", "../x", "Toy", "a-b", "a b"])
def test_bad_names(tmp_path, name):
    with pytest.raises(ValueError, match="name="):
        results.save(name, {}, {}, seconds=0.0, folder=tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(results.ResultError, match="cannot write"):
        store(tmp_path / "file")
    with pytest.raises(results.ResultError, match="cannot write"):
        store(tmp_path / "file" / "below")


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, step):
    store(tmp_path, value=1.0)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(results.ResultError, match="No space left on device"):
        store(tmp_path, value=2.0)
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 1
    assert results.load("toy", folder=tmp_path).arrays["x"].max() == 1.0


def test_a_write_that_really_fails_halfway(tmp_path):
    store(tmp_path, value=1.0)
    code = (
        "import signal, sys, numpy as np; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from rc_lib import results\n"
        "x = np.random.rand(10000)\n"
        f"try: results.save('toy', {SETTINGS!r}, {{'x': x}}, seconds=0.0, folder=sys.argv[1])\n"
        "except results.ResultError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert "File too large; what was stored before is untouched" in done.stdout
    assert len(list(tmp_path.iterdir())) == 1
    assert results.load("toy", folder=tmp_path).arrays["x"].max() == 1.0


def test_the_file_is_readable_by_others(tmp_path):
    mask = os.umask(0o022)
    try:
        assert store(tmp_path).stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(mask)


def test_the_digest_is_of_the_settings_alone():
    # The digest names the stored files: a change here would orphan every one of them.
    assert results.file_name("toy", {"b": (1, 2), "a": "x"}) == results.file_name(
        "toy", {"a": "x", "b": [1, 2]}
    )
    assert results.file_name("toy", {"a": 1}) == "toy-015abd7f5cc5.npz"
