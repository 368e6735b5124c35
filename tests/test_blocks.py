"""LayerNorm and MLP."""

import pytest
import torch

from rc_lib.blocks import ACTIVATIONS, LIPSCHITZ, MLP, LayerNorm

B, N, D, M = 2, 7, 11, 19
TOL = {"rtol": 1e-12, "atol": 1e-12}


def tokens(*batch, n=N, d=D, seed=0) -> torch.Tensor:
    return torch.randn(*batch, n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activations_and_their_lipschitz_constants(name):
    x = torch.linspace(-6, 6, 100_001, dtype=torch.float64, requires_grad=True)
    y = ACTIVATIONS[name](x)
    slope = torch.autograd.grad(y.sum(), x)[0].abs().max()
    # The grid is 1e-4 fine and the slope is flat at its maximum: the error is about 1e-9.
    assert float(slope) == pytest.approx(LIPSCHITZ[name], abs=1e-8)
    network = MLP(D, M, name, bias_std=0.5)
    X = tokens(B)
    expected = ACTIVATIONS[name](X @ network.W_1 + network.b_1) @ network.W_2 + network.b_2
    assert torch.equal(network(X), expected)


def test_mlp_seed_and_sizes():
    assert MLP(D).W_1.shape == (D, 4 * D)
    assert torch.equal(MLP(D, seed=3).W_2, MLP(D, seed=3).W_2)
    assert not torch.equal(MLP(D, seed=3).W_2, MLP(D, seed=4).W_2)


def test_layer_norm_equals_torch():
    norm, X = LayerNorm(D, eps=0.2), tokens(B)
    with torch.no_grad():
        norm.weight.copy_(tokens(n=1)[0])
        norm.bias.copy_(tokens(n=1, seed=1)[0])
    expected = torch.nn.functional.layer_norm(X, (D,), norm.weight, norm.bias, 0.2)
    torch.testing.assert_close(norm(X), expected, **TOL)


def test_layer_norm_of_a_constant_token_is_the_bias():
    norm = LayerNorm(D)
    assert (norm(torch.full((N, D), 3.0, dtype=torch.float64)) == 0).all()


def test_bad_input():
    with pytest.raises(ValueError, match="activation must be one of"):
        MLP(D, activation="swish")
    with pytest.raises(ValueError, match="mlp_dim must be at least 1"):
        MLP(D, 0)
    with pytest.raises(ValueError, match="eps must be finite"):
        LayerNorm(D, eps=-1.0)
