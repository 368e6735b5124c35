"""The states of a stack about the centres of its layers, at any scale (paper, appendix: the recursion; ours).

The bounds of Theorems 2.2 and 2.3 chain the one-layer step, and the step speaks about one centre: layer
``l`` takes ``X = 1xᵀ + R`` to ``1yᵀ + R'`` with the ``y`` of ``rc_lib.one_layer``.  So the chain follows the
centres ``x_0, x_1 = y(x_0), …``, and its residuals are those about them.  The residual about the minimiser of
the norm is at most that; about the token mean it is at most twice that.

States are ``X = e^ξ 1x̂ᵀ + e^ρ R̂``: neither the collapse of the residual nor the growth of the centre leaves
the range of floats.  Unlike ``rc_lib.residual_flow``, which moves to the token mean after each block, this
recursion keeps the centres that the theorems need; it knows attention and MLPs only.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rc_lib import checks, log_scaled
from rc_lib.blocks import MLP
from rc_lib.norms import abs_sums
from rc_lib.one_layer import HUGE, LINEAR, HeadMaps, linear_tilt, tilt


@dataclass(frozen=True)
class State:
    """A token matrix ``e^ξ 1x̂ᵀ + e^ρ R̂``.

    Args:
        x: ``x̂``, ``[*batch, d]``.
        log_x: ``ξ``, ``[*batch]``.
        R: ``R̂``, of composite norm 1 (or 0), ``[*batch, n, d]``.
        log_R: ``ρ``, ``[*batch]``: the logarithm of the residual; ``-inf`` if it is 0.
    """

    x: Float[Tensor, "*batch d"]
    log_x: Float[Tensor, "*batch"]
    R: Float[Tensor, "*batch n d"]
    log_R: Float[Tensor, "*batch"]


@dataclass(frozen=True)
class Scores:
    """What one layer's attention did at a state, scales apart.

    Args:
        E: ``Ê = R̂ W_QK R̂ᵀ/√d_qk``, ``[*batch, H, n, n]``; the scores are ``e^{2ρ} Ê``.
        spread: ``δ̂_i = max_j Ê_ij − min_j Ê_ij``, ``[*batch, H, n]``.
        log_scale: ``2ρ``, ``[*batch]``.
        RW: ``R̂ W_h`` less its first row, ``[*batch, H, n, d']``.
    """

    E: Float[Tensor, "*batch heads n n"]
    spread: Float[Tensor, "*batch heads n"]
    log_scale: Float[Tensor, "*batch"]
    RW: Float[Tensor, "*batch heads n d_out"]

    @property
    def log_delta(self) -> Float[Tensor, "*batch heads n"]:
        """``log δ_i``."""
        return self.log_scale[..., None, None] + self.spread.log()


def state(x: Float[Tensor, "*batch d"], R: Float[Tensor, "*batch n d"]) -> State:
    """Bring a centre and a residual to scale.

    Args:
        x: Centre, ``[*batch, d]``.
        R: Residual, ``[*batch, n, d]``.

    Returns:
        The state ``1xᵀ + R``.
    """
    zero = R.new_zeros(R.shape[:-2])
    return _scaled(x, zero, R, zero)


def _scaled(x: Tensor, log_x: Tensor, R: Tensor, log_R: Tensor) -> State:
    size = x.abs().amax(-1)
    norm = abs_sums(R, -2).amax(-1).sqrt() * abs_sums(R, -1).amax(-1).sqrt()
    return State(
        x / torch.where(size > 0, size, 1).unsqueeze(-1),
        log_x + size.log(),
        R / torch.where(norm > 0, norm, 1)[..., None, None],
        log_R + norm.log(),
    )


def attend(maps: HeadMaps, t: State) -> tuple[State, Scores]:
    """One layer of attention: the exact identity of ``rc_lib.one_layer`` at any scale (ours).

    Args:
        maps: The layer's weights.
        t: Its input.

    Returns:
        Its output about the centre ``y``, and its scores.
    """
    root, R = math.sqrt(maps.d_qk), t.R.unsqueeze(-3)
    # A softmax does not see a row that all keys share, nor does P − 1sᵀ see one of all values.  These are
    # taken off: about a centre far from the tokens they would drown the differences in rounding errors.
    D = R - R[..., :1, :]
    E, F = (R @ maps.W_QK @ K.mT / root for K in (R, D))
    s, moved, log_moved = _tilts(_shared(maps, t) / root, t.log_R + t.log_x.clamp(min=0), F, 2 * t.log_R)
    RW = D @ maps.W
    x, log_x = _center(maps, t, s)
    scores = Scores(E, F.amax(-1) - F.amin(-1), 2 * t.log_R, RW)
    return _scaled(x, log_x, (moved @ RW).sum(-3), t.log_R + log_moved), scores


def _shared(maps: HeadMaps, t: State) -> Tensor:
    """The scores ``r`` of all rows, less their scale ``e^{ρ + max(ξ, 0)}`` and less their largest."""
    top = t.log_x.clamp(min=0)
    x = (t.log_x - top).exp().unsqueeze(-1) * t.x
    q = torch.einsum("...hde,...d->...he", maps.W_QK, x)
    q = q + (-top).exp()[..., None, None] * maps.k
    r = torch.einsum("...nd,...hd->...hn", t.R, q)
    return r - r.amax(-1, keepdim=True)


def _tilts(r: Tensor, log_r: Tensor, E: Tensor, log_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``s``; ``P − 1sᵀ`` less a scale; the logarithm of that scale, at most 0."""
    log_r, log_e = log_r[..., None, None], log_E[..., None, None]
    # Beyond e^HUGE a softmax is a maximum, so both scales may be lowered together for P, and the one for s.
    excess = (torch.maximum(log_r, log_e) - HUGE).clamp(min=0)
    r_s, r_P = (r * (log_r - e).clamp(max=HUGE).exp() for e in (0, excess))
    E_P = E * (log_e - excess).exp().unsqueeze(-1)
    s, scale = r_s.softmax(-1), log_E.clamp(max=0)
    D = torch.where(
        excess.unsqueeze(-1) > 0,
        (r_P.unsqueeze(-2) + E_P).softmax(-1) - s.unsqueeze(-2),
        tilt(r_P, E_P),
    )
    largest = log_E + E.abs().amax((-3, -2, -1)).log()
    D = torch.where((largest < LINEAR)[..., None, None, None], linear_tilt(s, E), D / _positive(scale.exp()))
    return s, D, scale


def _positive(size: Tensor) -> Tensor:
    """A divisor, and 1 where it has underflowed (the linear form is used there)."""
    return torch.where(size > 0, size, 1)[..., None, None, None]


def _center(maps: HeadMaps, t: State, s: Tensor) -> tuple[Tensor, Tensor]:
    """``y = Σ_h W_hᵀ (x + Rᵀ s_h) + b``, less its scale."""
    top = torch.maximum(t.log_x, t.log_R).clamp(min=0)
    x, R = (t.log_x - top).exp().unsqueeze(-1) * t.x, (t.log_R - top).exp()[..., None, None] * t.R
    u = x.unsqueeze(-2) + torch.einsum("...hn,...nd->...hd", s, R)
    return torch.einsum("...hd,...hde->...e", u, maps.W) + (-top).exp().unsqueeze(-1) * maps.b, top


def feed(mlp: MLP, mlp_skip: bool, t: State) -> State:
    """The row-wise MLP of a layer, with its own skip or without: from about ``y`` to about ``f(y)`` (ours).

    Args:
        mlp: The MLP.
        mlp_skip: Whether its input is added to its output.
        t: Its input.

    Returns:
        Its output about ``f(y)``.

    Raises:
        ValueError: the centre is beyond the range of floats; only attention can be followed there.
    """
    checks.boolean("mlp_skip", mlp_skip)
    W_1, b_1, W_2, b_2 = (W.detach().double() for W in (mlp.W_1, mlp.b_1, mlp.W_2, mlp.b_2))
    x = t.log_x.exp().unsqueeze(-1) * t.x
    if not bool(x.isfinite().all()):
        raise ValueError("san: a state before an MLP is too large for float64")
    value, change = log_scaled.ACTIVATION_CHANGES[mlp.activation]
    u = x @ W_1 + b_1
    rho = t.log_R[..., None, None]
    R = change(u.unsqueeze(-2), t.R @ W_1, rho) @ W_2
    y = value(u) @ W_2 + b_2
    if mlp_skip:
        R, y = R + t.R, y + x
    return _scaled(y, torch.zeros_like(t.log_x), R, t.log_R)
