"""Stacked heads: splitting PyTorch's weights, the layer's bias, W_h and W_QK."""

import pytest
import torch

from rc_lib import attention, heads

B, H, N, D, DQK, DV, DOUT = 2, 3, 5, 7, 11, 13, 17
TOL = {"rtol": 1e-12, "atol": 1e-12}


def tokens(*batch, n=N, d=D, seed=0) -> torch.Tensor:
    return torch.randn(*batch, n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_heads_split_like_a_linear_layer():
    linear = torch.nn.Linear(D, H * DQK, dtype=torch.float64)
    X = tokens(B)
    ours = attention.project(X, attention.heads_in(linear.weight, H), linear.bias.reshape(H, DQK))
    torch.testing.assert_close(ours.transpose(1, 2).flatten(2), linear(X), **TOL)
    back = torch.nn.Linear(H * DV, DOUT, dtype=torch.float64)
    A = tokens(B, H, n=N, d=DV)
    merged = attention.merge_heads(A, attention.heads_out(back.weight, H), back.bias)
    torch.testing.assert_close(merged, back(A.transpose(1, 2).flatten(2)), **TOL)
    with pytest.raises(ValueError, match="4 heads do not divide"):
        attention.heads_in(linear.weight, 4)


def test_products_head_by_head():
    W_Q, W_K = tokens(H, n=D, d=DQK), tokens(H, n=D, d=DQK, seed=1)
    W_V, W_O = tokens(H, n=D, d=DV), tokens(H, n=DV, d=DOUT, seed=1)
    for h in range(H):
        torch.testing.assert_close(heads.W_QK(W_Q, W_K)[h], W_Q[h] @ W_K[h].T, **TOL)
        torch.testing.assert_close(heads.W_h(W_V, W_O)[h], W_V[h] @ W_O[h], **TOL)


def test_output_bias():
    W_O, b_V = tokens(H, n=DV, d=DOUT), tokens(n=H, d=DV)
    b_O = tokens(n=1, d=DOUT)[0]
    expected = sum(W_O[h].T @ b_V[h] for h in range(H)) + b_O
    torch.testing.assert_close(heads.output_bias(W_O, b_V, b_O), expected, **TOL)
    assert torch.equal(heads.output_bias(W_O), torch.zeros(DOUT, dtype=torch.float64))
    assert torch.equal(heads.output_bias(W_O, b_O=b_O), b_O)


def test_attention_offers_them_too():
    assert attention.W_h is heads.W_h
