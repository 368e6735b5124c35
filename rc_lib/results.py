"""Stored experiment results: what section 8's figures are drawn from when they are too slow to make live.

One result is one file, ``NAME-DIGEST.npz``: a zip of arrays that ``numpy.load(allow_pickle=False)`` opens,
and beside them ``record.json`` with the settings (the seeds among them), the versions and the wall time.
The digest is of the settings, so a result is found again by what it was asked for. A file appears whole or
not at all: it is written under another name, flushed to the disk, and only then given its own.
"""

import hashlib
import io
import json
import os
import platform
import re
import uuid
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rc_lib import __version__, checks, data

FORMAT = 1
_RECORD = "record.json"
_NAME = re.compile(r"[a-z0-9][a-z0-9_]*")
_FILE = re.compile(r"([a-z0-9][a-z0-9_]*)-[0-9a-f]{12}\.npz")
_RESERVED = {"name", "folder"}
# What a zip with a broken member, a broken record or a pickled array makes its readers raise.
_BROKEN = (zipfile.BadZipFile, zlib.error, ValueError, KeyError, EOFError, TypeError, OSError, RuntimeError)


class ResultError(RuntimeError):
    """A result could not be written or read; the message is one sentence that says why."""


class UnknownResultError(ResultError, LookupError):
    """No stored result, or more than one, answers the settings asked for."""


class CorruptResultError(ResultError):
    """A stored result's file is damaged, or is no result at all."""


@dataclass(frozen=True)
class Result:
    """One stored result.

    Attributes:
        name: the experiment's name.
        settings: everything that the result depends on, seeds included; JSON values.
        arrays: the numbers, by name (empty when only the record was read).
        tables: further JSON values: axis labels, units, remarks.
        seconds: wall time of the computation.
        versions: of rc_lib, Python and the packages that computed it.
        made: date and time (UTC, ISO 8601).
        path: the file it came from.
    """

    name: str
    settings: dict[str, Any]
    arrays: dict[str, np.ndarray]
    tables: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    made: str = ""
    path: Path | None = None


def versions() -> dict[str, str]:
    """Return the versions of what computes a result: rc_lib, Python, torch, numpy, transformers."""
    found = {"rc_lib": __version__, "python": platform.python_version(), "machine": platform.machine()}
    for package in ("torch", "numpy", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def default_folder() -> Path:
    """Return ``book/results`` of the checkout or of the installed package: where results are looked for."""
    return data.path("results")


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings as JSON reads them back (tuples as lists), or refuse them."""
    bad = _RESERVED.intersection(settings)
    if bad:
        raise ValueError(f"settings: {min(bad)!r} is the name of an argument of load; call it something else")
    try:
        return json.loads(json.dumps(dict(settings), sort_keys=True, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise TypeError(f"settings={settings!r}: expected finite JSON values only ({error})") from error


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"name={name!r}: expected lower-case letters, digits and underscores")
    return name


def file_name(name: str, settings: Mapping[str, Any]) -> str:
    """Return the name of the file that holds the result of these settings.

    Args:
        name: the experiment's name: lower-case letters, digits, underscores.
        settings: JSON values; their order does not matter.

    Returns:
        ``NAME-DIGEST.npz``, where the digest is of the settings alone.

    Raises:
        ValueError: the name is none.
        TypeError: a setting is no JSON value, or not finite.
    """
    text = json.dumps(_plain(settings), sort_keys=True, separators=(",", ":"))
    return f"{_check_name(name)}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.npz"


def _array(name: str, value: Any) -> np.ndarray:
    array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    if array.dtype.kind not in "fiubU":
        raise TypeError(f"arrays[{name!r}]: dtype {array.dtype}, expected numbers, booleans or strings")
    return array


def _packed(record: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    """Return the file's bytes; the zip's dates are fixed, so equal results differ in the record only."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        text = json.dumps(record, indent=1, sort_keys=True, allow_nan=False)
        archive.writestr(_member(_RECORD), text + "\n")
        for name in sorted(arrays):
            part = io.BytesIO()
            np.lib.format.write_array(part, arrays[name], allow_pickle=False)
            archive.writestr(_member(name + ".npy"), part.getvalue())
    return buffer.getvalue()


def _member(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a crash or a full disk leaves the old file or the new one, never half of one.

    Args:
        path: the file; its folder is created when missing.
        content: its new bytes.

    Raises:
        ResultError: the folder cannot be written to or the disk is full; what was there is untouched.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ResultError(f"cannot write {path}: {reason}; what was stored before is untouched") from error
    finally:
        if path.parent.is_dir():
            temporary.unlink(missing_ok=True)


def save(
    name: str,
    settings: Mapping[str, Any],
    arrays: Mapping[str, Any],
    tables: Mapping[str, Any] | None = None,
    *,
    seconds: float,
    folder: str | Path | None = None,
) -> Path:
    """Store a result; one with the same name and settings is replaced.

    Args:
        name: the experiment's name: lower-case letters, digits, underscores.
        settings: everything the result depends on, seeds included; JSON values.
        arrays: tensors, arrays or nested lists of numbers, booleans or strings, by name.
        tables: further JSON values.
        seconds: wall time of the computation.
        folder: where; the book's ``results`` unless given.

    Returns:
        The file.

    Raises:
        TypeError: a setting, a table or an array that JSON or npz cannot hold.
        ValueError: a name that is none.
        ResultError: the file cannot be written; nothing that was stored is lost.
    """
    path = Path(folder or default_folder()) / file_name(name, settings)
    checked = {key: _array(key, value) for key, value in arrays.items()}
    record = {
        "format": FORMAT,
        "name": name,
        "settings": _plain(settings),
        "tables": _plain(tables or {}),
        "arrays": sorted(checked),
        "seconds": round(float(seconds), 3),
        "versions": versions(),
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_atomically(path, _packed(record, checked))
    return path


def _unpacked(archive: zipfile.ZipFile, key: str) -> np.ndarray:
    return np.load(io.BytesIO(archive.read(key + ".npy")), allow_pickle=False)


def read(path: str | Path, *, arrays: bool = True) -> Result:
    """Read one file; what is read is checked against the zip's checksums.

    Args:
        path: a file that ``save`` wrote.
        arrays: whether to read the arrays as well as the record.

    Returns:
        The result.

    Raises:
        UnknownResultError: no such file.
        CorruptResultError: the file is damaged, holds pickled objects, or is no result.
    """
    checks.boolean("arrays", arrays)
    path = Path(path)
    if not path.is_file():
        raise UnknownResultError(f"{path}: no such file")
    try:
        with zipfile.ZipFile(path) as archive:
            record = json.loads(archive.read(_RECORD))
            found = {key: _unpacked(archive, key) for key in record["arrays"]} if arrays else {}
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']}, expected {FORMAT}")
        keys = ("name", "settings", "tables", "seconds", "versions", "made")
        return Result(**{key: record[key] for key in keys}, arrays=found, path=path)
    except _BROKEN as error:
        raise CorruptResultError(f"{path}: damaged or not a stored result ({error}); run it again") from error


def files(name: str | None = None, folder: str | Path | None = None) -> list[Path]:
    """Return the stored results' files, sorted by name.

    Args:
        name: only this experiment's.
        folder: where; the book's ``results`` unless given.

    Returns:
        Paths; empty when the folder is not there.
    """
    folder = Path(folder or default_folder())
    matches = ((path, _FILE.fullmatch(path.name)) for path in sorted(folder.glob("*.npz")))
    return [path for path, match in matches if match and name in (None, match[1])]


def load(name: str, /, *, folder: str | Path | None = None, **settings: Any) -> Result:
    """Find a stored result by its settings, or by as many of them as single it out.

    Args:
        name: the experiment's name.
        folder: where; the book's ``results`` unless given.
        **settings: values that the result must have been computed with.

    Returns:
        The result, arrays included.

    Raises:
        UnknownResultError: none has these settings, or several have; the message lists what there is.
        CorruptResultError: the file is damaged.
    """
    wanted = _plain(settings)
    exact = Path(folder or default_folder()) / file_name(name, wanted)
    if exact.is_file():
        return read(exact)
    candidates, damaged = _records(files(name, folder))
    found = [each for each in candidates if _fits(each.settings, wanted)]
    if len(found) == 1:
        return read(found[0].path)
    if damaged and not found:
        raise damaged[0]
    raise UnknownResultError(_no_single(name, wanted, found, candidates))


def _fits(settings: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all(key in settings and settings[key] == value for key, value in wanted.items())


def _records(paths: list[Path]) -> tuple[list[Result], list[CorruptResultError]]:
    good, damaged = [], []
    for path in paths:
        try:
            good.append(read(path, arrays=False))
        except CorruptResultError as error:
            damaged.append(error)
    return good, damaged


def _briefly(settings: dict[str, Any]) -> str:
    """What tells stored results apart: scale and seeds where there are any, else all settings."""
    told = {key: settings[key] for key in ("scale", "seeds") if key in settings} or settings
    return json.dumps(told, sort_keys=True)


def _no_single(name: str, wanted: dict[str, Any], found: list[Result], stored: list[Result]) -> str:
    asked = f"name={name!r}" + "".join(f", {key}={value!r}" for key, value in sorted(wanted.items()))
    if not stored:
        return f"{asked}: no result of this name is stored; make one with `python -m rc_lib run`"
    told = [_briefly(each.settings) for each in found or stored]
    if len(set(told)) < len(told):
        told = [json.dumps(each.settings, sort_keys=True) for each in found or stored]
    listed = "; ".join(told)
    several = f"{len(found)} stored results fit, add settings (in a terminal --scale or --seeds)"
    count = several if found else "no stored result fits"
    return f"{asked}: {count}; there is {listed}"
