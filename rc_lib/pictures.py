"""Galleries of attention matrices, and curves that end at the rounding floor, for the chapters (ours).

``plotting`` has the style and the marks of single axes; here are whole figures that several patterns share:
matrices side by side, two a row, and residuals by layer of which some plunge and some do not.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from rc_lib import checks, plotting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Below this a relative residual in float64 is rounding error: a few epsilon.
FLOOR = 1e-15
#: Colours of a matrix: more than an eye tells apart, and few enough for a picture with a palette.
_SHADES = 51


def row_sums(P: Float[Tensor, "n m"]) -> str:
    """The row sums of a matrix in words.

    Args:
        P: ``[n, m]``.

    Returns:
        One number if all rows have the same sum (to six decimals), else the smallest and the largest.

    Raises:
        ValueError: an entry is not finite.
    """
    low, high = (round(v.item(), 6) + 0.0 for v in checks.matrix("P", P).sum(-1).aminmax())
    return f"{low:.2g}" if low == high else f"{low:.2f} to {high:.2f}"


def matrix(ax: "Axes", name: str, P: Float[Tensor, "n m"]) -> None:
    """Draw one matrix under its name and its row sums.

    The darkest colour is zero and the brightest the largest entry.  Where entries are negative, the scale is
    another: white is zero, red above, blue below.

    Args:
        ax: Axes to draw on.
        name: What stands above.
        P: ``[n, m]``.

    Raises:
        ValueError: an entry is not finite.
    """
    from matplotlib import colormaps

    sums, top = row_sums(P), P.abs().max().item()
    image = plotting.attention_map(ax, P)
    image.set_cmap(image.get_cmap().resampled(_SHADES))
    if P.min() < -1e-9 * top:
        image.set_cmap(colormaps["RdBu_r"].resampled(_SHADES))
        image.set_clim(-top, top)
    ax.set_title(f"{name}\nrows sum to {sums}", weight="normal", fontsize=12)
    ax.set(xticks=range(0, P.shape[1], 5), yticks=range(0, P.shape[0], 5))


def gallery(title: str, pictures: Mapping[str, Float[Tensor, "n m"]]) -> "Figure":
    """Draw matrices two a row.

    Args:
        title: The finding, above all.
        pictures: Matrices by name.

    Returns:
        The figure.

    Raises:
        ValueError: there are none, or an entry is not finite.
    """
    import matplotlib.pyplot as plt

    if not pictures:
        raise ValueError("pictures is empty; expected at least one matrix")
    rows = -(-len(pictures) // 2)
    figure, axes = plt.subplots(rows, 2, figsize=(6.2, 3.2 * rows + 0.9), squeeze=False)
    for ax, (name, P) in zip(axes.flat, pictures.items(), strict=False):
        matrix(ax, name, P)
        ax.label_outer()
    for ax in axes.flat[len(pictures) :]:
        ax.axis("off")
    figure.suptitle(title, x=0.02, ha="left", weight="bold", fontsize=13)
    return figure


def curves(
    ax: "Axes",
    lines: Mapping[str, Float[Tensor, " layers"]],
    title: str,
    *,
    low: float,
    dashed: tuple[str, ...] = (),
) -> None:
    """Draw relative residuals by layer, named directly; each ends at its first value below the floor.

    The first curve is a grey, dashed reference.  If the view reaches the floor, that is drawn too.

    Args:
        ax: Axes to draw on.
        lines: Residuals by name, all of the same length; NaN ends a curve.
        title: The finding.
        low: Lower end of the view.
        dashed: Names of curves to dash.

    Raises:
        ValueError: there are none, or ``low`` is not positive.
    """
    from matplotlib import rcParams

    if not lines or not low > 0:
        raise ValueError(f"lines has {len(lines)} curves and low is {low}; expected some, and low above 0")
    depth = max(len(y) for y in lines.values()) - 1
    plotting.residual_axes(ax, title=title)
    colours = [plotting.PALETTE["grey"], *rcParams["axes.prop_cycle"].by_key()["color"]]
    for k, (name, y) in enumerate(lines.items()):
        style = "--" if k == 0 or name in dashed else "-"
        ax.plot(_until_floor(y).numpy(), style, color=colours[k % len(colours)], label=name)
    ax.set(xlim=(-0.3, 1.62 * depth), xticks=range(0, depth + 1, 2), ylim=(low, 2))
    if low < FLOOR:
        plotting.floating_point_floor(ax)
        ax.texts[-1].set(x=0.99, ha="right")
        ax.set_ylim(low, 2)
    _name_plunged(ax, [line for line in ax.get_lines() if not line.get_label().startswith("_")])
    if any(not line.get_label().startswith("_") for line in ax.get_lines()):
        plotting.label_lines(ax)


def _until_floor(y: Tensor) -> Tensor:
    """NaN after the first entry below the floor."""
    low = ~(y >= FLOOR)
    return y.masked_fill(low.cumsum(0) - low.int() > 0, torch.nan)


def _name_plunged(ax: "Axes", drawn: list) -> None:
    """Names of curves that leave through the floor: one below the other, each with a line to its curve."""
    plunged = []
    for line in drawn:
        y = torch.as_tensor(line.get_ydata())
        y = y[y.isfinite()]
        if len(y) > 1 and y[-1] < FLOOR:
            plunged.append((len(y), y[-2].item(), y, line))
    plunged.sort(key=lambda end: end[:2])
    for k, (*_, y, line) in enumerate(plunged):
        height = FLOOR * 10 ** (0.7 + 1.3 * k)
        colour = plotting.text_colour(line.get_color())
        arrow = {"arrowstyle": "-", "color": colour, "lw": 0.9, "shrinkA": 2, "shrinkB": 0}
        place = (0.36 * ax.get_xlim()[1], height)
        ax.annotate(
            line.get_label(),
            (_crossing(y, height), height),
            place,
            color=colour,
            fontsize=11.5,
            va="center",
            arrowprops=arrow,
        )
        line.set_label(f"_{line.get_label()}")


def _crossing(y: Tensor, height: float) -> float:
    """Where the curve last falls below a height, on a log scale."""
    last = int((y >= height).nonzero()[-1])
    above, below = y[last].log().item(), y[last + 1].clamp(1e-300).log().item()
    return last + (above - math.log(height)) / (above - below)


def show(figure: "Figure", dpi: int = 100) -> None:
    """Display a figure as a picture of few colours, a third of the usual size, and close it.

    Args:
        figure: A figure of pyplot's.
        dpi: Resolution in dots per inch.
    """
    import matplotlib.pyplot as plt
    from IPython.display import Image, display

    from rc_lib import frames

    picture = frames.png(frames.draw(lambda: figure, {}, checks.positive_int("dpi", dpi)), colours=256)
    plt.close(figure)
    display(Image(picture))
