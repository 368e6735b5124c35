import itertools

import matplotlib
import numpy as np
import pytest

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from rc_lib import figure4, plotting


@pytest.fixture(autouse=True)
def _style():
    with matplotlib.rc_context():
        plotting.use_style()
        yield
        plt.close("all")


def made(seeds=3, counts=2, lengths=5, repeats=4):
    """Arrays of the four shapes, each entry another number."""
    rng = np.random.default_rng(0)
    exact = {key: rng.random((seeds, lengths)) for key in ("alone", "cumulative", "leave_one_out")}
    return {"sampled": rng.random((seeds, counts, lengths, repeats)), **exact}


def lines(ax):
    """The curves with a name, by name."""
    return {l.get_label(): l for l in ax.get_lines() if not l.get_label().startswith("_")}


def edges(band, x):
    """Lowest and highest point of a filled band at ``x``."""
    ys = [y for path in band.get_paths() for (at, y) in path.vertices if at == x]
    return min(ys), max(ys)


def test_sampled_panel_is_mean_and_deviation_over_seeds_and_repeats():
    # Two seeds, one count, two lengths, two repeats: length 0 differs by repeat, length 1 by seed.
    sampled = np.array([[[[0.0, 1.0], [0.1, 0.1]]], [[[0.0, 1.0], [0.3, 0.3]]]])
    ax = plt.figure().subplots()
    figure4.sampled_panel(ax, sampled, [7])
    (line,) = lines(ax).values()
    assert line.get_label() == "7 random paths"
    assert line.get_xdata().tolist() == [0, 1]
    assert np.allclose(line.get_ydata(), [0.5, 0.2])
    assert np.allclose(edges(ax.collections[0], 0), (0.0, 1.0))
    assert np.allclose(edges(ax.collections[0], 1), (0.1, 0.3))


def test_sampled_panel_keeps_its_axes_apart():
    found = made()["sampled"]
    ax = plt.figure().subplots()
    figure4.sampled_panel(ax, found, [5, 20])
    drawn = lines(ax)
    for i, name in enumerate(("5 random paths", "20 random paths")):
        assert np.allclose(drawn[name].get_ydata(), [found[:, i, k].mean() for k in range(5)])
    assert len({line.get_color() for line in drawn.values()}) == 2


@pytest.mark.parametrize("counts", [1, 2, 3])
def test_the_darkest_shade_is_the_largest_count(counts):
    ax = plt.figure().subplots()
    figure4.sampled_panel(ax, made(counts=counts)["sampled"], [5, 20, 100][:counts])
    colours = [line.get_color() for line in lines(ax).values()]
    assert colours[-1] == plotting.PALETTE["ink"]
    assert len(set(colours)) == counts


def test_more_counts_than_shades_are_drawn_alike():
    ax = plt.figure().subplots()
    figure4.sampled_panel(ax, made(counts=5)["sampled"], range(5))
    assert len(lines(ax)) == 5


@pytest.mark.parametrize("shape", [(3, 2, 5), (3, 1, 5, 4), (2, 3, 5, 4)])
def test_sampled_panel_refuses_another_shape(shape):
    with pytest.raises(ValueError, match=r"sampled has shape .*; expected \[seeds, 2, lengths, repeats\]"):
        figure4.sampled_panel(plt.figure().subplots(), np.zeros(shape), [5, 20])


def test_exact_panel_is_mean_and_range_over_seeds():
    found = {
        "alone": np.array([[0.1, 0.9], [0.3, 0.8]]),
        "cumulative": np.array([[0.1, 1.0], [0.3, 1.0]]),
        "leave_one_out": np.array([[0.5, 0.2], [0.7, 0.4]]),
    }
    ax = plt.figure().subplots()
    figure4.exact_panel(ax, found)
    drawn = lines(ax)
    assert np.allclose(drawn["one length alone"].get_ydata(), [0.2, 0.85])
    assert np.allclose(drawn["all lengths up to k"].get_ydata(), [0.2, 1.0])
    assert np.allclose(drawn["all but one length"].get_ydata(), [0.6, 0.3])
    assert np.allclose(edges(ax.collections[0], 0), (0.1, 0.3))
    assert len({line.get_color() for line in drawn.values()}) == 3
    assert len({line.get_linestyle() for line in drawn.values()}) == 3  # told apart without colour too


def test_exact_panel_names_what_is_missing():
    with pytest.raises(ValueError, match=r"found lacks cumulative, leave_one_out; there is alone"):
        figure4.exact_panel(plt.figure().subplots(), {"alone": np.zeros((2, 3))})


@pytest.mark.parametrize(("side", "x"), [("right", 4.0), ("left", -1.0)])
def test_level_is_a_line_with_its_name(side, x):
    ax = plt.figure().subplots()
    ax.set_xlim(-1, 4)
    figure4.level(ax, 0.25, "chance", "vermillion", side)
    (line,) = ax.get_lines()
    assert set(line.get_ydata()) == {0.25}
    assert line.get_color() == plotting.PALETTE["vermillion"]
    (text,) = ax.texts
    assert (text.get_text(), text.xy, text.get_ha()) == ("chance", (x, 0.25), side)
    assert text.get_color() == plotting.text_colour(plotting.PALETTE["vermillion"])


def test_draw_shows_both_panels_on_one_scale_with_every_level_in_each():
    found = made()
    figure = figure4.draw(found, [5, 20], {"chance": (0.1, "grey"), "the paper": (0.6, "vermillion")})
    above, below = figure.axes
    assert set(lines(above)) == {"5 random paths", "20 random paths"}
    assert len(lines(below)) == 3
    for ax in (above, below):
        assert {text.get_text() for text in ax.texts} == {"chance", "the paper"}
        assert "(linear)" in ax.get_ylabel()
        assert ax.get_title(loc="left")
        assert ax.get_xlim() == above.get_xlim()
        low, high = ax.get_ylim()
        assert low <= 0
        assert high > 1
    assert "length" in below.get_xlabel()
    assert below.get_xticks().tolist() == [0, 1, 2, 3, 4]


def test_draw_takes_a_stored_results_names_and_ignores_the_rest():
    found = {**made(), "loss": np.zeros((3, 2)), "seconds": np.zeros(3)}
    assert len(figure4.draw(found, [5, 20], {}).axes) == 2


def test_text_is_large_enough_and_names_do_not_overlap():
    figure = figure4.draw(made(), [5, 20], {"chance": (0.1, "grey"), "whole network": (0.97, "ink")})
    figure.canvas.draw()
    for ax in figure.axes:
        texts = [*ax.texts, *ax.get_legend().get_texts(), ax.title, ax.yaxis.label]
        assert all(text.get_fontsize() >= 11 for text in texts)
        boxes = [text.get_window_extent() for text in ax.texts]
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
