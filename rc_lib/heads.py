"""The weights of heads, stacked, and what they do to the features (paper, section 2).

Shapes: ``W_Q, W_K [H, d, d_qk]``, ``W_V [H, d, d_v]``, ``W_O [H, d_v, d']``.  ``rc_lib.attention`` builds
the layer from these functions and offers them too.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from rc_lib import checks


def fit(X: Tensor, **weights: Tensor) -> None:
    """Require that stacked weights read the ``d`` columns of ``X`` and have its dtype.

    Args:
        X: Tokens, ``[*batch, n, d]``.
        **weights: Stacked weights by name, each ``[H, d, k]``.

    Raises:
        ValueError: ``X`` has fewer than two axes, or a weight does not read ``d`` columns.
        TypeError: a tensor holds no floating-point numbers, or the dtypes differ.
    """
    checks.floats("X", X)
    if X.ndim < 2:
        raise ValueError(f"X must have shape [*batch, n, d], but is {checks.describe(X)}")
    for name, W in weights.items():
        checks.floats(name, W)
        if W.ndim != 3 or W.shape[1] != X.shape[-1]:
            expected = f"expected [heads, {X.shape[-1]}, ...] for X of shape {tuple(X.shape)}"
            raise ValueError(f"{name} is {checks.describe(W)}; {expected}")
        if W.dtype != X.dtype:
            raise TypeError(f"X is {checks.describe(X)}, {name} is {checks.describe(W)}: dtypes must agree")


def pair(name_a: str, A: Tensor, name_b: str, B: Tensor, axes: dict[int, int]) -> None:
    """Require that the given axes of two tensors have the same length.

    Args:
        name_a: The first tensor's name, for the message.
        A: The first tensor.
        name_b: The second tensor's name.
        B: The second tensor.
        axes: For each axis of ``A`` the axis of ``B`` that must be as long.

    Raises:
        ValueError: an axis is missing, or two lengths differ.
    """
    if any(A.ndim <= a or B.ndim <= b or A.shape[a] != B.shape[b] for a, b in axes.items()):
        shapes = f"{name_a} is {checks.describe(A)}, {name_b} is {checks.describe(B)}"
        raise ValueError(
            f"{shapes}: axes {list(axes)} of {name_a} and {list(axes.values())} of {name_b} differ"
        )


def project(
    X: Float[Tensor, "*batch n d"],
    W: Float[Tensor, "heads d k"],
    b: Float[Tensor, "heads k"] | None = None,
) -> Float[Tensor, "*batch heads n k"]:
    """Queries, keys or values of every head: ``X W_h + 1 b_hᵀ``.

    Args:
        X: Tokens, ``[*batch, n, d]``.
        W: One matrix per head, ``[H, d, k]``.
        b: One bias per head, ``[H, k]``; ``None`` means zero.

    Returns:
        ``[*batch, H, n, k]``.

    Raises:
        ValueError: the shapes do not fit.
        TypeError: not floating point, or two dtypes.
    """
    fit(X, W=W)
    Y = X.unsqueeze(-3) @ W
    if b is None:
        return Y
    pair("W", W, "b", b, {0: 0, 2: 1})
    return Y + b.unsqueeze(-2)


def W_QK(
    W_Q: Float[Tensor, "heads d d_qk"], W_K: Float[Tensor, "heads d d_qk"]
) -> Float[Tensor, "heads d d"]:
    """The bilinear form of each head, ``W_QK = W_Q W_Kᵀ`` (paper, section 2): ``[H, d, d]``.

    Args:
        W_Q: Query weights, ``[H, d, d_qk]``.
        W_K: Key weights, ``[H, d, d_qk]``.

    Returns:
        ``[H, d, d]``, of rank ``d_qk`` at most.
    """
    return W_Q @ W_K.mT


def W_h(
    W_V: Float[Tensor, "heads d d_v"], W_O: Float[Tensor, "heads d_v d_out"]
) -> Float[Tensor, "heads d d_out"]:
    """What each head does to the features, ``W_h = W_V W_O`` (paper, section 2): ``[H, d, d']``.

    Args:
        W_V: Value weights, ``[H, d, d_v]``.
        W_O: Output weights, ``[H, d_v, d']``.

    Returns:
        ``[H, d, d']``, of rank ``d_v`` at most.
    """
    return W_V @ W_O


def output_bias(
    W_O: Float[Tensor, "heads d_v d_out"],
    b_V: Float[Tensor, "heads d_v"] | None = None,
    b_O: Float[Tensor, " d_out"] | None = None,
) -> Float[Tensor, " d_out"]:
    """The layer's whole bias, ``b = Σ_h W_Oᵀ b_V + b_O``: the rows of ``P_h`` sum to 1.

    Args:
        W_O: Output weights, ``[H, d_v, d']``.
        b_V: Value bias, ``[H, d_v]``; ``None`` means zero.
        b_O: Output bias, ``[d']``; ``None`` means zero.

    Returns:
        ``[d']``.  It does not hold for a row that is masked everywhere: there the bias is ``b_O``.
    """
    b = W_O.new_zeros(W_O.shape[-1]) if b_V is None else torch.einsum("hv,hvd->d", b_V, W_O)
    return b if b_O is None else b + b_O


def merge_heads(
    A: Float[Tensor, "*batch heads n d_v"],
    W_O: Float[Tensor, "heads d_v d_out"],
    b_O: Float[Tensor, " d_out"] | None = None,
) -> Float[Tensor, "*batch n d_out"]:
    """Add up what the heads return: ``Σ_h A_h W_O,h + 1 b_Oᵀ``, ``[*batch, n, d']``.

    Args:
        A: Each head's values, ``[*batch, H, n, d_v]``.
        W_O: Output weights, ``[H, d_v, d']``.
        b_O: Output bias, ``[d']``; ``None`` means zero.

    Returns:
        ``[*batch, n, d']``.
    """
    Y = torch.einsum("...hnv,hvd->...nd", A, W_O)
    return Y if b_O is None else Y + b_O


def sum_of_heads(
    X: Float[Tensor, "*batch n d"],
    P: Float[Tensor, "*batch heads n n"],
    W: Float[Tensor, "heads d d_out"],
    b: Float[Tensor, " d_out"] | None = None,
) -> Float[Tensor, "*batch n d_out"]:
    """The layer for given attention matrices: ``Σ_h P_h X W_h + 1 bᵀ`` (paper, section 2).

    Args:
        X: Tokens, ``[*batch, n, d]``.
        P: Attention matrices, ``[*batch, H, n, n]``.
        W: The matrices ``W_h``, ``[H, d, d']``.
        b: The whole bias, ``[d']``; ``None`` means zero.

    Returns:
        ``[*batch, n, d']``.

    Raises:
        ValueError: the shapes do not fit.
        TypeError: not floating point, or two dtypes.
    """
    fit(X, W=W)
    pair("W", W, "P", P, {0: P.ndim - 3})
    pair("X", X, "P", P, {X.ndim - 2: P.ndim - 1})
    Y = (P @ (X.unsqueeze(-3) @ W)).sum(-3)
    return Y if b is None else Y + b


def heads_in(weight: Float[Tensor, "rows d"], heads: int) -> Float[Tensor, "heads d k"]:
    """Split a ``torch.nn.Linear`` weight that makes queries, keys or values into heads.

    Args:
        weight: ``[H·k, d]``, as ``torch.nn.Linear`` stores it.
        heads: The number of heads ``H``.

    Returns:
        ``[H, d, k]``.

    Raises:
        ValueError: ``H`` does not divide the number of rows.
    """
    return heads_out(weight.T, heads).mT


def heads_out(weight: Float[Tensor, "d_out columns"], heads: int) -> Float[Tensor, "heads d_v d_out"]:
    """Split a ``torch.nn.Linear`` output weight into heads.

    Args:
        weight: ``[d', H·d_v]``, as ``torch.nn.Linear`` stores it.
        heads: The number of heads ``H``.

    Returns:
        ``[H, d_v, d']``.

    Raises:
        ValueError: ``H`` does not divide the number of columns.
    """
    d_out, columns = weight.shape
    if columns % checks.positive_int("heads", heads):
        raise ValueError(
            f"{heads} heads do not divide the {columns} features of weight {tuple(weight.shape)}"
        )
    return weight.T.reshape(heads, columns // heads, d_out)
