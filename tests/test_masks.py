"""Masks by hand, and the softmax under them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rc_lib import masks

B, H, N, D = 2, 3, 5, 7
quick = settings(deadline=None, max_examples=40, derandomize=True)


def tokens(*batch, n=N, d=D, seed=0) -> torch.Tensor:
    return torch.randn(*batch, n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@quick
@given(seed=st.integers(0, 10**6), shift=st.floats(-100, 100))
def test_shifting_a_row_of_scores_changes_nothing(seed, shift):
    S = tokens(B, H, n=N, d=N, seed=seed)
    moved = S + shift * tokens(B, H, n=N, d=1, seed=seed + 1)
    # Adding a shift of 100 loses 100 eps of the score.
    torch.testing.assert_close(masks.masked_softmax(moved), masks.masked_softmax(S), rtol=1e-11, atol=1e-12)


def test_softmax_by_hand():
    S = torch.tensor([[0.0, 1e4, 0.0], [1.0, 2.0, 3.0]], dtype=torch.float64)
    may = torch.tensor([[True, False, True], [False, False, False]])
    expected = torch.tensor([[0.5, 0.0, 0.5], [0.0, 0.0, 0.0]], dtype=torch.float64)
    assert torch.equal(masks.masked_softmax(S, may), expected)


def test_softmax_survives_huge_scores():
    S = torch.tensor([[1e308, -1e308, 1e308]], dtype=torch.float64)
    assert torch.equal(masks.masked_softmax(S), torch.tensor([[0.5, 0.0, 0.5]], dtype=torch.float64))


def test_causal_and_window_by_hand():
    assert masks.causal(3).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert masks.window(4, 3).int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert torch.equal(masks.window(3, 1), torch.eye(3, dtype=torch.bool))


def test_allowed_broadcasts_against_scores():
    X, real = tokens(B), torch.tensor([[True] * N, [True] * 2 + [False] * 3])
    may = masks.allowed(X, masks.causal(N), real)
    assert may.shape == (B, 1, N, N)
    for b in range(B):
        assert torch.equal(may[b, 0], masks.causal(N) & real[b])
    assert masks.allowed(X) is None


@pytest.mark.usefixtures("plain_types")
def test_bad_input():
    with pytest.raises(ValueError, match="width must be odd, but is 2"):
        masks.window(4, 2)
    with pytest.raises(ValueError, match="n must be at least 1"):
        masks.causal(0)
    with pytest.raises(TypeError, match="n must be a whole number"):
        masks.causal(2.0)
