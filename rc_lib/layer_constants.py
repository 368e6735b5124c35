"""The constant of one layer's cubic step, ``‖R'‖ ≤ c ‖R‖³`` (paper: Theorems 2.2, 2.3, Corollary 3.2).

With ``q_h = ‖W_QK,h‖_1``, the value norms ``‖W_h‖_1`` and ``‖W_h‖_∞``, and ``a_h = Σδ/‖E‖_1``,
``b_h = max δ/‖E‖_1`` from the scores (``rc_lib.one_layer.gains``; for one head ``√(ab) = 2γ``),

    ``c = κ/2 · √( Σ_h a_h q_h ‖W_h‖_1 · Σ_h b_h q_h ‖W_h‖_∞ ) · √(λ_1 λ_∞)/√d_qk``

================  ======  ==========================================================================
kind              κ       what it is
================  ======  ==========================================================================
``"paper"``       4       Theorem 2.2; several heads added in ``‖·‖_1`` and ``‖·‖_∞`` apart (repaired)
``"stated"``      –       Theorem 2.3 as stated: ``c = 4 γ β H/√d_qk``, the largest γ and β of the heads
``"sharp"``       1       ours, from the total variation distance of a tilt
``"best"``        1/√2    ours; no smaller κ will do
``"gamma_free"``  –       ours: ``a_h = φ(δ)``, ``b_h = 1``, ``κ/2 = 1``, where ``φ(δ) = (e^δ − 1)/δ``
================  ======  ==========================================================================

Everything is in natural logarithms: a constant as a number could leave the range of floats.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rc_lib import checks
from rc_lib.blocks import LIPSCHITZ, MLP
from rc_lib.norms import inf_norm, one_norm
from rc_lib.one_layer import HeadMaps
from rc_lib.san import SAN

FACTORS = {"paper": 4.0, "sharp": 1.0, "best": math.sqrt(0.5)}
KINDS = ("paper", "stated", "sharp", "best", "gamma_free")


@dataclass(frozen=True)
class LayerSizes:
    """A layer's weights as the bounds see them: maps, and logarithms of their norms."""

    maps: HeadMaps
    log_lip_1: float = 0.0
    log_lip_inf: float = 0.0

    @property
    def q(self) -> Tensor:
        """``log ‖W_QK,h‖_1``, ``[*batch, H]``."""
        return one_norm(self.maps.W_QK).log()

    @property
    def w_1(self) -> Tensor:
        """``log ‖W_h‖_1``, ``[*batch, H]``."""
        return one_norm(self.maps.W).log()

    @property
    def w_inf(self) -> Tensor:
        """``log ‖W_h‖_∞``, ``[*batch, H]``."""
        return inf_norm(self.maps.W).log()

    @property
    def log_scale(self) -> float:
        """``log(λ/√d_qk)``."""
        return (self.log_lip_1 + self.log_lip_inf - math.log(self.maps.d_qk)) / 2


def mlp_lipschitz(mlp: MLP, mlp_skip: bool = False) -> tuple[float, float]:
    """Lipschitz constants of a row-wise MLP from its weights (paper, Corollary 3.2).

    ``|f(u) − f(v)| ≤ |u − v| J`` entry by entry with ``J = ℓ |W_1||W_2|``, plus ``I`` for a skip, where ``ℓ``
    is the activation's own constant: 1, and 1.129 for GELU.  So ``λ_1 = ‖J‖_1`` and ``λ_∞ = ‖J‖_∞`` serve
    in the two norms.

    Args:
        mlp: The MLP.
        mlp_skip: Whether its input is added to its output.

    Returns:
        ``λ_1`` and ``λ_∞``.

    Raises:
        TypeError: ``mlp`` is no ``rc_lib.blocks.MLP``, or ``mlp_skip`` no boolean.
    """
    if not isinstance(mlp, MLP):
        raise TypeError(f"mlp must be a rc_lib.blocks.MLP, but is {checks.describe(mlp)}")
    J = LIPSCHITZ[mlp.activation] * (mlp.W_1.detach().double().abs() @ mlp.W_2.detach().double().abs())
    J = J + torch.eye(len(J), dtype=J.dtype, device=J.device) if checks.boolean("mlp_skip", mlp_skip) else J
    return one_norm(J).item(), inf_norm(J).item()


def layer_sizes(san: SAN) -> list[LayerSizes]:
    """The weights of a network that the theorems cover, layer by layer.

    Args:
        san: Attention, with MLPs or without; no skips around the attention, no norms.

    Returns:
        One entry per layer.

    Raises:
        ValueError: the network has skips or norms, or weights that are not finite.
        TypeError: ``san`` is no ``SAN``.
    """
    if not isinstance(san, SAN):
        raise TypeError(f"san must be a rc_lib.san.SAN, but is {checks.describe(san)}")
    if san.skip:
        raise ValueError(
            "san has skip=True: no bound of this kind holds with skips (Claim 3.1); use skip=False"
        )
    if san.norm != "none" or san.final_norm is not None:
        raise ValueError(
            f"san has norm={san.norm!r}, final_norm={san.final_norm is not None}: LayerNorm rescales tokens "
            "one by one, which the theorems do not cover; use norm='none'"
        )
    layers = []
    for name, W in san.named_parameters():
        checks.finite(f"san: {name}", W)
    for layer in san.layers:
        lip = (1.0, 1.0) if layer.mlp is None else mlp_lipschitz(layer.mlp, layer.mlp_skip)
        maps = HeadMaps.of(layer.attention)
        _in_range(maps, f"layers.{len(layers)}.attention")
        layers.append(LayerSizes(maps, *(math.log(v) if v else -math.inf for v in lip)))
    return layers


def _in_range(maps: HeadMaps, place: str) -> None:
    """Refuse products of weights beyond the range of floats: a norm of them would be no number."""
    for name, W in (("W_Q W_Kᵀ", maps.W_QK), ("W_K b_Q", maps.k), ("W_V W_O", maps.W), ("the bias", maps.b)):
        if not bool(W.isfinite().all()):
            raise ValueError(
                f"san: {name} of {place} is not finite: expected weights whose products float64 holds"
            )


def log_constant(layer: LayerSizes, kind: str, total: Tensor, largest: Tensor, log_delta: Tensor) -> Tensor:
    """``log c`` of one layer (see the module's table).

    Args:
        layer: The layer's weights.
        kind: One of ``KINDS``.
        total: ``Σδ/‖E‖_1`` per head, ``[*batch, H]``, or an upper bound of it.
        largest: ``max δ/‖E‖_1`` per head, likewise.
        log_delta: ``log max_i δ_i`` per head, likewise.

    Returns:
        ``[*batch]``; ``-inf`` where the layer makes all tokens equal.
    """
    q, w_1, w_inf = layer.q, layer.w_1, layer.w_inf
    if kind == "stated":
        log_gamma = (total.log() + largest.log()).amax(-1) / 2 - math.log(2)
        log_beta = (q + (w_1 + w_inf) / 2).amax(-1)
        return math.log(4 * layer.maps.heads) + log_gamma + log_beta + layer.log_scale
    if kind == "gamma_free":
        a, b, log_factor = _log_growth(log_delta), torch.zeros_like(log_delta), 0.0
    else:
        a, b, log_factor = total.log(), largest.log(), math.log(FACTORS[kind] / 2)
    return log_factor + ((a + q + w_1).logsumexp(-1) + (b + q + w_inf).logsumexp(-1)) / 2 + layer.log_scale


def _log_growth(log_delta: Tensor) -> Tensor:
    """``log φ(δ)`` from ``log δ``: 0 for small ``δ``, about ``δ − log δ`` for large."""
    # A finite stand-in for infinity: a factor of zero beside it must win.
    delta = log_delta.exp().clamp(max=1e300)
    large = delta + (-(-delta).expm1()).log() - log_delta
    return torch.where(log_delta < -36, 0.0, large)
