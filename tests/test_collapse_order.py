"""Predicted against measured: orders within 0.02, rates within 1e-4, and where the rules have limits."""

import math

import pytest
import torch

from rc_lib import variants
from rc_lib.collapse_order import (
    consensus_jacobian,
    growth,
    identity_values,
    local_order,
    order_of_collapse,
    orders,
    rate_of_collapse,
    rates,
    repeated,
    second_eigenvalue,
    spectral_radius,
    tokens_around,
)
from rc_lib.high_precision import high_precision_flow
from rc_lib.residual_flow import ResidualFlow, residual_flow
from rc_lib.san import SAN
from rc_lib.variants import VARIANTS

FAST = [name for name, row in VARIANTS.items() if row.order > 1]
SLOW = [name for name, row in VARIANTS.items() if row.order == 1]
UNSTEADY = [name for name in SLOW if not VARIANTS[name].stochastic]


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- orders ---


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("seed", [0, 3])
def test_orders_three_and_two_by_depth(name, seed):
    found = order_of_collapse(name, seed=seed)
    assert found.flow.log10_norm[-1] < -400
    assert found.predicted == VARIANTS[name].order
    assert abs(found.measured - found.predicted) < 0.02


@pytest.mark.parametrize("name", VARIANTS)
def test_the_order_of_one_layer_is_exact(name):
    """At a residual of 10^-40 the next term of the expansion is 10^-40 of the first."""
    net = variants.san(name, 1, 2, 4, tokens=5, bias_std=0.5, seed=2)
    x, X = tokens_around(5, 4, seed=2)
    assert local_order(net.layers[0], x, X - x) == pytest.approx(VARIANTS[name].order, abs=1e-14)


def test_more_heads_and_a_batch_of_variants():
    found = orders(["softmax", "synthesizer_dense"], tokens=5, dim=6, heads=3, digits=600)
    assert [row.name for row in found] == ["softmax", "synthesizer_dense"]
    for row in found:
        assert abs(row.measured - row.predicted) < 0.05


def test_the_softmax_agrees_with_the_flow_that_knows_its_algebra():
    net = variants.san("softmax", 7, 1, 4, bias_std=0.3)
    _, X = tokens_around(6, 4, 0.5)
    plain = SAN(7, 1, 4, bias_std=0.3)
    found = order_of_collapse("softmax", depth=7).flow
    torch.testing.assert_close(found.log_norm, residual_flow(plain, X).log_norm[: len(found.log_norm)])
    torch.testing.assert_close(found.log_norm, high_precision_flow(net, X, digits=1500).log_norm)


@pytest.mark.parametrize("name", ["softmax", "sinkhorn", "synthesizer_dense"])
def test_a_skip_makes_every_order_one(name):
    assert order_of_collapse(name, depth=3, skip=True).local == pytest.approx(1, abs=1e-14)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_layernorm_leaves_the_order(norm):
    found = order_of_collapse("softmax", norm=norm)
    assert found.local == pytest.approx(3, abs=1e-14)
    assert abs(found.measured - 3) < 0.02


@pytest.mark.parametrize("iterations", [0, 1, 2, 10])
def test_sinkhorn_is_cubic_after_any_number_of_iterations(iterations):
    net = variants.san("sinkhorn", 1, 1, 4, bias_std=0.5, options={"iterations": iterations})
    x, X = tokens_around(5, 4)
    assert local_order(net.layers[0], x, X - x) == pytest.approx(3, abs=1e-14)


def test_rope_forgets_positions_where_queries_vanish():
    """A common token 0 without biases: P_∞ is uniform, and the order is 3."""
    layer = variants.san("rope", 1, 1, 4, bias=False).layers[0]
    R = gaussian(6, 4)
    assert local_order(layer, zeros(4), R) == pytest.approx(3, abs=1e-14)
    assert local_order(layer, gaussian(4, seed=1), R) == pytest.approx(1, abs=1e-14)


@pytest.mark.parametrize(("name", "order"), [("off_by_one", 3), ("sigmoid", 3), ("linear_unnormalised", 2)])
def test_row_sums_do_no_harm_where_the_common_token_vanishes(name, order):
    """They multiply x.  At x = 0 scores are quadratic in R, but the features of a query are linear."""
    layer = variants.san(name, 1, 1, 4, bias=False).layers[0]
    assert local_order(layer, zeros(4), gaussian(6, 4)) == pytest.approx(order, abs=1e-14)


@pytest.mark.parametrize(
    ("E", "F", "order"),
    [("any", "any", 1), ("any", "mean", 2), ("mean", "any", 2), ("mean", "mean", 3)],
)
def test_what_makes_linformer_linear(E, F, order):
    """Rows of E that sum to 1 make keys equal when tokens are; those of F make row sums constant.

    With E alone, row sums change by a product of two variations, which multiplies x: order 2.  With F alone,
    rows change to first order with their query, and multiply R: order 2.
    """
    layer = variants.san("linformer", 1, 1, 4, tokens=6, bias_std=0.5).layers[0]
    with torch.no_grad():
        for P, kind in ((layer.attention.pattern.E, E), (layer.attention.pattern.F, F)):
            P.copy_((64 * P).round() / 64)  # so that sums are exact in binary
            if kind == "mean":
                P[:, -1] += 1 - P.sum(-1)
    x, X = tokens_around(6, 4)
    assert local_order(layer, x, X - x) == pytest.approx(order, abs=1e-14)


def test_pooling_over_everything_is_immediate():
    layer = variants.san("pooling", 1, 1, 4, options={"width": 13}).layers[0]
    assert local_order(layer, gaussian(4), gaussian(6, 4)) == math.inf


# --- rates ---


@pytest.mark.parametrize("name", SLOW)
def test_rates(name):
    found = rate_of_collapse(name)
    assert len(found.flow.log_norm) == 61
    assert found.measured == pytest.approx(found.predicted, abs=1e-6)
    if VARIANTS[name].stochastic:
        # W = I: the law's own number, the second eigenvalue of P_∞.
        assert found.measured == pytest.approx(found.second_eigenvalue, abs=1e-6)


def test_rates_known_by_hand():
    """Causal: triangular, 1/2. Window of 3 on 8 tokens and ALiBi of slope 1/2: NumPy's eigenvalues."""
    import numpy as np

    i = np.arange(8)
    distance = abs(i - i[:, None])
    for name, M in {
        "window": distance <= 1,
        "alibi": np.exp(-distance / 2),
        "causal": i <= i[:, None],
    }.items():
        P = M / M.sum(1, keepdims=True)
        second = sorted(abs(np.linalg.eigvals(P)))[-2]
        assert rate_of_collapse(name).measured == pytest.approx(second, abs=1e-7)
    assert rate_of_collapse("causal").measured == pytest.approx(0.5, abs=1e-9)


@pytest.mark.parametrize("name", ["causal", "gated_positional", "synthesizer_random", "shaped"])
def test_rates_with_heads_and_weights(name):
    """Then the factor is the spectral radius of Σ_h P_∞,h ⊗ W_h on residuals, by NumPy's kron."""
    found = rate_of_collapse(name, tokens=5, dim=4, heads=2, seed=1, scale=1e-9)
    net = variants.san(name, 1, 2, 4, tokens=5, seed=1, bias_std=0.3)
    a = net.layers[0].attention
    P = variants.limit(a, 5, found.flow.centre[-1])
    P = P - P.mean(-2, keepdim=True)
    expected = spectral_radius(sum(torch.kron(P[h], a.W_h[h].T.contiguous()) for h in range(2)).detach())
    assert found.predicted == pytest.approx(expected, rel=1e-10)
    assert found.measured == pytest.approx(expected, abs=1e-4)


def test_rates_of_several():
    found = rates(["causal", "pooling"], depth=20)
    assert [row.name for row in found] == ["causal", "pooling"]


def test_a_skip_adds_one():
    """W = I and a skip: the eigenvalues of I + P_∞; the common token doubles at each layer."""
    found = rate_of_collapse("pooling", skip=True, depth=80)
    assert found.predicted == pytest.approx(1 + found.second_eigenvalue, abs=1e-9)
    assert found.measured == pytest.approx(found.predicted, abs=1e-6)


@pytest.mark.parametrize("name", ["off_by_one", "sigmoid"])
def test_without_weights_the_common_token_and_the_rate_vanish(name):
    """W = I: x shrinks by n/(n+1) a layer and the rate by its square, so log-residuals curve evenly.

    Row sums are n/(n+1) at scores 0, and the rate is proportional to xᵀ W_QK x.
    """
    found = rate_of_collapse(name, tokens=8, depth=40, seed=3, identity=True, bias_std=0.0)
    curvature = found.flow.log_norm.diff().diff()[-1].item()
    # What is left is the scores' size x², 1e-4 here.
    assert curvature == pytest.approx(2 * math.log(8 / 9), abs=1e-3)
    shrink = found.flow.centre[-1].norm() / found.flow.centre[-2].norm()
    assert shrink.item() == pytest.approx(8 / 9, abs=1e-4)


@pytest.mark.parametrize(("name", "keys"), [("off_by_one", 6), ("sigmoid", 1)])
def test_the_derivative_of_row_sums_by_hand(name, keys):
    """R' = n p (1 − n p) (R W_Q k/√d_qk) xᵀ W, k the common key, p the entry of P_∞; sigmoid: 1 − p."""
    layer = variants.san(name, 1, 1, 4, seed=5, bias_std=0.5).layers[0]
    a, x, R, n = layer.attention, gaussian(4, seed=1), gaussian(6, 4, seed=2), 6
    R = R - R.mean(0)
    p = variants.limit(a, n, x)[0, 0, 0]
    k = x @ a.W_K[0] + a.b_K[0]
    v = x @ a.W_V[0] + a.b_V[0]
    expected = n * p * (1 - keys * p) * torch.outer(R @ a.W_Q[0] @ k / 2, v @ a.W_O[0])
    found = (consensus_jacobian(layer, x, n) @ R.flatten()).reshape(n, 4)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", FAST)
def test_above_order_one_the_derivative_vanishes(name):
    layer = variants.san(name, 1, 2, 4, tokens=5, bias_std=0.5).layers[0]
    assert consensus_jacobian(layer, gaussian(4), 5).abs().max() < 1e-14


def test_a_rate_above_order_one_is_zero():
    found = rate_of_collapse("softmax")
    assert found.measured == 0
    assert found.predicted < 1e-14


# --- the tools ---


def made(rates_, directions, states=12):
    """A flow whose residual is Σ_k rate_k^l direction_k."""
    R = torch.stack(
        [sum((r**l) * D for r, D in zip(rates_, directions, strict=True)).real for l in range(states)]
    )
    norms = R.flatten(1).norm(dim=1)
    return ResidualFlow(norms.log(), (R / norms[:, None, None]), zeros(states, R.shape[-1]))


def test_growth_of_made_up_flows():
    D = gaussian(4, 5, 3)
    assert growth(made([0.5], D[:1])) == pytest.approx(0.5, abs=1e-14)
    assert growth(made([-0.9, 0.3], D[:2])) == pytest.approx(0.9, abs=1e-9)
    assert growth(made([1e-120], D[:1], 3)) == pytest.approx(1e-120)
    C = torch.complex(D[0], D[1])
    swinging = made([0.6 + 0.5j, 0.6 - 0.5j], [C, C.conj()])
    assert growth(swinging) == pytest.approx(abs(0.6 + 0.5j), abs=1e-12)
    plain = swinging.log_norm.diff().exp()
    assert (plain - abs(0.6 + 0.5j)).abs().max() > 0.01
    with pytest.raises(ValueError, match="flow has 2 states; expected at least 3"):
        growth(made([0.5], D[:1], 2))


def test_second_eigenvalue_by_hand():
    P = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=torch.float64)
    assert second_eigenvalue(P).item() == pytest.approx(0.7)
    assert second_eigenvalue(torch.full((2, 3, 3), 1 / 3, dtype=torch.float64)).tolist() == pytest.approx(
        [0, 0]
    )
    turn = torch.tensor([[0.0, -2.0], [2.0, 0.0]], dtype=torch.float64)
    assert spectral_radius(turn) == pytest.approx(2)
    assert spectral_radius(turn.expand(3, 2, 2)).tolist() == pytest.approx([2, 2, 2])


def test_repeated_layers_are_one_object():
    layer = SAN(1, 2, 4, skip=True, norm="post").layers[0]
    net = repeated(layer, 5)
    assert net.depth == 5
    assert all(each is layer for each in net.layers)
    X = gaussian(3, 4)
    torch.testing.assert_close(net(X), layer(layer(layer(layer(layer(X))))))


def test_identity_values():
    layer = identity_values(SAN(1, 1, 4, bias_std=1.0).layers[0])
    assert torch.equal(layer.attention.W_h[0], torch.eye(4, dtype=torch.float64))
    assert not layer.attention.b.any()
    with pytest.raises(ValueError, match=r"W_V \(2, 4, 2\); expected one head and square values"):
        identity_values(SAN(1, 2, 4).layers[0])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: spectral_radius(torch.full((2, 2), math.nan)), ValueError, "M"),
        (lambda: spectral_radius(torch.ones(2, 3)), ValueError, "M must be square"),
        (lambda: second_eigenvalue(torch.full((2, 2), math.inf)), ValueError, "P"),
        (lambda: tokens_around(0, 4), ValueError, "n must be at least 1"),
        (lambda: tokens_around(5, 4, math.nan), ValueError, "scale must be positive and finite, but is nan"),
        (lambda: order_of_collapse("softmax", tokens=1), ValueError, "tokens must be at least 2"),
        (lambda: order_of_collapse("softmax", depth=0), ValueError, "depth must be at least 1"),
        (lambda: order_of_collapse("softmax", options=5), TypeError, "options must be a mapping"),
        (lambda: rate_of_collapse("causal", tokens=1), ValueError, "tokens must be at least 2"),
        (lambda: rate_of_collapse("causal", scale=0.0), ValueError, "scale must be positive"),
    ],
)
def test_bad_numbers_are_named(call, error, message, plain_types):
    with pytest.raises(error, match=message):
        call()


def test_refusals(plain_types):
    with pytest.raises(ValueError, match="name must be one of"):
        order_of_collapse("hopfield")
    with pytest.raises(ValueError, match="name must be one of"):
        rate_of_collapse("hopfield")
    with pytest.raises(ValueError, match="expected one head"):
        rate_of_collapse("causal", heads=2, identity=True)
    with pytest.raises(ValueError, match="n must be at least 1"):
        consensus_jacobian(SAN(1, 1, 4).layers[0], zeros(4), 0)
