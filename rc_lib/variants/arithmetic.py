"""One formula, two arithmetics: torch tensors, or numpy arrays of mpmath numbers (ours).

The attention patterns of ``rc_lib.variants`` are written once, with what both kinds of arrays share
(``+ − * / @``, indexing, ``.swapaxes``, ``.sum(axis=…, keepdims=True)``) and with the functions below.
In torch they make a network; in mpmath, at thousands of digits, they show residuals that floats cannot hold.
The digits are those of mpmath's global context: ``with mpmath.workdps(1000): ...``.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rc_lib.masks import masked_softmax

Array = Tensor | np.ndarray


def _each(name: str, A: np.ndarray) -> np.ndarray:
    """Apply one of mpmath's functions to every entry."""
    import mpmath

    # The array around the result: a ufunc returns a bare number for an array without axes.
    return np.asarray(np.frompyfunc(getattr(mpmath, name), 1, 1)(A), dtype=object)


def exact(value: Any) -> np.ndarray:
    """The same numbers as mpmath's, digit for digit.

    Args:
        value: A tensor, an array or a number.

    Returns:
        An array of mpmath numbers; of booleans if ``value`` holds booleans.
    """
    A = value.detach().cpu().double().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if isinstance(value, Tensor) and value.dtype == torch.bool:
        return A.astype(bool)
    return A if A.dtype in (bool, object) else _each("mpf", A.astype(object))


def like(X: Array, value: Any) -> Array:
    """Bring a parameter, a mask or a number into the arithmetic of ``X``.

    Args:
        X: A tensor or an array.
        value: A tensor or a number.

    Returns:
        A tensor on the device and of the dtype of ``X`` (booleans stay booleans), or an array.
    """
    if not isinstance(X, Tensor):
        return exact(value)
    value = torch.as_tensor(value, device=X.device)
    return value if value.dtype == torch.bool else value.to(X.dtype)


def exp(A: Array) -> Array:
    """``e^A``, entry by entry.

    Args:
        A: A tensor or an array.

    Returns:
        The same kind and shape.
    """
    return A.exp() if isinstance(A, Tensor) else _each("exp", A)


def sqrt(A: Array) -> Array:
    """``√A``, entry by entry.

    Args:
        A: A tensor or an array without negative entries.

    Returns:
        The same kind and shape.
    """
    return A.sqrt() if isinstance(A, Tensor) else _each("sqrt", A)


def sigmoid(A: Array) -> Array:
    """``1 / (1 + e^−A)``, entry by entry.

    Args:
        A: A tensor or an array.

    Returns:
        The same kind and shape.
    """
    return A.sigmoid() if isinstance(A, Tensor) else 1 / (1 + _each("exp", -A))


def where(condition: Array, A: Any, B: Any) -> Array:
    """``A`` where the condition holds, else ``B``.

    Args:
        condition: Booleans of the same kind as the result.
        A: Entries where it holds.
        B: Entries where it does not.

    Returns:
        The broadcast of the three.
    """
    return torch.where(condition, A, B) if isinstance(condition, Tensor) else np.where(condition, A, B)


def relu(A: Array) -> Array:
    """``max(A, 0)``, entry by entry.

    Args:
        A: A tensor or an array.

    Returns:
        The same kind and shape.
    """
    return A.relu() if isinstance(A, Tensor) else np.where(A > 0, A, A * 0)


def elu_plus_one(A: Array) -> Array:
    """The positive feature map ``elu(A) + 1``: ``A + 1`` above 0, ``e^A`` below (Katharopoulos et al. 2020).

    Args:
        A: A tensor or an array.

    Returns:
        The same kind and shape, positive.
    """
    # Not elu(A) + 1 itself: far below 0 that is −1 + 1, and nothing is left.
    return where(A > 0, A + 1, exp(-relu(-A)))


def largest(A: Array, axes: int) -> Array:
    """The largest entry over the last few axes, which are kept with length 1; a constant for gradients.

    Args:
        A: A tensor or an array.
        axes: How many axes.

    Returns:
        The same kind, of the same number of axes.
    """
    last = tuple(range(-axes, 0))
    return A.detach().amax(last, keepdim=True) if isinstance(A, Tensor) else A.max(axis=last, keepdims=True)


def over_rows(A: Array, may: Array | None = None) -> Array:
    """Divide each row by its sum over the allowed entries; a row whose sum is 0 stays 0.

    Args:
        A: Entries that are not negative, ``[..., n, m]``.
        may: Booleans that broadcast against ``A``, ``True`` = allowed; ``None`` allows everything.

    Returns:
        The same kind and shape.
    """
    A = A if may is None else where(may, A, like(A, 0.0))
    sums = A.sum(axis=-1, keepdims=True)
    return A / where(sums == 0, like(A, 1.0), sums)


def softmax(S: Array, may: Array | None = None) -> Array:
    """Softmax of each row over the allowed entries; a row with none is zero.

    Args:
        S: Scores, ``[..., n, m]``.
        may: Booleans that broadcast against ``S``, ``True`` = allowed; ``None`` allows everything.

    Returns:
        The same kind and shape.
    """
    if not isinstance(S, Tensor):
        # mpmath's exponents are integers without a limit: nothing overflows, no maximum needs to go first.
        return over_rows(exp(S), may)
    return masked_softmax(S if may is None else S.expand(torch.broadcast_shapes(S.shape, may.shape)), may)


def beside(A: Array, B: Array) -> Array:
    """Put the columns of ``B`` to the right of those of ``A``.

    Args:
        A: ``[..., n, m]``.
        B: ``[..., n, k]``.

    Returns:
        ``[..., n, m + k]``.
    """
    return torch.cat([A, B], -1) if isinstance(A, Tensor) else np.concatenate([A, B], -1)


def spectral_norm(W: Array) -> Array:
    """The largest singular value of each matrix; in mpmath too it is a float64.

    Args:
        W: ``[..., d, k]``.

    Returns:
        ``[..., 1, 1]``.
    """
    if isinstance(W, Tensor):
        # σ = uᵀ W v with u, v held fixed has the right gradient, and the same bits with gradients or without.
        U, _, Vh = torch.linalg.svd(W.detach(), full_matrices=False)
        return U[..., :, :1].mT @ W @ Vh[..., :1, :].mT
    return exact(np.linalg.norm(W.astype(float), 2, axis=(-2, -1), keepdims=True))
