"""Each attention pattern against an independent implementation, or against what defines it."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rc_lib.variants import VARIANTS, variant
from rc_lib.variants.kernels import positive_features
from rc_lib.variants.learned import averages

B, H, N, D, K = 2, 3, 7, 5, 4  # batch, heads, tokens, features, head features; D, H, N are different primes
# Sums of a dozen products of numbers near 1 in float64, in another order: a few hundred ulp at most.
CLOSE = {"rtol": 1e-12, "atol": 1e-13}


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def case():
    """Tokens, weights, and the queries and keys that they give, made with einsum."""
    X, W_Q, W_K, b_Q, b_K = (
        gaussian(*shape, seed=i) for i, shape in enumerate([(B, N, D), (H, D, K), (H, D, K), (H, K), (H, K)])
    )
    Q, K_ = (torch.einsum("bnd,hdk->bhnk", X, W) + b[None, :, None] for W, b in ((W_Q, b_Q), (W_K, b_K)))
    return (X, W_Q, W_K, b_Q, b_K), Q, K_


def build(name, **options):
    return VARIANTS[name].build(H, D, K, N, seed=3, **options)


def sdpa(Q, K_, bias=None, **settings):
    """PyTorch's attention with values 1, 0, …: its output is the attention matrix."""
    return F.scaled_dot_product_attention(
        Q, K_, torch.eye(N, dtype=Q.dtype).expand(B, H, N, N), attn_mask=bias, **settings
    )


def agree(P, expected):
    torch.testing.assert_close(P, expected.expand_as(P), **CLOSE)


def mask_by_loop(rule):
    return torch.tensor([[rule(i, j) for j in range(N)] for i in range(N)])


MASKS = {
    "softmax": lambda i, j: True,
    "causal": lambda i, j: j <= i,
    "window": lambda i, j: j in (i - 1, i, i + 1),
    # stride round(√7) = 3: the last three tokens, then every third
    "strided": lambda i, j: j in (i, i - 1, i - 2, i - 3, i - 6),
}


@pytest.mark.parametrize("name", MASKS)
def test_masked_softmax_is_pytorchs(name, case):
    weights, Q, K_ = case
    agree(build(name)(*weights), sdpa(Q, K_, mask_by_loop(MASKS[name])))


def test_strided_keeps_the_stride_it_is_given(case):
    weights, Q, K_ = case
    may = mask_by_loop(lambda i, j: j <= i and (i - j <= 2 or (i - j) in (4, 6)))
    agree(build("strided", stride=2)(*weights), sdpa(Q, K_, may))


def test_bigbird_is_a_window_global_tokens_and_random_keys(case):
    weights, Q, K_ = case
    pattern = build("bigbird", width=3, globals_=1, random=2)
    may = pattern.own_mask(N)
    agree(pattern(*weights), sdpa(Q, K_, may))
    sure = mask_by_loop(lambda i, j: abs(i - j) <= 1 or i == 0 or j == 0)
    assert bool((may | ~sure).all())
    extra = (may & ~sure).sum(-1)
    assert extra[0] == 0
    assert extra.max() <= 2
    assert extra.sum() > 0
    assert torch.equal(may, pattern.own_mask(N))
    assert not torch.equal(may, VARIANTS["bigbird"].build(H, D, K, seed=4, random=2).own_mask(N))
    assert torch.equal(build("bigbird", random=0).own_mask(N), sure)


def test_alibi_is_attention_with_a_bias_by_distance(case):
    weights, Q, K_ = case
    bias = torch.tensor(
        [[[-(2 ** (-8 * h / H)) * abs(i - j) for j in range(N)] for i in range(N)] for h in range(1, H + 1)],
        dtype=torch.float64,
    )
    agree(build("alibi")(*weights), sdpa(Q, K_, bias))
    slopes = torch.tensor([0.5, 0.25, 2.0], dtype=torch.float64)
    i = torch.arange(N)
    agree(
        build("alibi", slopes=slopes)(*weights), sdpa(Q, K_, -slopes[:, None, None] * (i - i[:, None]).abs())
    )


def test_rope_is_llamas(case):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    weights, Q, K_ = case
    config = LlamaConfig(hidden_size=H * K, num_attention_heads=H, head_dim=K, rope_theta=10_000.0)
    cos, sin = LlamaRotaryEmbedding(config)(Q, torch.arange(N)[None])
    # Hugging Face computes the angles in float32: up to 6 · 6e-8 off.
    expected = sdpa(*apply_rotary_pos_emb(Q, K_, cos, sin))
    torch.testing.assert_close(build("rope")(*weights), expected, rtol=1e-5, atol=1e-6)


def test_rope_turns_and_knows_only_differences(case):
    _, Q, _ = case
    pattern = build("rope")
    turned = pattern.turn(Q)
    torch.testing.assert_close(turned.norm(dim=-1), Q.norm(dim=-1), **CLOSE)
    torch.testing.assert_close(turned[..., 0, :], Q[..., 0, :], **CLOSE)
    same = pattern.turn(Q[..., :1, :].expand(Q.shape))
    S = same @ same.mT
    torch.testing.assert_close(S[..., 1:, 1:], S[..., :-1, :-1], **CLOSE)
    # one pair of features, a tenth of a turn: by hand
    one = VARIANTS["rope"].build(1, 2)
    A = torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(one.turn(A)[1], torch.tensor([math.cos(1), math.sin(1)], dtype=torch.float64))


@pytest.mark.parametrize(("buckets", "reach"), [(32, 128), (8, 5)])
def test_relative_bias_is_t5s(buckets, reach, case):
    from transformers.models.t5.modeling_t5 import T5Attention

    weights, Q, K_ = case
    pattern = build("t5", buckets=buckets, reach=reach)
    for n in (N, 301):
        i = torch.arange(n)
        theirs = T5Attention._relative_position_bucket(i - i[:, None], True, buckets, reach)
        assert torch.equal(pattern.bucket(n), theirs)
    i = torch.arange(N)
    bucket = T5Attention._relative_position_bucket(i - i[:, None], True, buckets, reach)
    agree(pattern(*weights), sdpa(Q, K_, pattern.bias.detach()[bucket].permute(2, 0, 1)))


def test_gated_positional_mixes_two_softmaxes(case):
    weights, Q, K_ = case
    pattern = build("gated_positional", gate=0.3, locality=0.7)
    g = 1 / (1 + math.exp(-0.3))
    positional = torch.tensor(
        [
            [[math.exp(-0.7 * (j - i - shift) ** 2) for j in range(N)] for i in range(N)]
            for shift in (-1, 0, 1)
        ],
        dtype=torch.float64,
    )
    positional = positional / positional.sum(-1, keepdim=True)
    agree(pattern(*weights), (1 - g) * sdpa(Q, K_) + g * positional)


def test_l2_distance_is_the_softmax_of_distances(case):
    weights, Q, K_ = case
    agree(build("l2")(*weights), (-torch.cdist(Q, Q).square() / math.sqrt(K)).softmax(-1))
    agree(build("l2", tied=False)(*weights), (-torch.cdist(Q, K_).square() / math.sqrt(K)).softmax(-1))


def test_cosine_is_pytorchs_cosine(case):
    weights, Q, K_ = case
    cosine = F.cosine_similarity(Q[..., :, None, :], K_[..., None, :, :], dim=-1)
    agree(build("cosine", sharpness=2.5)(*weights), (2.5 * cosine).softmax(-1))


def test_temperature_is_pytorchs_scale(case):
    weights, Q, K_ = case
    agree(build("temperature", temperature=0.3)(*weights), sdpa(Q, K_, scale=1 / (0.3 * math.sqrt(K))))


def test_sigma_reparam_sets_the_spectral_norm(case):
    (X, W_Q, W_K, b_Q, b_K), *_ = case
    P = build("sigma_reparam", gamma=1.7)(X, W_Q, W_K, b_Q, b_K)
    sizes = [np.linalg.svd(W.numpy(), compute_uv=False)[:, 0] for W in (W_Q, W_K)]
    W_Q, W_K = (1.7 * W / torch.as_tensor(s)[:, None, None] for W, s in zip((W_Q, W_K), sizes, strict=True))
    agree(P, build("softmax")(X, W_Q, W_K, b_Q, b_K))


def features(A):
    """elu + 1, from its definition."""
    return torch.where(A > 0, A + 1, A.exp())


def test_linear_attention_never_needs_the_matrix(case):
    """The order of multiplication that makes it linear: keys and values first."""
    weights, Q, K_ = case
    V = gaussian(B, H, N, 2, seed=9)
    phi_Q, phi_K = features(Q), features(K_)
    numerator = phi_Q @ (phi_K.mT @ V)
    agree(build("linear")(*weights) @ V, numerator / (phi_Q @ phi_K.sum(-2)[..., None]))
    agree(build("linear_unnormalised")(*weights) @ V, numerator / (N * K))


def test_performer_by_loop(case):
    weights, Q, K_ = case
    pattern = build("performer", features=6)
    assert pattern.omega.shape == (H, K, 6)
    phi = []
    for A in (Q, K_):
        a = A / K**0.25
        logs = [
            a @ w.unsqueeze(-1) - a.square().sum(-1, keepdim=True) / 2 for w in pattern.omega.mT.unbind(1)
        ]
        phi.append(torch.cat(logs, -1).exp())
    kernel = phi[0] @ phi[1].mT
    agree(pattern(*weights), kernel / kernel.sum(-1, keepdim=True))


def test_performers_features_estimate_the_exponential_kernel():
    a, b = gaussian(1, 4, seed=1) / 2, gaussian(1, 4, seed=2) / 2
    omega = gaussian(1, 4, 200_000, seed=3)
    product = (positive_features(a, omega) + positive_features(b, omega)).exp()
    error = product.std() / math.sqrt(product.numel())
    # An unbiased mean of 200,000 draws is within five standard errors, but for once in a million seeds.
    assert abs(product.mean() - (a @ b.mT).exp().item()) < 5 * error
    assert error < 0.01


def test_performer_tends_to_the_softmax(case):
    (X, W_Q, W_K, *_), *_ = case
    small = X / 3, W_Q / 3, W_K / 3  # the estimate's variance grows like the exponential of |q + k|²
    far = build("performer", features=20_000)(*small) - build("softmax")(*small)
    few = build("performer", features=20)(*small) - build("softmax")(*small)
    # 1000 times the features: √1000 ≈ 32 times closer, half of that to be safe against a lucky draw.
    assert far.square().mean().sqrt() < few.square().mean().sqrt() / 16


def test_sinkhorn_in_the_log_domain(case):
    weights, Q, K_ = case
    S = Q @ K_.mT / math.sqrt(K)
    for _ in range(4):
        S = S - S.logsumexp(-1, keepdim=True)
        S = S - S.logsumexp(-2, keepdim=True)
    agree(build("sinkhorn", iterations=4)(*weights), (S - S.logsumexp(-1, keepdim=True)).exp())


def test_sinkhorn_is_doubly_stochastic_in_the_limit(case):
    (X, *rest), *_ = case
    P = build("sinkhorn", iterations=500)(X / 2, *rest)
    ones = torch.ones(B, H, N, dtype=torch.float64)
    torch.testing.assert_close(P.sum(-1), ones)
    torch.testing.assert_close(P.sum(-2), ones)
    # It is diag(u) e^S diag(v): the logarithm differs from the scores by row and column constants.
    L = P.log() - build("softmax")(X / 2, *rest).log()
    L = L - L.mean(-1, keepdim=True)
    torch.testing.assert_close(L, L.mean(-2, keepdim=True).expand_as(L), rtol=0, atol=1e-10)


def test_sinkhorn_without_iterations_is_the_softmax(case):
    weights, Q, K_ = case
    agree(build("sinkhorn", iterations=0)(*weights), sdpa(Q, K_))


def test_differential_is_two_softmaxes(case):
    weights, Q, K_ = case
    P = build("differential", subtract=0.3)(*weights)
    agree(P, sdpa(Q[..., :2], K_[..., :2]) - 0.3 * sdpa(Q[..., 2:], K_[..., 2:]))
    agree(P.sum(-1), torch.tensor(0.7, dtype=torch.float64))


def test_shaped_is_identity_and_centred_softmax(case):
    weights, Q, K_ = case
    eye = torch.eye(N, dtype=torch.float64)
    agree(build("shaped", temperature=2.0)(*weights), eye + sdpa(Q, K_, scale=0.5 / math.sqrt(K)) - 1 / N)
    flat = build("shaped", temperature=1e12)(*weights)
    torch.testing.assert_close(flat, eye.expand_as(flat), rtol=0, atol=1e-10)


def test_off_by_one_is_a_softmax_with_one_key_more(case):
    weights, Q, K_ = case
    nothing = Q.new_zeros(B, H, 1, K)
    V = torch.cat([torch.eye(N), torch.zeros(1, N)]).double().expand(B, H, N + 1, N)
    agree(build("off_by_one")(*weights), F.scaled_dot_product_attention(Q, torch.cat([K_, nothing], -2), V))
    S = (Q @ K_.mT / math.sqrt(K)).exp()
    agree(build("off_by_one")(*weights), S / (1 + S.sum(-1, keepdim=True)))


def test_sigmoid_is_the_logistic_function_of_each_score(case):
    weights, Q, K_ = case
    S = Q @ K_.mT / math.sqrt(K)
    agree(build("sigmoid")(*weights), S.exp() / (N + S.exp()))


def test_pooling_is_pytorchs_average_pooling(case):
    weights, *_ = case
    V = gaussian(B, N, 2, seed=9)
    P = build("pooling", width=5)(*weights)
    pooled = F.avg_pool1d(V.mT, 5, stride=1, padding=2, count_include_pad=False).mT
    agree(P @ V[:, None], pooled[:, None])


def test_linformer_projects_keys_and_values(case):
    weights, Q, K_ = case
    V = gaussian(B, H, N, 2, seed=9)
    pattern = build("linformer", rank=3)
    E, G = pattern.E.detach(), pattern.F.detach()
    assert E.shape == G.shape == (3, N)
    # as its own code does: project, then attend to three keys
    expected = F.scaled_dot_product_attention(Q, E @ K_, G @ V)
    agree(pattern(*weights) @ V, expected)


def test_pooled_linformer_pools(case):
    A = gaussian(1, 5, 12, seed=9)
    agree(A @ averages(4, 12).T, F.adaptive_avg_pool1d(A, 4))
    # five tokens in three runs: 2, 2 and 1, by hand
    halves = [[0.5, 0.5, 0, 0, 0], [0, 0, 0.5, 0.5, 0], [0, 0, 0, 0, 1]]
    assert averages(3, 5).tolist() == halves
    weights, *_ = case
    agree(build("linformer_pooled")(*weights).sum(-1), torch.ones(1, dtype=torch.float64))


def test_dense_synthesizer_is_a_network_on_each_token(case):
    weights, *_ = case
    X = weights[0]
    pattern = build("synthesizer_dense", hidden=11)
    assert pattern.A.shape == (H, D, 11)
    for h in range(H):
        hidden = F.relu(F.linear(X, pattern.A[h].T, pattern.a[h]))
        expected = F.linear(hidden, pattern.B[h].T, pattern.b[h]).softmax(-1)
        agree(pattern(*weights)[:, h], expected)


def test_random_synthesizer_ignores_its_input(case):
    (X, *rest), *_ = case
    pattern = build("synthesizer_random")
    agree(pattern(X, *rest), pattern.table.softmax(-1))
    assert torch.equal(pattern(X, *rest), pattern(X * 3 + 1, *rest))


def test_every_variant_has_an_oracle_here():
    source = Path(__file__).read_text()
    assert [name for name in VARIANTS if f'"{name}"' not in source] == []
    assert variant("softmax") is VARIANTS["softmax"]
