"""Watch a forward pass of a real transformer from the outside: a ``Trace`` from hooks (for figure 2).

Every layer's true output is read where it leaves the layer, so no final norm slips into the last one.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rc_lib import checks
from rc_lib.ablation import Family, ablated, base_of, family_of, layers_of, part
from rc_lib.trace import NormStats, Trace

# RoBERTa's positions start after the padding id.
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert")


def as_batch(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """Turn ids, embeddings, pixels or a dictionary into checked keyword arguments of the model.

    Args:
        model: a Hugging Face model of a supported family.
        inputs: integer tensor ``[n]`` or ``[b, n]`` (token ids), float tensor ``[n, d]`` or ``[b, n, d]``
            (embeddings, cast to the model's dtype), ``[b, channels, height, width]`` (pixels), or a mapping
            of names to tensors.

    Returns:
        The arguments, on the model's device.

    Raises:
        TypeError: another type, or a mapping whose values are no tensors.
        ValueError: empty inputs, ids outside of the vocabulary, embeddings of another width than the model's,
            or more tokens than the model has positions.
    """
    if isinstance(inputs, Tensor):
        inputs = _named(inputs)
    if not isinstance(inputs, Mapping) or not all(isinstance(value, Tensor) for value in inputs.values()):
        raise TypeError(
            "inputs must be a text, token ids, embeddings, pixels or a dictionary of tensors, "
            f"but is {checks.describe(inputs)}"
        )
    batch = {name: value.to(model.device) for name, value in inputs.items()}
    if "inputs_embeds" in batch:
        batch["inputs_embeds"] = batch["inputs_embeds"].to(model.dtype)
    if not batch or any(value.numel() == 0 for value in batch.values()):
        raise ValueError("inputs must not be empty")
    _check_ids(model, batch.get("input_ids"))
    _check_width(model, batch.get("inputs_embeds"))
    return batch


def _named(X: Tensor) -> dict[str, Tensor]:
    if X.dtype == torch.bool or X.is_complex():
        raise TypeError(
            f"inputs: token ids must be integers, embeddings floats, but are {checks.describe(X)}"
        )
    if not X.is_floating_point():
        if X.ndim not in (1, 2):
            raise ValueError(f"inputs: token ids must have shape [n] or [b, n], but are {checks.describe(X)}")
        return {"input_ids": X if X.ndim == 2 else X[None]}
    checks.matrix("inputs", X)
    if X.ndim == 4:
        return {"pixel_values": X}
    if X.ndim > 4:
        raise ValueError(f"inputs: embeddings must have shape [b, n, d], but are {checks.describe(X)}")
    return {"inputs_embeds": X if X.ndim == 3 else X[None]}


def _check_ids(model: nn.Module, ids: Tensor | None) -> None:
    if ids is None:
        return
    config = base_of(model).config
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise ValueError(
            f"inputs: token ids must be from 0 to {config.vocab_size - 1} for this model, "
            f"but run from {int(ids.min())} to {int(ids.max())}"
        )
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and config.model_type in _OFFSET_POSITIONS:
        most -= config.pad_token_id + 1
    if most is not None and 0 < most < ids.shape[1]:  # XLNet says -1: no limit
        raise ValueError(
            f"inputs: the model has positions for {most} tokens, but the rows have {ids.shape[1]}"
        )


def _check_width(model: nn.Module, X: Tensor | None) -> None:
    try:
        width = None if X is None else model.get_input_embeddings().weight.shape[-1]
    except AttributeError:  # a model without an embedding table takes what its first layer takes
        width = None
    if width is not None and X.shape[-1] != width:
        raise ValueError(f"inputs: embeddings must have shape [b, n, {width}], but are {checks.describe(X)}")


def split(batch: Mapping[str, Tensor], size: int) -> Iterator[dict[str, Tensor]]:
    """Yield the batch in pieces of at most ``size`` rows.

    Args:
        batch: tensors with the same first axis.
        size: the largest number of rows in a piece.

    Yields:
        Dictionaries with the same keys.
    """
    checks.positive_int("batch_size", size)
    rows = len(next(iter(batch.values())))
    for start in range(0, rows, size):
        yield {name: value[start : start + size] for name, value in batch.items()}


@contextlib.contextmanager
def _reading_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout off and the explicit attention implementation on; restore both afterwards."""
    training = [module for module in model.modules() if module.training]
    config = base_of(model).config
    before = config._attn_implementation
    model.eval()
    config._attn_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation = before
        for module in training:
            module.training = True


def run(model: nn.Module, batch: Mapping[str, Tensor]) -> Float[Tensor, "b n d"]:
    """Run the model below its head, without gradients, dropout or caches.

    Args:
        model: a Hugging Face model of a supported family.
        batch: what ``as_batch`` returned.

    Returns:
        The last hidden state, after the final norm if there is one.
    """
    kind = base_of(model).config.model_type
    extra = {"use_cache": False} if kind in ("llama", "mistral", "qwen2", "qwen3", "gpt2") else {}
    if kind == "xlnet":
        extra = {"use_mems": False, "output_attentions": True}
    with _reading_mode(model), torch.no_grad():
        return base_of(model)(**batch, **extra, return_dict=True).last_hidden_state


def norm_stats(norm: nn.Module, X: Float[Tensor, "*batch n d"]) -> NormStats:
    """Return what a LayerNorm or RMSNorm would divide and shift X by, one pair of numbers per token.

    Args:
        norm: a ``torch.nn.LayerNorm``, or an RMSNorm with ``weight`` and ``variance_epsilon``.
        X: its input.

    Returns:
        The statistics; Hugging Face computes those of an RMSNorm in float32, here X's precision is kept.
    """
    g = norm.weight.detach()
    if isinstance(norm, nn.LayerNorm):
        mean, eps = X.mean(-1, keepdim=True), norm.eps
        std = ((X - mean).square().mean(-1, keepdim=True) + eps).sqrt()
        return NormStats(mean, std, g, torch.zeros_like(g) if norm.bias is None else norm.bias.detach())
    std = (X.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    return NormStats(torch.zeros_like(std), std, g, torch.zeros_like(g), centred=False)


class _Recorder:
    """Hooks on the layers of one model, filling lists in the order of execution."""

    def __init__(self, model: nn.Module):
        self.model, self.family = model, family_of(model)
        self.hidden: list[Any] = []
        self.attention: list[Tensor] = []
        self.norms: list[list[NormStats]] = []
        self.mlp_out: list[Tensor] = []
        self.final_norm: NormStats | None = None
        self.see: Callable[[Tensor], Any] = lambda X: X

    def states(self, X: Tensor) -> Tensor:
        """Bring XLNet's [n, b, d] into everyone's [b, n, d]."""
        return (X.transpose(0, 1) if self.family.model_types == ("xlnet",) else X).detach()

    def enter_layer(self, _: nn.Module, args: tuple) -> None:
        if not self.hidden:
            self.hidden.append(self.see(self.states(args[0])))
        self.norms.append([])

    def leave_layer(self, _: nn.Module, args: tuple, out: Any) -> None:
        self.hidden.append(self.see(self.states(out[0] if isinstance(out, tuple) else out)))

    def leave_attention(self, _: nn.Module, args: tuple, out: tuple) -> None:
        xlnet = self.family.model_types == ("xlnet",)
        self.attention.append((out[2].permute(2, 3, 0, 1) if xlnet else out[1]).detach())

    def enter_norm(self, norm: nn.Module, args: tuple) -> None:
        self.norms[-1].append(norm_stats(norm, self.states(args[0])))

    def leave_mlp(self, _: nn.Module, args: tuple, out: Tensor) -> None:
        self.mlp_out.append(self.states(out))

    def enter_final(self, norm: nn.Module, args: tuple) -> None:
        self.final_norm = norm_stats(norm, args[0].detach())


def _watch_layers(rec: _Recorder, undo: contextlib.ExitStack) -> None:
    for layer in layers_of(rec.model):
        undo.callback(layer.register_forward_pre_hook(rec.enter_layer).remove)
        undo.callback(layer.register_forward_hook(rec.leave_layer).remove)


def _watch_parts(rec: _Recorder, undo: contextlib.ExitStack, mlp: bool) -> None:
    family: Family = rec.family
    for layer in layers_of(rec.model):
        undo.callback(part(layer, family.attention).register_forward_hook(rec.leave_attention).remove)
        # Without the feed-forward block its norm may still run, its result unused: no part of the network.
        for path in family.norms if mlp else family.norms[:1]:
            undo.callback(part(layer, path).register_forward_pre_hook(rec.enter_norm).remove)
        if mlp:
            undo.callback(part(layer, family.mlp).register_forward_hook(rec.leave_mlp).remove)
    if family.final_norm is not None:
        final = part(base_of(rec.model), family.final_norm)
        undo.callback(final.register_forward_pre_hook(rec.enter_final).remove)


def record(model: nn.Module, batch: Mapping[str, Tensor]) -> Trace:
    """Run the model, as it stands (ablated or not), and return the record of the pass.

    Args:
        model: a Hugging Face model of a supported family.
        batch: what ``as_batch`` returned.

    Returns:
        The trace; see ``pretrained.trace``.
    """
    rec, mlp = _Recorder(model), ablated(model)[1]
    with contextlib.ExitStack() as undo:
        _watch_layers(rec, undo)
        _watch_parts(rec, undo, mlp)
        output = run(model, batch)
    mlp_out = rec.mlp_out if mlp else None
    return Trace(rec.hidden, rec.attention, rec.norms, mlp_out, rec.final_norm, output)


def observe(
    model: nn.Module, batch: Mapping[str, Tensor], metric: Callable[[Tensor], Tensor]
) -> Float[Tensor, "layers b *rest"]:
    """Run the model and apply a metric to each layer's output as it appears; only the values are kept.

    Args:
        model: a Hugging Face model of a supported family.
        batch: what ``as_batch`` returned.
        metric: maps ``[b, n, d]`` to ``[b, ...]``.

    Returns:
        The values ``[L + 1, b, ...]``, the input's first.
    """
    rec = _Recorder(model)
    rec.see = metric
    with contextlib.ExitStack() as undo:
        _watch_layers(rec, undo)
        run(model, batch)
    return torch.stack(rec.hidden)
