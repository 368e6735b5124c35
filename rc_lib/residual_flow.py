"""Residual flow: the collapse of Theorems 2.2 and 2.3 (paper, section 2) seen to any depth (ours).

Floating point cannot hold a residual below ``eps · |X|``: float64 stalls at 1e-14 within four layers.
The flow carries ``(x, ρ, R̂)`` with ``X = 1 xᵀ + e^ρ R̂`` instead.  In one layer of attention,
row-constant scores dropped,

    ``E = e^{2ρ} Ê,   Ê = R̂ W_QK R̂ᵀ/√d_qk,   r = e^ρ R̂ W_K (W_Qᵀ x + b_Q)/√d_qk,   s = softmax(r)``
    ``SA(X) = 1 yᵀ + e^ρ Σ_h (P_h − 1 s_hᵀ) R̂ W_h,   y = Σ_h W_hᵀ (x + e^ρ R̂ᵀ s_h) + b``

exactly.  ``P − 1 sᵀ = s ∘ expm1(E − lse)`` with ``lse = log Σ_j s_j e^E`` is evaluated without
cancellation and divided by the size of ``E`` before it can underflow, so the new residual is ``e^{3ρ}``
times a matrix of ordinary size.

Masks are exact too.  Row ``i`` may see the keys ``A_i``; ``S_i`` is ``s`` restricted to them and
renormalised.  Then ``P − 1 sᵀ = (P − S) + (S − 1 sᵀ)``: the first part is the cubic one, the second is of
order 1 and vanishes identically if all rows see the same keys.  So a padding mask collapses with order 3, a
causal one with order 1.

Skips, MLPs and LayerNorm have exact forms of their own, in ``rc_lib/log_scaled.py``.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rc_lib import checks, log_scaled
from rc_lib.attention import MultiHeadAttention
from rc_lib.blocks import MLP, LayerNorm
from rc_lib.log_scaled import RESOLUTION, LogScaled, centred, largest
from rc_lib.masks import allowed
from rc_lib.norms import composite_norm
from rc_lib.rank import CENTERS, residual
from rc_lib.san import SAN, Layer

# Below e^LINEAR = 4e-18 the scores' size does not matter: P − 1sᵀ is linear in E to the last bit.
LINEAR = -40.0
# If no key has more than e^SATURATED = 0.9 of s, then 1 − s_k has its digits and no key needs special care.
SATURATED = -0.1


@dataclass
class ResidualFlow:
    """The residuals of all the states of a network, from the input to layer ``L`` (ours).

    State ``l`` is ``1 centre_lᵀ + exp(log_norm_l) · direction_l``.

    Args:
        log_norm: Natural logarithm of the residual's composite norm, ``[*batch, L+1]``; ``-inf`` where
            tokens are equal; NaN where it is not resolved (see ``resolved``).
        direction: The residual divided by its norm, ``[*batch, L+1, n, d]``; zeros where tokens are equal,
            NaN where it is not resolved.
        centre: The common row, ``[*batch, L+1, d]``.
    """

    log_norm: Float[Tensor, "*batch states"]
    direction: Float[Tensor, "*batch states n d"]
    centre: Float[Tensor, "*batch states d"]

    @property
    def resolved(self) -> Bool[Tensor, "*batch states"]:
        """Whether each state's residual is known, ``[*batch, L+1]``; ``False`` where ``log_norm`` is NaN.

        Float64 carries 16 digits of the residual.  If a layer removes all of them (sharp attention that looks
        at one group of merged tokens only), neither this state nor a later one is known.  Equal tokens, whose
        ``log_norm`` is ``-inf``, are resolved.
        """
        return ~self.log_norm.isnan()

    @property
    def log10_norm(self) -> Float[Tensor, "*batch states"]:
        """``log_norm`` as a decimal logarithm, ``[*batch, L+1]``."""
        return self.log_norm / math.log(10)

    @property
    def order(self) -> Float[Tensor, "*batch layers"]:
        """Order of convergence of each layer, ``[*batch, L]``: ``log ‖res X_{l+1}‖ / log ‖res X_l‖``.

        It tends to 3 in a SAN.  It depends on the unit of length, and means something once the residual is
        well below 1.  ``inf`` where the new residual is exactly 0; NaN where one is not resolved, or both
        are exactly 1.
        """
        new, old = self.log_norm[..., 1:], self.log_norm[..., :-1]
        return torch.where(new.isneginf(), math.inf, new / old)

    @property
    def order_of_steps(self) -> Float[Tensor, "*batch pairs"]:
        """Order from two layers in a row, ``[*batch, L-1]``: the ratio of successive steps of ``log_norm``.

        From ``log r_{l+1} = p log r_l + log c`` follows that this is ``p`` exactly, whatever the unit and
        whatever ``c``.  Conventions as in ``order``.
        """
        steps = self.log_norm.diff(dim=-1)
        return torch.where(self.log_norm[..., 2:].isneginf(), math.inf, steps[..., 1:] / steps[..., :-1])

    def state(self, layer: int) -> Float[Tensor, "*batch n d"]:
        """The plain token matrix after a layer, in which a small residual is lost to rounding.

        Args:
            layer: From 0 (the input) to ``L``; negative numbers count from the end.

        Returns:
            ``X_l``, ``[*batch, n, d]``.
        """
        size = self.log_norm[..., layer].exp()[..., None, None]
        return self.centre[..., layer, :].unsqueeze(-2) + size * self.direction[..., layer, :, :]


@torch.no_grad()
def residual_flow(
    san: SAN,
    X: Float[Tensor, "*batch n d"],
    mask: Bool[Tensor, "..."] | None = None,
    key_padding_mask: Bool[Tensor, "*batch n"] | None = None,
    center: str = "mean",
) -> ResidualFlow:
    """Follow the residual of a network's states far below the resolution of floats.

    All switches of ``SAN`` have an exact form and are supported: heads, biases, masks, skips, MLPs with
    the activations identity, ReLU, tanh and GELU, pre- and post-norm.  The states are those of
    ``Trace.hidden``: a final norm comes after the last of them, and there is no dropout.  Everything is
    computed in float64, whatever the dtype of the weights.

    The rounding error is relative to the whole residual: a part of it that is 10^-16 of the rest is lost.
    If a layer then removes the rest (sharp attention that looks at one group of merged tokens only), what
    is left is not resolved: from there on log-norms and directions are NaN, never a number made of rounding.
    The result's ``resolved`` says where; ``resolved.all()`` is worth asking when weights are large.

    Args:
        san: The network.
        X: Tokens, ``[*batch, n, d]``, of the weights' dtype.  A single token has residual 0.
        mask: ``[n, n]``, ``[*batch, n, n]`` or ``[*batch, H, n, n]``, ``True`` = may attend.
        key_padding_mask: ``[*batch, n]``, ``True`` for real tokens.  The rows of padding count in the
            residual.
        center: About which centre the residual is taken: ``"mean"``, ``"median"`` or ``"minimizer"``.

    Returns:
        Log-norms, directions and centres of ``L + 1`` states; a network without layers gives the input's.

    Raises:
        TypeError: ``san`` is no ``SAN``, ``X`` is not of its dtype, or a mask is not boolean.
        ValueError: ``X`` is empty, not finite or of the wrong width; a mask's shape does not fit, or it
            leaves a token no key (its row of attention is then no distribution); a block has no exact
            form; the states overflow.
    """
    _check(san, X)
    checks.one_of("center", center, CENTERS)
    may = _allowed(X, san.heads, mask, key_padding_mask)
    states = [log_scaled.split(X.double())]
    for layer in san.layers:
        states.append(_layer(layer, states[-1], may))
    _finite(states)
    if center != "mean":
        states = [_about(t, center) for t in states]
    return ResidualFlow(
        log_norm=torch.stack([torch.where(t.resolved, t.rho, math.nan) for t in states], -1),
        direction=torch.stack([torch.where(t.resolved[..., None, None], t.R, math.nan) for t in states], -3),
        centre=torch.stack([t.x for t in states], -2),
    )


def _check(san: Any, X: Any) -> None:
    if not isinstance(san, SAN):
        raise TypeError(f"san must be a rc_lib.san.SAN, but is {checks.describe(san)}")
    checks.matrix("X", X)
    if X.shape[-1] != san.dim:
        raise ValueError(f"X is {checks.describe(X)}; expected [*batch, n, {san.dim}]")
    for l, layer in enumerate(san.layers, start=1):
        _check_layer(layer, l)
        if layer.attention.W_Q.dtype != X.dtype:
            W = checks.describe(layer.attention.W_Q)
            raise TypeError(f"X is {checks.describe(X)}, W_Q of layer {l} is {W}: dtypes must agree")


def _check_layer(layer: Layer, l: int) -> None:
    """Refuse blocks for which no exact form is known: anything that overrides the library's own."""
    parts = {"attention": MultiHeadAttention, "mlp": MLP, "norm1": LayerNorm, "norm2": LayerNorm}
    for name, kind in parts.items():
        part = getattr(layer, name)
        if part is not None and type(part) is not kind:
            raise ValueError(
                f"{name} of layer {l} is a {type(part).__name__}; only {kind.__name__} has an exact form"
            )
    if layer.attention.pattern is not None:
        kind = type(layer.attention.pattern).__name__
        raise ValueError(f"layer {l} has the pattern {kind}: only the softmax has an exact form here")
    known = log_scaled.ACTIVATION_CHANGES
    if layer.mlp is not None and layer.mlp.activation not in known:
        raise ValueError(
            f"activation of layer {l} is {layer.mlp.activation!r}; exact forms: {', '.join(known)}"
        )


def _allowed(X: Tensor, heads: int, mask: Tensor | None, key_padding_mask: Tensor | None) -> Tensor | None:
    """Who may attend to whom, ``[*batch, H, n, n]``; ``None`` if everyone may to everyone."""
    may = allowed(X, mask, key_padding_mask)
    n = X.shape[-2]
    if may is not None and may.ndim > 2 and may.shape[-3] not in (1, heads):
        raise ValueError(f"mask is {checks.describe(mask)}, but there are {heads} heads")
    if may is None or bool(may.all()):
        return None
    empty = torch.nonzero(~may.any(-1))
    if len(empty):
        where = empty[0].tolist()
        raise ValueError(
            f"mask leaves the query at index {where} without any key; its row is no distribution"
        )
    return may.expand(*X.shape[:-2], heads, n, n)


def _finite(states: list[LogScaled]) -> None:
    """Refuse states that have overflowed; a direction that is not finite has made ``rho`` NaN or infinite."""
    good = torch.stack([t.x.isfinite().all() & (t.rho < math.inf).all() for t in states])
    if not bool(good.all()):
        l = good.tolist().index(False)
        raise ValueError(f"the state after layer {l} is not finite: weights or X are too large for float64")


def _about(t: LogScaled, center: str) -> LogScaled:
    """The same state about another centre than the mean."""
    R = residual(t.R, center)
    norm = composite_norm(R)
    x = t.x + t.size.squeeze(-1) * (t.R - R)[..., 0, :]
    return LogScaled(x, t.rho + norm.log(), R / torch.where(norm > 0, norm, 1)[..., None, None], t.resolved)


def _layer(layer: Layer, t: LogScaled, may: Tensor | None) -> LogScaled:
    t = _branch(layer, t, lambda t: _attend(layer.attention, t, may), layer.skip, layer.norm1)
    if layer.mlp is None:
        return t
    weights = [W.double() for W in (layer.mlp.W_1, layer.mlp.b_1, layer.mlp.W_2, layer.mlp.b_2)]
    feed = lambda t: log_scaled.mlp(t, *weights, layer.mlp.activation)  # noqa: E731
    return _branch(layer, t, feed, layer.mlp_skip, layer.norm2)


def _branch(layer: Layer, t: LogScaled, f: Any, skip: bool, norm: nn.Module | None) -> LogScaled:
    """``[X +] f(X)`` with the norm before, after or nowhere, as in ``Layer``."""
    new = f(_normalise(norm, t) if layer.norm == "pre" else t)
    if skip:
        new = log_scaled.add(t, new)
    return _normalise(norm, new) if layer.norm == "post" else new


def _normalise(norm: LayerNorm, t: LogScaled) -> LogScaled:
    return log_scaled.layer_norm(t, norm.eps, norm.weight.double(), norm.bias.double())


def _attend(layer: MultiHeadAttention, t: LogScaled, may: Tensor | None) -> LogScaled:
    """One layer of attention; the last row of ``Z`` and of what follows belongs to the centre ``x``."""
    Z = torch.cat([t.R, t.x.unsqueeze(-2)], -2)
    Q, K, V = _project(Z, layer.W_Q), _project(t.R, layer.W_K), _project(Z, layer.W_V)
    noise = RESOLUTION * largest(Q[..., :-1, :], 3) * largest(K, 3)
    Q[..., -1, :] += layer.b_Q
    V[..., -1, :] += layer.b_V
    scores, size = Q @ K.mT / math.sqrt(K.shape[-1]), t.size.unsqueeze(-1)
    P = _deviation(scores[..., :-1, :], size * scores[..., -1:, :], t.rho, may, noise)
    V, V_x = V[..., :-1, :], V[..., -1:, :]
    W_O = layer.W_O.double()
    Y = P.apply(V, V_x, size).transpose(-3, -2).flatten(-2) @ W_O.flatten(0, 1)
    parts = P.parts * largest(V, 3) * W_O.abs().max()
    return centred(Y[..., -1, :] + layer.b_O, P.log_scale, Y[..., :-1, :], t.resolved, parts)


def _project(Z: Tensor, W: Tensor) -> Tensor:
    """``Z W_h`` of every head, ``[*batch, H, n, k]``, as one product."""
    H, d, k = W.shape
    return (Z @ W.double().transpose(0, 1).reshape(d, H * k)).unflatten(-1, (H, k)).transpose(-3, -2)


@dataclass
class _Deviation:
    """``P − 1 pᵀ = e^{log_scale − ρ} D``, where ``p`` is a distribution that all rows share.

    Where ``k`` is given, column ``k`` of ``D`` is left out: the rows of ``P − 1 pᵀ`` add up to 0, so it
    does not matter once the values are taken relative to those of key ``k``.  With ``k`` the likeliest
    key nothing cancels when all attention saturates on it: what is left of the others keeps its digits,
    however small it is.  The rounding error of ``D`` is relative to ``parts``; ``inf`` if it is all noise.
    """

    D: Float[Tensor, "*batch heads n n"]
    p: Float[Tensor, "*batch heads 1 n"]
    log_scale: Float[Tensor, "*batch"]
    parts: Float[Tensor, "*batch"]
    k: Int[Tensor, "*batch heads 1 1"] | None = None

    def apply(self, V: Tensor, V_x: Tensor, size: Tensor) -> Tensor:
        """``D V``, and below it the new centre's row ``V_x + e^ρ pᵀ V``."""
        relative = V if self.k is None else V - V.take_along_dim(self.k, -2)
        return torch.cat([self.D @ relative, V_x + size * (self.p @ V)], -2)


def _deviation(E: Tensor, r: Tensor, rho: Tensor, may: Tensor | None, noise: Tensor) -> _Deviation:
    """The deviation of all heads from ``Ê [*batch, H, n, n]`` and ``r [*batch, H, 1, n]``."""
    log_S = _log_softmax(r, may)
    S = log_S.exp()
    E = E - E @ S.mT if may is None else (E - (S * E).sum(-1, keepdim=True)).masked_fill(~may, 0.0)
    # One scale for all heads of a batch element; tiny keeps its logarithm finite if there are no scores.
    top = largest(E, 3)
    parts = torch.where((top < noise) & (top > 0), math.inf, top.sign())
    top = top.clamp(min=torch.finfo(E.dtype).tiny)
    E, log_size = E * (1 / top)[..., None, None, None], 2 * rho + top.log()
    hottest = log_size.amax().item()
    if may is None and hottest <= 0 and log_S.amax().item() < SATURATED:
        return _Deviation(S * _tilt(S, E, log_size), S, rho + log_size, parts)
    near = _small_scores(E, log_S, S, rho, log_size, parts, r, may)
    return near if hottest <= 0 else _choose(log_size > 0, _large_scores(E, log_S, rho, log_size), near)


def _tilt(S: Tensor, E: Tensor, log_size: Tensor) -> Tensor:
    """``(P/S − 1)/a = expm1(a E − lse)/a`` for ``P_i ∝ S_i ∘ e^{a E_i}``, ``a ≤ 1``, ``S_i · E_i = 0``."""
    if log_size.amax().item() <= LINEAR:
        return E
    a = log_size.clamp(min=LINEAR).exp()[..., None, None, None]
    E = a * E
    return (E - (S * E.expm1()).sum(-1, keepdim=True).log1p()).expm1() / a


def _small_scores(E, log_S, S, rho, log_size, parts, r, may) -> _Deviation:
    """For ``|E| ≤ 1``, with ``p = s``: ``P − 1 sᵀ = (P − S) + (S − 1 sᵀ)``."""
    log_s = log_S if may is None else _log_softmax(r, may.any(-2, keepdim=True))
    k = log_s.argmax(-1, keepdim=True)
    (T, m), s = _without(log_S, k), log_s.exp()
    D = T * _tilt(S, E, log_size)
    if may is None:
        return _Deviation(D, s, rho + m + log_size, parts, k)
    # S_ij − s_j is S_ij times what s gives to the keys that i does not see: exactly 0 if it sees them all.
    unseen = torch.where(may, 0.0, s).sum(-1, keepdim=True)
    gap = torch.where(may, T * unseen, -_without(log_s, k, m)[0])
    # With a part of order 1 the cubic part is added to it at its own size; otherwise it is of size 1.
    apart = (may != may.any(-2, keepdim=True)).flatten(-3).any(-1)
    size = log_size.exp()
    D = torch.where(apart[..., None, None, None], gap + size[..., None, None, None] * D, D)
    parts = torch.where(apart, torch.maximum(largest(gap, 3), size), parts)
    return _Deviation(D, s, rho + m + torch.where(apart, 0.0, log_size), parts, k)


def _large_scores(E: Tensor, log_S: Tensor, rho: Tensor, log_size: Tensor) -> _Deviation:
    """For larger ``E``, with ``p`` the first row of ``P``: a plain difference does no harm."""
    log_P = (log_S + log_size.exp()[..., None, None, None] * E).log_softmax(-1)
    log_p = log_P[..., :1, :]
    k = log_p.argmax(-1, keepdim=True)
    T, m = _without(log_P, k)
    return _Deviation(T - _without(log_p, k, m)[0], log_p.exp(), rho + m, torch.ones_like(rho), k)


def _choose(first: Tensor, a: _Deviation, b: _Deviation) -> _Deviation:
    """For each batch element ``a`` or ``b``."""
    fields = []
    for A, B in zip(vars(a).values(), vars(b).values(), strict=True):
        fields.append(torch.where(first[(..., *[None] * (A.ndim - first.ndim))], A, B))
    return _Deviation(*fields)


def _log_softmax(r: Tensor, may: Tensor | None) -> Tensor:
    """``log softmax(r)`` over the allowed entries, ``-inf`` for the others."""
    return (r if may is None else r.masked_fill(~may, -math.inf)).log_softmax(-1)


def _without(log_P: Tensor, k: Tensor, m: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``e^{log P − m}`` with zeros in column ``k``; ``m``, unless it is given, makes the largest entry 1."""
    rest = log_P.scatter(-1, k.expand(*log_P.shape[:-1], 1), -math.inf)
    if m is None:
        m = rest.amax((-3, -2, -1))
        m = torch.where(m.isneginf(), 0.0, m)
    return (rest - m[..., None, None, None]).exp(), m
