"""The eight points of the chapter on what the proof needs, each by a number of its own and its repair."""

import math

import pytest
import torch

from rc_lib import bounds, layer_constants, one_layer, rank
from rc_lib.attention import MultiHeadAttention
from rc_lib.blocks import LayerNorm
from rc_lib.norms import composite_norm, inf_norm, one_norm
from rc_lib.one_layer import HeadMaps
from rc_lib.san import SAN


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_1_range():
    scores = torch.zeros(64, dtype=torch.float64)
    scores[0] = 2
    P, s = scores.softmax(-1), torch.full((64,), 1 / 64, dtype=torch.float64)
    low, high = one_layer.sandwich(s, torch.tensor([2.0], dtype=torch.float64))
    assert f"{P[0]:.4f} {high[0, 0]:.4f}" == "0.1050 0.0781"
    # Repair: sums instead of entries need the lower wall only, and that always holds.
    assert bool((low <= P).all())
    assert float((P - s).abs().sum()) <= 2 * 2
    assert float(one_layer.total_variation(P, s)) <= math.tanh(2 / 4)


def test_2_gamma():
    E = 0.01 * torch.eye(64, dtype=torch.float64)
    assert float(one_layer.gamma(E)) == pytest.approx(4)
    # Repair without γ: the distances add up to at most φ(δ) ‖E‖_1, for any shared distribution.
    for r in (torch.zeros(64).double(), normal(64, seed=1), 5 * normal(64, seed=2)):
        distances = one_layer.tilt(r, E).abs().sum(-1) / 2
        assert float(distances.sum()) <= float(one_layer.growth(torch.tensor(0.01))) * 0.01


def test_3_sign():
    layer = MultiHeadAttention(1, 16, seed=1)
    I = one_layer.identity(layer, 0.2 * normal(32, 16, seed=2))
    delta, s, RW = one_layer.spread(I.E)[0], I.s[0], I.RW[0]
    assert float(delta.max()) < one_layer.RANGE
    walls = (1 - delta)[:, None] * (s @ RW), (1 + 2 * delta)[:, None] * (s @ RW)
    product = I.P[0] @ RW
    assert float(((product < walls[0]) | (product > walls[1])).double().mean()) > 0.5
    repaired = 2 * delta[:, None] * (s @ (I.R.abs() @ layer.W_h[0].detach().abs()))
    assert bool((I.residual.abs() <= repaired).all())


def skewed_heads(d, h=1e-3):
    """Two tokens ±h with one feature, two heads: values in one column, values in one row."""
    W = torch.zeros(2, 1, d, dtype=torch.float64)
    W[0, 0, 0], W[1, 0] = 1, d**-0.5
    maps = HeadMaps(torch.ones(2, 1, 1).double(), torch.zeros(2, 1).double(), W, torch.zeros(d).double(), 1)
    return maps, torch.tensor([[h], [-h]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("d", "broken", "broken_without"),
    [(15_873, False, False), (15_874, True, False), (64_000, True, False), (65_000, True, True)],
)
def test_4_theorem_2_3_fails_for_skewed_heads(d, broken, broken_without):
    maps, X = skewed_heads(d)
    I = one_layer.identity(maps, X, torch.zeros(1).double())
    new, r = composite_norm(I.residual), composite_norm(X)
    beta = (one_norm(maps.W_QK) * composite_norm(maps.W)).max()
    assert float(beta) == pytest.approx(1)
    # tanh(h²)/h² = 1 − h⁴/3: far smaller than what one column more or less changes, 1e-5.
    stated = 4 * 2 * beta * r**3
    assert bool(new > float(one_layer.gamma(I.E).max()) * stated) == broken
    assert bool(new > stated) == broken_without
    spans = one_layer.spread(I.E)
    a, b = (
        2 * spans.sum(-1) * one_norm(X) * one_norm(maps.W),
        2 * spans.amax(-1) * inf_norm(X) * inf_norm(maps.W),
    )
    assert float(new) <= float((a.sum() * b.sum()).sqrt())


def test_4_the_stated_bound_is_not_claimed_there():
    maps, _ = skewed_heads(20_000)
    g = torch.tensor([2.0, 2.0]).double(), torch.tensor([1.0, 1.0]).double(), torch.zeros(2).double()
    apart, stated = (
        layer_constants.log_constant(layer_constants.LayerSizes(maps), k, *g) for k in ("paper", "stated")
    )
    assert float(apart) > float(stated)
    # A real network whose heads are skewed: the report says so, and claims nothing.
    san = SAN(1, 2, 64, 64, bias=False, seed=1)
    layer = san.layers[0].attention
    for weight in (layer.W_Q, layer.W_K, layer.W_V, layer.W_O):
        weight.data.zero_()
    layer.W_Q.data[:, 0, 0] = layer.W_K.data[:, 0, 0] = 1
    layer.W_V.data[:, 0, 0] = 1
    layer.W_O.data[0, 0, 0] = 1
    layer.W_O.data[1, 0] = 1 / 8
    X = torch.zeros(2, 64, dtype=torch.float64)
    X[:, 0] = torch.tensor([0.1, -0.1])
    report = bounds.paper_bound(san, X, stated=True)
    assert [(a.name, a.layer) for a in report.failures()] == [("heads", 1)]
    assert report.claimed.tolist() == [True, False]
    assert report.log_slack[1] == math.inf
    assert bool(bounds.paper_bound(san, X).claimed.all())


def test_5_condition():
    # c < 1 in both; only the tokens' size decides whether the bound falls.
    c, small, large = 0.1, math.log(1.0), math.log(10.0)
    assert bounds.closed_form(math.log(c), small, 4) < small
    assert bounds.closed_form(math.log(c), large, 4) > large
    san = SAN(2, 1, 8, seed=3)
    for layer in san.layers:
        layer.attention.W_Q.data *= 2e-5
        layer.attention.W_V.data *= 100
    for size, falls in ((1.0, True), (10.0, False)):
        report = bounds.weights_bound(san, math.log(size), 16, "paper")
        assert float(report.log_constant.max()) < 0
        assert bool(report.claimed.all())
        margins = [float(a.margin) for a in report.assumptions if a.name == "contraction"]
        assert [margin > 0 for margin in margins] == [falls, falls]
        assert bool(report.log_bound[2] < report.log_bound[0]) == falls


def test_6_centre():
    one_hot = torch.zeros(10, 1, dtype=torch.float64)
    one_hot[0] = 1
    sizes = {c: float(composite_norm(rank.residual(one_hot, c))) for c in rank.CENTERS}
    assert sizes == pytest.approx({"mean": math.sqrt(1.62), "median": 1, "minimizer": 1}, rel=1e-6)
    # Repair: whatever centre the proof arrives at, the mean is at most twice it.
    for seed in range(50):
        I = one_layer.identity(MultiHeadAttention(2, 4, bias_std=1.0, seed=seed), normal(5, 4, seed=seed))
        assert composite_norm(rank.residual(I.residual)) <= 2 * composite_norm(I.residual)


def test_7_layer_norm():
    norm = LayerNorm(16)
    a, b = normal(2, 16, seed=5)
    images = norm(torch.stack([a, b, (a + b) / 2])).detach()
    halfway = (images[0] + images[1]) / 2
    assert float((images[2] - halfway).norm() / images[2].norm()) > 0.05
    X = 1000 + normal(32, 16, seed=6)
    assert float(rank.relative_residual(norm(X).detach()) / rank.relative_residual(X)) > 100
    with pytest.raises(ValueError, match="LayerNorm"):
        bounds.sharp_bound(SAN(2, 2, 4, norm="post"), normal(3, 4))


def test_8_absolute_and_relative():
    layer, X = MultiHeadAttention(2, 16, seed=7), normal(32, 16, seed=8)
    small = MultiHeadAttention.from_weights(layer.W_Q, layer.W_K, 1e-3 * layer.W_V, layer.W_O)
    Y, Z = layer(X).detach(), small(X).detach()
    absolute = composite_norm(rank.residual(Z)) / composite_norm(rank.residual(Y))
    assert float(absolute) == pytest.approx(1e-3, rel=1e-12)
    assert float(rank.relative_residual(Z)) == pytest.approx(float(rank.relative_residual(Y)), rel=1e-12)
