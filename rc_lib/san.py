"""The stack: a self-attention network with its switches (paper, sections 2 and 3).

With ``x ↦ [x +] f(x)`` meaning that the skip may be there or not, one layer is::

    norm="none":  Y = [X +] SA(X),        then with an MLP  Z = [Y +] MLP(Y)
    norm="pre":   Y = [X +] SA(LN(X)),    then with an MLP  Z = [Y +] MLP(LN(Y))
    norm="post":  Y = LN([X +] SA(X)),    then with an MLP  Z = LN([Y +] MLP(Y))

``skip`` is the skip around the attention; ``mlp_skip`` the one around the MLP, by default the same.  So
"SAN" is the default, "SAN + skip" is ``skip=True``, "SAN + MLP" is ``mlp=True`` (the paper's row-wise map
after each layer, without a skip), the transformer is both.  The paper's surgery on trained models keeps the
skip around the MLP: ``mlp=True, mlp_skip=True``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from rc_lib import checks
from rc_lib.attention import MultiHeadAttention
from rc_lib.blocks import ACTIVATIONS as ACTIVATIONS
from rc_lib.blocks import MLP as MLP
from rc_lib.blocks import LayerNorm as LayerNorm
from rc_lib.trace import NormStats, Trace
from rc_lib.weights import generator, probability, scale, sizes

NORMS = ("none", "pre", "post")


@dataclass
class LayerRecord:
    """What one layer did: attention ``[*batch, H, n, n]``, norms in order of use, the MLP's value if any."""

    attention: Float[Tensor, "..."] | None = None
    norms: list[NormStats] = field(default_factory=list)
    mlp_out: Float[Tensor, "..."] | None = None


class Layer(nn.Module):
    """One layer of a ``SAN``: attention, then perhaps an MLP, with their skips and norms (see the module).

    Its parts are ``attention``, ``mlp`` or ``None``, ``norm1`` and ``norm2`` or ``None``.

    Args:
        attention: The attention.
        mlp: The row-wise map, or ``None``.
        skip: Whether ``X`` is added to the attention's value.
        mlp_skip: Whether the MLP's input branch is added to its value.
        norm: ``"none"``, ``"pre"`` or ``"post"``.
        eps: Added to the variance in the norms.
        dropout: Probability of dropping an entry of either branch in training.
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        mlp: MLP | None,
        skip: bool,
        mlp_skip: bool,
        norm: str,
        eps: float,
        dropout: float,
    ):
        super().__init__()
        dim, dtype = attention.W_Q.shape[1], attention.W_Q.dtype
        self.attention, self.mlp = attention, mlp
        self.skip, self.mlp_skip = checks.boolean("skip", skip), checks.boolean("mlp_skip", mlp_skip)
        self.norm = norm
        self.norm1 = LayerNorm(dim, eps, dtype) if norm != "none" else None
        self.norm2 = LayerNorm(dim, eps, dtype) if norm != "none" and mlp is not None else None
        self.dropout = nn.Dropout(dropout)

    def step(
        self, X: Float[Tensor, "*batch n d"], mask: Tensor | None, key_padding_mask: Tensor | None
    ) -> tuple[Float[Tensor, "*batch n d"], LayerRecord]:
        """Return the layer's output and its record; ``forward`` and ``SAN.trace`` are both made of this."""
        record = LayerRecord()

        def attend(Y: Tensor) -> Tensor:
            Y, record.attention = self.attention.attend(Y, mask, key_padding_mask)
            return Y

        def feed(Y: Tensor) -> Tensor:
            record.mlp_out = self.mlp(Y)
            return record.mlp_out

        X = self._branch(X, attend, self.skip, self.norm1, record)
        if self.mlp is not None:
            X = self._branch(X, feed, self.mlp_skip, self.norm2, record)
        return X, record

    def _branch(self, X, f, skip, norm, record):
        """``[X +] f(X)`` with the norm before, after or nowhere."""
        source = X
        if self.norm == "pre":
            record.norms.append(norm.stats(X))
            X = record.norms[-1].apply(X)
        Y = self.dropout(f(X))
        if skip:
            Y = source + Y
        if self.norm == "post":
            record.norms.append(norm.stats(Y))
            Y = record.norms[-1].apply(Y)
        return Y

    def forward(
        self,
        X: Float[Tensor, "*batch n d"],
        mask: Bool[Tensor, "..."] | None = None,
        key_padding_mask: Bool[Tensor, "*batch n"] | None = None,
    ) -> Float[Tensor, "*batch n d"]:
        """The layer's output, ``[*batch, n, d]``."""
        return self.step(X, mask, key_padding_mask)[0]


class SAN(nn.Module):
    """A self-attention network of any depth; the module's first lines define its switches exactly.

    The weights depend on ``seed`` alone, not on the global random state, nor on the switches ``skip``,
    ``mlp``, ``norm`` and ``bias``: the four variants of one seed share their attention weights, and a deeper
    network begins with the layers of a shallower one.  Depth 0 is the identity.

    Args:
        depth: The number of layers ``L``, 0 or more.
        heads: The number of heads ``H``.
        dim: Features per token ``d``.
        head_dim: ``d_qk``; by default ``d / H``, which must then be whole.
        skip: Add each layer's input to its attention.
        mlp: Apply a row-wise MLP after each attention.
        norm: ``"none"``, ``"pre"`` or ``"post"``.
        seed: 0 or more.
        dtype: A floating-point type.
        value_dim: ``d_v``; by default ``head_dim``.
        bias: Whether attention and MLP have trainable biases; otherwise these are buffers of zeros.
        mlp_dim: Hidden features of the MLP; by default ``4 d``.
        mlp_skip: Add each MLP's input to its value; ``None`` means as ``skip``.
        activation: ``"gelu"``, ``"relu"``, ``"tanh"`` or ``"identity"``.
        gain: Factor on the standard deviation ``1/√fan-in`` of every weight.
        bias_std: Standard deviation of the initial biases.
        eps: Added to the variance in the norms.
        final_norm: Normalise the last layer's output too, as pre-norm transformers do.
        dropout: Probability of dropping an attention weight or an entry of a branch, in ``train()`` mode only
            (from the global random state).
        pattern: A function of the layer's number (from 0) that returns the module which computes its
            attention matrices; ``None`` is the paper's softmax.  ``rc_lib.variants.san`` gives one.

    Raises:
        ValueError: a value outside its range; the message names it.
        TypeError: a value of the wrong type; the message names it.
    """

    def __init__(
        self,
        depth: int,
        heads: int,
        dim: int,
        head_dim: int | None = None,
        skip: bool = False,
        mlp: bool = False,
        norm: str = "none",
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        *,
        value_dim: int | None = None,
        bias: bool = True,
        mlp_dim: int | None = None,
        mlp_skip: bool | None = None,
        activation: str = "gelu",
        gain: float = 1.0,
        bias_std: float = 0.0,
        eps: float = 1e-5,
        final_norm: bool = False,
        dropout: float = 0.0,
        pattern: Callable[[int], nn.Module] | None = None,
    ):
        super().__init__()
        depth = checks.positive_int("depth", depth, minimum=0)
        self.norm = checks.one_of("norm", norm, NORMS)
        self.heads, self.dim, *_ = sizes(heads, dim, head_dim, value_dim, None)
        self.skip, mlp = checks.boolean("skip", skip), checks.boolean("mlp", mlp)
        self.mlp_skip = skip if mlp_skip is None else checks.boolean("mlp_skip", mlp_skip)
        scale("eps", eps)
        generators = _generators(seed)
        common = {"bias": checks.boolean("bias", bias), "gain": gain, "bias_std": bias_std, "dtype": dtype}
        layers = []
        for l in range(depth):
            own = {"value_dim": value_dim, "dropout": dropout, "pattern": pattern(l) if pattern else None}
            attention = MultiHeadAttention(heads, dim, head_dim, seed=generators[0], **own, **common)
            net = MLP(dim, mlp_dim, activation, seed=generators[1], **common) if mlp else None
            layers.append(
                Layer(attention, net, skip, self.mlp_skip, norm, eps, probability("dropout", dropout))
            )
        self.layers = nn.ModuleList(layers)
        self.final_norm = LayerNorm(dim, eps, dtype) if checks.boolean("final_norm", final_norm) else None

    @property
    def depth(self) -> int:
        """The number of layers ``L``."""
        return len(self.layers)

    @property
    def mlp(self) -> bool:
        """Whether the layers have an MLP."""
        return any(layer.mlp is not None for layer in self.layers)

    def _check(self, X: Tensor) -> Tensor:
        checks.matrix("X", X)
        if X.shape[-1] != self.dim:
            raise ValueError(f"X is {checks.describe(X)}; expected [*batch, n, {self.dim}]")
        own = next(self.parameters(), X).dtype
        if X.dtype != own:
            raise TypeError(
                f"X is {checks.describe(X)}, but the weights are {str(own).removeprefix('torch.')}"
            )
        return X

    def forward(
        self,
        X: Float[Tensor, "*batch n d"],
        mask: Bool[Tensor, "..."] | None = None,
        key_padding_mask: Bool[Tensor, "*batch n"] | None = None,
    ) -> Float[Tensor, "*batch n d"]:
        """The network's output.

        Args:
            X: Tokens, ``[*batch, n, d]``, of the weights' dtype.
            mask: ``[n, n]``, ``[*batch, n, n]`` or ``[*batch, H, n, n]``, ``True`` = may attend.
            key_padding_mask: ``[*batch, n]``, ``True`` for real tokens.

        Returns:
            ``[*batch, n, d]``.  If the states overflow on the way the result holds infinities or NaN.

        Raises:
            ValueError: ``X`` is empty, not finite or of the wrong width, or a mask's shape does not fit.
            TypeError: another dtype than the weights', or a mask that is not boolean.
        """
        X = self._check(X)
        for layer in self.layers:
            X = layer(X, mask, key_padding_mask)
        return X if self.final_norm is None else self.final_norm(X)

    @torch.no_grad()
    def trace(
        self,
        X: Float[Tensor, "*batch n d"],
        mask: Bool[Tensor, "..."] | None = None,
        key_padding_mask: Bool[Tensor, "*batch n"] | None = None,
    ) -> Trace:
        """Run the network and keep its states; no gradients, and no dropout even in ``train()`` mode.

        Args:
            X: Tokens, ``[*batch, n, d]``, of the weights' dtype.
            mask: ``[n, n]``, ``[*batch, n, n]`` or ``[*batch, H, n, n]``, ``True`` = may attend.
            key_padding_mask: ``[*batch, n]``, ``True`` for real tokens.

        Returns:
            The ``Trace``; its ``output`` equals ``forward``'s, to the last bit.

        Raises:
            ValueError: as ``forward``.
            TypeError: as ``forward``.
        """
        training = self.training
        self.eval()
        try:
            return self._trace(self._check(X), mask, key_padding_mask)
        finally:
            self.train(training)

    def _trace(self, X, mask, key_padding_mask) -> Trace:
        hidden, records = [X.detach()], []
        for layer in self.layers:
            X, record = layer.step(X, mask, key_padding_mask)
            hidden.append(X)
            records.append(record)
        return Trace(
            hidden=hidden,
            attention=[r.attention for r in records],
            norms=[[stats.detach() for stats in r.norms] for r in records],
            mlp_out=[r.mlp_out for r in records] if self.mlp else None,
            final_norm=None if self.final_norm is None else self.final_norm.stats(X).detach(),
        )


def _generators(seed: int) -> tuple[torch.Generator, torch.Generator]:
    """One stream for the attention weights and one for the MLPs', so that neither moves the other."""
    return torch.Generator().manual_seed(checks.seed(seed)), generator(seed, "san.mlp")
