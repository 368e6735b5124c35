"""A network frozen at one forward pass: linear but for its biases (paper, section 2.1, proof of Theorem 2.1).

With the attention matrices held at the values of the full forward pass, a layer maps its input linearly.
A ``Frozen`` network is a list of four kinds of steps, made from the ``Trace`` of any forward pass:

- ``Hop``: attention, with its skip and its pre-norm if there are any.
- ``Norm``: a LayerNorm.  Frozen, it is linear: each token's mean and standard deviation are the forward
  pass's.  Its shift, like every bias, goes to the bias path (ours).
- ``Source``: an MLP.  It is not linear: its recorded output is a new source in the residual stream, and a
  path's length counts the attention hops since its source (ours).  Source 0 is the input, source ``m`` the
  ``m``-th MLP.  An MLP without a skip around it replaces the stream: paths that started before end there.
- ``Gate``: the other way to take an MLP in, for those whose hidden units are an input times a gate: with the
  gates frozen it is linear too, and paths run through it without a hop (ours).

All tensors are dimensionless and without gradients.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rc_lib import checks
from rc_lib.trace import NormStats, Trace

#: How many paths ``Frozen.sum_over_paths`` lists before it refuses.
PATH_LIMIT = 100_000


@dataclass
class Hop:
    """Attention with its matrices frozen: ``T ↦ [T +] Σ_h P_h LN(T) W_h``, and a bias.

    Weights of a narrower format than the states' are widened where they are used.

    Args:
        P: Attention matrices of the forward pass, ``[*batch, H, n, n]``.
        W_V: Value weights, ``[H, d, d_v]``.
        W_O: Output weights, ``[H, d_v, d]``.
        b_V: Value bias, ``[H, d_v]``.
        b_O: Output bias, ``[d]``.
        skip: Whether the input is added to the result.
        norm: Frozen statistics of the pre-norm, or ``None``.
    """

    P: Float[Tensor, "*batch H n n"]
    W_V: Float[Tensor, "H d d_v"]
    W_O: Float[Tensor, "H d_v d"]
    b_V: Float[Tensor, "H d_v"]
    b_O: Float[Tensor, " d"]
    skip: bool
    norm: NormStats | None = None

    @property
    def heads(self) -> int:
        """The number of heads ``H``."""
        return self.W_V.shape[0]

    def head(self, T: Float[Tensor, "*batch n d"], h: int) -> Float[Tensor, "*batch n d"]:
        """One head, ``P_h LN(T) W_h`` for ``h`` in ``1..H``; ``h = 0`` is the skip, ``T`` itself."""
        if h == 0:
            return T
        T = T if self.norm is None else self.norm.linear(T)
        return self.P[..., h - 1, :, :] @ T @ self.W_V[h - 1].to(T.dtype) @ self.W_O[h - 1].to(T.dtype)

    def linear(self, T: Float[Tensor, "*batch k n d"]) -> Float[Tensor, "*batch k n d"]:
        """All heads on ``k`` matrices at once: ``Σ_h P_h LN(T_k) W_h``, three matrix products in all."""
        N = T if self.norm is None else _each(self.norm).linear(T)
        return self._mix(N @ _columns(self.W_V.to(T.dtype)))

    def affine(self, B: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """What a forward pass does, biases included: ``[B +] Σ_h P_h (LN(B) W_V + 1 b_Vᵀ) W_O + 1 b_Oᵀ``."""
        N = B if self.norm is None else self.norm.apply(B)
        V = N @ _columns(self.W_V.to(B.dtype)) + self.b_V.flatten()
        Y = self._mix(V.unsqueeze(-3)).squeeze(-3) + self.b_O
        return B + Y if self.skip else Y

    def adjoint(self, G: Float[Tensor, "*batch k n d"]) -> Float[Tensor, "*batch k n d"]:
        """The transpose of ``linear``: ``⟨linear(T), G⟩ = ⟨T, adjoint(G)⟩`` for every ``T`` and ``G``."""
        back = Hop(self.P.mT, self.W_O.mT, self.W_V.mT, self.b_V, self.b_O, False).linear(G)
        return back if self.norm is None else _each(self.norm).adjoint(back)

    def _mix(self, V: Tensor) -> Tensor:
        """``Σ_h P_h V_h W_O,h`` for values ``[*batch, k, n, H·d_v]``, each ``P_h`` on all ``k`` at once."""
        k, (H, d_v) = V.shape[-3], self.b_V.shape
        V = V.unflatten(-1, (H, d_v)).movedim((-2, -4), (-4, -2)).flatten(-2)  # [*batch, H, n, k·d_v]
        A = (self.P @ V).unflatten(-1, (k, d_v)).movedim((-4, -2), (-2, -4))  # [*batch, k, n, H, d_v]
        return A.flatten(-2) @ self.W_O.to(A.dtype).flatten(0, 1)


@dataclass
class Norm:
    """A post-norm, or a norm at the very end, with its statistics frozen."""

    stats: NormStats

    def adjoint(self, G: Float[Tensor, "*batch k n d"]) -> Float[Tensor, "*batch k n d"]:
        """The transpose of the norm's linear part, on ``k`` matrices at once."""
        return _each(self.stats).adjoint(G)


@dataclass
class Source:
    """An MLP with its output frozen.

    Args:
        value: What the MLP returned, ``[*batch, n, d]``.
        keep: Whether a skip leads around the MLP; without one ``value`` replaces the stream.
    """

    value: Float[Tensor, "*batch n d"]
    keep: bool


@dataclass
class Gate:
    """An MLP with its gates frozen: ``T ↦ T + (a ∘ (LN(T) W_up)) W_down``, and biases.

    Weights of a narrower format than the states' are widened where they are used.

    Args:
        a: The gates of the forward pass, ``[*batch, n, m]``.
        W_up: First matrix, ``[d, m]``.
        b_up: Its bias, ``[m]``.
        W_down: Second matrix, ``[m, d]``.
        b_down: Its bias, ``[d]``.
        norm: Frozen statistics of the pre-norm, or ``None``.
    """

    a: Float[Tensor, "*batch n m"]
    W_up: Float[Tensor, "d m"]
    b_up: Float[Tensor, " m"]
    W_down: Float[Tensor, "m d"]
    b_down: Float[Tensor, " d"]
    norm: NormStats | None = None

    def linear(self, T: Float[Tensor, "*more n d"], a: Tensor | None = None) -> Float[Tensor, "*more n d"]:
        """``T + (a ∘ (LN(T) W_up)) W_down``; ``a`` if the gates need another axis than recorded."""
        N = T if self.norm is None else (self.norm if a is None else _each(self.norm)).linear(T)
        hidden = (self.a if a is None else a) * (N @ self.W_up.to(T.dtype))
        return T + hidden @ self.W_down.to(T.dtype)

    def each(self, T: Float[Tensor, "*batch k n d"]) -> Float[Tensor, "*batch k n d"]:
        """``linear`` on ``k`` matrices at once."""
        return self.linear(T, self.a.unsqueeze(-3))

    def affine(self, B: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """What a forward pass does, biases included."""
        N = B if self.norm is None else self.norm.apply(B)
        hidden = self.a * (N @ self.W_up.to(B.dtype) + self.b_up)
        return B + hidden @ self.W_down.to(B.dtype) + self.b_down


Step = Hop | Norm | Source | Gate


def _columns(W: Float[Tensor, "H d d_v"]) -> Float[Tensor, "d H*d_v"]:
    """Heads side by side, so that one product serves them all."""
    return W.movedim(0, 1).flatten(1)


def _each(stats: NormStats) -> NormStats:
    """The same norm for a stack of ``k`` matrices, ``[*batch, k, n, d]``."""
    mean, std = stats.mean.unsqueeze(-3), stats.std.unsqueeze(-3)
    return NormStats(mean, std, stats.weight, stats.bias, stats.centred)


@dataclass
class PathSpectrum:
    """The sum over all paths, sorted by length (ours); ``Σ_k terms[k] + bias`` is the network's output.

    Args:
        terms: ``[*batch, L + 1, n, d]``: entry ``k`` is the sum of all paths of length ``k``.
        bias: ``[*batch, n, d]``: what biases and norms' shifts contribute, whatever the input.
        sources: ``[*batch, sources, L + 1, n, d]``, the terms by the source they start from, or ``None``.
    """

    terms: Float[Tensor, "*batch lengths n d"]
    bias: Float[Tensor, "*batch n d"]
    sources: Float[Tensor, "*batch sources lengths n d"] | None = None

    @property
    def total(self) -> Float[Tensor, "*batch n d"]:
        """All paths and the bias, ``[*batch, n, d]``; this is the network's output, to rounding error."""
        return self.terms.sum(-3) + self.bias

    def alone(self, bias: bool = True) -> Float[Tensor, "*batch lengths n d"]:
        """Entry ``k``: the paths of length ``k`` and nothing else but the bias, ``[*batch, L + 1, n, d]``."""
        return self.terms + self.bias.unsqueeze(-3) if checks.boolean("bias", bias) else self.terms

    def cumulative(self, bias: bool = True) -> Float[Tensor, "*batch lengths n d"]:
        """Entry ``k``: all paths of length up to ``k``, and the bias, ``[*batch, L + 1, n, d]``."""
        sums = self.terms.cumsum(-3)
        return sums + self.bias.unsqueeze(-3) if checks.boolean("bias", bias) else sums

    def leave_one_out(self) -> Float[Tensor, "*batch lengths n d"]:
        """Entry ``k``: the network's output without its paths of length ``k``, ``[*batch, L + 1, n, d]``."""
        return self.total.unsqueeze(-3) - self.terms


@dataclass
class Frozen:
    """A network with attention, norms and MLP outputs frozen at one forward pass: linear, but for biases.

    Args:
        X: The input, ``[*batch, n, d]``.
        steps: What happens to it, in order.
    """

    X: Float[Tensor, "*batch n d"]
    steps: Sequence[Step] = field(repr=False)

    @property
    def hops(self) -> list[Hop]:
        """The attention layers, first to last."""
        return [step for step in self.steps if isinstance(step, Hop)]

    @property
    def sources(self) -> list[Tensor]:
        """The input, then each MLP's output, from which paths start."""
        return [self.X, *(step.value for step in self.steps if isinstance(step, Source))]

    def count_by_length(self) -> list[int]:
        """Number of paths of each length ``0..L``, over all sources, as exact integers."""
        counts = [1] + [0] * len(self.hops)
        for step in self.steps:
            if isinstance(step, Hop):
                counts = [step.heads * c + step.skip * s for c, s in zip([0, *counts], counts, strict=False)]
            elif isinstance(step, Source):
                counts = [step.keep * c + (k == 0) for k, c in enumerate(counts)]
        return counts

    def path(self, path: Sequence[int], source: int = 0) -> Float[Tensor, "*batch n d"]:
        """The output of one path, without biases; see ``path_output``."""
        if not 0 <= checks.positive_int("source", source, minimum=0) < len(self.sources):
            raise ValueError(f"source must be below {len(self.sources)}, but is {source}")
        later = self._after(source)
        hops = [step for step in later if isinstance(step, Hop)]
        heads = iter(_valid_path(path, hops, source))
        T = self.sources[source]
        for step in later:
            if isinstance(step, Hop):
                T = step.head(T, next(heads))
            elif isinstance(step, Norm):
                T = step.stats.linear(T)
            elif isinstance(step, Gate):
                T = step.linear(T)
            elif not step.keep:
                T = torch.zeros_like(T)
        return T

    def paths(self, source: int = 0) -> Iterator[tuple[int, ...]]:
        """Every path from a source to the output, lazily; none where a later MLP without a skip ends them."""
        later = self._after(source)
        if any(isinstance(step, Source) and not step.keep for step in later):
            return iter(())
        hops = [step for step in later if isinstance(step, Hop)]
        return product(*(range(0 if hop.skip else 1, hop.heads + 1) for hop in hops))

    def bias(self) -> Float[Tensor, "*batch n d"]:
        """The bias path: what comes out when every source is zero, ``[*batch, n, d]``."""
        B = torch.zeros_like(self.X)
        for step in self.steps:
            if isinstance(step, Hop | Gate):
                B = step.affine(B)
            elif isinstance(step, Norm):
                B = step.stats.apply(B)
            elif not step.keep:
                B = torch.zeros_like(B)
        return B

    @torch.no_grad()
    def sum_over_paths(self, limit: int = PATH_LIMIT) -> PathSpectrum:
        """The definition: one path at a time, added up by length; see the function of this name."""
        number = sum(self.count_by_length())
        if number > checks.positive_int("limit", limit):
            raise ValueError(
                f"the network has {_in_words(number)} paths, more than limit={limit}: call sum_by_length, "
                "which adds up all the paths of each length at once, exactly"
            )
        parts = self.X.new_zeros(len(self.sources), len(self.hops) + 1, *self.X.shape)
        for s in range(len(self.sources)):
            for path in self.paths(s):
                parts[s, sum(h > 0 for h in path)] += self.path(path, s)
        return self._spectrum(parts.movedim((0, 1), (-4, -3)), by_source=len(self.sources) > 1)

    @torch.no_grad()
    def sum_by_length(self, by_source: bool = False) -> PathSpectrum:
        """The recursion ``T_k ← [T_k +] Σ_h P_h T_{k-1} W_h``; see the function of this name."""
        checks.boolean("by_source", by_source)
        # Per source: the shortest length present, and the terms from there on, [*batch, k, n, d].
        streams = {0: (0, self.X.unsqueeze(-3))}
        source = 0
        for step in self.steps:
            if isinstance(step, Hop):
                streams = {s: _hop(step, *stream) for s, stream in streams.items()}
            elif isinstance(step, Norm):
                streams = {s: (low, _each(step.stats).linear(T)) for s, (low, T) in streams.items()}
            elif isinstance(step, Gate):
                streams = {s: (low, step.each(T)) for s, (low, T) in streams.items()}
            else:
                source += by_source
                streams = _feed(step, streams if step.keep else {}, source)
        L, sources = len(self.hops), len(self.sources) if by_source else 1
        parts = self.X.new_zeros(*self.X.shape[:-2], sources, L + 1, *self.X.shape[-2:])
        for s, (low, T) in streams.items():
            parts[..., s, low : low + T.shape[-3], :, :] = T
        return self._spectrum(parts, by_source)

    def _spectrum(self, parts: Tensor, by_source: bool) -> PathSpectrum:
        return PathSpectrum(parts.sum(-4), self.bias(), parts if by_source else None)

    def _after(self, source: int) -> Sequence[Step]:
        """The steps that a path from this source goes through."""
        starts = [0] + [i + 1 for i, step in enumerate(self.steps) if isinstance(step, Source)]
        return self.steps[starts[source] :]


def _hop(hop: Hop, low: int, T: Tensor) -> tuple[int, Tensor]:
    """One attention layer on the terms of one source: every path gets one longer, or skips."""
    moved = hop.linear(T)
    if not hop.skip:
        return low + 1, moved
    longer = torch.nn.functional.pad(T, (0, 0, 0, 0, 0, 1))
    longer[..., 1:, :, :] += moved
    return low, longer


def _feed(step: Source, streams: dict, source: int) -> dict:
    """Put an MLP's output into the stream as paths of length 0."""
    new = step.value.unsqueeze(-3)
    if source not in streams:
        return {**streams, source: (0, new)}
    low, T = streams[source]
    T = torch.nn.functional.pad(T, (0, 0, 0, 0, low, 0))
    T[..., :1, :, :] += new
    return {**streams, source: (0, T)}


def _in_words(number: int) -> str:
    """A count in a message: all its digits, or its order of magnitude if they are many."""
    return str(number) if number < 10**18 else f"about 10^{math.log10(number):.1f}"


def _valid_path(path: Sequence[int], hops: list[Hop], source: int) -> list[int]:
    """Require one existing head (or an existing skip) per layer."""
    if not isinstance(path, Iterable):
        raise TypeError(f"path must be a sequence of heads, one per layer, but is {checks.describe(path)}")
    heads = [checks.positive_int(f"path[{l}]", h, minimum=0) for l, h in enumerate(path)]
    if len(heads) != len(hops):
        start = "the input" if source == 0 else f"source {source}"
        got = f"path {tuple(heads)} has {len(heads)} entries"
        raise ValueError(f"{got}; expected {len(hops)}, one for each layer after {start}")
    for l, (h, hop) in enumerate(zip(heads, hops, strict=True)):
        if h > hop.heads:
            raise ValueError(f"path[{l}] must be a head in 1..{hop.heads}, but is {h}")
        if h == 0 and not hop.skip:
            raise ValueError(f"path[{l}] is 0, a skip, but the layer has none; its heads are 1..{hop.heads}")
    return heads


@torch.no_grad()
def freeze_trace(trace: Trace, layers: Iterable[Any]) -> Frozen:
    """The frozen network of a forward pass, for any kind of layers (paper, Theorem 2.1; MLPs ours).

    Args:
        trace: The record of the forward pass.
        layers: One object per layer: a ``san.Layer``, or anything with ``attention`` (holding ``W_V``,
            ``W_O``, ``b_V``, ``b_O`` stacked by head), ``skip``, ``mlp_skip`` and ``norm`` (``"none"``,
            ``"pre"`` or ``"post"``).

    Returns:
        The frozen network.

    Raises:
        ValueError: another number of layers than the trace has, or a forward pass that overflowed.
    """
    layers = list(layers)
    if len(layers) != trace.depth:
        raise ValueError(f"layers has {len(layers)} entries; expected {trace.depth}, as in the trace")
    checks.finite("the network's output", trace.output)
    mlps = trace.mlp_out or [None] * trace.depth
    steps: list[Step] = []
    for layer, P, norms, mlp in zip(layers, trace.attention, trace.norms, mlps, strict=True):
        steps += _layer_steps(layer, P, norms, mlp)
    if trace.final_norm is not None:
        steps.append(Norm(trace.final_norm))
    return Frozen(trace.hidden[0], steps)


def _layer_steps(layer: Any, P: Tensor, norms: list[NormStats], mlp: Tensor | None) -> list[Step]:
    """One layer: attention, perhaps its post-norm, perhaps an MLP and its post-norm."""
    a, post = layer.attention, layer.norm == "post"
    weights = [W.detach() for W in (a.W_V, a.W_O, a.b_V, a.b_O)]
    steps: list[Step] = [Hop(P, *weights, layer.skip, norms[0] if layer.norm == "pre" else None)]
    if post:
        steps.append(Norm(norms[0]))
    if mlp is not None:
        steps.append(Source(mlp, layer.mlp_skip))
        if post:
            steps.append(Norm(norms[1]))
    return steps


def freeze(
    san: Any,
    X: Float[Tensor, "*batch n d"],
    mask: Bool[Tensor, "..."] | None = None,
    key_padding_mask: Bool[Tensor, "*batch n"] | None = None,
) -> Frozen:
    """Run a network once and freeze it (paper, section 2.1).

    Args:
        san: A ``SAN`` of any kind.
        X: Tokens, ``[*batch, n, d]``.
        mask: ``[n, n]``, ``[*batch, n, n]`` or ``[*batch, H, n, n]``, ``True`` = may attend.
        key_padding_mask: ``[*batch, n]``, ``True`` for real tokens.

    Returns:
        The frozen network; its methods ``path``, ``sum_over_paths`` and ``sum_by_length`` share the one pass.

    Raises:
        ValueError: ``X`` is empty, not finite or of the wrong width, a mask does not fit, or the forward
            pass overflowed.
        TypeError: ``san`` is no ``SAN``, another dtype than the weights', or a mask that is not boolean.
    """
    if not (hasattr(san, "trace") and hasattr(san, "layers")):
        raise TypeError(f"san must be a rc_lib.san.SAN, but is {checks.describe(san)}")
    return freeze_trace(san.trace(checks.matrix("X", X), mask, key_padding_mask), san.layers)
