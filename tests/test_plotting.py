import itertools

import matplotlib
import numpy as np
import pytest
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from hypothesis import given
from hypothesis import strategies as st

from rc_lib import plotting


@pytest.fixture(autouse=True)
def _style():
    with matplotlib.rc_context():
        plotting.use_style()
        yield
        plt.close("all")


def contrast(a, b):
    def luminance(colour):
        rgb = np.array(matplotlib.colors.to_rgb(colour))
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        return linear @ [0.2126, 0.7152, 0.0722]

    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_style_is_a_white_card_with_text_of_11_points_and_more():
    sizes = (
        "font.size",
        "axes.titlesize",
        "axes.labelsize",
        "xtick.labelsize",
        "ytick.labelsize",
        "legend.fontsize",
    )
    assert all(matplotlib.rcParams[key] >= 11 for key in sizes)
    assert matplotlib.rcParams["figure.facecolor"] == matplotlib.rcParams["savefig.facecolor"] == "white"


def test_figure_file_is_the_same_from_run_to_run(tmp_path):
    def draw(name):
        ax = plotting.residual_axes(title="t", depth=3)
        ax.plot([0, 1, 2, 3], [1, 0.1, 0.01, 0.001], label="SAN")
        plotting.label_lines(ax)
        ax.figure.savefig(tmp_path / name)
        return (tmp_path / name).read_bytes()

    assert draw("a.png") == draw("b.png")


@pytest.mark.parametrize("name", sorted(plotting.PALETTE))
def test_text_colour_reads_on_white(name):
    # 4.5 to 1 is WCAG's limit for text; the small allowance is the rounding to 8 bits a channel.
    assert contrast(plotting.text_colour(plotting.PALETTE[name]), "white") >= 4.45


def test_text_colour_leaves_a_dark_colour_alone():
    assert plotting.text_colour("#0072B2") == "#0072b2"


def test_text_colour_refuses_what_is_no_colour():
    with pytest.raises(ValueError, match="no-such-colour"):
        plotting.text_colour("no-such-colour")


def test_variants_have_colours_of_their_own():
    assert len(set(plotting.VARIANT_COLOURS.values())) == 4


def test_residual_axes_say_their_scale():
    assert plotting.residual_axes().get_ylabel() == "relative residual (log scale)"
    ax = plotting.residual_axes(log=False, ylabel="residual")
    assert (ax.get_ylabel(), ax.get_yscale()) == ("residual (linear scale)", "linear")


def test_residual_axes_set_up_given_axes_and_have_whole_layers():
    _, ax = plt.subplots()
    assert plotting.residual_axes(ax, title="Falls", depth=7) is ax
    assert ax.get_title(loc="left") == "Falls"
    assert all(float(tick).is_integer() for tick in ax.get_xticks())


def test_residual_axes_refuse_no_layers():
    with pytest.raises(ValueError, match="depth=0"):
        plotting.residual_axes(depth=0)


def test_curve_draws_its_band():
    ax = plotting.residual_axes()
    line = plotting.curve(ax, [0, 1], [1.0, 0.5], [0.9, 0.4], [1.1, 0.6], label="SAN", color="red")
    assert line.get_label() == "SAN"
    assert len(ax.collections) == 1


def test_curve_refuses_half_a_band():
    with pytest.raises(ValueError, match="both edges"):
        plotting.curve(plotting.residual_axes(), [0, 1], [1.0, 0.5], low=[0.9, 0.4])


def test_paper_curve_lies_behind_ours():
    ax = plotting.residual_axes()
    paper = plotting.paper_curve(ax, [0, 1], [1.0, 0.5], color="blue")
    ours = plotting.curve(ax, [0, 1], [1.0, 0.5])
    assert paper.get_zorder() < ours.get_zorder()
    assert paper.get_color() == "blue"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, "float32"])
def test_floor_is_machine_epsilon(dtype):
    ax = plotting.residual_axes()
    ax.plot([0, 1], [1, 1e-3])
    expected = torch.finfo(getattr(torch, dtype) if isinstance(dtype, str) else dtype).eps
    assert plotting.floating_point_floor(ax, dtype, scale=3.0) == 3 * expected
    low, high = ax.get_ylim()
    assert low < 3 * expected < high


@pytest.mark.parametrize("dtype", [torch.int64, "float65", "Tensor"])
def test_floor_refuses_what_is_no_floating_point_format(dtype):
    with pytest.raises(ValueError, match="floating-point format"):
        plotting.floating_point_floor(plotting.residual_axes(), dtype)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_floor_refuses_a_scale_that_is_no_size(scale):
    with pytest.raises(ValueError, match="scale="):
        plotting.floating_point_floor(plotting.residual_axes(), scale=scale)


def names(ax):
    """Every direct label: its text and its box in pixels."""
    ax.figure.canvas.draw()
    return {text.get_text(): text.get_window_extent() for text in ax.texts}


def test_label_lines_names_every_curve_once_without_overlap():
    ax = plotting.residual_axes(depth=4)
    for k, name in enumerate(["SAN", "SAN+MLP", "SAN+skip", "transformer", "bound"]):
        ax.plot(range(5), np.full(5, 0.5 + 1e-3 * k), label=name)
    ax.plot(range(5), np.full(5, 0.1))
    plotting.label_lines(ax)
    boxes = names(ax)
    assert set(boxes) == {"SAN", "SAN+MLP", "SAN+skip", "transformer", "bound"}
    ordered = sorted(boxes.values(), key=lambda box: box.y0)
    assert all(lower.y1 <= upper.y0 + 1 for lower, upper in itertools.pairwise(ordered))


def test_label_stands_where_its_curve_leaves_the_axes():
    ax = plotting.residual_axes(depth=9)
    ax.plot(range(10), 10.0 ** -np.arange(10), label="falls")
    ax.set_ylim(1e-3, 1)
    plotting.label_lines(ax)
    ax.figure.canvas.draw()
    assert ax.texts[0].xy == (3, 1e-3)


def test_label_lines_skips_points_that_are_not_finite():
    ax = plotting.residual_axes(depth=3)
    ax.plot(range(4), [1, 0.5, 0.25, np.nan], label="SAN")
    plotting.label_lines(ax)
    assert ax.texts[0].xy == (2, 0.25)


def test_label_lines_refuses_axes_without_names():
    ax = plotting.residual_axes()
    ax.plot([0, 1], [1, 0.1])
    with pytest.raises(ValueError, match="no curve with a label"):
        plotting.label_lines(ax)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8))
def test_spread_keeps_order_and_distance(wanted):
    placed = plotting._spread(wanted, 5.0, 0.0, 100.0)
    order = np.argsort(wanted, kind="stable")
    # 1e-9 pixels: the positions are sums of a few numbers below 100.
    assert (np.diff(np.array(placed)[order]) >= 5.0 - 1e-9).all()
    assert min(placed) >= 0
    assert max(placed) <= 100 + 1e-9


def test_spread_leaves_names_that_do_not_touch():
    assert plotting._spread([10.0, 50.0, 30.0], 5.0, 0.0, 100.0) == [10.0, 50.0, 30.0]


def test_attention_map_names_its_tokens():
    _, ax = plt.subplots()
    image = plotting.attention_map(ax, torch.full((3, 3), 1 / 3), tokens=["a", "b", "c"])
    assert image.get_array().shape == (3, 3)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["a", "b", "c"]


@pytest.mark.parametrize(("P", "tokens"), [(torch.ones(2, 3, 3), None), (torch.ones(3, 3), ["a", "b"])])
def test_attention_map_refuses_what_does_not_fit(P, tokens):
    _, ax = plt.subplots()
    with pytest.raises(ValueError, match=r"P: shape|tokens: 2 names"):
        plotting.attention_map(ax, P, tokens=tokens)
