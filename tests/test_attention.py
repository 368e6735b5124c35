"""One layer of attention: by hand, by loops, against PyTorch and Hugging Face, and its invariances."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rc_lib import attention, masks
from rc_lib.attention import MultiHeadAttention

# A distinct prime for every axis: batch, heads, tokens, features, d_qk, d_v, d'.
B, H, N, D, DQK, DV, DOUT = 2, 3, 5, 7, 11, 13, 17
# Sums of at most D·DQK·… < 1e4 products of numbers of size one: rounding stays well below 1e-12.
TOL = {"rtol": 1e-12, "atol": 1e-12}
quick = settings(deadline=None, max_examples=40, derandomize=True)


def layer(**changes) -> MultiHeadAttention:
    options = {"value_dim": DV, "out_dim": DOUT, "bias_std": 0.7, "seed": 3} | changes
    return MultiHeadAttention(H, D, DQK, **options)


def tokens(*batch, n=N, d=D, seed=0) -> torch.Tensor:
    return torch.randn(*batch, n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def weights(m: MultiHeadAttention) -> dict:
    return {k: v.detach() for k, v in m.state_dict().items()}


def by_loops(X, m, may=None):
    """The definition, token by token and head by head, in plain Python floats."""
    w = weights(m)
    n, out = len(X), torch.zeros(len(X), m.W_O.shape[-1], dtype=X.dtype)
    for h in range(m.heads):
        q = [X[i] @ w["W_Q"][h] + w["b_Q"][h] for i in range(n)]
        k = [X[j] @ w["W_K"][h] + w["b_K"][h] for j in range(n)]
        v = [X[j] @ w["W_V"][h] + w["b_V"][h] for j in range(n)]
        for i in range(n):
            keys = [j for j in range(n) if may is None or may[h, i, j]]
            e = [math.exp(float(q[i] @ k[j]) / math.sqrt(q[i].numel())) for j in keys]
            for weight, j in zip(e, keys, strict=True):
                out[i] += weight / sum(e) * (v[j] @ w["W_O"][h])
    return out + w["b_O"]


def test_by_hand():
    """Two tokens, one feature: the score of token 1 about token 2 is ln 3, so it attends 1/4 to 3/4."""
    X = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    b_Q = torch.tensor([[math.log(3)]], dtype=torch.float64)
    P = attention.attention_matrix(X, 0 * one, one, b_Q)
    torch.testing.assert_close(P[0], torch.tensor([[0.25, 0.75]] * 2, dtype=torch.float64), **TOL)
    Y = attention.self_attention(X, 0 * one, one, 2 * one, 4 * one, b_Q, b_O=one[0, 0])
    torch.testing.assert_close(Y, torch.full((2, 1), 8 * 0.75 + 1, dtype=torch.float64), **TOL)


def test_scores_divide_by_root_of_head_size():
    X = torch.eye(4, dtype=torch.float64)[:2]
    W = torch.eye(4, dtype=torch.float64)[None]
    torch.testing.assert_close(attention.scores(X, 6 * W, W)[0], 3 * torch.eye(2, dtype=torch.float64), **TOL)


@pytest.mark.parametrize("batch", [(), (B,), (B, 19)])
def test_equals_loops_on_prime_axes(batch):
    m, X = layer(), tokens(*batch)
    Y, P = m.attend(X)
    assert Y.shape == (*batch, N, DOUT)
    assert P.shape == (*batch, H, N, N)
    first = X[(0,) * len(batch)]
    torch.testing.assert_close(Y[(0,) * len(batch)].detach(), by_loops(first, m), **TOL)
    torch.testing.assert_close(Y, attention.self_attention(X, **weights(m)), **TOL)


def test_sum_of_heads_is_the_layer():
    m, X = layer(), tokens(B)
    Y, P = m.attend(X)
    assert m.W_h.shape == (H, D, DOUT)
    torch.testing.assert_close(attention.sum_of_heads(X, P, m.W_h, m.b), Y, **TOL)


def test_reduced_scores_differ_by_row_constants():
    m, X = layer(), tokens(B)
    S = attention.scores(X, m.W_Q, m.W_K, m.b_Q, m.b_K)
    gap = S - attention.reduced_scores(X, m.W_Q, m.W_K, m.b_Q)
    assert gap.abs().max() > 1
    torch.testing.assert_close(gap, gap[..., :1].expand_as(gap), **TOL)
    assert m.W_QK.shape == (H, D, D)


@pytest.mark.parametrize("masked", [False, True])
def test_equals_torch(masked):
    """PyTorch's own multi-head attention on copied weights; its padding mask says who is hidden."""
    E, heads = 30, 5
    oracle = torch.nn.MultiheadAttention(E, heads, batch_first=True, dtype=torch.float64)
    torch.nn.init.normal_(oracle.in_proj_bias)
    torch.nn.init.normal_(oracle.out_proj.bias)
    m = attention.from_torch(oracle)
    X = tokens(B, d=E)
    causal, real = masks.causal(N), torch.arange(N) < torch.tensor([[N], [N - 2]])
    kwargs = {"attn_mask": ~causal, "key_padding_mask": ~real} if masked else {}
    Y, P = oracle(X, X, X, average_attn_weights=False, **kwargs)
    ours = m.attend(X, causal, real) if masked else m.attend(X)
    torch.testing.assert_close(ours[0], Y, **TOL)
    torch.testing.assert_close(ours[1], P, **TOL)


def test_from_torch_without_bias():
    oracle = torch.nn.MultiheadAttention(6, 2, bias=False, batch_first=True, dtype=torch.float64)
    X = tokens(B, d=6)
    torch.testing.assert_close(attention.from_torch(oracle)(X), oracle(X, X, X)[0], **TOL)


def test_from_torch_refuses_what_it_cannot_hold():
    with pytest.raises(ValueError, match="kdim"):
        attention.from_torch(torch.nn.MultiheadAttention(6, 2, kdim=4))
    with pytest.raises(ValueError, match="add_bias_kv"):
        attention.from_torch(torch.nn.MultiheadAttention(6, 2, add_bias_kv=True))


@quick
@given(seed=st.integers(0, 10**6), gain=st.floats(0, 30), n=st.integers(1, 8))
def test_rows_sum_to_one(seed, gain, n):
    m, X = layer(seed=seed, gain=gain), tokens(B, n=n, seed=seed)
    P = m.attend(X)[1]
    assert (P >= 0).all()
    torch.testing.assert_close(P.sum(-1), torch.ones_like(P[..., 0]), **TOL)


@quick
@given(seed=st.integers(0, 10**6))
def test_key_bias_changes_nothing(seed):
    m, X = layer(seed=seed), tokens(B, seed=seed)
    w = weights(m)
    torch.testing.assert_close(attention.self_attention(X, **(w | {"b_K": 10 * w["b_K"]})), m(X), **TOL)


@quick
@given(seed=st.integers(0, 10**6), order=st.permutations(range(N)))
def test_permutation_equivariance(seed, order):
    m, X = layer(seed=seed), tokens(B, seed=seed)
    Y, P = m.attend(X)
    Z, Q = m.attend(X[:, order])
    torch.testing.assert_close(Z, Y[:, order], **TOL)
    torch.testing.assert_close(Q, P[:, :, order][..., order], **TOL)


@quick
@given(seed=st.integers(0, 10**6), gain=st.floats(0, 10))
def test_equal_tokens_stay_equal(seed, gain):
    """Residual zero in, residual zero out: rows that are equal to the last bit come out equal."""
    m = layer(seed=seed, gain=gain)
    X = tokens(B, n=1, seed=seed).expand(B, N, D)
    Y, P = m.attend(X)
    torch.testing.assert_close(P, torch.full_like(P, 1 / N), **TOL)
    torch.testing.assert_close(Y, X @ m.W_h.sum(0) + m.b, rtol=1e-11, atol=1e-11 * (1 + gain**2))


def test_mask_equals_loops():
    m, X = layer(), tokens(B)
    may = torch.rand(B, H, N, N, generator=torch.Generator().manual_seed(1)) < 0.5
    may |= torch.eye(N, dtype=torch.bool)
    Y, P = m.attend(X, may)
    assert (P[~may] == 0).all()
    for b in range(B):
        torch.testing.assert_close(Y[b].detach(), by_loops(X[b], m, may[b]), **TOL)


def test_mask_forms_agree():
    m, X = layer(), tokens(B)
    causal = masks.causal(N)
    expected = m(X, causal.expand(B, H, N, N))
    assert not torch.allclose(expected, m(X))
    for form in (causal, causal.expand(B, N, N)):
        assert torch.equal(m(X, form), expected)
    assert torch.equal(m(X[0], causal.expand(H, N, N)), m(X[0], causal))


def test_causal_output_ignores_the_future():
    m, X = layer(), tokens(B)
    changed = X.clone()
    changed[:, 3:] += 5
    Y, Z = m(X, masks.causal(N)), m(changed, masks.causal(N))
    assert torch.equal(Y[:, :3], Z[:, :3])
    assert not torch.allclose(Y[:, 3:], Z[:, 3:])


def test_padded_keys_do_not_matter():
    m, X = layer(), tokens(B)
    real = torch.arange(N) < torch.tensor([[N - 1], [2]])
    changed = torch.where(real[..., None], X, 100.0)
    assert torch.equal(m(X, key_padding_mask=real)[real], m(changed, key_padding_mask=real)[real])
    torch.testing.assert_close(m(X, key_padding_mask=real)[1, :2], m(X[1, :2]), **TOL)


def test_row_masked_everywhere_gives_the_output_bias():
    """The documented answer: attention zero, value b_O, finite gradients; other rows as ever."""
    m, X = layer(), tokens(B).requires_grad_()
    may = torch.ones(N, N, dtype=torch.bool)
    may[2] = False
    Y, P = m.attend(X, may)
    assert (P[:, :, 2] == 0).all()
    assert torch.equal(Y[:, 2], m.b_O.expand(B, DOUT))
    keep = [0, 1, 3, 4]
    torch.testing.assert_close(Y[:, keep], m(X)[:, keep], **TOL)
    Y.square().sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in (X, *m.parameters()))
    nothing = m(X, key_padding_mask=torch.zeros(B, N, dtype=torch.bool))
    assert torch.equal(nothing, m.b_O.expand(B, N, DOUT))


def test_no_nan_on_the_way_back():
    """Not even one that a later step hides: a row of -inf would make the softmax's own gradient NaN."""
    m, X = layer(), tokens(B).requires_grad_()
    with torch.autograd.set_detect_anomaly(True):
        m(X, torch.zeros(N, N, dtype=torch.bool)).square().sum().backward()
    assert torch.isfinite(X.grad).all()


def test_gradients_are_right_under_a_mask():
    m = MultiHeadAttention(2, 3, 2, bias_std=0.3)
    may = torch.tensor([[True, False], [False, False]])
    X = tokens(n=2, d=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda X: m(X, may), (X,))


def test_seed_decides_the_weights_alone():
    torch.manual_seed(1)
    a, state = layer(seed=5), torch.get_rng_state()
    torch.manual_seed(2)
    b = layer(seed=5)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.W_Q, layer(seed=6).W_Q)
    torch.manual_seed(1)
    layer(seed=9)
    assert torch.equal(state, torch.get_rng_state())  # and drawing moves no one else's random numbers
    half = layer(seed=5, dtype=torch.float16)
    assert torch.equal(half.W_V, a.W_V.half())


def test_initial_scale():
    m = MultiHeadAttention(4, 400, 100, value_dim=50, gain=3.0)
    for W, fan_in in ((m.W_Q, 400), (m.W_K, 400), (m.W_V, 400), (m.W_O, 200)):
        # 80,000 draws or more: the sample deviation is within 1% of σ (four standard errors).
        assert float(W.detach().std() * math.sqrt(fan_in)) == pytest.approx(3.0, rel=0.01)
    assert all((b == 0).all() for b in (m.b_Q, m.b_K, m.b_V, m.b_O))


def test_without_bias_the_biases_are_zero_buffers():
    m = layer(bias=False)
    assert {name for name, _ in m.named_parameters()} == {"W_Q", "W_K", "W_V", "W_O"}
    assert (m.b == 0).all()
    assert torch.equal(m.W_O, layer().W_O)


def test_from_weights_copies():
    m = layer()
    twin = MultiHeadAttention.from_weights(**weights(m))
    assert torch.equal(twin(tokens(B)), m(tokens(B)))
    with torch.no_grad():
        m.W_Q.zero_()
    assert twin.W_Q.abs().max() > 0
    with pytest.raises(TypeError, match="unknown weight 'c_Q'"):
        MultiHeadAttention.from_weights(m.W_Q, m.W_K, m.W_V, m.W_O, c_Q=m.b_Q)
    with pytest.raises(ValueError, match=r"b_Q is .*\(17,\); expected \(3, 11\)"):
        MultiHeadAttention.from_weights(m.W_Q, m.W_K, m.W_V, m.W_O, b_Q=m.b_O)


def test_dropout_only_in_training():
    m, X = layer(dropout=0.5), tokens(B)
    plain = layer()
    assert torch.equal(m.eval()(X), plain(X))
    assert not torch.allclose(m.train()(X), plain(X))
    assert torch.equal(copy.deepcopy(m).eval()(X), plain(X))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_stays_in_its_type(dtype):
    m = layer(dtype=dtype)
    Y = m(tokens(B).to(dtype))
    assert Y.dtype == dtype
    # A few hundred roundings of relative size eps.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(Y.double(), layer()(tokens(B)), rtol=100 * eps, atol=100 * eps)


@pytest.mark.usefixtures("plain_types")
class TestBadInput:
    def test_shapes(self):
        m = layer()
        with pytest.raises(ValueError, match=r"W_Q is .*\(3, 7, 11\); expected \[heads, 6, ...\]"):
            m(tokens(B, d=6))
        with pytest.raises(ValueError, match=r"X must have shape \[\*batch, n, d\]"):
            m(tokens(B)[0, 0])
        with pytest.raises(ValueError, match=r"W_Q is .*W_K is .*differ"):
            attention.scores(tokens(B), m.W_Q, m.W_K[:2])
        with pytest.raises(ValueError, match=r"W_Q is .*W_K is .*differ"):
            attention.scores(tokens(B), m.W_Q, m.W_K[..., :4])
        with pytest.raises(ValueError, match=r"W_V is .*W_O is .*differ"):
            attention.self_attention(tokens(B), m.W_Q, m.W_K, m.W_V, m.W_O[:, :4])
        with pytest.raises(ValueError, match=r"b is .*\(3, 4\)"):
            attention.project(tokens(B), m.W_Q, m.b_Q[:, :4])
        with pytest.raises(ValueError, match=r"W is .*P is .*differ"):
            attention.sum_of_heads(tokens(B), m.attend(tokens(B))[1][:, :2], m.W_h)
        with pytest.raises(ValueError, match="X must not be empty"):
            m(tokens(B, n=0))

    def test_dtypes(self):
        m = layer()
        with pytest.raises(TypeError, match="X must hold floating-point numbers"):
            m(torch.ones(N, D, dtype=torch.int64))
        with pytest.raises(TypeError, match="dtypes must agree"):
            m(tokens(B).float())
        with pytest.raises(TypeError, match="W must hold floating-point"):
            attention.project(tokens(B), m.W_Q.detach().long())

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_not_finite(self, bad):
        X = tokens(B)
        X[1, 2, 3] = bad
        with pytest.raises(ValueError, match=r"X must be finite, but X\[1, 2, 3\]"):
            layer()(X)

    def test_masks(self):
        m, X = layer(), tokens(B)
        with pytest.raises(TypeError, match="mask must be boolean"):
            m(X, torch.zeros(N, N))
        with pytest.raises(TypeError, match="key_padding_mask must be boolean"):
            m(X, key_padding_mask=torch.ones(B, N))
        with pytest.raises(ValueError, match=r"mask is .*\(4, 4\); expected \[5, 5\]"):
            m(X, masks.causal(4))
        with pytest.raises(ValueError, match="but there are 3 heads"):
            m(X, masks.causal(N).expand(B, 2, N, N))
        with pytest.raises(ValueError, match=r"mask is .*batch"):
            m(X, masks.causal(N).expand(4, N, N))
        with pytest.raises(ValueError, match=r"key_padding_mask is .*expected \(2, 5\)"):
            m(X, key_padding_mask=torch.ones(N, dtype=torch.bool))

    def test_sizes(self):
        with pytest.raises(ValueError, match="heads=3 does not divide dim=7: give head_dim"):
            MultiHeadAttention(3, 7)
        with pytest.raises(ValueError, match="heads must be at least 1"):
            MultiHeadAttention(0, 7)
        with pytest.raises(ValueError, match="value_dim must be at least 1"):
            MultiHeadAttention(1, 7, value_dim=0)
        with pytest.raises(TypeError, match="dim must be a whole number"):
            MultiHeadAttention(1, 7.0)
        with pytest.raises(ValueError, match="gain must be finite and not negative"):
            MultiHeadAttention(1, 7, gain=-1.0)
        with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\)"):
            MultiHeadAttention(1, 7, dropout=1.0)
        with pytest.raises(TypeError, match="dtype must be a floating-point type"):
            MultiHeadAttention(1, 7, dtype=torch.int64)


def test_nan_passes_through_the_equations():
    """Documented: the functions propagate, so that a run that overflows is seen in its result."""
    X = tokens(B)
    X[1, 2, 3] = math.nan
    Y = layer().attend(X)[0]
    assert torch.isnan(Y[1]).all()
    assert torch.isfinite(Y[0]).all()


def test_print():
    assert repr(layer()) == "MultiHeadAttention(heads=3, dim=7, head_dim=11, value_dim=13, out_dim=17)"
