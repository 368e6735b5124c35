"""Who may attend to whom: boolean masks and the softmax under them (ours; the paper masks nothing).

``True`` = may attend, everywhere in the library.  A row that may attend to nothing gets attention zero.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rc_lib import checks


def _fits(mask: Tensor, X: Tensor) -> bool:
    """Whether a mask is [n, n], [*batch, n, n] or [*batch, heads, n, n]; a batch axis may be 1."""
    n, batch = X.shape[-2], X.shape[:-2]
    if mask.shape[-2:] != (n, n) or mask.ndim not in (2, X.ndim, X.ndim + 1):
        return False
    given = mask.shape[: len(batch)] if mask.ndim > 2 else ()
    return all(a in (1, b) for a, b in zip(given, batch, strict=False))


def allowed(
    X: Float[Tensor, "*batch n d"],
    mask: Bool[Tensor, "..."] | None = None,
    key_padding_mask: Bool[Tensor, "*batch n"] | None = None,
) -> Bool[Tensor, "..."] | None:
    """Who may attend to whom, as one tensor that broadcasts against the scores.

    Args:
        X: Tokens, ``[*batch, n, d]``.
        mask: ``[n, n]`` for all, ``[*batch, n, n]`` for all heads, or ``[*batch, H, n, n]``.
        key_padding_mask: ``[*batch, n]``, ``True`` for real tokens; the others are no one's key.

    Returns:
        A boolean tensor ``[..., n or 1, n]``, ``True`` = may attend; ``None`` if nothing is masked.

    Raises:
        TypeError: a mask is not boolean (a float mask is not accepted: it could mean either thing).
        ValueError: a mask's shape does not fit ``X``.
    """
    n = X.shape[-2]
    for name, M in {"mask": mask, "key_padding_mask": key_padding_mask}.items():
        if M is not None and (not isinstance(M, Tensor) or M.dtype != torch.bool):
            raise TypeError(f"{name} must be boolean, True = may attend, but is {checks.describe(M)}")
    if mask is not None:
        if not _fits(mask, X):
            expected = f"[{n}, {n}], [*batch, {n}, {n}] or [*batch, heads, {n}, {n}] for X of shape"
            raise ValueError(f"mask is {checks.describe(mask)}; expected {expected} {tuple(X.shape)}")
        if 2 < mask.ndim == X.ndim:
            mask = mask.unsqueeze(-3)
    if key_padding_mask is None:
        return mask
    if key_padding_mask.shape != X.shape[:-1]:
        was = checks.describe(key_padding_mask)
        raise ValueError(
            f"key_padding_mask is {was}; expected {tuple(X.shape[:-1])} for X of shape {tuple(X.shape)}"
        )
    keys = key_padding_mask[..., None, None, :]
    return keys if mask is None else keys & mask


def masked_softmax(
    S: Float[Tensor, "*batch n m"], may: Bool[Tensor, "..."] | None = None
) -> Float[Tensor, "*batch n m"]:
    """Softmax of each row over the allowed entries; a row with none becomes zero (the latter ours).

    Args:
        S: Scores, ``[*batch, n, m]``.
        may: Boolean, broadcastable to ``S``, ``True`` = allowed; ``None`` allows everything.

    Returns:
        ``[*batch, n, m]``: rows sum to 1, or to 0 where nothing is allowed.
    """
    if may is None:
        return S.softmax(-1)
    # A row of -inf only would give NaN, also in the gradient: there the scores stay, and are zeroed after.
    hidden = ~may & may.any(-1, keepdim=True)
    return S.masked_fill(hidden, -math.inf).softmax(-1).masked_fill(~may, 0.0)


def causal(n: int) -> Bool[Tensor, "n n"]:
    """The mask of a decoder, ``[n, n]``: each token attends to itself and to the tokens before it.

    Args:
        n: The number of tokens.

    Returns:
        Lower triangle ``True``.

    Raises:
        ValueError: ``n`` is below 1.
        TypeError: ``n`` is no whole number.
    """
    return torch.ones(checks.positive_int("n", n), n, dtype=torch.bool).tril()


def window(n: int, width: int) -> Bool[Tensor, "n n"]:
    """A local mask, ``[n, n]``: token ``i`` attends to ``j`` where ``|i − j| ≤ (width − 1) / 2``.

    Args:
        n: The number of tokens.
        width: How many tokens away from the edges each one sees, itself included; odd.

    Returns:
        A band of ``True``.

    Raises:
        ValueError: ``n`` or ``width`` is below 1, or ``width`` is even.
        TypeError: ``n`` or ``width`` is no whole number.
    """
    if checks.positive_int("width", width) % 2 == 0:
        raise ValueError(f"width must be odd, but is {width}")
    i = torch.arange(checks.positive_int("n", n))
    return (i[:, None] - i).abs() <= (width - 1) // 2
