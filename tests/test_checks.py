import numpy as np
import pytest
import torch

from rc_lib import checks


def test_checks_return_their_argument_itself():
    X = torch.ones(2, 3)
    assert checks.floats("X", X) is X
    assert checks.finite("X", X) is X
    assert checks.matrix("X", X) is X
    assert checks.one_of("center", "mean", ("mean", "median")) == "mean"
    assert checks.positive_int("depth", np.int64(7)) == 7
    assert [checks.positive_int("depth", 1), checks.positive_int("depth", 0, minimum=0)] == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_finite_says_where_and_prints_nothing(dtype, bad, capfd):
    X = torch.zeros(2, 3, 5, dtype=dtype)
    X[1, 2, 4] = bad
    with pytest.raises(ValueError, match=r"tokens\[1, 2, 4\] is .*1 of 30") as error:
        checks.finite("tokens", X)
    assert str(bad) in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_finite_reports_the_first_of_several():
    X = torch.zeros(3, 2)
    X[1, 0] = X[2, 1] = float("nan")
    with pytest.raises(ValueError, match=r"X\[1, 0\] is nan \(2 of 6"):
        checks.finite("X", X)


def test_finite_accepts_the_largest_number_and_an_empty_tensor():
    checks.finite("X", torch.full((2, 2), torch.finfo(torch.float64).max, dtype=torch.float64))
    checks.finite("X", torch.zeros(0))


@pytest.mark.parametrize(
    ("X", "error", "message"),
    [
        ([[1.0]], TypeError, r"W must be a torch tensor, but is list \[\[1\.0\]\]"),
        (torch.ones(2, 3, dtype=torch.int64), TypeError, r"floating-point.*int64 tensor of shape \(2, 3\)"),
        (torch.ones(2, 3, dtype=torch.complex64), TypeError, "floating-point.*complex64"),
        (torch.ones(3), ValueError, r"W must have shape \[\*batch, n, d\], but is a float32.*\(3,\)"),
        (torch.ones(4, 0, 3), ValueError, r"W must not be empty.*\(4, 0, 3\)"),
        (torch.tensor([[0.0, float("nan")]]), ValueError, r"W\[0, 1\] is nan"),
    ],
)
def test_matrix_names_the_argument_and_what_it_was(X, error, message, plain_types):
    with pytest.raises(error, match=message):
        checks.matrix("W", X)


@pytest.mark.parametrize("value", ["Mean", None, True, 0])
def test_one_of_lists_the_choices(value):
    with pytest.raises(ValueError, match=r"norm must be one of 'none', 'pre', 1, but is "):
        checks.one_of("norm", value, ("none", "pre", 1))


@pytest.mark.parametrize("value", [1.0, "3", None, True, torch.tensor(3)])
def test_positive_int_wants_a_whole_number(value):
    with pytest.raises(TypeError, match="depth must be a whole number"):
        checks.positive_int("depth", value)


@pytest.mark.parametrize(("value", "minimum"), [(0, 1), (-3, 1), (1, 2)])
def test_positive_int_has_a_minimum(value, minimum):
    with pytest.raises(ValueError, match=f"depth must be at least {minimum}, but is {value}"):
        checks.positive_int("depth", value, minimum)


def test_describe_keeps_long_values_short():
    assert len(checks.describe("x" * 1000)) < 80
