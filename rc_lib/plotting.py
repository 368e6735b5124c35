"""One style for every figure of the book, and the few marks that figures of residuals share (section 3).

Figures sit on a white card, so they read the same on a light and on a dark page; fonts are 11 pt and more
at the width shown, colours are Okabe and Ito's (distinct for every common kind of colour vision), and
curves carry their names beside them rather than in a legend.
"""

from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from rc_lib import checks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

#: Okabe and Ito's colours, and neutral greys for what is context rather than data.
PALETTE = {
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "green": "#009E73",
    "purple": "#CC79A7",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "yellow": "#F0E442",
    "black": "#000000",
    "ink": "#1A1A1A",
    "grey": "#6E6E6E",
    "light": "#DDDDDD",
}

#: The colour of each variant of a network, the same in every chapter.
VARIANT_COLOURS = {
    "SAN": PALETTE["vermillion"],
    "SAN+MLP": PALETTE["orange"],
    "SAN+skip": PALETTE["blue"],
    "transformer": PALETTE["green"],
}

_CYCLE = ("blue", "vermillion", "green", "purple", "orange", "sky", "black")

_STYLE: dict[str, Any] = {
    "figure.figsize": (7.2, 4.2),
    "figure.dpi": 110,
    "savefig.dpi": 110,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.constrained_layout.use": True,
    "font.size": 12,
    "font.family": "DejaVu Sans",
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.labelsize": 12,
    "axes.labelcolor": PALETTE["ink"],
    "axes.edgecolor": PALETTE["grey"],
    "axes.linewidth": 0.9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": PALETTE["light"],
    "grid.linewidth": 0.7,
    "text.color": PALETTE["ink"],
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "xtick.color": PALETTE["ink"],
    "ytick.color": PALETTE["ink"],
    "legend.fontsize": 11,
    "legend.frameon": False,
    "lines.linewidth": 2.2,
    "lines.markersize": 5.5,
    "lines.solid_capstyle": "round",
    "image.cmap": "cividis",
    "mathtext.fontset": "dejavusans",
    "svg.hashsalt": "rc_lib",
    "path.simplify": True,
}


def use_style() -> None:
    """Make the book's style the default of every figure drawn from here on.

    Changes matplotlib's ``rcParams`` of the running process and nothing else; call it once per notebook.
    Source: ours.
    """
    import matplotlib as mpl
    from cycler import cycler

    mpl.rcParams.update(_STYLE)
    mpl.rcParams["axes.prop_cycle"] = cycler(color=[PALETTE[name] for name in _CYCLE])


def text_colour(colour: Any) -> str:
    """Return a colour for text that belongs to a mark of the given colour, dark enough to read on white.

    The colour keeps its hue and is darkened until its contrast with white is at least 4.5 to 1
    (WCAG 2.1, success criterion 1.4.3).

    Args:
        colour: anything that matplotlib takes as a colour.

    Returns:
        A hexadecimal colour.

    Raises:
        ValueError: ``colour`` is no colour that matplotlib knows.
    """
    from matplotlib.colors import to_hex, to_rgb

    rgb = to_rgb(colour)
    while _contrast_with_white(rgb) < 4.5:
        rgb = tuple(0.95 * c for c in rgb)
    return to_hex(rgb)


def _contrast_with_white(rgb: Sequence[float]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 1.05 / (luminance + 0.05)


def residual_axes(
    ax: "Axes | None" = None,
    *,
    title: str | None = None,
    xlabel: str = "layer",
    ylabel: str = "relative residual",
    log: bool = True,
    depth: int | None = None,
) -> "Axes":
    """Return axes ready for residuals against depth: integer layers across, a log scale up.

    Args:
        ax: axes to set up; a new figure with one pair of axes when left out.
        title: the finding, as a sentence.
        xlabel: label of the horizontal axis.
        ylabel: label of the vertical axis; the kind of scale is added to it.
        log: log scale (the default) or linear scale.
        depth: number of layers L; the horizontal axis then runs from 0 to L.

    Returns:
        The axes; ``ax.figure`` is their figure.

    Raises:
        ValueError: ``depth`` is below 1.
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    if depth is not None and depth < 1:
        raise ValueError(f"depth={depth}: expected at least one layer")
    checks.boolean("log", log)
    ax = plt.subplots()[1] if ax is None else ax
    ax.set(xlabel=xlabel, ylabel=f"{ylabel} ({'log' if log else 'linear'} scale)")
    ax.set_yscale("log" if log else "linear")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=2))
    if depth is not None:
        ax.set_xlim(-0.02 * depth, 1.02 * depth)
    if title:
        ax.set_title(title)
    return ax


def curve(
    ax: "Axes",
    x: Any,
    centre: Any,
    low: Any = None,
    high: Any = None,
    *,
    label: str | None = None,
    **style: Any,
) -> "Line2D":
    """Draw one curve and, when both are given, the band between ``low`` and ``high`` around it.

    Args:
        ax: axes to draw on.
        x: [k] positions.
        centre: [k] the curve, e.g. a mean over seeds.
        low: [k] lower edge of the band.
        high: [k] upper edge of the band.
        label: name of the curve, for ``label_lines``.
        **style: passed to ``Axes.plot``.

    Returns:
        The line that was drawn.

    Raises:
        ValueError: only one of ``low`` and ``high`` is given.
    """
    if (low is None) != (high is None):
        raise ValueError("low and high: give both edges of the band, or neither")
    (line,) = ax.plot(x, centre, label=label, **style)
    if low is not None:
        ax.fill_between(x, low, high, color=line.get_color(), alpha=0.18, linewidth=0)
    return line


def paper_curve(ax: "Axes", x: Any, y: Any, *, label: str | None = None, **style: Any) -> "Line2D":
    """Draw a curve of the paper behind ours: the same colour if one is given, dashed, pale and thick.

    Args:
        ax: axes to draw on.
        x: [k] positions.
        y: [k] digitised values.
        label: name of the curve, for ``label_lines``.
        **style: passed to ``Axes.plot``; grey unless ``color`` says otherwise.

    Returns:
        The line that was drawn.
    """
    style = {
        "color": PALETTE["grey"],
        "linestyle": (0, (2, 1.2)),
        "linewidth": 4,
        "alpha": 0.45,
        "zorder": 1.5,
    } | style
    (line,) = ax.plot(x, y, label=label, **style)
    return line


def floating_point_floor(
    ax: "Axes", dtype: torch.dtype | str = torch.float64, *, scale: float | int = 1.0
) -> float:
    """Hatch what the number format cannot resolve: all below machine epsilon times ``scale``.

    A residual this far below the size of its matrix is rounding error: it says nothing about the network.

    Args:
        ax: axes with a residual on the vertical axis; call this after drawing the curves.
        dtype: floating-point format, as a torch dtype or its name, e.g. ``"float32"``.
        scale: size of the numbers whose difference is the residual; 1 for a relative residual.

    Returns:
        The floor, machine epsilon times ``scale``.

    Raises:
        ValueError: ``dtype`` is no floating-point format, or ``scale`` is not a positive finite number.
    """
    name, eps = _epsilon(dtype)
    if not 0 < scale < float("inf"):
        raise ValueError(f"scale={scale}: expected a positive finite number")
    floor = eps * scale
    bottom, top = ax.get_ylim()
    bottom = min(bottom, floor / 30) if ax.get_yscale() == "log" else min(bottom, 0.0)
    ax.axhspan(bottom, floor, facecolor="none", edgecolor="#BBBBBB", hatch="////", linewidth=0, zorder=0.5)
    ax.axhline(floor, color=PALETTE["grey"], linewidth=1, linestyle=":", zorder=0.6)
    ax.text(0.01, floor, f"below: {name} rounding error", transform=ax.get_yaxis_transform(),
            va="bottom", fontsize=11, color=PALETTE["grey"])  # fmt: skip
    ax.set_ylim(bottom, max(top, 3 * floor))
    return floor


def _epsilon(dtype: torch.dtype | str) -> tuple[str, float]:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(
            f"dtype={dtype!r}: expected a floating-point format such as torch.float64 or 'float32'"
        )
    return str(found).removeprefix("torch."), torch.finfo(found).eps


def label_lines(ax: "Axes", *, fontsize: float | int = 11.5, gap: float | int = 1.25) -> None:
    """Write each curve's name at its right end, in its colour, and move names apart that would overlap.

    Curves without a label (or with one that starts with an underscore) are left alone. Call it last:
    later changes of the limits would move the curves but not their names.

    Args:
        ax: axes with labelled curves.
        fontsize: size of the names, in points.
        gap: smallest distance of two names' centres, in lines of text.

    Raises:
        ValueError: no curve has a label.
    """
    from matplotlib.patheffects import withStroke

    named = [line for line in ax.get_lines() if not str(line.get_label()).startswith("_")]
    ends = [(line, *_last_point(line)) for line in named]
    ends = [end for end in ends if end[1] is not None]
    if not ends:
        raise ValueError("ax: no curve with a label and a point in view to name")
    pixels = [ax.transData.transform((x, y)) for _, x, y in ends]
    for i, y_label in _apart(pixels, gap * fontsize * ax.figure.dpi / 72, ax.get_window_extent()):
        line, x, y = ends[i]
        offset = (8, (y_label - float(pixels[i][1])) * 72 / ax.figure.dpi)
        style = {"fontsize": fontsize, "color": text_colour(line.get_color()), "va": "center"}
        name = ax.annotate(str(line.get_label()), (x, y), offset, textcoords="offset points", **style)
        name.set_path_effects([withStroke(linewidth=3, foreground="white")])


def _last_point(line: "Line2D") -> tuple[Any, Any]:
    """The last point of the curve that is in view; (None, None) if there is none."""
    import numpy as np

    xy = np.column_stack([np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)])
    (left, right), (low, high) = (sorted(limits) for limits in (line.axes.get_xlim(), line.axes.get_ylim()))
    shown = (left <= xy[:, 0]) & (xy[:, 0] <= right) & (low <= xy[:, 1]) & (xy[:, 1] <= high)
    return tuple(xy[shown][-1]) if shown.any() else (None, None)


def _apart(pixels: Sequence[Any], gap: float, box: Any) -> list[tuple[int, float]]:
    """Index and height of every name; names of curves that end at the same place across are moved apart."""
    columns: dict[int, list[int]] = {}
    for i, (x, _) in enumerate(pixels):
        columns.setdefault(round(float(x)), []).append(i)
    placed = []
    for indices in columns.values():
        heights = _spread([float(pixels[i][1]) for i in indices], gap, float(box.y0), float(box.y1))
        placed += zip(indices, heights, strict=True)
    return placed


def _spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near the wanted ones, in their order, ``gap`` apart, within the limits if there is room."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    groups: list[list[float]] = []  # names that would touch share the mean of the places where each fits best
    for k, i in enumerate(order):
        groups.append([wanted[i] - k * gap])
        while len(groups) > 1 and _mean(groups[-2]) > _mean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    places = [_mean(group) for group in groups for _ in group]
    room = max(high - gap * (len(wanted) - 1), low)
    placed = [0.0] * len(wanted)
    for k, (i, place) in enumerate(zip(order, places, strict=True)):
        placed[i] = min(max(place, low), room) + k * gap
    return placed


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def attention_map(
    ax: "Axes", P: Any, *, tokens: Sequence[str] | None = None, vmax: Real | None = None
) -> Any:
    """Draw an attention matrix: row i is the distribution over the tokens that token i attends to.

    Args:
        ax: axes to draw on.
        P: [n, n] row-stochastic matrix, a tensor or an array.
        tokens: n names for rows and columns.
        vmax: weight of the darkest colour; the largest entry when left out.

    Returns:
        The image, for a colour bar.

    Raises:
        ValueError: ``P`` is no matrix, or ``tokens`` does not name its columns.
    """
    import numpy as np

    weights = np.asarray(P.detach().cpu() if isinstance(P, torch.Tensor) else P, dtype=float)
    if weights.ndim != 2:
        raise ValueError(f"P: shape {weights.shape}, expected a matrix [n, n]")
    if tokens is not None and len(tokens) != weights.shape[1]:
        raise ValueError(f"tokens: {len(tokens)} names for {weights.shape[1]} columns")
    image = ax.imshow(weights, cmap="cividis", vmin=0, vmax=weights.max() if vmax is None else vmax)
    ax.grid(False)
    ax.set(xlabel="attended token j", ylabel="token i")
    if tokens is not None:
        ax.set_xticks(range(len(tokens)), tokens, rotation=60, ha="right")
        ax.set_yticks(range(weights.shape[0]), tokens[: weights.shape[0]])
    return image
