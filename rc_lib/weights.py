"""Sizes and seeded Gaussian weights of a layer (variance 1/fan-in; ours)."""

import hashlib
import math

import torch
from torch import Tensor

from rc_lib import checks


def sizes(
    heads: int, dim: int, head_dim: int | None, value_dim: int | None, out_dim: int | None
) -> tuple[int, int, int, int, int]:
    """Check and complete the sizes of a layer.

    Args:
        heads: The number of heads ``H``.
        dim: Features per token ``d``.
        head_dim: ``d_qk``; ``None`` means ``d / H``.
        value_dim: ``d_v``; ``None`` means ``d_qk``.
        out_dim: ``d'``; ``None`` means ``d``.

    Returns:
        ``H, d, d_qk, d_v, d'``.

    Raises:
        ValueError: a size below 1, or ``d / H`` is not whole and ``head_dim`` not given.
        TypeError: a size that is no whole number.
    """
    H, d = checks.positive_int("heads", heads), checks.positive_int("dim", dim)
    if head_dim is None and d % H:
        raise ValueError(f"heads={H} does not divide dim={d}: give head_dim")
    d_qk = d // H if head_dim is None else checks.positive_int("head_dim", head_dim)
    d_v = d_qk if value_dim is None else checks.positive_int("value_dim", value_dim)
    return H, d, d_qk, d_v, d if out_dim is None else checks.positive_int("out_dim", out_dim)


def scale(name: str, value: float) -> float:
    """Require a finite number that is not negative.

    Args:
        name: The argument's name, for the message.
        value: The value to check.

    Returns:
        ``value`` as a ``float``.

    Raises:
        ValueError: it is negative, infinite or NaN.
        TypeError: it is no number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, but is {checks.describe(value)}")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be finite and not negative, but is {value}")
    return float(value)


def probability(name: str, value: float) -> float:
    """Require a probability below 1.

    Args:
        name: The argument's name, for the message.
        value: The value to check.

    Returns:
        ``value`` as a ``float``.

    Raises:
        ValueError: it is outside ``[0, 1)`` or NaN.
    """
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), but is {value}")
    return float(value)


def generator(seed: int, purpose: str) -> torch.Generator:
    """A source of random numbers for one purpose, apart from torch's global one and from other purposes'.

    PyTorch's CPU generator reads only the last 32 bits of a seed, so seed and purpose are hashed to these.

    Args:
        seed: 0 or more; see ``checks.seed``.
        purpose: What the numbers are for, e.g. ``"sorting.train"``.

    Returns:
        A CPU generator.

    Raises:
        TypeError: ``seed`` is no whole number.
        ValueError: ``seed`` is negative or too large.
    """
    digest = hashlib.blake2b(f"{purpose} {checks.seed(seed)}".encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


class Gaussian:
    """A stream of Gaussian tensors with a generator of its own, apart from torch's global one.

    Numbers are drawn in float64 on the CPU and then rounded, so one seed means the same weights in every
    dtype and on every device.

    Args:
        seed: 0 or more, or a CPU generator to go on drawing from.
        dtype: The floating-point type of the tensors.

    Raises:
        TypeError: ``dtype`` is no floating-point type, or ``seed`` no whole number.
        ValueError: ``seed`` is negative or too large.
    """

    def __init__(self, seed: int | torch.Generator, dtype: torch.dtype = torch.float64):
        if dtype not in checks.FLOATS:
            raise TypeError(f"dtype must be a floating-point type, but is {dtype}")
        own = isinstance(seed, torch.Generator)
        self.generator = seed if own else torch.Generator().manual_seed(checks.seed(seed))
        self.dtype = dtype

    def __call__(self, shape: tuple[int, ...], std: float) -> Tensor:
        """Draw a tensor of the given shape and standard deviation."""
        draw = torch.randn(shape, dtype=torch.float64, generator=self.generator)
        return (draw * std).to(self.dtype)
