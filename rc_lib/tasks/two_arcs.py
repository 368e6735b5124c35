"""Two arcs of a circle, learned by one layer that is then applied to its own output (paper, figure 3).

A circle of radius 0.3 is cut into two arcs of 500 points each.  The two tokens are the current points of the
two arcs: they start at ``(0.3, 0)`` and ``(−0.3, 0)``, both run counter-clockwise and so are always opposite
to each other.  A module learns the next point of each by the squared error, and is then unrolled::

    SAN, SAN+MLP     X ← f(X)              f = read-out ∘ one layer ∘ embedding,   R² → R^d → R^d → R²
    SAN+skip         X ← X + f(X)          the state is the running sum of the predictions

Decisions of ours.  (1) Both projections have biases; LayerNorm, where there is one, stands after attention
(and after the MLP), in ``R^d``, as in the authors' code.  (2) The first arc does not go on into the second:
its last point has no next one, which leaves 499 pairs.  (3) ``inner_skip`` adds the layer's own skip in
``R^d``.  The authors' code keeps it in every run, also in the one that it calls SAN; here it is off.
(4) ``init="bert"`` starts where their code does, at small weights: a standard deviation of 0.02 for both
projections, queries and keys, and uniform ones up to 1/√d for values and outputs.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rc_lib import checks
from rc_lib.san import SAN
from rc_lib.weights import Gaussian, generator, scale

POINTS = 500
RADIUS = 0.3
MERGED = 0.01  # tokens are merged when their distance is below this share of the distance at the start


def arcs(
    points: int = POINTS, radius: float = RADIUS, dtype: torch.dtype = torch.float64
) -> Float[Tensor, "points 2 2"]:
    """Return the two arcs of figure 3.

    Args:
        points: Points of one arc; the circle has twice as many, equally far apart.
        radius: Radius of the circle.
        dtype: Type of the result; angles are taken in float64.

    Returns:
        ``[points, 2, 2]``: point, arc (token), coordinate.

    Raises:
        ValueError: fewer than two points, or a radius that is not positive.
        TypeError: ``points`` is no whole number, or ``dtype`` no floating-point type.
    """
    points = checks.positive_int("points", points, minimum=2)
    if dtype not in checks.FLOATS:
        raise TypeError(f"dtype must be a floating-point type, but is {dtype}")
    if not scale("radius", radius) > 0:
        raise ValueError(f"radius must be positive, but is {radius}")
    angle = math.pi * torch.arange(2 * points, dtype=torch.float64).view(2, points) / points
    return (radius * torch.stack([angle.cos(), angle.sin()], -1)).transpose(0, 1).to(dtype).contiguous()


def pairs(
    points: int = POINTS, radius: float = RADIUS, dtype: torch.dtype = torch.float32
) -> tuple[Float[Tensor, "pairs 2 2"], Float[Tensor, "pairs 2 2"]]:
    """Return what a module learns from: the state of both tokens, and the state one point on.

    Args:
        points: Points of one arc.
        radius: Radius of the circle.
        dtype: Type of the result.

    Returns:
        Two tensors ``[points − 1, 2, 2]``.

    Raises:
        ValueError: as ``arcs``.
        TypeError: as ``arcs``.
    """
    states = arcs(points, radius, dtype)
    return states[:-1], states[1:]


class NextPoint(nn.Module):
    """One layer between two projections: ``X ↦ [X +] f(X)`` in the plane (figure 3; see the module).

    Its parts are ``embed``, ``san`` (of depth 1) and ``read``.  Gaussian weights of variance 1/fan-in and
    zero biases, drawn from the seed alone; variants of one seed and size share all weights they have.

    Args:
        dim: Hidden size ``d``.
        heads: Number of heads.
        skip: Add the input, in the plane: the prediction is then the step and not the point.
        mlp: Apply an MLP of ``d`` hidden features (as the authors do) after the attention, without a skip
            of its own unless ``inner_skip``.
        norm: ``"none"``, ``"pre"`` or ``"post"``: where LayerNorm stands in the layer.
        inner_skip: The layer's own skip around the attention (and the MLP), as in the authors' code.
        seed: A whole number from 0.
        dtype: A floating-point type.
        init: ``"unit"``, the variances above, or ``"bert"``, the small weights of the authors' code.

    Raises:
        ValueError: a value outside its range; the message names it.
        TypeError: a value of the wrong type; the message names it.
    """

    def __init__(
        self,
        dim: int,
        heads: int = 2,
        *,
        skip: bool = False,
        mlp: bool = False,
        norm: str = "post",
        inner_skip: bool = False,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        init: str = "unit",
    ):
        super().__init__()
        checks.one_of("init", init, ("unit", "bert"))
        self.skip = checks.boolean("skip", skip)
        switches = {"skip": checks.boolean("inner_skip", inner_skip), "mlp": mlp, "norm": norm}
        self.san = SAN(1, heads, dim, mlp_dim=dim, seed=seed, dtype=dtype, **switches)
        self.embed = _linear(2, dim, generator(seed, "two_arcs.embed"), dtype)
        self.read = _linear(dim, 2, generator(seed, "two_arcs.read"), dtype)
        if init == "bert":
            self._start_small()

    @torch.no_grad()
    def _start_small(self) -> None:
        """Give the weights the authors' sizes; the error function makes a Gaussian uniform."""
        attention, dim = self.san.layers[0].attention, self.san.dim
        self.embed.weight *= 0.02 * math.sqrt(2)
        self.read.weight *= 0.02 * math.sqrt(dim)
        for W in (attention.W_Q, attention.W_K):
            W *= 0.02 * math.sqrt(dim)
        for W in (attention.W_V, attention.W_O):
            W.copy_(torch.erf(W * math.sqrt(dim / 2)) / math.sqrt(dim))

    def forward(self, X: Float[Tensor, "*batch n 2"]) -> Float[Tensor, "*batch n 2"]:
        """The next state.

        Args:
            X: Points in the plane, ``[*batch, n, 2]``.

        Returns:
            ``[*batch, n, 2]``.

        Raises:
            ValueError: another shape, or points that are empty or, embedded, not finite.
            TypeError: another dtype than the weights'.
        """
        _check_points("X", X, "[*batch, n, 2]")
        if X.dtype != self.embed.weight.dtype:
            own = str(self.embed.weight.dtype).removeprefix("torch.")
            raise TypeError(f"X is {checks.describe(X)}, but the weights are {own}")
        Y = self.read(self.san(self.embed(X)))
        return X + Y if self.skip else Y


def _check_points(name: str, X: Tensor, expected: str, tokens: int | None = None) -> None:
    """Require points in the plane, in a given number of tokens if any is given."""
    checks.floats(name, X)
    if X.ndim < 2 or X.shape[-1] != 2 or X.numel() == 0 or tokens not in (None, X.shape[-2]):
        raise ValueError(f"{name} is {checks.describe(X)}; expected {expected}, not empty")


def _linear(fan_in: int, fan_out: int, source: torch.Generator, dtype: torch.dtype) -> nn.Linear:
    layer = nn.utils.skip_init(nn.Linear, fan_in, fan_out, dtype=dtype)
    layer.weight.data.copy_(Gaussian(source, dtype)((fan_out, fan_in), 1 / math.sqrt(fan_in)))
    layer.bias.data.zero_()
    return layer


def loss(model: nn.Module, now: Float[Tensor, "batch n 2"], then: Float[Tensor, "batch n 2"]) -> Tensor:
    """Mean squared error of the next points, over pairs, tokens and coordinates.

    Args:
        model: A ``NextPoint``, or any map of states.
        now: States, ``[batch, n, 2]``.
        then: The states one point on.

    Returns:
        A scalar.  Standing still costs ``(π r / points)²/2``, 1.8e-6 at the paper's sizes.
    """
    return (model(now) - then).square().mean()


def distance(X: Float[Tensor, "*batch 2 2"]) -> Float[Tensor, "*batch"]:
    """Distance of the two tokens.

    Args:
        X: States, ``[*batch, 2, 2]``.

    Returns:
        ``[*batch]``.

    Raises:
        ValueError: another shape, or an empty one.
        TypeError: ``X`` is no floating-point tensor.
    """
    _check_points("X", X, "[*batch, 2, 2]", tokens=2)
    return (X[..., 0, :] - X[..., 1, :]).norm(dim=-1)


@dataclass(frozen=True)
class Rollout:
    """A module applied to its own output.

    Args:
        states: ``[k+1, 2, 2]``, the start first; all are finite and inside the limit, but for a last one
            that has passed it and is finite still.
        distance: Of the two tokens, ``[k+1]``.
        diverged: The step at which a coordinate passed the limit or was no longer a finite number; ``None``
            if the roll-out came to its end.
    """

    states: Float[Tensor, "k 2 2"]
    distance: Float[Tensor, " k"]
    diverged: int | None

    def first(self, condition: Tensor) -> int | None:
        """Return the first step at which a condition holds.

        Args:
            condition: Truth values, ``[k+1]``.

        Returns:
            The step, or ``None``.
        """
        found = torch.nonzero(condition)
        return int(found[0]) if len(found) else None

    @property
    def merged(self) -> int | None:
        """First step at which the distance is below 1% of that at the start; ``None`` if there is none."""
        return self.first(self.distance < MERGED * self.distance[0])

    def left(self, tolerance: float = 0.1, radius: float = RADIUS) -> int | None:
        """Return the first step at which the tokens are no longer opposite points of the circle.

        Args:
            tolerance: Share of the radius by which the midpoint may be off the centre, and half of the
                tokens' distance off the radius.
            radius: Radius of the circle.

        Returns:
            The step, or ``None``.
        """
        middle = self.states.mean(-2).norm(dim=-1)
        off = torch.maximum(middle, (self.distance / 2 - radius).abs())
        return self.first(off > tolerance * radius)


@torch.no_grad()
def unroll(
    model: nn.Module,
    steps: int = 300,
    start: Float[Tensor, "2 2"] | None = None,
    limit: float | int = 1e3,
) -> Rollout:
    """Apply a module to its own output again and again, and stop when the state runs away.

    Args:
        model: A ``NextPoint``, or any map of states ``[1, 2, 2]`` to states; float64 resolves the merging.
        steps: How often.
        start: The state to begin at, ``[2, 2]``; by default the first points of the two arcs.
        limit: A coordinate beyond this counts as divergence.

    Returns:
        The ``Rollout``; it is shorter than ``steps`` if the state diverged.

    Raises:
        ValueError: ``steps`` below 1; ``start`` is not finite, of another shape or beyond the limit.
        TypeError: ``steps`` is no whole number.
    """
    steps = checks.positive_int("steps", steps)
    X = _start(model, start)
    if X.abs().max() > scale("limit", limit):
        raise ValueError(f"start must be within limit={limit}, but its largest entry is {X.abs().max():.3g}")
    states, diverged = [X], None
    for step in range(1, steps + 1):
        X = model(X[None])[0]
        inside = bool((X.abs() <= limit).all())  # NaN is not inside
        if bool(torch.isfinite(X).all()):
            states.append(X)
        if not inside:
            diverged = step
            break
    path = torch.stack(states)
    return Rollout(path, distance(path), diverged)


def _start(model: nn.Module, start: Tensor | None) -> Tensor:
    X = arcs()[0] if start is None else checks.matrix("start", start)
    if X.shape != (2, 2):
        raise ValueError(f"start is {checks.describe(X)}; expected [2, 2]")
    return X.to(next(model.parameters(), X))


#: Orthonormal errors of a state, of the midpoint (first two rows) and of the tokens' difference (last two).
MODES = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, -1, 0], [0, 1, 0, -1]], dtype=torch.float64) / 2**0.5


def jacobians(
    model: nn.Module, steps: int = 50, points: int = POINTS, radius: float = RADIUS
) -> Float[Tensor, "steps 4 4"]:
    """Return the derivatives of one step at the first points of the arcs, in the coordinates of ``MODES``.

    Args:
        model: A ``NextPoint`` in float64.
        steps: Number of points; at most ``points``.
        points: Points of one arc.
        radius: Radius of the circle.

    Returns:
        ``[steps, 4, 4]``; the upper left block maps midpoint to midpoint, the lower right one difference to
        difference.  For opposite tokens and a module without biases the other two are zero.

    Raises:
        ValueError: ``steps`` outside 1 to ``points``; else as ``arcs``.
        TypeError: a number that is not whole.
    """
    checks.positive_int("points", points, minimum=2)
    if checks.positive_int("steps", steps) > points:
        raise ValueError(f"steps must be at most points={points}, but is {steps}")
    states = arcs(points, radius).to(next(model.parameters()))[:steps]

    def together(x: Tensor) -> Tensor:  # the sum over states has each state's own derivative in its place
        return model(x.view(steps, 2, 2)).view(steps, 4).sum(0)

    J = torch.autograd.functional.jacobian(together, states.reshape(steps, 4)).transpose(0, 1)
    modes = MODES.to(J)
    return modes @ J @ modes.T


def error_growth(J: Float[Tensor, "steps k k"]) -> Float[Tensor, "k"]:
    """Return by what factor a small error grows in one step (Lyapunov exponents, as factors; ours).

    Args:
        J: Derivatives of consecutive steps, ``[steps, k, k]``: of ``jacobians``, or a block of them.

    Returns:
        ``[k]`` factors per step (geometric means), largest first; above 1 an error grows.

    Raises:
        ValueError: no step, or matrices that are not square or not finite.
        TypeError: ``J`` is no floating-point tensor.
    """
    checks.matrix("J", J)
    if J.ndim != 3 or J.shape[-1] != J.shape[-2]:
        raise ValueError(f"J is {checks.describe(J)}; expected [steps, k, k]")
    Q, logs = torch.eye(J.shape[-1]).to(J), []
    for each in J:
        Q, R = torch.linalg.qr(each @ Q)
        logs.append(R.diagonal().abs().log())
    return torch.stack(logs).mean(0).exp().sort(descending=True).values


@torch.no_grad()
def scale_growth(
    model: nn.Module, points: int = POINTS, radius: float = RADIUS, step: float = 1e-4
) -> Float[Tensor, "points"]:
    """Return by what factor a small relative error of the tokens' distance grows in one step (ours).

    The logarithmic derivative of the distance after the step by that before it, when both tokens are moved
    along their diameter.  For attention without anything else it is between 1 and 3 for one head.

    Args:
        model: A ``NextPoint`` in float64.
        points: Points of one arc.
        radius: Radius of the circle.
        step: Relative change for the central difference.

    Returns:
        ``[points]``, one factor for each state of ``arcs``.

    Raises:
        ValueError: as ``arcs``, or ``step`` is not positive and finite.
        TypeError: as ``arcs``, or ``step`` is no number.
    """
    if scale("step", step) == 0:
        raise ValueError("step must be positive, but is 0")
    X = arcs(points, radius).to(next(model.parameters()))
    more, less = (distance(model(X * factor)).log() for factor in (math.exp(step), math.exp(-step)))
    return (more - less) / (2 * step)


@torch.no_grad()
def collapse_order(
    model: nn.Module, middle: Float[Tensor, "2"] | None = None, sizes: tuple[float, float] = (1e-2, 1e-3)
) -> float:
    """Return the power by which a small distance goes into the next one: 3 is the paper's cube.

    Args:
        model: A ``NextPoint`` in float64.
        middle: Midpoint of the two tokens; by default ``(0.1, 0.2)``, a point of no symmetry.
        sizes: Two distances to compare; the order is the slope between them.

    Returns:
        The slope of the logarithms, averaged over twelve directions of the tokens' difference.
    """
    like = next(model.parameters())
    angle = math.pi * torch.arange(12, dtype=torch.float64) / 12
    direction = torch.stack([angle.cos(), angle.sin()], -1).to(like)
    centre = torch.tensor([0.1, 0.2]).to(like) if middle is None else middle.to(like)
    half = torch.stack([direction, -direction], 1) / 2
    large, small = (distance(model(centre + size * half)).log().mean() for size in sizes)
    return float((large - small) / math.log(sizes[0] / sizes[1]))
