"""The ledger of claims (``book/claims.yml``): every statement that the book checks, and its band.

A chapter proves a row with ``check("fig2-bert-san", value)``. The row says what was claimed, by whom, and in
which band a value counts as agreeing; a value outside it is an error, a value inside is shown with a tick.
"""

import html
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rc_lib import data

KINDS = ("theorem", "lemma", "corollary", "claim", "proposition", "figure", "table", "number")
STATUSES = ("reproduced", "partly", "differs", "ours")
BANDS = ("below", "above", "between", "equals", "is")
_REQUIRED = ("id", "kind", "source", "statement", "chapter", "band", "status")
_OPTIONAL = ("unit", "note")
_STYLE = "border-left:0.3em solid #009E73;padding:0.15em 0 0.15em 0.8em;margin:0.4em 0"


class ClaimError(AssertionError):
    """A value outside its band, or a claim that the ledger does not know."""


@dataclass(frozen=True)
class Band:
    """The values that agree with a claim.

    Attributes:
        kind: ``"below"``, ``"above"``, ``"between"``, ``"equals"`` or ``"is"``.
        numbers: (limit,), (limit,), (low, high), (value, tolerance) or (truth value,).
    """

    kind: str
    numbers: tuple[float | int | bool, ...]

    def __contains__(self, value: Any) -> bool:
        first, last = self.numbers[0], self.numbers[-1]
        if (self.kind == "is") != isinstance(value, bool):
            return False
        tests = {
            "below": lambda: value < first,
            "above": lambda: value > first,
            "between": lambda: first <= value <= last,
            "equals": lambda: abs(value - first) <= last,
            "is": lambda: value == first,
        }
        return bool(tests[self.kind]())

    def __str__(self) -> str:
        shown = [format_value(number) for number in self.numbers]
        texts = {"below": "< {0}", "above": "> {0}", "between": "{0} to {1}", "equals": "{0} ± {1}"}
        if self.kind == "equals" and self.numbers[1] == 0:
            return f"exactly {shown[0]}"
        return texts.get(self.kind, "{0}").format(*shown)


@dataclass(frozen=True)
class Claim:
    """One row of the ledger.

    Attributes:
        id: name that ``check`` uses.
        kind: one of ``KINDS``.
        source: where the claim is made, e.g. ``"figure 2"``, or ``"ours"``.
        statement: what is claimed, one sentence.
        chapter: the notebook that checks it, below ``book/``, without extension.
        band: values that agree with it.
        status: one of ``STATUSES``.
        unit: unit of the value, empty if it has none.
        note: anything a reader of the scoreboard should know.
    """

    id: str
    kind: str
    source: str
    statement: str
    chapter: str
    band: Band
    status: str
    unit: str = ""
    note: str = ""


def format_value(value: float | int | bool) -> str:
    """Return a value as the ledger shows it: four significant digits, integers in full, yes or no.

    Args:
        value: a finite number or a truth value.

    Returns:
        Its text.
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def load(path: str | Path | None = None) -> dict[str, Claim]:
    """Read the ledger.

    Args:
        path: a YAML file; the book's own ``claims.yml`` when left out.

    Returns:
        The rows by id, in the file's order.

    Raises:
        ValueError: the file is no YAML, no list of rows, or has a malformed row, which the message names.
        FileNotFoundError: there is no such file.
    """
    file = data.path("claims.yml") if path is None else Path(path)
    return dict(_load(file, file.stat().st_mtime_ns))


@lru_cache(maxsize=8)
def _load(file: Path, _changed: int) -> dict[str, Claim]:
    import yaml

    try:
        rows = yaml.safe_load(file.read_text(encoding="utf-8")) or []
    except yaml.YAMLError as error:
        raise ValueError(f"{file.name} is no YAML (quote texts that contain ': ' or ' #'): {error}") from None
    if not isinstance(rows, list):
        raise ValueError(f"{file.name}: expected a list of rows, each '- id: …', not a {type(rows).__name__}")
    claims: dict[str, Claim] = {}
    for number, row in enumerate(rows, start=1):
        claim = _claim(row, f"{file.name}, row {number}")
        if claim.id in claims:
            raise ValueError(f"{file.name}, row {number}: id {claim.id!r} is taken by an earlier row")
        claims[claim.id] = claim
    return claims


def _claim(row: Any, where: str) -> Claim:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected keys and values, not {row!r}")
    where = f"{where} ({row.get('id', 'no id')})"
    _keys(row, where)
    for key in (*_REQUIRED, *_OPTIONAL):
        if key != "band" and key in row and not (isinstance(row[key], str) and row[key].strip()):
            raise ValueError(f"{where}: {key} is {row[key]!r}, expected a text")
    for key, allowed in (("kind", KINDS), ("status", STATUSES)):
        if row[key] not in allowed:
            raise ValueError(f"{where}: {key} is {row[key]!r}, expected one of {', '.join(allowed)}")
    if row["chapter"].endswith((".ipynb", ".md")) or row["chapter"].startswith(("/", "book/")):
        raise ValueError(
            f"{where}: chapter is {row['chapter']!r}, expected a path like 'theory/self_attention'"
        )
    texts = {key: " ".join(value.split()) for key, value in row.items() if key != "band"}
    return Claim(band=_band(row["band"], where), **texts)


def _keys(row: dict, where: str) -> None:
    missing = [key for key in _REQUIRED if key not in row]
    unknown = [str(key) for key in row if key not in _REQUIRED + _OPTIONAL]
    if missing or unknown:
        parts = [("missing", missing), ("unknown", unknown)]
        raise ValueError(
            f"{where}: " + "; ".join(f"{what} {', '.join(keys)}" for what, keys in parts if keys)
        )


def _band(band: Any, where: str) -> Band:
    kinds = {key for key in band if key in BANDS} if isinstance(band, dict) else set()
    if len(kinds) != 1 or set(band) - kinds - {"within"} or ("within" in band) != (kinds == {"equals"}):
        raise ValueError(
            f"{where}: band is {band!r}, expected one of {{below: x}}, {{above: x}}, {{between: [a, b]}}, "
            "{equals: v, within: tolerance}, {is: true}"
        )
    kind = kinds.pop()
    if kind == "is":
        if not isinstance(band["is"], bool):
            raise ValueError(f"{where}: band is {band['is']!r}, expected true or false")
        return Band("is", (band["is"],))
    numbers = _numbers(band, kind, where)
    if kind == "between" and not (len(numbers) == 2 and numbers[0] < numbers[1]):
        raise ValueError(f"{where}: band between {band[kind]!r}, expected [low, high] with low < high")
    if kind == "equals" and numbers[1] < 0:
        raise ValueError(f"{where}: band within {numbers[1]}, expected a tolerance ≥ 0")
    return Band(kind, numbers)


def _numbers(band: dict, kind: str, where: str) -> tuple[float | int, ...]:
    raw = band[kind] if kind == "between" and isinstance(band[kind], list) else [band[kind]]
    raw = [*raw, band["within"]] if kind == "equals" else raw
    try:
        # YAML 1.1 reads 1e-3 (without a point) as text; a person means the number.
        numbers = [float(x) if isinstance(x, str) else x for x in raw]
        if not all(
            isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in numbers
        ):
            raise ValueError
    except ValueError:
        raise ValueError(f"{where}: band {kind} has {raw!r}, expected finite numbers") from None
    return tuple(numbers)


def check(id: str, value: Any) -> float | int | bool:
    """Check a value against the ledger: show a tick if it is in the band of its row, raise if it is not.

    The output carries ``{"rc_lib": {"claim": id, "value": value}}`` as metadata; the scoreboard and the
    ledger's test read it back with ``stored``.

    Args:
        id: id of a row of ``book/claims.yml``.
        value: a number or a truth value: Python's, NumPy's, or a tensor with one element.

    Returns:
        The value as a plain Python number or truth value.

    Raises:
        ClaimError: the ledger has no such row, or the value is outside the row's band.
        TypeError: the id is no string, or the value is neither a number nor a truth value.
        ValueError: the value is NaN or infinite.
    """
    if not isinstance(id, str):
        raise TypeError(f"id={id!r}: expected a string, the id of a row of the ledger")
    ledger = load()
    if id not in ledger:
        raise ClaimError(f"id={id!r}: the ledger has no such row{_nearest(id, ledger)}")
    claim, plain = ledger[id], _plain(value)
    if plain not in claim.band:
        raise ClaimError(
            f"{id}: {format_value(plain)}{_unit(claim)} is outside the band {claim.band}."
            f" Claim: {claim.statement}"
        )
    _show(claim, plain)
    return plain


def _nearest(id: str, ledger: Mapping[str, Claim]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(id, ledger, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _plain(value: Any) -> float | int | bool:
    if getattr(value, "ndim", 0) == 0 or getattr(value, "size", None) == 1 or _is_one_element(value):
        value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, bool | int | float):
        raise TypeError(f"value: {type(value).__name__}, expected one number or truth value")
    if not math.isfinite(value):
        raise ValueError(f"value={value}: expected a finite number")
    return value


def _is_one_element(value: Any) -> bool:
    return callable(getattr(value, "numel", None)) and value.numel() == 1


def _unit(claim: Claim) -> str:
    return f" {claim.unit}" if claim.unit else ""


def _show(claim: Claim, value: float | int | bool) -> None:
    shown = f"{format_value(value)}{_unit(claim)}"
    text = f"check ✓ {claim.id}: {shown} (band {claim.band}) {claim.statement} [{claim.source}]"
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        get_ipython = display = None
    if get_ipython is None or get_ipython() is None:
        print(text)
        return
    bundle = {"text/plain": text, "text/html": _html(claim, shown)}
    display(bundle, raw=True, metadata={"rc_lib": {"claim": claim.id, "value": value}})


def _html(claim: Claim, shown: str) -> str:
    """The tick as HTML. It inherits the page's text colour, so it reads on a light and on a dark page."""
    part = {key: html.escape(text) for key, text in vars(claim).items() if isinstance(text, str)}
    origin = " · ".join(dict.fromkeys((part["source"], part["status"])))  # "ours" once, not twice
    return (
        '<div class="rc-claim" style="' + _STYLE + '">'
        f"<strong>✓ {html.escape(shown)}</strong> (band {html.escape(str(claim.band))})"
        f" · {part['statement']}<br>"
        f"<small>check <code>{part['id']}</code> · {origin}</small></div>"
    )


def stored(notebook: str | Path) -> dict[str, list[float | int | bool]]:
    """Return the values that an executed notebook's checks stored in it.

    Args:
        notebook: path of an ``.ipynb`` file.

    Returns:
        Claim ids and, for each, its values in the order of the checks.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no notebook.
    """
    content = json.loads(Path(notebook).read_text(encoding="utf-8"))
    if not isinstance(content, dict) or "cells" not in content:
        raise ValueError(f"{notebook}: no notebook, it has no cells")
    values: dict[str, list[float | int | bool]] = {}
    for cell in content["cells"]:
        for output in cell.get("outputs", []):
            found = output.get("metadata", {}).get("rc_lib", {})
            if "claim" in found:
                values.setdefault(found["claim"], []).append(found["value"])
    return values
