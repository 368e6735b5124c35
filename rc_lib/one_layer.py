"""One layer of attention: exact identity, sandwich, cubic step (paper, appendix: proof of Theorem 2.2).

Write ``X = 1 xᵀ + R`` for any common row ``x``.  Row-constant scores drop out of a softmax, so per head

    ``P = softmax(1 rᵀ + E),   E = R W_QK Rᵀ/√d_qk,   r = R W_K (W_Qᵀ x + b_Q)/√d_qk,   s = softmax(r)``
    ``SA(X) − 1 yᵀ = Σ_h (P_h − 1 s_hᵀ) R W_h,       y = Σ_h W_hᵀ (x + Rᵀ s_h) + b``            (exact)

``R`` enters once through ``R W`` and twice through ``E``: the residual is cubed.  With
``δ_i = max_j E_ij − min_j E_ij`` there are two ways to bound ``P − 1sᵀ``:

* the paper's sandwich ``(1 − δ_i) s_j ≤ P_ij ≤ (1 + 2 δ_i) s_j``, which needs ``δ_i ≤ 1.256``;
* ours: the total variation distance of ``P_i`` and ``s`` is at most ``tanh(δ_i/4)``, for every ``E``.

What a layer does with its weights is held by ``HeadMaps``, whose tensors may carry leading batch
dimensions: a batch of tokens, a batch of networks, or both.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rc_lib import checks
from rc_lib.attention import MultiHeadAttention
from rc_lib.rank import CENTERS, residual

# The paper's range for the scores' variation; eᵗ ≤ 1 + 2t holds from 0 up to the root 1.25643…
RANGE = 1.256
# Below this a tilt is linear in E to the last bit of a float64.
LINEAR = math.log(2.0**-58)
# exp(600) times the largest product of ordinary scores is still a float64.
HUGE = 600.0


@dataclass(frozen=True)
class HeadMaps:
    """What the theory sees of a layer: one bilinear form and one linear map per head.

    Args:
        W_QK: ``W_Q W_Kᵀ`` of each head, ``[*batch, H, d, d]``.
        k: ``W_K b_Q`` of each head, ``[*batch, H, d]``.
        W: ``W_h = W_V W_O`` of each head, ``[*batch, H, d, d']``.
        b: The whole bias, ``[*batch, d']``.
        d_qk: Size of queries and keys.
    """

    W_QK: Float[Tensor, "*batch heads d d"]
    k: Float[Tensor, "*batch heads d"]
    W: Float[Tensor, "*batch heads d d_out"]
    b: Float[Tensor, "*batch d_out"]
    d_qk: int

    @classmethod
    def of(cls, layer: MultiHeadAttention) -> "HeadMaps":
        """Read a layer's weights, in float64 and without gradients.

        Args:
            layer: A layer of attention.

        Returns:
            Its maps.

        Raises:
            ValueError: the layer has a pattern of its own in place of the softmax.
        """
        if layer.pattern is not None:
            kind = type(layer.pattern).__name__
            raise ValueError(f"layer has the pattern {kind}: the theory here is about the softmax")
        W_Q, W_K, W_V, W_O = (W.detach().double() for W in (layer.W_Q, layer.W_K, layer.W_V, layer.W_O))
        b_Q, b_V, b_O = (b.detach().double() for b in (layer.b_Q, layer.b_V, layer.b_O))
        k = (W_K @ b_Q.unsqueeze(-1)).squeeze(-1)
        b = torch.einsum("hv,hvd->d", b_V, W_O) + b_O
        return cls(W_Q @ W_K.mT, k, W_V @ W_O, b, W_Q.shape[-1])

    @property
    def heads(self) -> int:
        """The number of heads ``H``."""
        return self.W_QK.shape[-3]


@dataclass(frozen=True)
class Identity:
    """The exact identity of one layer: ``SA(X) = 1 yᵀ + residual``.

    Args:
        x: The centre of the input, ``[*batch, d]``.
        R: ``X − 1xᵀ``, ``[*batch, n, d]``.
        E: The part of the scores that is quadratic in ``R``, ``[*batch, H, n, n]``.
        r: The part that all rows share, ``[*batch, H, n]``.
        s: ``softmax(r)``, ``[*batch, H, n]``.
        tilt: ``P − 1sᵀ``, ``[*batch, H, n, n]``.
        RW: ``R W_h``, ``[*batch, H, n, d']``.
        y: The centre of the output, ``[*batch, d']``.
    """

    x: Float[Tensor, "*batch d"]
    R: Float[Tensor, "*batch n d"]
    E: Float[Tensor, "*batch heads n n"]
    r: Float[Tensor, "*batch heads n"]
    s: Float[Tensor, "*batch heads n"]
    tilt: Float[Tensor, "*batch heads n n"]
    RW: Float[Tensor, "*batch heads n d_out"]
    y: Float[Tensor, "*batch d_out"]

    @property
    def P(self) -> Float[Tensor, "*batch heads n n"]:
        """The attention matrices, ``1sᵀ + tilt``."""
        return self.s.unsqueeze(-2) + self.tilt

    @property
    def residual(self) -> Float[Tensor, "*batch n d_out"]:
        """``SA(X) − 1yᵀ = Σ_h (P_h − 1s_hᵀ) R W_h``, without cancellation."""
        return (self.tilt @ self.RW).sum(-3)


def about(
    X: Float[Tensor, "*batch n d"], center: str | Float[Tensor, "... d"]
) -> tuple[Float[Tensor, "*batch d"], Float[Tensor, "*batch n d"]]:
    """Split ``X = 1xᵀ + R`` about a centre.

    Args:
        X: Tokens, ``[*batch, n, d]``.
        center: ``"mean"``, ``"median"``, ``"minimizer"`` (see ``rc_lib.rank.residual``), or the row
            ``x`` itself, of a shape that broadcasts to ``[*batch, d]``.

    Returns:
        ``x``, ``[*batch, d]``, and ``R``, ``[*batch, n, d]``.

    Raises:
        ValueError: an unknown centre, one of the wrong width, or an ``X`` that is refused.
        TypeError: ``X`` or the centre holds no floating-point numbers.
    """
    checks.matrix("X", X)
    if not isinstance(center, Tensor):
        checks.one_of("center", center, CENTERS)
        R = residual(X, center)
        return X[..., 0, :] - R[..., 0, :], R
    checks.finite("center", center)
    if center.ndim < 1 or center.shape[-1] != X.shape[-1]:
        raise ValueError(f"center is {checks.describe(center)}; expected [*batch, {X.shape[-1]}]")
    x = center.expand(X.shape[:-2] + X.shape[-1:])
    return x, X - x.unsqueeze(-2)


def identity(
    layer: MultiHeadAttention | HeadMaps,
    X: Float[Tensor, "*batch n d"],
    center: str | Float[Tensor, "... d"] = "mean",
) -> Identity:
    """Write a layer of attention about a centre, exactly.

    Args:
        layer: The layer, or its maps.
        X: Tokens, ``[*batch, n, d]``; computed in float64.
        center: As in ``about``.

    Returns:
        All parts of the identity.

    Raises:
        ValueError: the shapes do not fit, or ``X`` is refused.
        TypeError: ``layer`` is no layer of attention, or ``X`` holds no floating-point numbers.
    """
    maps = layer if isinstance(layer, HeadMaps) else HeadMaps.of(_attention(layer))
    x, R = about(checks.floats("X", X).double(), center)
    if X.shape[-1] != maps.W.shape[-2]:
        raise ValueError(f"X is {checks.describe(X)}; expected [*batch, n, {maps.W.shape[-2]}]")
    root, RH = math.sqrt(maps.d_qk), R.unsqueeze(-3)
    E = RH @ maps.W_QK @ RH.mT / root
    q = torch.einsum("...hde,...d->...he", maps.W_QK, x) + maps.k
    r = (RH @ q.unsqueeze(-1)).squeeze(-1) / root
    s = r.softmax(-1)
    moved = x.unsqueeze(-2) + (s.unsqueeze(-2) @ RH).squeeze(-2)
    y = torch.einsum("...hd,...hdo->...o", moved, maps.W) + maps.b
    return Identity(x, R, E, r, s, tilt(r, E), RH @ maps.W, y)


def _attention(layer: object) -> MultiHeadAttention:
    if not isinstance(layer, MultiHeadAttention):
        raise TypeError(f"layer must be a MultiHeadAttention or HeadMaps, but is {checks.describe(layer)}")
    return layer


def tilt(r: Float[Tensor, "*batch n"], E: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m n"]:
    """``P − 1sᵀ`` for ``P = softmax(1rᵀ + E)``, ``s = softmax(r)``, without cancellation (ours).

    Per row, ``P_j − s_j = s_j expm1(E_j − lse)`` with ``lse = log Σ_j s_j e^{E_j}`` by ``log1p`` and
    ``expm1``.  The entry where ``s`` is largest is minus the sum of the others: there two numbers near 1
    would be subtracted.

    Args:
        r: Shared scores, ``[*batch, n]``.
        E: Scores of each row, ``[*batch, m, n]``; finite.

    Returns:
        ``[*batch, m, n]``; each row sums to 0.
    """
    log_s = r.log_softmax(-1).unsqueeze(-2)
    s, top = log_s.exp(), log_s.argmax(-1, keepdim=True).expand(*E.shape[:-1], 1)
    E = E - E.gather(-1, top)
    mild = E.abs().amax(-1, keepdim=True) <= 1
    lse = (s * torch.where(mild, E, 0).expm1()).sum(-1, keepdim=True).log1p()
    # Rounded one way only: in scores near 1e17 the order of two sums decides about e^±50.
    log_P = torch.where(mild, log_s + (E - lse), (log_s + E).log_softmax(-1))
    F = torch.where(mild, E - lse, log_P - log_s)
    # Where P is more than e times s the difference is safe, and s may have underflowed.
    D = torch.where(F < 1, s * F.clamp(max=1).expm1(), log_P.exp() - s)
    D = D.scatter(-1, top, 0.0)
    return D.scatter(-1, top, -D.sum(-1, keepdim=True))


def linear_tilt(s: Float[Tensor, "*batch n"], E: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m n"]:
    """The derivative of ``tilt`` at ``E = 0``: ``s ∘ (E − (E s)1ᵀ)`` (ours).

    Args:
        s: A distribution, ``[*batch, n]``.
        E: Scores of each row, ``[*batch, m, n]``.

    Returns:
        ``[*batch, m, n]``; each row sums to 0.
    """
    top = s.argmax(-1, keepdim=True).unsqueeze(-2).expand(*E.shape[:-1], 1)
    E = E - E.gather(-1, top)
    D = s.unsqueeze(-2) * (E - E @ s.unsqueeze(-1))
    D = D.scatter(-1, top, 0.0)
    return D.scatter(-1, top, -D.sum(-1, keepdim=True))


def spread(E: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m"]:
    """``δ_i = max_j E_ij − min_j E_ij`` of each row, ``[*batch, m]`` (paper, appendix; here row by row).

    Args:
        E: Scores, ``[*batch, m, n]``.

    Returns:
        The spans of the rows.
    """
    return E.amax(-1) - E.amin(-1)


def sandwich(
    s: Float[Tensor, "*batch n"], delta: Float[Tensor, "*batch m"]
) -> tuple[Float[Tensor, "*batch m n"], Float[Tensor, "*batch m n"]]:
    """The paper's two bounds on ``P``: ``(1 − δ_i) s_j`` and ``(1 + 2 δ_i) s_j`` (paper, appendix).

    The lower one always holds, because ``e^{−δ} ≥ 1 − δ``; the upper one only where ``δ_i ≤ 1.256``
    (``RANGE``): there ``e^δ ≤ 1 + 2δ``.

    Args:
        s: The shared distribution, ``[*batch, n]``.
        delta: The spans ``δ_i``, ``[*batch, m]``.

    Returns:
        Lower and upper bound, ``[*batch, m, n]`` each.
    """
    rows, s = delta.unsqueeze(-1), s.unsqueeze(-2)
    return (1 - rows) * s, (1 + 2 * rows) * s


def gamma(E: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch"]:
    """``γ = √(Σ_i δ_i · max_i δ_i) / (2 ‖E‖_1)``: the smallest that the paper's step needs (ours).

    The first version of the paper takes it to be 1, which its step allows for one or two tokens only; the
    second introduces one "that depends on the attention entries".  It does not depend on the scale of ``E``,
    and ``γ ≤ √(n/2)``: a row's span is at most the sum of its absolute values, so ``Σδ ≤ n ‖E‖_1``, and
    at most twice its largest, so ``max δ ≤ 2 ‖E‖_1``.  Some ``E`` reaches it.

    Args:
        E: Scores, ``[*batch, n, n]``.

    Returns:
        ``[*batch]``; 0 where all spans are 0.

    Raises:
        ValueError: ``E`` is empty or not finite.
        TypeError: ``E`` holds no floating-point numbers.
    """
    checks.matrix("E", E)
    total, largest = gains(E, spread(E))
    return (total * largest).sqrt() / 2


def gains(
    E: Float[Tensor, "*batch n n"], delta: Float[Tensor, "*batch n"]
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """The two factors of ``4 γ²``: ``Σ_i δ_i / ‖E‖_1`` (at most ``n``) and ``max_i δ_i / ‖E‖_1`` (at most 2).

    Args:
        E: Scores, ``[*batch, n, n]``.
        delta: Their spans ``δ_i``, ``[*batch, n]``.

    Returns:
        Both, ``[*batch]``; 0 where ``E`` is 0.
    """
    size = E.abs().sum(-2).amax(-1)
    size = torch.where(size > 0, size, 1)
    return delta.sum(-1) / size, delta.amax(-1) / size


def total_variation(P: Float[Tensor, "*batch n"], s: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
    """Total variation distance ``½ Σ_j |P_j − s_j|`` of distributions, in [0, 1] (definition).

    Args:
        P: Distributions, ``[*batch, n]``.
        s: Distributions of the same shape.

    Returns:
        ``[*batch]``.
    """
    return (P - s).abs().sum(-1) / 2


def tilt_distance(delta: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """``tanh(δ/4)``: how far a tilt by scores of span ``δ`` can move a distribution (ours).

    The distance is total variation.  Best possible: two points with ``s = (σ(−δ/2), σ(δ/2))``, σ the
    logistic function, and ``E = (δ, 0)`` reach it.

    Args:
        delta: Spans, any shape.

    Returns:
        The same shape, in [0, 1].
    """
    return (delta / 4).tanh()


def growth(delta: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """``φ(δ) = (e^δ − 1)/δ``, with ``φ(0) = 1``; at the paper's range ``φ(1.25643…) = 2`` (ours).

    The distance of ``P_i`` and ``s`` is also at most ``φ(δ_i) Σ_j s_j |E_ij|``, which sums over the rows to
    ``φ(δ) ‖E‖_1``: no γ.

    Args:
        delta: Spans, any shape.

    Returns:
        The same shape; at least 1, ``inf`` beyond the range of floats.
    """
    safe = torch.where(delta > 0, delta, 1)
    return torch.where(delta > 0, safe.expm1() / safe, 1.0)
