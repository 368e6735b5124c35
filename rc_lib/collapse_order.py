"""The order of collapse of any attention pattern, predicted and measured (ours; law in ``rc_lib.variants``).

Three ways to look at ``‖res X_{l+1}‖ ≈ c ‖res X_l‖^p``:

- ``order_of_collapse``: run a network until its residual has a thousand zeros; ``p`` is the ratio of
  successive steps of the log-residual.
- ``local_order``: one layer at ``1 xᵀ + ε R``; the slope of the log of its residual in ``log ε``, between two
  sizes ``ε`` so small that nothing else matters.  It gives ``p`` to dozens of digits.
- ``rate_of_collapse``: where ``p = 1`` the residual shrinks by a factor per layer.  A layer ``f`` maps a
  small residual by ``J = res ∘ Df(1 xᵀ)``, so the factor is the spectral radius of ``J``.  For a
  row-stochastic pattern and ``W = I`` that is the modulus of the second eigenvalue of ``P_∞``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mpmath
import torch
from jaxtyping import Float
from torch import Tensor, nn

from rc_lib import checks
from rc_lib.high_precision import composite, high_precision_flow, layer_mask, run_layer
from rc_lib.rank import residual
from rc_lib.residual_flow import ResidualFlow
from rc_lib.san import SAN, Layer
from rc_lib.variants import VARIANTS, Variant, limit, san, variant
from rc_lib.variants.arithmetic import exact


@dataclass(frozen=True)
class Order:
    """Predicted and measured order of one variant.

    Args:
        name: The variant.
        predicted: What the law says.
        flow: The states of a network of independent layers.
        local: The slope of its first layer, see ``local_order``.
    """

    name: str
    predicted: int
    flow: ResidualFlow
    local: float

    @property
    def measured(self) -> float:
        """Order from the last three states, the ratio of two steps of the log-residual; NaN with fewer.

        It means something for orders above 1: there it converges as fast as the residual's logarithm grows.
        """
        steps = self.flow.order_of_steps
        return steps[-1].item() if len(steps) else math.nan


@dataclass(frozen=True)
class Rate:
    """Predicted and measured factor per layer of one variant, all layers the same.

    Args:
        name: The variant.
        predicted: Spectral radius of the layer's derivative on residuals, at the last state's centre.
        second_eigenvalue: Modulus of the second eigenvalue of ``P_∞`` there, the largest over the heads.
        measured: The factor; see ``growth``.
        flow: The states.
    """

    name: str
    predicted: float
    second_eigenvalue: float
    measured: float
    flow: ResidualFlow


def tokens_around(
    n: int, dim: int, scale: float = 1.0, seed: int = 0
) -> tuple[Float[Tensor, " d"], Float[Tensor, "n d"]]:
    """A Gaussian common token, and Gaussian tokens about it.

    Args:
        n: The number of tokens.
        dim: Features per token ``d``.
        scale: Standard deviation about the common token.
        seed: 0 or more.

    Returns:
        The common token ``x``, ``[d]``, and ``1 xᵀ + scale · R``, ``[n, d]``.

    Raises:
        ValueError: a number below its least, or a scale that is not positive and finite.
    """
    checks.positive_int("n", n)
    checks.positive_int("dim", dim)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, but is {scale}")
    generator = torch.Generator().manual_seed(checks.seed(seed))
    x, R = (torch.randn(*s, dim, generator=generator, dtype=torch.float64) for s in ((), (n,)))
    return x, x + scale * R


def repeated(layer: Layer, depth: int) -> SAN:
    """A network that applies one layer again and again.

    Args:
        layer: The layer.
        depth: How often.

    Returns:
        A ``SAN`` whose layers are one object.
    """
    heads, dim, head_dim = layer.attention.W_Q.shape
    network = SAN(0, heads, dim, head_dim, layer.skip, norm=layer.norm)
    network.layers = nn.ModuleList([layer] * depth)
    return network


def identity_values(layer: Layer) -> Layer:
    """Set a layer's ``W`` to the identity and its biases of values and output to 0, in place.

    Args:
        layer: A layer with one head and ``d_v = d``.

    Returns:
        The layer itself.

    Raises:
        ValueError: it has more heads, or narrower values.
    """
    a = layer.attention
    if a.W_V.shape != (1, a.W_V.shape[1], a.W_V.shape[1]):
        raise ValueError(
            f"layer has W_V {tuple(a.W_V.shape)}; expected one head and square values, [1, d, d]"
        )
    with torch.no_grad():
        for W in (a.W_V[0], a.W_O[0]):
            W.copy_(torch.eye(len(W)))
        a.b_V.zero_()
        a.b_O.zero_()
    return layer


def order_of_collapse(
    name: str,
    tokens: int = 6,
    dim: int = 4,
    depth: int = 10,
    heads: int = 1,
    seed: int = 0,
    *,
    digits: int = 1500,
    scale: float = 0.5,
    bias_std: float = 0.3,
    options: Mapping[str, Any] | None = None,
    **switches: Any,
) -> Order:
    """Run a network with Gaussian weights in high precision and read off its order of collapse.

    Args:
        name: A key of ``rc_lib.variants.VARIANTS``.
        tokens: The number of tokens ``n``.
        dim: Features per token ``d``.
        depth: The most layers.
        heads: The number of heads ``H``.
        seed: Of weights and tokens.
        digits: The flow ends before a layer that needs more digits than this.
        scale: Standard deviation of the tokens about their common part.
        bias_std: Standard deviation of the biases.
        options: The pattern's own parameters; by default its own, but ALiBi's slopes are ½, because one head
            would have 1/256.
        **switches: Any other argument of ``SAN``, such as ``skip``.

    Returns:
        The variant's ``Order``.

    Raises:
        ValueError: no such variant, or a value outside its range.
    """
    chosen, own = _checked(name, tokens, depth, options, heads)
    network = san(
        name, depth, heads, dim, tokens=tokens, seed=seed, bias_std=bias_std, options=own, **switches
    )
    x, X = tokens_around(tokens, dim, scale, seed)
    local = local_order(network.layers[0], x, X - x)
    return Order(name, chosen.order, high_precision_flow(network, X, digits=digits), local)


def _checked(name: str, tokens: int, depth: int, options: Any, heads: int) -> tuple[Variant, Mapping]:
    """The variant and its options; refuse what has no residual to follow."""
    checks.positive_int("tokens", tokens, minimum=2)
    checks.positive_int("depth", depth)
    return variant(name), _options(name, heads) if options is None else options


def _options(name: str, heads: int) -> dict[str, Any]:
    return {"slopes": torch.full((heads,), 0.5)} if name == "alibi" else {}


def local_order(
    layer: Layer,
    x: Float[Tensor, " d"],
    R: Float[Tensor, "n d"],
    exponents: tuple[int, int] = (40, 60),
) -> float:
    """How a layer's residual scales with a tiny residual of its input: the slope in a log-log plot.

    Args:
        layer: A layer of a ``SAN`` without MLP.
        x: The common token, ``[d]``.
        R: A direction, ``[n, d]``.
        exponents: Two sizes of the residual, as negative powers of ten.

    Returns:
        The order at ``x``, right to about as many digits as the first exponent; ``inf`` if the tokens become
        equal at once.
    """
    near, far = exponents
    may, logs = layer_mask(layer, R), []
    # Order 3 leaves 3·far zeros; twice that resolves anything up to order 5.
    digits = 6 * far + 40
    with mpmath.workdps(digits):
        for exponent in exponents:
            new = run_layer(layer, exact(x) + exact(R) * mpmath.mpf(10) ** -exponent, may)
            size = composite(new - new.sum(axis=0) / len(new))
            if size < abs(new).max() * mpmath.mpf(10) ** (20 - digits):
                return math.inf
            logs.append(mpmath.log10(size))
        return float((logs[1] - logs[0]) / (near - far))


def rate_of_collapse(
    name: str,
    tokens: int = 8,
    dim: int = 4,
    depth: int = 60,
    heads: int = 1,
    seed: int = 0,
    *,
    identity: bool | None = None,
    digits: int = 1000,
    scale: float = 1e-6,
    bias_std: float = 0.3,
    options: Mapping[str, Any] | None = None,
    **switches: Any,
) -> Rate:
    """Apply one layer again and again and read off the factor by which the residual shrinks.

    Args:
        name: A key of ``rc_lib.variants.VARIANTS``.
        tokens: The number of tokens ``n``.
        dim: Features per token ``d``.
        depth: How often the layer is applied.
        heads: The number of heads ``H``.
        seed: Of weights and tokens.
        identity: Whether ``W = I`` (one head); by default where rows sum to 1.  Elsewhere ``W = I`` would let
            the common token, and the rate with it, go to 0: Gaussian weights and biases keep it.
        digits: The flow ends before a layer that needs more digits than this.
        scale: Standard deviation of the tokens about their common part.
        bias_std: Standard deviation of the biases.
        options: The pattern's own parameters; by default its own, but ALiBi's slopes are ½, because one head
            would have 1/256.
        **switches: Any other argument of ``SAN``, such as ``skip``.

    Returns:
        The variant's ``Rate``.

    Raises:
        ValueError: no such variant, a value outside its range, or ``identity`` with several heads.
    """
    chosen, own = _checked(name, tokens, depth, options, heads)
    network = san(name, 1, heads, dim, tokens=tokens, seed=seed, bias_std=bias_std, options=own, **switches)
    layer = network.layers[0]
    if chosen.stochastic and heads == 1 if identity is None else checks.boolean("identity", identity):
        identity_values(layer)
    _, X = tokens_around(tokens, dim, scale, seed)
    flow = high_precision_flow(repeated(layer, depth), X, digits=digits)
    x = flow.centre[-1]
    second = second_eigenvalue(limit(layer.attention, tokens, x)).max().item()
    return Rate(name, spectral_radius(consensus_jacobian(layer, x, tokens)), second, growth(flow), flow)


def growth(flow: ResidualFlow) -> float:
    """The factor per layer at the end of a flow, from its last three states.

    The last three residuals are fitted by ``R_2 = a R_1 + b R_0``, which two leading eigenvalues satisfy,
    real or complex; the factor is the larger modulus of the roots of ``t² − a t − b``.  (The ratio of two
    norms would swing for ever where the leading eigenvalues are complex.)

    Args:
        flow: At least three states.

    Returns:
        The factor; 0 where the residual vanishes faster than any.

    Raises:
        ValueError: fewer than three states.
    """
    if len(flow.log_norm) < 3:
        raise ValueError(f"flow has {len(flow.log_norm)} states; expected at least 3")
    sizes = (flow.log_norm[-3:] - flow.log_norm[-2]).tolist()
    # In units in which R_1 has size 1; a log of 300 would leave a float's range when squared.
    if sizes[2] < -300:
        return 0.0
    R_0, R_1, R_2 = (
        math.exp(min(s, 300.0)) * R.flatten() for s, R in zip(sizes, flow.direction[-3:], strict=True)
    )
    # R_0 is brought to size 1 for the fit; directions parallel to 8 digits count as one.
    unit = R_0.norm()
    fit = torch.linalg.lstsq(
        torch.stack([R_1, R_0 / unit], -1), R_2.unsqueeze(-1), rcond=1e-8, driver="gelsd"
    )
    a, b = fit.solution[:, 0].tolist()
    companion = torch.tensor([[a, b / unit.item()], [1.0, 0.0]], dtype=torch.float64)
    return spectral_radius(companion)


def _square(name: str, M: Tensor) -> Tensor:
    """Require finite square matrices: LAPACK may end the process on NaN."""
    if checks.matrix(name, M).shape[-1] != M.shape[-2]:
        raise ValueError(f"{name} must be square, [*batch, n, n], but is {checks.describe(M)}")
    return M


def spectral_radius(M: Float[Tensor, "*batch m m"]) -> Any:
    """The largest modulus of an eigenvalue.

    Args:
        M: Square matrices.

    Returns:
        A number for one matrix, else a tensor ``[*batch]``.

    Raises:
        ValueError: ``M`` is not square, empty or not finite.
    """
    radius = torch.linalg.eigvals(_square("M", M)).abs().amax(-1)
    return radius.item() if radius.ndim == 0 else radius


def second_eigenvalue(P: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch"]:
    """Modulus of the second eigenvalue of attention matrices with constant row sums.

    Equal tokens are an eigenvector; the others are those of ``(I − 11ᵀ/n) P``, where that one has become 0.

    Args:
        P: ``[*batch, n, n]``.

    Returns:
        ``[*batch]``.

    Raises:
        ValueError: ``P`` is not square, empty or not finite.
    """
    _square("P", P)
    return torch.linalg.eigvals(P - P.mean(-2, keepdim=True)).abs().amax(-1)


def consensus_jacobian(layer: Layer, x: Float[Tensor, " d"], n: int) -> Float[Tensor, "m m"]:
    """``J``, the derivative of ``R ↦ res f(1 xᵀ + res R)`` at 0: what a layer does to tiny residuals.

    Args:
        layer: A layer of a ``SAN``.
        x: The common token, ``[d]``.
        n: The number of tokens.

    Returns:
        ``[n·d, n·d]``, in float64; zero where the order of collapse is above 1.
    """
    checks.positive_int("n", n)
    f = lambda R: residual(layer(x + residual(R)))  # noqa: E731
    J = torch.autograd.functional.jacobian(f, x.new_zeros(n, len(x)))
    return J.reshape(n * len(x), n * len(x))


def orders(names: Any = None, **settings: Any) -> list[Order]:
    """``order_of_collapse`` of several variants.

    Args:
        names: Keys of ``VARIANTS``; by default all.
        **settings: Further arguments.

    Returns:
        One ``Order`` each.
    """
    return [order_of_collapse(name, **settings) for name in names or VARIANTS]


def rates(names: Any = None, **settings: Any) -> list[Rate]:
    """``rate_of_collapse`` of several variants.

    Args:
        names: Keys of ``VARIANTS``; by default those of order 1.
        **settings: Further arguments.

    Returns:
        One ``Rate`` each.
    """
    names = names or [name for name, row in VARIANTS.items() if row.order == 1]
    return [rate_of_collapse(name, **settings) for name in names]
