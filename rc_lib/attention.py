"""One layer of self-attention, its heads as stacked tensors (paper, section 2).

Input ``X`` has one row per token, ``[*batch, n, d]``.  A layer's heads are stacked along the first axis::

    W_Q, W_K [H, d, d_qk]    W_V [H, d, d_v]    W_O [H, d_v, d']
    b_Q, b_K [H, d_qk]       b_V [H, d_v]       b_O [d']

Each function is one equation.  Weights multiply from the right, as in the paper (``torch.nn.Linear``
stores the transpose: see ``heads_in`` and ``heads_out``).  All numbers are dimensionless.

Masks are boolean and say what is allowed: ``True`` = this query may attend to this key (PyTorch's own
``key_padding_mask`` says the opposite).  A row that may attend to nothing gets attention zero, so the
layer's value for this token is ``b_O``; it is never NaN and its gradients are finite.  The functions
let NaN and infinity in ``X`` pass into their result; ``MultiHeadAttention`` refuses them.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from rc_lib import checks
from rc_lib.heads import W_QK as W_QK
from rc_lib.heads import W_h as W_h
from rc_lib.heads import fit, pair
from rc_lib.heads import heads_in as heads_in
from rc_lib.heads import heads_out as heads_out
from rc_lib.heads import merge_heads as merge_heads
from rc_lib.heads import output_bias as output_bias
from rc_lib.heads import project as project
from rc_lib.heads import sum_of_heads as sum_of_heads
from rc_lib.masks import allowed, masked_softmax
from rc_lib.weights import Gaussian, probability, scale, sizes


def scores(
    X: Float[Tensor, "*batch n d"],
    W_Q: Float[Tensor, "heads d d_qk"],
    W_K: Float[Tensor, "heads d d_qk"],
    b_Q: Float[Tensor, "heads d_qk"] | None = None,
    b_K: Float[Tensor, "heads d_qk"] | None = None,
) -> Float[Tensor, "*batch heads n n"]:
    """Scores of every head: ``(X W_Q + 1 b_Qᵀ)(X W_K + 1 b_Kᵀ)ᵀ / √d_qk`` (paper, section 2).

    Args:
        X: Tokens, ``[*batch, n, d]``.
        W_Q, W_K: Query and key weights, ``[H, d, d_qk]``.
        b_Q, b_K: Their biases, ``[H, d_qk]``; ``None`` means zero.

    Returns:
        ``[*batch, H, n, n]``, one row per query.

    Raises:
        ValueError: the shapes do not fit.
        TypeError: not floating point, or two dtypes.
    """
    fit(X, W_Q=W_Q, W_K=W_K)
    pair("W_Q", W_Q, "W_K", W_K, {0: 0, 2: 2})
    Q, K = project(X, W_Q, b_Q), project(X, W_K, b_K)
    return Q @ K.mT / math.sqrt(W_Q.shape[-1])


def reduced_scores(
    X: Float[Tensor, "*batch n d"],
    W_Q: Float[Tensor, "heads d d_qk"],
    W_K: Float[Tensor, "heads d d_qk"],
    b_Q: Float[Tensor, "heads d_qk"] | None = None,
) -> Float[Tensor, "*batch heads n n"]:
    """Scores without their row-constant terms: ``(X W_QK Xᵀ + 1 (W_K b_Q)ᵀ Xᵀ) / √d_qk`` (paper, section 2).

    They differ from ``scores`` by a constant in each row, so their softmax is the same; the key bias
    ``b_K`` has dropped out.

    Args:
        X: Tokens, ``[*batch, n, d]``.
        W_Q, W_K: Query and key weights, ``[H, d, d_qk]``.
        b_Q: Query bias, ``[H, d_qk]``; ``None`` means zero.

    Returns:
        ``[*batch, H, n, n]``.

    Raises:
        ValueError: the shapes do not fit.
        TypeError: not floating point, or two dtypes.
    """
    fit(X, W_Q=W_Q, W_K=W_K)
    pair("W_Q", W_Q, "W_K", W_K, {0: 0, 2: 2})
    S = X.unsqueeze(-3) @ W_QK(W_Q, W_K) @ X.unsqueeze(-3).mT
    if b_Q is not None:
        pair("W_Q", W_Q, "b_Q", b_Q, {0: 0, 2: 1})
        u = (W_K @ b_Q.unsqueeze(-1)).squeeze(-1)
        S = S + torch.einsum("...nd,hd->...hn", X, u).unsqueeze(-2)
    return S / math.sqrt(W_Q.shape[-1])


def attention_matrix(
    X: Float[Tensor, "*batch n d"],
    W_Q: Float[Tensor, "heads d d_qk"],
    W_K: Float[Tensor, "heads d d_qk"],
    b_Q: Float[Tensor, "heads d_qk"] | None = None,
    b_K: Float[Tensor, "heads d_qk"] | None = None,
    mask: Bool[Tensor, "..."] | None = None,
    key_padding_mask: Bool[Tensor, "*batch n"] | None = None,
) -> Float[Tensor, "*batch heads n n"]:
    """Attention matrices ``P_h``: the softmax of each row of the scores (paper, section 2).

    Args:
        X: Tokens, ``[*batch, n, d]``.
        W_Q, W_K: Query and key weights, ``[H, d, d_qk]``.
        b_Q, b_K: Their biases, ``[H, d_qk]``; ``None`` means zero.
        mask: ``[n, n]``, ``[*batch, n, n]`` or ``[*batch, H, n, n]``, ``True`` = may attend.
        key_padding_mask: ``[*batch, n]``, ``True`` for real tokens.

    Returns:
        ``[*batch, H, n, n]``; each row sums to 1, or is zero where nothing is allowed.

    Raises:
        ValueError: the shapes do not fit.
        TypeError: not floating point, two dtypes, or a mask that is not boolean.
    """
    S = scores(X, W_Q, W_K, b_Q, b_K)
    may = allowed(X, mask, key_padding_mask)
    if may is not None and may.ndim > 2 and may.shape[-3] not in (1, S.shape[-3]):
        raise ValueError(f"mask is {checks.describe(mask)}, but there are {S.shape[-3]} heads")
    return masked_softmax(S, may)


def self_attention(
    X: Float[Tensor, "*batch n d"],
    W_Q: Float[Tensor, "heads d d_qk"],
    W_K: Float[Tensor, "heads d d_qk"],
    W_V: Float[Tensor, "heads d d_v"],
    W_O: Float[Tensor, "heads d_v d_out"],
    b_Q: Float[Tensor, "heads d_qk"] | None = None,
    b_K: Float[Tensor, "heads d_qk"] | None = None,
    b_V: Float[Tensor, "heads d_v"] | None = None,
    b_O: Float[Tensor, " d_out"] | None = None,
    mask: Bool[Tensor, "..."] | None = None,
    key_padding_mask: Bool[Tensor, "*batch n"] | None = None,
) -> Float[Tensor, "*batch n d_out"]:
    """The whole layer: ``SA(X) = Σ_h P_h (X W_V + 1 b_Vᵀ) W_O + 1 b_Oᵀ`` (paper, section 2).

    Args:
        X: Tokens, ``[*batch, n, d]``.
        W_Q, W_K: Query and key weights, ``[H, d, d_qk]``.
        W_V: Value weights, ``[H, d, d_v]``.
        W_O: Output weights, ``[H, d_v, d']``.
        b_Q, b_K, b_V: Their biases, ``[H, d_qk]``, ``[H, d_qk]``, ``[H, d_v]``; ``None`` means zero.
        b_O: Output bias, ``[d']``; ``None`` means zero.
        mask: ``[n, n]``, ``[*batch, n, n]`` or ``[*batch, H, n, n]``, ``True`` = may attend.
        key_padding_mask: ``[*batch, n]``, ``True`` for real tokens.

    Returns:
        ``[*batch, n, d']``.

    Raises:
        ValueError: the shapes do not fit.
        TypeError: not floating point, two dtypes, or a mask that is not boolean.
    """
    pair("W_V", W_V, "W_O", W_O, {0: 0, 2: 1})
    P = attention_matrix(X, W_Q, W_K, b_Q, b_K, mask, key_padding_mask)
    return merge_heads(P @ project(X, W_V, b_V), W_O, b_O)


class MultiHeadAttention(nn.Module):
    """A layer of self-attention that owns its weights, under the paper's names (paper, section 2).

    ``W_Q, W_K, W_V, W_O`` are parameters; so are ``b_Q, b_K, b_V, b_O`` if ``bias``, and otherwise buffers
    of zeros, so that formulas need no case distinction.  Weights are Gaussian of variance
    ``gain² / fan-in`` (the fan-in of ``W_O`` is ``H·d_v``), drawn in float64 on the CPU from a generator of
    their own: the same seed gives the same weights in every dtype, whatever the global random state.

    Args:
        heads: The number of heads ``H``.
        dim: Features per token ``d``.
        head_dim: ``d_qk``; by default ``d / H``, which must then be whole.
        value_dim: ``d_v``; by default ``head_dim``.
        out_dim: ``d'``; by default ``dim``.
        bias: Whether the biases are trainable.
        gain: Factor on the standard deviation of every weight.
        bias_std: Standard deviation of the initial biases; 0 starts them at zero.
        dropout: Probability of dropping an attention weight in training (global random state).
        seed: 0 or more, or a CPU generator to draw from.
        dtype: A floating-point type.
        pattern: A module that computes ``P`` in place of the softmax, called with ``X, W_Q, W_K, b_Q, b_K``
            and the two masks (see ``rc_lib.variants``); ``None`` is the paper's softmax.

    Raises:
        ValueError: a size below 1, ``heads`` that do not divide ``dim`` without a ``head_dim``, a negative
            or infinite ``gain`` or ``bias_std``, a ``dropout`` outside ``[0, 1)``.
        TypeError: a size that is no whole number, or ``bias`` no boolean.
    """

    def __init__(
        self,
        heads: int,
        dim: int,
        head_dim: int | None = None,
        *,
        value_dim: int | None = None,
        out_dim: int | None = None,
        bias: bool = True,
        gain: float = 1.0,
        bias_std: float = 0.0,
        dropout: float = 0.0,
        seed: int | torch.Generator = 0,
        dtype: torch.dtype = torch.float64,
        pattern: nn.Module | None = None,
    ):
        super().__init__()
        H, d, d_qk, d_v, d_out = sizes(heads, dim, head_dim, value_dim, out_dim)
        self.pattern = pattern
        self.dropout = probability("dropout", dropout)
        draw = Gaussian(seed, dtype)
        gain, bias_std = scale("gain", gain), scale("bias_std", bias_std)
        for name, shape, fan_in in (
            ("W_Q", (H, d, d_qk), d),
            ("W_K", (H, d, d_qk), d),
            ("W_V", (H, d, d_v), d),
            ("W_O", (H, d_v, d_out), H * d_v),
        ):
            setattr(self, name, nn.Parameter(draw(shape, gain / math.sqrt(fan_in))))
        # Drawn in any case: switching the biases does not change the weights of the next layer.
        for name, shape in (("b_Q", (H, d_qk)), ("b_K", (H, d_qk)), ("b_V", (H, d_v)), ("b_O", (d_out,))):
            b = draw(shape, bias_std)
            if checks.boolean("bias", bias):
                setattr(self, name, nn.Parameter(b))
            else:
                self.register_buffer(name, torch.zeros_like(b))

    @classmethod
    def from_weights(
        cls,
        W_Q: Float[Tensor, "heads d d_qk"],
        W_K: Float[Tensor, "heads d d_qk"],
        W_V: Float[Tensor, "heads d d_v"],
        W_O: Float[Tensor, "heads d_v d_out"],
        **biases: Tensor,
    ) -> "MultiHeadAttention":
        """Build the layer from given tensors, which are copied.

        Args:
            W_Q, W_K, W_V, W_O: Stacked weights.
            **biases: Any of ``b_Q, b_K, b_V, b_O``; the others are zero.

        Returns:
            A layer with these weights.

        Raises:
            ValueError: the shapes do not fit.
            TypeError: a bias of an unknown name.
        """
        (H, d, d_qk), d_v, d_out = W_Q.shape, W_V.shape[-1], W_O.shape[-1]
        layer = cls(H, d, d_qk, value_dim=d_v, out_dim=d_out, dtype=W_Q.dtype).to(W_Q.device)
        weights = {"W_Q": W_Q, "W_K": W_K, "W_V": W_V, "W_O": W_O, **biases}
        own = dict(layer.named_parameters())
        for name, value in weights.items():
            if name not in own:
                raise TypeError(f"unknown weight {name!r}; expected one of {', '.join(own)}")
            if value.shape != own[name].shape:
                raise ValueError(f"{name} is {checks.describe(value)}; expected {tuple(own[name].shape)}")
            own[name].data.copy_(value)
        return layer

    @property
    def heads(self) -> int:
        """The number of heads ``H``."""
        return self.W_Q.shape[0]

    @property
    def W_QK(self) -> Float[Tensor, "heads d d"]:
        """``W_Q W_Kᵀ`` of every head, ``[H, d, d]``."""
        return W_QK(self.W_Q, self.W_K)

    @property
    def W_h(self) -> Float[Tensor, "heads d d_out"]:
        """``W_V W_O`` of every head, ``[H, d, d']``."""
        return W_h(self.W_V, self.W_O)

    @property
    def b(self) -> Float[Tensor, " d_out"]:
        """The whole bias ``Σ_h W_Oᵀ b_V + b_O``, ``[d']``."""
        return output_bias(self.W_O, self.b_V, self.b_O)

    def attend(
        self,
        X: Float[Tensor, "*batch n d"],
        mask: Bool[Tensor, "..."] | None = None,
        key_padding_mask: Bool[Tensor, "*batch n"] | None = None,
    ) -> tuple[Float[Tensor, "*batch n d_out"], Float[Tensor, "*batch heads n n"]]:
        """Return the layer's output and its attention matrices (before dropout); NaN passes through.

        Args:
            X: Tokens, ``[*batch, n, d]``.
            mask: ``[n, n]``, ``[*batch, n, n]`` or ``[*batch, H, n, n]``, ``True`` = may attend.
            key_padding_mask: ``[*batch, n]``, ``True`` for real tokens.

        Returns:
            ``SA(X)``, ``[*batch, n, d']``, and ``P``, ``[*batch, H, n, n]``.

        Raises:
            ValueError: the shapes do not fit.
            TypeError: another dtype than the weights', or a mask that is not boolean.
        """
        compute = attention_matrix if self.pattern is None else self.pattern
        P = compute(X, self.W_Q, self.W_K, self.b_Q, self.b_K, mask, key_padding_mask)
        kept = nn.functional.dropout(P, self.dropout, self.training)
        return merge_heads(kept @ project(X, self.W_V, self.b_V), self.W_O, self.b_O), P

    def forward(
        self,
        X: Float[Tensor, "*batch n d"],
        mask: Bool[Tensor, "..."] | None = None,
        key_padding_mask: Bool[Tensor, "*batch n"] | None = None,
    ) -> Float[Tensor, "*batch n d_out"]:
        """``SA(X)``; see ``attend``.  NaN, infinity and an empty ``X`` raise a ValueError."""
        return self.attend(checks.matrix("X", X), mask, key_padding_mask)[0]

    def extra_repr(self) -> str:
        """Sizes, for ``print``."""
        (H, d, d_qk), d_v, d_out = self.W_Q.shape, self.W_V.shape[-1], self.W_O.shape[-1]
        return f"heads={H}, dim={d}, head_dim={d_qk}, value_dim={d_v}, out_dim={d_out}"


def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention:
    """Copy the weights of PyTorch's own layer into ours, which then returns the same numbers.

    Args:
        module: A self-attention layer (queries, keys and values of one width).

    Returns:
        A ``MultiHeadAttention``.

    Raises:
        ValueError: the module uses ``kdim``, ``vdim``, ``add_bias_kv`` or ``add_zero_attn``; ours has none.
    """
    extra = {"kdim": module.in_proj_weight is None, "add_bias_kv": module.bias_k is not None}
    for name, used in (extra | {"add_zero_attn": module.add_zero_attn}).items():
        if used:
            raise ValueError(f"module uses {name} (or vdim): only plain self-attention can be copied")
    H = module.num_heads
    named = {f"W_{x}": heads_in(W, H) for x, W in zip("QKV", module.in_proj_weight.chunk(3), strict=True)}
    if module.in_proj_bias is not None:
        biases = module.in_proj_bias.chunk(3)
        named |= {f"b_{x}": b.reshape(H, -1) for x, b in zip("QKV", biases, strict=True)}
        named["b_O"] = module.out_proj.bias
    return MultiHeadAttention.from_weights(**named, W_O=heads_out(module.out_proj.weight, H))
