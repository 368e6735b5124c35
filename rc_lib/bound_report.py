"""What a bound on the residual says and what it rests on (Theorems 2.2 and 2.3; the report is ours)."""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Assumption:
    """One assumption at one place, and by how much it holds.

    Args:
        name: ``"range"``: every ``δ_i`` of the head is at most 1.256, margin ``1.256 − max_i δ_i``.
            ``"heads"``: adding the heads as the theorem does is no less than adding them apart, margin in
            nats.  ``"contraction"``: ``c r² < 1``, margin ``−log(c r²)`` in nats; ``r`` is the bound so far.
        layer: Counted from 1.
        head: Counted from 1, or ``None`` for the whole layer.
        margin: ``[*batch]``; the assumption holds where it is not negative (``contraction``: positive).
        required: Whether the bound rests on it.  ``False`` means: for information.
    """

    name: str
    layer: int
    head: int | None
    margin: Float[Tensor, "*batch"]
    required: bool

    @property
    def holds(self) -> Bool[Tensor, "*batch"]:
        """Where it holds."""
        return self.margin > 0 if self.name == "contraction" else self.margin >= 0

    def __str__(self) -> str:
        place = f"layer {self.layer}" + ("" if self.head is None else f", head {self.head}")
        worst = self.margin.min().item()
        state = "holds" if bool(self.holds.all()) else "FAILS"
        need = "needed" if self.required else "not needed"
        return f"{place}: {self.name} {state}, margin {worst:.3g} ({need})"


@dataclass(frozen=True)
class BoundReport:
    """A bound on the residual after each layer, beside the residual, and what it rests on.

    Args:
        kind: One of ``rc_lib.layer_constants.KINDS``, or ``"certificate"``.
        log_bound: ``[L+1, *batch]``, natural logarithms; entry 0 is the input's residual.  ``inf`` from the
            first layer on where an assumption that the bound rests on fails: nothing is claimed there.
            ``-inf`` where tokens are equal.
        log_residual: ``[L+1, *batch]``, the residuals about the layers' centres; ``None`` if there was no
            input.  ``-inf`` where tokens are equal, or where saturated attention (weights of ``e^-745``) has
            made the residual too small to represent; the bounds count on nothing there.
        log_constant: ``[L, *batch]``, ``log c`` of each layer; ``None`` for a certificate.
        assumptions: One per layer and head, or per layer.
    """

    kind: str
    log_bound: Float[Tensor, "states *batch"]
    log_residual: Float[Tensor, "states *batch"] | None
    log_constant: Float[Tensor, "layers *batch"] | None
    assumptions: list[Assumption] = field(default_factory=list)

    @property
    def claimed(self) -> Bool[Tensor, "states *batch"]:
        """Where a bound is claimed, because no needed assumption has failed up to this layer."""
        return self.log_bound < math.inf

    @property
    def log_slack(self) -> Float[Tensor, "states *batch"]:
        """``log_bound − log_residual``, not negative but for rounding; 0 where both are ``-inf``."""
        if self.log_residual is None:
            raise ValueError("log_slack: this report has no residual, since it was made from weights alone")
        both = self.log_bound.isneginf() & self.log_residual.isneginf()
        return torch.where(both, 0.0, self.log_bound - self.log_residual)

    def failures(self, required: bool = True) -> list[Assumption]:
        """The assumptions that fail somewhere in the batch.

        Args:
            required: Only those on which the bound rests.

        Returns:
            Them, in the order of the layers.
        """
        return [a for a in self.assumptions if not bool(a.holds.all()) and (a.required or not required)]

    def __str__(self) -> str:
        lines = [f"{self.kind} bound, {len(self.log_bound) - 1} layers"]
        return "\n".join(lines + [f"  {a}" for a in self.assumptions])
