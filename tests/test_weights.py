"""Sizes of a layer and seeded Gaussian weights."""

import math

import numpy as np
import pytest
import torch

from rc_lib.weights import Gaussian, generator, probability, scale, sizes


def test_sizes():
    assert sizes(3, 12, None, None, None) == (3, 12, 4, 4, 12)
    assert sizes(3, 7, 5, None, None) == (3, 7, 5, 5, 7)
    assert sizes(3, 7, 5, 11, 13) == (3, 7, 5, 11, 13)


def test_gaussian_streams():
    a, b = Gaussian(7), Gaussian(torch.Generator().manual_seed(7))
    first = a((3, 5), 2.0)
    assert first.dtype == torch.float64
    assert torch.equal(first, b((3, 5), 2.0))
    assert not torch.equal(first, a((3, 5), 2.0))
    assert torch.equal(Gaussian(7, torch.float32)((3, 5), 2.0), first.float())
    assert torch.equal(Gaussian(7)((3, 5), 1.0), first / 2)


def test_bad_input():
    for value in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="gain must be finite and not negative"):
            scale("gain", value)
    for value in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match=r"p must be in \[0, 1\)"):
            probability("p", value)
    with pytest.raises(TypeError, match="dtype must be a floating-point type"):
        Gaussian(0, torch.int64)


def test_a_seed_of_numpy_is_as_good(plain_types):
    assert generator(np.int64(7), "a").initial_seed() == generator(7, "a").initial_seed()
    assert torch.equal(Gaussian(np.int64(7))((3,), 1.0), Gaussian(7)((3,), 1.0))


def test_streams_of_one_seed_differ_and_follow_the_seed():
    draws = {
        (s, k): torch.rand(3, generator=generator(s, k)).tolist()
        for s in (0, 1, 2**31, 2**32, 2**40)
        for k in ("a", "b")
    }
    assert len({tuple(v) for v in draws.values()}) == 10
