import math

import pytest
import torch
from torch import nn

from rc_lib.tasks import two_arcs
from rc_lib.tasks.two_arcs import NextPoint


class Linear(nn.Module):
    """A map of states that is easy to iterate by hand: every token times a 2×2 matrix."""

    def __init__(self, matrix):
        super().__init__()
        self.matrix = nn.Parameter(torch.tensor(matrix, dtype=torch.float64))

    def forward(self, X):
        return X @ self.matrix.T


def scaling(factor):
    return Linear([[factor, 0.0], [0.0, factor]])


def module(dim=14, heads=2, bias=0.3, seed=5, **switches):
    """A module with random biases everywhere, in float64."""
    model = NextPoint(dim, heads, seed=seed, dtype=torch.float64, **switches)
    g = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "b_" in name or "bias" in name:
            parameter.data += bias * torch.randn(parameter.shape, generator=g, dtype=torch.float64)
    return model


def test_the_arcs_are_figure_3s():
    states = two_arcs.arcs()
    assert states.shape == (500, 2, 2)
    assert states[0].tolist() == [[0.3, 0.0], [-0.3, pytest.approx(0, abs=1e-15)]]
    circle = states.transpose(0, 1).reshape(1000, 2)
    assert torch.allclose(circle.norm(dim=-1), torch.full((1000,), 0.3, dtype=torch.float64))
    # 1000 points equally far apart, in one turn counter-clockwise: a quarter turn is 250 points.
    steps = (circle.roll(-1, 0) - circle).norm(dim=-1)
    assert torch.allclose(steps, torch.full_like(steps, 0.6 * math.sin(math.pi / 1000)))
    assert torch.allclose(circle[250], torch.tensor([0.0, 0.3], dtype=torch.float64), atol=1e-15)
    assert torch.allclose(states[:, 0], -states[:, 1], atol=1e-15)


def test_sizes_radius_and_dtype_of_the_arcs():
    states = two_arcs.arcs(7, radius=2.0, dtype=torch.float32)
    assert states.shape == (7, 2, 2)
    assert states.dtype == torch.float32
    assert torch.allclose(two_arcs.distance(states), torch.full((7,), 4.0))
    now, then = two_arcs.pairs(7, dtype=torch.float64)
    assert now.shape == then.shape == (6, 2, 2)
    assert torch.equal(now[1:], then[:-1])


@pytest.mark.usefixtures("plain_types")
def test_points_are_no_integers_and_radii_no_words():
    with pytest.raises(TypeError, match=r"dtype must be a floating-point type, but is torch\.int64"):
        two_arcs.pairs(20, dtype=torch.int64)
    with pytest.raises(TypeError, match="radius must be a number, but is"):
        two_arcs.arcs(10, "a")


@pytest.mark.usefixtures("plain_types")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"points": 1}, "points must be at least 2, but is 1"),
        ({"radius": 0.0}, "radius must be positive"),
        ({"radius": math.nan}, "radius must be finite"),
    ],
)
def test_bad_arcs_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        two_arcs.arcs(**arguments)


def test_standing_still_costs_the_square_of_half_a_thousandth_of_a_turn():
    still = two_arcs.loss(nn.Identity(), *two_arcs.pairs(dtype=torch.float64))
    # A chord of 2 r sin(π/1000), and the mean over two coordinates halves its square.
    assert still.item() == pytest.approx((0.6 * math.sin(math.pi / 1000)) ** 2 / 2, rel=1e-9)


def test_the_module_is_read_out_of_layer_of_embedding(rng):
    X = torch.randn(3, 5, 2, 2, generator=rng, dtype=torch.float64)
    model = module(norm="post", mlp=True)
    assert model.san.layers[0].mlp.W_1.shape == (14, 14)
    E = X @ model.embed.weight.T + model.embed.bias
    layer = model.san.layers[0]
    Y = layer.norm1(layer.attention(E))
    expected = layer.norm2(layer.mlp(Y)) @ model.read.weight.T + model.read.bias
    assert torch.allclose(model(X), expected, rtol=0, atol=1e-12)
    outer = module(norm="post", mlp=True, skip=True)
    assert torch.allclose(outer(X), X + expected, rtol=0, atol=1e-12)
    inner = module(norm="none", inner_skip=True)
    E = inner.embed(X)
    Y = E + inner.san.layers[0].attention(E)
    assert torch.allclose(inner(X), Y @ inner.read.weight.T + inner.read.bias, rtol=0, atol=1e-12)


def test_no_two_weights_are_made_of_the_same_numbers():
    module = NextPoint(16, mlp=True, seed=3)
    layer = module.san.layers[0]
    draws = [module.embed.weight, module.read.weight, layer.attention.W_Q, layer.mlp.W_1]
    rows = torch.stack([W.detach().flatten()[:9] for W in draws])
    assert torch.corrcoef(rows).fill_diagonal_(0).abs().max() < 0.95


def test_weights_come_from_the_seed_alone():
    state = torch.random.get_rng_state()
    one, two, other = NextPoint(6, seed=3), NextPoint(6, seed=3, skip=True), NextPoint(6, seed=4)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name])
    assert not torch.equal(one.embed.weight, other.embed.weight)
    wide = NextPoint(1000, seed=0)
    assert wide.read.weight.std().item() == pytest.approx(1000**-0.5, rel=0.1)  # 2000 draws: 1.6% each
    assert wide.embed.weight.std().item() == pytest.approx(2**-0.5, rel=0.1)


@pytest.mark.usefixtures("plain_types")
def test_a_switch_that_is_none_is_refused():
    with pytest.raises(TypeError, match="skip must be True or False, but is str 'yes'"):
        NextPoint(6, skip="yes")
    with pytest.raises(ValueError, match="init must be one of 'unit', 'bert', but is str 'xavier'"):
        NextPoint(6, init="xavier")


J = torch.eye(2, dtype=torch.float64).expand(3, 2, 2)


@pytest.mark.usefixtures("plain_types")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: two_arcs.distance(torch.ones(5, 3, 2)),
            ValueError,
            r"\(5, 3, 2\); expected \[\*batch, 2, 2\]",
        ),
        (
            lambda: two_arcs.distance(torch.ones(5, 2, 3)),
            ValueError,
            r"\(5, 2, 3\); expected \[\*batch, 2, 2\]",
        ),
        (lambda: two_arcs.distance([[0.0, 1.0]]), TypeError, "X must be a torch tensor, but is list"),
        (
            lambda: module()(torch.ones(7, 3).double()),
            ValueError,
            r"X is .* \(7, 3\); expected \[\*batch, n, 2\]",
        ),
        (lambda: module()(torch.ones(0, 2).double()), ValueError, r"expected \[\*batch, n, 2\], not empty"),
        (lambda: module()(torch.ones(2).double()), ValueError, r"X is .* \(2,\); expected \[\*batch, n, 2\]"),
        (lambda: module()(torch.ones(7, 2)), TypeError, "X is a float32 .* but the weights are float64"),
        (lambda: two_arcs.error_growth(J[:0]), ValueError, "J must not be empty"),
        (lambda: two_arcs.error_growth(J[0]), ValueError, r"\(2, 2\); expected \[steps, k, k\]"),
        (lambda: two_arcs.error_growth(J[..., :1]), ValueError, r"\(3, 2, 1\); expected \[steps, k, k\]"),
        (lambda: two_arcs.error_growth(J * math.nan), ValueError, "J must be finite"),
        (lambda: two_arcs.scale_growth(module(), step=0.0), ValueError, "step must be positive, but is 0"),
        (lambda: two_arcs.jacobians(module(), points="5"), TypeError, "points must be a whole number"),
    ],
)
def test_states_and_derivatives_of_another_shape(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_unrolling_is_repeated_application():
    run = two_arcs.unroll(scaling(0.5), steps=11)
    assert run.states.shape == (12, 2, 2)
    assert run.diverged is None
    assert run.distance.tolist() == pytest.approx([0.6 * 0.5**k for k in range(12)])
    assert run.merged == 7  # 2^-7 is below 1%, 2^-6 is not
    assert run.left() == 1
    model = module(skip=True)
    run = two_arcs.unroll(model, steps=2)
    assert torch.allclose(run.states[2], model(model(two_arcs.arcs()[:1]))[0])
    turn = math.pi / 500
    right = Linear([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    run = two_arcs.unroll(right, steps=300)
    assert torch.allclose(run.states, two_arcs.arcs()[:301], atol=1e-12)
    assert (run.merged, run.left(), run.diverged) == (None, None, None)


def test_the_circle_is_left_where_tokens_are_no_longer_opposite():
    right = two_arcs.arcs()[:9]

    def left(states, **options):
        return two_arcs.Rollout(states, two_arcs.distance(states), None).left(**options)

    same, moved, grown = right.clone(), right.clone(), right.clone()
    same[3:, 1] = same[3:, 0]  # one on the other, on the circle still
    moved[5:] += torch.tensor([0.04, 0.0])
    grown[7:] *= 0.8
    assert [left(states) for states in (right, same, moved, grown)] == [None, 3, 5, 7]
    assert [left(states, tolerance=0.3) for states in (same, moved, grown)] == [3, None, None]


def test_a_state_that_runs_away_is_caught():
    run = two_arcs.unroll(scaling(10.0), steps=300)
    assert run.diverged == 4  # 0.3 times 10^4 is beyond 1000
    assert len(run.states) == len(run.distance) == 5
    assert two_arcs.unroll(scaling(10.0), 300, limit=10.0).diverged == 2
    huge = two_arcs.unroll(scaling(1e308 * 10), steps=3)
    assert huge.diverged == 1
    assert len(huge.states) == 1
    nothing = two_arcs.unroll(scaling(math.nan), steps=3)
    assert nothing.diverged == 1
    assert len(nothing.states) == 1
    # Tokens that leave together have merged, and diverged all the same.
    start = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])
    both = two_arcs.unroll(Linear([[0.0, 0.0], [0.0, 10.0]]), 300, start=start)
    assert both.merged == 1
    assert both.diverged == 4


@pytest.mark.usefixtures("plain_types")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"start": torch.zeros(3, 2)}, r"start is a float32 tensor of shape \(3, 2\); expected \[2, 2\]"),
        ({"start": torch.full((2, 2), math.nan)}, "start must be finite"),
        ({"start": torch.full((2, 2), 3.0), "limit": 2.0}, "start must be within limit=2.0"),
        ({"limit": math.inf}, "limit must be finite"),
    ],
)
def test_bad_roll_outs_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        two_arcs.unroll(scaling(1.0), **arguments)


def test_jacobians_are_the_differences_of_the_module():
    model = module(norm="post")
    J = two_arcs.jacobians(model, steps=3, points=7)
    X, h = two_arcs.arcs(7)[2], 1e-6
    for k, mode in enumerate(two_arcs.MODES):
        E = h * mode.view(1, 2, 2)
        column = two_arcs.MODES @ ((model(X + E) - model(X - E)) / (2 * h)).flatten()
        assert torch.allclose(J[2][:, k], column, rtol=1e-6, atol=1e-8)  # central differences: h² and eps/h
    assert torch.allclose(two_arcs.MODES @ two_arcs.MODES.T, torch.eye(4, dtype=torch.float64))


def test_without_biases_midpoint_and_difference_do_not_mix():
    J = two_arcs.jacobians(module(norm="none", bias=0.0), steps=5)
    assert J[:, :2, 2:].abs().max() < 1e-12
    assert J[:, 2:, :2].abs().max() < 1e-12
    J = two_arcs.jacobians(module(norm="none"), steps=5)
    assert J[:, :2, 2:].abs().max() > 1e-4


def test_error_growth_of_a_linear_map_is_its_eigenvalues():
    J = two_arcs.jacobians(Linear([[3.0, 0.0], [0.0, 0.5]]), steps=11)
    assert two_arcs.error_growth(J).tolist() == pytest.approx([3.0, 3.0, 0.5, 0.5])
    assert two_arcs.error_growth(J[:, :2, :2]).tolist() == pytest.approx([3.0, 0.5])
    # A shear that grows by nothing but its eigenvalues in the long run: (2, 1; 0, 1) has 2 and 1.
    J = torch.tensor([[2.0, 1.0], [0.0, 1.0]], dtype=torch.float64).expand(400, 2, 2)
    assert two_arcs.error_growth(J).tolist() == pytest.approx([2.0, 1.0], rel=0.01)


def test_error_growth_multiplies_in_the_order_of_the_steps(rng):
    period = torch.randn(3, 2, 2, generator=rng, dtype=torch.float64)
    radii = torch.linalg.eigvals(period[2] @ period[1] @ period[0]).abs().sort(descending=True).values
    found = two_arcs.error_growth(period.repeat(400, 1, 1))
    # The first few steps, until the directions have settled, weigh one part in some hundred.
    assert found.tolist() == pytest.approx((radii ** (1 / 3)).tolist(), rel=0.01)


def test_small_weights_are_the_authors():
    model = NextPoint(400, heads=2, init="bert", dtype=torch.float64)
    attention = model.san.layers[0].attention
    for W in (model.embed.weight, model.read.weight, attention.W_Q, attention.W_K):
        assert W.std().item() == pytest.approx(0.02, rel=0.1)  # 800 draws and more: 2.5% and less
    for W in (attention.W_V, attention.W_O):
        # Uniform on ±1/√d = ±0.05: its deviation is that over √3, and half of it is within half the range.
        assert W.abs().max().item() <= 0.05
        assert W.std().item() == pytest.approx(0.05 / 3**0.5, rel=0.02)
        assert (W.abs() < 0.025).double().mean().item() == pytest.approx(0.5, abs=0.01)


def difference_factors(model, X):
    """The proposition: t_h = σ(g + w/2) − σ(g − w/2) of every head, and w."""
    E = model.embed(X)
    a = model.san.layers[0].attention
    delta, middle = E[0] - E[1], (E[0] + E[1]) / 2
    root = math.sqrt(a.W_Q.shape[-1])
    key = torch.einsum("d,hdk->hk", delta, a.W_K)
    g = ((torch.einsum("d,hdk->hk", middle, a.W_Q) + a.b_Q) * key).sum(-1) / root
    w = (torch.einsum("d,hdk->hk", delta, a.W_Q) * key).sum(-1) / root
    return torch.sigmoid(g + w / 2) - torch.sigmoid(g - w / 2), w, delta


def test_the_difference_of_two_tokens_follows_the_proposition(rng):
    for _ in range(20):
        X = torch.randn(2, 2, generator=rng, dtype=torch.float64)
        model = module(norm="none", heads=2)
        t, w, delta = difference_factors(model, X)
        assert bool((t.abs() <= torch.tanh(w.abs() / 4) + 1e-15).all())
        change = torch.einsum("h,d,hde->e", t, delta, model.san.layers[0].attention.W_h)
        Y = model(X[None])[0]
        assert torch.allclose(Y[0] - Y[1], model.read.weight @ change, rtol=0, atol=1e-13)


def test_a_scale_error_grows_as_one_head_says():
    model = module(heads=1, norm="none", bias=0.0)
    states = two_arcs.arcs(11)
    expected = []
    for X in states:
        v = difference_factors(model, X)[1].item() / 4
        expected.append(1 + 4 * v / math.sinh(2 * v))
    found = two_arcs.scale_growth(model, 11)
    # A central difference with step 1e-4: an error of about 1e-8.
    assert found.tolist() == pytest.approx(expected, abs=1e-7)
    assert bool(((found > 1) & (found < 3)).all())
    assert two_arcs.scale_growth(scaling(7.0), 5).tolist() == pytest.approx([1.0] * 5)


@pytest.mark.parametrize(
    ("switches", "order"),
    [
        ({"norm": "none"}, 3),
        ({"norm": "post"}, 3),
        ({"norm": "post", "mlp": True}, 3),
        ({"norm": "post", "skip": True}, 1),
        ({"norm": "post", "inner_skip": True}, 1),
        ({"norm": "none", "skip": True, "mlp": True}, 1),
    ],
)
def test_a_small_distance_is_cubed_unless_there_is_a_skip(switches, order):
    # Corrections are of relative size 1e-4, the larger distance squared, and less in the slope.
    assert two_arcs.collapse_order(module(**switches)) == pytest.approx(order, abs=2e-3)
    off = torch.tensor([-0.7, 0.4], dtype=torch.float64)
    assert two_arcs.collapse_order(module(**switches), off) == pytest.approx(order, abs=2e-3)
