import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rc_lib import norms

NORMS = (norms.one_norm, norms.inf_norm, norms.composite_norm, norms.row_diameter)
ALL = (*NORMS, norms.oscillation)
numbers = st.floats(-100, 100, allow_subnormal=False).map(lambda v: round(v, 3))
common = settings(deadline=None, derandomize=True, max_examples=60)


def matrices(n, d):
    return arrays(np.float64, (n, d), elements=numbers).map(torch.from_numpy)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_by_hand():
    M = torch.tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, 0.0]], dtype=torch.float64)
    assert norms.one_norm(M) == 7  # column sums 5, 7, 3
    assert norms.inf_norm(M) == 9  # row sums 6, 9
    # 63 under the root; a product of two rounded roots is exact to two units in the last place
    assert norms.composite_norm(M).item() == pytest.approx(63**0.5, rel=1e-15)
    assert norms.oscillation(M).tolist() == [5, 7, 3]
    assert norms.row_diameter(M) == 15


@pytest.mark.parametrize("shape", [(7, 5), (3, 7, 5), (2, 3, 7, 5), (13, 1), (1, 11)])
def test_against_numpy_with_a_prime_on_every_axis(shape):
    M = normal(*shape)
    A = M.numpy()
    one, inf = np.abs(A).sum(-2).max(-1), np.abs(A).sum(-1).max(-1)
    gaps = np.abs(A[..., :, None, :] - A[..., None, :, :]).sum(-1).max((-1, -2))
    for ours, theirs in [
        (norms.one_norm(M), one),
        (norms.inf_norm(M), inf),
        (norms.composite_norm(M), np.sqrt(one * inf)),
        (norms.oscillation(M), np.ptp(A, axis=-2)),
        (norms.row_diameter(M), gaps),
    ]:
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-14)  # sums of ≤ 13 terms, other order


def test_one_and_inf_norm_are_numpys_operator_norms():
    A = normal(7, 11)
    assert norms.one_norm(A).item() == pytest.approx(np.linalg.norm(A.numpy(), 1), rel=1e-14)
    assert norms.inf_norm(A).item() == pytest.approx(np.linalg.norm(A.numpy(), np.inf), rel=1e-14)


def test_the_triangle_inequality_fails():
    column, row = torch.zeros(100, 100), torch.zeros(100, 100)
    column[:, 0] = 1
    row[0, :] = 1
    # √100·√1 is exact, and so is 101 up to the two roots (float32: 6e-8 each)
    assert norms.composite_norm(column) == norms.composite_norm(row) == 10
    assert norms.composite_norm(column + row).item() == pytest.approx(101, rel=3e-7)


@common
@given(matrices(4, 3), st.floats(-50, 50, allow_subnormal=False))
def test_homogeneous(M, c):
    for norm in ALL:
        # tiny M times tiny c may underflow, hence the absolute part
        torch.testing.assert_close(norm(c * M), abs(c) * norm(M), rtol=1e-12, atol=1e-300)


@common
@given(matrices(4, 3), matrices(3, 5))
def test_submultiplicative(A, B):
    for norm in (norms.one_norm, norms.inf_norm, norms.composite_norm):
        assert norm(A @ B) <= norm(A) * norm(B) * (1 + 1e-12) + 1e-300


@common
@given(matrices(4, 3))
def test_transpose_and_absolute_value(M):
    composite = norms.composite_norm(M)
    torch.testing.assert_close(norms.composite_norm(M.mT), composite, rtol=1e-14, atol=0)
    torch.testing.assert_close(norms.composite_norm(M.abs()), composite, rtol=1e-14, atol=0)


@common
@given(matrices(4, 3), arrays(np.float64, 3, elements=numbers))
def test_spans_ignore_a_common_row(M, v):
    shifted = M + torch.from_numpy(v)
    # entries up to 200, so each difference carries an error of 200·eps ≈ 4e-14
    torch.testing.assert_close(norms.oscillation(shifted), norms.oscillation(M), rtol=0, atol=2e-13)
    torch.testing.assert_close(norms.row_diameter(shifted), norms.row_diameter(M), rtol=0, atol=5e-13)


@common
@given(matrices(5, 3))
def test_spans_lie_between_the_bounds_that_the_theory_uses(M):
    assert norms.row_diameter(M) <= 2 * norms.inf_norm(M) * (1 + 1e-12)
    assert norms.row_diameter(M) >= norms.oscillation(M).max() * (1 - 1e-12)
    assert norms.row_diameter(M) <= norms.oscillation(M).sum() * (1 + 1e-12)


@pytest.mark.parametrize("block", [1, 17, 100, 2**21])
def test_row_diameter_in_blocks_of_any_size(block, monkeypatch):
    M = normal(2, 23, 3)
    M[0, 22] += 5  # the farthest pair: first and last block
    expected = torch.cdist(M, M, p=1).amax((-1, -2))
    monkeypatch.setattr(norms, "BLOCK", block)
    torch.testing.assert_close(norms.row_diameter(M), expected, rtol=1e-15, atol=0)


def test_row_diameter_keeps_only_a_block_in_memory(monkeypatch):
    sizes = []
    cdist = torch.cdist

    def spy(*args, **kwargs):
        answer = cdist(*args, **kwargs)
        sizes.append(answer.numel())
        return answer

    monkeypatch.setattr(torch, "cdist", spy)
    norms.row_diameter(normal(3001, 2))
    assert max(sizes) <= norms.BLOCK < 3001**2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    M = torch.full((64, 3), 2048.0, dtype=dtype)  # column sums of 131072: beyond float16
    M[0] = -2048
    assert norms.one_norm(M).dtype == torch.float32
    assert norms.one_norm(M) == 131072
    assert norms.inf_norm(M) == 6144
    assert norms.oscillation(torch.tensor([[6e4], [-6e4]], dtype=dtype)).item() > 1.19e5
    assert norms.row_diameter(M) == 12288


def test_float32_sums_stay_accurate():
    M = normal(4099, 3, dtype=torch.float32)
    for norm in (norms.one_norm, norms.inf_norm, norms.composite_norm):
        # 4099 terms of eps/2 = 6e-8 each would be 2.4e-4 at worst; errors average out well below 1e-5
        assert norm(M).item() == pytest.approx(norm(M.double()).item(), rel=1e-5)


def test_extreme_entries_neither_overflow_nor_underflow():
    assert norms.composite_norm(torch.full((3, 3), 1e300, dtype=torch.float64)).item() == pytest.approx(3e300)
    assert norms.composite_norm(torch.full((3, 3), 1e-300, dtype=torch.float64)).item() == pytest.approx(
        3e-300
    )


@pytest.mark.parametrize("norm", ALL)
def test_an_overflowing_result_is_refused(norm):
    M = torch.full((2, 2), 1e308, dtype=torch.float64)
    M[1] = -1e308
    with pytest.raises(ValueError, match=r"\(M\) exceeds the largest float64"):
        norm(M)
    with pytest.raises(ValueError, match=r"exceeds the largest float32.*use float64"):
        norm(M.sign().float() * 3e38)


@pytest.mark.parametrize("norm", ALL)
def test_edges(norm):
    assert not norm(torch.zeros(3, 2)).any()
    assert norm(torch.ones(2, 3, 5, 7)).shape[:2] == (2, 3)


def test_a_single_row_has_no_span():
    assert norms.row_diameter(normal(1, 5)) == 0
    assert not norms.oscillation(normal(1, 5)).any()


@pytest.mark.parametrize("norm", ALL)
@pytest.mark.parametrize(
    ("M", "error"),
    [
        (torch.ones(3), ValueError),
        (torch.ones(0, 3), ValueError),
        (torch.tensor([[float("nan")]]), ValueError),
        (torch.tensor([[float("inf")]]), ValueError),
        (torch.ones(2, 2, dtype=torch.int64), TypeError),
        ([[1.0]], TypeError),
    ],
)
def test_bad_input(norm, M, error, plain_types):
    with pytest.raises(error, match=r"^M must"):
        norm(M)


@pytest.mark.parametrize("norm", ALL)
def test_input_is_untouched_and_gradients_flow(norm):
    M = normal(5, 3).requires_grad_()
    before = M.detach().clone()
    norm(M).sum().backward()
    assert torch.equal(M, before)
    assert M.grad.abs().sum() > 0
