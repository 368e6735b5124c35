"""The residual flow against high precision, by hand, by property, on bad input, and for time."""

import math
import statistics
import time

import mpmath as mp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rc_lib import log_scaled
from rc_lib.attention import MultiHeadAttention
from rc_lib.blocks import MLP, LayerNorm
from rc_lib.masks import causal, window
from rc_lib.norms import composite_norm
from rc_lib.rank import residual
from rc_lib.residual_flow import LINEAR, ResidualFlow, residual_flow
from rc_lib.san import SAN
from tests import oracle_mpmath as oracle

DOUBLE = {"dtype": torch.float64}


def tokens(*shape, seed=1, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **DOUBLE)


def against_oracle(san, X, digits, mask=None, tolerance=1e-10):
    """Every state's log-norm, direction and centre; returns the oracle's decimal log-norms."""
    flow = residual_flow(san, X, mask)
    found = []
    for l, state in enumerate(oracle.states(san, X, digits, mask)):
        log_norm, direction = oracle.residual(state, digits)
        # The oracle itself must have digits to spare, or it would be compared with its own rounding.
        assert log_norm / mp.log(10) > 60 - digits
        assert abs(flow.log_norm[l].item() - log_norm) <= tolerance * max(1, abs(log_norm)), f"layer {l}"
        assert (flow.direction[l] - direction).abs().max() <= tolerance * direction.abs().max(), f"layer {l}"
        mean = torch.tensor([[float(x) for x in row] for row in state], **DOUBLE).mean(0)
        size = mean.abs().max().item() + float(mp.exp(log_norm))
        torch.testing.assert_close(flow.centre[l], mean, rtol=1e-10, atol=1e-12 * size)
        found.append(float(log_norm / mp.log(10)))
    return found


# --- against thousands of digits ---


@pytest.mark.parametrize(("heads", "n", "seed"), [(1, 5, 0), (2, 6, 3)])
def test_pure_attention_against_3000_digits(heads, n, seed):
    san = SAN(6, heads, 5, head_dim=3, value_dim=2, seed=seed, bias_std=0.5)
    assert against_oracle(san, tokens(n, 5, seed=seed + 10), 3000)[-1] < -200


SWITCHES = {
    "skip": {"skip": True},
    "post-norm": {"norm": "post"},
    "pre-norm": {"norm": "pre"},
    "post-norm, skip": {"norm": "post", "skip": True},
    "pre-norm, skip": {"norm": "pre", "skip": True},
    "no bias": {"bias": False},
    **{f"mlp, {a}": {"mlp": True, "activation": a} for a in ("identity", "relu", "tanh", "gelu")},
    "mlp with its skip": {"mlp": True, "mlp_skip": True},
    "transformer, pre-norm": {"mlp": True, "skip": True, "norm": "pre"},
    "transformer, post-norm": {"mlp": True, "skip": True, "norm": "post"},
    "post-norm without eps": {"mlp": True, "norm": "post", "eps": 0.0},
}


def disturb_norms(san):
    """Gains and shifts that differ: those of a new LayerNorm are 1 and 0."""
    with torch.no_grad():
        for i, p in enumerate(p for name, p in san.named_parameters() if "norm" in name):
            p += tokens(*p.shape, seed=i, scale=0.3)


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
@pytest.mark.parametrize("gain", [0.7, 1.5])
def test_every_switch_against_high_precision(switches, gain):
    san = SAN(4, 2, 5, head_dim=3, mlp_dim=7, seed=2, **{"bias_std": 0.5, "gain": gain} | switches)
    disturb_norms(san)
    against_oracle(san, tokens(4, 5), 200)


MASKS = {
    "causal": causal(5),
    "window": window(5, 3),
    "padding": torch.tensor([True, True, False, True, False]).expand(5, 5),
    "each head its own": torch.stack([causal(5), causal(5).T]),
    "one head causal, one padded": torch.stack([causal(5), torch.arange(5).expand(5, 5) < 3]),
    "all": torch.ones(5, 5, dtype=torch.bool),
    "blocks": torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).bool(),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("switches", [{}, {"skip": True, "norm": "post"}], ids=["pure", "skip, post-norm"])
def test_masks_against_high_precision(mask, switches):
    san = SAN(5, 2, 4, head_dim=3, seed=5, bias_std=0.5, **switches)
    found = against_oracle(san, tokens(5, 4), 200, mask)
    if switches == {}:
        same_keys = bool((mask == mask.any(-2, keepdim=True)).all())
        # Order 3 if all rows see the same keys, order 1 otherwise: 10^-20 in five layers or nowhere near it.
        assert found[-1] < -20 if same_keys else found[-1] > -3


@pytest.mark.parametrize("gain", [10.0, 100.0, 1000.0])
@pytest.mark.parametrize("mask", [None, causal(4)], ids=["full", "causal"])
def test_large_scores_against_high_precision(gain, mask):
    san = SAN(1, 2, 4, head_dim=3, seed=4, gain=1.0, bias_std=0.5)
    with torch.no_grad():
        san.layers[0].attention.W_Q *= gain
    # Scores reach 10 to 3000 here; their rounding, some 1e-16 of them, enters the exponentials: 1e-12.
    against_oracle(san, tokens(4, 4, scale=2.0), 400, mask)


# --- where one form hands over to another ---


def scale_for(san, X, log_scores):
    """The factor on the residual of X at which the largest centred score of layer 1 is ``e^log_scores``."""
    R = residual(X)
    W = san.layers[0].attention
    E = R @ W.W_QK @ R.T / math.sqrt(W.W_Q.shape[-1])
    return math.exp((log_scores - (E - E.mean(-1, keepdim=True)).abs().max().log().item()) / 2)


@pytest.mark.parametrize("at", [LINEAR, -150.0, 0.0, 2.0], ids=["linear", "tiny", "scores 1", "scores 7"])
def test_no_seam_where_the_regime_changes(at):
    san = SAN(1, 2, 5, head_dim=3, seed=7, bias_std=0.5)
    X = residual(tokens(6, 5))
    for step in (-1e-6, -1e-12, 0.0, 1e-12, 1e-6, 0.3):
        against_oracle(san, X * scale_for(san, X, at + step), 250, tolerance=1e-13)


def exact(t, f):
    """Log-norm and direction of ``f`` of a state, in 200 digits."""
    with mp.workdps(200):
        size = mp.exp(t.rho.item())
        X = [[x + size * r for x, r in zip(t.x.tolist(), row, strict=True)] for row in t.R.tolist()]
        return oracle.residual(f(X), 200)


def state(n, d, scale, seed=1):
    t = log_scaled.split(tokens(n, d, seed=seed))
    return log_scaled.LogScaled(t.x, t.rho + math.log(scale), t.R, t.resolved)


SCALES = [1e-100, 1e-19, 1e-18, 1e-17, 1e-9, 1e-3, 0.1, 0.3, 0.5, 1.0, 10.0, 1e3]


@pytest.mark.parametrize("size", [1e-20, 1e-12, 1e-6, 1.0])
@pytest.mark.parametrize("bias", [0.1, 3.0, 300.0], ids=["even", "skewed", "saturated"])
def test_small_scores_with_any_reference(size, bias):
    """Query bias alone shapes ``s``; what differs between rows is tiny, down to the linear regime."""
    san = SAN(2, 2, 5, head_dim=3, seed=8, bias_std=0.5)
    with torch.no_grad():
        san.layers[0].attention.W_Q *= size
        san.layers[0].attention.b_Q *= bias / 0.5
    against_oracle(san, tokens(4, 5), 400)


@pytest.mark.parametrize("activation", log_scaled.ACTIVATION_CHANGES)
@pytest.mark.parametrize("scale", SCALES)
@torch.no_grad()
def test_no_seam_in_the_mlp(activation, scale):
    t, net = state(4, 3, scale), MLP(3, 5, activation, seed=3, bias_std=1.0)
    found = log_scaled.mlp(t, net.W_1, net.b_1, net.W_2, net.b_2, activation)
    log_norm, direction = exact(t, lambda X: oracle.mlp(net, X))
    assert abs(found.rho.item() - log_norm) <= 1e-12 * max(1, abs(log_norm))
    assert (found.R - direction).abs().max() <= 1e-12


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("eps", [0.0, 1e-5, 1.0])
@torch.no_grad()
def test_no_seam_in_layer_norm(scale, eps):
    """At the larger scales the centre's direction is turned round (α < −1 in the docstring's letters)."""
    t, norm = state(4, 5, scale), LayerNorm(5, eps)
    norm.weight.add_(tokens(5, scale=0.5))
    found = log_scaled.layer_norm(t, eps, norm.weight, norm.bias)
    log_norm, direction = exact(t, lambda X: oracle.layer_norm(norm, X))
    assert abs(found.rho.item() - log_norm) <= 1e-12 * max(1, abs(log_norm))
    assert (found.R - direction).abs().max() <= 1e-12


@pytest.mark.parametrize(("scale", "eps"), [(1e-6, 1e-5), (10.0, 1e-12)], ids=["removed", "turned round"])
@torch.no_grad()
def test_layer_norm_of_a_residual_along_the_centre(scale, eps):
    """LayerNorm removes a small one, but for eps, and turns a token round for a large one."""
    y = torch.tensor([1.0, -2.0, 1.0], **DOUBLE)
    R = torch.tensor([[1.0], [-1.0]], **DOUBLE) * y / math.sqrt(8)
    t = log_scaled.LogScaled(y, torch.tensor(math.log(scale), **DOUBLE), R, torch.tensor(True))
    norm = LayerNorm(3, eps)
    found = log_scaled.layer_norm(t, norm.eps, norm.weight, norm.bias)
    log_norm, _ = exact(t, lambda X: oracle.layer_norm(norm, X))
    # The small one's result is 5e-6 of the residual, and √8 is rounded: 16 digits less 5, relative.
    assert abs(found.rho.item() - log_norm) < 1e-10


def test_what_sixteen_digits_cannot_tell_is_nan():
    """Saturated heads merge tokens 0, 1, 3 to 1e-22 in layer 2; layer 3 gives all weight to these three.

    What is left is what they differ by, of which R̂ holds nothing (500 digits say e^-50.5, rounding says
    e^-32).
    """
    san, X = SAN(4, 2, 5, head_dim=3, seed=2, bias=False, gain=3.0), tokens(4, 5)
    flow = residual_flow(san, X)
    assert flow.log_norm.isnan().tolist() == [False, False, False, True, True]
    assert flow.direction[3:].isnan().all()
    assert flow.centre.isfinite().all()
    assert flow.resolved.tolist() == [True, True, True, False, False]
    found = [oracle.residual(state, 500)[0] for state in oracle.states(san, X, 500)]
    assert flow.log_norm[:3].tolist() == pytest.approx([float(f) for f in found[:3]], rel=1e-10)
    assert found[3] == pytest.approx(-50.547, abs=1e-3)


def test_scores_that_are_all_rounding_are_nan():
    """W_QK = q (0.1 k + 0.2 k − 0.3 k)ᵀ: what is left of the scores is the last bit of its three terms."""
    san, X = SAN(1, 1, 4, head_dim=3, bias_std=0.5), tokens(5, 4)
    with torch.no_grad():
        W = san.layers[0].attention
        W.W_Q.copy_(tokens(1, 4, 1, seed=2).expand(1, 4, 3))
        W.W_K.copy_(tokens(1, 4, 1, seed=3) * torch.tensor([0.1, 0.2, -0.3], **DOUBLE))
    assert residual_flow(san, X).log_norm.isnan().tolist() == [False, True]
    with torch.no_grad():
        W.W_K[..., 2].neg_()
    against_oracle(san, X, 100)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.integers(0, 10**6), st.integers(2, 4), st.floats(-3, 1.5), st.booleans())
def test_every_number_is_right_or_nan(seed, n, log_gain, masked):
    """Weights of any size, saturated or not: what the flow does give agrees with 400 digits."""
    san = SAN(2, 2, 3, head_dim=2, seed=seed, gain=10**log_gain, bias_std=0.3)
    X, mask = tokens(n, 3, seed=seed), causal(n) if masked else None
    flow = residual_flow(san, X, mask)
    for l, state in enumerate(oracle.states(san, X, 400, mask)):
        if not flow.log_norm[l].isnan():
            if flow.log10_norm[l] < -300:
                return  # below this the oracle has too few digits
            log_norm, direction = oracle.residual(state, 400)
            # RESOLUTION leaves seven digits, saturated scores of 1e3 and more cost some of the others.
            assert flow.log_norm[l].item() == pytest.approx(float(log_norm), rel=1e-5, abs=1e-5)
            assert (flow.direction[l] - direction).abs().max() < 1e-5


# --- by hand ---


def test_two_tokens_by_hand():
    """d = 1, X = (a, −a), four query features of weight 1: scores ±4a²/√4, so a ← a tanh(2a²)."""
    ones = torch.ones(1, 1, 4, **DOUBLE)
    san = SAN(8, 1, 1, head_dim=4, value_dim=1, bias=False)
    one = torch.ones(1, 1, 1, **DOUBLE)
    for layer in san.layers:
        layer.attention = MultiHeadAttention.from_weights(ones, ones, one, one)
    flow = residual_flow(san, torch.tensor([[0.5], [-0.5]], **DOUBLE))
    with mp.workdps(50):
        a, log_norm = mp.mpf("0.5"), []
        for _ in range(9):
            log_norm.append(float(mp.log(a * mp.sqrt(2))))  # column sum 2a, row sum a
            a = a * mp.tanh(2 * a * a)
    torch.testing.assert_close(flow.log_norm, torch.tensor(log_norm, **DOUBLE), rtol=1e-13, atol=0)
    torch.testing.assert_close(flow.centre, torch.zeros(9, 1, **DOUBLE), rtol=0, atol=1e-15)
    expected = torch.tensor([[1.0], [-1.0]], **DOUBLE) / math.sqrt(2)
    torch.testing.assert_close(flow.direction, expected.expand(9, 2, 1), rtol=1e-14, atol=0)


def test_causal_rate_by_hand():
    """Uniform causal attention on (0, 1): the second token becomes the mean, so the difference halves."""
    zero, one = torch.zeros(1, 1, 1, **DOUBLE), torch.ones(1, 1, 1, **DOUBLE)
    san = SAN(5, 1, 1)
    for layer in san.layers:
        layer.attention = MultiHeadAttention.from_weights(zero, zero, one, one)
    flow = residual_flow(san, torch.tensor([[0.0], [1.0]], **DOUBLE), causal(2))
    expected = torch.full((5,), -math.log(2), **DOUBLE)
    torch.testing.assert_close(flow.log_norm.diff(), expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(flow.order_of_steps, torch.ones(4, **DOUBLE))


def test_order_and_state_read_from_the_log_norms():
    R = torch.eye(2, **DOUBLE).expand(4, 2, 2)
    centre = torch.arange(8, **DOUBLE).reshape(4, 2)
    flow = ResidualFlow(torch.tensor([-1.0, -4.0, -13.0, -math.inf], **DOUBLE), R, centre)
    assert flow.order.tolist() == [4.0, 3.25, math.inf]
    assert flow.order_of_steps.tolist() == [3.0, math.inf]
    assert flow.log10_norm[1].item() == pytest.approx(-4 / math.log(10))
    expected = torch.tensor([[2 + math.exp(-4), 3], [2, 3 + math.exp(-4)]], **DOUBLE)
    torch.testing.assert_close(flow.state(1), expected)


# --- against the plain forward pass, and properties ---


@pytest.mark.parametrize("switches", [{}, *SWITCHES.values()], ids=["pure", *SWITCHES])
def test_states_are_those_of_the_forward_pass(switches):
    """Every axis has a prime of its own: batch 2, n 7, d 5, H 3, d_qk 11, d_v 13, m 17."""
    san = SAN(2, 3, 5, head_dim=11, value_dim=13, mlp_dim=17, **{"bias_std": 0.5} | switches)
    disturb_norms(san)
    X, mask = tokens(2, 7, 5), torch.rand(2, 3, 7, 7, generator=torch.Generator().manual_seed(0)) < 0.7
    mask |= torch.eye(7, dtype=torch.bool)
    for m in (None, mask):
        flow = residual_flow(san, X, m)
        assert flow.log_norm.shape == (2, 3)
        assert flow.order.shape == (2, 2)
        assert flow.direction.shape == (2, 3, 7, 5)
        assert flow.centre.shape == (2, 3, 5)
        for l, expected in enumerate(san.trace(X, m).hidden):
            torch.testing.assert_close(flow.state(l), expected, rtol=1e-12, atol=1e-12)


def test_padding_mask_is_the_mask_of_its_keys():
    san, X = SAN(4, 2, 6, bias_std=0.5), tokens(3, 5, 6)
    real = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 0, 1, 0]]).bool()
    flow, same = (
        residual_flow(san, X, key_padding_mask=real),
        residual_flow(san, X, real[:, None, :].expand(3, 5, 5)),
    )
    torch.testing.assert_close(flow.log_norm, same.log_norm, rtol=0, atol=0)
    both = residual_flow(san, X, causal(5) | torch.ones(5, 5).triu().bool(), real)
    torch.testing.assert_close(flow.log_norm, both.log_norm, rtol=0, atol=0)


def test_each_batch_element_is_on_its_own():
    """Elements in different regimes, 1e-40 to 1e3, with different masks, one of them without residual."""
    san, X = SAN(5, 2, 6, bias_std=0.5), tokens(2, 3, 5, 6)
    X = X.mean(-2, keepdim=True) + residual(X) * 10.0 ** torch.tensor([-40.0, 0, 3, -3, -300, 1]).reshape(
        2, 3, 1, 1
    )
    X[1, 2] = X[1, 2, :1]
    mask = torch.stack([torch.ones(5, 5, dtype=torch.bool), causal(5)])[:, None].expand(2, 3, 5, 5)
    for m in (None, mask):
        flow = residual_flow(san, X, m)
        for i in range(2):
            for j in range(3):
                alone = residual_flow(san, X[i, j], None if m is None else m[i, j])
                torch.testing.assert_close(flow.log_norm[i, j], alone.log_norm, rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(flow.direction[i, j], alone.direction, rtol=1e-9, atol=1e-10)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.integers(0, 10**6), st.integers(2, 9), st.floats(-3, 0.2), st.booleans())
def test_order_of_tokens_does_not_matter(seed, n, log_gain, skip):
    switches = {"gain": 10**log_gain, "bias_std": 0.3, "skip": skip}
    san, X = SAN(4, 2, 3, head_dim=2, seed=seed, **switches), tokens(n, 3, seed=seed)
    p = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    flow, moved = residual_flow(san, X), residual_flow(san, X[p])
    torch.testing.assert_close(moved.log_norm, flow.log_norm, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(moved.direction, flow.direction[:, p], rtol=0, atol=1e-6)


@pytest.mark.parametrize("center", ["mean", "median", "minimizer"])
def test_any_centre(center):
    san, X = SAN(3, 2, 4, head_dim=3, bias_std=0.5), tokens(5, 4)
    flow = residual_flow(san, X, center=center)
    for l, Y in enumerate(san.trace(X).hidden[:3]):  # the plain pass still holds these residuals
        assert flow.log_norm[l].exp().item() == pytest.approx(
            composite_norm(residual(Y, center)).item(), rel=1e-6
        )
    torch.testing.assert_close(composite_norm(flow.direction), torch.ones(4, **DOUBLE))
    torch.testing.assert_close(flow.state(1), san.trace(X).hidden[1])
    mean = residual_flow(san, X)
    gain = flow.log_norm - mean.log_norm
    # The minimiser is at most half a mean residual better; the median at most √3 worse than that.
    assert (gain >= -math.log(2) - 1e-9).all()
    assert (gain <= (0 if center == "minimizer" else math.log(3) / 2) + 1e-9).all()


def test_the_dtype_of_the_weights_may_be_any():
    X = tokens(5, 6)
    reference = residual_flow(SAN(8, 2, 6), X)
    assert reference.log10_norm[-1] < -300
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float16, 0.1), (torch.bfloat16, 0.5)):
        flow = residual_flow(SAN(8, 2, 6, dtype=dtype), X.to(dtype))
        assert flow.log_norm.dtype == torch.float64
        # Rounding the weights changes the network by that much, not the order.
        torch.testing.assert_close(flow.log_norm, reference.log_norm, rtol=tolerance, atol=tolerance)
        assert flow.order_of_steps[-1].item() == pytest.approx(3, abs=0.05)


def test_the_flow_leaves_no_gradient_and_no_trace_in_the_network():
    san, X = SAN(2, 2, 6, mlp=True, norm="pre", dropout=0.5).train(), tokens(5, 6).requires_grad_()
    before = [p.clone() for p in san.parameters()]
    flow = residual_flow(san, X)
    assert not flow.log_norm.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(before, san.parameters(), strict=True))
    torch.testing.assert_close(flow.state(2), san.trace(X).hidden[2])  # without dropout, like the trace


# --- what it is for ---


def test_twelve_layers_end_below_10_to_the_minus_150000():
    """n = 32, d = 64, H = 4, variance 1/fan-in: the median of nine draws, which differ by a fifth."""
    flows = [residual_flow(SAN(12, 4, 64, seed=s), tokens(32, 64, seed=100 + s)) for s in range(9)]
    final = torch.stack([f.log10_norm[-1] for f in flows])
    assert final.median() < -150_000
    assert final.max() < -100_000
    for flow in flows:
        # Layers 10, 11, 12, counted from 1.
        assert (flow.order[9:] - 3).abs().max() < 1e-3
        assert (flow.order_of_steps[5:] - 3).abs().max() < 1e-2


def test_the_logarithm_overflows_only_after_600_layers():
    flow = residual_flow(SAN(630, 1, 4), tokens(3, 4))
    assert flow.log_norm.isfinite().all()
    assert flow.log_norm[-1] < -1e295
    assert flow.order[-1].item() == pytest.approx(3, abs=1e-12)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def paired_ratio(slow, fast, repeats):
    """The median ratio of two processor times, taken one after the other: a busy machine slows both."""
    ratios = []
    for _ in range(repeats):
        start = time.process_time()
        fast()
        middle = time.process_time()
        slow()
        ratios.append((time.process_time() - middle) / (middle - start))
    return statistics.median(ratios)


@torch.no_grad()
def test_it_costs_less_than_three_forward_passes(plain_types, one_thread):
    san, X = SAN(12, 4, 64), tokens(32, 64)
    assert min(paired_ratio(lambda: residual_flow(san, X), lambda: san(X), 25) for _ in range(4)) < 3


# --- no residual, one token, no layer ---


@pytest.mark.parametrize("switches", [{}, *SWITCHES.values()], ids=["pure", *SWITCHES])
@pytest.mark.parametrize("shape", [(5, 6), (1, 6), (2, 1, 6), (4, 6)])
def test_equal_tokens_have_residual_zero_and_stay_equal(switches, shape):
    # 0.1 is no binary fraction: a mean of five equal rows is off by an ulp.
    X = (0.1 + tokens(*shape[:-2], 1, 6)).expand(shape)
    for mask in (None, causal(shape[-2])):
        flow = residual_flow(SAN(3, 2, 6, **{"bias_std": 0.5} | switches), X, mask)
        assert (flow.log_norm == -math.inf).all()
        assert (flow.order == math.inf).all()
        assert (flow.order_of_steps == math.inf).all()
        assert (flow.direction == 0).all()
        assert flow.centre.isfinite().all()


def test_a_residual_that_vanishes_in_the_middle():
    """Uniform attention makes tokens equal in one step, exactly; then the next layers see equal tokens."""
    san = SAN(3, 2, 6, bias_std=0.5)
    with torch.no_grad():
        san.layers[1].attention.W_K.zero_()
    flow = residual_flow(san, tokens(5, 6))
    assert flow.log_norm[1].isfinite()
    assert flow.log_norm[2:].tolist() == [-math.inf, -math.inf]
    assert flow.order[1:].tolist() == [math.inf, math.inf]


def test_a_network_without_layers_gives_the_input():
    X = tokens(2, 5, 6)
    flow = residual_flow(SAN(0, 2, 6), X)
    torch.testing.assert_close(flow.log_norm[..., 0].exp(), composite_norm(residual(X)))
    torch.testing.assert_close(flow.state(0), X)
    assert flow.order.shape == flow.order_of_steps.shape == (2, 0)


# --- bad input ---


def nan_at(i, j):
    X = tokens(5, 6)
    X[i, j] = math.nan
    return X


@pytest.mark.parametrize(
    ("X", "error", "message"),
    [
        (nan_at(3, 2), ValueError, r"X must be finite, but X\[3, 2\] is nan"),
        (tokens(5, 6) / 0, ValueError, "X must be finite"),
        (
            torch.ones(5, 6, dtype=torch.int64),
            TypeError,
            "X must hold floating-point numbers, but is a int64",
        ),
        (tokens(5, 7), ValueError, r"X is a float64 tensor of shape \(5, 7\); expected \[\*batch, n, 6\]"),
        (tokens(6), ValueError, r"X must have shape \[\*batch, n, d\]"),
        (tokens(0, 6), ValueError, "X must not be empty"),
        (tokens(5, 6).float(), TypeError, "dtypes must agree"),
        ([[1.0]], TypeError, "X must be a torch tensor"),
        (tokens(5, 6) * 1e200, ValueError, "state after layer 1 is not finite"),
    ],
)
def test_bad_input_is_named(plain_types, X, error, message):
    with pytest.raises(error, match=message):
        residual_flow(SAN(2, 2, 6), X)


def test_equal_tokens_are_resolved():
    flow = residual_flow(SAN(2, 2, 6), tokens(1, 6).expand(5, 6))
    assert flow.log_norm.isneginf().all()
    assert flow.resolved.all()


def test_bad_masks_centres_and_networks_are_named(plain_types):
    san, X = SAN(2, 2, 6), tokens(5, 6)
    empty = causal(5)
    empty[2] = False
    with pytest.raises(ValueError, match=r"mask leaves the query at index \[2\] without any key"):
        residual_flow(san, X, empty)
    with pytest.raises(ValueError, match=r"mask is a bool tensor of shape \(4, 4\)"):
        residual_flow(san, X, causal(4))
    with pytest.raises(ValueError, match="there are 2 heads"):
        residual_flow(san, X, causal(5).expand(3, 5, 5))
    with pytest.raises(ValueError, match="there are 2 heads"):
        residual_flow(san, X, torch.ones(3, 5, 5, dtype=torch.bool))  # lets everyone see everyone
    with pytest.raises(TypeError, match="mask must be boolean"):
        residual_flow(san, X, torch.zeros(5, 5))
    with pytest.raises(ValueError, match="center must be one of 'mean', 'median', 'minimizer'"):
        residual_flow(san, X, center="mode")
    with pytest.raises(TypeError, match=r"san must be a rc_lib\.san\.SAN, but is Linear Linear\("):
        residual_flow(torch.nn.Linear(6, 6), X)


def test_blocks_without_an_exact_form_are_refused(plain_types):
    class Other(MultiHeadAttention):
        pass

    san, X = SAN(2, 2, 6, mlp=True), tokens(5, 6)
    san.layers[1].attention = Other(2, 6)
    with pytest.raises(
        ValueError, match="attention of layer 2 is a Other; only MultiHeadAttention has an exact form"
    ):
        residual_flow(san, X)
    san = SAN(2, 2, 6, mlp=True)
    san.layers[0].mlp.activation = "swish"
    with pytest.raises(
        ValueError, match="activation of layer 1 is 'swish'; exact forms: identity, relu, tanh, gelu"
    ):
        residual_flow(san, X)
