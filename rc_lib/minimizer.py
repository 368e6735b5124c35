"""The centre that minimises ‖X − 1xᵀ‖_{1,∞} (paper, section 2: the definition of the residual).

Write a(x) = ‖X − 1xᵀ‖_1 and b(x) = ‖X − 1xᵀ‖_∞.  Both are convex and piecewise linear; their product is
neither, so the search goes over the plane of the pairs (a, b) instead:

* The pairs (α, β) with α ≥ a(x), β ≥ b(x) for some x form a convex polygon K, unbounded up and to the right.
* αβ is quasi-concave where α, β > 0: its smallest value on a convex set without lines lies at a vertex.
* The vertices of K on its lower left border minimise w a + (1 − w) b for some w in [0, 1]: one linear
  program each.  The search over the scalar w starts from w = 1 and w = 0 and refines between neighbours.
* Between two neighbouring vertices p and q, K lies beyond their two supporting lines, which meet in c.  By
  quasi-concavity αβ ≥ min over the corners of the triangle p, q, c.  An interval whose corner c cannot beat
  the best vertex is dropped: what is left out is *certified* to be no better than by the factor 1 − GAP.
"""

from typing import NamedTuple

import numpy as np

# n·d above which the linear programs take too long: at the limit one matrix needs a few seconds.
LIMIT = 4096
# Certified relative gap of the product; HiGHS itself is exact to about 1e-7.
GAP = 1e-7


class Vertex(NamedTuple):
    """A centre and its two norms; ``weight`` w is the one for which w a + (1 − w) b was minimised."""

    x: np.ndarray
    a: float
    b: float
    weight: float

    @property
    def product(self) -> float:
        """The square of the composite norm."""
        return self.a * self.b


class Program:
    """The linear program min w a + (1 − w) b over x, for one matrix and any weight w.

    Variables: x [d], S [n, d] with ``S_ij ≥ |M_ij − x_j|``, a and b.  Constraints: every column sum of S
    is at most a, every row sum at most b.
    """

    def __init__(self, M: np.ndarray):
        from scipy import sparse

        n, d = M.shape
        self.M = M
        eye, ones = sparse.identity(n * d), np.ones
        picks = sparse.kron(ones((n, 1)), sparse.identity(d))  # x_j for every entry (i, j)
        columns = sparse.kron(ones((1, n)), sparse.identity(d))
        rows = sparse.kron(sparse.identity(n), ones((1, d)))
        self.A = sparse.bmat(
            [
                [-picks, -eye, None, None],
                [picks, -eye, None, None],
                [None, columns, -ones((d, 1)), None],
                [None, rows, None, -ones((n, 1))],
            ],
            format="csr",
        )
        self.rhs = np.concatenate([-M.ravel(), M.ravel(), np.zeros(d + n)])

    def solve(self, weight: float) -> Vertex:
        """Minimise for one weight; the two norms are recomputed from x, not read from the program.

        Args:
            weight: w in [0, 1].

        Returns:
            The vertex.

        Raises:
            RuntimeError: HiGHS found no optimum, which the theory excludes.
        """
        from scipy.optimize import linprog

        n, d = self.M.shape
        cost = np.concatenate([np.zeros(d + n * d), [weight, 1 - weight]])
        free = [(None, None)] * d + [(0, None)] * (n * d + 2)
        answer = linprog(cost, A_ub=self.A, b_ub=self.rhs, bounds=free, method="highs")
        if answer.x is None:
            raise RuntimeError(f"HiGHS stopped without an optimum: {answer.message}")
        return self.vertex(answer.x[:d], weight)

    def vertex(self, x: np.ndarray, weight: float) -> Vertex:
        """The pair (a, b) of a centre.

        Args:
            x: A centre, shape ``[d]``.
            weight: The weight to note.

        Returns:
            The vertex.
        """
        R = np.abs(self.M - x)
        return Vertex(x, R.sum(axis=0).max(), R.sum(axis=1).max(), weight)


def _corner(p: Vertex, q: Vertex) -> float:
    """The product αβ where the supporting lines of two vertices meet: nothing between them is smaller."""
    A = np.array([[p.weight, 1 - p.weight], [q.weight, 1 - q.weight]])
    values = (A * [[p.a, p.b], [q.a, q.b]]).sum(axis=1)
    alpha, beta = np.linalg.solve(A, values)
    return alpha * beta


def _chord(p: Vertex, q: Vertex) -> float:
    """The weight whose level lines run parallel to the chord from p to q."""
    rise, run = p.b - q.b, q.a - p.a
    return rise / (rise + run)


def _search(program: Program) -> Vertex:
    first, last = program.solve(1.0), program.solve(0.0)
    best = min(first, last, key=lambda v: v.product)
    intervals = [(first, last)]
    while intervals:
        p, q = intervals.pop()
        flat = min(p.b - q.b, q.a - p.a) <= GAP * max(p.a, p.b)
        if flat or p.weight - q.weight <= GAP or _corner(p, q) >= (1 - GAP) * best.product:
            continue
        v = program.solve(_chord(p, q))
        best = min(best, v, key=lambda v: v.product)
        gain = v.weight * (p.a - v.a) + (1 - v.weight) * (p.b - v.b)
        if gain > GAP * max(p.a, p.b):  # v lies below the chord: a new vertex
            intervals += [(p, v), (v, q)]
    return best


def minimizing_center(M: np.ndarray) -> np.ndarray:
    """A minimiser x of ‖M − 1xᵀ‖_{1,∞}, certified to a relative 1e-6 of the smallest norm.

    Args:
        M: One finite matrix, shape ``[n, d]``, with n·d at most ``LIMIT``.

    Returns:
        The centre, float64, shape ``[d]``; not unique in general.

    Raises:
        ValueError: ``M`` is no matrix or too large.
    """
    if M.ndim != 2 or M.size > LIMIT:
        raise ValueError(
            f"center='minimizer' solves linear programs for n·d ≤ {LIMIT}, but X has shape {M.shape}; "
            "use 'mean' or 'median', whose composite norm is at most 2 and √3 times as large"
        )
    M = M.astype(np.float64)
    start = M.max(axis=0) / 2 + M.min(axis=0) / 2
    scale = np.abs(M - start).max()
    if scale == 0:
        return start
    return start + scale * _search(Program((M - start) / scale)).x
