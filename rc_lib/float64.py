"""Run a real model in float64 without holding its weights in float64 (section 4: figure 2; ours).

A 135-million-weight decoder takes 1.1 GB in float64, its largest matrix a few megabytes.  So each module's
weights are widened when it is called and restored when it returns.  Hugging Face's models also cast to
float32 inside (RMSNorm, softmax), whatever their weights are: within ``in_float64`` those casts do nothing.
"""

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

#: Weights of this many numbers are matrices, which no trace keeps.
_LARGE = 100_000
_SOFTMAX = (torch.softmax, torch.nn.functional.softmax, Tensor.softmax)


class _Wide(TorchFunctionMode):
    """Keep float64 where model code asks for float32: ``X.to(torch.float32)`` and softmax's ``dtype``."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        X = args[0] if args else kwargs.get("input")
        if not isinstance(X, Tensor) or X.dtype != torch.float64:
            return func(*args, **kwargs)
        if func is Tensor.to and args[1:] == (torch.float32,):
            return X
        if func in _SOFTMAX and kwargs.get("dtype") == torch.float32:
            kwargs.pop("dtype")
        return func(*args, **kwargs)


def _owned(module: nn.Module) -> list[Tensor]:
    """The floating-point weights of a module itself, without its children's."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return [t for t in tensors if t.is_floating_point() and t.dtype != torch.float64]


class _Widener:
    """Hooks that swap a module's weights for float64 copies while it runs.

    Large copies are used again for the next weight of the same size: hundreds of them, made and freed between
    small tensors that stay, would leave holes in memory worth as much as the whole model.
    """

    def __init__(self) -> None:
        self.held: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
        self.free: dict[int, list[Tensor]] = {}

    def widen(self, narrow: Tensor) -> Tensor:
        """A float64 copy; a small one, which a trace may keep, is always new."""
        spare = self.free.get(narrow.numel())
        return spare.pop().view(narrow.shape).copy_(narrow) if spare else narrow.double()

    def enter(self, module: nn.Module, args: tuple) -> tuple:
        self.held[module] = [(t, t.data) for t in _owned(module)]
        for t, narrow in self.held[module]:
            t.data = self.widen(narrow)
        return tuple(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)

    def leave(self, module: nn.Module, args: tuple, out: Any) -> None:
        for t, narrow in self.held.pop(module, []):
            if narrow.numel() >= _LARGE:
                self.free.setdefault(narrow.numel(), []).append(t.data.flatten())
            t.data = narrow

    def restore(self) -> None:
        for module in list(self.held):
            self.leave(module, (), None)


def _wide_output(module: nn.Module, args: tuple, out: Tensor) -> Tensor:
    """A look-up is exact in any format: widen what was found, not the table."""
    return out.double()


def _trim() -> None:
    """Hand freed memory back to the system, where the C library has a call for it (glibc)."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def release_memory() -> None:
    """Collect garbage and hand freed memory back to the system: call it between two large models."""
    gc.collect()
    _trim()


@contextlib.contextmanager
def in_float64(model: nn.Module) -> Iterator[nn.Module]:
    """Make every forward pass of a model inside the block a float64 one, one module's weights at a time.

    Embedding tables are not copied; their rows are widened when looked up.  What a model casts to float32
    by ``.to(torch.float32)`` or by a softmax's ``dtype`` stays float64.  (Llama computes the angles of its
    rotary embedding with ``.float()``: they stay constants of float32 precision.)  On leaving, by whatever
    way, all weights are the tensors that they were, bit for bit.

    Args:
        model: any module; float64 weights are left alone.

    Yields:
        The same model.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, but is a {type(model).__name__}")
    widener = _Widener()
    with contextlib.ExitStack() as undo:
        undo.callback(_trim)
        undo.callback(widener.free.clear)
        undo.callback(widener.restore)
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                undo.callback(module.register_forward_hook(_wide_output, prepend=True).remove)
            elif _owned(module):
                undo.callback(module.register_forward_pre_hook(widener.enter, prepend=True).remove)
                undo.callback(module.register_forward_hook(widener.leave).remove)
        with _Wide(), torch.no_grad():
            yield model
