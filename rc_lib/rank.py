"""How far a token matrix is from rank one, or from equal tokens (paper, section 2; metrics of later work).

The residual, res(X) = X − 1xᵀ, measures "all tokens equal"; the metrics made of singular values measure
"rank one", which is weaker: u vᵀ with unequal u has rank one and a large residual.

Conventions, the same for all functions.  Any leading batch dimensions.  Half precision (float16, bfloat16)
is promoted to float32, in which the result comes back.  NaN and inf are refused with a ValueError that
says where.  A metric that ignores the scale of X works on X divided by a power of two, so that entries of
1e300 or 1e-300 do no harm.  The zero matrix has relative residual, relative rank-one distance and every
rank equal to 0, since its tokens are equal and it has no direction at all; its mean cosine is 0.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rc_lib import checks
from rc_lib.minimizer import minimizing_center
from rc_lib.norms import composite_norm, fits, wide

CENTERS = ("mean", "median", "minimizer")


def unit_scale(X: Float[Tensor, "*batch n d"]) -> tuple[Tensor, Tensor]:
    """Divide each matrix by the power of two that brings its largest entry into [½, 1): an exact step.

    Args:
        X: Finite matrices, shape ``[*batch, n, d]``.

    Returns:
        ``Y`` and the exponents ``k`` (int, shape ``[*batch, 1, 1]``) with X = 2ᵏ Y; k = 0 for a zero matrix.
    """
    Y = X.to(wide(X.dtype))
    _, exponent = torch.frexp(Y.detach().abs().amax(dim=(-2, -1), keepdim=True))
    # Two half steps: 2^±1074 itself is no float64.
    half = -torch.div(exponent, 2, rounding_mode="floor")
    Y = torch.ldexp(torch.ldexp(Y, half), -exponent - half)
    return Y, exponent


def unscale(value: Tensor, exponent: Tensor) -> Tensor:
    """Undo :func:`unit_scale`: multiply by 2ᵏ in two steps that cannot overflow on the way.

    Args:
        value: Results for the scaled matrices.
        exponent: The exponents, broadcastable against ``value``.

    Returns:
        ``value`` times 2 to the ``exponent``.
    """
    half = torch.div(exponent, 2, rounding_mode="floor")
    return torch.ldexp(torch.ldexp(value, half), exponent - half)


def _mean_residual(X: Tensor) -> Tensor:
    # The first row goes first: rows that are equal to the last bit give exactly 0, and the rounding
    # error is relative to the differences between the rows instead of to the rows.
    R = X - X[..., :1, :]
    return R - R.mean(dim=-2, keepdim=True)


def _median_residual(X: Tensor) -> Tensor:
    n = X.shape[-2]
    low = X.kthvalue((n + 1) // 2, dim=-2, keepdim=True).values
    high = X.kthvalue(n // 2 + 1, dim=-2, keepdim=True).values
    return X - (low + (high - low) / 2)


def _minimal_residual(X: Tensor) -> Tensor:
    R = _mean_residual(X)
    if not bool(torch.isfinite(R.detach()).all()):
        return R  # too large: `residual` comes back with X scaled down
    flat = R.reshape(-1, *R.shape[-2:])
    x = torch.stack([torch.as_tensor(minimizing_center(M.detach().cpu().numpy())) for M in flat])
    return R - x.to(R).reshape(*R.shape[:-2], 1, R.shape[-1])


_RESIDUALS = {"mean": _mean_residual, "median": _median_residual, "minimizer": _minimal_residual}


def residual(X: Float[Tensor, "*batch n d"], center: str = "mean") -> Float[Tensor, "*batch n d"]:
    """The residual res(X) = X − 1xᵀ (paper, section 2), about one of three centres x.

    ``"mean"``: the token mean, the minimiser in the Frobenius norm and what the authors' code uses; within
    a factor 2 − 2/n of the best x in ‖·‖_1, ‖·‖_∞ and ‖·‖_{1,∞} (attained by the identity matrix).
    ``"median"``: the column medians (the midpoint of the middle two when n is even), which minimise ‖·‖_1
    and are within a factor 3 in ‖·‖_∞, so within √3 in ‖·‖_{1,∞} (ours: at least half of a column lies
    beyond its median).  ``"minimizer"``: a minimiser of ‖X − 1xᵀ‖_{1,∞} itself, by the linear programs of
    :mod:`rc_lib.minimizer`; small matrices only, and constant under differentiation.  The minimiser need
    not be unique; its norm is.

    Args:
        X: Token matrices, shape ``[*batch, n, d]``.
        center: ``"mean"``, ``"median"`` or ``"minimizer"``.

    Returns:
        The residual, shape ``[*batch, n, d]``; exactly 0 when n = 1 or all rows are equal.

    Raises:
        TypeError: ``X`` is no floating-point tensor.
        ValueError: unknown ``center``; ``X`` has fewer than two dimensions, is empty or holds NaN or inf;
            ``X`` is too large for ``"minimizer"``; an entry of the residual exceeds the largest float.
    """
    checks.matrix("X", X)
    checks.one_of("center", center, CENTERS)
    R = _RESIDUALS[center](X.to(wide(X.dtype)))
    if not bool(torch.isfinite(R.detach()).all()):  # a difference of two entries overflowed on the way
        Y, k = unit_scale(X)
        R = unscale(_RESIDUALS[center](Y), k)
    return fits("residual(X)", R)


def relative_residual(X: Float[Tensor, "*batch n d"], center: str = "mean") -> Float[Tensor, "*batch"]:
    """The paper's measure of rank collapse, ‖res(X)‖_{1,∞} / ‖X‖_{1,∞} (paper, figure 2).

    Args:
        X: Token matrices, shape ``[*batch, n, d]``.
        center: The centre of the residual, as in :func:`residual`.

    Returns:
        The ratio, shape ``[*batch]``: at most 2 about the mean, 1 about the minimiser; 0 for the zero matrix.

    Raises:
        TypeError: ``X`` is no floating-point tensor.
        ValueError: as for :func:`residual`.
    """
    checks.matrix("X", X)
    Y, _ = unit_scale(X)
    size = composite_norm(Y)
    return composite_norm(residual(Y, center)) / torch.where(size > 0, size, 1)


def singular_values(X: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch r"]:
    """Singular values of X divided by the power of two of :func:`unit_scale`, largest first.

    Args:
        X: Matrices, shape ``[*batch, n, d]``.

    Returns:
        The r = min(n, d) singular values of the scaled matrices.

    Raises:
        TypeError: ``X`` is no floating-point tensor.
        ValueError: ``X`` has fewer than two dimensions, is empty, or holds NaN or inf.
    """
    checks.matrix("X", X)
    return _svdvals(unit_scale(X)[0])


def _svdvals(Y: Tensor) -> Tensor:
    """Singular values that come even when LAPACK's divide and conquer does not converge."""
    try:
        return torch.linalg.svdvals(Y)
    except torch.linalg.LinAlgError:  # seen for many equal singular values: use the slower QR iteration
        import scipy.linalg

        flat = Y.detach().reshape(-1, *Y.shape[-2:]).double().cpu().numpy()
        rows = [scipy.linalg.svd(M, compute_uv=False, lapack_driver="gesvd") for M in flat]
        values = torch.stack([torch.as_tensor(row) for row in rows])
        return values.to(Y).reshape(*Y.shape[:-2], -1)


def _shares(s: Tensor) -> Tensor:
    """Singular values over the largest; a zero matrix stays zero."""
    top = s[..., :1]
    return s / torch.where(top > 0, top, 1)


def _tail(s: Tensor) -> Tensor:
    return torch.linalg.vector_norm(s[..., 1:], dim=-1)


def rank_one_distance(X: Float[Tensor, "*batch n d"], relative: bool = False) -> Float[Tensor, "*batch"]:
    """Frobenius distance to the best rank-one matrix, √(σ_2² + σ_3² + …) (Eckart–Young).

    Accurate to about eps·‖X‖, the rounding error of a singular value: rows that are equal to the last
    bit come out at that floor, not at 0.  Exactly 0 when n = 1 or d = 1.

    Args:
        X: Matrices, shape ``[*batch, n, d]``.
        relative: Divide by ‖X‖_F; the zero matrix then has distance 0.

    Returns:
        The distance, shape ``[*batch]``.

    Raises:
        TypeError: ``X`` is no floating-point tensor.
        ValueError: ``X`` has fewer than two dimensions, is empty, holds NaN or inf, or the result overflows.
    """
    checks.matrix("X", X)
    Y, exponent = unit_scale(X)
    s = _svdvals(Y)
    if checks.boolean("relative", relative):
        size = torch.linalg.vector_norm(s, dim=-1)
        return _tail(s) / torch.where(size > 0, size, 1)
    return fits("rank_one_distance(X)", unscale(_tail(s), exponent[..., 0, 0]))


def numerical_rank(X: Float[Tensor, "*batch n d"], rtol: float | None = None) -> Int[Tensor, "*batch"]:
    """Number of singular values above ``rtol``·σ_1 (as ``numpy.linalg.matrix_rank`` counts them).

    Args:
        X: Matrices, shape ``[*batch, n, d]``.
        rtol: Relative tolerance in [0, 1); by default max(n, d)·eps with the eps of the dtype of ``X``.

    Returns:
        The rank, int64, shape ``[*batch]``; 0 for the zero matrix.

    Raises:
        TypeError: ``X`` is no floating-point tensor.
        ValueError: ``rtol`` lies outside [0, 1), or ``X`` is refused as in :func:`singular_values`.
    """
    checks.matrix("X", X)
    if rtol is None:
        rtol = min(max(X.shape[-2:]) * torch.finfo(X.dtype).eps, 0.5)
    if not 0 <= rtol < 1:
        raise ValueError(f"rtol must lie in [0, 1), but is {rtol}")
    return (_shares(singular_values(X)) > rtol).sum(dim=-1)


def stable_rank(X: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch"]:
    """Stable rank ‖X‖_F² / ‖X‖_2² = Σ σ_i² / σ_1², between 1 and the rank; 0 for the zero matrix.

    Args:
        X: Matrices, shape ``[*batch, n, d]``.

    Returns:
        The stable rank, shape ``[*batch]``.

    Raises:
        TypeError: ``X`` is no floating-point tensor.
        ValueError: ``X`` is refused as in :func:`singular_values`.
    """
    return _shares(singular_values(X)).square().sum(dim=-1)


def effective_rank(X: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch"]:
    """Effective rank exp(−Σ p_i log p_i), p_i = σ_i / Σσ (Roy and Vetterli 2007), with 0·log 0 = 0.

    Args:
        X: Matrices, shape ``[*batch, n, d]``.

    Returns:
        The effective rank, between 1 and the rank, shape ``[*batch]``; 0 for the zero matrix, never NaN.

    Raises:
        TypeError: ``X`` is no floating-point tensor.
        ValueError: ``X`` is refused as in :func:`singular_values`.
    """
    s = _shares(singular_values(X))
    total = s.sum(dim=-1, keepdim=True)
    p = s / torch.where(total > 0, total, 1)
    entropy = torch.special.entr(p).sum(dim=-1)
    return torch.where(total[..., 0] > 0, entropy.exp(), 0)


def participation_ratio(X: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch"]:
    """Participation ratio (Σλ)² / Σλ² of λ_i = σ_i², between 1 and the rank; 0 for the zero matrix.

    Of X itself; pass ``residual(X)`` for the usual form, which takes the eigenvalues λ of the covariance.

    Args:
        X: Matrices, shape ``[*batch, n, d]``.

    Returns:
        The participation ratio, shape ``[*batch]``.

    Raises:
        TypeError: ``X`` is no floating-point tensor.
        ValueError: ``X`` is refused as in :func:`singular_values`.
    """
    eigenvalues = _shares(singular_values(X)).square()
    squares = eigenvalues.square().sum(dim=-1)
    return eigenvalues.sum(dim=-1).square() / torch.where(squares > 0, squares, 1)


def mean_cosine(X: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch"]:
    """Mean cosine similarity over all pairs of different tokens, without the n×n matrix.

    With u_i the rows at unit length, Σ_{i≠j} u_i·u_j = ‖Σ u_i‖² − Σ ‖u_i‖².  A zero row has cosine 0 with
    every other, so the zero matrix gives 0; a single token (n = 1) gives 1.

    Args:
        X: Token matrices, shape ``[*batch, n, d]``.

    Returns:
        The mean cosine in [-1, 1], shape ``[*batch]``.

    Raises:
        TypeError: ``X`` is no floating-point tensor.
        ValueError: ``X`` has fewer than two dimensions, is empty, or holds NaN or inf.
    """
    checks.matrix("X", X)
    n = X.shape[-2]
    if n == 1:
        return torch.ones(X.shape[:-2], dtype=wide(X.dtype), device=X.device)
    rows, _ = unit_scale(X.unsqueeze(-2))  # each token by itself, [*batch, n, 1, d]
    U = torch.nn.functional.normalize(rows.squeeze(-2), dim=-1)
    pairs = U.sum(dim=-2).square().sum(dim=-1) - U.square().sum(dim=(-2, -1))
    return (pairs / (n * (n - 1))).clamp(-1, 1)


def dirichlet_energy(
    X: Float[Tensor, "*batch n d"], weights: Float[Tensor, "*#batch n n"] | None = None
) -> Float[Tensor, "*batch"]:
    """Dirichlet energy ½ Σ_ij A_ij ‖X_i − X_j‖² of the tokens on a weighted graph (over-smoothing's measure).

    By default the complete graph with A = 11ᵀ/n, uniform attention: then the energy is ‖X − 1x̄ᵀ‖_F², the
    squared Frobenius norm of the residual about the mean.

    Args:
        X: Token matrices, shape ``[*batch, n, d]``.
        weights: Edge weights A ≥ 0, such as an attention matrix, shape ``[*batch, n, n]``.

    Returns:
        The energy, shape ``[*batch]``; exactly 0 when all rows are equal.

    Raises:
        TypeError: ``X`` or ``weights`` is no floating-point tensor.
        ValueError: a shape does not fit, a weight is negative, an entry is NaN or inf, or it overflows.
    """
    checks.matrix("X", X)
    if weights is None:
        return fits("dirichlet_energy(X)", residual(X).square().sum(dim=(-2, -1)))
    checks.matrix("weights", weights)
    n = X.shape[-2]
    if weights.shape[-2:] != (n, n) or bool((weights < 0).any()):
        raise ValueError(
            f"weights must be non-negative of shape [*batch, {n}, {n}], but is {checks.describe(weights)}"
        )
    Y = X.to(wide(X.dtype))
    gaps = torch.cdist(Y, Y, compute_mode="donot_use_mm_for_euclid_dist")
    return fits("dirichlet_energy(X)", (weights.to(Y.dtype) * gaps.square()).sum(dim=(-2, -1)) / 2)


METRICS = {
    "relative residual": relative_residual,
    "rank-one distance": lambda X: rank_one_distance(X, relative=True),
    "numerical rank": numerical_rank,
    "stable rank": stable_rank,
    "effective rank": effective_rank,
    "participation ratio": participation_ratio,
    "mean cosine": mean_cosine,
    "Dirichlet energy": dirichlet_energy,
}
