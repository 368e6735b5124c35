"""Galleries and depth curves: what they say about a matrix, and where a curve ends and is named."""

import io

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from PIL import Image

from rc_lib import frames, pictures, plotting

mpl.use("Agg")


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("P", "words"),
    [
        (tensor([0.25, 0.75], [1.0, 0.0]), "1"),
        (tensor([0.25, 0.25], [0.5, 0.0]), "0.5"),
        (tensor([0.25, 0.25], [2.0, 0.125]), "0.50 to 2.12"),
        (tensor([1.0, -1.0], [-1e-17, 0.0]), "0"),
        (tensor([0.1, 0.2, 0.7]), "1"),
    ],
)
def test_row_sums_in_words(P, words):
    assert pictures.row_sums(P) == words


def test_row_sums_refuse_what_is_not_finite():
    with pytest.raises(ValueError, match="P must be finite"):
        pictures.row_sums(tensor([1.0, torch.nan]))


def test_matrix_has_one_scale_per_sign():
    _, (left, right) = plt.subplots(1, 2)
    pictures.matrix(left, "softmax", tensor([0.25, 0.75], [1.0, 0.0]))
    pictures.matrix(right, "shaped", tensor([0.5, -0.25], [0.0, 0.25]))
    assert left.get_title() == "softmax\nrows sum to 1"
    (plain,), (signed,) = left.images, right.images
    assert plain.get_clim() == (0, 1)
    assert signed.get_clim() == (-0.5, 0.5)
    assert (plain.get_cmap().name, signed.get_cmap().name) == ("cividis", "RdBu_r")
    # 23 tokens by 11 keys: a tick every five, each way its own
    pictures.matrix(left, "long", torch.eye(23)[:, :11])
    assert left.get_xticks().tolist() == [0, 5, 10]
    assert left.get_yticks().tolist() == [0, 5, 10, 15, 20]


def test_gallery_has_two_a_row_and_its_matrices_in_order():
    P = {name: torch.rand(5, 5, generator=torch.Generator().manual_seed(k)) for k, name in enumerate("abc")}
    axes = pictures.gallery("Three", P).axes
    assert [ax.get_title().split("\n")[0] for ax in axes] == ["a", "b", "c", ""]
    assert [len(ax.images) for ax in axes] == [1, 1, 1, 0]
    assert not axes[3].axison
    np.testing.assert_array_equal(axes[2].images[0].get_array(), P["c"])
    with pytest.raises(ValueError, match="pictures is empty"):
        pictures.gallery("None", {})


def by_name(ax):
    """Every curve's heights, by its name, whether it was named at its end or beside it."""
    lines = [line for line in ax.get_lines() if len(line.get_ydata()) > 2]
    return {line.get_label().removeprefix("_"): np.asarray(line.get_ydata()) for line in lines}


def falls(*exponents):
    return 10.0 ** -torch.tensor(exponents, dtype=torch.float64)


def test_curves_end_at_their_first_value_below_the_floor():
    ax = plt.figure().add_subplot()
    lines = {
        "reference": falls(0, 3, 9, 16, 17, 16),
        "slope": falls(0, 1, 2, 3, 4, 5),
        "lost": tensor([1.0, 0.5, torch.nan, torch.nan, torch.nan, torch.nan])[0],
        "equal": tensor([1.0, 0.1, 0.0, 0.0, 0.0, 0.0])[0],
    }
    pictures.curves(ax, lines, "They fall", low=1e-17, dashed=("slope",))
    drawn = by_name(ax)
    assert [int(np.isfinite(y).sum()) for y in drawn.values()] == [4, 6, 2, 3]
    assert drawn["reference"][3] == 1e-16
    texts = {text.get_text(): text for text in ax.texts}
    assert {"reference", "slope", "lost", "equal", "below: float64 rounding error"} == texts.keys()
    # beside its curve: between 10⁻⁹ at layer 2 and 10⁻¹⁶ at layer 3, where the height of the name is
    for name, (left, right) in {"reference": (2, 3), "equal": (1, 2)}.items():
        x, y = texts[name].xy
        assert left < x < right
        assert y == texts[name].xyann[1] > pictures.FLOOR
    x, y = texts["reference"].xy
    assert np.log10(y) == pytest.approx(-9 - 7 * (x - 2))
    assert texts["reference"].xyann[1] != texts["equal"].xyann[1]
    assert texts["slope"].xy == (5, pytest.approx(1e-5))
    styles = {line.get_label().removeprefix("_"): line.get_linestyle() for line in ax.get_lines()}
    assert [styles[name] for name in lines] == ["--", "--", "-", "-"]


def test_curves_above_the_floor_have_none():
    ax = plt.figure().add_subplot()
    pictures.curves(ax, {"a": falls(0, 1, 1)}, "High", low=1e-3)
    assert [text.get_text() for text in ax.texts] == ["a"]
    assert ax.get_ylim() == (1e-3, 2)
    assert ax.get_yscale() == "log"
    assert ax.get_lines()[0].get_color() == plotting.PALETTE["grey"]


@pytest.mark.parametrize(
    ("lines", "low"), [({}, 0.1), ({"a": falls(0, 1)}, 0.0), ({"a": falls(0, 1)}, np.nan)]
)
def test_curves_refuse_nothing_to_draw(lines, low):
    with pytest.raises(ValueError, match="expected some, and low above 0"):
        pictures.curves(plt.figure().add_subplot(), lines, "Nothing", low=low)


def test_show_displays_one_picture_and_closes_the_figure(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    pictures.show(pictures.gallery("One", {"a": torch.eye(3)}), dpi=50)
    assert plt.get_fignums() == []
    (image,) = shown
    picture = Image.open(io.BytesIO(image.data))
    assert (picture.format, picture.mode, picture.size) == ("PNG", "P", (310, 205))


def test_show_keeps_the_colours_of_two_scales(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    steps = torch.linspace(0, 1, 51, dtype=torch.float64).repeat(51, 1)
    pictures.show(pictures.gallery("Two", {"plain": steps, "signed": 2 * steps - 1}))
    found = {color for _, color in Image.open(io.BytesIO(shown[0].data)).convert("RGB").getcolors()}
    wanted = [tuple(round(255 * c) for c in mpl.colormaps["RdBu_r"](k / 50)[:3]) for k in range(51)]
    near = [min(sum(abs(a - b) for a, b in zip(w, f, strict=True)) for f in found) for w in wanted]
    # Each shade within a few units of 255 per channel; 96 colours for both scales leave some 30 away.
    assert max(near) <= 12


def test_a_png_has_as_many_colours_as_it_may():
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    picture = Image.fromarray(noise)
    counts = [
        len(Image.open(io.BytesIO(frames.png(picture, n))).convert("RGB").getcolors()) for n in (256, 96, 8)
    ]
    assert counts[0] > 200
    assert counts[1] <= 96
    assert counts[2] <= 8
