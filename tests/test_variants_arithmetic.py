"""One formula in two arithmetics: torch and mpmath agree, function by function and variant by variant."""

import math

import mpmath
import numpy as np
import pytest
import torch

from rc_lib.masks import causal
from rc_lib.variants import VARIANTS
from rc_lib.variants import arithmetic as a

H, N, D, K = 3, 7, 5, 4


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same(found, expected, tolerance=1e-14):
    assert isinstance(found, np.ndarray)
    assert found.shape == tuple(expected.shape)
    np.testing.assert_allclose(found.astype(float), expected.detach().numpy(), rtol=tolerance, atol=tolerance)


UNARY = {
    "exp": (a.exp, torch.exp),
    "sqrt": (lambda A: a.sqrt(A * A), torch.abs),
    "sigmoid": (a.sigmoid, torch.sigmoid),
    "relu": (a.relu, torch.relu),
    "elu_plus_one": (a.elu_plus_one, lambda A: torch.nn.functional.elu(A) + 1),
    "softmax": (a.softmax, lambda A: A.softmax(-1)),
    "largest": (lambda A: a.largest(A, 2), lambda A: A.amax((-2, -1), keepdim=True)),
    "over_rows": (lambda A: a.over_rows(A * A), lambda A: A.square() / A.square().sum(-1, keepdim=True)),
    "beside": (lambda A: a.beside(A, A[..., :1]), lambda A: torch.cat([A, A[..., :1]], -1)),
    "spectral_norm": (a.spectral_norm, lambda A: torch.linalg.matrix_norm(A, 2, keepdim=True)),
}


@pytest.mark.parametrize("name", UNARY)
def test_functions_are_the_same_in_both(name):
    ours, theirs = UNARY[name]
    A = gaussian(2, 3, 5)
    torch.testing.assert_close(ours(A), theirs(A), rtol=1e-14, atol=1e-14)
    same(ours(a.exact(A)), theirs(A))


def test_features_keep_their_digits_far_below_zero():
    """elu(−50) + 1 is 0 in float64; e^−50 is not."""
    A = torch.tensor([-50.0, 0.0, 3.0], dtype=torch.float64)
    expected = torch.tensor([math.exp(-50), 1, 4], dtype=torch.float64)
    torch.testing.assert_close(a.elu_plus_one(A), expected, rtol=1e-15, atol=0)


def test_numbers_are_exact_and_digits_are_those_asked_for():
    third = torch.tensor([1 / 3], dtype=torch.float64)
    with mpmath.workdps(60):
        assert a.exact(third)[0] == mpmath.mpf(1 / 3)
        assert abs(a.exp(a.exact(third))[0] - mpmath.exp(mpmath.mpf(1 / 3))) < mpmath.mpf(10) ** -58
    assert a.exact(torch.tensor([True, False])).dtype == bool
    assert a.like(third.float(), torch.tensor([True])).dtype == torch.bool
    assert a.like(third.float(), third).dtype == torch.float32


def test_rows_without_keys_are_zero():
    may = torch.tensor([[True, False], [False, False]])
    S = gaussian(2, 2)
    expected = torch.tensor([[1.0, 0], [0, 0]], dtype=torch.float64)
    assert torch.equal(a.softmax(S, may), expected)
    assert torch.equal(a.over_rows(S.exp(), may), expected)
    same(a.softmax(a.exact(S), a.exact(may)), expected)


def test_the_spectral_norms_gradient():
    W = gaussian(2, 5, 4).requires_grad_()
    a.spectral_norm(W).sum().backward()
    V = W.detach().clone().requires_grad_()
    torch.linalg.matrix_norm(V, 2).sum().backward()
    torch.testing.assert_close(W.grad, V.grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_pattern_in_fifty_digits(name, masked):
    if masked and name.startswith("linformer"):
        pytest.skip("Linformer takes no mask")
    pattern = VARIANTS[name].build(H, D, K, N, seed=2)
    tensors = [
        gaussian(N, D),
        gaussian(H, D, K, seed=1),
        gaussian(H, D, K, seed=2),
        gaussian(H, K),
        gaussian(H, K),
    ]
    mask = causal(N) if masked else None
    may = pattern.allowed(tensors[0], mask)
    P = pattern(*tensors, mask)
    with mpmath.workdps(50):
        exact = pattern.matrix(*map(a.exact, tensors), None if may is None else a.exact(may))
        # Products of a few dozen float64 roundings, in a softmax of scores up to 30.
        same(np.broadcast_to(exact, (H, N, N)), P, 1e-12)
        if VARIANTS[name].stochastic:
            sums = abs(np.broadcast_to(exact, (H, N, N)).sum(axis=-1) - 1)
            # Learned averages of the pooled Linformer are float64 thirds: they sum to 1 that closely.
            assert sums.max() < (1e-15 if name == "linformer_pooled" else mpmath.mpf(10) ** -47)
