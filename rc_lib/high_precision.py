"""The forward pass in as many digits as its residual needs, for any attention pattern (ours).

``rc_lib.residual_flow`` follows the softmax's residual by an algebra of its own.  Here nothing is
rearranged: the plain formulas run in mpmath, with a precision that is chosen anew for each layer.  A state
is a definite matrix, whatever it was computed with; the next layer needs as many digits as the *new* residual
has zeros, and ``GUARD`` more.  It is slow (milliseconds a layer, up to a second at thousands of digits): for
small matrices.
"""

import math
from typing import Any

import mpmath
import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rc_lib import checks
from rc_lib.masks import allowed
from rc_lib.residual_flow import ResidualFlow
from rc_lib.san import SAN, Layer
from rc_lib.variants.arithmetic import exact, sqrt
from rc_lib.variants.pattern import Pattern, project

# Digits of the residual beyond its leading one: float64 wants 16, the rest is for rounding on the way.
GUARD = 30
# A layer is tried first at this many times the zeros of its input's residual: order 3, and a little more.
GUESS = 3.1


def high_precision_flow(
    san: SAN,
    X: Float[Tensor, "n d"],
    mask: Bool[Tensor, "..."] | None = None,
    digits: int = 2000,
) -> ResidualFlow:
    """Residuals of a network's states in high precision, whatever its attention pattern.

    Heads, biases, masks, skips and LayerNorm are supported, MLPs are not.  The flow ends before the first
    state whose residual needs more than ``digits`` digits, so it may have fewer than ``L + 1`` states; so it
    does where tokens are equal, or become so.

    Args:
        san: The network.
        X: Tokens of one sequence, ``[n, d]``, of the weights' dtype.
        mask: ``[n, n]`` or ``[H, n, n]``, ``True`` = may attend.
        digits: The most decimal digits that a layer may be computed with.

    Returns:
        Log-norms, directions (about the mean) and centres, as ``residual_flow`` gives them.

    Raises:
        TypeError: ``san`` is no ``SAN``, or ``X`` is not of its dtype.
        ValueError: ``X`` has batch dimensions, is not finite or of the wrong width, or a layer has an MLP.
    """
    _check(san, X)
    checks.positive_int("digits", digits, minimum=GUARD + 20)
    state = exact(X)
    with mpmath.workdps(2 * GUARD):
        records = [_record(state)]
    for layer in san.layers:
        found = _step(layer, state, records[-1], mask, X, digits)
        if found is None:
            break
        state, record = found
        records.append(record)
    log_norm, direction, centre = (torch.stack(field) for field in zip(*records, strict=True))
    return ResidualFlow(log_norm, direction, centre)


def _check(san: Any, X: Any) -> None:
    if not isinstance(san, SAN):
        raise TypeError(f"san must be a rc_lib.san.SAN, but is {checks.describe(san)}")
    checks.matrix("X", X)
    if X.ndim != 2 or X.shape[-1] != san.dim:
        raise ValueError(f"X is {checks.describe(X)}; expected [n, {san.dim}], one sequence")
    own = next(san.parameters(), X).dtype
    if X.dtype != own:
        raise TypeError(f"X is {checks.describe(X)}, but the weights are {own}")
    if san.mlp:
        raise ValueError("san has an MLP, which this flow does not compute; residual_flow does")


def _step(
    layer: Layer, state: np.ndarray, record: tuple, mask: Tensor | None, X: Tensor, limit: int
) -> tuple[np.ndarray, tuple] | None:
    """One layer with enough digits, or ``None`` if that would be more than the limit."""
    zeros = max(0.0, -record[0].item() / math.log(10))
    if zeros == math.inf:
        return None
    digits = min(limit, GUARD + math.ceil(GUESS * zeros))
    while True:
        with mpmath.workdps(digits):
            new = run_layer(layer, state, layer_mask(layer, X, mask))
            spread, size = np.ptp(new, axis=0).max(), abs(new).max()
            if spread > size * mpmath.mpf(10) ** (GUARD - 10 - digits):
                return new, _record(new)
        if digits >= limit:
            return None
        digits = min(limit, 2 * digits)


def layer_mask(layer: Layer, X: Tensor, mask: Tensor | None = None) -> np.ndarray | None:
    """Who may attend to whom in a layer: the caller's mask and its pattern's own.

    Args:
        layer: A layer of a ``SAN``.
        X: Tokens, ``[n, d]``, for their number.
        mask: ``[n, n]`` or ``[H, n, n]``, ``True`` = may attend.

    Returns:
        Booleans, or ``None`` if nothing is masked.
    """
    pattern = layer.attention.pattern
    may = allowed(X, mask) if pattern is None else pattern.allowed(X, mask)
    return None if may is None else exact(may)


def run_layer(layer: Layer, X: np.ndarray, may: np.ndarray | None = None) -> np.ndarray:
    """One layer without MLP, at mpmath's present precision.

    Args:
        layer: A layer of a ``SAN``.
        X: Tokens as mpmath numbers, ``[n, d]``.
        may: Who may attend to whom, as ``layer_mask`` gives it.

    Returns:
        The next state, ``[n, d]``.
    """
    Y = _attend(layer.attention, _normalise(layer.norm1, X) if layer.norm == "pre" else X, may)
    Y = X + Y if layer.skip else Y
    return _normalise(layer.norm1, Y) if layer.norm == "post" else Y


def _attend(layer: Any, X: np.ndarray, may: np.ndarray | None) -> np.ndarray:
    """``Σ_h P_h (X W_V + 1 b_Vᵀ) W_O + 1 b_Oᵀ``."""
    names = ("W_Q", "W_K", "b_Q", "b_K", "W_V", "b_V", "W_O", "b_O")
    W_Q, W_K, b_Q, b_K, W_V, b_V, W_O, b_O = (exact(getattr(layer, name)) for name in names)
    pattern = layer.pattern or Pattern(layer.heads, *layer.W_Q.shape[1:])
    P = pattern.matrix(X, W_Q, W_K, b_Q, b_K, may)
    return (P @ project(X, W_V, b_V) @ W_O).sum(axis=0) + b_O


def _normalise(norm: Any, X: np.ndarray) -> np.ndarray:
    """LayerNorm."""
    X = X - X.sum(axis=-1, keepdims=True) / X.shape[-1]
    std = sqrt((X * X).sum(axis=-1, keepdims=True) / X.shape[-1] + exact(norm.eps))
    return X / std * exact(norm.weight) + exact(norm.bias)


def _record(X: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """Log-norm, direction and centre of a state, as float64."""
    centre = X.sum(axis=0) / len(X)
    norm = composite(X - centre)
    log_norm = float(mpmath.log(norm)) if norm else -math.inf
    direction = (X - centre) / (norm or 1)
    as_floats = (log_norm, direction.astype(float), centre.astype(float))
    return tuple(torch.as_tensor(value, dtype=torch.float64) for value in as_floats)


def composite(M: np.ndarray) -> Any:
    """The composite norm ``√(‖M‖_1 ‖M‖_∞)`` of a matrix of mpmath numbers.

    Args:
        M: ``[n, d]``.

    Returns:
        One mpmath number.
    """
    return mpmath.sqrt(abs(M).sum(axis=0).max() * abs(M).sum(axis=1).max())
