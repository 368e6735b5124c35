"""Which path lengths carry a trained network's answers (paper, section 4, figure 4).

Two measurements, both accuracies over the real tokens of a data set:

- ``sampled`` is the paper's protocol.  For a length ``k`` it draws paths: ``k`` layers at random without
  repetition, one random head in each.  The network runs along one path only, without skips and other heads:
  ``T ↦ LN(P_h(T) (T W_V,h + 1 b_V,hᵀ) W_O,h + 1 b_Oᵀ)`` in each used layer, where the attention ``P_h(T)`` is
  computed anew from the path's own state.  The final states of the drawn paths are added up, normalised and
  read out.
- ``exact`` is ours: the sums of *all* paths of each length by ``rc_lib.paths``' recursion, in float64.

``rc_lib.path_walks`` runs the paths, and says how biases and norms are treated.

The protocol's paths are not the theorem's, whose attention and norms are frozen at the full forward pass.
``sampled(..., frozen=True)`` draws the same paths and runs those of the theorem instead; their sum, scaled up
from the drawn to all paths of the length, plus the bias path is an unbiased estimate of what ``exact`` reads.

The model is a ``TokenClassifier``, or anything with ``san``, ``embed(inputs)``, ``read(states)`` (linear but
for a bias) and ``model(inputs, real)``; the examples have ``inputs``, ``labels`` and ``real``.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rc_lib import checks
from rc_lib.frozen import PathSpectrum, freeze_trace
from rc_lib.path_walks import Path, Walk, sizes
from rc_lib.path_walks import draw as draw

#: How many numbers the states of one chunk may hold when ``chunk`` is not given: 2 MB in float64.
CHUNK_NUMBERS = 2**18


@dataclass(frozen=True)
class Effectiveness:
    """What each path length does for a network's answers, summed exactly over all its paths (ours).

    The bias path (all that biases and norms' shifts contribute, whatever the input) and the read-out's own
    bias join every accuracy, as in ``PathSpectrum``; the bias path alone answers with accuracy ``bias``.

    Args:
        alone: ``[L + 1]``, accuracy of the paths of one length and the bias path.
        cumulative: ``[L + 1]``, accuracy of all paths up to a length and the bias path.
        leave_one_out: ``[L + 1]``, accuracy of the network without its paths of one length.
        full: Accuracy of the network.
        bias: Accuracy of the bias path alone.
        norms: ``[L + 1]``, root mean square over the real tokens of the Euclidean norm of the token's row in
            the sum of all paths of one length.
        residuals: ``[L + 1]``, relative residual ``‖res(T_k)‖_{1,∞} / ‖T_k‖_{1,∞}`` about the mean of the
            real tokens, averaged over the sets; 0 where ``T_k`` is zero.
        bias_norm: As ``norms``, of the bias path.
        reconstruction: Largest difference between the sum of all terms' logits and the network's own, in
            units of the network's largest logit.
        counts: The number of paths of each length.
    """

    alone: Float[Tensor, " lengths"]
    cumulative: Float[Tensor, " lengths"]
    leave_one_out: Float[Tensor, " lengths"]
    full: float
    bias: float
    norms: Float[Tensor, " lengths"]
    residuals: Float[Tensor, " lengths"]
    bias_norm: float
    reconstruction: float
    counts: list[int]


# ------------------------------------------------------------------------------------------ the full network


@torch.no_grad()
def accuracy(model: Any, examples: Any, chunk: int | None = None) -> float:
    """Share of the real tokens that the network labels correctly.

    Args:
        model: A ``TokenClassifier``; it runs without dropout, in its own dtype, on its own device.
        examples: The data.
        chunk: How many sets to run at once; ``None`` means as many as fit in a few megabytes.

    Returns:
        A number in ``[0, 1]``.

    Raises:
        ValueError: the examples have no real token or a label that is no class of the network's, or its
            logits are not finite.
        TypeError: ``model`` or ``examples`` lacks a part.
    """
    _parts(model, examples)
    hits = tokens = 0
    with _evaluating(model):
        for inputs, labels, real in _chunks(model, examples, chunk):
            logits = checks.finite("the network's logits", model(inputs, real)[real])
            hits += int((logits.argmax(-1) == labels[real]).sum())
            tokens += len(logits)
    return hits / tokens


# ----------------------------------------------------------------------------------------- the exact spectrum


@torch.no_grad()
def exact(model: Any, examples: Any, chunk: int | None = None) -> Effectiveness:
    """Accuracies of all paths of each length, exactly and in float64 (ours).

    One forward pass and ``L(L+1)/2`` attention layers per chunk stand for all ``(H+1)^L`` paths.  With MLPs
    a path starts at the input or at an MLP's output, and its length counts the attention layers since then.

    Args:
        model: A ``TokenClassifier`` with any ``SAN``; a copy of it is cast to float64.
        examples: The data.
        chunk: How many sets to run at once; ``None`` means as many as fit in a few megabytes.

    Returns:
        The accuracies, sizes and the reconstruction error.

    Raises:
        ValueError: the examples have no real token or a label that is no class of the network's, or a
            forward pass overflowed.
        TypeError: ``model`` or ``examples`` lacks a part.
    """
    _parts(model, examples)
    model = copy.deepcopy(model).double().eval()
    tally, counts = _Tally(), []
    for inputs, labels, real in _chunks(model, examples, chunk):
        trace = model.san.trace(model.embed(inputs), key_padding_mask=_padding(real))
        own = _read(model, trace.output)[real]
        frozen = freeze_trace(trace, model.san.layers)
        counts = counts or frozen.count_by_length()
        tally.add(model, frozen.sum_by_length(), own, labels[real], real)
    return tally.result(counts)


class _Tally:
    """Sums over chunks: right answers, squared norms, residuals, the worst logit."""

    def __init__(self):
        self.hits = self.squares = self.residuals = 0
        self.tokens = self.sets = 0
        self.error = self.largest = 0.0

    def add(self, model: Any, spectrum: PathSpectrum, own: Tensor, labels: Tensor, real: Tensor) -> None:
        """Count one chunk, whose own logits are ``own`` (real tokens only, like the labels)."""
        terms, bias = _logits(model, spectrum, real)
        sums = terms.cumsum(0) + bias
        answers = torch.cat([terms + bias, sums, sums[-1] - terms, own[None], bias[None]])
        self.hits = self.hits + (answers.argmax(-1) == labels).sum(-1)
        self.error = max(self.error, float((sums[-1] - own).abs().max()))
        self.largest = max(self.largest, float(own.abs().max()))
        T = torch.cat([spectrum.terms, spectrum.bias.unsqueeze(-3)], -3)
        T = T if bool(real.all()) else T * real[:, None, :, None]
        self.squares = self.squares + T.square().sum((0, 2, 3))
        self.residuals = self.residuals + _relative_residuals(T, real).sum(0)
        self.tokens, self.sets = self.tokens + len(labels), self.sets + int(real.any(-1).sum())

    def result(self, counts: list[int]) -> Effectiveness:
        """Sums to shares."""
        L = len(counts)
        share = self.hits.double() / self.tokens
        norms = (self.squares / self.tokens).sqrt()
        return Effectiveness(
            alone=share[:L],
            cumulative=share[L : 2 * L],
            leave_one_out=share[2 * L : 3 * L],
            full=float(share[-2]),
            bias=float(share[-1]),
            norms=norms[:L],
            residuals=self.residuals[:L] / self.sets,
            bias_norm=float(norms[-1]),
            reconstruction=self.error / self.largest if self.largest else self.error,
            counts=counts,
        )


def _logits(model: Any, spectrum: PathSpectrum, real: Tensor) -> tuple[Tensor, Tensor]:
    """Each term's logits ``[L + 1, tokens, classes]`` and the bias path's, with the read-out's bias."""
    nothing = model.read(torch.zeros_like(spectrum.bias[..., :1, :1, :]))
    terms = model.read(spectrum.terms) - nothing
    return terms.movedim(-3, 0)[:, real], model.read(spectrum.bias)[real]


def _relative_residuals(T: Tensor, real: Tensor) -> Tensor:
    """Relative residuals about the mean of the real tokens, ``[sets, terms]``; padded rows of ``T`` are 0."""
    keep = real[:, None, :, None].to(T.dtype)
    mean = T.sum(-2, keepdim=True) / keep.sum(-2, keepdim=True).clamp(min=1)
    size = _composite(T)
    return _composite((T - mean).mul_(keep)) / torch.where(size > 0, size, 1)


def _composite(T: Tensor) -> Tensor:
    """``norms.composite_norm`` of known finite numbers, which reads them once."""
    A = T.abs()
    return A.sum(-2).amax(-1).sqrt() * A.sum(-1).amax(-1).sqrt()


# -------------------------------------------------------------------------------------- the sampled protocol


@torch.no_grad()
def sampled(
    model: Any,
    examples: Any,
    paths: int | Sequence[int] = 5,
    repeats: int = 5,
    seed: int = 0,
    lengths: Sequence[int] | None = None,
    chunk: int | None = None,
    *,
    frozen: bool = False,
    share: bool = True,
) -> Float[Tensor, "*counts lengths repeats"]:
    """Accuracy of a few random paths of each length: the paper's protocol (paper, section 4, figure 4).

    Args:
        model: A ``TokenClassifier`` whose ``SAN`` has skips and no MLP; it runs in its own dtype.
        examples: The data.
        paths: How many paths to draw per length and repeat; or several numbers in growing order, each of
            which then takes the first so many of the same draws.
        repeats: How often to draw anew.
        seed: 0 or more.
        lengths: Which lengths; ``None`` means ``0..L``.
        chunk: How many sets to run at once; ``None`` means as many as fit in a few megabytes.
        frozen: Run the theorem's paths instead (see the module): attention and norms frozen.
        share: Run what the drawn paths of a length have in common only once.  The result is the same, to
            rounding; without it every path runs from the start, as the protocol says.

    Returns:
        Accuracies ``[lengths, repeats]`` in float64, with an axis before them if ``paths`` is a sequence.

    Raises:
        ValueError: the network has no skips or has MLPs, a number is out of range, the examples have no real
            token or a label that is no class of the network's, or a state overflowed.
        TypeError: ``model`` or ``examples`` lacks a part, or an argument is of another type.
    """
    san = _parts(model, examples).san
    counts = _counts(paths)
    lengths = checks.listed("lengths", range(san.depth + 1) if lengths is None else lengths)
    if not lengths:
        raise ValueError("lengths must not be empty; None means all of them")
    repeats = checks.positive_int("repeats", repeats)
    drawn = [[draw(*sizes(san), k, counts[-1], seed, r) for r in range(repeats)] for k in lengths]
    hits, tokens = torch.zeros(len(counts), len(drawn), repeats, dtype=torch.float64), 0
    with _evaluating(model):
        for inputs, labels, real in _chunks(model, examples, chunk):
            walk = Walk(san, model.embed(inputs), _padding(real), frozen, share)
            for i, sets in enumerate(drawn):
                for j, sums in enumerate(walk.sums(sets, counts)):
                    logits = _read(model, walk.finish(sums, counts[j], lengths[i]))[:, real]
                    hits[j, i] += (logits.argmax(-1) == labels[real]).sum(-1).cpu()
            tokens += int(real.sum())
    return (hits if isinstance(paths, Sequence) else hits[0]) / tokens


@torch.no_grad()
def along(
    model: Any, examples: Any, paths: Sequence[Path], chunk: int | None = None, *, frozen: bool = False
) -> float:
    """Accuracy of the sum of the given paths, run as in ``sampled``.

    Args:
        model: A ``TokenClassifier`` whose ``SAN`` has skips and no MLP; it runs in its own dtype.
        examples: The data.
        paths: One or more paths ``(h_1, ..., h_L)``, all of the same length.
        chunk: How many sets to run at once; ``None`` means as many as fit in a few megabytes.
        frozen: Run the theorem's paths instead.

    Returns:
        A number in ``[0, 1]``.

    Raises:
        ValueError: no path or paths of several lengths, a head that does not exist; else as ``sampled``.
        TypeError: as ``sampled``.
    """
    san = _parts(model, examples).san
    drawn = [tuple(checks.listed("each of paths", path)) for path in checks.listed("paths", paths)]
    length = _common_length(drawn, *sizes(san))
    hits = tokens = 0
    with _evaluating(model):
        for inputs, labels, real in _chunks(model, examples, chunk):
            walk = Walk(san, model.embed(inputs), _padding(real), frozen)
            sums = walk.sums([drawn], [len(drawn)])[0]
            logits = _read(model, walk.finish(sums, len(drawn), length))[0, real]
            hits += int((logits.argmax(-1) == labels[real]).sum())
            tokens += len(logits)
    return hits / tokens


# ---------------------------------------------------------------------------------------------------- helpers


def _read(model: Any, states: Tensor) -> Tensor:
    """Finite logits, or an error."""
    return checks.finite("the paths' logits", model.read(states))


def _counts(paths: int | Sequence[int]) -> list[int]:
    """One or more numbers of paths, strictly growing."""
    given = list(paths) if isinstance(paths, Sequence) else [paths]
    counts = [checks.positive_int("paths", c) for c in given]
    if not counts or any(a >= b for a, b in pairwise(counts)):
        raise ValueError(f"paths must be one number or several in growing order, but is {given}")
    return counts


def _common_length(paths: list[Path], L: int, H: int) -> int:
    """The one length of all the paths."""
    for path in paths:
        heads = [checks.positive_int("a head in paths", h, minimum=0) for h in path]
        if len(heads) != L or max(heads, default=0) > H:
            raise ValueError(f"paths holds {path}; expected {L} entries in 0..{H}")
    lengths = {sum(h > 0 for h in path) for path in paths}
    if len(lengths) != 1:
        raise ValueError(f"paths must all have one length, but have {sorted(lengths) or 'none'}")
    return lengths.pop()


def _parts(model: Any, examples: Any) -> Any:
    """Require what the measurements read, and return the model."""
    wanted = {"model": ("san", "embed", "read"), "examples": ("inputs", "labels", "real")}
    for (name, parts), given in zip(wanted.items(), (model, examples), strict=True):
        missing = [part for part in parts if not hasattr(given, part)]
        if missing:
            raise TypeError(
                f"{name} must have {', '.join(parts)}, but is {type(given).__name__} without {missing}"
            )
    if not bool(examples.real.any()):
        raise ValueError(
            f"examples have no real token: examples.real is all False, {checks.describe(examples.real)}"
        )
    _check_labels(model, examples)
    return model


def _check_labels(model: Any, examples: Any) -> None:
    """Require labels that the network can give: another one would count as wrong, or as right by chance."""
    weight = next(model.parameters())
    classes = model.read(weight.new_zeros(1, model.san.dim)).shape[-1]
    low, high = (int(v) for v in torch.aminmax(examples.labels[examples.real]))
    if low < 0 or high >= classes:
        raise ValueError(
            f"examples.labels must be from 0 to {classes - 1}, the network's classes, "
            f"but on real tokens they are from {low} to {high}"
        )


def _chunks(model: Any, examples: Any, chunk: int | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Inputs, labels and ``real`` of some sets at a time, without the columns where all are padded."""
    san = model.san
    weight = next(model.parameters())
    n = examples.real.shape[-1]
    size = max(1, CHUNK_NUMBERS // (n * san.dim * (san.depth + 1))) if chunk is None else chunk
    for start in range(0, len(examples.real), checks.positive_int("chunk", size)):
        some = slice(start, start + size)
        real = examples.real[some]
        if not bool(real.any()):
            continue
        width = int(real.any(0).nonzero().max()) + 1
        inputs = examples.inputs[some, :width].to(weight.device)
        if inputs.is_floating_point():
            inputs = inputs.to(weight.dtype)
        yield inputs, *(t[:, :width].to(weight.device) for t in (examples.labels[some], real))


def _padding(real: Tensor) -> Tensor | None:
    """The key padding mask, if anything is padded."""
    return None if bool(real.all()) else real


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Switch dropout off for a while."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
