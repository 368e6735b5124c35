"""Convex hull: say for every point of a set whether it is a corner of the set's hull (paper, section 4).

A set is ``points`` points, uniform in the square ``[0, side]²``, all moved by one Gaussian vector of standard
deviation ``shift`` in each coordinate; label 1 is a corner, label 0 a point that is none.

**Corners.**  A point is on the hull if it is no mixture of other places where points lie: if, without it and
its exact copies, the hull would be smaller.  From this every degenerate case follows:

* a point on an edge between two corners is not on the hull;
* copies of a corner all are, copies of an inner point all are not;
* of points on one line the two ends are; of one or two different places, all points are.

SciPy's Qhull finds the corners of everything that has an area, with its default options: the input is
never joggled.  Sets of no area are answered without it.  "On one line" and "on an edge" are meant to
rounding: within about 1e-14 of the set's size either answer can be had, in Qhull as here.

**Units.**  The paper feeds coordinates.  ``standardised`` (the default) subtracts the middle of the square
and divides by the standard deviation of a coordinate, √(side²/12 + shift²): two constants of the
distribution, not of the set, so the network reads the same picture in another unit.  Hulls do not depend on
units.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rc_lib import checks
from rc_lib.tasks import Examples, Task, majority
from rc_lib.weights import generator, scale

# Of a set's size; the rounding of a cross product in float64 is a few 1e-16 of it.
_FLAT = 1e-14


def make(
    seed: int = 0,
    train: int = 10_000,
    test: int = 1000,
    points: int = 10,
    side: float = 10.0,
    shift: float = 3.3,
    standardised: bool = True,
) -> Task:
    """Make the task.

    Args:
        seed: 0 or more; the sets depend on it, and ``test`` does not depend on the size of ``train``.
        train: Number of sets to train on.
        test: Number of sets to test on, drawn from a stream of their own.
        points: Points in a set, 1 or more (up to three random points are all corners).
        side: Side of the square, in units of length.
        shift: Standard deviation of the Gaussian shift of a set, in the same units.
        standardised: Whether the inputs are in units of the coordinates' standard deviation, from the
            square's middle, rather than as drawn.

    Returns:
        The ``Task``; inputs are float32, and the labels are those of the rounded points.

    Raises:
        ValueError: a number below its least, or ``side`` or ``shift`` not finite, or ``side`` zero.
        TypeError: an argument of another type.
    """
    train, test = checks.positive_int("train", train), checks.positive_int("test", test)
    points = checks.positive_int("points", points)
    if scale("side", side) == 0:
        raise ValueError("side must be positive, but is 0")
    scale("shift", shift)
    checks.boolean("standardised", standardised)

    def examples(count: int, purpose: str) -> Examples:
        drawn = _draw(generator(seed, purpose), count, points, side, shift)
        if standardised:
            drawn = (drawn - side / 2) / (side**2 / 12 + shift**2) ** 0.5
        drawn = drawn.float()
        labels = on_hull(drawn).long()
        return Examples(drawn, labels, torch.ones_like(labels, dtype=torch.bool))

    learn, judge = examples(train, "convex_hull.train"), examples(test, "convex_hull.test")
    return Task(
        "convex_hull",
        learn,
        judge,
        classes=2,
        symbols=None,
        features=2,
        positions=False,
        chance=0.5,
        majority=majority(learn, judge),
    )


def _draw(
    source: torch.Generator, count: int, points: int, side: float, shift: float
) -> Float[Tensor, "count points 2"]:
    square = torch.rand(count, points, 2, dtype=torch.float64, generator=source) * side
    return square + torch.randn(count, 1, 2, dtype=torch.float64, generator=source) * shift


def on_hull(points: Float[Tensor, "*batch n 2"]) -> Bool[Tensor, "*batch n"]:
    """Which points are corners of their set's convex hull, as the module defines them.

    Args:
        points: Sets of points in the plane, ``[..., n, 2]``.

    Returns:
        ``[..., n]``, on the same device.

    Raises:
        TypeError: not floating point.
        ValueError: not ``[..., n, 2]``, empty, or a coordinate that is not finite.
    """
    checks.matrix("points", points)
    if points.shape[-1] != 2:
        raise ValueError(f"points is {checks.describe(points)}; expected [..., n, 2]")
    sets = points.detach().double().reshape(-1, *points.shape[-2:]).cpu().numpy()
    answers = np.stack([_corners(one) for one in sets])
    return torch.from_numpy(answers).reshape(points.shape[:-1]).to(points.device)


def _corners(points: np.ndarray) -> np.ndarray:
    """One set ``[n, 2]``: the points that lie where a corner is."""
    corners = points[_some_of_each_corner(points)]
    return (points[:, None] == corners).all(-1).any(-1)


def _some_of_each_corner(points: np.ndarray) -> np.ndarray:
    """Indices of one point or more at every corner, and of no other point."""
    # First in units of the largest coordinate, for the difference of two huge numbers may overflow.
    relative = points / (np.abs(points).max() or 1.0)
    extent = np.ptp(relative, axis=0)
    main = int(extent.argmax())
    order = np.lexsort((relative[:, 1 - main], relative[:, main]))
    first, last = order[0], order[-1]
    relative = (relative - relative[first]) / (extent[main] or 1.0)
    along = relative[last]
    area = along[0] * relative[:, 1] - along[1] * relative[:, 0]
    return _qhull(relative) if np.abs(area).max() > _FLAT else order[[0, -1]]


def _qhull(points: np.ndarray) -> np.ndarray:
    from scipy.spatial import ConvexHull

    return ConvexHull(points).vertices
