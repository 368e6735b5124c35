"""The exact identity, the sandwich, γ and the distance of a tilt."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rc_lib import one_layer
from rc_lib.attention import MultiHeadAttention
from rc_lib.norms import composite_norm, one_norm
from rc_lib.one_layer import RANGE, HeadMaps


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def normal(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def softmax_pair(generator, n, rows, size):
    r, E = normal(generator, n), size * normal(generator, rows, n)
    return r, E, (r + E).softmax(-1), r.softmax(-1)


@pytest.mark.parametrize("center", ["mean", "median", "minimizer", "zero", "far"])
def test_identity_is_the_layer(center, rng):
    # A prime for every axis: batch 2, n 5, d 3, H 7, d_qk 11, d_v 13, d' 17.
    layer = MultiHeadAttention(7, 3, 11, value_dim=13, out_dim=17, bias_std=0.7, seed=1)
    X = normal(rng, 2, 5, 3)
    rows = {"zero": torch.zeros(3).double(), "far": 30 * normal(rng, 2, 3)}
    I = one_layer.identity(layer, X, rows.get(center, center))
    Y, P = layer.attend(X)
    assert I.E.shape == (2, 7, 5, 5)
    assert I.r.shape == I.s.shape == (2, 7, 5)
    assert I.y.shape == (2, 17)
    # Scores up to about 1e3 for the far centre, in float64.
    torch.testing.assert_close(I.P, P.detach(), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(I.y.unsqueeze(-2) + I.residual, Y.detach(), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(I.x.unsqueeze(-2) + I.R, X, rtol=0, atol=1e-13)
    torch.testing.assert_close(I.tilt.sum(-1), torch.zeros(2, 7, 5).double(), rtol=0, atol=1e-15)


def test_identity_by_hand():
    # Tokens 1 and −1, one feature, W_QK = ½, W = 3, b = 5, about 0: E = ±½, s = ½, P_11 = 1/(1 + e⁻¹).
    maps = HeadMaps(*(f64(v) for v in ([[[0.5]]], [[0.0]], [[[3.0]]], [5.0])), 1)
    I = one_layer.identity(maps, f64([[1.0], [-1.0]]), torch.zeros(1).double())
    assert I.E.tolist() == [[[0.5, -0.5], [-0.5, 0.5]]]
    assert I.s.tolist() == [[0.5, 0.5]]
    assert float(I.P[0, 0, 0]) == pytest.approx(1 / (1 + math.exp(-1)))
    assert I.y.tolist() == [5.0]
    assert I.residual.flatten().tolist() == pytest.approx([3 * math.tanh(0.5), -3 * math.tanh(0.5)])


def test_identity_does_not_lose_a_small_residual(rng):
    # Tokens equal but for 1e-6: the residual, 1e-18 of them, is far below the resolution of the output.
    layer = MultiHeadAttention(2, 4, 3, bias_std=0.5, seed=2)
    x, R = normal(rng, 4), normal(rng, 6, 4)
    small = one_layer.identity(layer, x + 1e-6 * R, x)
    smaller = one_layer.identity(layer, x + 1e-8 * R, x)
    ratio = composite_norm(small.residual) / composite_norm(smaller.residual)
    # x + 1e-8 R holds R to eps/1e-8; the third power of it is cubic up to terms of order 1e-6.
    assert float(ratio) == pytest.approx(1e6, rel=1e-4)


def test_tilt_against_mpmath():
    rows = [[0.0, -3.0, 2.0], [0.0, 0.0, 0.0], [80.0, -80.0, 5.0], [1e-12, -2e-12, 3e-12], [0.4, 0.5, -0.5]]
    for r in ([0.0, 0.5, -1.0], [0.0, -60.0, -90.0], [-300.0, 1.0, 2.0]):
        E = f64(rows)
        got = one_layer.tilt(f64(r), E)
        with mpmath.workdps(400):
            for i, row in enumerate(rows):
                s = [mpmath.exp(mpmath.mpf(v)) for v in r]
                p = [a * mpmath.exp(mpmath.mpf(e)) for a, e in zip(s, row, strict=True)]
                want = [a / sum(p) - b / sum(s) for a, b in zip(p, s, strict=True)]
                for g, w in zip(got[i].tolist(), want, strict=True):
                    # Rounding of log s (up to 400 here) becomes relative error of P.
                    assert g == pytest.approx(float(w), rel=1e-12, abs=1e-14 * float(max(map(abs, want))))


def test_linear_tilt_is_the_derivative(rng):
    s, E = normal(rng, 3, 5).softmax(-1), normal(rng, 3, 5, 5)
    step = 1e-6
    difference = (one_layer.tilt(s.log(), step * E) - one_layer.tilt(s.log(), -step * E)) / (2 * step)
    torch.testing.assert_close(one_layer.linear_tilt(s, E), difference, rtol=1e-8, atol=1e-9)


def test_range_is_where_the_exponential_meets_its_line():
    root = mpmath.findroot(lambda t: mpmath.exp(t) - 1 - 2 * t, 1.25)
    assert RANGE <= float(root) < RANGE + 0.0005
    assert float(one_layer.growth(f64(float(root)))) == pytest.approx(2, rel=1e-12)


@given(seed=st.integers(0, 2**31), n=st.integers(1, 40), size=st.floats(1e-3, 0.5))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_sandwich_holds_in_its_range(seed, n, size):
    _, E, P, s = softmax_pair(torch.Generator().manual_seed(seed), n, 50, size)
    delta = one_layer.spread(E)
    low, high = one_layer.sandwich(s, delta)
    inside = delta <= RANGE
    assert bool((low - 1e-15 <= P).all())
    assert bool((high + 1e-15 >= P)[inside].all())


def test_sandwich_fails_outside_its_range():
    # 64 equal scores, one logit +2: e²/(63 + e²) = 0.1050 against (1 + 2·2)/64 = 0.0781.
    E = torch.zeros(64).double()
    E[0] = 2
    P, s = E.softmax(-1), torch.full((64,), 1 / 64, dtype=torch.float64)
    _, high = one_layer.sandwich(s, f64([2.0]))
    assert float(P[0]) == pytest.approx(0.1050, abs=5e-5)
    assert float(high[0, 0]) == pytest.approx(0.0781, abs=5e-5)


@given(seed=st.integers(0, 2**31), n=st.integers(1, 64), log_size=st.floats(-3, 2))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_tilt_distance_holds_for_every_span(seed, n, log_size):
    _, E, P, s = softmax_pair(torch.Generator().manual_seed(seed), n, 100, 10**log_size)
    delta = one_layer.spread(E)
    distance = one_layer.total_variation(P, s.expand_as(P))
    assert bool((distance <= one_layer.tilt_distance(delta) + 1e-15).all())
    # The other bound, φ(δ) Σ_j s_j |E_j|.
    other = one_layer.growth(delta) * (s * E.abs()).sum(-1)
    assert bool((distance <= other * (1 + 1e-13) + 1e-15).all())


@pytest.mark.parametrize("delta", [1e-3, 0.1, 1.256, 4.0, 20.0])
def test_two_points_reach_the_tilt_distance(delta):
    s = f64([-delta / 2, delta / 2]).sigmoid()
    P = (s.log() + f64([delta, 0.0])).softmax(-1)
    reached = one_layer.total_variation(P, s)
    assert float(reached) == pytest.approx(math.tanh(delta / 4), rel=1e-12)


@given(seed=st.integers(0, 2**31), n=st.integers(1, 30), power=st.floats(0, 6))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_gamma_is_at_most_root_half_n(seed, n, power):
    # Powers of a Gaussian: from dense matrices to nearly sparse ones.
    E = normal(torch.Generator().manual_seed(seed), 20, n, n)
    E = E.sign() * E.abs() ** (1 + power)
    g = one_layer.gamma(E)
    assert bool((g <= math.sqrt(n / 2) * (1 + 1e-12)).all())
    torch.testing.assert_close(one_layer.gamma(1e-5 * E), g, rtol=1e-12, atol=0)


@pytest.mark.parametrize("n", [2, 3, 7, 64])
def test_gamma_reaches_root_half_n(n):
    assert float(one_layer.gamma(0.01 * torch.eye(n).double())) == pytest.approx(math.sqrt(n) / 2)
    # One row (1, −1, 0, …), and one entry 1 in each of the n − 2 other columns: Σδ = n, max δ = 2, ‖E‖_1 = 1.
    E = torch.zeros(n, n).double()
    E[0, 0], E[0, 1] = 1, -1
    for i in range(1, n - 1):
        E[i, i + 1] = 1
    assert float(one_layer.gamma(E)) == pytest.approx(math.sqrt(n / 2))


def test_gamma_of_no_scores_is_zero():
    assert float(one_layer.gamma(torch.zeros(2, 2).double())) == 0


@given(seed=st.integers(0, 2**31), n=st.integers(2, 20), d=st.integers(1, 6))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_each_inequality_of_the_cubic_step(seed, n, d):
    generator = torch.Generator().manual_seed(seed)
    maps = HeadMaps(normal(generator, 1, d, d), normal(generator, 1, d), normal(generator, 1, d, d),
                    normal(generator, d), 3)  # fmt: skip
    X = 10 ** -float(torch.rand(1, generator=generator)) * normal(generator, n, d)
    I = one_layer.identity(maps, X)
    E, R, W, RW, s, tilt = I.E[0], I.R, maps.W[0], I.RW[0], I.s[0], I.tilt[0]
    delta, slack = one_layer.spread(E), 1 + 1e-12
    # ‖E‖_1 ≤ ‖W_QK‖_1 ‖R‖²/√d_qk
    assert one_norm(E) <= one_norm(maps.W_QK[0]) * composite_norm(R) ** 2 / math.sqrt(3) * slack
    if bool((delta <= RANGE).all()):
        assert bool((tilt.abs() <= 2 * delta[:, None] * s * slack + 1e-16).all())
        entry = 2 * delta[:, None] * (s @ (R.abs() @ W.abs()))
        assert bool((I.residual.abs() <= entry * slack + 1e-16).all())
        step = 2 * (delta.sum() * delta.max()).sqrt() * composite_norm(R) * composite_norm(W)
        assert composite_norm(I.residual) <= step * slack
    span = RW.amax(0) - RW.amin(0)
    assert bool(
        (I.residual.abs().sum(0) <= one_layer.tilt_distance(delta).sum() * span * slack + 1e-16).all()
    )
    # A column's span is at most the sum of its absolute values: no factor 2.
    assert bool((span <= RW.abs().sum(0) * slack).all())


def test_signed_sandwich_is_invalid(rng):
    # Multiplying the sandwich by a signed matrix keeps neither side: most entries break it.
    maps = HeadMaps(normal(rng, 1, 8, 8), normal(rng, 1, 8), normal(rng, 1, 8, 8), normal(rng, 8), 8)
    I = one_layer.identity(maps, 0.1 * normal(rng, 32, 8))
    delta, s, RW = one_layer.spread(I.E[0]), I.s[0], I.RW[0]
    assert float(delta.max()) < RANGE
    low, high = ((1 - delta)[:, None] * (s @ RW), (1 + 2 * delta)[:, None] * (s @ RW))
    PRW = I.P[0] @ RW
    broken = ((low > PRW) | (high < PRW)).double().mean()
    assert float(broken) > 0.5


def test_growth_near_zero_and_far():
    values = one_layer.growth(f64([0.0, 1e-300, 1e-9, 1.0, 1e4])).tolist()
    assert values == pytest.approx([1, 1, 1 + 5e-10, math.e - 1, math.inf], rel=1e-15)


def test_bad_input(plain_types, rng):
    layer, X = MultiHeadAttention(2, 4), normal(rng, 3, 4)
    with pytest.raises(TypeError, match="layer must be a MultiHeadAttention"):
        one_layer.identity("layer", X)
    with pytest.raises(ValueError, match=r"X is .*expected \[\*batch, n, 4\]"):
        one_layer.identity(layer, normal(rng, 3, 5))
    with pytest.raises(TypeError, match="X must hold floating-point"):
        one_layer.identity(layer, torch.ones(3, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="center must be one of"):
        one_layer.identity(layer, X, "middle")
    with pytest.raises(ValueError, match=r"center is .*expected"):
        one_layer.about(X, torch.zeros(3).double())
    with pytest.raises(ValueError, match=r"center must be finite"):
        one_layer.about(X, torch.full((4,), math.inf).double())
    with pytest.raises(ValueError, match=r"E must be finite, but E\[0, 1\] is nan"):
        one_layer.gamma(f64([[0.0, math.nan], [0.0, 0.0]]))
