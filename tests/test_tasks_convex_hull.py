import inspect
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rc_lib.tasks import convex_hull
from rc_lib.tasks.convex_hull import on_hull


def half_plane_oracle(points):
    """A place is a corner if an open half-plane through it holds all other places; exact, in rationals.

    Equivalently no two other places have it between them and no three around it: seen from it, the
    directions to the others fit in less than a half-turn.
    """
    places = [tuple(map(Fraction, p)) for p in points]
    return [_is_corner(p, [q for q in set(places) if q != p]) for p in places]


def _is_corner(p, others):
    seen = [(q[0] - p[0], q[1] - p[1]) for q in others]
    if not seen:
        return True
    # In less than a half-turn some direction u has all the others strictly to its left or along it.
    return any(all(_left_or_along(u, v) for v in seen) for u in seen)


def _left_or_along(u, v):
    cross = u[0] * v[1] - u[1] * v[0]
    return cross > 0 or (cross == 0 and u[0] * v[0] + u[1] * v[1] > 0)


def hull(points):
    return on_hull(torch.tensor(points, dtype=torch.float64)).tolist()


def test_a_square_its_middle_its_edge_and_a_copy():
    corners = [[0.0, 0.0], [2.0, 0.0], [2.0, 2.0], [0.0, 2.0]]
    extra = [[1.0, 1.0], [1.0, 0.0], [2.0, 2.0], [1.0, 1.0]]
    #                               middle, on an edge, copy of a corner, copy of the middle
    assert hull(corners + extra) == [True] * 4 + [False, False, True, False]


@pytest.mark.parametrize(
    ("points", "answer"),
    [
        ([[1.0, 2.0]], [True]),
        ([[1.0, 2.0], [1.0, 2.0]], [True, True]),
        ([[1.0, 2.0], [3.0, 2.0], [1.0, 2.0]], [True, True, True]),
        ([[0.0, 0.0], [2.0, 4.0], [1.0, 2.0]], [True, True, False]),  # on a slanted line
        ([[5.0, 1.0], [5.0, 0.0], [5.0, 3.0], [5.0, 3.0]], [False, True, True, True]),  # upright
        ([[1.0, 5.0], [0.0, 5.0], [3.0, 5.0]], [False, True, True]),  # level
        ([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [True, True, True]),
        ([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], [True, True, True]),
        # 0.1 + 0.2 is not 0.3: one line to rounding
        ([[0.1, 0.1], [0.2, 0.2], [0.1 + 0.2, 0.3], [0.7, 0.7]], [True, False, False, True]),
    ],
)
def test_sets_without_area(points, answer):
    assert hull(points) == answer


def test_an_upright_line_to_rounding_has_its_ends_at_top_and_bottom():
    # x differs in the last bit only, and its extremes are in the middle of the line
    points = [[1.0, 0.0], [1.0 + 2**-52, 0.5], [1.0 - 2**-53, 0.4], [1.0, 1.0]]
    assert hull(points) == [True, False, False, True]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=13))
@settings(deadline=None, derandomize=True, max_examples=300)
def test_small_grids_agree_with_the_exact_oracle(points):
    # A grid of 36 places: copies, lines and points on edges are the rule here.
    assert hull([list(map(float, p)) for p in points]) == half_plane_oracle(points)


@given(st.integers(0, 10**6), st.sampled_from([3, 5, 11, 17]))
@settings(deadline=None, derandomize=True, max_examples=30)
def test_random_sets_agree_with_the_exact_oracle(seed, n):
    points = torch.rand(n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    assert on_hull(points).tolist() == half_plane_oracle(points.tolist())


@given(st.integers(0, 10**6))
@settings(deadline=None, derandomize=True, max_examples=30)
def test_turning_moving_stretching_and_reordering_change_nothing(seed):
    g = torch.Generator().manual_seed(seed)
    X = torch.rand(7, 13, 2, dtype=torch.float64, generator=g)
    angle = 6.28 * torch.rand(1, dtype=torch.float64, generator=g).item()
    turn = torch.tensor([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]).double()
    stretched = X @ turn * torch.tensor([3.0, 0.5], dtype=torch.float64) + 17
    assert torch.equal(on_hull(stretched), on_hull(X))
    order = torch.randperm(13, generator=g)
    assert torch.equal(on_hull(X[:, order]), on_hull(X)[:, order])


def test_every_size_and_place_of_a_set():
    square = torch.tensor([[0, 0], [1, 0], [1, 1], [0, 1], [0.5, 0.25]], dtype=torch.float64)
    for size in (1e-300, 1e-8, 1.0, 1e8, 1.7e308):
        assert on_hull(square * size).tolist() == [True] * 4 + [False]
    # from end to end the largest square that floats hold: the difference of two corners is infinite
    assert on_hull((square * 2 - 1) * 1.7e308).tolist() == [True] * 4 + [False]
    assert on_hull(square * 1e-3 + 1e6).tolist() == [True] * 4 + [False]


def test_any_batch_shape_and_dtype():
    X = torch.rand(2, 3, 5, 2)
    assert on_hull(X).shape == (2, 3, 5)
    assert torch.equal(on_hull(X)[1, 2], on_hull(X[1, 2]))
    assert on_hull(X.half()).dtype == torch.bool


def test_all_points_of_a_circle_are_corners():
    angles = torch.arange(101, dtype=torch.float64) * 2 * math.pi / 101
    circle = torch.stack([angles.cos(), angles.sin()], -1)
    assert on_hull(circle).all()
    assert on_hull(torch.cat([circle, circle * 0.99])).tolist() == [True] * 101 + [False] * 101


def test_the_papers_sizes_are_the_default():
    task = convex_hull.make(train=100, test=50)
    assert (task.classes, task.symbols, task.features, task.positions) == (2, None, 2, False)
    assert (task.chance, task.ceiling) == (0.5, 1.0)
    assert task.train.inputs.shape == (100, 10, 2)
    assert task.train.inputs.dtype == torch.float32
    assert task.train.real.all()
    defaults = [p.default for p in inspect.signature(convex_hull.make).parameters.values()]
    assert defaults == [0, 10_000, 1000, 10, 10.0, 3.3, True]


def test_labels_are_the_oracles_and_the_majority_is_as_geometry_says():
    task = convex_hull.make(seed=2, train=500, test=100)
    for i in range(20):
        assert task.train.labels[i].bool().tolist() == half_plane_oracle(task.train.inputs[i].tolist())
    # The mean number of corners of 10 uniform points in a square is known: 6 to two digits
    # (Buchta's formula, 8/3 (H_n - 1/n 2^-n ...) for polygons), here only measured against a wide draw.
    corners = task.train.labels.sum(1).double()
    wide = on_hull(torch.rand(2000, 10, 2, generator=torch.Generator().manual_seed(9))).sum(1).double()
    error = math.sqrt(corners.var() / 500 + wide.var() / 2000)
    assert abs(corners.mean() - wide.mean()) < 4 * error
    assert task.majority == pytest.approx(task.test.labels.double().mean().item(), abs=1e-12)


def test_raw_coordinates_have_the_square_and_one_shift_for_each_set():
    task = convex_hull.make(seed=4, train=4000, test=1, points=7, side=6.0, shift=2.0, standardised=False)
    X = task.train.inputs.double()
    within = X - X.mean(1, keepdim=True)
    # Within a set the coordinates vary as the square's do: side²/12 = 3, less 1/7 for the set's own mean.
    assert within.pow(2).mean().item() == pytest.approx(3 * 6 / 7, rel=0.02)  # 56,000 numbers: 0.4% error
    # The means of sets vary by the shift and by 1/7 of the square's variance.
    means = X.mean(1) - 3.0
    assert means.mean(0).abs().max() < 0.15  # 4 errors of 0.034
    assert means.pow(2).mean().item() == pytest.approx(4 + 3 / 7, rel=0.07)  # 8000 numbers: 1.6% error
    assert np.ptp(X.numpy(), axis=1).max() <= 6.0


def test_standardising_changes_the_unit_and_nothing_else():
    raw = convex_hull.make(seed=4, train=300, test=100, standardised=False)
    unit = convex_hull.make(seed=4, train=300, test=100)
    expected = (raw.train.inputs.double() - 5) / math.sqrt(100 / 12 + 3.3**2)
    # both were rounded to float32: 1e-6 of coordinates up to 20
    assert torch.allclose(unit.train.inputs.double(), expected, atol=1e-5, rtol=0)
    assert torch.equal(unit.train.labels, raw.train.labels)
    assert unit.train.inputs.double().std().item() == pytest.approx(1, abs=0.1)


def test_train_and_test_are_drawn_apart():
    a = convex_hull.make(seed=7, train=30, test=20)
    b = convex_hull.make(seed=7, train=10, test=20)
    assert torch.equal(a.test.inputs, b.test.inputs)
    assert not torch.equal(a.train.inputs[:20], a.test.inputs)
    assert not torch.equal(convex_hull.make(seed=8, train=10, test=20).train.inputs, b.train.inputs)


def test_qhull_is_used_as_it_comes(monkeypatch):
    import scipy.spatial

    used = []
    original = scipy.spatial.ConvexHull
    monkeypatch.setattr(scipy.spatial, "ConvexHull", lambda *a, **k: used.append(k) or original(*a, **k))
    on_hull(torch.rand(3, 5, 2))
    assert used == [{}, {}, {}]  # no options: nothing is joggled
    on_hull(torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]))
    assert len(used) == 3  # and sets without area do without it


@pytest.mark.usefixtures("plain_types")
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"points": 0}, ValueError, "points"),
        ({"train": 0}, ValueError, "train"),
        ({"test": 0.5}, TypeError, "test"),
        ({"side": 0.0}, ValueError, "side must be positive"),
        ({"side": -1.0}, ValueError, "side"),
        ({"side": math.nan}, ValueError, "side"),
        ({"shift": math.inf}, ValueError, "shift"),
        ({"standardised": "yes"}, TypeError, "standardised"),
        ({"seed": True}, TypeError, "seed"),
    ],
)
def test_bad_settings_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        convex_hull.make(**arguments)


@pytest.mark.usefixtures("plain_types")
@pytest.mark.parametrize(
    ("points", "error", "message"),
    [
        (torch.zeros(3, 3), ValueError, r"points is a float32 tensor of shape \(3, 3\)"),
        (torch.zeros(2), ValueError, "points must have shape"),
        (torch.zeros(0, 2), ValueError, "not be empty"),
        (torch.zeros(3, 2, dtype=torch.int64), TypeError, "floating-point"),
        (torch.tensor([[0.0, 1.0], [math.nan, 2.0]]), ValueError, r"points\[1, 0\] is nan"),
    ],
)
def test_bad_points_are_named(points, error, message):
    with pytest.raises(error, match=message):
        on_hull(points)
