"""Real transformers: load, ablate, trace and measure them (section 4 of the paper: figure 2).

Three lines with a model and a text of your own::

    model = pretrained.load("distilbert-base-uncased")  # a name on the hub, or a folder
    trace = pretrained.trace(model, "Any text of yours.", skip=False, mlp=False)
    print(rank.relative_residual(trace.stacked()))

Loading is in ``models.py``, the removal of skips and MLPs in ``ablation.py``, recording in ``recording.py``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rc_lib import checks, corpus, models, recording
from rc_lib.ablation import ablate, family_of, supported
from rc_lib.models import ModelUnavailable
from rc_lib.rank import relative_residual
from rc_lib.trace import Trace

__all__ = [
    "NAMES",
    "VARIANTS",
    "ModelUnavailable",
    "ablate",
    "language_model_loss",
    "load",
    "measure",
    "supported",
    "tokens",
    "trace",
]

#: Names that need no network; the first three at random initialisation, the last two trained as well.
NAMES = (*models.PUBLISHED, *models.PACKAGED)
#: The four curves of figure 2, from label to the two switches.
VARIANTS = {
    "SAN": {"skip": False, "mlp": False},
    "SAN+MLP": {"skip": False, "mlp": True},
    "SAN+skip": {"skip": True, "mlp": False},
    "transformer": {"skip": True, "mlp": True},
}


def load(
    name: str, trained: bool = True, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> nn.Module:
    """Load a real transformer, in evaluation mode and with attention matrices that can be read.

    Args:
        name: ``"bert-base"`` (bert-base-cased), ``"albert-base"`` (albert-base-v2), ``"xlnet-base"``
            (xlnet-base-cased), ``"minilm"`` (6 layers), ``"smollm2"`` (SmolLM2-135M-Instruct, 30 layers), the
            name of any model of a supported family on the Hugging Face hub, or a local folder.
        trained: ``True`` for trained weights: from installed packages for the last two, else from the local
            cache or the hub.  ``False`` for a fresh random initialisation of the same configuration.
        seed: seed of that initialisation; torch's global generator is not touched.
        dtype: of the weights, a floating-point type.
        device: where to put the model.

    Returns:
        The Hugging Face model, without a head for encoders, with its language-model head for decoders.

    Raises:
        TypeError: ``name`` is no string, ``trained`` no boolean, or ``seed`` no whole number.
        ValueError: an empty name, a negative seed, or a family that is not supported.
        ModelUnavailable: trained weights are asked for that are not on this machine, and no network is there.
        corpus.MissingPackage: the package with the weights is not installed.
    """
    _check_load(name, trained, seed, dtype, device)
    key = models.published_name(name)
    if name in models.PACKAGED and trained:
        model = models.packaged(name)
    elif trained:
        model = _from_hub(models.PUBLISHED[key].hub if key else name)
    else:
        model = models.initialised(models.config_of(name), seed)
    family_of(model)
    model.rc_lib_tokenizer = name if name in models.PACKAGED else _tokenizer_name(name, key, trained)
    model.rc_lib_fold = bool(key and not trained)
    return model.to(device=device, dtype=dtype).eval()


def _check_load(name: Any, trained: Any, seed: Any, dtype: torch.dtype, device: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, but is {checks.describe(name)}")
    if not name:
        raise ValueError(
            f"name must be one of {', '.join(NAMES)}, a name on the hub or a folder, but is empty"
        )
    checks.one_of("dtype", dtype, checks.FLOATS)
    checks.boolean("trained", trained)
    checks.seed(seed)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"device={device!r}: expected a device of this machine, such as 'cpu'") from error


def _from_hub(name: str) -> nn.Module:
    from transformers import AutoConfig

    config = models.from_hub(AutoConfig, name)
    checks.one_of("name: its family", config.model_type, supported())
    return models.from_hub(models.model_class(config), name, attn_implementation="eager")


def _tokenizer_name(name: str, key: str | None, trained: bool) -> str:
    if key is None:
        return name
    return models.PUBLISHED[key].hub if trained else "minilm"


def tokens(
    model: nn.Module,
    text: str | Sequence[str] | None = None,
    n: int = 32,
    length: int | None = None,
    kind: str = "opening",
) -> Int[Tensor, "b n"]:
    """Tokenise for a model that ``load`` loaded: your own text, or the book's excerpts.

    A trained model reads its own vocabulary.  BERT, ALBERT and XLNet at random initialisation read WordPiece
    ids folded into their range (``corpus.fold``), for want of their own vocabulary offline.

    Args:
        model: what ``load`` returned.
        text: one text or several; ``None`` for the book's excerpts.
        n: how many excerpts, at most 32; not used with ``text``.
        length: tokens in each row; by default 128 for the excerpts, and all there are for ``text``.
        kind: which excerpts, see ``corpus.texts``; not used with ``text``.

    Returns:
        Token ids on the model's device.

    Raises:
        ValueError: the model did not come from ``load``, or the text is too short (see
            ``corpus.encode``).
    """
    tok = _tokenizer_of(model)
    if text is None:
        ids = corpus.tokens(n, 128 if length is None else length, tok, kind=kind)
    else:
        ids = corpus.encode(text, length, tok)
    if model.rc_lib_fold:
        ids = corpus.fold(ids, model.config.vocab_size)
    return ids.to(model.device)


def _tokenizer_of(model: nn.Module) -> Any:
    name = getattr(model, "rc_lib_tokenizer", None)
    if name is None:
        raise ValueError(
            "model did not come from pretrained.load, so its tokenizer is unknown: pass token ids"
        )
    if name in corpus.TOKENIZERS:
        return name
    from transformers import AutoTokenizer

    return models.from_hub(AutoTokenizer, name)


def _batch(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    if isinstance(inputs, str) or (
        isinstance(inputs, (list, tuple)) and inputs and isinstance(inputs[0], str)
    ):
        inputs = tokens(model, inputs)
    family_of(model)  # says what is wrong with another kind of model
    return recording.as_batch(model, inputs)


def trace(model: nn.Module, inputs: Any, skip: bool = True, mlp: bool = True) -> Trace:
    """Run a model once, with or without its skips and MLPs, and record what passes through it.

    Args:
        model: a Hugging Face model of a supported family.
        inputs: a text, a list of texts of equal length, token ids ``[n]`` or ``[b, n]``, embeddings
            ``[b, n, d]``, pixels ``[b, channels, height, width]``, or a dictionary from a tokenizer.
        skip: ``False`` removes the attention skips (see ``ablation.ablate``).
        mlp: ``False`` replaces the feed-forward blocks by the identity.

    Returns:
        ``hidden[l]`` is the output of layer l before any final norm (Hugging Face's ``output_hidden_states``
        gives the last one after it); the final norm's statistics are in ``final_norm``, its output in
        ``output``.  There is one attention matrix per query head, also where heads share keys and values.

    Raises:
        TypeError: inputs of another type.
        ValueError: empty inputs, ids outside of the vocabulary, more tokens than the model has positions.
    """
    batch = _batch(model, inputs)
    with ablate(model, skip, mlp):
        return recording.record(model, batch)


def measure(
    model: nn.Module,
    inputs: Any,
    metric: Callable[[Tensor], Tensor] = relative_residual,
    skip: bool = True,
    mlp: bool = True,
    batch_size: int = 8,
) -> Float[Tensor, "layers b *rest"]:
    """Apply a metric to every layer's output while the model runs: memory holds one layer's states.

    Args:
        model: a Hugging Face model of a supported family.
        inputs: as for ``trace``.
        metric: maps ``[b, n, d]`` to ``[b, ...]``, e.g. a function of ``rc_lib.rank``.
        skip: ``False`` removes the attention skips.
        mlp: ``False`` replaces the feed-forward blocks by the identity.
        batch_size: how many rows of ``inputs`` run at once.

    Returns:
        ``L + 1`` rows, the input's first; one column per row of ``inputs``.

    Raises:
        TypeError: see ``trace``.
        ValueError: see ``trace``.
    """
    checks.positive_int("batch_size", batch_size)
    batch = _batch(model, inputs)
    if not callable(metric):
        raise TypeError(f"metric must be a function of [b, n, d], but is {checks.describe(metric)}")
    with ablate(model, skip, mlp):
        parts = [recording.observe(model, small, metric) for small in recording.split(batch, batch_size)]
    return torch.cat(parts, dim=1)


def language_model_loss(
    model: nn.Module, ids: Int[Tensor, "b n"], batch_size: int = 2, chunk: int = 256
) -> float:
    """Return a decoder's mean loss in nats per predicted token; a uniform guess scores log(vocabulary).

    Args:
        model: a decoder with its language-model head, e.g. ``load("smollm2")``.
        ids: token ids, at least two per row; every token but a row's first is predicted.
        batch_size: rows at once.
        chunk: tokens whose logits are in memory at once (256 × 49,152 float32 logits take 50 MB).

    Returns:
        The mean over all ``b·(n − 1)`` predictions.

    Raises:
        ValueError: the model has no causal language-model head, or rows of fewer than two tokens.
    """
    head = model.get_output_embeddings()
    if head is None or model.config.model_type not in models.CAUSAL:
        raise ValueError(
            f"model must be a decoder with a language-model head, but is a {type(model).__name__}"
        )
    if ids.shape[1] < 2:
        raise ValueError(f"ids must have at least two tokens a row, but has shape {tuple(ids.shape)}")
    total = 0.0
    for batch in recording.split(recording.as_batch(model, ids), batch_size):
        X = recording.run(model, batch)[:, :-1].flatten(0, 1)
        wanted = batch["input_ids"][:, 1:].flatten()
        total += _summed_loss(head, X, wanted, chunk)
    return total / (ids.shape[0] * (ids.shape[1] - 1))


@torch.no_grad()
def _summed_loss(head: nn.Module, X: Tensor, wanted: Tensor, chunk: int) -> float:
    losses = [
        torch.nn.functional.cross_entropy(head(x), y, reduction="sum").item()
        for x, y in zip(X.split(chunk), wanted.split(chunk), strict=True)
    ]
    return sum(losses)
