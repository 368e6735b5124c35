"""Take the skip connections or the MLPs out of a real transformer (figure 2's four variants).

Four variants, as the paper draws them:

- *SAN* (``skip=False, mlp=False``): no attention skip, and the feed-forward block replaced by the identity;
- *SAN+MLP* (``skip=False``): no attention skip; the feed-forward block keeps its own skip and LayerNorm;
- *SAN+skip* (``mlp=False``): the feed-forward block replaced by the identity;
- *transformer*: nothing removed.

The feed-forward block is everything from the attention block's output to the layer's: the two matrices, their
skip and their LayerNorm.  The attention block's LayerNorm stays everywhere.  With x a layer's input:

============  ======================================  ==========================================
              post-norm (BERT, ALBERT, XLNet)         pre-norm (Llama, GPT-2, ViT)
============  ======================================  ==========================================
transformer   a = LN(x + A(x)),  LN(a + F(a))         a = x + A(LN(x)),  a + F(LN(a))
SAN+skip      LN(x + A(x))                            x + A(LN(x))
SAN+MLP       a = LN(A(x)),  LN(a + F(a))             a = A(LN(x)),  a + F(LN(a))
SAN           LN(A(x))                                A(LN(x))
============  ======================================  ==========================================

The paper has post-norm models only; the right column is the same definition carried over (ours).

No model code is copied, and nothing is added that is subtracted again: that would bury a residual below
eps times the input.  A skip is removed by *rerouting*: the module that adds its input receives zeros, while
the modules inside it that must see the input receive it from a side channel.  0 + A(x) is exact in floating
point.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rc_lib import checks


def _zeros(X: Tensor) -> Tensor:
    return torch.zeros_like(X)  # a builtin has no signature, which ALBERT's chunking asks for


def _identity(X: Tensor) -> Tensor:
    return X


@dataclass(frozen=True)
class Family:
    """Where the models of one family keep their parts; paths are relative to one layer, dotted.

    Args:
        model_types: Hugging Face's ``config.model_type`` of the members.
        layers: path of the layers below the base model; ``*`` runs over a list.
        attention: the module that returns the attention matrix.
        norms: the attention block's norm and the feed-forward block's.
        mlp: the module whose output is the MLP's, before its skip and post-norm.
        adds: the module that adds its own input to the attention's output ("" is the layer itself).
        reads: the modules inside ``adds`` that must see the true input.
        without_mlp: what to call instead, to make the feed-forward block the identity.
        final_norm: the norm after the last layer, below the base model.
    """

    model_types: tuple[str, ...]
    layers: str
    attention: str
    norms: tuple[str, str]
    mlp: str
    adds: str
    reads: tuple[str, ...]
    without_mlp: dict[str, Callable[..., Tensor]] = field(hash=False)
    final_norm: str | None = None

    @property
    def pre_norm(self) -> bool:
        """Whether the norms sit before the blocks; then, and only then, there is a final norm."""
        return self.final_norm is not None


_BERT = Family(
    model_types=("bert", "roberta", "xlm-roberta", "camembert", "electra"),
    layers="encoder.layer.*",
    attention="attention.self",
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
    mlp="output.dense",
    adds="attention",
    reads=("attention.self",),
    without_mlp={"feed_forward_chunk": _identity},
)
_DISTILBERT = Family(
    model_types=("distilbert",),
    layers="transformer.layer.*",
    attention="attention",
    norms=("sa_layer_norm", "output_layer_norm"),
    mlp="ffn",
    adds="",
    reads=("attention",),
    without_mlp={"ffn.forward": torch.zeros_like, "output_layer_norm.forward": _identity},
)
_ALBERT = Family(
    model_types=("albert",),
    layers="encoder.albert_layer_groups.*.albert_layers.*",
    attention="attention",
    norms=("attention.LayerNorm", "full_layer_layer_norm"),
    mlp="ffn_output",
    adds="attention",
    reads=("attention.query", "attention.key", "attention.value"),
    without_mlp={"ff_chunk": _zeros, "full_layer_layer_norm.forward": _identity},
)
_XLNET = Family(
    model_types=("xlnet",),
    layers="layer.*",
    attention="rel_attn",
    norms=("rel_attn.layer_norm", "ff.layer_norm"),
    mlp="ff.layer_2",
    adds="rel_attn",
    reads=(),  # XLNet has a switch of its own for the skip, see _without_skip
    without_mlp={"ff.forward": _identity},
)
_LLAMA = Family(
    model_types=("llama", "mistral", "qwen2", "qwen3"),
    layers="layers.*",
    attention="self_attn",
    norms=("input_layernorm", "post_attention_layernorm"),
    mlp="mlp",
    adds="",
    reads=("input_layernorm",),
    without_mlp={"mlp.forward": torch.zeros_like},
    final_norm="norm",
)
_GPT2 = Family(
    model_types=("gpt2",),
    layers="h.*",
    attention="attn",
    norms=("ln_1", "ln_2"),
    mlp="mlp",
    adds="",
    reads=("ln_1",),
    without_mlp={"mlp.forward": torch.zeros_like},
    final_norm="ln_f",
)
_VIT = Family(
    model_types=("vit", "deit"),
    layers="layers.*",
    attention="attention",
    norms=("layernorm_before", "layernorm_after"),
    mlp="mlp",
    adds="",
    reads=("layernorm_before",),
    without_mlp={"mlp.forward": torch.zeros_like},
    final_norm="layernorm",
)
FAMILIES = (_BERT, _DISTILBERT, _ALBERT, _XLNET, _LLAMA, _GPT2, _VIT)


def supported() -> list[str]:
    """Return the supported values of a Hugging Face config's ``model_type``."""
    return sorted(kind for family in FAMILIES for kind in family.model_types)


def family_of(model: nn.Module) -> Family:
    """Return the family that a Hugging Face model belongs to.

    Args:
        model: a base model or one with a head.

    Returns:
        Its entry of ``FAMILIES``.

    Raises:
        TypeError: it is no Hugging Face model.
        ValueError: its family is not supported (the message lists those that are), or it has
            cross-attention, which has no place in the four variants.
    """
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if not isinstance(model, nn.Module) or kind is None:
        raise TypeError(f"model must be a Hugging Face model, but is a {type(model).__name__}")
    if getattr(config, "add_cross_attention", False):
        raise ValueError("model has cross-attention; only self-attention can be ablated")
    for family in FAMILIES:
        if kind in family.model_types:
            return family
    raise ValueError(
        f"model is of the family {kind!r}, which is not supported; supported: {', '.join(supported())}"
    )


def base_of(model: nn.Module) -> nn.Module:
    """Return the model without its head: the part that maps tokens to hidden states.

    Args:
        model: a Hugging Face model, with or without a head.

    Returns:
        Its base model; the model itself if it has no head.
    """
    return getattr(model, "base_model", model)


def _walk(modules: list[nn.Module], path: str) -> list[nn.Module]:
    for name in path.split("."):
        if name == "*":
            modules = [child for module in modules for child in module.children()]
        elif name:
            modules = [getattr(module, name) for module in modules]
    return modules


def part(module: nn.Module, path: str) -> nn.Module:
    """Return the submodule at a dotted path, ``""`` for the module itself.

    Args:
        module: where the path starts.
        path: attribute names joined by dots, e.g. ``"attention.self"``.

    Returns:
        The submodule.

    Raises:
        AttributeError: there is no such submodule.
    """
    return _walk([module], path)[0]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the distinct layers of a model, in order: ALBERT, which reuses one layer, has a single one.

    Args:
        model: a Hugging Face model of a supported family.

    Returns:
        The layer modules.

    Raises:
        TypeError: see ``family_of``.
        ValueError: the family is not supported, or this version of transformers lays it out differently.
    """
    family = family_of(model)
    try:
        return _walk([base_of(model)], family.layers)
    except AttributeError as error:
        import transformers

        raise ValueError(
            f"model: {type(model).__name__} of transformers {transformers.__version__} has no layers at "
            f"{family.layers!r}; rc_lib knows the layout of transformers 5"
        ) from error


# ---------------------------------------------------------------------------------------------------
# Removing and restoring


def _replace(undo: contextlib.ExitStack, owner: nn.Module, name: str, new: Callable[..., Any]) -> None:
    """Shadow a method on one instance until ``undo`` closes, then leave the instance as it was."""
    before = owner.__dict__.get(name)
    setattr(owner, name, new)
    if before is None:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, before)


def _marked(undo: contextlib.ExitStack, layer: nn.Module, what: str) -> bool:
    """Mark a layer as lacking ``what`` until ``undo`` closes; False if it was marked already (nested use)."""
    mark = f"_rc_lib_without_{what}"
    if mark in layer.__dict__:
        return False
    object.__setattr__(layer, mark, True)
    undo.callback(object.__delattr__, layer, mark)
    return True


def _without_skip(undo: contextlib.ExitStack, layer: nn.Module, family: Family) -> None:
    adder = part(layer, family.adds)
    if family is _XLNET:
        _replace(undo, adder, "post_attention", functools.partial(adder.post_attention, residual=False))
        return
    held: list[Tensor] = []
    original = adder.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        held.append(hidden_states)
        try:
            return original(torch.zeros_like(hidden_states), *args, **kwargs)
        finally:
            held.pop()

    _replace(undo, adder, "forward", forward)
    for path in family.reads:
        # First in line, so that whoever else hooks the module sees the true input too.
        hook = part(layer, path).register_forward_pre_hook(
            lambda _, args: (held[-1], *args[1:]), prepend=True
        )
        undo.callback(hook.remove)


def _without_mlp(undo: contextlib.ExitStack, layer: nn.Module, family: Family) -> None:
    for path, new in family.without_mlp.items():
        owner, _, name = path.rpartition(".")
        _replace(undo, part(layer, owner), name, new)


@contextlib.contextmanager
def ablate(model: nn.Module, skip: bool = True, mlp: bool = True) -> Iterator[nn.Module]:
    """Run a block of code with a model's attention skips or MLPs removed, in every layer.

    On leaving, by whatever way, the model is what it was: no hook, attribute or weight differs.  Nested uses
    add up: what an enclosing ``ablate`` removed stays removed, and removing it twice is removing it once.
    Gradients flow.  One model must not be ablated in two threads at once.

    Args:
        model: a Hugging Face model of a supported family (see ``supported``).
        skip: ``False`` removes the skip connection around attention.
        mlp: ``False`` replaces the feed-forward block by the identity.

    Yields:
        The same model.

    Raises:
        TypeError: ``model`` is no Hugging Face model, or a switch is no boolean.
        ValueError: the family is not supported; the message lists those that are.
    """
    checks.boolean("skip", skip)
    checks.boolean("mlp", mlp)
    family, layers = family_of(model), layers_of(model)
    with contextlib.ExitStack() as undo:
        for layer in layers:
            if not skip and _marked(undo, layer, "skip"):
                _without_skip(undo, layer, family)
            if not mlp and _marked(undo, layer, "mlp"):
                _without_mlp(undo, layer, family)
        yield model


def ablated(model: nn.Module) -> tuple[bool, bool]:
    """Return ``(skip, mlp)`` as they stand: ``(True, True)`` outside of any ``ablate``.

    Args:
        model: a Hugging Face model of a supported family.

    Returns:
        Whether its attention skips, and its feed-forward blocks, are in place.
    """
    marks = layers_of(model)[0].__dict__
    return "_rc_lib_without_skip" not in marks, "_rc_lib_without_mlp" not in marks
