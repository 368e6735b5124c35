"""What a forward pass leaves behind, for metrics, paths and bounds to read.

A stack of this library and a pretrained model both produce a ``Trace``.  With the attention matrices and the
norms' statistics frozen at their recorded values, a network without MLPs is linear in its input up to biases:
that is what the path decomposition rests on.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass
class NormStats:
    """Statistics of a LayerNorm (or RMSNorm) in one forward pass, one pair of numbers per token.

    Args:
        mean: Mean of each token over its features, ``[*batch, n, 1]``; zeros for an RMSNorm.
        std: What the token is divided by, ``[*batch, n, 1]``: ``√(variance + eps)``, or the root mean square.
        weight: The gain ``g``, ``[d]``.
        bias: The shift, ``[d]``; zeros for an RMSNorm.
        centred: ``False`` for an RMSNorm, which subtracts no mean.
    """

    mean: Float[Tensor, "*batch n 1"]
    std: Float[Tensor, "*batch n 1"]
    weight: Float[Tensor, " d"]
    bias: Float[Tensor, " d"]
    centred: bool = True

    def linear(self, T: Float[Tensor, "*more n d"]) -> Float[Tensor, "*more n d"]:
        """The frozen norm's linear part, ``(t − mean over features) / σ_token ∘ g``.

        Args:
            T: Any tensor with the tokens' rows, ``[..., n, d]``; it need not be the one that was normalised.

        Returns:
            ``[..., n, d]``.
        """
        centred = T - T.mean(-1, keepdim=True) if self.centred else T
        return centred / self.std * self.weight

    def apply(self, T: Float[Tensor, "*more n d"]) -> Float[Tensor, "*more n d"]:
        """The frozen norm: ``linear`` and the bias.  On the recorded input it gives the recorded output."""
        return self.linear(T) + self.bias

    def adjoint(self, G: Float[Tensor, "*more n d"]) -> Float[Tensor, "*more n d"]:
        """The transpose of ``linear``, so that ``⟨linear(T), G⟩ = ⟨T, adjoint(G)⟩``.

        Args:
            G: Any tensor with the tokens' rows, ``[..., n, d]``.

        Returns:
            ``[..., n, d]``.
        """
        back = G * self.weight / self.std
        return back - back.mean(-1, keepdim=True) if self.centred else back

    def detach(self) -> "NormStats":
        """The same statistics without gradients."""
        return NormStats(*(t.detach() for t in (self.mean, self.std, self.weight, self.bias)), self.centred)


@dataclass
class Trace:
    """The record of one forward pass through ``L`` layers, without gradients.

    Args:
        hidden: ``L + 1`` tensors ``[*batch, n, d]``: the input, then each layer's output.
        attention: ``L`` tensors ``[*batch, H, n, n]``, one matrix per query head.
        norms: For each layer its norms' statistics in order of use: the attention's, then the MLP's; an empty
            list where there is none.
        mlp_out: ``L`` tensors ``[*batch, n, d]``, what each layer's MLP returned (before its skip and its
            post-norm); ``None`` if the layers have no MLP.
        final_norm: Statistics of a norm after the last layer, or ``None``.
        output: What the network returns: ``hidden[-1]``, or its final norm.
    """

    hidden: list[Float[Tensor, "..."]]
    attention: list[Float[Tensor, "..."]]
    norms: list[list[NormStats]] = field(default_factory=list)
    mlp_out: list[Float[Tensor, "..."]] | None = None
    final_norm: NormStats | None = None
    output: Float[Tensor, "..."] | None = None

    def __post_init__(self):
        if len(self.hidden) != len(self.attention) + 1:
            L = len(self.attention)
            raise ValueError(
                f"hidden has {len(self.hidden)} entries; expected {L + 1} for {L} attention tensors"
            )
        self.norms = self.norms or [[] for _ in self.attention]
        for name in ("norms", "mlp_out"):
            entries = getattr(self, name)
            if entries is not None and len(entries) != len(self.attention):
                raise ValueError(f"{name} has {len(entries)} entries; expected {len(self.attention)}")
        if self.output is None:
            self.output = (
                self.hidden[-1] if self.final_norm is None else self.final_norm.apply(self.hidden[-1])
            )

    @property
    def depth(self) -> int:
        """The number of layers ``L``."""
        return len(self.attention)

    def stacked(self) -> Float[Tensor, "layers *batch n d"]:
        """The hidden states as one tensor, ``[L + 1, *batch, n, d]``."""
        return torch.stack(self.hidden)
