"""Controls that work everywhere: live in a kernel, and on the saved page where no kernel runs.

``explore(plot, depth=range(1, 13))`` shows a figure and one control for each argument of ``plot``. In a live
kernel the controls are core ipywidgets and the figure is drawn anew at once. Where ``RC_LIB_STATIC=1`` is set
(the book's stored outputs) the figure is drawn over a coarse grid beforehand; the book's page turns these
frames into a control of its own (``explore_page.py``), and every other reader of the notebook shows the
default frame with a line that says what moves. Source: ours.
"""

import base64
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from math import prod
from numbers import Real
from typing import TYPE_CHECKING, Any

from rc_lib import frames

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIME = "application/vnd.rc-lib.explore+json"
MAX_FRAMES = 40
MAX_BYTES = 600_000
_RESOLUTIONS = (100, 88, 76)


@dataclass(frozen=True)
class Control:
    """One argument of the plot that the reader moves. Plain values do where no name or default is wanted.

    Attributes:
        values: the values it can take, in order.
        default: the value shown first; the plot's own default for this argument when left out, or else
            the first value.
        label: what the reader sees; the argument's name when left out.
        format: turns a value into the text beside the control; numbers in a short form when left out.
    """

    values: Iterable[Any] | bool
    default: Any = None
    label: str | None = None
    format: Callable[[Any], str] | None = None


@dataclass(frozen=True)
class _Axis:
    """A control as the rest of this file uses it: checked, with its texts and the default's place."""

    name: str
    label: str
    values: tuple
    texts: tuple
    start: int
    kind: str  # "range" for ordered numbers, "checkbox" for off and on, "select" for the rest

    def at(self, places: Iterable[int]) -> "_Axis":
        places = sorted(places)
        values, texts = (tuple(row[i] for i in places) for row in (self.values, self.texts))
        return _Axis(self.name, self.label, values, texts, places.index(self.start), self.kind)

    @property
    def span(self) -> str:
        if self.kind == "checkbox":
            return f"{self.label} (off/on)"
        return f"{self.label} ({self.texts[0]}–{self.texts[-1]})" if self.kind == "range" else self.label


@dataclass
class _Grid:
    """The plot over all combinations of its controls; a frame is drawn when it is first asked for."""

    plot: Callable[..., Any]
    axes: Sequence[_Axis]
    alt: str | Callable[..., str]
    drawn: dict = field(default_factory=dict)

    @property
    def moves(self) -> str:
        """The line that says what moves, for readers that show only one frame."""
        return f"Moves with: {', '.join(axis.span for axis in self.axes)} — run the cell, or read the book."

    def values(self, place: Sequence[int]) -> dict[str, Any]:
        return {axis.name: axis.values[i] for axis, i in zip(self.axes, place, strict=True)}

    def setting(self, place: Sequence[int]) -> str:
        return ", ".join(f"{axis.label} {axis.texts[i]}" for axis, i in zip(self.axes, place, strict=True))

    def description(self, place: Sequence[int]) -> str:
        if callable(self.alt):
            text = self.alt(**self.values(place))
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"alt: returned {text!r} for {self.setting(place)}, expected a text")
            return text.strip()
        return f"{self.alt.strip().rstrip('.')}. Shown: {self.setting(place)}."

    def frame(self, place: tuple[int, ...], dpi: int) -> Any:
        if (place, dpi) not in self.drawn:
            self.drawn[place, dpi] = frames.draw(self.plot, self.values(place), dpi)
        return self.drawn[place, dpi]


def explore(plot: "Callable[..., Figure | Any]", *, alt: str | Callable[..., str], **controls: Any) -> None:
    """Show a figure with controls, live in a kernel and from stored frames where there is none.

    The kind of control follows from its values: ordered numbers make a slider, ``True`` and ``False`` a
    checkbox, anything else a drop-down list. The first frame shows the plot's own default for each argument
    if it is one of the values, and the first value if not. Stored outputs hold at most 40 frames and 600 kB
    in all: sliders are thinned for them, keeping both ends and the default. What the plot prints is dropped.

    Args:
        plot: draws one figure with matplotlib for given values of its arguments; may return figure or axes.
        alt: what the figure shows, for a reader who cannot see it; or a function of the same arguments.
        **controls: for each argument of the plot its values (a range, a list, a bool, a ``Control``).

    Raises:
        ValueError: no control, a control without values, with equal values or with a default that is none
            of its values; an empty ``alt``; a plot that draws nothing; frames that do not fit the budget.
        TypeError: the plot cannot be called with the controls' names; a control's values are no values.
        Exception: whatever the plot itself raises.
    """
    if not (callable(alt) or (isinstance(alt, str) and alt.strip())):
        raise ValueError(f"alt={alt!r}: expected a text that says what the figure shows")
    grid = _Grid(plot, _axes(plot, controls), alt)
    if os.environ.get("RC_LIB_STATIC") == "1":
        _show_stored(grid)
    else:
        from rc_lib import explore_live

        explore_live.show(grid)


def _axes(plot: Callable[..., Any], controls: Mapping[str, Any]) -> list[_Axis]:
    if not callable(plot):
        raise TypeError(f"plot: {type(plot).__name__}, expected a function that draws a figure")
    if not controls:
        raise ValueError(
            "explore needs at least one control, e.g. explore(plot, alt='…', depth=range(1, 13))"
        )
    try:
        parameters = signature(plot)
        parameters.bind(**controls)
    except TypeError as error:
        raise TypeError(f"plot cannot be called with {', '.join(controls)}: {error}") from None
    return [_axis(name, given, parameters.parameters.get(name)) for name, given in controls.items()]


def _axis(name: str, given: Any, parameter: Parameter | None) -> _Axis:
    control = given if isinstance(given, Control) else Control(given)
    values = _values(name, control)
    default = control.default
    if default is None and isinstance(given, bool):
        default = given
    start = _place(values, default)
    if default is not None and start is None:
        raise ValueError(f"{name}: default {default!r} is none of its values")
    if start is None and parameter is not None:
        start = _place(values, parameter.default)
    texts = tuple(str((control.format or _text)(value)) for value in values)
    if len(set(texts)) != len(texts):
        raise ValueError(f"{name}: two values have the same text; texts are {', '.join(texts)}")
    return _Axis(name, control.label or name.replace("_", " "), values, texts, start or 0, _kind(values))


def _values(name: str, control: Control) -> tuple:
    given = control.values
    if isinstance(given, bool):
        return (False, True)
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise TypeError(f"{name}={given!r}: expected values to choose from, e.g. a range, a list or a bool")
    values = tuple(value.item() if hasattr(value, "item") else value for value in given)
    if len(values) < 2:
        raise ValueError(f"{name}: {len(values)} value(s), expected at least two to choose from")
    return values


def _place(values: Sequence[Any], wanted: Any) -> int | None:
    same = [i for i, value in enumerate(values) if type(value) is type(wanted) and value == wanted]
    near = [
        i for i, value in enumerate(values) if _is_number(value) and _is_number(wanted) and value == wanted
    ]
    return next(iter(same + near), None)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _kind(values: Sequence[Any]) -> str:
    if values == (False, True):
        return "checkbox"
    if all(_is_number(value) for value in values):
        steps = [b > a for a, b in itertools.pairwise(values)]
        return "range" if all(steps) or not any(steps) else "select"
    return "select"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def thin(sizes: Sequence[int], fixed: Sequence[bool], limit: int = MAX_FRAMES) -> list[int]:
    """Return how many values each control keeps so that all combinations are at most ``limit``.

    Args:
        sizes: number of values of each control.
        fixed: which controls must keep all of their values (those that are no sliders).
        limit: largest product allowed.

    Returns:
        The sizes to keep; the longest slider loses a value first, and none falls below three (or its size).

    Raises:
        ValueError: the limit cannot be met.
    """
    kept = list(sizes)
    while prod(kept) > limit:
        free = [i for i in range(len(kept)) if not fixed[i] and kept[i] > 3]
        if not free:
            raise ValueError(
                f"controls with {' × '.join(map(str, sizes))} values need at least {prod(kept)} stored"
                f" frames, more than {limit}: use fewer values or fewer controls"
            )
        kept[max(free, key=lambda i: kept[i])] -= 1
    return kept


def _thinned(axis: _Axis, keep: int) -> _Axis:
    """The axis with evenly spread values: both ends, the default, and as many others as ``keep`` allows."""
    last = len(axis.values) - 1
    places = {round(i * last / (keep - 1)) for i in range(keep)}
    if axis.start not in places:
        places.remove(min(places - {0, last}, key=lambda i: abs(i - axis.start)))
    return axis.at(places | {axis.start})


def _coarse(grid: _Grid) -> _Grid:
    sizes = thin([len(axis.values) for axis in grid.axes], [axis.kind != "range" for axis in grid.axes])
    kept = zip(grid.axes, sizes, strict=True)
    axes = [_thinned(axis, n) if n < len(axis.values) else axis for axis, n in kept]
    return _Grid(grid.plot, axes, grid.alt)


def _show_stored(grid: _Grid) -> None:
    bundle, metadata = stored(grid)
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        get_ipython = None
    if get_ipython is not None and get_ipython() is not None:
        display(bundle, raw=True, metadata=metadata)
    else:
        print(bundle["text/plain"])


def stored(grid: _Grid) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the output bundle that a notebook stores, and its metadata.

    Args:
        grid: the plot and its controls.

    Returns:
        Data by MIME type (the frames, the default frame as a PNG, a line of text) and metadata.

    Raises:
        ValueError: the frames exceed 600 kB at the lowest resolution.
    """
    grid = _coarse(grid)
    places = list(itertools.product(*(range(len(axis.values)) for axis in grid.axes)))
    default = tuple(axis.start for axis in grid.axes)
    images, width, height = _encoded(grid, places)
    unique = list(dict.fromkeys(images))
    content = {
        "version": 1,
        "controls": [
            {"label": a.label, "kind": a.kind, "texts": list(a.texts), "start": a.start} for a in grid.axes
        ],
        "frames": [base64.b64encode(image).decode("ascii") for image in unique],
        "mime": "image/webp",
        "grid": [unique.index(image) for image in images],
        "alts": [grid.description(place) for place in places],
        "default": places.index(default),
        "width": width,
        "height": height,
        "moves": grid.moves,
    }
    content["id"] = "explore-" + hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]
    image = frames.with_footer(grid.frame(default, _RESOLUTIONS[0]), grid.moves)
    bundle = {
        MIME: content,
        "image/png": base64.b64encode(frames.png(image)).decode("ascii"),
        "text/plain": grid.moves,
    }
    return bundle, {"image/png": {"alt": f"{grid.description(default)} {grid.moves}"}}


def _encoded(grid: _Grid, places: Sequence[tuple[int, ...]]) -> tuple[list[bytes], int, int]:
    """Every frame as WebP at the highest resolution that fits the budget, and the size to show it at."""
    shown = grid.frame(places[0], _RESOLUTIONS[0])
    for dpi in _RESOLUTIONS:
        pictures = [grid.frame(place, dpi) for place in places]
        if len({picture.size for picture in pictures}) > 1:
            raise ValueError("plot: its figures differ in size; give every figure the same figsize")
        images = [frames.webp(picture) for picture in pictures]
        total = sum(4 * ((len(image) + 2) // 3) for image in set(images))
        if total <= MAX_BYTES:
            return images, *shown.size
    raise ValueError(
        f"explore: {len(set(images))} frames take {total // 1000} kB at {_RESOLUTIONS[-1]} dpi, more than"
        f" {MAX_BYTES // 1000} kB: use fewer values, a smaller figure, or fewer marks in it"
    )
