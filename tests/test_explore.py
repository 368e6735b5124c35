import base64
import io
import json
import re
from math import prod

import matplotlib
import numpy as np
import pytest

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rc_lib import explore as module
from rc_lib import explore_page, frames
from rc_lib.explore import Control, explore


def line(depth=3, scale=1.0):
    """A small plot: one line whose slope and length follow its arguments."""
    _, ax = plt.subplots(figsize=(2, 1.5))
    ax.plot([0, depth], [0, scale])
    ax.set(xlim=(0, 12), ylim=(0, 3))


def grid(plot, alt="a line", **controls):
    return module._Grid(plot, module._axes(plot, controls), alt)


def content(plot, alt="a line", **controls):
    return module.stored(grid(plot, alt, **controls))[0][module.MIME]


def picture(stored, place):
    frame = stored["frames"][stored["grid"][place]]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(frame))).convert("RGB")).astype(int)


@pytest.fixture(autouse=True)
def _no_figure_left_open():
    yield
    left = plt.get_fignums()
    plt.close("all")
    assert not left


@pytest.fixture
def shown(monkeypatch):
    """What ``explore`` displays, as if a kernel ran."""
    import IPython
    import IPython.display

    bundles = []
    monkeypatch.setattr(IPython, "get_ipython", lambda: object())
    monkeypatch.setattr(IPython.display, "display", lambda *args, **kwargs: bundles.append((args[0], kwargs)))
    return bundles


# Which control, and where it starts


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (range(1, 13), "range"),
        ([0.5, 1.0, 2.0], "range"),
        ([3, 2, 1], "range"),
        (np.linspace(0, 1, 3), "range"),
        ([1, 3, 2], "select"),
        (["mean", "median"], "select"),
        ([None, 1], "select"),
        ([False, True], "checkbox"),
        ([True, False], "select"),
        (True, "checkbox"),
    ],
)
def test_kind_follows_from_the_values(values, kind):
    assert module._axes(lambda x: None, {"x": values})[0].kind == kind


@pytest.mark.parametrize(
    ("plot", "given", "start"),
    [
        (lambda x: None, [1, 2, 3], 0),
        (lambda x=2: None, [1, 2, 3], 1),
        (lambda x=2.0: None, [1, 2, 3], 1),
        (lambda x=9: None, [1, 2, 3], 0),
        (lambda x=2: None, Control([1, 2, 3], default=3), 2),
        (lambda x=False: None, True, 1),
        (lambda x=True: None, [False, True], 1),
        (lambda x=1: None, [False, True], 0),
        (lambda **rest: None, [1, 2, 3], 0),
    ],
)
def test_first_value_is_the_controls_own_or_the_plots(plot, given, start):
    assert module._axes(plot, {"x": given})[0].start == start


def test_labels_and_texts():
    axes = module._axes(
        line, {"depth": range(1, 4), "scale": Control([0.5, 1.0], label="c", format="×{}".format)}
    )
    assert [axis.label for axis in axes] == ["depth", "c"]
    assert [axis.texts for axis in axes] == [("1", "2", "3"), ("×0.5", "×1.0")]
    assert module._axes(lambda head_dim: None, {"head_dim": [1, 2]})[0].label == "head dim"
    assert module._axes(lambda x: None, {"x": [1 / 3, 1e-9]})[0].texts == ("0.3333", "1e-09")


@pytest.mark.parametrize(
    ("controls", "error", "message"),
    [
        ({}, ValueError, "at least one control"),
        ({"depth": range(0)}, ValueError, r"depth: 0 value\(s\)"),
        ({"depth": [1]}, ValueError, r"depth: 1 value\(s\)"),
        ({"depth": 3}, TypeError, "depth=3: expected values"),
        ({"depth": "abc"}, TypeError, "depth='abc'"),
        ({"depth": {"a": 1}}, TypeError, "expected values"),
        ({"depth": [1, 1]}, ValueError, "same text"),
        ({"depth": [1.00001, 1.00002]}, ValueError, "same text"),
        ({"depth": Control([1, 2], default=3)}, ValueError, "default 3 is none"),
        ({"width": [1, 2]}, TypeError, "plot cannot be called with width"),
    ],
)
def test_bad_controls_are_refused(plain_types, controls, error, message):
    with pytest.raises(error, match=message):
        explore(line, alt="a line", **controls)


def test_a_plot_that_needs_more_is_refused():
    with pytest.raises(TypeError, match="missing a required argument: 'scale'"):
        explore(lambda depth, scale: None, alt="a line", depth=[1, 2])


@pytest.mark.parametrize("alt", ["", "  ", None, 3])
def test_a_figure_without_description_is_refused(plain_types, alt):
    with pytest.raises(ValueError, match="alt="):
        explore(line, alt=alt, depth=[1, 2])


def test_a_plot_that_is_none_is_refused(plain_types):
    with pytest.raises(TypeError, match="plot: int"):
        explore(3, alt="a line", depth=[1, 2])


# Frames


def test_draw_returns_the_figure_the_plot_made_returned_or_showed():
    def returns_axes():
        return plt.subplots(figsize=(2, 1))[1]

    def returns_figure():
        return plt.subplots(figsize=(2, 1))[0]

    def shows():
        plt.subplots(figsize=(2, 1))
        plt.show()

    sizes = {frames.draw(plot, {}, 100).size for plot in (returns_axes, returns_figure, shows)}
    assert sizes == {(200, 100)}


def test_draw_returns_the_one_of_several_that_is_returned():
    def plot():
        plt.figure(figsize=(9, 9))
        return plt.subplots(figsize=(2, 1))[0]

    assert frames.draw(plot, {}, 100).size == (200, 100)


@pytest.mark.parametrize(
    ("plot", "message"),
    [
        (lambda x: None, r"plot\(x=1\) drew no figure"),
        (lambda x: [plt.subplots(), plt.subplots()], r"plot\(x=1\) drew 2 figures"),
        (lambda x: plt.figure(), r"plot\(x=1\) drew an empty figure"),
    ],
)
def test_draw_refuses_a_plot_without_one_figure(plot, message):
    with pytest.raises(ValueError, match=message):
        frames.draw(plot, {"x": 1}, 100)


def test_draw_raises_what_the_plot_raises_and_leaves_no_figure_and_plt_show_as_it_was():
    show = plt.show

    def plot():
        plt.subplots()
        raise ZeroDivisionError("of the plot")

    with pytest.raises(ZeroDivisionError, match="of the plot"):
        frames.draw(plot, {}, 100)
    assert plt.show is show


def test_draw_leaves_other_figures_open():
    mine = plt.figure()
    frames.draw(line, {"depth": 1}, 50)
    assert plt.get_fignums() == [mine.number]
    plt.close(mine)


def test_a_palette_keeps_the_colours_of_thin_curves():
    # A heat map in which no two pixels have the same colour, and two curves of similar colours on it.
    heat = np.stack(np.meshgrid(np.arange(200), np.arange(200)), -1)
    picture = np.concatenate([heat, np.full((200, 200, 1), 178)], -1).astype(np.uint8)
    picture[70], picture[80] = (0, 114, 178), (0, 120, 170)
    few = np.asarray(frames._few_colours(Image.fromarray(picture)).convert("RGB"))
    assert (few[70] == (0, 114, 178)).all()
    assert (few[80] == (0, 120, 170)).all()
    assert len(np.unique(few.reshape(-1, 3), axis=0)) <= frames.COLOURS
    # 48 colours over 200 × 200 shades: on average no further off than a cell of a 6 × 8 grid.
    assert np.abs(few.astype(int) - picture).mean() < 15


def test_webp_and_png_hold_the_same_picture():
    drawn = frames.draw(line, {}, 100)
    webp = Image.open(io.BytesIO(frames.webp(drawn))).convert("RGB")
    png = Image.open(io.BytesIO(frames.png(drawn)))
    assert not png.info
    assert (np.asarray(webp) == np.asarray(png.convert("RGB"))).all()


def test_footer_is_a_strip_below_that_grows_with_its_text():
    drawn = frames.draw(line, {}, 100)
    short, long = frames.with_footer(drawn, "a"), frames.with_footer(drawn, "many words " * 20)
    assert drawn.height < short.height < long.height
    assert np.asarray(short)[: drawn.height].tobytes() == np.asarray(drawn).tobytes()
    assert (np.asarray(short)[drawn.height :] < 128).any()


# What a notebook stores


def test_stored_frames_show_what_their_controls_say():
    stored = content(line, depth=[3, 6], scale=[1.0, 2.0, 3.0])
    assert len(stored["grid"]) == 6
    for place, (depth, scale) in enumerate([(d, s) for d in (3, 6) for s in (1.0, 2.0, 3.0)]):
        direct = frames.draw(line, {"depth": depth, "scale": scale}, 100)
        few = np.asarray(frames._few_colours(direct).convert("RGB")).astype(int)
        assert (picture(stored, place) == few).all()


def test_stored_output_is_the_same_from_run_to_run():
    first, second = (module.stored(grid(line, depth=[1, 2], scale=[1.0, 2.0])) for _ in range(2))
    assert json.dumps(first) == json.dumps(second)


def test_equal_frames_are_stored_once():
    stored = content(lambda depth, unused: line(depth), depth=[1, 2], unused=["x", "y", "z"])
    assert len(stored["frames"]) == 2
    assert stored["grid"] == [0, 0, 0, 1, 1, 1]


def test_default_frame_and_descriptions():
    stored = content(line, "A line.", depth=[1, 3, 5], scale=[1.0, 2.0])
    assert stored["default"] == 2
    assert stored["alts"][2] == "A line. Shown: depth 3, scale 1."
    assert len(set(stored["alts"])) == 6


def test_alt_as_a_function_describes_every_frame():
    stored = content(line, lambda depth: f"line to {depth}", depth=[1, 2])
    assert stored["alts"] == ["line to 1", "line to 2"]
    with pytest.raises(ValueError, match="alt: returned ''"):
        content(line, lambda depth: "", depth=[1, 2])


def test_bundle_has_a_picture_and_a_line_that_says_what_moves(shown, monkeypatch):
    monkeypatch.setenv("RC_LIB_STATIC", "1")
    assert explore(line, alt="a line", depth=range(1, 4), scale=[1.0, 2.0]) is None
    ((bundle, options),) = shown
    assert set(bundle) == {module.MIME, "image/png", "text/plain"}
    assert bundle["text/plain"] == "Moves with: depth (1–3), scale (1–2) — run the cell, or read the book."
    png = Image.open(io.BytesIO(base64.b64decode(bundle["image/png"])))
    assert png.height > bundle[module.MIME]["height"]
    assert "Moves with" in options["metadata"]["image/png"]["alt"]


def test_a_broken_plot_raises_in_the_cell(shown, monkeypatch):
    def broken(depth=1):
        if depth == 2:
            raise ZeroDivisionError("of the plot")
        line(depth)

    monkeypatch.setenv("RC_LIB_STATIC", "1")
    with pytest.raises(ZeroDivisionError, match="of the plot"):
        explore(broken, alt="a line", depth=[1, 2])
    assert not shown


def test_static_output_outside_a_kernel_is_its_line(monkeypatch, capsys):
    monkeypatch.setenv("RC_LIB_STATIC", "1")
    explore(line, alt="a line", depth=[1, 2])
    assert capsys.readouterr().out == "Moves with: depth (1–2) — run the cell, or read the book.\n"


@given(
    st.lists(st.tuples(st.integers(2, 40), st.booleans()), min_size=1, max_size=4),
    st.integers(1, 60),
)
def test_thin_meets_its_limit_or_says_why_not(controls, limit):
    sizes, fixed = zip(*controls, strict=True)
    if prod(n if f else min(n, 3) for n, f in controls) > limit:
        with pytest.raises(ValueError, match="stored frames"):
            module.thin(sizes, fixed, limit)
        return
    kept = module.thin(sizes, fixed, limit)
    assert prod(kept) <= limit
    assert all(k == n if f else min(n, 3) <= k <= n for k, (n, f) in zip(kept, controls, strict=True))


@given(st.integers(3, 60), st.data())
def test_thinned_keeps_ends_and_default(size, data):
    start, keep = data.draw(st.integers(0, size - 1)), data.draw(st.integers(3, size))
    axis = module._Axis("x", "x", tuple(range(size)), tuple(map(str, range(size))), start, "range")
    kept = module._thinned(axis, keep)
    assert len(kept.values) == keep
    assert {0, size - 1, start} <= set(kept.values)
    assert kept.values[kept.start] == start
    assert list(kept.values) == sorted(kept.values)
    assert [int(text) for text in kept.texts] == list(kept.values)


def test_frames_are_at_most_forty(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        frames, "draw", lambda plot, values, dpi: drawn.append(values) or Image.new("RGB", (9, 9))
    )
    stored = content(line, depth=range(1, 31), scale=[0.1 * k for k in range(1, 31)])
    assert len(stored["grid"]) <= module.MAX_FRAMES
    assert all(len(control["texts"]) >= 3 for control in stored["controls"])


def noise(depth):
    _, ax = plt.subplots(figsize=(2, 1))
    ax.imshow(np.random.default_rng(depth).random((200, 300, 3)), interpolation="nearest")


def test_frames_over_the_budget_get_coarser(monkeypatch):
    full = sum(map(len, content(noise, depth=range(4))["frames"]))
    monkeypatch.setattr(module, "MAX_BYTES", full - 1)
    stored = content(noise, depth=range(4))
    assert sum(map(len, stored["frames"])) < full
    # The size to show them at stays the same.
    assert (stored["width"], stored["height"]) == (200, 100)


def test_frames_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 2000)
    with pytest.raises(ValueError, match=r"4 frames take \d+ kB at 76 dpi, more than 2 kB"):
        content(noise, depth=range(4))


def test_figures_of_different_sizes_are_refused():
    with pytest.raises(ValueError, match="differ in size"):
        content(lambda depth: plt.subplots(figsize=(depth, 1))[0], depth=[1, 2])


# The page


def test_page_labels_every_control_and_describes_the_picture():
    stored = content(line, 'a "line" <here>', depth=[1, 2, 3], scale=Control([1.0, 2.0], label="a & b"))
    html = explore_page.page(stored | {"id": "x"})
    assert 'alt="a &quot;line&quot; &lt;here&gt;. Shown: depth 3, a &amp; b 1."' in html
    assert (
        '<label for="x-0">depth</label><input type="range" id="x-0" min="0" max="2" step="1" value="2"'
        in html
    )
    assert 'aria-valuetext="3"' in html
    assert '<label for="x-1">a &amp; b</label>' in html
    assert not re.search(r"https?://|src=\"(?!data:)", html)


def test_page_has_checkbox_and_list():
    stored = content(lambda depth, on, kind: line(depth), depth=[1, 2], on=True, kind=["<a>", "b"])
    html = explore_page.page(stored | {"id": "x"})
    assert '<input type="checkbox" id="x-1" checked' in html
    assert '<select id="x-2" autocomplete="off"><option value="0" selected>&lt;a&gt;</option>' in html


def test_page_data_cannot_end_its_script():
    html = explore_page.page(content(line, "</script><b>", depth=[1, 2]) | {"id": "x"})
    data = re.search(r'<script type="application/json">(.*?)</script>', html, re.DOTALL).group(1)
    assert json.loads(data)["alts"][0].startswith("</script><b>")


class Data:
    def __init__(self, mime_type, content, cell_index=4):
        self.mime_type, self.content = mime_type, content
        self.cell_index, self.output_index = cell_index, 0


class Renderer:
    def __init__(self):
        self.scripts = {}

    def add_js_file(self, key, uri, options):
        self.scripts[key] = (uri, options["body"])


def test_renderer_gives_two_equal_controls_ids_of_their_own_and_one_script():
    stored, renderer = content(line, depth=[1, 2]), Renderer()
    pages = [
        explore_page.ExploreRenderer.handle_mime(renderer, Data(explore_page.MIME, stored, cell), False)[
            0
        ].astext()
        for cell in (4, 7)
    ]
    ids = [set(re.findall(r'id="([^"]+)"', page)) for page in pages]
    assert not ids[0] & ids[1]
    assert list(renderer.scripts.values()) == [(None, explore_page.script())]
    assert explore_page.MIME == module.MIME


def test_renderer_leaves_other_outputs_alone():
    assert explore_page.ExploreRenderer.handle_mime(Renderer(), Data("image/png", ""), False) is None
    assert explore_page.ExploreRenderer.handle_mime(Renderer(), Data(explore_page.MIME, {}), True) is None


# Live


@pytest.fixture
def live(shown, monkeypatch):
    """Call ``explore`` as in a live kernel; return the figure's HTML widget, the controls and the bundle."""
    import ipywidgets

    boxes = []

    class Box(ipywidgets.VBox):
        def __init__(self, children):
            super().__init__(children)
            boxes.append(self)

    def call(plot, **options):
        monkeypatch.delenv("RC_LIB_STATIC", raising=False)
        monkeypatch.setattr(ipywidgets, "VBox", Box)
        explore(plot, **options)
        *controls, figure = boxes[-1].children
        return figure, controls, shown[-1][0]

    return call


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ipywidgets")
def test_live_controls_are_core_widgets_at_their_defaults(live):
    import ipywidgets

    figure, controls, bundle = live(
        lambda depth=3, on=True, kind="b": line(depth),
        alt="a line",
        depth=range(1, 6),
        on=[False, True],
        kind=["a", "b"],
    )
    assert [type(c) for c in controls] == [
        ipywidgets.SelectionSlider,
        ipywidgets.Checkbox,
        ipywidgets.Dropdown,
    ]
    assert [c.value for c in controls] == [2, True, 1]
    assert [c.description for c in controls] == ["depth", "on", "kind"]
    assert 'alt="a line. Shown: depth 3, on on, kind b."' in figure.value
    assert {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"} <= set(bundle)


def test_live_figure_follows_its_control_without_thinning(live):
    figure, (depth,), _ = live(line, alt="a line", depth=range(1, 101))
    assert len(depth.options) == 100
    before = figure.value
    depth.value = 7
    assert "Shown: depth 8." in figure.value
    assert figure.value != before


def test_live_error_stands_where_the_figure_was_and_goes_away(live):
    def broken(depth=1):
        line(depth)
        if depth == 2:
            raise ZeroDivisionError("<of the plot>")

    figure, (depth,), _ = live(broken, alt="a line", depth=[1, 2, 3])
    depth.value = 1
    assert 'role="alert"' in figure.value
    assert "The plot failed at depth 2." in figure.value
    assert "ZeroDivisionError: &lt;of the plot&gt;" in figure.value
    depth.value = 2
    assert "<img" in figure.value


def test_live_error_at_the_start_is_raised(live):
    def broken(depth):
        raise ZeroDivisionError("of the plot")

    with pytest.raises(ZeroDivisionError, match="of the plot"):
        live(broken, alt="a line", depth=[1, 2])
