import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rc_lib import minimizer
from rc_lib.minimizer import minimizing_center

whole = st.integers(-5, 5).map(float)


def composite(M, x):
    R = np.abs(M - x)
    return np.sqrt(R.sum(0).max() * R.sum(1).max())


def brute_force(M):
    """A grid over the bounding box of two columns, refined twelve times around its four best points."""
    low, high = M.min(0), M.max(0)
    centers = [(low + high) / 2]
    radius = (high - low) / 2 + 1e-9
    for _ in range(12):
        grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, 25)] * 2), -1).reshape(-1, 2) * radius
        trial = np.concatenate([c + grid for c in centers])
        values = np.array([composite(M, x) for x in trial])
        centers = list(trial[np.argsort(values)[:4]])
        radius = radius / 4
    return values.min()


def test_by_hand():
    one_hot = np.zeros((10, 1))
    one_hot[0] = 1
    assert composite(one_hot, minimizing_center(one_hot)) == pytest.approx(1, rel=1e-7)
    # two tokens: the midpoint has ‖·‖_1 = max |u_j - v_j| and ‖·‖_∞ = ½ Σ |u_j - v_j|, both minimal
    M = np.array([[0.0, 1.0, 5.0], [2.0, 1.0, -1.0]])
    assert composite(M, minimizing_center(M)) == pytest.approx(np.sqrt(6 * 4), rel=1e-7)


@settings(deadline=None, derandomize=True, max_examples=15)
@given(arrays(np.float64, (4, 2), elements=whole))
def test_never_above_a_brute_force_search(M):
    ours = composite(M, minimizing_center(M))
    assert ours <= brute_force(M) * (1 + 1e-6) + 1e-12


@pytest.mark.parametrize("seed", range(6))
def test_reached_by_brute_force(seed):
    M = np.random.default_rng(seed).normal(size=(5, 2))
    # the last grid of the search is spaced by (range/2)·4^-11/12 ≈ 2e-8
    assert composite(M, minimizing_center(M)) == pytest.approx(brute_force(M), rel=1e-5)


@pytest.mark.parametrize("shape", [(7, 3), (3, 7), (5, 5), (2, 11), (13, 2)])
def test_no_random_centre_is_better(shape):
    rng = np.random.default_rng(shape[0])
    M = rng.standard_cauchy(size=shape)
    best = minimizing_center(M)
    ours = composite(M, best)
    for spread in (1, 1e-1, 1e-2, 1e-3, 1e-5):
        for x in best + spread * rng.normal(size=(400, shape[1])):
            assert ours <= composite(M, x) * (1 + 1e-6)
    for x in (M.mean(0), np.median(M, 0), *M):
        assert ours <= composite(M, x) * (1 + 1e-6)


def test_a_fine_scan_over_weights_finds_nothing_better():
    """The certified search against a dumb one: 201 weights, each a linear program."""
    for seed in range(4):
        M = np.random.default_rng(seed).normal(size=(6, 4)) ** 3
        program = minimizer.Program(M)
        scan = min(program.solve(w).product for w in np.linspace(0, 1, 201))
        assert composite(M, minimizing_center(M)) <= np.sqrt(scan) * (1 + 1e-6)


def test_the_middle_of_the_border_beats_its_ends():
    """The best centre is neither the best one for ‖·‖_1 nor the best one for ‖·‖_∞."""
    counts = []
    for seed in range(8):
        M = np.random.default_rng(100 + seed).standard_cauchy(size=(9, 4))
        program = minimizer.Program(M)
        ends = min(program.solve(1.0).product, program.solve(0.0).product)
        counts.append(composite(M, minimizing_center(M)) < 0.99 * np.sqrt(ends))
    assert any(counts)


@pytest.mark.parametrize("scale", [1e-300, 1e-5, 1e5, 1e300])
def test_any_scale(scale):
    M = np.random.default_rng(1).normal(size=(5, 3))
    x = minimizing_center(scale * M)
    assert composite(M, x / scale) == pytest.approx(composite(M, minimizing_center(M)), rel=1e-6)


def test_equal_rows_are_their_own_centre():
    row = np.array([0.1, 0.2, -0.3])
    assert np.array_equal(minimizing_center(np.tile(row, (7, 1))), row)
    assert np.array_equal(minimizing_center(row[None]), row)


def test_prints_nothing(capfd):
    minimizing_center(np.random.default_rng(2).normal(size=(6, 3)))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("shape", [(64, 65), (4,), (2, 3, 4)])
def test_size_limit(shape):
    with pytest.raises(ValueError, match=r"n·d ≤ 4096, but X has shape .*'mean' or 'median'"):
        minimizing_center(np.zeros(shape))
