"""Validation shared by every floor of the library (no section of the paper).

Every message names the argument, says what it was and what was expected.  The checks return their
argument, so that ``X = checks.matrix("X", X)`` reads as one step.
"""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def describe(value: Any) -> str:
    """Say in a few words what a value is: shape and dtype of a tensor, type and value of the rest.

    Args:
        value: Anything.

    Returns:
        A short description for an error message.
    """
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def floats(name: str, X: Any) -> Tensor:
    """Require a tensor of floating-point numbers (float16, bfloat16, float32 or float64).

    Args:
        name: The argument's name, for the message.
        X: The value to check.

    Returns:
        ``X`` itself.

    Raises:
        TypeError: ``X`` is no tensor or holds integers, booleans or complex numbers.
    """
    if not isinstance(X, Tensor):
        raise TypeError(f"{name} must be a torch tensor, but is {describe(X)}")
    if X.dtype not in FLOATS:
        raise TypeError(f"{name} must hold floating-point numbers, but is {describe(X)}")
    return X


def finite(name: str, X: Any) -> Tensor:
    """Require that no entry is NaN or infinite.

    Args:
        name: The argument's name, for the message.
        X: A floating-point tensor of any shape.

    Returns:
        ``X`` itself.

    Raises:
        TypeError: ``X`` is no floating-point tensor.
        ValueError: some entry is NaN or infinite; the message gives the first one's index.
    """
    floats(name, X)
    if X.numel() == 0:
        return X
    # NaN passes through min and max, so two numbers tell; no copy of X is made unless something is wrong.
    extremes = torch.stack(torch.aminmax(X.detach()))
    if not bool(torch.isfinite(extremes).all()):
        bad = torch.nonzero(~torch.isfinite(X))
        where = tuple(bad[0].tolist())
        raise ValueError(
            f"{name} must be finite, but {name}{list(where)} is {X[where].item()} "
            f"({len(bad)} of {X.numel()} entries are NaN or infinite; {describe(X)})"
        )
    return X


def matrix(name: str, X: Any) -> Tensor:
    """Require a finite, non-empty matrix, or a batch of them: shape ``[*batch, n, d]``.

    Args:
        name: The argument's name, for the message.
        X: The value to check.

    Returns:
        ``X`` itself.

    Raises:
        TypeError: ``X`` is no floating-point tensor.
        ValueError: fewer than two dimensions, an empty one, or an entry that is NaN or infinite.
    """
    floats(name, X)
    if X.ndim < 2:
        raise ValueError(f"{name} must have shape [*batch, n, d], but is {describe(X)}")
    if X.numel() == 0:
        raise ValueError(f"{name} must not be empty, but is {describe(X)}")
    return finite(name, X)


def one_of(name: str, value: Any, allowed: Collection[Any]) -> Any:
    """Require one of a few allowed values.

    Args:
        name: The argument's name, for the message.
        value: The value to check.
        allowed: The allowed values, in the order in which the message lists them.

    Returns:
        ``value`` itself.

    Raises:
        ValueError: ``value`` is not among ``allowed``.
    """
    if not any(type(value) is type(a) and value == a for a in allowed):
        choices = ", ".join(repr(a) for a in allowed)
        raise ValueError(f"{name} must be one of {choices}, but is {describe(value)}")
    return value


def boolean(name: str, value: Any) -> bool:
    """Require True or False: a string or a number here is a mistake, and would count as true.

    Args:
        name: The argument's name, for the message.
        value: The value to check.

    Returns:
        ``value`` itself.

    Raises:
        TypeError: ``value`` is no boolean.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, but is {describe(value)}")
    return value


def listed(name: str, value: Any) -> list[Any]:
    """Require a sequence of things (a string or a tensor is none).

    Args:
        name: The argument's name, for the message.
        value: The value to check.

    Returns:
        What ``value`` holds, as a list.

    Raises:
        TypeError: ``value`` is no sequence.
    """
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Tensor):
        raise TypeError(f"{name} must be a sequence, but is {describe(value)}")
    return list(value)


def positive_int(name: str, value: Any, minimum: int = 1) -> int:
    """Require a whole number that is at least ``minimum`` (a boolean is none).

    Args:
        name: The argument's name, for the message.
        value: The value to check.
        minimum: The smallest value allowed.

    Returns:
        ``value`` as an ``int``.

    Raises:
        TypeError: ``value`` is no whole number.
        ValueError: ``value`` is below ``minimum``.
    """
    whole = hasattr(value, "__index__") and not isinstance(value, bool | Tensor)
    if not whole:
        raise TypeError(f"{name} must be a whole number, but is {describe(value)}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, but is {value}")
    return int(value)


def seed(value: Any, name: str = "seed") -> int:
    """Require a seed, by one rule for the whole library: a whole number from 0 to below 2**62.

    Args:
        value: The value to check.
        name: The argument's name, for the message.

    Returns:
        ``value`` as an ``int``.

    Raises:
        TypeError: ``value`` is no whole number.
        ValueError: ``value`` is negative, or more than torch's generators hold.
    """
    value = positive_int(name, value, minimum=0)
    if value >= 2**62:
        raise ValueError(f"{name} must be below 2**62, which torch's generators hold, but is {value}")
    return value
