"""What all attention patterns have in common: registry, shapes, masks, gradients, networks, refusals."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rc_lib import variants
from rc_lib.attention import MultiHeadAttention
from rc_lib.bounds import certificate
from rc_lib.frozen import freeze
from rc_lib.masks import causal
from rc_lib.residual_flow import residual_flow
from rc_lib.san import SAN
from rc_lib.variants import VARIANTS

B, H, N, D, K = 2, 3, 7, 5, 4
NAMES = list(VARIANTS)
MASKABLE = [name for name in NAMES if not name.startswith("linformer")]
every = pytest.mark.parametrize("name", NAMES)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(seed=0):
    shapes = [(H, D, K), (H, D, K), (H, K), (H, K)]
    return [gaussian(*shape, seed=seed + i) for i, shape in enumerate(shapes)]


def network(name, depth=2, **switches):
    return variants.san(name, depth, H, D, K, N, bias_std=0.4, **switches)


# --- the registry ---


def test_the_registry_says_what_it_must():
    for name, row in VARIANTS.items():
        assert row.name == name
        assert row.order in (1, 2, 3)
        assert row.reason
        assert row.source[-4:].isdigit()
        assert row.title
        assert row.pattern.__doc__
    orders = [row.order for row in VARIANTS.values()]
    assert orders == sorted(orders, reverse=True)
    assert len({row.title for row in VARIANTS.values()}) == len(VARIANTS) >= 25


def test_an_unknown_variant_is_refused_with_the_list(plain_types):
    with pytest.raises(ValueError, match=r"name must be one of 'softmax'.*but is str 'hopfield'"):
        variants.variant("hopfield")
    with pytest.raises(ValueError, match="name must be one of"):
        variants.san("hopfield", 1, 1, 2)


# --- one pattern ---


@every
def test_rows_sum_to_one_where_they_should(name):
    P = VARIANTS[name].attention(gaussian(B, N, D, seed=9), *weights())
    assert P.shape == (B, H, N, N)
    sums = P.sum(-1)
    assert VARIANTS[name].stochastic == torch.allclose(sums, torch.ones_like(sums))


@every
def test_no_batch_and_two_batch_axes(name):
    X, row = gaussian(2, 3, N, D, seed=9), VARIANTS[name]
    P = row.attention(X, *weights())
    assert P.shape == (2, 3, H, N, N)
    torch.testing.assert_close(P[1, 2], row.attention(X[1, 2], *weights()))


@every
def test_heads_do_not_see_each_other(name):
    """Changing the weights of one head changes its matrix only."""
    pattern = VARIANTS[name].build(H, D, K, N)
    X, W = gaussian(N, D, seed=9), weights()
    changed = [w.clone() for w in W]
    for w in changed:
        w[1] += 1
    same = (pattern(X, *W) == pattern(X, *changed)).flatten(1).all(-1)
    assert same[[0, 2]].all()
    fixed = ("pooling", "synthesizer_random", "synthesizer_dense")
    assert same[1] == (name in fixed)


@pytest.mark.parametrize("name", MASKABLE)
def test_masks_hold(name):
    X, may = gaussian(B, N, D, seed=9), causal(N)
    P = VARIANTS[name].attention(X, *weights(), mask=may)
    assert (P[..., ~may] == 0).all()
    if VARIANTS[name].stochastic:
        torch.testing.assert_close(P.sum(-1), torch.ones(B, H, N, dtype=torch.float64))
    real = torch.ones(B, N, dtype=torch.bool)
    real[0, 4:] = False
    P = VARIANTS[name].attention(X, *weights(), key_padding_mask=real)
    assert (P[0, :, :, 4:] == 0).all()
    by_head = torch.stack([may, may.mT, torch.ones(N, N, dtype=torch.bool)]).expand(B, H, N, N)
    P = VARIANTS[name].attention(X, *weights(), mask=by_head)
    assert (P[~by_head] == 0).all()


@pytest.mark.parametrize("name", ["causal", "window", "strided", "bigbird", "pooling"])
def test_a_patterns_own_mask_and_the_callers_both_hold(name):
    pattern, may = VARIANTS[name].build(H, D, K), causal(N).mT
    P = pattern(gaussian(B, N, D, seed=9), *weights(), mask=may)
    assert torch.equal(P > 0, (may & pattern.own_mask(N)).expand_as(P))


@pytest.mark.parametrize("name", MASKABLE)
def test_a_row_that_may_attend_to_nothing_is_zero_and_has_gradients(name):
    X, may = gaussian(N, D, seed=9).requires_grad_(), causal(N).clone()
    may[3] = False
    P = VARIANTS[name].attention(X, *weights(), mask=may)
    assert (P[:, 3] == 0).all()
    if name not in ("pooling", "synthesizer_random"):
        P.square().sum().backward()
        assert X.grad.isfinite().all()


@pytest.mark.parametrize("name", ["linformer", "linformer_pooled"])
def test_linformer_refuses_masks(name):
    with pytest.raises(ValueError, match="mask is given, but Linformer mixes the keys"):
        VARIANTS[name].attention(gaussian(N, D), *weights(), mask=causal(N))


@every
def test_own_weights_come_from_the_seed_alone(name):
    X = gaussian(N, D, seed=9)
    torch.manual_seed(1)
    P = VARIANTS[name].attention(X, *weights(), seed=5)
    torch.manual_seed(2)
    assert torch.equal(P, VARIANTS[name].attention(X, *weights(), seed=5))
    drawn = ("bigbird", "t5", "performer", "synthesizer_random", "synthesizer_dense", "linformer")
    assert torch.equal(P, VARIANTS[name].attention(X, *weights(), seed=6)) == (name not in drawn)


@every
def test_a_token_of_nan_passes_through_where_it_is_read(name):
    X = gaussian(N, D, seed=9)
    X[2] = torch.nan
    P = VARIANTS[name].attention(X, *weights())
    reads_no_tokens = ("pooling", "synthesizer_random")
    assert P[:, 2].isnan().any() == (name not in reads_no_tokens)


@given(
    st.sampled_from([n for n in NAMES if VARIANTS[n].stochastic]),
    st.integers(0, 10**6),
    st.floats(0.01, 30),
)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_stochastic_rows_at_any_scale(name, seed, scale):
    P = VARIANTS[name].attention(scale * gaussian(N, D, seed=seed), *weights(seed), seed=seed)
    torch.testing.assert_close(P.sum(-1), torch.ones(H, N, dtype=torch.float64))
    if name != "shaped":
        assert (P >= 0).all()


# --- equal tokens ---


@every
def test_the_limit_has_rank_one_unless_the_rows_see_different_keys(name):
    """The law's first condition, on the matrices themselves."""
    layer = network(name).layers[0].attention
    P = variants.limit(layer, N, gaussian(D, seed=9))
    spread = (P - P[:, :1]).abs().amax((-2, -1))
    row = VARIANTS[name]
    by_row_sums = name in ("off_by_one", "sigmoid", "linear_unnormalised", "linformer")
    if row.order > 1 or by_row_sums:
        assert (spread < 1e-14).all()
    else:
        assert (spread > 1e-3).all()


def test_limits_by_hand():
    C = variants.limit(network("causal").layers[0].attention, 3)
    thirds = torch.tensor([[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64)
    torch.testing.assert_close(C, thirds.expand(H, 3, 3))
    layer = MultiHeadAttention(H, D, K)
    torch.testing.assert_close(variants.limit(layer, 4), torch.full((H, 4, 4), 0.25, dtype=torch.float64))
    off = variants.limit(network("off_by_one").layers[0].attention, 4, torch.zeros(D, dtype=torch.float64))
    assert off.shape == (H, 4, 4)
    plain = variants.san("off_by_one", 1, H, D, K).layers[0].attention
    torch.testing.assert_close(variants.limit(plain, 4), torch.full((H, 4, 4), 0.2, dtype=torch.float64))


# --- in a network ---


@every
def test_trace_and_paths_work_unchanged(name):
    net = network(name, depth=3, skip=True, norm="post")
    X = gaussian(B, N, D, seed=9)
    trace = net.trace(X)
    assert torch.equal(trace.output, net(X))
    assert [P.shape for P in trace.attention] == [(B, H, N, N)] * 3
    a = net.layers[0].attention
    assert torch.equal(trace.attention[0], a.pattern(X, a.W_Q, a.W_K, a.b_Q, a.b_K))
    frozen = freeze(net, X)
    # Sums of 4³ paths of ordinary size in float64.
    torch.testing.assert_close(frozen.sum_over_paths().total, trace.output, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(frozen.sum_by_length().total, trace.output, rtol=1e-10, atol=1e-11)


@every
def test_everything_trains(name):
    net = network(name)
    net(gaussian(B, N, D, seed=9)).square().mean().backward()
    for key, p in net.named_parameters():
        if ".pattern." in key:
            assert p.grad is not None, key
            assert p.grad.abs().sum() > 0, key


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(name, dtype):
    net = network(name, dtype=dtype)
    assert {p.dtype for p in net.parameters()} == {dtype}
    if dtype == torch.float32 or name != "sigma_reparam":  # PyTorch has no singular values in half precision
        X = gaussian(N, D, seed=9)
        high = network(name)(X)
        # Two layers of a few roundings each; at most a hundred units in the last place of the largest entry.
        error = (net(X.to(dtype)).double() - high).abs().max() / high.abs().max()
        assert error < 100 * torch.finfo(dtype).eps


@every
def test_weights_can_be_stored_and_the_network_copied(name):
    net, other = network(name, seed=1), network(name, seed=2)
    X = gaussian(N, D, seed=9)
    if name != "bigbird":  # its random keys come from the seed and are no weights
        other.load_state_dict(net.state_dict())
        assert torch.equal(other(X), net(X))
    assert torch.equal(copy.deepcopy(net)(X), net(X))


def test_the_softmax_variant_is_the_plain_network():
    net, plain = network("softmax", seed=4), SAN(2, H, D, K, seed=4, bias_std=0.4)
    assert net.state_dict().keys() == plain.state_dict().keys()
    X = gaussian(B, N, D, seed=9)
    torch.testing.assert_close(net(X), plain(X), rtol=1e-14, atol=1e-14)
    masked = network("causal", seed=4)
    torch.testing.assert_close(masked(X), plain(X, mask=causal(N)), rtol=1e-14, atol=1e-14)


def test_a_patterns_own_weights_share_no_numbers_with_the_queries():
    attention = variants.san("synthesizer_random", 1, 2, 12, tokens=7, seed=3).layers[0].attention
    own = next(attention.pattern.parameters()).flatten()
    ratio = attention.W_Q.flatten()[:9] / own[:9]  # constant if both were made of the same numbers
    assert ratio.std() > 0.1 * ratio.abs().mean()


def test_variants_of_one_seed_share_the_other_weights_and_layers_differ():
    a, b = network("synthesizer_random"), network("t5")
    assert torch.equal(a.layers[1].attention.W_V, b.layers[1].attention.W_V)
    tables = [layer.attention.pattern.table for layer in a.layers]
    assert not torch.equal(*tables)
    deep = network("synthesizer_random", depth=4)
    assert torch.equal(deep.layers[1].attention.pattern.table, tables[1])
    assert not torch.equal(network("synthesizer_random", seed=1).layers[0].attention.pattern.table, tables[0])


def test_options_reach_the_pattern():
    net = variants.san("window", 1, H, D, K, options={"width": 5}, skip=True)
    assert net.layers[0].attention.pattern.width == 5
    assert net.skip
    with pytest.raises(TypeError, match="widht"):
        variants.san("window", 1, H, D, K, options={"widht": 5})


def test_dropout_leaves_the_recorded_pattern_alone():
    net = network("rope", dropout=0.5)
    X = gaussian(N, D, seed=9)
    assert torch.equal(net.trace(X).attention[0], network("rope").trace(X).attention[0])


# --- refusals ---


def test_theory_about_the_softmax_refuses_other_patterns(plain_types):
    net, X = network("causal"), gaussian(N, D)
    with pytest.raises(ValueError, match="layer 1 has the pattern Causal"):
        residual_flow(net, X)
    with pytest.raises(ValueError, match="layer has the pattern Causal"):
        certificate(net, X)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"options": {"widht": 5}},
            TypeError,
            "options of 'window' must be among width, but there is 'widht'",
        ),
        ({"options": {"seed": 5}}, TypeError, "options of 'window' must be among width, but there is 'seed'"),
        ({"options": 5}, TypeError, "options must be a mapping of names to values, but is int 5"),
        ({"skp": True}, TypeError, "switches of a SAN must be among activation, bias, .* there is 'skp'"),
        ({"pattern": None}, TypeError, "switches of a SAN must be among .* there is 'pattern'"),
        ({"tokens": -2}, ValueError, "tokens must be at least 1, but is -2"),
    ],
)
def test_arguments_of_san_that_nothing_takes(arguments, error, message, plain_types):
    with pytest.raises(error, match=message):
        variants.san("window", 1, H, D, K, **arguments)


def test_every_option_of_a_pattern_is_known():
    for name, options in {
        "bigbird": {"width": 5, "globals_": 2, "random": 2},
        "pooling": {"width": 5},
    }.items():
        assert VARIANTS[name].build(H, D, K, N, **options).width == 5
    with pytest.raises(TypeError, match="options of 'softmax' must be among none, but there is 'width'"):
        VARIANTS["softmax"].build(H, D, K, width=3)


def test_patterns_with_positions_need_their_number(plain_types):
    for name in ("synthesizer_random", "synthesizer_dense", "linformer", "linformer_pooled"):
        assert VARIANTS[name].sized
        with pytest.raises(ValueError, match=r"has a weight for each position: give tokens"):
            variants.san(name, 1, H, D, K)
        with pytest.raises(ValueError, match=rf"shape \(8, {D}\).* was made for {N} tokens"):
            network(name)(gaussian(8, D))


BAD = {
    "width must be odd, but is 4": ("window", {"width": 4}),
    "stride must be at least 1, but is 0": ("strided", {"stride": 0}),
    "random must be at least 0, but is -1": ("bigbird", {"random": -1}),
    "base must be finite and positive, but is -1": ("rope", {"base": -1.0}),
    "buckets must be a multiple of 4, but is 6": ("t5", {"buckets": 6}),
    "reach must be at least 9, but is 8": ("t5", {"reach": 8}),
    "locality must be finite and not negative": ("gated_positional", {"locality": float("nan")}),
    "temperature must be finite and positive, but is 0": ("temperature", {"temperature": 0.0}),
    "temperature must be finite and positive, but is -2": ("shaped", {"temperature": -2.0}),
    "gamma must be finite and positive, but is inf": ("sigma_reparam", {"gamma": float("inf")}),
    "features must be at least 1, but is 0": ("performer", {"features": 0}),
    "hidden must be at least 1, but is 0": ("synthesizer_dense", {"hidden": 0}),
    "rank must be at least 1, but is 0": ("linformer", {"rank": 0}),
    "rank must be at most 7, the number of tokens, but is 8": ("linformer_pooled", {"rank": 8}),
    "iterations must be at least 0, but is -1": ("sinkhorn", {"iterations": -1}),
    r"slopes is a float32 tensor of shape \(2,\); expected \(3,\)": ("alibi", {"slopes": torch.ones(2)}),
}


@pytest.mark.parametrize("message", BAD)
def test_options_out_of_range(message, plain_types):
    name, options = BAD[message]
    with pytest.raises(ValueError, match=message):
        VARIANTS[name].build(H, D, K, N, **options)


@pytest.mark.parametrize("name", ["rope", "differential"])
def test_pairs_of_features_need_an_even_number(name, plain_types):
    with pytest.raises(ValueError, match=r"head_dim must be even.*but is 3"):
        VARIANTS[name].build(H, D, 3)


def test_inputs_that_do_not_fit(plain_types):
    pattern, W = VARIANTS["rope"].build(H, D, K), weights()
    with pytest.raises(ValueError, match="made for"):
        VARIANTS["rope"].build(H + 1, D, K)(gaussian(N, D), *W)
    with pytest.raises(ValueError, match=r"W_Q is .*; expected \[heads, 6"):
        pattern(gaussian(N, 6), *W)
    with pytest.raises(TypeError, match="dtypes must agree"):
        pattern(gaussian(N, D).float(), *W)
    with pytest.raises(ValueError, match="b_Q"):
        pattern(gaussian(N, D), W[0], W[1], W[2][:, :2], W[3])
    with pytest.raises(ValueError, match="there are 3 heads"):
        pattern(gaussian(B, N, D), *W, mask=torch.ones(B, 2, N, N, dtype=torch.bool))
    with pytest.raises(TypeError, match="mask must be boolean"):
        pattern(gaussian(N, D), *W, mask=torch.ones(N, N))
    with pytest.raises(ValueError, match="X must be finite"):
        network("rope").layers[0].attention(torch.full((N, D), torch.nan, dtype=torch.float64))
