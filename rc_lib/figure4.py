"""Figure 4 in two panels: accuracy by path length, by the paper's protocol and exactly (paper, section 4)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rc_lib.plotting import PALETTE, text_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHADES = ("sky", "blue", "ink")
_EXACT = {
    "alone": ("green", "o-", "one length alone"),
    "cumulative": ("purple", "s--", "all lengths up to k"),
    "leave_one_out": ("orange", "^:", "all but one length"),
}


def sampled_panel(ax: "Axes", sampled: np.ndarray, counts: Sequence[int]) -> None:
    """Draw the paper's protocol: mean and one standard deviation over seeds and repeats.

    Args:
        ax: where.
        sampled: accuracies ``[seeds, counts, lengths, repeats]``.
        counts: how many paths were drawn, one number for each entry of the second axis.

    Raises:
        ValueError: an array of another shape.
    """
    if sampled.ndim != 4 or sampled.shape[1] != len(counts):
        raise ValueError(
            f"sampled has shape {list(sampled.shape)}; expected [seeds, {len(counts)}, lengths, repeats]"
        )
    shades = _SHADES[-len(counts) :] if len(counts) <= len(_SHADES) else _SHADES[:1] * len(counts)
    for i, (count, shade) in enumerate(zip(counts, shades, strict=True)):
        mean, std = sampled[:, i].mean((0, 2)), sampled[:, i].std((0, 2))
        colour, lengths = PALETTE[shade], np.arange(len(mean))
        ax.plot(lengths, mean, "o-", color=colour, label=f"{count} random paths")
        ax.fill_between(lengths, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)


def exact_panel(ax: "Axes", found: Mapping[str, np.ndarray]) -> None:
    """Draw the exact spectrum: one line for each way to add the lengths up, mean and range over seeds.

    Args:
        ax: where.
        found: ``"alone"``, ``"cumulative"`` and ``"leave_one_out"``, each ``[seeds, lengths]``.

    Raises:
        ValueError: one of the three is missing.
    """
    missing = [name for name in _EXACT if name not in found]
    if missing:
        raise ValueError(f"found lacks {', '.join(missing)}; there is {', '.join(found)}")
    for name, (shade, form, label) in _EXACT.items():
        values = found[name]
        lengths = np.arange(values.shape[1])
        ax.plot(lengths, values.mean(0), form, color=PALETTE[shade], label=label)
        ax.fill_between(lengths, values.min(0), values.max(0), color=PALETTE[shade], alpha=0.15, linewidth=0)


def level(ax: "Axes", value: float, name: str, colour: str = "grey", side: str = "right") -> None:
    """Draw a horizontal line with its name on it: the whole network, a baseline, the paper's claim.

    Args:
        ax: where; its horizontal limits must stand already.
        value: accuracy.
        name: written on the line.
        colour: a name of ``PALETTE``.
        side: ``"right"`` or ``"left"``, where the name stands.
    """
    from matplotlib.patheffects import withStroke

    ax.axhline(value, color=PALETTE[colour], linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    x = ax.get_xlim()[side == "right"]
    text = ax.annotate(
        name,
        (x, value),
        (0, 2),
        textcoords="offset points",
        ha=side,
        va="bottom",
        color=text_colour(PALETTE[colour]),
        fontsize=11,
    )
    text.set_path_effects([withStroke(linewidth=3, foreground="white")])


def draw(
    found: Mapping[str, np.ndarray], counts: Sequence[int], levels: Mapping[str, tuple[float, str]]
) -> "Figure":
    """Draw both panels.

    Args:
        found: the arrays of ``experiments.token_tasks.stored``, with a first axis of seeds.
        counts: the numbers of paths that were drawn.
        levels: horizontal lines for both panels, name to (accuracy, colour); a colour of ``PALETTE``.

    Returns:
        The figure.

    Raises:
        ValueError: an array is missing or has another shape.
    """
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(7.2, 7.6), sharex=True, sharey=True)
    sampled_panel(above, np.asarray(found["sampled"]), counts)
    exact_panel(below, found)
    lengths = np.asarray(found["alone"]).shape[1]
    above.set_xlim(-0.2, lengths - 0.8)
    above.set_xticks(range(lengths))
    for ax in (above, below):
        for name, (value, colour) in levels.items():
            level(ax, value, name, colour)
        ax.set_ylabel("accuracy (linear)")
        ax.legend(loc="upper right", bbox_to_anchor=(1, 0.9), fontsize=11, framealpha=0.9)
    above.set_ylim(min(0.0, above.get_ylim()[0]), 1.06)
    above.set_title("The paper's protocol: random paths, run alone")
    below.set_title("Exact: the sum of all paths")
    below.set_xlabel("path length k (heads on the path)")
    return figure
