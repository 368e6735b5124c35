import errno
import hashlib
import os
import pickle
import resource
import subprocess
import sys
import time

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from rc_lib import checkpoints, results

SETTINGS = {"epochs": 3, "lr": 0.1, "clip": None, "schedule": "cosine"}


def state(value=1.0):
    return {
        "model": {"weight": torch.full((3, 5), value), "half": torch.ones(2, dtype=torch.bfloat16)},
        "optimiser": {"state": {0: {"step": torch.tensor(7.0)}}, "param_groups": [{"betas": (0.9, 0.99)}]},
        "history": {"loss": [0.5, value], "stopped": False, "path": None},
    }


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "deep" / "run.ckpt"
    checkpoints.save(path, SETTINGS, state())
    return path


def test_what_is_saved_is_read_back(file):
    found = checkpoints.load(file, SETTINGS)
    assert found["history"] == {"loss": [0.5, 1.0], "stopped": False, "path": None}
    assert found["optimiser"]["param_groups"] == [{"betas": (0.9, 0.99)}]
    assert torch.equal(found["optimiser"]["state"][0]["step"], torch.tensor(7.0))
    for name, tensor in state()["model"].items():
        assert torch.equal(found["model"][name], tensor)
        assert found["model"][name].dtype == tensor.dtype
    assert [each.name for each in file.parent.iterdir()] == ["run.ckpt"]


def test_no_file_is_no_state(tmp_path):
    assert checkpoints.load(tmp_path / "none", SETTINGS) is None


def test_other_settings_are_named_with_both_values(file):
    other = {**SETTINGS, "epochs": 4, "seed": 1}
    with pytest.raises(checkpoints.CheckpointError, match=r"epochs=3 \(now 4\), seed=None \(now 1\)") as told:
        checkpoints.load(file, other)
    assert "lr" not in str(told.value)
    assert checkpoints.load(file, SETTINGS) is not None


def test_a_file_cut_short_anywhere_is_told(file):
    whole = file.read_bytes()
    for length in [0, 1, 19, 20, 30, 52, 53, len(whole) // 2, len(whole) - 1]:
        file.write_bytes(whole[:length])
        with pytest.raises(checkpoints.CheckpointError, match=r"run\.ckpt is no usable checkpoint"):
            checkpoints.load(file, SETTINGS)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=200)
@hypothesis.given(st.data())
def test_any_changed_bit_is_told(data):
    packed = bytearray(checkpoints.pack({"settings": SETTINGS, "state": state()}))
    bit = data.draw(st.integers(0, 8 * len(packed) - 1))
    packed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(checkpoints.CheckpointError):
        checkpoints.unpack(bytes(packed))


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


@pytest.mark.parametrize("evil", [Evil(), torch.nn.Linear(1, 1)], ids=["call", "module"])
def test_code_in_a_file_is_not_run(tmp_path, monkeypatch, evil):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.ckpt"
    path.write_bytes(checkpoints.pack({"settings": SETTINGS, "state": evil}))
    with pytest.raises(checkpoints.CheckpointError, match="more than tensors and plain values"):
        checkpoints.load(path, SETTINGS)
    assert [each.name for each in tmp_path.iterdir()] == ["run.ckpt"]


@pytest.mark.parametrize("content", [b"", b"hello", pickle.dumps({"a": 1})], ids=["empty", "text", "pickle"])
def test_what_is_no_checkpoint_is_told(tmp_path, content):
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(checkpoints.CheckpointError, match="does not begin as a checkpoint"):
        checkpoints.load(path, SETTINGS)


def test_a_whole_file_of_something_else_is_told(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(checkpoints.pack({"weights": torch.ones(2)}))
    with pytest.raises(checkpoints.CheckpointError, match="no usable checkpoint"):
        checkpoints.load(path, SETTINGS)


def test_a_folder_in_the_file_s_place_is_told(tmp_path):
    with pytest.raises(checkpoints.CheckpointError, match=r"cannot read .*: Is a directory"):
        checkpoints.load(tmp_path, SETTINGS)
    with pytest.raises(results.ResultError, match=r"cannot write .*: Is a directory"):
        checkpoints.save(tmp_path, SETTINGS, state())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_told(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(results.ResultError, match=r"cannot write .*run\.ckpt"):
        checkpoints.save(tmp_path / "file" / "run.ckpt", SETTINGS, state())
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_checkpoint_before(file, monkeypatch, call):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(results.ResultError, match=r"cannot write .*run\.ckpt: No space left on device"):
            checkpoints.save(file, SETTINGS, state(2.0))
    assert torch.equal(checkpoints.load(file, SETTINGS)["model"]["weight"], torch.ones(3, 5))
    assert [each.name for each in file.parent.iterdir()] == ["run.ckpt"]


def test_a_real_limit_on_the_file_s_size_leaves_the_checkpoint_before(file):
    code = (
        "import sys, torch\n"
        "from rc_lib import checkpoints, results\n"
        f"try: checkpoints.save(sys.argv[1], {SETTINGS!r}, {{'x': torch.rand(10000)}})\n"
        "except results.ResultError as error: print(error)"
    )
    limit = (4096, 4096)
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, str(file)],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    assert "File too large; what was stored before is untouched" in done.stdout
    assert checkpoints.load(file, SETTINGS)["history"]["loss"] == [0.5, 1.0]
    assert len(list(file.parent.iterdir())) == 1


def test_only_old_leftovers_are_swept(file):
    old, young = (file.with_name(f".run.ckpt.{name}.tmp") for name in ("a", "b"))
    other = file.with_name(".other.ckpt.a.tmp")
    for each in (old, young, other):
        each.write_bytes(b"half")
    past = time.time() - 2 * checkpoints.STALE
    os.utime(old, (past, past))
    os.utime(other, (past, past))
    assert checkpoints.sweep(file) == [old]
    assert young.exists()
    assert other.exists()
    assert checkpoints.sweep(file, older=-1.0) == [young]
    assert checkpoints.load(file, SETTINGS) is not None
    assert checkpoints.sweep(file.parent / "none" / "run.ckpt") == []


def test_digest_sees_every_bit_name_shape_and_dtype():
    X = torch.arange(6, dtype=torch.float64).reshape(2, 3)
    changed = X.clone()
    changed[1, 2] = torch.nextafter(changed[1, 2], torch.tensor(9.0, dtype=torch.float64))
    zero, negative = torch.zeros(1), -torch.zeros(1)
    different = [
        {"X": X},
        {"Y": X},
        {"X": X.reshape(3, 2)},
        {"X": X.float()},
        {"X": changed},
        {"X": zero},
        {"X": negative},
        {"X": torch.empty(0)},
        {"X": torch.tensor([True])},
        {"X": torch.tensor(True)},
        {},
    ]
    assert len({checkpoints.digest(each) for each in different}) == len(different)
    assert checkpoints.digest({"X": X}) == checkpoints.digest({"X": X.T.contiguous().T.requires_grad_()})


def test_digest_by_hand():
    expected = hashlib.sha256(b"a torch.uint8 (2,)\n" + bytes([1, 255])).hexdigest()
    assert checkpoints.digest({"a": torch.tensor([1, 255], dtype=torch.uint8)}) == expected
