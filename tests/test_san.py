"""The stack: its switches, its trace, Hugging Face's BERT layer, seeds, edges and bad input."""

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rc_lib import masks
from rc_lib.attention import heads_in, heads_out
from rc_lib.blocks import LayerNorm
from rc_lib.san import SAN

# A distinct prime for every axis: batch, depth, heads, tokens, features, d_qk, d_v, hidden features.
B, L, H, N, D, DQK, DV, M = 2, 3, 5, 7, 11, 13, 17, 19
TOL = {"rtol": 1e-12, "atol": 1e-12}
VARIANTS = list(itertools.product((False, True), (False, True), ("none", "pre", "post")))
variants = pytest.mark.parametrize(("skip", "mlp", "norm"), VARIANTS)


def san(depth=L, **changes) -> SAN:
    return SAN(depth, H, D, DQK, **({"value_dim": DV, "mlp_dim": M, "bias_std": 0.5, "seed": 4} | changes))


def tokens(*batch, n=N, d=D, seed=0) -> torch.Tensor:
    return torch.randn(*batch, n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def jitter_norms(network: SAN) -> SAN:
    """Give every LayerNorm a gain and a bias that a test can see."""
    for i, module in enumerate(m for m in network.modules() if isinstance(m, LayerNorm)):
        with torch.no_grad():
            module.weight.copy_(1 + 0.3 * tokens(n=1, seed=2 * i)[0])
            module.bias.copy_(0.3 * tokens(n=1, seed=2 * i + 1)[0])
    return network


def plain_layer_norm(X, norm):
    return torch.nn.functional.layer_norm(X, X.shape[-1:], norm.weight, norm.bias, norm.eps)


@variants
def test_switches_as_defined(skip, mlp, norm):
    """The definition in the module's first lines, written out once more with PyTorch's layer_norm."""
    network, X = jitter_norms(san(skip=skip, mlp=mlp, norm=norm)), tokens(B)
    Y = X
    for layer in network.layers:
        blocks = [(layer.attention, layer.norm1)] + ([(layer.mlp, layer.norm2)] if mlp else [])
        for block, ln in blocks:
            Z = block(plain_layer_norm(Y, ln) if norm == "pre" else Y)
            Z = Y + Z if skip else Z
            Y = plain_layer_norm(Z, ln) if norm == "post" else Z
    torch.testing.assert_close(network(X), Y, **TOL)


@variants
def test_trace_holds_the_forward_pass(skip, mlp, norm):
    network = jitter_norms(san(skip=skip, mlp=mlp, norm=norm, final_norm=norm == "pre"))
    X, causal = tokens(B), masks.causal(N)
    trace = network.trace(X, causal)
    assert torch.equal(trace.output, network(X, causal))
    assert torch.equal(trace.hidden[0], X)
    assert trace.depth == len(trace.norms) == L
    assert trace.stacked().shape == (L + 1, B, N, D)
    assert all(P.shape == (B, H, N, N) and (P.triu(1) == 0).all() for P in trace.attention)
    assert {len(stats) for stats in trace.norms} == {0 if norm == "none" else 1 + mlp}
    assert (trace.mlp_out is not None) == mlp
    assert (trace.final_norm is not None) == (norm == "pre")
    assert not any(t.requires_grad for t in (*trace.hidden, *trace.attention, trace.output))
    for l, layer in enumerate(network.layers):
        assert torch.equal(layer(trace.hidden[l], causal), trace.hidden[l + 1])


@variants
def test_trace_is_enough_to_rebuild_the_pass(skip, mlp, norm):
    """Frozen attention, frozen norms and the recorded MLP values give the output: what paths rest on."""
    network, X = jitter_norms(san(skip=skip, mlp=mlp, norm=norm)), tokens(B)
    trace, Y = network.trace(X), X
    for l, layer in enumerate(network.layers):
        a, stats = layer.attention, trace.norms[l]
        Z = stats[0].apply(Y) if norm == "pre" else Y
        Z = (trace.attention[l] @ Z.unsqueeze(-3) @ a.W_h).sum(-3) + a.b + (Y if skip else 0)
        Y = stats[0].apply(Z) if norm == "post" else Z
        if mlp:
            Z = trace.mlp_out[l] + (Y if skip else 0)
            Y = stats[1].apply(Z) if norm == "post" else Z
        torch.testing.assert_close(Y.detach(), trace.hidden[l + 1], **TOL)


def test_mlp_skip_apart():
    """The paper's surgery on trained models: no skip around the attention, one around the MLP."""
    network, X = san(1, mlp=True, mlp_skip=True), tokens(B)
    layer = network.layers[0]
    Y = layer.attention(X)
    torch.testing.assert_close(network(X), Y + layer.mlp(Y), **TOL)


def bert_layer():
    """A small random BERT layer of Hugging Face's, in float64 and without dropout."""
    transformers = pytest.importorskip("transformers", reason="the oracle of this test")
    config = transformers.BertConfig(
        hidden_size=22, num_attention_heads=2, intermediate_size=M, attn_implementation="eager"
    )
    layer = transformers.models.bert.modeling_bert.BertLayer(config).double().eval()
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype))
    return layer


def copy_bert(layer) -> SAN:
    """The same layer as a SAN: skip, MLP, post-norm."""
    ours = SAN(1, 2, 22, skip=True, mlp=True, norm="post", mlp_dim=M, eps=1e-12)
    mine, self_, out = ours.layers[0], layer.attention.self, layer.attention.output
    values = {"attention.W_O": heads_out(out.dense.weight, 2), "attention.b_O": out.dense.bias}
    for x, linear in zip("QKV", (self_.query, self_.key, self_.value), strict=True):
        values[f"attention.W_{x}"] = heads_in(linear.weight, 2)
        values[f"attention.b_{x}"] = linear.bias.reshape(2, -1)
    for i, dense in ((1, layer.intermediate.dense), (2, layer.output.dense)):
        values |= {f"mlp.W_{i}": dense.weight.T, f"mlp.b_{i}": dense.bias}
    for i, norm in ((1, out.LayerNorm), (2, layer.output.LayerNorm)):
        values |= {f"norm{i}.weight": norm.weight, f"norm{i}.bias": norm.bias}
    mine.load_state_dict(values)
    return ours


@pytest.mark.parametrize("padded", [False, True])
def test_equals_hugging_face_bert_layer(padded):
    theirs, X = bert_layer(), tokens(B, d=22)
    ours, real = copy_bert(theirs), torch.arange(N) < torch.tensor([[N], [N - 3]])
    additive = torch.zeros(B, 1, 1, N, dtype=torch.float64)
    if padded:
        additive = additive.masked_fill(~real[:, None, None], torch.finfo(torch.float64).min)
    expected = theirs(X, attention_mask=additive)
    expected = expected[0] if isinstance(expected, tuple) else expected
    result = ours(X, key_padding_mask=real) if padded else ours(X)
    # Eight matrix products of widths up to 22 on numbers of size one: rounding stays below 1e-12.
    torch.testing.assert_close(result, expected, **TOL)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(seed=st.integers(0, 10**6), variant=st.sampled_from(VARIANTS), order=st.permutations(range(N)))
def test_permutation_equivariance(seed, variant, order):
    skip, mlp, norm = variant
    network, X = san(skip=skip, mlp=mlp, norm=norm, seed=seed), tokens(B, seed=seed)
    # Three layers may amplify rounding errors of 1e-16 by the weights' norms, about 1e2 a layer with skips.
    torch.testing.assert_close(network(X[:, order]), network(X)[:, order], rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(seed=st.integers(0, 10**6), variant=st.sampled_from(VARIANTS), gain=st.floats(0, 3))
def test_equal_tokens_stay_equal(seed, variant, gain):
    """Residual zero in, residual zero out, for every variant."""
    skip, mlp, norm = variant
    network = san(skip=skip, mlp=mlp, norm=norm, seed=seed, gain=gain)
    Y = network(tokens(B, n=1, seed=seed).expand(B, N, D))
    torch.testing.assert_close(Y, Y[:, :1].expand_as(Y), rtol=1e-9, atol=1e-9)


def test_pure_attention_collapses_and_skips_hold():
    """The paper's headline on this class: SAN's tokens merge, those with skips do not."""
    X = torch.randn(32, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def spread(network):
        Y = network.trace(X).output
        return float((Y - Y.mean(0)).norm() / Y.norm())

    assert spread(SAN(6, 4, 64, bias_std=0.1)) < 1e-12
    # Not sharp: each layer about doubles the square of the common part, 1/32 at first, so about 0.5 is left.
    assert spread(SAN(6, 4, 64, bias_std=0.1, skip=True)) > 0.1


def test_seed_decides_the_weights_alone():
    torch.manual_seed(1)
    a, state = san(mlp=True), torch.get_rng_state()
    torch.manual_seed(2)
    b = san(mlp=True)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    torch.manual_seed(1)
    san(seed=9)
    assert torch.equal(state, torch.get_rng_state())
    other = san(mlp=True, seed=5)
    assert not torch.equal(a.layers[0].attention.W_V, other.layers[0].attention.W_V)
    assert not torch.equal(a.layers[0].mlp.W_1, other.layers[0].mlp.W_1)
    assert not torch.equal(a.layers[0].attention.W_V, a.layers[1].attention.W_V)


def test_the_streams_of_attention_and_mlp_share_no_numbers():
    layer = san(mlp=True, bias_std=0.0).layers[0]
    queries, W_1 = layer.attention.W_Q.flatten(), layer.mlp.W_1.flatten()
    ratio = queries[:9] / W_1[:9]  # constant if both were made of the same numbers
    assert ratio.std() > 0.1 * ratio.abs().mean()


@variants
def test_variants_share_their_attention_weights(skip, mlp, norm):
    plain, variant = san(), san(L + 2, skip=skip, mlp=mlp, norm=norm, dtype=torch.float32)
    for mine, other in zip(plain.layers, variant.layers, strict=False):
        for name, p in mine.attention.named_parameters():
            assert torch.equal(p.float(), getattr(other.attention, name))


def test_without_bias():
    network = san(mlp=True, bias=False, norm="none")
    names = {name.rsplit(".", 1)[1] for name, _ in network.named_parameters()}
    assert names == {"W_Q", "W_K", "W_V", "W_O", "W_1", "W_2"}
    assert (network(torch.zeros(N, D, dtype=torch.float64)) == 0).all()


def test_depth_zero_is_the_identity():
    network, X = san(0), tokens(B)
    trace = network.trace(X)
    assert torch.equal(network(X), X)
    assert trace.depth == 0
    assert trace.mlp_out is None
    assert network.depth == 0


@variants
def test_one_token_and_one_feature(skip, mlp, norm):
    network = SAN(2, 1, 1, skip=skip, mlp=mlp, norm=norm)
    trace = network.trace(torch.ones(1, 1, dtype=torch.float64))
    assert torch.equal(trace.attention[0], torch.ones(1, 1, 1, dtype=torch.float64))
    assert torch.isfinite(trace.output).all()


def test_fully_masked_token_through_the_stack():
    network, X = san(skip=True, mlp=True, norm="post"), tokens(B).requires_grad_()
    real = torch.ones(B, N, dtype=torch.bool)
    real[1] = False
    Y = network(X, masks.causal(N), real)
    assert torch.isfinite(Y).all()
    Y.square().sum().backward()
    assert torch.isfinite(X.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in network.parameters())


def test_dropout_acts_in_training_only_and_never_in_a_trace():
    network, X = san(mlp=True, dropout=0.3), tokens(B)
    plain = san(mlp=True)(X)
    assert network.training
    assert torch.equal(network.trace(X).output, plain)
    assert network.training
    assert not torch.allclose(network(X), plain)
    assert torch.equal(network.eval()(X), plain)
    assert not network.training


def test_trains():
    """A few steps of Adam reduce a loss: gradients reach every parameter."""
    network = SAN(2, 2, 8, skip=True, mlp=True, norm="pre", final_norm=True)
    X, target = tokens(B, d=8), tokens(B, d=8, seed=1)
    optimiser = torch.optim.Adam(network.parameters(), 1e-2)
    losses = []
    for _ in range(20):
        loss = (network(X) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert all(p.grad is not None for p in network.parameters())
    assert losses[-1] < losses[0] / 2


def test_overflow_shows_in_the_result():
    """Documented: states that overflow give infinities or NaN, not a number that looks right."""
    network = SAN(4, 1, 4, skip=True, gain=1e4, dtype=torch.float16)
    assert not torch.isfinite(network(torch.ones(3, 4, dtype=torch.float16))).all()


def test_state_dict_and_deepcopy():
    network, twin, X = san(mlp=True, norm="post"), san(mlp=True, norm="post", seed=8), tokens(B)
    twin.load_state_dict(network.state_dict())
    assert torch.equal(twin(X), network(X))
    assert torch.equal(copy.deepcopy(network)(X), network(X))


@pytest.mark.usefixtures("plain_types")
class TestBadInput:
    def test_options(self):
        for error, match, changes in (
            (ValueError, "depth must be at least 0", {"depth": -1}),
            (TypeError, "depth must be a whole number", {"depth": 1.5}),
            (ValueError, "norm must be one of 'none', 'pre', 'post'", {"norm": "before"}),
            (ValueError, "activation must be one of", {"activation": "swish", "mlp": True}),
            (TypeError, "seed must be a whole number, but is float", {"seed": 0.5}),
            (ValueError, "seed must be", {"seed": -(2**70)}),
            (TypeError, "seed must be a whole number", {"seed": True}),
            (ValueError, r"eps must be finite", {"eps": -1e-5}),
            (ValueError, r"eps must be finite", {"eps": math.nan, "depth": 0}),
            (ValueError, r"dropout must be in", {"dropout": 1.5}),
            (ValueError, "mlp_dim must be at least 1", {"mlp_dim": 0, "mlp": True}),
            (ValueError, "bias_std must be finite", {"bias_std": math.inf}),
            (TypeError, "skip must be True or False", {"skip": "yes"}),
            (TypeError, "bias must be True or False", {"bias": "yes"}),
            (TypeError, "final_norm must be True or False", {"final_norm": "no"}),
        ):
            with pytest.raises(error, match=match):
                san(**changes)

    def test_depth_zero_checks_too(self):
        with pytest.raises(ValueError, match="heads must be at least 1"):
            SAN(0, 0, 4)
        with pytest.raises(ValueError, match="heads=3 does not divide dim=4"):
            SAN(0, 3, 4)

    def test_tokens(self):
        network = san()
        with pytest.raises(ValueError, match=r"X is .*\(7, 10\); expected \[\*batch, n, 11\]"):
            network(tokens(d=10))
        with pytest.raises(ValueError, match=r"X must be finite, but X\[0, 0\] is nan"):
            network.trace(tokens() * math.nan)
        with pytest.raises(TypeError, match="X must hold floating-point numbers"):
            network(torch.ones(N, D, dtype=torch.int64))
        with pytest.raises(TypeError, match=r"X is a float32 .* but the weights are float64"):
            network(tokens().float())
        with pytest.raises(TypeError, match="mask must be boolean"):
            network(tokens(), torch.ones(N, N))
