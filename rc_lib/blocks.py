"""The row-wise blocks of a transformer's layer: LayerNorm and MLP (paper, section 3)."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rc_lib import checks
from rc_lib.trace import NormStats
from rc_lib.weights import Gaussian, scale

ACTIVATIONS = {"gelu": nn.functional.gelu, "relu": torch.relu, "tanh": torch.tanh, "identity": nn.Identity()}

# Lipschitz constants, for Corollary 3.2.  GELU is x Φ(x): its slope is largest at √2, Φ(√2) + √2 φ(√2) > 1.
LIPSCHITZ = {
    "gelu": (1 + math.erf(1)) / 2 + math.exp(-1) / math.sqrt(math.pi),
    "relu": 1.0,
    "tanh": 1.0,
    "identity": 1.0,
}


class LayerNorm(nn.Module):
    """LayerNorm that can say what it did: ``x ↦ (x − mean) / √(variance + eps) ∘ g + bias``, per token.

    Args:
        dim: Features per token ``d``.
        eps: Added to the variance.
        dtype: A floating-point type.
    """

    def __init__(self, dim: int, eps: float = 1e-5, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.eps = scale("eps", eps)
        self.weight = nn.Parameter(torch.ones(dim, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(dim, dtype=dtype))

    def stats(self, X: Float[Tensor, "*batch n d"]) -> NormStats:
        """Mean and standard deviation of each token, with this norm's gain and bias."""
        variance = X.var(-1, keepdim=True, correction=0)
        return NormStats(X.mean(-1, keepdim=True), (variance + self.eps).sqrt(), self.weight, self.bias)

    def forward(self, X: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """Normalise each token."""
        return self.stats(X).apply(X)


class MLP(nn.Module):
    """Row-wise two-layer network ``x ↦ σ(x W_1 + b_1) W_2 + b_2`` (paper, section 3, Corollary 3.2).

    Args:
        dim: Features per token ``d``.
        mlp_dim: Hidden features ``m``; by default ``4 d``.
        activation: ``"gelu"``, ``"relu"``, ``"tanh"`` or ``"identity"``.
        bias: Whether the biases are trainable; otherwise they are buffers of zeros.
        gain: Factor on the standard deviation ``1/√fan-in`` of the weights.
        bias_std: Standard deviation of the initial biases.
        seed: 0 or more, or a CPU generator to draw from.
        dtype: A floating-point type.

    Raises:
        ValueError: a size below 1 or an unknown activation.
        TypeError: a size that is no whole number, or ``bias`` no boolean.
    """

    def __init__(
        self,
        dim: int,
        mlp_dim: int | None = None,
        activation: str = "gelu",
        *,
        bias: bool = True,
        gain: float = 1.0,
        bias_std: float = 0.0,
        seed: int | torch.Generator = 0,
        dtype: torch.dtype = torch.float64,
    ):
        super().__init__()
        m = checks.positive_int("mlp_dim", 4 * dim if mlp_dim is None else mlp_dim)
        self.activation = checks.one_of("activation", activation, tuple(ACTIVATIONS))
        draw = Gaussian(seed, dtype)
        self.W_1 = nn.Parameter(draw((dim, m), gain / dim**0.5))
        self.W_2 = nn.Parameter(draw((m, dim), gain / m**0.5))
        for name, size in (("b_1", m), ("b_2", dim)):
            b = draw((size,), bias_std)
            if checks.boolean("bias", bias):
                setattr(self, name, nn.Parameter(b))
            else:
                self.register_buffer(name, torch.zeros_like(b))

    def forward(self, X: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """Apply the map to each token."""
        hidden = ACTIVATIONS[self.activation](X @ self.W_1 + self.b_1)
        return hidden @ self.W_2 + self.b_2
