"""Attention patterns beyond the paper's softmax, each with its predicted order of collapse (ours).

The law: let ``P_∞`` be a pattern's matrix when all tokens are equal, and move the tokens a little,
``X = 1 xᵀ + R``.  With ``sᵀ`` a row of ``P_∞``,

    ``SA(X) − 1 yᵀ = (P_∞ − 1 sᵀ) R W + (P − P_∞)(1 xᵀ + R) W``

- **order 1** if ``P_∞`` has rank above 1 (the first term), or if row sums change to first order (the
  second, through ``x``).  The residual shrinks by a factor per layer.
- **order 2** if ``P_∞ = 1 sᵀ``, row sums are constant, and ``P`` changes to first order.
- **order 3** if moreover a row changes only by products of a variation of its query and one of the keys,
  up to a change that all rows share.

``VARIANTS`` holds one row per variant; ``san`` builds a network of one.  The patterns themselves are in the
files of this package, one idea a file, and ``rc_lib.collapse_order`` measures the orders.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rc_lib import checks
from rc_lib.attention import MultiHeadAttention
from rc_lib.san import SAN
from rc_lib.variants.kernels import Linear, LinearUnnormalised, Performer
from rc_lib.variants.learned import Linformer, LinformerPooled, SynthesizerDense, SynthesizerRandom
from rc_lib.variants.masked import BigBird, Causal, Pooling, Strided, Window
from rc_lib.variants.normalised import Differential, OffByOne, Shaped, Sigmoid, Sinkhorn
from rc_lib.variants.pattern import Pattern as Pattern
from rc_lib.variants.positions import ALiBi, GatedPositional, RelativeBias, RoPE
from rc_lib.variants.similarity import Cosine, L2Distance, SigmaReparam, Temperature
from rc_lib.weights import generator

_QUERY_TIMES_KEYS = "P_∞ = 1sᵀ; a row moves only by its query's variation times the keys'"
_ROWS_DIFFER = "rows see different keys, so P_∞ has rank above 1"
_ROW_SUMS = "P_∞ has rank 1, but a row's sum follows its query to first order and multiplies the common token"


@dataclass(frozen=True)
class Variant:
    """One attention pattern and what the law predicts for it.

    Args:
        name: Its key in ``VARIANTS``.
        title: Its name in print.
        source: The work it comes from.
        order: Predicted order of collapse: 3, 2 or 1.
        reason: Why.
        pattern: The class that computes it.
        options: Own parameters that differ from the class's defaults.
    """

    name: str
    title: str
    source: str
    order: int
    reason: str
    pattern: type[Pattern]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stochastic(self) -> bool:
        """Whether each row of ``P`` sums to 1."""
        return self.pattern.stochastic

    @property
    def sized(self) -> bool:
        """Whether it has a weight for each position, so that ``tokens`` must be given."""
        return self.pattern.sized

    def build(
        self,
        heads: int,
        dim: int,
        head_dim: int | None = None,
        tokens: int | None = None,
        *,
        seed: int | torch.Generator = 0,
        dtype: torch.dtype = torch.float64,
        **options: Any,
    ) -> Pattern:
        """Make the pattern's module.

        Args:
            heads: The number of heads ``H``.
            dim: Features per token ``d``.
            head_dim: ``d_qk``; by default ``d / H``.
            tokens: The number of tokens, needed where ``sized``.
            seed: 0 or more, or a CPU generator to draw the pattern's own weights from.
            dtype: A floating-point type.
            **options: The pattern's own parameters; see its class.

        Returns:
            A ``Pattern``.

        Raises:
            ValueError: a size does not fit.
            TypeError: an option that the pattern does not have.
        """
        own = {**self.options, **self.checked(options)}
        return self.pattern(heads, dim, head_dim, tokens, seed=seed, dtype=dtype, **own)

    def checked(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Refuse an option that the pattern does not have.

        Args:
            options: Values by name.

        Returns:
            ``options`` itself.

        Raises:
            TypeError: a name that the pattern does not have.
        """
        _require_known(f"options of {self.name!r}", options, _own_parameters(self.pattern))
        return options

    def attention(
        self,
        X: Float[Tensor, "*batch n d"],
        W_Q: Float[Tensor, "heads d d_qk"],
        W_K: Float[Tensor, "heads d d_qk"],
        b_Q: Float[Tensor, "heads d_qk"] | None = None,
        b_K: Float[Tensor, "heads d_qk"] | None = None,
        mask: Bool[Tensor, "..."] | None = None,
        key_padding_mask: Bool[Tensor, "*batch n"] | None = None,
        *,
        seed: int = 0,
        **options: Any,
    ) -> Float[Tensor, "*batch heads n n"]:
        """The matrices ``P_h`` for given tokens and weights, without building a network.

        Args:
            X: Tokens, ``[*batch, n, d]``.
            W_Q, W_K: Query and key weights, ``[H, d, d_qk]``.
            b_Q, b_K: Their biases, ``[H, d_qk]``; ``None`` means zero.
            mask: ``[n, n]``, ``[*batch, n, n]`` or ``[*batch, H, n, n]``, ``True`` = may attend.
            key_padding_mask: ``[*batch, n]``, ``True`` for real tokens.
            seed: Of the pattern's own weights.
            **options: The pattern's own parameters.

        Returns:
            ``[*batch, H, n, n]``.

        Raises:
            ValueError: the shapes do not fit.
            TypeError: two dtypes, a mask that is not boolean, or an unknown option.
        """
        H, d, d_qk = W_Q.shape
        pattern = self.build(H, d, d_qk, X.shape[-2], seed=seed, dtype=X.dtype, **options).to(X.device)
        return pattern(X, W_Q, W_K, b_Q, b_K, mask, key_padding_mask)


@cache  # asked for with every pattern that is made, and slow to find
def _own_parameters(pattern: type[Pattern]) -> set[str]:
    """What a pattern's class takes beyond what every pattern does."""
    made = [vars(each)["__init__"] for each in pattern.__mro__[:-1] if "__init__" in vars(each)]
    found = [p for each in made for p in inspect.signature(each).parameters.values()]
    common = inspect.signature(Pattern).parameters
    return {p.name for p in found if p.kind is p.KEYWORD_ONLY and p.name not in common}


def _require_known(name: str, given: Iterable[str], known: set[str]) -> None:
    """Refuse the name of an argument that nothing takes."""
    unknown = [each for each in given if each not in known]
    if unknown:
        there_is = ", ".join(sorted(known)) or "none"
        raise TypeError(f"{name} must be among {there_is}, but there is {unknown[0]!r}")


_ROWS = (
    Variant("softmax", "softmax", "Vaswani et al. 2017", 3, _QUERY_TIMES_KEYS, Pattern),
    Variant(
        "temperature", "softmax at temperature ½", "Hinton et al. 2015", 3, _QUERY_TIMES_KEYS, Temperature
    ),
    Variant("sigma_reparam", "σReparam", "Zhai et al. 2023", 3, _QUERY_TIMES_KEYS, SigmaReparam),
    Variant("l2", "L2 distance", "Kim et al. 2021", 3, _QUERY_TIMES_KEYS, L2Distance),
    Variant("cosine", "cosine", "Henry et al. 2020", 3, _QUERY_TIMES_KEYS, Cosine),
    Variant("linear", "linear, row-normalised", "Katharopoulos et al. 2020", 3, _QUERY_TIMES_KEYS, Linear),
    Variant("performer", "Performer", "Choromanski et al. 2021", 3, _QUERY_TIMES_KEYS, Performer),
    Variant(
        "sinkhorn",
        "Sinkhorn",
        "Sander et al. 2022",
        3,
        _QUERY_TIMES_KEYS + ", also after any number of normalisations that ends with the rows",
        Sinkhorn,
    ),
    Variant(
        "differential",
        "differential",
        "Ye et al. 2025",
        3,
        _QUERY_TIMES_KEYS + " (twice); row sums are 1 − λ, a constant",
        Differential,
    ),
    Variant(
        "linformer_pooled",
        "Linformer, mean pooling",
        "Wang et al. 2020",
        3,
        "averages of equal tokens are equal: " + _QUERY_TIMES_KEYS,
        LinformerPooled,
    ),
    Variant(
        "synthesizer_dense",
        "Synthesizer, dense",
        "Tay et al. 2020",
        2,
        "P_∞ = 1sᵀ; a row moves to first order with its own token",
        SynthesizerDense,
    ),
    Variant("causal", "causal mask", "Vaswani et al. 2017", 1, _ROWS_DIFFER, Causal),
    Variant("window", "sliding window", "Beltagy et al. 2020", 1, _ROWS_DIFFER, Window),
    Variant("strided", "sparse, strided", "Child et al. 2019", 1, _ROWS_DIFFER, Strided),
    Variant("bigbird", "BigBird", "Zaheer et al. 2020", 1, _ROWS_DIFFER, BigBird),
    Variant("pooling", "pooling", "Yu et al. 2022", 1, _ROWS_DIFFER, Pooling),
    Variant(
        "alibi", "ALiBi", "Press et al. 2022", 1, "a bias by distance makes the rows of P_∞ differ", ALiBi
    ),
    Variant(
        "t5",
        "relative bias (T5)",
        "Raffel et al. 2020",
        1,
        "a bias by offset makes the rows of P_∞ differ",
        RelativeBias,
    ),
    Variant(
        "rope",
        "RoPE",
        "Su et al. 2021",
        1,
        "equal queries and keys differ once they are turned, unless they are 0",
        RoPE,
    ),
    Variant(
        "gated_positional",
        "gated positional",
        "d'Ascoli et al. 2021",
        1,
        "the positional part makes the rows of P_∞ differ",
        GatedPositional,
    ),
    Variant(
        "synthesizer_random",
        "Synthesizer, random",
        "Tay et al. 2020",
        1,
        "the rows of P are different constants",
        SynthesizerRandom,
    ),
    Variant(
        "shaped",
        "shaped",
        "Noci et al. 2023",
        1,
        "P_∞ = I: a small residual neither grows nor shrinks",
        Shaped,
    ),
    Variant("off_by_one", "softmax off by one", "Miller 2023", 1, _ROW_SUMS, OffByOne),
    Variant("sigmoid", "sigmoid", "Ramapuram et al. 2024", 1, _ROW_SUMS, Sigmoid),
    Variant(
        "linear_unnormalised", "linear, unnormalised", "Qin et al. 2022", 1, _ROW_SUMS, LinearUnnormalised
    ),
    Variant(
        "linformer",
        "Linformer, Gaussian",
        "Wang et al. 2020",
        1,
        "the projected keys of equal tokens differ, so a row and its sum follow the query to first order",
        Linformer,
    ),
)

# Arguments of SAN that ``san`` fills itself.
_TAKEN = {"depth", "heads", "dim", "head_dim", "seed", "dtype", "pattern"}
_SWITCHES = set(inspect.signature(SAN).parameters) - _TAKEN

#: Every variant by name, from order 3 to order 1.
VARIANTS: dict[str, Variant] = {variant.name: variant for variant in _ROWS}


def variant(name: str) -> Variant:
    """Look a variant up.

    Args:
        name: A key of ``VARIANTS``.

    Returns:
        Its row.

    Raises:
        ValueError: there is no such variant; the message lists those there are.
    """
    return VARIANTS[checks.one_of("name", name, VARIANTS)]


def san(
    name: str,
    depth: int,
    heads: int,
    dim: int,
    head_dim: int | None = None,
    tokens: int | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    options: Mapping[str, Any] | None = None,
    **switches: Any,
) -> SAN:
    """A self-attention network with another pattern; its other weights are those of the plain ``SAN``.

    Args:
        name: A key of ``VARIANTS``.
        depth: The number of layers ``L``.
        heads: The number of heads ``H``.
        dim: Features per token ``d``.
        head_dim: ``d_qk``; by default ``d / H``.
        tokens: The number of tokens, needed by patterns with a weight for each position.
        seed: 0 or more; the patterns' own weights depend on it too, and differ between layers.
        dtype: A floating-point type.
        options: The pattern's own parameters, by name.
        **switches: Any other argument of ``SAN`` (``skip``, ``mlp``, ``norm``, ``gain``, …).

    Returns:
        The network; calls, ``trace`` and paths are the plain one's.

    Raises:
        ValueError: no such variant, or a value outside its range.
        TypeError: a value of the wrong type, or an unknown option or switch.
    """
    if not isinstance(options, Mapping | None):
        raise TypeError(f"options must be a mapping of names to values, but is {checks.describe(options)}")
    _require_known("switches of a SAN", switches, _SWITCHES)
    chosen = variant(name)
    own = chosen.checked(options or {})

    def pattern(layer: int) -> Pattern:
        source = generator(seed, f"variants.pattern.{layer}")
        return chosen.build(heads, dim, head_dim, tokens, seed=source, dtype=dtype, **own)

    return SAN(depth, heads, dim, head_dim, seed=seed, dtype=dtype, pattern=pattern, **switches)


@torch.no_grad()
def limit(
    attention: MultiHeadAttention, n: int, x: Float[Tensor, " d"] | None = None
) -> Float[Tensor, "heads n n"]:
    """``P_∞``: a layer's attention matrices when all tokens are equal.

    Args:
        attention: A layer, with a pattern or without.
        n: The number of tokens.
        x: The common token, ``[d]``; by default 0.  RoPE, Linformer and whatever is not row-stochastic
            depend on it, the others do not.

    Returns:
        ``[H, n, n]``.
    """
    x = attention.W_Q.new_zeros(attention.W_Q.shape[1]) if x is None else x
    return attention.attend(x.expand(checks.positive_int("n", n), -1))[1]
