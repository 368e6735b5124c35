"""Path counts, single paths, and the two sums over all paths, against products written out by hand."""

import itertools
import math
import time
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from rc_lib import paths
from rc_lib.san import SAN

F64 = torch.float64

# A sum of some thousands of products in float64, each good to about 1e-15 of the largest term.
TIGHT = 1e-12


def tokens(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def relative(A, B):
    return float((A - B).abs().max() / B.abs().max())


def written_out(san, X, path, reverse=False):
    """``P^L ··· P^1 X W^1 ··· W^L`` as one chain of NumPy matrices; ``reverse`` stacks the P's wrongly."""
    trace = san.trace(X)
    left, right = [], []
    for layer, P, h in zip(san.layers, trace.attention, path, strict=True):
        a = layer.attention
        left.append(P[h - 1].numpy() if h else np.eye(len(X)))
        right.append((a.W_V[h - 1] @ a.W_O[h - 1]).detach().numpy() if h else np.eye(X.shape[1]))
    left = left if reverse else left[::-1]
    return torch.from_numpy(np.linalg.multi_dot([*left, X.numpy(), *right]))


# ------------------------------------------------------------------------------------------------ counting


def test_counts_by_hand():
    # Two layers of three heads with skips: 1 path skips both, 2 · 3 skip one, 9 skip none.
    assert paths.count_by_length(2, 3, True) == [1, 6, 9]
    assert paths.count_by_length(2, 3, False) == [0, 0, 9]
    assert (paths.count_paths(2, 3, True), paths.count_paths(2, 3, False)) == (16, 9)


def test_paths_in_order_by_hand():
    assert list(paths.all_paths(2, 2, False)) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert list(paths.all_paths(2, 1, True)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert list(paths.all_paths(2, 2, True, length=1)) == [(1, 0), (2, 0), (0, 1), (0, 2)]
    assert list(paths.all_paths(2, 2, False, length=1)) == []


def test_depth_zero_is_one_empty_path():
    assert list(paths.all_paths(0, 5, True)) == [()]
    assert paths.count_by_length(0, 5, False) == [1]
    assert paths.length_distribution(0, 5).tolist() == [1.0]


@settings(deadline=None, derandomize=True, max_examples=40)
@given(L=st.integers(0, 5), H=st.integers(1, 4), skip=st.booleans())
def test_counts_are_what_the_enumeration_lists(L, H, skip):
    listed = list(paths.all_paths(L, H, skip))
    counts = paths.count_by_length(L, H, skip)
    assert len(set(listed)) == len(listed) == paths.count_paths(L, H, skip) == sum(counts)
    for k in range(L + 1):
        of_length = set(paths.all_paths(L, H, skip, length=k))
        assert of_length == {p for p in listed if sum(h > 0 for h in p) == k}
        assert len(of_length) == counts[k]


def test_gpt3_counts_are_exact_integers():
    counts = paths.count_by_length(96, 96, True)
    assert sum(counts) == 97**96 == paths.count_paths(96, 96, True)
    assert counts[95] == 96 * 96**95
    assert all(type(c) is int for c in counts)


@pytest.mark.parametrize(("L", "H"), [(6, 12), (12, 4), (24, 128), (96, 96)])
def test_distribution_is_binomial(L, H):
    shares = paths.length_distribution(L, H)
    assert shares.dtype == F64
    assert shares.shape == (L + 1,)
    # SciPy's pmf goes through logarithms, so 1e-11 relative is what it can promise at 1e-190.
    np.testing.assert_allclose(shares.numpy(), binom.pmf(np.arange(L + 1), L, H / (H + 1)), rtol=1e-11)
    # Each share is the exact quotient rounded once: half an ulp, 2^-53 relative.
    exact = Fraction(math.comb(L, 2) * H**2, (H + 1) ** L)
    assert abs(Fraction(shares[2].item()) - exact) <= exact / 2**53


def test_distribution_beyond_the_range_of_floats():
    shares = paths.length_distribution(400, 99)  # 100^400 paths; the share of length 0 underflows to 0
    assert shares[0] == 0
    assert math.isclose(shares.sum().item(), 1, rel_tol=1e-13)


def test_enumeration_is_lazy():
    start = time.perf_counter()
    first = list(itertools.islice(paths.all_paths(96, 96, True), 3))
    assert first == [(0,) * 96, (0,) * 95 + (1,), (0,) * 95 + (2,)]
    assert next(paths.all_paths(96, 96, True, length=40))[:41] == (1,) * 40 + (0,)
    assert time.perf_counter() - start < 1  # 97^96 paths would take longer than the universe has


# -------------------------------------------------------------------------------------------- single paths


def test_a_path_by_hand():
    # One layer, one head, identical tokens' attention is uniform: P = 1/2 everywhere, W = 3.
    san = SAN(1, 1, 1, bias=False)
    with torch.no_grad():
        for name, value in (("W_Q", 0.0), ("W_K", 0.0), ("W_V", 3.0), ("W_O", 1.0)):
            getattr(san.layers[0].attention, name).fill_(value)
    X = torch.tensor([[1.0], [5.0]], dtype=F64)
    assert paths.path_output(san, X, (1,)).tolist() == [[9.0], [9.0]]


@pytest.mark.parametrize("skip", [False, True])
def test_every_path_is_the_product_written_out(skip):
    san, X = SAN(3, 2, 7, 5, skip=skip, bias_std=1.0, value_dim=3), tokens(11, 7)
    for path in paths.all_paths(3, 2, skip):
        assert relative(paths.path_output(san, X, path), written_out(san, X, path)) < TIGHT


def test_the_reversed_order_of_attention_is_told_apart():
    """The order that stacks the first layer's attention outermost gives another matrix, and another sum."""
    san, X = SAN(3, 2, 7, 5, gain=2.0, bias=False), tokens(11, 7)
    both = [sum(written_out(san, X, p, reverse) for p in paths.all_paths(3, 2, False)) for reverse in (0, 1)]
    out = san(X).detach()
    assert relative(both[0], out) < TIGHT
    assert relative(both[1], out) > 0.1


def test_the_first_entry_of_a_path_is_the_first_layer():
    san, X = SAN(2, 3, 6, skip=True), tokens(5, 6)
    P, a = san.trace(X).attention[0][2], san.layers[0].attention
    assert relative(paths.path_output(san, X, (3, 0)), (P @ X @ a.W_h[2]).detach()) < TIGHT


# ------------------------------------------------------------------------------------ the sum over all paths

WITHOUT_SKIPS = [(6, 4), (3, 5), (1, 64)]  # H^L up to 4096
WITH_SKIPS = [(8, 2), (2, 8), (3, 7)]  # (H+1)^L up to 6561


@pytest.mark.parametrize(
    ("L", "H", "skip"), [(*s, False) for s in WITHOUT_SKIPS] + [(*s, True) for s in WITH_SKIPS]
)
def test_sum_over_all_paths_is_the_forward_pass(L, H, skip):
    san, X = SAN(L, H, 11, 3, skip=skip, bias_std=1.0), tokens(7, 11)
    out, listed, recursion = san(X).detach(), paths.sum_over_paths(san, X), paths.sum_by_length(san, X)
    assert relative(listed.total, out) < TIGHT
    assert relative(recursion.total, out) < TIGHT
    scale = listed.terms.abs().max()
    for k in range(L + 1):
        assert (listed.terms[k] - recursion.terms[k]).abs().max() < TIGHT * scale
        # ... and relative to the terms of this length, which may be much smaller.
        assert torch.allclose(
            listed.terms[k], recursion.terms[k], rtol=0, atol=TIGHT * listed.terms[k].abs().max()
        )


def test_without_skips_all_paths_have_full_length():
    spectrum = paths.sum_by_length(SAN(3, 2, 6, bias_std=1.0), tokens(5, 6))
    assert spectrum.terms[:3].abs().max() == 0
    assert spectrum.terms[3].abs().max() > 0


def test_bias_is_the_same_row_for_every_token_without_norms():
    """Theorem 2.1's 1 bᵀ: every bias term is P···P 1(·)ᵀ = 1(·)ᵀ."""
    spectrum = paths.sum_by_length(SAN(4, 2, 6, bias_std=1.0), tokens(5, 6))
    assert (spectrum.bias - spectrum.bias[:1]).abs().max() < 1e-13 * spectrum.bias.abs().max()


def test_post_norm_network_of_the_sorting_task_size():
    san, X = SAN(6, 2, 48, skip=True, norm="post", bias_std=0.3), tokens(16, 8, 48)
    out, listed = san(X).detach(), paths.sum_over_paths(san, X)
    recursion = paths.sum_by_length(san, X)
    assert relative(recursion.total, out) < TIGHT
    for k in range(7):
        assert relative(recursion.terms[:, k], listed.terms[:, k]) < TIGHT


def test_twelve_layers_of_twelve_heads():
    """2.3e13 paths; the speed bar is measured by benchmarks/paths.py, and loosely here."""
    san, X = SAN(12, 12, 96, skip=True, bias_std=0.1), tokens(32, 96)
    assert paths.count_paths(12, 12, True) == 13**12
    spectrum = paths.sum_by_length(san, X)
    assert relative(spectrum.total, san(X).detach()) < 1e-10
    run, forward = (min(_seconds(f) for _ in range(5)) for f in (
        lambda: paths.sum_by_length(san, X), lambda: san.trace(X)))  # fmt: skip
    # The bar is 8; shape checks, which the tests switch on, and a busy machine may add to it.
    assert run < 16 * forward


def _seconds(f):
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def test_no_gradients_and_no_change_of_the_network():
    san, X = SAN(2, 2, 6, skip=True, dropout=0.5), tokens(5, 6).requires_grad_()
    san.train()
    for out in (paths.sum_by_length(san, X).total, paths.path_output(san, X, (1, 2))):
        assert not out.requires_grad
    assert san.training
    assert relative(paths.sum_by_length(san, X).total, san.eval()(X).detach()) < TIGHT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype):
    san, X = SAN(3, 2, 6, skip=True, dtype=dtype), tokens(5, 6).to(dtype)
    spectrum = paths.sum_by_length(san, X)
    assert spectrum.terms.dtype == dtype
    # Some dozens of roundings of one machine epsilon each.
    assert relative(spectrum.total, san(X).detach()) < 50 * torch.finfo(dtype).eps


@pytest.mark.parametrize("n", [1, 2])
def test_few_tokens(n):
    san, X = SAN(3, 2, 6, skip=True, bias_std=1.0), tokens(n, 6)
    assert relative(paths.sum_by_length(san, X).total, san(X).detach()) < TIGHT


def test_depth_zero_network_is_its_input():
    X = tokens(5, 6)
    spectrum = paths.sum_by_length(SAN(0, 2, 6), X)
    assert spectrum.terms.shape == (1, 5, 6)
    assert torch.equal(spectrum.total, X)
    assert torch.equal(paths.path_output(SAN(0, 2, 6), X, ()), X)


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    L=st.integers(1, 5),
    H=st.integers(1, 3),
    n=st.integers(1, 6),
    norm=st.sampled_from(["none", "pre", "post"]),
    skip=st.booleans(),
    seed=st.integers(0, 10**6),
    gain=st.sampled_from([1e-3, 1.0, 30.0]),
)
def test_spectrum_adds_up_to_the_output(L, H, n, norm, skip, seed, gain):
    san = SAN(L, H, 5, 3, skip=skip, norm=norm, seed=seed, gain=gain, bias_std=gain)
    X = tokens(n, 5, seed=seed)
    spectrum, out = paths.sum_by_length(san, X), san(X).detach()
    # Lengths may cancel: the rounding error is that of the largest term.
    scale = torch.cat([spectrum.terms, spectrum.bias[None], out[None]]).abs().max()
    assert (spectrum.total - out).abs().max() < TIGHT * scale


# --------------------------------------------------------------------------------------------- bad input


@pytest.fixture
def small(plain_types):
    return SAN(2, 3, 6), SAN(2, 3, 6, skip=True), tokens(5, 6)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ((1, 4), r"path\[1\] must be a head in 1..3, but is 4"),
        ((0, 1), r"path\[0\] is 0, a skip"),
        ((1,), r"path \(1,\) has 1 entries; expected 2"),
        ((1, 2, 3), r"expected 2"),
        ((-1, 1), r"path\[0\] must be at least 0"),
    ],
)
def test_a_path_that_does_not_exist(small, path, message):
    with pytest.raises(ValueError, match=message):
        paths.path_output(small[0], small[2], path)


@pytest.mark.parametrize("path", [(1.0, 2), ("1", 2), (True, 1)])
def test_a_path_of_something_else(small, path):
    with pytest.raises(TypeError, match=r"path\[0\] must be a whole number"):
        paths.path_output(small[0], small[2], path)


def test_what_is_no_path_or_no_network(plain_types, small):
    with pytest.raises(TypeError, match="path must be a sequence of heads, one per layer, but is NoneType"):
        paths.path_output(small[0], small[2], None)
    for f in (paths.sum_by_length, paths.sum_over_paths):
        with pytest.raises(TypeError, match=r"san must be a rc_lib\.san\.SAN, but is NoneType"):
            f(None, small[2])


def test_a_source_that_does_not_exist(small):
    with pytest.raises(ValueError, match="source must be below 1, but is 1"):
        paths.path_output(small[0], small[2], (1, 1), source=1)


def test_too_many_paths_to_list(small):
    san = SAN(12, 12, 12, skip=True)
    with pytest.raises(ValueError, match=r"23298085122481 paths, more than limit=100000: call sum_by_length"):
        paths.sum_over_paths(san, tokens(3, 12))
    with pytest.raises(ValueError, match="has 16 paths, more than limit=15"):
        paths.sum_over_paths(small[1], small[2], limit=15)
    with pytest.raises(ValueError, match=r"about 10\^19\.9 paths"):
        paths.sum_over_paths(SAN(66, 1, 2, skip=True), tokens(3, 2))
    assert paths.sum_over_paths(small[1], small[2], limit=16).terms.shape == (3, 5, 6)


@pytest.mark.parametrize("f", [paths.sum_by_length, paths.sum_over_paths])
def test_bad_tokens(small, f):
    san, X = small[1:]
    with pytest.raises(TypeError, match="X must hold floating-point numbers"):
        f(san, torch.ones(5, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"X\[2, 1\] is nan"):
        f(san, X.index_put((torch.tensor(2), torch.tensor(1)), torch.tensor(torch.nan, dtype=F64)))
    with pytest.raises(ValueError, match="6"):
        f(san, tokens(5, 7))
    with pytest.raises(ValueError, match="empty"):
        f(san, tokens(0, 6))
    with pytest.raises(ValueError, match="X must have shape"):
        f(san, tokens(6))


@pytest.mark.parametrize("f", [paths.all_paths, paths.count_paths, paths.count_by_length])
def test_bad_sizes(plain_types, f):
    with pytest.raises(ValueError, match="depth must be at least 0"):
        f(-1, 2, True)
    with pytest.raises(ValueError, match="heads must be at least 1"):
        f(2, 0, True)
    with pytest.raises(TypeError, match="depth must be a whole number"):
        f(2.0, 2, True)
    with pytest.raises(TypeError, match="heads must be a whole number"):
        paths.length_distribution(2, "3")


def test_bad_length(plain_types):
    with pytest.raises(TypeError, match="skip must be True or False, but is NoneType"):
        paths.all_paths(2, 2, None)
    with pytest.raises(ValueError, match="length must be at most depth=2, but is 3"):
        paths.all_paths(2, 2, True, length=3)
    with pytest.raises(ValueError, match="length must be at least 0"):
        paths.all_paths(2, 2, True, length=-1)
