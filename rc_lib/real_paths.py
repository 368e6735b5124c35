"""The path decomposition of real transformers (section 2.1 of the paper, carried to trained models; ours).

A Hugging Face model, run once in float64 and frozen, becomes a ``frozen.Frozen`` network: attention matrices
and norms' statistics as recorded, one hop per attention layer, and each MLP either

- a *source* (``mlps="sources"``): its output enters the residual stream as something new, with 0 hops; or
- a *linear map* (``mlps="gates"``): a hidden unit is an input times a gate (``gelu(u) = u Φ(u)``; a gated MLP
  has its gates written out), and with the gates frozen paths run through it, keeping their hops.

Both sums are exact.  They answer different questions: the first counts hops since the MLP that computed
something, the second hops since the embedding.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rc_lib import checks, pretrained
from rc_lib.ablation import base_of, family_of, layers_of, part
from rc_lib.float64 import in_float64
from rc_lib.frozen import Frozen, Gate, Source, freeze_trace
from rc_lib.trace import Trace

# For each family (by the first of its model types): where a layer keeps W_V and W_O, and an MLP's matrices.
_PARTS = {
    "bert": ("attention.self.value", "attention.output.dense", "intermediate.dense", "output.dense"),
    "distilbert": ("attention.v_lin", "attention.out_lin", "ffn.lin1", "ffn.lin2"),
    "llama": ("self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"),
}
MLPS = ("sources", "gates")


@dataclass
class HeadWeights:
    """What a hop needs of an attention layer, stacked by head, in the model's format (no copy of ``W_O``)."""

    W_V: Float[Tensor, "H d d_v"]
    W_O: Float[Tensor, "H d_v d"]
    b_V: Float[Tensor, "H d_v"]
    b_O: Float[Tensor, " d"]


@dataclass
class _Layer:
    """A layer as ``freeze_trace`` wants it."""

    attention: HeadWeights
    norm: str
    skip: bool = True
    mlp_skip: bool = True


def _parts(model: nn.Module) -> tuple[str, str, str, str]:
    family = family_of(model)
    if family.model_types[0] not in _PARTS:
        known = ", ".join(kind for kind in pretrained.supported() if _known(kind))
        raise ValueError(f"model is of the family {model.config.model_type!r}; expected one of {known}")
    return _PARTS[family.model_types[0]]


def _known(kind: str) -> bool:
    from rc_lib.ablation import FAMILIES

    return any(kind in f.model_types and f.model_types[0] in _PARTS for f in FAMILIES)


def _bias(linear: nn.Linear) -> Tensor:
    size = linear.weight.shape[0]
    return torch.zeros(size, dtype=torch.float64) if linear.bias is None else linear.bias.detach().double()


def head_weights(model: nn.Module, layer: int) -> HeadWeights:
    """Read one attention layer's values and outputs, one matrix per query head.

    Heads that share keys and values (grouped-query attention) get their own copies of the shared matrix.

    Args:
        model: a Hugging Face model of the BERT, DistilBERT or Llama family.
        layer: which layer, from 0.

    Returns:
        The weights in the model's format, the biases in float64, in the book's orientation (tokens are rows).

    Raises:
        ValueError: a family whose layout is not known here, or a layer that does not exist.
    """
    value_path, out_path, *_ = _parts(model)
    layers = layers_of(model)
    if checks.positive_int("layer", layer, minimum=0) >= len(layers):
        raise ValueError(f"layer must be below {len(layers)}, but is {layer}")
    value, out = part(layers[layer], value_path), part(layers[layer], out_path)
    H = base_of(model).config.num_attention_heads
    W_O = out.weight.detach().T.unflatten(0, (H, -1))  # [H, d_v, d]
    d_v = W_O.shape[1]
    W_V = value.weight.detach().unflatten(0, (-1, d_v)).mT  # [key-value heads, d, d_v]
    b_V = _bias(value).unflatten(0, (-1, d_v))
    shared = H // W_V.shape[0]
    if shared > 1:
        W_V, b_V = W_V.repeat_interleave(shared, 0), b_V.repeat_interleave(shared, 0)
    return HeadWeights(W_V, W_O, b_V, _bias(out))


@contextlib.contextmanager
def _watching_gates(model: nn.Module, gates: list[Tensor]) -> Iterator[None]:
    """Collect each MLP's gates while the model runs."""
    gated = family_of(model).model_types[0] == "llama"
    first = "mlp.act_fn" if gated else _parts(model)[2]
    kind = "silu" if gated else _activation(model)

    def see(_: nn.Module, args: tuple, out: Tensor) -> None:
        gates.append(out.detach() if gated else _gate(kind, out.detach()))

    with contextlib.ExitStack() as undo:
        for layer in layers_of(model):
            undo.callback(part(layer, first).register_forward_hook(see).remove)
        yield


def _activation(model: nn.Module) -> str:
    config = base_of(model).config
    kind = getattr(config, "hidden_act", None) or config.activation
    return checks.one_of("model: its MLP's activation", kind, ("gelu", "relu"))


def _gate(kind: str, U: Tensor) -> Tensor:
    """The factor by which the activation multiplies its input: ``Φ(u)`` for gelu, 0 or 1 for relu."""
    return torch.special.ndtr(U) if kind == "gelu" else (U > 0).to(U.dtype)


def _gate_steps(model: nn.Module, frozen: Frozen, trace: Trace, gates: list[Tensor]) -> list[Any]:
    """Replace every source by its MLP's linear map."""
    _, _, up_path, down_path = _parts(model)
    pre, mlp, steps = family_of(model).pre_norm, 0, []
    for step in frozen.steps:
        if isinstance(step, Source):
            layer = layers_of(model)[mlp]
            up, down = part(layer, up_path), part(layer, down_path)
            W_up, W_down = up.weight.detach().T, down.weight.detach().T
            norm = trace.norms[mlp][1] if pre else None
            step = Gate(gates[mlp], W_up, _bias(up), W_down, _bias(down), norm)
            mlp += 1
        steps.append(step)
    return steps


@torch.no_grad()
def freeze_model(model: nn.Module, inputs: Any, mlps: str = "sources") -> Frozen:
    """Run a real model once, in float64 one module at a time, and freeze it (paper, Theorem 2.1; MLPs ours).

    Args:
        model: a Hugging Face model of the BERT, DistilBERT or Llama family, in any floating-point format.
        inputs: as for ``pretrained.trace``: a text, several of equal length, or token ids.
        mlps: ``"sources"``: each MLP's output is a new source; ``"gates"``: its gates are frozen, and it is
            linear.

    Returns:
        The frozen network in float64; its output is the model's last hidden state after the final norm.

    Raises:
        TypeError: inputs of another type.
        ValueError: a family whose layout is not known here, another ``mlps``, an activation that has no gate
            (with ``"gates"``: gelu and relu have, and so have gated MLPs), or unusable inputs.
    """
    checks.one_of("mlps", mlps, MLPS)
    _parts(model)
    gates: list[Tensor] = []
    watch = _watching_gates(model, gates) if mlps == "gates" else contextlib.nullcontext()
    with in_float64(model), watch:
        trace = pretrained.trace(model, inputs)
    norm = "pre" if family_of(model).pre_norm else "post"
    layers = [_Layer(head_weights(model, l), norm) for l in range(trace.depth)]
    frozen = freeze_trace(trace, layers)
    return frozen if mlps == "sources" else Frozen(frozen.X, _gate_steps(model, frozen, trace, gates))
