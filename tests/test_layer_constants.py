"""Lipschitz constants of MLPs, and what multiplies into a layer's constant."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rc_lib import layer_constants
from rc_lib.blocks import MLP
from rc_lib.layer_constants import LayerSizes, log_constant
from rc_lib.norms import inf_norm, one_norm
from rc_lib.one_layer import HeadMaps
from rc_lib.san import SAN


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


@given(
    seed=st.integers(0, 2**31),
    activation=st.sampled_from(["gelu", "relu", "tanh", "identity"]),
    skip=st.booleans(),
    log_size=st.floats(-3, 1),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_lipschitz_constants_hold_in_both_norms(seed, activation, skip, log_size):
    generator = torch.Generator().manual_seed(seed)
    mlp = MLP(3, 7, activation, bias_std=1.0, gain=2.0, seed=generator)
    U = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    V = U + 10**log_size * torch.randn(5, 3, generator=generator, dtype=torch.float64)
    f = (lambda X: X + mlp(X)) if skip else mlp
    one, inf = layer_constants.mlp_lipschitz(mlp, skip)
    change = (f(U) - f(V)).detach()
    # The forward pass loses what the difference cancels: 1e-13 of entries of a few tens.
    assert one_norm(change) <= one * one_norm(U - V) + 1e-12
    assert inf_norm(change) <= inf * inf_norm(U - V) + 1e-12


def test_lipschitz_constants_by_hand():
    mlp = MLP(2, 2, "relu")
    mlp.W_1.data = f64([[1.0, -2.0], [0.0, 3.0]])
    mlp.W_2.data = f64([[1.0, 0.0], [-1.0, 1.0]])
    # |W_1||W_2| = [[3, 2], [3, 3]]: largest column 6, largest row 6; with a skip 7 and 7.
    assert layer_constants.mlp_lipschitz(mlp) == (6, 6)
    assert layer_constants.mlp_lipschitz(mlp, mlp_skip=True) == (7, 7)
    mlp.W_2.data = f64([[0.0, 0.0], [-1.0, 2.0]])
    # [[2, 4], [3, 6]]: largest column 10, largest row 9.
    assert layer_constants.mlp_lipschitz(mlp) == (10, 9)


def test_gelu_is_steeper_than_one():
    # ℓ = Φ(√2) + √2 φ(√2): the slope at √2, reached by no other point.
    mlp = MLP(1, 1, "gelu")
    mlp.W_1.data = mlp.W_2.data = torch.ones(1, 1).double()
    constant = layer_constants.mlp_lipschitz(mlp)[0]
    u = torch.tensor(math.sqrt(2), dtype=torch.float64, requires_grad=True)
    slope = torch.autograd.grad(torch.nn.functional.gelu(u), u)[0]
    assert constant == pytest.approx(float(slope), rel=1e-14)
    assert constant == pytest.approx(1.1289, abs=1e-4)


def sizes(W_QK, W, d_qk=1, *lip):
    W_QK, W = (f64(M) for M in (W_QK, W))
    maps = HeadMaps(W_QK, W_QK[..., 0], W, W[0, 0], d_qk)
    return LayerSizes(maps, *lip)


def test_each_factor_of_the_constant():
    # One head: ‖W_QK‖_1 = 6 (columns 4, 6), ‖W‖_1 = 2, ‖W‖_∞ = 3; Σδ/‖E‖_1 = 2, max δ/‖E‖_1 = ½:
    # γ = ½.
    W_QK, W = [[[1.0, 2.0], [3.0, -4.0]]], [[[1.0, -2.0], [1.0, 0.0]]]
    gains = f64([2.0]), f64([0.5]), f64([math.log(0.1)])
    beta = 6 * math.sqrt(2 * 3)
    want = {"paper": 2 * beta, "stated": 2 * beta, "sharp": beta / 2, "best": beta / math.sqrt(8),
            "gamma_free": math.sqrt(math.expm1(0.1) / 0.1) * beta}  # fmt: skip
    for kind, value in want.items():
        assert float(log_constant(sizes(W_QK, W), kind, *gains).exp()) == pytest.approx(value, rel=1e-13)
        # √d_qk divides, λ = √(λ_1 λ_∞) multiplies.
        scaled = log_constant(sizes(W_QK, W, 9, math.log(2), math.log(8)), kind, *gains)
        assert float(scaled.exp()) == pytest.approx(value * 4 / 3, rel=1e-13)


def test_heads_are_added_in_the_two_norms_apart():
    # The values of one head lie in one column, of the other in one row, scaled to equal β = 1: one
    # feature in, d = 10⁴ out.  Apart: √((1 + 1/√d)(1 + √d)), which the factor H = 2 does not cover.
    d = 10_000
    W = torch.zeros(2, 1, d).double()
    W[0, 0, 0] = 1
    W[1, 0] = d**-0.5  # ‖W_2‖_1 ‖W_2‖_∞ = d^(−1/2) d^(1/2)
    maps = HeadMaps(torch.ones(2, 1, 1).double(), torch.zeros(2, 1).double(), W, torch.zeros(d).double(), 1)
    g = torch.ones(2).double()
    apart, stated = (
        float(log_constant(LayerSizes(maps), kind, g, g, g).exp()) for kind in ("paper", "stated")
    )
    assert stated == pytest.approx(4 * 2 * 0.5)
    assert apart == pytest.approx(2 * math.sqrt((1 + d**-0.5) * (1 + d**0.5)))
    assert apart > 5 * stated


def test_growth_in_logarithms():
    values = layer_constants._log_growth(f64([-math.inf, -800.0, -1.0, 2.0, 800.0]))
    exact = [0, 0, *(math.log(math.expm1(math.exp(v)) / math.exp(v)) for v in (-1.0, 2.0))]
    assert values[:4].tolist() == pytest.approx(exact, abs=1e-14)
    assert float(values[4]) >= 1e299


def test_bad_input(plain_types):
    with pytest.raises(TypeError, match="mlp must be"):
        layer_constants.mlp_lipschitz(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="san must be"):
        layer_constants.layer_sizes(None)
    with pytest.raises(ValueError, match="skip=True"):
        layer_constants.layer_sizes(SAN(1, 1, 2, skip=True))
