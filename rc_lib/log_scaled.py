"""Token matrices whose residual is far below what floats hold (ours; blocks of the paper's section 3).

A state is ``X = 1 xᵀ + e^ρ R̂``: a common row ``x``, a direction ``R̂`` of composite norm 1 whose columns
have mean 0, and the logarithm ``ρ`` of the residual.  Only ``ρ`` grows with depth, so a residual of
10^-150000 is as good as any. Each block of a transformer maps a state to a state *exactly*: no step
subtracts two nearly equal numbers, so what is lost is rounding relative to the residual, never relative
to ``x``.

    sum        e^ρ R̂ + e^σ Ŝ = e^m (e^(ρ−m) R̂ + e^(σ−m) Ŝ),   m = max(ρ, σ)
    LayerNorm  LN(y + r) − LN(y) in a form without cancellation (``layer_norm``)
    MLP        σ(u + v) − σ(u) = v · (mean slope of σ between u and u + v) (``ACTIVATION_CHANGES``)

Attention is in ``rc_lib/residual_flow.py``.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

# Nodes and weights of Gauss and Legendre on [0, 1], for the mean slope over steps up to STEP: the error
# is below 1e-17 for tanh, whose nearest pole is π/2 away from the real line, and far below for GELU,
# which has none.
STEP = 0.5
_NODES, _WEIGHTS = (array / 2 for array in np.polynomial.legendre.leggauss(8))

# Below this much of its parts a sum has lost nine of its sixteen digits.
RESOLUTION = 1e-9


@dataclass
class LogScaled:
    """A token matrix ``X = 1 xᵀ + e^ρ R̂``.

    Args:
        x: The common row, ``[*batch, d]``.
        rho: Natural logarithm of the residual's size, ``[*batch]``; ``-inf`` if the tokens are equal.
        R: The direction ``R̂``, ``[*batch, n, d]``.
        resolved: Whether ``rho`` and ``R`` hold digits of the residual, ``[*batch]`` (see ``centred``).
    """

    x: Float[Tensor, "*batch d"]
    rho: Float[Tensor, "*batch"]
    R: Float[Tensor, "*batch n d"]
    resolved: Bool[Tensor, "*batch"]

    @property
    def size(self) -> Float[Tensor, "*batch 1 1"]:
        """``e^ρ``, to multiply matrices with; it underflows to 0, which is then exact to 1e-300."""
        return self.rho.exp()[..., None, None]


def largest(T: Float[Tensor, "..."], axes: int = 2) -> Float[Tensor, "*batch"]:
    """The largest absolute value over the last few axes.

    Args:
        T: Any tensor.
        axes: How many axes.

    Returns:
        A tensor without these axes.
    """
    return T.abs().amax(tuple(range(-axes, 0)))


def split(X: Float[Tensor, "*batch n d"]) -> LogScaled:
    """Write a plain token matrix as a state.

    Args:
        X: Tokens, ``[*batch, n, d]``.

    Returns:
        The state, its centre the token mean; ``rho = -inf`` exactly if all rows are equal (or there is
        only one).
    """
    # The first row goes first: rows equal to the last bit give exactly 0, which a mean would miss by an ulp.
    first, zero = X[..., 0, :], X.new_zeros(X.shape[:-2])
    return centred(first, zero, X - first.unsqueeze(-2), zero == 0, zero)


def centred(
    x: Float[Tensor, "*batch d"],
    rho: Float[Tensor, "*batch"],
    R: Float[Tensor, "*batch n d"],
    resolved: Bool[Tensor, "*batch"],
    parts: Float[Tensor, "*batch"],
) -> LogScaled:
    """Move the centre to the token mean and bring the direction to norm 1.

    Args:
        x: Common row.
        rho: Logarithm of the scale of ``R``.
        R: Any matrix.
        resolved: Whether the state before was resolved.
        parts: The size of the products that ``R`` is a sum of.  If they cancel until less than
            ``RESOLUTION`` of them is left, that is mostly rounding, and the new state is marked as not
            resolved.

    Returns:
        The same token matrix, as a state.
    """
    mean = R.mean(-2, keepdim=True)
    x = x + rho.exp().unsqueeze(-1) * mean.squeeze(-2)
    R = R - mean
    A = R.abs()
    norm = A.sum(-2).amax(-1).sqrt() * A.sum(-1).amax(-1).sqrt()
    R = R / norm.clamp(min=torch.finfo(R.dtype).tiny)[..., None, None]
    return LogScaled(x, rho + norm.log(), R, resolved & (norm >= RESOLUTION * parts))


def add(a: LogScaled, b: LogScaled) -> LogScaled:
    """The sum of two token matrices: a skip connection.

    Args:
        a: A state.
        b: A state of the same shape.

    Returns:
        Their sum.  A residual e^40 times smaller than the other is lost in it, as it must be in 16 digits.
    """
    top = torch.maximum(a.rho, b.rho)
    top = torch.where(top.isneginf(), 0.0, top)
    A, B = ((t.rho - top).exp()[..., None, None] * t.R for t in (a, b))
    return centred(a.x + b.x, top, A + B, a.resolved & b.resolved, largest(A))


def layer_norm(t: LogScaled, eps: float, weight: Float[Tensor, " d"], bias: Float[Tensor, " d"]) -> LogScaled:
    """LayerNorm of a state, exactly (ours).

    Let ``y`` and ``r`` be the centre and a row of the residual, both less their mean over the features,
    and write ``r = α y + r⊥`` with ``r⊥ ⊥ y``; let ``q = |y|²/d + ε`` and ``q' = |y + r|²/d + ε``.  Then

        ``(y + r)/√q' − y/√q = r⊥/√q' + y (ε α (2 + α) − |r⊥|²/d) / (√q √q' ((1 + α)√q + √q'))``

    and nothing cancels while ``1 + α > 0``; where it is not, the residual is large and the plain
    difference is safe.

    Args:
        t: A state.
        eps: What the norm adds to the variance.
        weight: The gain ``g``.
        bias: The shift.

    Returns:
        The normalised state; not finite where a variance and ``eps`` are both 0.
    """
    d, size = t.x.shape[-1], t.size
    y = (t.x - t.x.mean(-1, keepdim=True)).unsqueeze(-2)
    r = t.R - t.R.mean(-1, keepdim=True)
    N = y.square().sum(-1, keepdim=True)
    a = (r * y).sum(-1, keepdim=True) / torch.where(N > 0, N, 1)
    across = r - a * y
    alpha, beta = size * a, size * across.square().sum(-1, keepdim=True) / d
    q = (N / d + eps).sqrt()
    q_new = ((1 + alpha).square() * N / d + size * beta + eps).sqrt()
    forward = (eps * a * (2 + alpha) - beta) / ((1 + alpha) * q + q_new)
    backward = ((1 + alpha) * q - q_new) / torch.where(size > 0, size, 1)
    along = torch.where(alpha > -1, forward, backward) / (q * q_new)
    R = (across / q_new + y * along) * weight
    return centred((y / q).squeeze(-2) * weight + bias, t.rho, R, t.resolved, largest(r / q_new * weight))


def mlp(
    t: LogScaled,
    W_1: Float[Tensor, "d m"],
    b_1: Float[Tensor, " m"],
    W_2: Float[Tensor, "m d"],
    b_2: Float[Tensor, " d"],
    activation: str,
) -> LogScaled:
    """The row-wise map ``σ(x W_1 + b_1) W_2 + b_2`` of a state, exactly (ours).

    Args:
        t: A state.
        W_1, b_1, W_2, b_2: Weights and biases.
        activation: A name in ``ACTIVATION_CHANGES``.

    Returns:
        The state of the MLP's output.

    Raises:
        KeyError: no exact form is known for this activation.
    """
    value, change = ACTIVATION_CHANGES[activation]
    u = (t.x.unsqueeze(-2) @ W_1) + b_1
    centre = (value(u) @ W_2).squeeze(-2) + b_2
    hidden = change(u, t.R @ W_1, t.rho[..., None, None])
    return centred(centre, t.rho, hidden @ W_2, t.resolved, largest(hidden) * W_2.abs().max())


def _identity_change(u: Tensor, v: Tensor, rho: Tensor) -> Tensor:
    return v


def _relu_change(u: Tensor, v: Tensor, rho: Tensor) -> Tensor:
    """``e^-ρ (max(0, u + e^ρ v) − max(0, u))``, with ``u`` in units of ``e^ρ``; ``±inf`` is right."""
    u = u * (-rho).clamp(max=700.0).exp()
    return torch.where(u > 0, torch.maximum(v, -u), (u + v).clamp(min=0.0))


def _smooth_change(f, slope):
    """``e^-ρ (f(u + e^ρ v) − f(u)) = v · mean slope``; by quadrature where the difference would cancel."""

    def change(u: Tensor, v: Tensor, rho: Tensor) -> Tensor:
        w = rho.exp() * v
        largest = w.abs().amax()
        # Below 1e-18 the slope at every node is the slope at u, to the last bit.
        nodes = zip(_NODES + 0.5, _WEIGHTS, strict=True) if largest > 1e-18 else [(0.0, 1.0)]
        mean = sum(weight * slope(u + node * w) for node, weight in nodes)
        if largest > STEP:
            far = w.abs() > STEP
            mean = torch.where(far, (f(u + w) - f(u)) / torch.where(far, w, 1), mean)
        return v * mean

    return change


def _gelu_slope(u: Tensor) -> Tensor:
    return torch.special.ndtr(u) + u * (-u.square() / 2).exp() / math.sqrt(2 * math.pi)


def _tanh_slope(u: Tensor) -> Tensor:
    # 1 − tanh² would cancel for large |u|.
    e = (-2 * u.abs()).exp()
    return 4 * e / (1 + e).square()


# Name -> (the activation, its change over a step of e^ρ v, divided by e^ρ).
ACTIVATION_CHANGES = {
    "identity": (lambda u: u, _identity_change),
    "relu": (torch.relu, _relu_change),
    "tanh": (torch.tanh, _smooth_change(torch.tanh, _tanh_slope)),
    "gelu": (torch.nn.functional.gelu, _smooth_change(torch.nn.functional.gelu, _gelu_slope)),
}
