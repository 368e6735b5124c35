import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rc_lib import norms, rank

EPS = torch.finfo(torch.float64).eps
CENTERS = ("mean", "median", "minimizer")
RANKS = (rank.numerical_rank, rank.stable_rank, rank.effective_rank, rank.participation_ratio)
SPECTRAL = (*RANKS, rank.rank_one_distance)
ALL = (*SPECTRAL, rank.relative_residual, rank.mean_cosine, rank.dirichlet_energy)
numbers = st.floats(-100, 100, allow_subnormal=False).map(lambda v: round(v, 3))
common = settings(deadline=None, derandomize=True, max_examples=40)


def matrices(n, d):
    return arrays(np.float64, (n, d), elements=numbers).map(torch.from_numpy)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def one_hot(n):
    X = torch.zeros(n, 1, dtype=torch.float64)
    X[0] = 1
    return X


# --- residual and centres ---------------------------------------------------------------------------------


def test_residual_by_hand():
    X = torch.tensor([[1.0, 5.0], [2.0, 6.0], [9.0, 1.0]], dtype=torch.float64)
    assert rank.residual(X).tolist() == [[-3, 1], [-2, 2], [5, -3]]
    assert rank.residual(X, "median").tolist() == [[-1, 0], [0, 1], [7, -4]]


def test_the_median_of_an_even_number_of_tokens_is_the_midpoint():
    X = normal(6, 5)
    expected = X.numpy() - np.median(X.numpy(), axis=0)
    np.testing.assert_allclose(rank.residual(X, "median").numpy(), expected, atol=1e-15)


@pytest.mark.parametrize(("center", "value"), [("mean", 1.2728), ("median", 1.0), ("minimizer", 1.0)])
def test_one_hot(center, value):
    # about the mean: ‖·‖_1 = 1.8 and ‖·‖_∞ = 0.9, so √1.62 = 1.27279…
    assert norms.composite_norm(rank.residual(one_hot(10), center)).item() == pytest.approx(value, abs=5e-5)


@pytest.mark.parametrize("shape", [(7, 5), (3, 7, 5), (2, 3, 7, 5)])
@pytest.mark.parametrize("center", CENTERS)
def test_batches_are_matrix_by_matrix(shape, center):
    X = normal(*shape)
    R = rank.residual(X, center)
    ratio = rank.relative_residual(X, center)
    assert R.shape == X.shape
    assert ratio.shape == shape[:-2]
    for index in np.ndindex(*shape[:-2]):
        # the linear programs see the same numbers; only the scaling by a power of two may differ
        torch.testing.assert_close(R[index], rank.residual(X[index], center), rtol=0, atol=1e-6)
        torch.testing.assert_close(ratio[index], rank.relative_residual(X[index], center), rtol=1e-6, atol=0)


def test_the_mean_residual_is_numpys():
    X = normal(3, 7, 5)
    A = X.numpy()
    np.testing.assert_allclose(rank.residual(X).numpy(), A - A.mean(-2, keepdims=True), atol=1e-15)


@common
@given(matrices(5, 3), arrays(np.float64, 3, elements=numbers))
def test_residual_ignores_a_common_row(X, v):
    shifted = X + torch.from_numpy(v)
    for center in ("mean", "median"):
        # entries of size ≤ 200: one rounding of the shift, one of each difference
        torch.testing.assert_close(
            rank.residual(shifted, center), rank.residual(X, center), rtol=0, atol=400 * EPS
        )
    # minimisers need not be unique; their norm is
    before = norms.composite_norm(rank.residual(X, "minimizer"))
    after = norms.composite_norm(rank.residual(shifted, "minimizer"))
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-11)


@common
@given(matrices(5, 3), st.sampled_from([-3.0, 0.5, 7.0, 1e-8, 1e8]))
def test_residual_is_homogeneous_and_the_ratio_is_scale_free(X, c):
    for center in CENTERS:
        size = norms.composite_norm(rank.residual(X, center))
        scaled = norms.composite_norm(rank.residual(c * X, center))
        torch.testing.assert_close(scaled, abs(c) * size, rtol=2e-6, atol=abs(c) * 1e-12)
        torch.testing.assert_close(
            rank.relative_residual(c * X, center), rank.relative_residual(X, center), rtol=2e-6, atol=1e-12
        )


@common
@given(matrices(5, 3))
def test_how_far_the_centres_are_from_the_best(X):
    mean, median, best = (rank.residual(X, center) for center in CENTERS)
    slack = 1 + 1e-6
    factor = 2 - 2 / 5  # ‖I − 11ᵀ/n‖_1 = 2 − 2/n
    size = norms.composite_norm(best)
    assert size <= norms.composite_norm(mean) * slack + 1e-12
    assert size <= norms.composite_norm(median) * slack + 1e-12
    assert norms.composite_norm(mean) <= factor * size * slack + 1e-12
    assert norms.composite_norm(median) <= 3**0.5 * size * slack + 1e-12
    assert norms.one_norm(median) <= norms.one_norm(best) * slack + 1e-12
    assert norms.one_norm(mean) <= factor * norms.one_norm(median) * slack + 1e-12
    assert norms.inf_norm(median) <= 3 * norms.inf_norm(best) * slack + 1e-12


@pytest.mark.parametrize("n", [2, 7])
def test_the_identity_attains_the_factor_of_the_mean(n):
    mean, best = (rank.residual(torch.eye(n).double(), center) for center in ("mean", "minimizer"))
    for norm in (norms.one_norm, norms.inf_norm, norms.composite_norm):
        assert norm(mean).item() == pytest.approx(2 - 2 / n)
    assert norms.composite_norm(best).item() == pytest.approx(1, rel=1e-6)


@common
@given(matrices(5, 3), arrays(np.float64, 3, elements=numbers))
def test_the_mean_minimises_the_frobenius_norm(X, x):
    other = torch.linalg.matrix_norm(X - torch.from_numpy(x))
    assert torch.linalg.matrix_norm(rank.residual(X)) <= other * (1 + 1e-12)


@pytest.mark.parametrize("center", CENTERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_equal_rows_give_exactly_zero(center, dtype):
    X = normal(1, 5, dtype=dtype).expand(7, 5) / 3
    assert not rank.residual(X, center).any()
    assert rank.relative_residual(X, center) == 0


def test_the_error_is_relative_to_the_differences_between_rows():
    steps = torch.arange(5, dtype=torch.float64)[:, None] * 2.0**-50
    X = 1 + steps.expand(5, 3)  # exact: 1 + k·2⁻⁵⁰
    expected = steps.expand(5, 3) - 2 * 2.0**-50
    assert torch.equal(rank.residual(X), expected)


def test_minimizer_has_a_size_limit():
    with pytest.raises(ValueError, match=r"n·d ≤ 4096, but X has shape \(64, 65\)"):
        rank.residual(normal(64, 65), "minimizer")


def test_unknown_center():
    with pytest.raises(ValueError, match="center must be one of 'mean', 'median', 'minimizer', but is str"):
        rank.residual(normal(3, 2), "mode")


# --- scale ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1.7e308, -1e300, 1.0, 3e-310, 5e-324, 0.0])
def test_unit_scale_is_undone_exactly(value):
    X = torch.tensor([[value, value / 4]], dtype=torch.float64)
    Y, k = rank.unit_scale(X)
    assert value == 0 or 0.5 <= Y.abs().max() < 1
    assert torch.equal(rank.unscale(Y, k), X)


@pytest.mark.parametrize("scale", [2.0**1000, 2.0**-1000])
@pytest.mark.parametrize("metric", [m for m in ALL if m is not rank.dirichlet_energy])
def test_huge_and_tiny_matrices(metric, scale):
    X = normal(2, 7, 5)
    factor = scale if metric is rank.rank_one_distance else 1
    torch.testing.assert_close(metric(scale * X), metric(X) * factor, rtol=1e-12, atol=0, check_dtype=False)


@pytest.mark.parametrize("metric", RANKS)
def test_ranks_of_matrices_whose_norm_is_no_float(metric):
    X = normal(67, 5).sign()
    top = torch.finfo(torch.float64).max
    torch.testing.assert_close(metric(top * X), metric(X), rtol=1e-12, atol=0)


def test_scaling_is_per_matrix():
    X = torch.stack([normal(7, 5) * 1e300, normal(7, 5) * 1e-300])
    for metric in (*RANKS, rank.relative_residual, rank.mean_cosine):
        first, second = metric(X).tolist()
        assert first == pytest.approx(second, rel=1e-12)


def test_one_huge_coordinate():
    X = torch.ones(5, 3, dtype=torch.float64)
    X[0, 0] = 1e300
    assert [metric(X).item() for metric in RANKS] == [1, 1, 1, 1]
    assert rank.rank_one_distance(X, relative=True) < 1e-15
    # the residual of (1e300, 1, 1, 1, 1) is that of a one-hot: ‖·‖_1 = 1.6, ‖·‖_∞ = 0.8
    assert rank.relative_residual(X).item() == pytest.approx((1.6 * 0.8) ** 0.5)
    assert rank.mean_cosine(X).item() == pytest.approx((4 / 3**0.5 + 6) / 10)


@pytest.mark.parametrize("center", CENTERS)
def test_opposite_extremes_do_not_overflow_on_the_way(center):
    big = torch.finfo(torch.float64).max
    X = torch.tensor([[big, 0.0], [-big, 0.0], [0.0, 0.0]], dtype=torch.float64)
    expected = X if center != "minimizer" else rank.residual(X / big, center) * big
    torch.testing.assert_close(rank.residual(X, center), expected, rtol=1e-6, atol=big * 1e-6)
    assert rank.relative_residual(X, center).item() == pytest.approx(1, abs=0.5)


def test_a_true_overflow_is_refused():
    with pytest.raises(ValueError, match=r"dirichlet_energy\(X\) exceeds the largest float64"):
        rank.dirichlet_energy(torch.tensor([[1e300], [0.0]], dtype=torch.float64))


# --- singular values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (3, 7, 5), (2, 3, 5, 7), (11, 1), (1, 11)])
def test_spectral_metrics_against_numpy(shape):
    X = normal(*shape)
    s = np.linalg.svd(X.numpy(), compute_uv=False)
    p = s / s.sum(-1, keepdims=True)
    oracle = {
        rank.numerical_rank: np.linalg.matrix_rank(X.numpy()),
        rank.stable_rank: (s**2).sum(-1) / s[..., 0] ** 2,
        rank.effective_rank: np.exp(scipy.stats.entropy(p, axis=-1)),
        rank.participation_ratio: (s**2).sum(-1) ** 2 / (s**4).sum(-1),
        rank.rank_one_distance: np.sqrt((s[..., 1:] ** 2).sum(-1)),
    }
    for metric, value in oracle.items():
        assert metric(X).shape == shape[:-2]
        np.testing.assert_allclose(metric(X).numpy(), value, rtol=1e-12, atol=0)
    np.testing.assert_allclose(
        rank.rank_one_distance(X, relative=True).numpy(),
        oracle[rank.rank_one_distance] / np.sqrt((s**2).sum(-1)),
        rtol=1e-12,
    )


def test_spectral_metrics_by_hand():
    X = torch.diag(torch.tensor([4.0, 2.0, 2.0, 0.0], dtype=torch.float64))
    assert rank.numerical_rank(X) == 3
    assert rank.stable_rank(X).item() == pytest.approx(24 / 16)
    assert rank.effective_rank(X).item() == pytest.approx(2**1.5)  # shares ½, ¼, ¼: entropy 1.5 log 2
    assert rank.participation_ratio(X).item() == pytest.approx(24**2 / (256 + 16 + 16))
    assert rank.rank_one_distance(X).item() == pytest.approx(8**0.5)
    assert rank.rank_one_distance(X, relative=True).item() == pytest.approx((8 / 24) ** 0.5)


def test_the_best_rank_one_matrix_beats_random_ones():
    X = normal(7, 5)
    U, s, Vh = torch.linalg.svd(X)
    best = torch.linalg.matrix_norm(X - s[0] * torch.outer(U[:, 0], Vh[0]))
    assert rank.rank_one_distance(X).item() == pytest.approx(best.item(), rel=1e-13)
    for seed in range(50):
        other = X - s[0] * torch.outer(normal(7, seed=seed), normal(5, seed=seed + 99)) / 35**0.5
        assert torch.linalg.matrix_norm(other) >= best


@common
@given(matrices(4, 3))
def test_order_of_the_ranks(X):
    stable, effective, participation, count = (
        metric(X).item()
        for metric in (rank.stable_rank, rank.effective_rank, rank.participation_ratio, rank.numerical_rank)
    )
    if not X.any():
        assert (stable, effective, participation, count) == (0, 0, 0, 0)
        return
    # all are sums of shares that reach 1 only together; numerical noise below the cut-off adds ~1e-12
    assert 1 <= stable <= participation * (1 + 1e-12)
    assert 1 - 1e-12 <= participation <= effective * (1 + 1e-12)
    assert effective <= 3 * (1 + 1e-12)


def test_equal_singular_values_reach_the_full_rank():
    Q, _ = torch.linalg.qr(normal(5, 5))
    for metric in RANKS:
        assert metric(3 * Q).item() == pytest.approx(5)


def test_rank_one_is_not_tokens_equal():
    X = torch.outer(torch.tensor([1.0, -1.0, 2.0]).double(), torch.tensor([1.0, 3.0]).double())
    assert rank.rank_one_distance(X, relative=True) < 4 * EPS
    assert rank.relative_residual(X) > 0.8
    equal = torch.tensor([[1.0, 3.0]]).double().expand(3, 2)
    assert rank.rank_one_distance(equal, relative=True) < 4 * EPS
    assert rank.relative_residual(equal) == 0


def test_numerical_rank_uses_the_eps_of_the_input():
    X = torch.diag(torch.tensor([1.0, 1e-4, 1e-9], dtype=torch.float64))
    assert [rank.numerical_rank(X.to(t)).item() for t in (torch.float16, torch.float32, torch.float64)] == [
        1,
        2,
        3,
    ]
    assert rank.numerical_rank(X, rtol=1e-3) == 1
    assert rank.numerical_rank(X, rtol=0.0) == 3
    for rtol in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"rtol must lie in \[0, 1\), but is"):
            rank.numerical_rank(X, rtol=rtol)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(128, 64), (64, 384), (512, 16)])
def test_equal_rows_survive_the_svd(dtype, shape, capfd):
    X = normal(1, shape[1], dtype=dtype).expand(shape).contiguous()
    floor = 50 * torch.finfo(norms.wide(dtype)).eps
    assert rank.rank_one_distance(X, relative=True) <= floor
    assert rank.numerical_rank(X) == 1
    for metric in (rank.stable_rank, rank.participation_ratio):
        assert metric(X).item() == pytest.approx(1, abs=floor)
    # entropy −p log p of 383 shares of size 1e-8 each
    assert rank.effective_rank(X).item() == pytest.approx(1, abs=2e-3)
    assert capfd.readouterr() == ("", "")


def test_an_svd_that_does_not_converge_falls_back(monkeypatch):
    X = normal(3, 7, 5)
    expected = {metric: metric(X) for metric in SPECTRAL}

    def fail(_):
        raise torch.linalg.LinAlgError("failed to converge: too many repeated singular values")

    monkeypatch.setattr(torch.linalg, "svdvals", fail)
    for metric, value in expected.items():
        torch.testing.assert_close(metric(X), value, rtol=1e-12, atol=0)


# --- mean cosine and Dirichlet energy ---------------------------------------------------------------------


def test_mean_cosine_by_hand_and_against_the_matrix():
    X = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0]], dtype=torch.float64)
    assert rank.mean_cosine(X).item() == pytest.approx(2 * 0.5**0.5 / 3)
    Y = normal(3, 7, 5)
    C = torch.nn.functional.cosine_similarity(Y[:, :, None], Y[:, None], dim=-1)
    expected = (C.sum((-1, -2)) - 7) / 42
    torch.testing.assert_close(rank.mean_cosine(Y), expected, rtol=0, atol=1e-15 * 42)


def test_mean_cosine_never_leaves_its_range():
    for seed in range(20):
        for dtype in (torch.float32, torch.float64):
            X = normal(1, 5, seed=seed, dtype=dtype).expand(13, 5)
            # 13 unit vectors, each long or short by a rounding error: without a clamp, 1 + 1e-7
            assert 1 - 1e-6 <= rank.mean_cosine(X) <= 1


def test_mean_cosine_edges():
    assert rank.mean_cosine(normal(1, 5)) == 1
    assert rank.mean_cosine(torch.zeros(3, 5)) == 0
    assert rank.mean_cosine(torch.tensor([[1.0], [-2.0]])) == -1
    assert rank.mean_cosine(torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 0.0]])).item() == pytest.approx(1 / 3)
    X = torch.tensor([[1e300, 0.0], [1e-300, 0.0]], dtype=torch.float64)
    assert rank.mean_cosine(X) == 1


@common
@given(matrices(4, 3))
def test_dirichlet_energy_is_the_sum_over_pairs(X):
    pairs = (X[:, None] - X[None]).square().sum() / (2 * 4)
    torch.testing.assert_close(rank.dirichlet_energy(X), pairs, rtol=1e-12, atol=1e-20)
    uniform = torch.full((4, 4), 0.25, dtype=torch.float64)
    torch.testing.assert_close(rank.dirichlet_energy(X, uniform), pairs, rtol=1e-12, atol=1e-20)


def test_dirichlet_energy_on_a_weighted_graph():
    X = normal(2, 7, 5)
    A = torch.softmax(normal(3, 2, 7, 7, seed=1), dim=-1)
    laplacian = torch.diag_embed((A.sum(-1) + A.sum(-2)) / 2) - (A + A.mT) / 2
    expected = torch.einsum("bif,hbij,bjf->hb", X, laplacian, X)
    torch.testing.assert_close(
        rank.dirichlet_energy(X.expand(3, 2, 7, 5), A), expected, rtol=1e-12, atol=1e-12
    )
    assert rank.dirichlet_energy(X[:, :1].expand(2, 7, 5), A[0]).eq(0).all()


@pytest.mark.parametrize(
    ("weights", "message"),
    [(torch.ones(3, 7), r"\[\*batch, 7, 7\]"), (-torch.ones(7, 7), "non-negative"), (torch.ones(7), "shape")],
)
def test_dirichlet_energy_refuses_bad_weights(weights, message, plain_types):
    with pytest.raises(ValueError, match=f"weights must.*{message}"):
        rank.dirichlet_energy(normal(7, 5), weights)


# --- edges and bad input, for every metric ----------------------------------------------------------------


@pytest.mark.parametrize("metric", ALL)
@pytest.mark.parametrize("shape", [(3, 2), (1, 5), (5, 1), (1, 1), (2, 3, 4)])
def test_the_zero_matrix_gives_zero(metric, shape):
    single = metric is rank.mean_cosine and shape[-2] == 1
    assert (metric(torch.zeros(shape)) == (1 if single else 0)).all()


@pytest.mark.parametrize("metric", RANKS)
def test_single_token_and_single_feature_have_rank_one(metric):
    assert metric(normal(1, 5)) == 1
    assert metric(normal(5, 1)) == 1


@pytest.mark.parametrize("relative", [False, True])
def test_single_token_and_single_feature_are_rank_one_exactly(relative):
    assert rank.rank_one_distance(normal(1, 5), relative) == 0
    assert rank.rank_one_distance(normal(5, 1), relative) == 0


@pytest.mark.parametrize("metric", ALL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_comes_back_in_float32(metric, dtype):
    X = (600 * normal(3, 67, 5)).to(dtype)  # squares and column sums leave the range of float16
    value = metric(X)
    assert value.dtype == (torch.int64 if metric is rank.numerical_rank else torch.float32)
    # the same numbers in float64; float32 sums of 335 squares: 1e-6 relative, 1e-6 of 1 for the cosine
    torch.testing.assert_close(value.double(), metric(X.double()).double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("metric", [rank.residual, rank.singular_values, *ALL])
@pytest.mark.parametrize(
    ("X", "error", "message"),
    [
        (torch.ones(3), ValueError, r"X must have shape"),
        (torch.ones(2, 0, 3), ValueError, "X must not be empty"),
        (torch.tensor([[1.0, 2.0], [3.0, float("nan")]]), ValueError, r"X\[1, 1\] is nan"),
        (torch.tensor([[[1.0, float("-inf")]]]), ValueError, r"X\[0, 0, 1\] is -inf"),
        (torch.ones(2, 2, dtype=torch.int32), TypeError, "floating-point"),
        (np.ones((2, 2)), TypeError, "torch tensor"),
    ],
)
def test_bad_input(metric, X, error, message, plain_types, capfd):
    with pytest.raises(error, match=message):
        metric(X)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("metric", [rank.residual, *ALL])
def test_input_is_untouched(metric):
    X = normal(7, 5)
    before = X.clone()
    metric(X)
    assert torch.equal(X, before)


def test_gradients_flow():
    for metric in (*ALL, lambda X: rank.residual(X, "median"), rank.residual):
        if metric is rank.numerical_rank:
            continue
        X = normal(5, 3).requires_grad_()
        metric(X).sum().backward()
        assert torch.isfinite(X.grad).all()


def test_the_metrics_of_the_registry_take_one_argument():
    assert len(rank.METRICS) == 8
    for metric in rank.METRICS.values():
        assert metric(normal(3, 7, 5)).shape == (3,)
