"""Patterns whose scores know the positions: ALiBi, RoPE, relative bias, gated positions (after the paper).

Equal tokens still have different scores here, so ``P_∞`` has rank above 1 and collapse has order 1.
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rc_lib import checks
from rc_lib.variants.arithmetic import Array, like, sigmoid, softmax
from rc_lib.variants.pattern import Pattern, project, scaled_scores
from rc_lib.weights import scale


def offsets(n: int) -> Int[Tensor, "n n"]:
    """``j − i``: where the key stands as seen from the query.

    Args:
        n: The number of tokens.

    Returns:
        ``[n, n]`` whole numbers.
    """
    i = torch.arange(n)
    return i - i[:, None]


class ALiBi(Pattern):
    """Scores less a slope times the distance, ``− m_h |i − j|`` (Press et al. 2022; here both ways).

    Args:
        *args: As ``Pattern``.
        slopes: One per head; by default ``2^(−8h/H)`` for ``h = 1..H``, as in the paper.
        **kwargs: As ``Pattern``.
    """

    def __init__(self, *args: Any, slopes: Float[Tensor, " heads"] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        H = self.heads
        slopes = 2.0 ** (-8 * torch.arange(1, H + 1).double() / H) if slopes is None else slopes
        if slopes.shape != (H,):
            raise ValueError(f"slopes is {checks.describe(slopes)}; expected ({H},), one for each head")
        self.register_buffer("slopes", slopes.to(self._draw.dtype))

    def scores(self, X: Array, Q: Array, K: Array) -> Array:
        """``Q Kᵀ/√d_qk − m_h |i − j|``."""
        distance = offsets(X.shape[-2]).abs()
        return scaled_scores(Q, K) - like(X, self.slopes)[:, None, None] * like(X, distance)


class RoPE(Pattern):
    """Queries and keys turned by an angle that grows with the position (Su et al. 2021).

    Feature ``f`` and feature ``f + d_qk/2`` of position ``i`` are turned by ``i · base^(−2f/d_qk)``, as in
    Llama.  The scores of equal tokens depend on ``j − i`` unless their query or key is zero: a common token
    ``x = 0`` (without biases) makes ``P_∞`` uniform, and then collapse has order 3.

    Args:
        *args: As ``Pattern``; ``head_dim`` must be even.
        base: Of the frequencies.
        **kwargs: As ``Pattern``.
    """

    def __init__(self, *args: Any, base: float = 10_000.0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, but is {self.head_dim}")
        if not 0 < base < math.inf:
            raise ValueError(f"base must be finite and positive, but is {base}")
        self.base = float(base)

    def turn(self, A: Array) -> Array:
        """Turn the rows of queries or keys by their positions.

        Args:
            A: ``[..., n, d_qk]``.

        Returns:
            The same shape.
        """
        n, k = A.shape[-2:]
        frequency = self.base ** (-torch.arange(0, k, 2, dtype=torch.float64) / k)
        angle = (torch.arange(n)[:, None] * frequency).repeat(1, 2)
        quarter = torch.zeros(k, k)  # a quarter turn of each pair (f, f + k/2)
        quarter[: k // 2, k // 2 :] = torch.eye(k // 2)
        quarter[k // 2 :, : k // 2] = -torch.eye(k // 2)
        return A * like(A, angle.cos()) + (A @ like(A, quarter)) * like(A, angle.sin())

    def scores(self, X: Array, Q: Array, K: Array) -> Array:
        """The scores of the turned queries and keys."""
        return scaled_scores(self.turn(Q), self.turn(K))


class RelativeBias(Pattern):
    """Scores plus a learned bias for each range of distances (T5, Raffel et al. 2020; both directions).

    Half of the buckets is for keys before the query, half for those after; in each half one bucket a
    distance up to a quarter of ``buckets``, then logarithmic ones up to ``reach``.  T5 leaves out the factor
    1/√d_qk; here it stays, as in all patterns.

    Args:
        *args: As ``Pattern``.
        buckets: How many biases each head has; a multiple of 4.
        reach: From this distance on all keys share a bucket.
        **kwargs: As ``Pattern``.
    """

    def __init__(self, *args: Any, buckets: int = 32, reach: int = 128, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if checks.positive_int("buckets", buckets) % 4:
            raise ValueError(f"buckets must be a multiple of 4, but is {buckets}")
        self.buckets, self.reach = buckets, checks.positive_int("reach", reach, minimum=buckets // 4 + 1)
        self.bias = self.weight(buckets, self.heads)

    def bucket(self, n: int) -> Int[Tensor, "n n"]:
        """The bucket of each pair.

        Args:
            n: The number of tokens.

        Returns:
            ``[n, n]``, from 0 to ``buckets − 1``.
        """
        half, near = self.buckets // 2, self.buckets // 4
        ahead, distance = (offsets(n) > 0) * half, offsets(n).abs()
        logarithm = (distance.clamp(min=1) / near).log() / math.log(self.reach / near)
        far = (near + (logarithm * (half - near)).long()).clamp(max=half - 1)
        return ahead + torch.where(distance < near, distance, far)

    def scores(self, X: Array, Q: Array, K: Array) -> Array:
        """``Q Kᵀ/√d_qk`` and the bias of each pair's bucket."""
        table = self.bias[self.bucket(X.shape[-2]).to(self.bias.device)]
        return scaled_scores(Q, K) + like(X, table.movedim(-1, 0))


class GatedPositional(Pattern):
    """A mixture of content and position, ``(1 − g) softmax(Q Kᵀ/√d_qk) + g softmax(−α (j − i − Δ_h)²)``.

    ConViT's gated attention (d'Ascoli et al. 2021) on a line instead of an image: head ``h`` looks ``Δ_h``
    tokens ahead, the heads spread about 0, and ``g_h = sigmoid(gate_h)`` is learned.  The second eigenvalue
    of ``P_∞`` is ``g`` times that of the positional part, if ``Q`` and ``K`` have no say.

    Args:
        *args: As ``Pattern``.
        gate: The gates' initial value before the sigmoid.
        locality: ``α``, how sharp the positional part is.
        **kwargs: As ``Pattern``.
    """

    def __init__(self, *args: Any, gate: float = 1.0, locality: float = 1.0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        H, dtype = self.heads, self._draw.dtype
        self.locality = scale("locality", locality)
        self.gate = nn.Parameter(torch.full((H, 1, 1), float(gate), dtype=dtype))
        self.register_buffer("centre", (torch.arange(H, dtype=dtype) - (H - 1) / 2)[:, None, None])

    def matrix(self, X: Array, W_Q: Array, W_K: Array, b_Q: Array, b_K: Array, may: Array | None) -> Array:
        """The mixture; a mask holds for both parts."""
        content = softmax(scaled_scores(project(X, W_Q, b_Q), project(X, W_K, b_K)), may)
        miss = like(X, offsets(X.shape[-2])) - like(X, self.centre)
        g = sigmoid(like(X, self.gate))
        return (1 - g) * content + g * softmax(-self.locality * miss * miss, may)
