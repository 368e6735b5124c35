"""Which source, over how many hops, made a number read from the output (section 2.1, read backwards; ours).

A frozen network is linear, so any linear reading of its output, ``⟨output, G⟩``, is a sum over sources and
path lengths.  One walk backwards through the layers gives them all: ``G`` is carried by the transposed
layers, sorted by hops, and meets each source where that one entered.  This is as cheap as ``sum_by_length``,
which would need one stream per source to tell the sources apart.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rc_lib import checks
from rc_lib.frozen import Frozen, Gate, Hop, Norm


@dataclass
class Attribution:
    """A number read from the output, by source and by hops; ``terms`` and ``bias`` sum to it.

    Args:
        terms: ``[*batch, sources, L + 1]``: source 0 is the input, source ``m`` the ``m``-th MLP.
        bias: ``[*batch, L + 1]``: what biases and norms' shifts contribute, by the hops since they entered.
    """

    terms: Float[Tensor, "*batch sources lengths"]
    bias: Float[Tensor, "*batch lengths"]

    @property
    def total(self) -> Float[Tensor, "*batch"]:
        """The number itself, ``[*batch]``."""
        return self.terms.sum((-2, -1)) + self.bias.sum(-1)


def _inner(value: Tensor, G: Tensor) -> Tensor:
    """``⟨value, G_k⟩`` for each ``k``: ``[*batch, n, d]`` and ``[*batch, k, n, d]`` to ``[*batch, k]``."""
    return (value.unsqueeze(-3) * G).sum((-2, -1))


def _back(hop: Hop, G: Tensor) -> Tensor:
    """One attention layer backwards: what goes through it has one hop more."""
    moved = hop.adjoint(G)
    kept = G if hop.skip else torch.zeros_like(G)
    pad = torch.nn.functional.pad
    return pad(kept, (0, 0, 0, 0, 0, 1)) + pad(moved, (0, 0, 0, 0, 1, 0))


@torch.no_grad()
def attribute(frozen: Frozen, G: Float[Tensor, "*batch n d"]) -> Attribution:
    """Split ``⟨output, G⟩ = Σ_ij output_ij G_ij`` by source and by hops (ours).

    With ``G = output/‖output‖²`` the terms are signed shares of the output and sum to 1; with a row of the
    read-out matrix at one token and zeros elsewhere, they are the parts of one logit.

    Args:
        frozen: A frozen network, its MLPs as sources.
        G: What to read, ``[*batch, n, d]`` as the output.

    Returns:
        The terms.

    Raises:
        ValueError: ``G`` is not finite or of another shape, or ``frozen`` has MLPs with frozen gates.
        TypeError: ``frozen`` is no frozen network, or ``G`` has another dtype.
    """
    if not isinstance(frozen, Frozen):
        raise TypeError(f"frozen must be a Frozen, as freeze gives it, but is {checks.describe(frozen)}")
    if checks.matrix("G", G).shape != frozen.X.shape:
        raise ValueError(f"G must have the output's shape {tuple(frozen.X.shape)}, but has {tuple(G.shape)}")
    if G.dtype != frozen.X.dtype:
        raise TypeError(f"G is {checks.describe(G)}, but the network is {checks.describe(frozen.X)}")
    if any(isinstance(step, Gate) for step in frozen.steps):
        raise ValueError(
            "frozen has MLPs with frozen gates: they are no sources; freeze with MLPs as sources"
        )
    L, back = len(frozen.hops), G.unsqueeze(-3)
    terms: list[Tensor] = []
    bias = G.new_zeros(*G.shape[:-2], L + 1)
    for step in reversed(frozen.steps):
        if isinstance(step, Norm):
            shift = step.stats.bias.expand(G.shape)
            bias[..., : back.shape[-3]] += _inner(shift, back)
            back = step.adjoint(back)
        elif isinstance(step, Hop):
            constant = step.affine(torch.zeros_like(G))
            bias[..., : back.shape[-3]] += _inner(constant, back)
            back = _back(step, back)
        else:
            terms.append(_padded(_inner(step.value, back), L))
            back = back if step.keep else torch.zeros_like(back)
    terms.append(_padded(_inner(frozen.X, back), L))
    return Attribution(torch.stack(terms[::-1], dim=-2), bias)


def _padded(found: Tensor, L: int) -> Tensor:
    return torch.nn.functional.pad(found, (0, L + 1 - found.shape[-1]))
