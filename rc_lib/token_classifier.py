"""A network that labels every token: embed, SAN, linear read-out (paper, section 4).

::

    X = E[symbol] + p_position          or      X = x W_in + 1 b_inᵀ + p_position
    logits = SAN(X) W_out + 1 b_outᵀ

``for_task`` builds the paper's: attention with skips and LayerNorm, no MLP.  Its LayerNorms have neither gain
nor shift (``affine=False``): these would be one more read-out inside the stack, and the paper's protocol of
running single paths uses none.  The attention's own biases are trained.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from rc_lib import checks
from rc_lib.san import SAN, LayerNorm
from rc_lib.tasks import Examples, Task
from rc_lib.weights import Gaussian, generator, scale


class TokenClassifier(nn.Module):
    """Embed each token, run a SAN on the set, read a class off each token.

    The embedding, the positions and the read-out depend on ``seed`` alone, each drawn from a stream of its
    own: symbols and positions with standard deviation ``init_std``, ``W_in`` and ``W_out`` with 1/√fan-in;
    biases start at zero.  All take the SAN's dtype (torch's default where the SAN has no weights).

    The paper does not say how it begins.  BERT's 0.02, the default, makes the first layer's attention nearly
    uniform at the start; sorting then generalises far better than from 1.

    Args:
        san: The network between embedding and read-out; it is kept, not copied.
        classes: Number of classes.
        symbols: Size of the vocabulary, for integer inputs.
        features: Coordinates per token, for floating-point inputs; give this or ``symbols``.
        positions: Longest set that gets learned positions; ``None`` for none, and then the network
            treats its tokens alike.
        affine: Whether the SAN's LayerNorms keep a trainable gain and shift; otherwise these are set to
            1 and 0 and frozen, in the SAN given.
        seed: 0 or more.
        init_std: Standard deviation of the initial embedding of symbols and positions.

    Raises:
        ValueError: neither or both of ``symbols`` and ``features``, or a number below 1.
        TypeError: ``san`` is no ``SAN``, or an argument of another type.
    """

    def __init__(
        self,
        san: SAN,
        classes: int,
        *,
        symbols: int | None = None,
        features: int | None = None,
        positions: int | None = None,
        affine: bool = False,
        seed: int = 0,
        init_std: float = 0.02,
    ):
        super().__init__()
        if not isinstance(san, SAN):
            raise TypeError(f"san must be a SAN, but is {checks.describe(san)}")
        if (symbols is None) == (features is None):
            raise ValueError(f"give symbols or features, one of them, not symbols={symbols}, {features=}")
        checks.boolean("affine", affine)
        self.classes = checks.positive_int("classes", classes)
        self.symbols = None if symbols is None else checks.positive_int("symbols", symbols)
        self.features = None if features is None else checks.positive_int("features", features)
        self.positions = None if positions is None else checks.positive_int("positions", positions)
        self.san = san
        self._draw_weights(seed, scale("init_std", init_std))
        if not affine:
            _freeze_norms(san)

    def _draw_weights(self, seed: int, init_std: float) -> None:
        d, dtype = self.san.dim, next(self.san.parameters(), torch.empty(0)).dtype

        def draw(purpose: str, *shape: int, std: float = init_std) -> nn.Parameter:
            return nn.Parameter(Gaussian(generator(seed, f"token_classifier.{purpose}"), dtype)(shape, std))

        if self.symbols is not None:
            self.E = draw("embedding", self.symbols, d)
        else:
            self.W_in = draw("embedding", self.features, d, std=self.features**-0.5)
            self.b_in = nn.Parameter(torch.zeros(d, dtype=dtype))
        self.p = None if self.positions is None else draw("positions", self.positions, d)
        self.W_out = draw("read_out", d, self.classes, std=d**-0.5)
        self.b_out = nn.Parameter(torch.zeros(self.classes, dtype=dtype))

    def embed(self, inputs: Tensor) -> Float[Tensor, "N n d"]:
        """The tokens that the SAN reads.

        Args:
            inputs: Symbols, int64 ``[N, n]``, or coordinates, floating point ``[N, n, c]``; these are
                converted to the weights' dtype.

        Returns:
            ``X``, ``[N, n, d]``.

        Raises:
            TypeError: coordinates where symbols are expected, or the other way round.
            ValueError: another shape, an empty one, a symbol out of range, a coordinate that is not
                finite, or more tokens than there are positions.
        """
        X = self._look_up(inputs) if self.symbols is not None else self._project(inputs)
        if self.p is None:
            return X
        if X.shape[1] > self.positions:
            raise ValueError(
                f"inputs is {checks.describe(inputs)}: {X.shape[1]} tokens, "
                f"but there are positions={self.positions}"
            )
        return X + self.p[: X.shape[1]]

    def _look_up(self, inputs: Tensor) -> Tensor:
        if not isinstance(inputs, Tensor) or inputs.dtype != torch.int64:
            raise TypeError(f"inputs must be int64 symbols [N, n], but is {checks.describe(inputs)}")
        if inputs.ndim != 2 or inputs.numel() == 0:
            raise ValueError(f"inputs must be symbols [N, n], not empty, but is {checks.describe(inputs)}")
        low, high = (int(v) for v in torch.aminmax(inputs))
        if low < 0 or high >= self.symbols:
            raise ValueError(
                f"inputs must hold symbols from 0 to {self.symbols - 1}, but they are from {low} to {high}"
            )
        return self.E[inputs]

    def _project(self, inputs: Tensor) -> Tensor:
        checks.matrix("inputs", inputs)
        if inputs.ndim != 3 or inputs.shape[-1] != self.features:
            raise ValueError(f"inputs is {checks.describe(inputs)}; expected [N, n, {self.features}]")
        return inputs.to(self.W_in.dtype) @ self.W_in + self.b_in

    def read(self, states: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n classes"]:
        """Read the classes off states of the SAN: ``states W_out + 1 b_outᵀ``.

        Args:
            states: ``[..., n, d]``, of the weights' dtype.

        Returns:
            Logits, ``[..., n, classes]``.

        Raises:
            TypeError: not floating point, or another dtype than the weights'.
            ValueError: another width than the SAN's.
        """
        checks.floats("states", states)
        if states.ndim < 2 or states.shape[-1] != self.san.dim:
            raise ValueError(f"states is {checks.describe(states)}; expected [..., n, {self.san.dim}]")
        if states.dtype != self.W_out.dtype:
            own = str(self.W_out.dtype).removeprefix("torch.")
            raise TypeError(f"states is {checks.describe(states)}, but the weights are {own}")
        return states @ self.W_out + self.b_out

    def forward(
        self, inputs: Tensor, real: Bool[Tensor, "N n"] | None = None
    ) -> Float[Tensor, "N n classes"]:
        """The logits of every token.

        Args:
            inputs: As ``embed`` takes them.
            real: ``False`` on padding, which no token then attends to; ``None`` if there is none.

        Returns:
            Logits, ``[N, n, classes]``; those of padding mean nothing.

        Raises:
            TypeError: as ``embed``, or ``real`` is not boolean.
            ValueError: as ``embed``, or ``real`` has another shape.
        """
        return self.read(self.san(self.embed(inputs), key_padding_mask=real))


def _freeze_norms(san: SAN) -> None:
    for module in san.modules():
        if isinstance(module, LayerNorm):
            nn.init.ones_(module.weight).requires_grad_(False)
            nn.init.zeros_(module.bias).requires_grad_(False)


def for_task(
    task: Task,
    depth: int,
    heads: int,
    dim: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    norm: str = "post",
    dropout: float = 0.0,
    affine: bool = False,
    init_std: float = 0.02,
    gain: float = 1.0,
) -> TokenClassifier:
    """Build the paper's network for a task: a SAN with skips and LayerNorm, without MLPs (section 4).

    Args:
        task: What it is to read and to answer.
        depth: Layers ``L``.
        heads: Heads ``H``.
        dim: Features per token ``d``; ``H`` must divide it.
        seed: 0 or more; all weights depend on it alone.
        dtype: A floating-point type.
        norm: ``"post"`` as in the paper, ``"pre"`` (with a last norm before the read-out) or ``"none"``.
        dropout: Probability of dropping, in ``train()`` mode only; see ``SAN``.
        affine: Whether the LayerNorms have a trainable gain and shift.
        init_std: Standard deviation of the initial embedding; see ``TokenClassifier``.
        gain: Factor on the standard deviation of the attention's initial weights; see ``SAN``.

    Returns:
        The network, untrained.

    Raises:
        ValueError: an argument outside its range; the message names it.
        TypeError: an argument of the wrong type; the message names it.
    """
    if not isinstance(task, Task):
        raise TypeError(f"task must be a Task, but is {checks.describe(task)}")
    san = SAN(
        depth,
        heads,
        dim,
        skip=True,
        norm=norm,
        seed=seed,
        dtype=dtype,
        final_norm=norm == "pre",
        dropout=dropout,
        gain=gain,
    )
    return TokenClassifier(
        san,
        task.classes,
        symbols=task.symbols,
        features=task.features,
        positions=_longest(task.train, task.test) if task.positions else None,
        affine=affine,
        seed=seed,
        init_std=init_std,
    ).to(dtype)


def _longest(*parts: Examples) -> int:
    return max(examples.inputs.shape[1] for examples in parts)
