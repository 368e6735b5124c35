"""The recursion about the layers' centres, against the plain identity and against mpmath."""

import math

import mpmath
import pytest
import torch

from rc_lib import layer_centers, one_layer
from rc_lib.norms import composite_norm
from rc_lib.one_layer import HeadMaps
from rc_lib.san import SAN


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


def normal(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def plain(t):
    return (t.log_x.exp().unsqueeze(-1) * t.x).unsqueeze(-2) + t.log_R.exp()[..., None, None] * t.R


def test_one_step_is_the_identity(rng):
    san = SAN(1, 3, 5, 2, value_dim=7, bias_std=0.8, seed=4)
    X = normal(rng, 2, 11, 5)
    maps = HeadMaps.of(san.layers[0].attention)
    x, R = one_layer.about(X, "median")
    t, scores = layer_centers.attend(maps, layer_centers.state(x, R))
    I = one_layer.identity(maps, X, "median")
    torch.testing.assert_close(t.log_x.exp().unsqueeze(-1) * t.x, I.y, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(t.log_R.exp(), composite_norm(I.residual), rtol=1e-11, atol=0)
    torch.testing.assert_close(scores.log_delta.exp(), one_layer.spread(I.E), rtol=1e-11, atol=0)


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"mlp": True},
        {"mlp": True, "activation": "relu", "mlp_skip": True},
        {"mlp": True, "activation": "tanh"},
    ],
)
def test_three_layers_are_the_forward_pass(switches, rng):
    san = SAN(3, 2, 5, 3, bias_std=0.6, seed=6, **switches)
    X = normal(rng, 7, 5)
    t = layer_centers.state(*one_layer.about(X, "mean"))
    for layer in san.layers:
        t, _ = layer_centers.attend(HeadMaps.of(layer.attention), t)
        t = t if layer.mlp is None else layer_centers.feed(layer.mlp, layer.mlp_skip, t)
    torch.testing.assert_close(plain(t), san(X).detach(), rtol=1e-12, atol=1e-12)


def exact_step(X, maps):
    """The residual about y after one layer, in mpmath: X is (centre, residual)."""
    x, R = X
    n, d = R.rows, R.cols
    y, S = mpmath.zeros(1, d), mpmath.zeros(n, d)
    for W_QK, k, W in zip(*maps, strict=True):
        E = R * W_QK * R.T
        r = R * (W_QK.T * x.T + k.T)
        s = mpmath.matrix([[mpmath.exp(v) for v in r]])
        s = s / sum(s)
        P = mpmath.matrix(n, n)
        for i in range(n):
            row = [s[j] * mpmath.exp(E[i, j]) for j in range(n)]
            for j in range(n):
                P[i, j] = row[j] / sum(row) - s[j]
        S += P * R * W
        y += (x + s * R) * W
    return y, S


def test_four_layers_against_mpmath(rng):
    n, d, H = 4, 3, 2
    layers = [HeadMaps(normal(rng, H, d, d), normal(rng, H, d), normal(rng, H, d, d), zeros(d), 1)
              for _ in range(4)]  # fmt: skip
    x, R = normal(rng, d), 0.5 * normal(rng, n, d)
    t = layer_centers.state(x, R)
    with mpmath.workdps(400):
        X = mpmath.matrix([x.tolist()]), mpmath.matrix(R.tolist())
        for maps in layers:
            t, _ = layer_centers.attend(maps, t)
            weights = maps.W_QK, maps.k.unsqueeze(-2), maps.W
            parts = [[mpmath.matrix(M.tolist()) for M in Ms] for Ms in weights]
            X = exact_step(X, parts)
            norm = mpmath.sqrt(mpmath.mnorm(X[1], 1) * mpmath.mnorm(X[1], mpmath.inf))
            assert float(t.log_R) == pytest.approx(float(mpmath.log(norm)), rel=1e-12)
            direction = f64([[float(v / norm) for v in X[1][i, :]] for i in range(n)])
            torch.testing.assert_close(t.R, direction, rtol=0, atol=1e-10)
    assert float(t.log_R) < -30


def test_scales_beyond_the_floats(rng):
    # The same network and tokens in units of 10^±200: the centre and the residual keep their directions.
    maps = HeadMaps(normal(rng, 2, 3, 3), normal(rng, 2, 3), normal(rng, 2, 3, 3), normal(rng, 3), 1)
    t = layer_centers.state(normal(rng, 3), normal(rng, 5, 3))
    tiny = layer_centers.State(t.x, t.log_x, t.R, t.log_R - 5000)
    after, _ = layer_centers.attend(maps, tiny)
    again, _ = layer_centers.attend(maps, layer_centers.State(t.x, t.log_x, t.R, t.log_R - 6000))
    assert float(after.log_R - again.log_R) == pytest.approx(3000)
    torch.testing.assert_close(after.R, again.R, rtol=1e-12, atol=1e-12)
    huge, _ = layer_centers.attend(maps, layer_centers.State(t.x, t.log_x + 5000, t.R, t.log_R + 5000))
    assert bool(huge.x.isfinite().all() & huge.R.isfinite().all())
    assert float(huge.log_x) > 4900


def test_a_centre_far_away_costs_no_digits(rng):
    # Two tokens 1e-9 apart about a row at distance 1: δ and the residual agree with those about a near one.
    maps = HeadMaps(normal(rng, 1, 2, 2), zeros(1, 2), normal(rng, 1, 2, 2), zeros(2), 1)
    R = f64([[1.0, 1.0], [1.0 + 2.0**-30, 1.0]])
    t, scores = layer_centers.attend(maps, layer_centers.State(zeros(2), f64(-math.inf), R, f64(0.0)))
    # E_i1 − E_i0 = R_i W_QK (2^-30, 0)ᵀ exactly.  (Bringing R to norm 1 first would round its rows.)
    want = (R @ maps.W_QK[0][:, 0]).abs() * 2.0**-30
    torch.testing.assert_close(scores.log_delta.exp()[0], want, rtol=1e-13, atol=0)
    # Both rows of P − 1sᵀ are about (−, +) δ/4, times the values' difference of 2^-30.
    P = one_layer.tilt(zeros(2), torch.stack([zeros(2), R @ maps.W_QK[0][:, 0] * 2.0**-30], 1))
    values = 2.0**-30 * maps.W[0][0]
    torch.testing.assert_close(t.log_R.exp(), composite_norm(P[:, 1:] * values), rtol=1e-13, atol=0)


def test_equal_tokens_stay_equal(rng):
    maps = HeadMaps(normal(rng, 2, 3, 3), normal(rng, 2, 3), normal(rng, 2, 3, 3), normal(rng, 3), 1)
    t, scores = layer_centers.attend(maps, layer_centers.state(normal(rng, 3), zeros(5, 3)))
    assert float(t.log_R) == -math.inf
    assert bool(scores.log_delta.isneginf().all())
    zero, _ = layer_centers.attend(maps, layer_centers.state(zeros(3), zeros(5, 3)))
    torch.testing.assert_close(zero.log_x.exp() * zero.x, maps.b)


def test_a_centre_beyond_the_floats_is_refused_before_an_mlp():
    san = SAN(1, 1, 2, mlp=True)
    t = layer_centers.state(torch.ones(2).double(), torch.eye(2).double())
    far = layer_centers.State(t.x, t.log_x + 800, t.R, t.log_R)
    with pytest.raises(ValueError, match="too large for float64"):
        layer_centers.feed(san.layers[0].mlp, False, far)
