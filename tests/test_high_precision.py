"""The forward pass in thousands of digits, against an oracle that shares no code and against the flow."""

import mpmath as mp
import pytest
import torch

from rc_lib import variants
from rc_lib.high_precision import GUARD, composite, high_precision_flow
from rc_lib.masks import causal, window
from rc_lib.norms import composite_norm
from rc_lib.residual_flow import residual_flow
from rc_lib.san import SAN
from rc_lib.variants.arithmetic import exact
from tests import oracle_mpmath as oracle


def tokens(n, d, seed=1):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SWITCHES = {
    "plain": {},
    "skip": {"skip": True},
    "pre": {"norm": "pre"},
    "post, skip": {"norm": "post", "skip": True},
    "wide": {"head_dim": 3, "value_dim": 2, "gain": 1.5},
}


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_the_same_states_as_the_oracle_and_the_flow(switches):
    san, X = SAN(5, 2, 4, seed=3, bias_std=0.5, **switches), tokens(5, 4)
    found, flow = high_precision_flow(san, X), residual_flow(san, X)
    assert len(found.log_norm) == 6
    for l, state in enumerate(oracle.states(san, X, 900)):
        log_norm, direction = oracle.residual(state, 900)
        # Both have the residual to 16 digits at least, and are then rounded to float64.
        assert abs(found.log_norm[l].item() - log_norm) < 1e-14 * max(1, abs(log_norm))
        torch.testing.assert_close(found.direction[l], direction, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(found.log_norm, flow.log_norm, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.direction, flow.direction, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.centre, flow.centre, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "mask"), [("causal", causal(6)), ("window", window(6, 3))])
def test_masks_by_pattern_and_by_argument_and_by_the_flow(name, mask):
    plain, X = SAN(6, 2, 4, seed=3, bias_std=0.5), tokens(6, 4)
    pattern = variants.san(name, 6, 2, 4, seed=3, bias_std=0.5)
    expected = residual_flow(plain, X, mask).log_norm
    for found in (high_precision_flow(plain, X, mask), high_precision_flow(pattern, X)):
        torch.testing.assert_close(found.log_norm, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_first_layers_are_the_networks_own(name):
    """Where floats still hold the residual, they hold the same one."""
    net, X = variants.san(name, 2, 2, 4, tokens=5, bias_std=0.5), tokens(5, 4)
    trace, found = net.trace(X), high_precision_flow(net, X)
    for l, state in enumerate(trace.hidden):
        torch.testing.assert_close(found.state(l), state, rtol=1e-11, atol=1e-12)


def test_it_ends_before_more_digits_than_allowed():
    san, X = SAN(8, 1, 4, seed=3), tokens(5, 4)
    short, long = high_precision_flow(san, X, digits=100), high_precision_flow(san, X, digits=400)
    assert len(short.log_norm) < len(long.log_norm) < 9
    assert torch.equal(short.log_norm, long.log_norm[: len(short.log_norm)])
    assert -100 < short.log10_norm[-1] < 0
    # what a state is does not depend on the digits that were allowed
    assert -400 < long.log10_norm[-1] < -100


def test_equal_tokens_end_it_at_once():
    flow = high_precision_flow(SAN(3, 1, 4), tokens(1, 4).expand(5, 4).contiguous(), digits=100)
    assert flow.log_norm.tolist() == [float("-inf")]
    assert (flow.direction == 0).all()


def test_composite_norm_is_the_librarys():
    M = tokens(7, 3)
    assert float(composite(exact(M))) == pytest.approx(composite_norm(M).item(), rel=1e-15)
    assert composite(exact(torch.tensor([[1.0], [0.0]]))) == 1


def test_precision_is_given_back():
    before = mp.mp.dps
    high_precision_flow(SAN(3, 1, 4), tokens(5, 4))
    assert mp.mp.dps == before


def test_refusals(plain_types):
    X = tokens(5, 4)
    with pytest.raises(TypeError, match=r"san must be a rc_lib.san.SAN, but is str"):
        high_precision_flow("san", X)
    with pytest.raises(ValueError, match="san has an MLP"):
        high_precision_flow(SAN(1, 1, 4, mlp=True), X)
    with pytest.raises(ValueError, match=r"expected \[n, 4\], one sequence"):
        high_precision_flow(SAN(1, 1, 4), X[None])
    with pytest.raises(ValueError, match=r"expected \[n, 3\]"):
        high_precision_flow(SAN(1, 1, 3), X)
    with pytest.raises(TypeError, match=r"but the weights are torch\.float64"):
        high_precision_flow(SAN(1, 1, 4), X.float())
    with pytest.raises(ValueError, match="X must be finite"):
        high_precision_flow(SAN(1, 1, 4), X * torch.nan)
    with pytest.raises(ValueError, match=f"digits must be at least {GUARD + 20}"):
        high_precision_flow(SAN(1, 1, 4), X, digits=10)
