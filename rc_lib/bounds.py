"""Bounds on the residual at every depth (paper: Theorems 2.2 and 2.3, section 3's Corollary 3.2).

One layer cubes the residual, ``‖R'‖ ≤ c ‖R‖³`` in the composite norm.  The constant is one of the five kinds
of ``rc_lib.layer_constants``: ``"paper"``, ``"stated"``, ``"sharp"``, ``"best"`` and ``"gamma_free"``.

``"paper"`` and ``"stated"`` need ``δ_i ≤ 1.256`` in every row; ``"stated"`` also that its constant is not
below the one of ``"paper"``, which can fail for heads with skewed values.  The other three hold always.  A
bound decreases only if ``c r² < 1``; where it does not, it is true and says nothing.

An MLP after the attention (Corollary 3.2) multiplies ``c`` by ``λ = √(λ_1 λ_∞)``, its Lipschitz constants.

**Which residual.**  All bounds speak about ``‖X_l − 1x_lᵀ‖`` with the centres ``x_l`` of
``rc_lib.layer_centers``, which start at a centre of the caller's choice.  The residual about the minimiser is
at most that, the one about the token mean at most twice that.  All numbers are natural logarithms.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from rc_lib import checks, layer_centers
from rc_lib.bound_report import Assumption as Assumption
from rc_lib.bound_report import BoundReport as BoundReport
from rc_lib.layer_centers import Scores, State
from rc_lib.layer_constants import KINDS as KINDS
from rc_lib.layer_constants import LayerSizes, layer_sizes, log_constant
from rc_lib.layer_constants import mlp_lipschitz as mlp_lipschitz
from rc_lib.norms import oscillation, row_diameter
from rc_lib.one_layer import RANGE, about, gains
from rc_lib.san import SAN

UNCONDITIONAL = ("sharp", "best", "gamma_free", "certificate")


def _walk(san: SAN, X: Tensor, center: str | Tensor) -> tuple[list[LayerSizes], list[State], list[Scores]]:
    """The network's states about its layers' centres, and its scores."""
    layers = layer_sizes(san)
    checks.matrix("X", X)
    if X.shape[-1] != san.dim:
        raise ValueError(f"X is {checks.describe(X)}; expected [*batch, n, {san.dim}]")
    states, scores = [layer_centers.state(*about(X.detach().double(), center))], []
    for own, layer in zip(layers, san.layers, strict=True):
        t, score = layer_centers.attend(own.maps, states[-1])
        states.append(t if layer.mlp is None else layer_centers.feed(layer.mlp, layer.mlp_skip, t))
        if bool(states[-1].log_R.isnan().any()):
            l = len(scores) + 1
            raise ValueError(f"san: the residual after layer {l} is not finite: weights or X are too large")
        scores.append(score)
    return layers, states, scores


def _next(log_c: Tensor, log_r: Tensor, sound: Tensor) -> Tensor:
    """``log c + 3 log r``; equal tokens stay equal, and nothing is claimed where an assumption has failed."""
    log_new = torch.where(log_r.isneginf(), -math.inf, log_c + 3 * log_r)
    return torch.where(sound & (log_r < math.inf), log_new, math.inf)


class _Chain:
    """A bound under construction: one step per layer, and the assumptions met on the way."""

    def __init__(self, kind: str, log_r: Tensor):
        self.kind, self.log_bound = kind, [log_r]
        self.log_c: list[Tensor] = []
        self.assumptions: list[Assumption] = []

    def step(self, layer: LayerSizes, total: Tensor, largest: Tensor, log_delta: Tensor) -> None:
        l, kind = len(self.log_bound), self.kind
        log_r = self.log_bound[-1]
        log_c = log_constant(layer, kind, total, largest, log_delta).expand(log_r.shape)
        found = _range(l, log_delta, kind not in UNCONDITIONAL)
        if kind == "stated" and layer.maps.heads > 1:
            apart = log_constant(layer, "paper", total, largest, log_delta)
            margin = torch.where(apart.isneginf(), math.inf, log_c - apart)
            found.append(Assumption("heads", l, None, margin, True))
        sound = torch.ones_like(log_r, dtype=torch.bool)
        for assumption in found:
            sound = sound & (assumption.holds | torch.tensor(not assumption.required))
        margin = torch.where(log_r.isneginf(), math.inf, -(log_c + 2 * log_r))
        found.append(Assumption("contraction", l, None, margin, False))
        self.log_c.append(log_c)
        self.assumptions += found
        self.log_bound.append(_next(log_c, log_r, sound))

    def report(self, log_residual: Tensor | None) -> BoundReport:
        log_c = (
            torch.stack(self.log_c)
            if self.log_c
            else self.log_bound[0].new_zeros(0, *self.log_bound[0].shape)
        )
        return BoundReport(self.kind, torch.stack(self.log_bound), log_residual, log_c, self.assumptions)


def _range(l: int, log_delta: Tensor, required: bool) -> list[Assumption]:
    margins = (RANGE - log_delta.exp()).unbind(-1)
    return [Assumption("range", l, h, margin, required) for h, margin in enumerate(margins, start=1)]


def _lost(score: Scores) -> Tensor:
    """Where the residual is 0: perhaps because attention has saturated and it was too small to represent.

    Nothing may be concluded from that, so the scores' largest possible values are used instead.
    """
    return score.log_scale.isneginf()


def _chain(
    kind: str, layers: Sequence[LayerSizes], states: Sequence[State], scores: Sequence[Scores]
) -> BoundReport:
    chain = _Chain(kind, states[0].log_R)
    n = scores[0].E.shape[-1] if scores else 1
    for layer, score in zip(layers, scores, strict=True):
        lost = _lost(score).unsqueeze(-1) & (n > 1)
        total, largest = gains(score.E, score.spread)
        total, largest = torch.where(lost, float(n), total), torch.where(lost, 2.0, largest)
        chain.step(layer, total, largest, score.log_delta.amax(-1))
    return chain.report(torch.stack([t.log_R for t in states]))


@torch.no_grad()
def bound(
    san: SAN, X: Float[Tensor, "*batch n d"], kind: str, center: str | Float[Tensor, "... d"] = "mean"
) -> BoundReport:
    """A bound on the residual after every layer, from the weights, the input's residual and γ.

    Each layer has its own constant, which is no larger than the theorem's single one.

    Args:
        san: A network of attention, with MLPs or without; no skips around the attention, no norms.
        X: Tokens, ``[*batch, n, d]``; computed in float64.
        kind: One of ``KINDS``.
        center: About which row the input's residual is taken: ``"mean"``, ``"median"``, ``"minimizer"`` or
            a tensor ``[*batch, d]``.

    Returns:
        The report.

    Raises:
        ValueError: the network has skips or norms, ``kind`` is unknown, or ``X`` is refused.
        TypeError: ``san`` is no ``SAN``, or ``X`` holds no floating-point numbers.
    """
    checks.one_of("kind", kind, KINDS)
    return _chain(kind, *_walk(san, X, center))


def paper_bound(
    san: SAN,
    X: Float[Tensor, "*batch n d"],
    center: str | Float[Tensor, "... d"] = "mean",
    stated: bool = False,
) -> BoundReport:
    """The paper's bound: Theorem 2.2, for several heads Theorem 2.3, with MLPs Corollary 3.2.

    Args:
        san, X, center: As for ``bound``.
        stated: Several heads as the paper states it, with a factor ``H``, which is claimed only where it can
            be proved; by default they are added in ``‖·‖_1`` and in ``‖·‖_∞`` apart.

    Returns:
        The report; nothing is claimed from the first layer on where some ``δ_i > 1.256``.

    Raises:
        ValueError: as for ``bound``.
        TypeError: as for ``bound``.
    """
    return bound(san, X, "stated" if checks.boolean("stated", stated) else "paper", center)


def sharp_bound(
    san: SAN, X: Float[Tensor, "*batch n d"], center: str | Float[Tensor, "... d"] = "mean"
) -> BoundReport:
    """Our bound: four times smaller per layer than the paper's, and without its range (ours).

    After ``L`` layers the ratio of the two is ``4^((3^L − 1)/2)``.  ``bound(san, X, "best")`` has another √2
    per layer, and ``"gamma_free"`` no γ.

    Args:
        san, X, center: As for ``bound``.

    Returns:
        The report; nothing is assumed.

    Raises:
        ValueError: as for ``bound``.
        TypeError: as for ``bound``.
    """
    return bound(san, X, "sharp", center)


@torch.no_grad()
def certificate(
    san: SAN,
    X: Float[Tensor, "*batch n d"],
    center: str | Float[Tensor, "... d"] = "mean",
    compound: bool = True,
) -> BoundReport:
    """Bounds that use the attention scores: ``t_i = tanh(δ_i/4)`` instead of norms of ``W_QK`` (ours).

    With ``osc_j`` the span of a column and the diameter that of the rows in ``ℓ1``, heads added in each norm

        ``‖R'‖_1 ≤ λ_1 max_j Σ_h Σ_i t_hi osc_j(R W_h)``,  ``‖R'‖_∞ ≤ λ_∞ max_i Σ_h t_hi diam(R W_h)``.

    Args:
        san, X, center: As for ``bound``.
        compound: Use the values ``R W_h`` of the first layer only; later layers know the scores and
            ``osc_j(R W) ≤ ‖R‖_1 ‖W‖_1``, ``diam(R W) ≤ 2 ‖R‖_∞ ‖W‖_∞``.  ``False`` looks at each layer's
            values and so bounds one layer at a time.

    Returns:
        The report; nothing is assumed.  The assumptions of the paper's bound are listed for information.

    Raises:
        ValueError: as for ``bound``.
        TypeError: as for ``bound``.
    """
    checks.boolean("compound", compound)
    return _certify(*_walk(san, X, center), compound)


def _certify(
    layers: Sequence[LayerSizes], states: Sequence[State], scores: Sequence[Scores], compound: bool
) -> BoundReport:
    A = B = states[0].log_R
    log_bound, assumptions = [A], []
    for l, (layer, score) in enumerate(zip(layers, scores, strict=True), start=1):
        values, norms = _from_values(score), _from_norms(layer, score, A, B)
        use = _lost(score) | (compound and l > 1)
        A, B = (torch.where(use, new, old) for new, old in zip(norms, values, strict=True))
        A, B = A + layer.log_lip_1, B + layer.log_lip_inf
        # The pair bounds the two norms; at the input only their product is known, and only that is used.
        log_bound.append((A + B) / 2)
        assumptions += _range(l, score.log_delta.amax(-1), False)
    log_residual = torch.stack([t.log_R for t in states])
    return BoundReport("certificate", torch.stack(log_bound), log_residual, None, assumptions)


def _log_tilt_distance(log_delta: Tensor) -> Tensor:
    """``log tanh(δ/4)`` from ``log δ``."""
    return torch.where(log_delta < -18, log_delta - math.log(4), (log_delta.exp() / 4).tanh().log())


def _from_values(score: Scores) -> tuple[Tensor, Tensor]:
    """Logarithms of the two norms' bounds, from the values ``R W_h``."""
    log_t, log_R = _log_tilt_distance(score.log_delta), score.log_scale / 2
    columns = log_t.logsumexp(-1, keepdim=True) + oscillation(score.RW).log()
    rows = log_t + row_diameter(score.RW).log().unsqueeze(-1)
    return columns.logsumexp(-2).amax(-1) + log_R, rows.logsumexp(-2).amax(-1) + log_R


def _from_norms(layer: LayerSizes, score: Scores, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """The same from ``A`` and ``B``, bounds on ``log ‖R‖_1`` and ``log ‖R‖_∞``."""
    top = (A + B).unsqueeze(-1) + _log_delta_constant(layer)
    log_delta = torch.where(_lost(score)[..., None, None], top.unsqueeze(-1), score.log_delta)
    log_t = _log_tilt_distance(log_delta)
    rows = log_t + (math.log(2) + layer.w_inf).unsqueeze(-1)
    return A + (log_t.logsumexp(-1) + layer.w_1).logsumexp(-1), B + rows.logsumexp(-2).amax(-1)


def _log_delta_constant(layer: LayerSizes) -> Tensor:
    """``log(2 ‖W_QK‖_1/√d_qk)``: this and ``2 log ‖R‖_{1,∞}`` bound ``log max δ``."""
    return math.log(2) + layer.q - math.log(layer.maps.d_qk) / 2


@torch.no_grad()
def weights_bound(san: SAN, log_residual: float, tokens: int, kind: str = "gamma_free") -> BoundReport:
    """A bound for every input of ``n`` tokens whose residual is at most a given number.

    γ is replaced by its largest value, ``√(n/2)``, and ``δ`` by ``2 ‖W_QK‖_1 r²/√d_qk``; so the
    assumptions are tested at the bound ``r`` itself.  ``"gamma_free"`` does not depend on ``n``, and its
    constant tends to that of one layer with ``γ = 1`` as the residual goes down.

    Args:
        san: As for ``bound``.
        log_residual: Natural logarithm of ``‖res X‖_{1,∞}`` about any centre.
        tokens: The number of tokens ``n``.
        kind: One of ``KINDS``.

    Returns:
        The report, with ``log_residual=None``.

    Raises:
        ValueError: as for ``bound``; ``log_residual`` is NaN or ``inf``, or ``tokens`` below 1.
        TypeError: ``san`` is no ``SAN``, or ``log_residual`` no number.
    """
    checks.one_of("kind", kind, KINDS)
    n = checks.positive_int("tokens", tokens)
    if not hasattr(log_residual, "__float__") or getattr(log_residual, "ndim", 0) > 0:
        raise TypeError(f"log_residual must be a number, but is {checks.describe(log_residual)}")
    if math.isnan(log_residual) or log_residual == math.inf:
        raise ValueError(f"log_residual must be a logarithm of a finite number, but is {log_residual}")
    chain = _Chain(kind, torch.tensor(float(log_residual), dtype=torch.float64))
    for layer in layer_sizes(san):
        log_delta = _log_delta_constant(layer) + 2 * chain.log_bound[-1].to(layer.q.device)
        # A single token has no span: all its bounds are zero.
        total = torch.full_like(layer.q, float(n) if n > 1 else 0.0)
        chain.step(layer, total, torch.full_like(layer.q, 2.0 if n > 1 else 0.0), log_delta)
    return chain.report(None)


def closed_form(log_constant: float, log_residual: float, depth: int) -> float:
    """The theorem's closed form: ``(3^L − 1)/2 · log c + 3^L · log r`` (Theorem 2.2).

    Args:
        log_constant: ``log c``, one constant for all layers.
        log_residual: ``log r``.
        depth: ``L``, 0 or more.

    Returns:
        The logarithm of the bound after ``L`` layers.

    Raises:
        ValueError: ``depth`` is negative.
        TypeError: ``depth`` is no whole number.
    """
    power = 3 ** checks.positive_int("depth", depth, minimum=0)
    return (power - 1) / 2 * log_constant + power * log_residual


def log_basin(log_constant: float | Tensor) -> float | Tensor:
    """``log r*`` with ``c r*² = 1``: from a residual below ``r*`` the bound ``c r³`` goes to zero.

    Args:
        log_constant: ``log c``, a number or a tensor.

    Returns:
        ``−½ log c``, of the same type.
    """
    return -0.5 * log_constant
