"""Checkpoints: the state of a training run in one file that is whole or not there (no section of the paper).

A checkpoint is a line that names the format, a SHA-256 of what follows, and what ``torch.save`` makes of a
dictionary of tensors and plain values. It is read with ``weights_only=True``, so it holds no code and none is
run. The hash is there because torch does not verify the checksums of its own files. The file is written as
``results.write_atomically`` writes all of them, so a process that is killed leaves the old or the new one.
"""

import hashlib
import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rc_lib import results

_HEADER = b"rc_lib checkpoint 1\n"
_HASH = hashlib.sha256().digest_size
STALE = 60.0


class CheckpointError(results.ResultError):
    """A checkpoint is damaged, unreadable or another run's; the message is one sentence that says which."""


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a fingerprint of named tensors: their names, dtypes, shapes and every bit of their values.

    Args:
        tensors: tensors of any dtype and shape, on any device.

    Returns:
        A hexadecimal SHA-256; tensors on different devices give the same one.
    """
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return found.hexdigest()


def pack(content: Mapping[str, Any]) -> bytes:
    """Return a checkpoint's bytes.

    Args:
        content: tensors and plain values (numbers, strings, None, lists, dictionaries), nested at will.

    Returns:
        The format's line, the hash, the content.
    """
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    body = buffer.getvalue()
    return _HEADER + hashlib.sha256(body).digest() + body


def unpack(packed: bytes) -> dict[str, Any]:
    """Return what ``pack`` was given; all tensors are on the CPU.

    Args:
        packed: a checkpoint's bytes.

    Returns:
        The content.

    Raises:
        CheckpointError: the bytes are no checkpoint, were cut short or were changed, or hold objects that
            are neither tensors nor plain values.
    """
    if not packed.startswith(_HEADER):
        raise CheckpointError("it does not begin as a checkpoint does")
    start = len(_HEADER) + _HASH
    if hashlib.sha256(packed[start:]).digest() != packed[len(_HEADER) : start]:
        raise CheckpointError("it is cut short or changed: its contents do not have the hash that it states")
    try:
        return torch.load(io.BytesIO(packed[start:]), weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises many kinds here, pickle's own among them
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"it holds more than tensors and plain values ({reason[0]})") from error


def save(path: str | Path, settings: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Write a checkpoint in place of the one that is there, if any.

    Args:
        path: the file; its folder is created when missing.
        settings: everything that the run's result depends on; plain values. ``load`` compares them.
        state: tensors and plain values.

    Raises:
        ResultError: the folder cannot be written to or the disk is full; the checkpoint that was there
            before is untouched.
    """
    results.write_atomically(Path(path), pack({"settings": dict(settings), "state": dict(state)}))


def load(path: str | Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read a checkpoint back, if there is one.

    Args:
        path: the file.
        settings: those of the run that wants to go on; they must be the ones that were saved.

    Returns:
        The state that was saved, its tensors on the CPU; None when there is no such file.

    Raises:
        CheckpointError: the file cannot be read, is damaged, or belongs to other settings; the message names
            the settings that differ and both their values. The file is left as it is.
    """
    path = Path(path)
    try:
        content = unpack(path.read_bytes())
        found, state = content["settings"], content["state"]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (CheckpointError, KeyError) as error:
        raise CheckpointError(f"{path} is no usable checkpoint: {error}; delete it to start anew") from error
    differing = [key for key in {**found, **settings} if found.get(key) != settings.get(key)]
    if differing:
        listed = ", ".join(f"{key}={found.get(key)!r} (now {settings.get(key)!r})" for key in differing)
        raise CheckpointError(
            f"{path} is the checkpoint of another run: {listed}; give another file or delete it"
        )
    return state


def sweep(path: str | Path, older: float = STALE) -> list[Path]:
    """Delete what processes killed in the middle of a write have left beside a checkpoint.

    Args:
        path: the checkpoint's file.
        older: only files untouched for so many seconds; another process may be writing the younger ones.

    Returns:
        The files that were deleted.
    """
    path = Path(path)
    gone = []
    for each in path.parent.glob(f".{path.name}.*.tmp"):
        try:
            if time.time() - each.stat().st_mtime >= older:
                each.unlink()
                gone.append(each)
        except OSError:
            continue  # another process was quicker, or the folder cannot be written to: save will say so
    return gone
