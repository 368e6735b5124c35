"""The record of a forward pass, and norms frozen at their statistics."""

import pytest
import torch

from rc_lib.blocks import LayerNorm
from rc_lib.trace import NormStats, Trace

B, N, D, M = 2, 7, 11, 19
TOL = {"rtol": 1e-12, "atol": 1e-12}


def tokens(*batch, n=N, d=D, seed=0) -> torch.Tensor:
    return torch.randn(*batch, n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_frozen_norm_is_linear():
    X, T = tokens(B), tokens(3, B, seed=1)
    ln = LayerNorm(D, eps=0.1)
    stats = ln.stats(X).detach()
    torch.testing.assert_close(
        stats.apply(X), torch.nn.functional.layer_norm(X, (D,), eps=0.1).detach(), **TOL
    )
    torch.testing.assert_close(stats.linear(2 * T + X), 2 * stats.linear(T) + stats.linear(X), **TOL)
    by_hand = (T - T.mean(-1, keepdim=True)) / (X.var(-1, correction=0, keepdim=True) + 0.1).sqrt()
    torch.testing.assert_close(stats.linear(T), by_hand, **TOL)
    torch.testing.assert_close(stats.mean, X.mean(-1, keepdim=True), **TOL)


def test_rms_norm_has_no_centre():
    X, one = tokens(B), torch.ones(D, dtype=torch.float64)
    rms = X.square().mean(-1, keepdim=True).sqrt()
    stats = NormStats(torch.zeros_like(rms), rms, one, 0 * one, centred=False)
    torch.testing.assert_close(stats.apply(X), torch.nn.functional.rms_norm(X, (D,)), rtol=1e-9, atol=1e-9)
    assert not stats.detach().centred


def test_bad_lengths():
    X = tokens()
    with pytest.raises(ValueError, match="hidden has 1 entries; expected 2 for 1 attention"):
        Trace([X], [X])
    with pytest.raises(ValueError, match="mlp_out has 2 entries; expected 1"):
        Trace([X, X], [X], mlp_out=[X, X])


def test_output_defaults_to_the_last_state():
    X, Y = tokens(), tokens(seed=1)
    assert Trace([X, Y], [X]).output is Y
    assert Trace([X, Y], [X]).norms == [[]]
    stats = LayerNorm(D).stats(Y).detach()
    assert torch.equal(Trace([X, Y], [X], final_norm=stats).output, stats.apply(Y))
