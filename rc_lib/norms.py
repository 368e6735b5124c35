"""Norms of a token matrix (paper, section 2), and the spans that the sharper bound uses (ours)::

    ‖M‖_1 = max column abs sum      ‖M‖_∞ = max row abs sum      ‖M‖_{1,∞} = √(‖M‖_1 ‖M‖_∞)

All functions take any leading batch dimensions.  Half precision (float16, bfloat16) is summed in
float32 and the result *is* float32: a sum of 64 entries near 1100 already leaves the range of float16.
A result beyond the largest float of its dtype is refused with a ValueError, never returned as inf.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from rc_lib import checks

# Entries of a distance block in row_diameter: 2²¹ float64 numbers are 16 MB.
BLOCK = 2**21


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which results are computed: float32 for half precision, else the same.

    Args:
        dtype: A floating-point dtype.

    Returns:
        ``torch.float32`` for float16 and bfloat16, ``dtype`` itself otherwise.
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def fits(what: str, value: Tensor) -> Tensor:
    """Refuse a result that has left the range of its dtype.

    Args:
        what: The quantity's name, for the message.
        value: A tensor computed from finite numbers.

    Returns:
        ``value`` itself.

    Raises:
        ValueError: ``value`` holds an infinity or a NaN.
    """
    if not bool(torch.isfinite(value.detach()).all()):
        dtype = str(value.dtype).removeprefix("torch.")
        raise ValueError(
            f"{what} exceeds the largest {dtype}, {torch.finfo(value.dtype).max:.3g}: rescale the matrix"
            + ("" if value.dtype == torch.float64 else " or use float64")
        )
    return value


def abs_sums(M: Float[Tensor, "*batch n d"], dim: int) -> Tensor:
    """Sums of absolute values along one dimension, without a copy of ``|M|`` and without validation.

    Args:
        M: Matrices.
        dim: The dimension to sum over: -2 gives column sums, -1 row sums.

    Returns:
        The sums, in the dtype given by :func:`wide`.
    """
    return torch.linalg.vector_norm(M, ord=1, dim=dim, dtype=wide(M.dtype))


def one_norm(M: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch"]:
    """Operator norm ‖M‖_1: the largest column sum of absolute values.

    Args:
        M: Matrices, shape ``[*batch, n, d]``.

    Returns:
        ‖M‖_1, shape ``[*batch]``; float32 for half precision.

    Raises:
        TypeError: ``M`` is no floating-point tensor.
        ValueError: ``M`` has fewer than two dimensions, is empty, holds NaN or inf, or the norm overflows.
    """
    checks.matrix("M", M)
    return fits("one_norm(M)", abs_sums(M, dim=-2).amax(dim=-1))


def inf_norm(M: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch"]:
    """Operator norm ‖M‖_∞: the largest row sum of absolute values.

    Args:
        M: Matrices, shape ``[*batch, n, d]``.

    Returns:
        ‖M‖_∞, shape ``[*batch]``; float32 for half precision.

    Raises:
        TypeError: ``M`` is no floating-point tensor.
        ValueError: ``M`` has fewer than two dimensions, is empty, holds NaN or inf, or the norm overflows.
    """
    checks.matrix("M", M)
    return fits("inf_norm(M)", abs_sums(M, dim=-1).amax(dim=-1))


def composite_norm(M: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch"]:
    """The paper's ‖M‖_{1,∞} = √(‖M‖_1 ‖M‖_∞).

    Homogeneous, submultiplicative, the same for Mᵀ and for ``|M|``; it is *no* norm, because the
    triangle inequality fails.  The roots are taken before the product, which then neither overflows nor
    underflows where the result does not.

    Args:
        M: Matrices, shape ``[*batch, n, d]``.

    Returns:
        ‖M‖_{1,∞}, shape ``[*batch]``; float32 for half precision.

    Raises:
        TypeError: ``M`` is no floating-point tensor.
        ValueError: ``M`` has fewer than two dimensions, is empty, holds NaN or inf, or a factor overflows.
    """
    return one_norm(M).sqrt() * inf_norm(M).sqrt()


def oscillation(M: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch d"]:
    """Oscillation of each column, osc_j(M) = max_i M_ij − min_i M_ij (ours, for the sharper bound).

    Zero exactly when all rows are equal; unchanged by M → M + 1vᵀ.

    Args:
        M: Matrices, shape ``[*batch, n, d]``.

    Returns:
        One span per column, shape ``[*batch, d]``; float32 for half precision.

    Raises:
        TypeError: ``M`` is no floating-point tensor.
        ValueError: ``M`` has fewer than two dimensions, is empty, holds NaN or inf, or a span overflows.
    """
    checks.matrix("M", M)
    top, bottom = M.amax(dim=-2).to(wide(M.dtype)), M.amin(dim=-2).to(wide(M.dtype))
    return fits("oscillation(M)", top - bottom)


def row_diameter(M: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch"]:
    """Diameter of the set of rows in ℓ1, max_{k,l} ‖M_k − M_l‖_1 (ours, for the sharper bound).

    Every pair of rows is compared, so the result is exact up to the rounding of a sum of d terms.  The
    n×n distances are made in blocks of about 16 MB, of which only the maximum is kept.

    Args:
        M: Matrices, shape ``[*batch, n, d]``.

    Returns:
        The diameter, shape ``[*batch]``; 0 for a single row; float32 for half precision.

    Raises:
        TypeError: ``M`` is no floating-point tensor.
        ValueError: ``M`` has fewer than two dimensions, is empty, holds NaN or inf, or a distance overflows.
    """
    checks.matrix("M", M)
    M = M.to(wide(M.dtype))
    n, batch = M.shape[-2], math.prod(M.shape[:-2])
    step = max(1, BLOCK // (n * batch))
    diameter = M.new_zeros(M.shape[:-2])
    for start in range(0, n, step):
        # Rows before `start` have met all the others already.
        distances = torch.cdist(M[..., start : start + step, :], M[..., start:, :], p=1.0)
        diameter = torch.maximum(diameter, distances.amax(dim=(-2, -1)))
    return fits("row_diameter(M)", diameter)
