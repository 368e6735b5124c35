"""Every bound on more than ten thousand random networks, and the public functions on real ones."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rc_lib import bounds, layer_centers
from rc_lib.layer_constants import KINDS, LayerSizes
from rc_lib.norms import composite_norm
from rc_lib.one_layer import HeadMaps
from rc_lib.rank import residual
from rc_lib.residual_flow import residual_flow
from rc_lib.san import SAN

EPS = torch.finfo(torch.float64).eps
# n, d, H, depth, networks: 12 batches of 1000
SHAPES = [(1, 3, 2, 2), (2, 1, 1, 4), (2, 5, 2, 4), (3, 2, 1, 6), (4, 4, 3, 4), (5, 7, 1, 4), (7, 3, 4, 3),
          (11, 5, 2, 3), (13, 2, 1, 4), (23, 7, 2, 2), (41, 3, 1, 2), (64, 5, 2, 2)]  # fmt: skip
NETWORKS = 1000


def scales(generator, *shape):
    """Factors from 1e-3 to 1e2, uniform in the exponent."""
    return 10 ** (5 * torch.rand(*shape, generator=generator, dtype=torch.float64) - 3)


def normal(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def skewed(generator, kind, *shape):
    """Value matrices of four kinds: Gaussian, one column, one row, rows and columns of every size."""
    W = normal(generator, *shape)
    column, row = torch.zeros(shape[-1]), torch.zeros(shape[-2], 1)
    column[0] = row[0] = 1
    uneven = scales(generator, *shape[:-1], 1) * scales(generator, *shape[:-2], 1, shape[-1])
    stack = torch.stack([W, W * column, W * row, W * uneven])
    return stack.gather(0, kind.view(1, *kind.shape, 1, 1).expand(1, *shape))[0]


def random_maps(generator, n, d, H, networks):
    q, v, b = (scales(generator, networks, 1, 1, 1) for _ in range(3))
    W_QK = normal(generator, networks, H, d, d) * q
    kind = torch.randint(4, (networks, H), generator=generator)
    W = skewed(generator, kind, networks, H, d, d) * v
    k, bias = normal(generator, networks, H, d) * b[..., 0], normal(generator, networks, d) * b[..., 0, 0]
    return HeadMaps(W_QK, k, W, bias, 1 + n % 5)


def random_walk(generator, n, d, H, depth, networks=NETWORKS):
    """A batch of networks, each with weights, tokens and a centre of its own, followed about its centres."""
    layers = [LayerSizes(random_maps(generator, n, d, H, networks)) for _ in range(depth)]
    X = normal(generator, networks, n, d) * scales(generator, networks, 1, 1)
    # The mean, the zero row, or a row that has nothing to do with the tokens.
    choice = torch.randint(3, (networks, 1), generator=generator)
    center = torch.where(
        choice == 0, X.mean(-2), torch.where(choice == 1, 0.0, normal(generator, networks, d))
    )
    states, scores = [layer_centers.state(center, X - center.unsqueeze(-2))], []
    for layer in layers:
        t, score = layer_centers.attend(layer.maps, states[-1])
        states.append(t)
        scores.append(score)
    return layers, states, scores


def violations(report, n, d):
    """Where a claimed bound is below the residual by more than rounding allows.

    A layer's residual is computed from sums of n, d and d numbers, each without cancellation, and so has a
    relative error of at most a few (n + 2d) eps; cubing multiplies what a layer inherits by 3.  The
    logarithms themselves are rounded to eps of their size, once per layer.
    """
    depth = len(report.log_bound) - 1
    inherited = torch.tensor([(3.0**l - 1) / 2 for l in range(depth + 1)])
    allowance = 8 * (n + 2 * d) * EPS * inherited.view(-1, *[1] * (report.log_bound.ndim - 1))
    allowance = allowance + 4 * EPS * depth * report.log_residual.abs().nan_to_num(posinf=0)
    return report.claimed & (report.log_slack < -allowance)


@pytest.fixture(scope="module")
def walks():
    generator = torch.Generator().manual_seed(2103_03404)
    return [(n, d, random_walk(generator, n, d, H, depth)) for n, d, H, depth in SHAPES]


@pytest.mark.parametrize("kind", KINDS)
def test_no_bound_is_violated_on_twelve_thousand_networks(walks, kind):
    claimed, closest = 0, math.inf
    for n, d, walk in walks:
        report = bounds._chain(kind, *walk)
        assert not violations(report, n, d).any()
        claimed += int(report.claimed[1].sum())
        first = report.log_slack[1][report.claimed[1] & ~report.log_residual[1].isneginf()]
        closest = min(closest, float(first.min()) if len(first) else math.inf)
    if kind in bounds.UNCONDITIONAL:
        assert claimed == NETWORKS * len(SHAPES) >= 10_000
    else:
        # The range of 1.256 excludes the large scores, but leaves thousands of networks to test.
        assert 4_000 < claimed < NETWORKS * len(SHAPES)
    # The test has teeth: some network comes as near to its bound as theory allows, κ√2 times.
    four = 4 * math.sqrt(2)
    least = {"paper": four, "stated": four, "sharp": four / 4, "best": 1, "gamma_free": 2}
    assert closest == pytest.approx(math.log(least[kind]), abs=1e-9)


@pytest.mark.parametrize("compound", [True, False])
def test_no_certificate_is_violated_on_twelve_thousand_networks(walks, compound):
    slack = []
    for n, d, walk in walks:
        report = bounds._certify(*walk, compound)
        assert bool(report.claimed.all())
        assert not violations(report, n, d).any()
        slack.append(report.log_slack[1][~report.log_residual[1].isneginf()])
    # It is an equality for two tokens and one feature, and of the residual's size for half of the networks.
    assert torch.cat(slack).min() == pytest.approx(0, abs=1e-12)
    assert torch.cat(slack).median() < math.log(10)


def test_the_bounds_are_ordered(walks):
    # 'stated' where claimed is no smaller than 'paper'; κ = 4, 1, 1/√2 are exact multiples.
    for _, _, walk in walks:
        reports = {kind: bounds._chain(kind, *walk) for kind in KINDS}
        claimed = reports["stated"].claimed & ~reports["paper"].log_bound.isneginf()
        gap = (reports["stated"].log_bound - reports["paper"].log_bound)[claimed]
        size = reports["paper"].log_bound[claimed].abs()
        assert bool((gap >= -(1e-12 + 8 * EPS * size)).all())
        first = reports["paper"].claimed[1] & ~reports["paper"].log_bound[1].isneginf()
        ratio = (reports["paper"].log_bound - reports["sharp"].log_bound)[1][first]
        torch.testing.assert_close(ratio, torch.full_like(ratio, math.log(4)), rtol=0, atol=1e-11)


def test_paper_to_sharp_is_four_to_the_364_after_six_layers():
    san = SAN(6, 3, 12, gain=0.5, bias_std=0.3, seed=5)
    X = 0.2 * torch.randn(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    paper, sharp, best = (bounds.bound(san, X, kind) for kind in ("paper", "sharp", "best"))
    assert bool(paper.claimed.all())
    powers = torch.tensor([(3**l - 1) / 2 for l in range(7)], dtype=torch.float64)
    assert powers[-1] == 364
    for report, base in ((sharp, 4.0), (best, 4 * math.sqrt(2))):
        # Logarithms near 1000 in float64: their difference is good to 1e-12.
        gap = (paper.log_bound - report.log_bound) / math.log(base)
        torch.testing.assert_close(gap, powers, rtol=1e-11, atol=1e-11)


def two_tokens(e, w):
    """Two tokens ±1 with one feature, W_QK = e, W = w, no biases, about 0."""
    values = [[[e]]], [[0.0]], [[[w]]], [0.0]
    maps = HeadMaps(*(torch.tensor(v, dtype=torch.float64) for v in values), 1)
    X = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    start = layer_centers.state(torch.zeros(1, dtype=torch.float64), X)
    t, score = layer_centers.attend(maps, start)
    return [LayerSizes(maps)], [start, t], [score]


def test_one_layer_by_hand():
    # E = ±e, δ = 2e, P − s = ±tanh(e)/2: the residual is ±w tanh(e), of composite norm √2 w tanh(e).
    e, w = 0.3, 0.7
    walk = two_tokens(e, w)
    assert walk[1][1].log_R.exp() == pytest.approx(math.sqrt(2) * w * math.tanh(e), rel=1e-14)
    # r = √2, γ = 1/√2, ‖E‖_1 = 2e = e r²: 4γ e w r³ = 8 e w, then a quarter and 1/(4√2) of it.
    for kind, constant in (("paper", 8), ("stated", 8), ("sharp", 2), ("best", math.sqrt(2))):
        assert bounds._chain(kind, *walk).log_bound[1].exp() == pytest.approx(constant * e * w, rel=1e-14)
    # γ-free: √φ(2e) e w r³ with r³ = 2√2.
    free = math.sqrt(math.expm1(2 * e) / (2 * e)) * e * w * 2 * math.sqrt(2)
    assert bounds._chain("gamma_free", *walk).log_bound[1].exp() == pytest.approx(free, rel=1e-14)
    # Certificate: t = tanh(e/2), Σt · osc = 2t · 2w and max t · diam = t · 2w.
    certificate = bounds._certify(*walk, True).log_bound[1].exp()
    assert certificate == pytest.approx(2 * math.sqrt(2) * w * math.tanh(e / 2), rel=1e-14)


def test_one_half_root_two_is_the_best_constant():
    # As e → 0 the residual of the network above comes up to the bound: no smaller κ will do.
    scales = (1.0, 1e-1, 1e-2, 1e-3)
    ratios = [float((-bounds._chain("best", *two_tokens(e, 1.0)).log_slack[1]).exp()) for e in scales]
    assert ratios == sorted(ratios)
    # tanh(e)/e = 1 − e²/3 + …
    assert ratios[-1] == pytest.approx(1 - 1e-6 / 3, abs=1e-12)


@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 9),
    heads=st.integers(1, 3),
    depth=st.integers(0, 4),
    gain=st.floats(0.03, 10),
    mlp=st.sampled_from([None, "gelu", "relu", "tanh", "identity"]),
    mlp_skip=st.booleans(),
    center=st.sampled_from(["mean", "median"]),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_public_functions_on_real_networks(seed, n, heads, depth, gain, mlp, mlp_skip, center):
    san = SAN(depth, heads, 6, 3, mlp=mlp is not None, activation=mlp or "gelu", mlp_skip=mlp_skip,
              gain=gain, bias_std=gain, seed=seed)  # fmt: skip
    X = torch.randn(2, n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    reports = [bounds.bound(san, X, kind, center) for kind in KINDS]
    reports += [bounds.certificate(san, X, center, compound) for compound in (True, False)]
    for report in reports:
        assert report.log_bound.shape == report.log_residual.shape == (depth + 1, 2)
        # The MLP's matrix products are longer sums: mlp_dim = 24.
        assert not violations(report, n, 24).any()


def test_bounds_hold_for_the_plain_forward_pass_about_mean_and_minimizer():
    checked = 0
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        san = SAN(2, 2, 3, 2, gain=0.4 + 0.2 * seed, bias_std=0.5, seed=seed)
        X = torch.randn(4, 3, dtype=torch.float64, generator=generator)
        limit = bounds.bound(san, X, "best", "minimizer").log_bound.exp()
        for l, H in enumerate(san.trace(X).hidden):
            # A plain state holds a residual only to the rounding error of its entries.
            floor = 100 * EPS * float(H.abs().amax())
            least, mean = (float(composite_norm(residual(H, c))) for c in ("minimizer", "mean"))
            assert least <= limit[l] * (1 + 1e-6) + floor  # linear programs: 1e-6
            assert mean <= 2 * limit[l] * (1 + 1e-6) + floor
            checked += 1
    assert checked == 36


@pytest.mark.parametrize("mlp", [False, True])
def test_states_agree_with_the_residual_flow(mlp):
    san = SAN(7, 3, 12, 4, mlp=mlp, bias_std=0.5, seed=3)
    X = torch.randn(2, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    flow = residual_flow(san, X).log_norm
    report = bounds.sharp_bound(san, X)
    about_mean = flow.movedim(-1, 0) - report.log_residual
    # The mean is at most a factor 2 above any centre, and the layer's centre is no minimiser.
    assert about_mean.max() <= math.log(2)
    assert about_mean.min() > -math.log(3)
    assert float(report.log_residual[-1].max()) < -800


def test_ninety_six_layers_stay_in_range():
    X = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    small = bounds.sharp_bound(SAN(96, 2, 4, gain=0.1, seed=1), 0.1 * X)
    assert bool(small.log_bound.isfinite().all() & small.log_residual.isfinite().all())
    assert float(small.log_bound[-1]) < -1e45
    assert not violations(small, 5, 4).any()
    large = bounds.bound(SAN(96, 2, 4, gain=100.0, bias_std=10.0, seed=1), 10 * X, "sharp")
    assert not bool(large.log_bound.isnan().any() | large.log_residual.isnan().any())
    free = bounds.bound(SAN(96, 2, 4, gain=100.0, seed=1), 10 * X, "gamma_free")
    assert not bool(free.log_bound.isnan().any())


def test_nothing_is_claimed_after_the_range_is_left():
    san = SAN(3, 2, 8, gain=1.5, seed=2)
    X = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    report = bounds.paper_bound(san, 2 * X)
    failed = report.failures()
    assert failed[0].layer == 1
    assert failed[0].name == "range"
    assert float(failed[0].margin) < 0
    assert report.claimed.tolist() == [True, False, False, False]
    assert bool(bounds.sharp_bound(san, 2 * X).claimed.all())
    listed = [(a.name, a.layer, a.head) for a in report.assumptions]
    assert listed == [(*p, h) for l in (1, 2, 3) for *p, h in
                      (("range", l, 1), ("range", l, 2), ("contraction", l, None))]  # fmt: skip


def test_a_batch_gives_what_its_members_give():
    san = SAN(3, 2, 5, 3, gain=0.7, bias_std=0.2, seed=8)
    X = torch.randn(2, 3, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    for report, one in ((bounds.sharp_bound(san, X), bounds.sharp_bound(san, X[1, 2])),
                        (bounds.certificate(san, X), bounds.certificate(san, X[1, 2]))):  # fmt: skip
        assert report.log_bound.shape == (4, 2, 3)
        torch.testing.assert_close(report.log_bound[:, 1, 2], one.log_bound, rtol=1e-12, atol=0)


def test_equal_tokens_and_single_tokens_have_bound_zero():
    san = SAN(3, 2, 4, bias_std=0.5, seed=1)
    X = torch.randn(1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    functions = (bounds.sharp_bound, bounds.paper_bound, bounds.certificate)
    for tokens in (X, X.expand(5, 4)):
        for report in (f(san, tokens) for f in functions):
            assert bool(report.log_bound.isneginf().all())
            assert report.log_slack.tolist() == [0, 0, 0, 0]
    assert float(bounds.certificate(san, X, torch.ones(4).double()).log_bound[1]) == -math.inf
    assert float(bounds.weights_bound(san, 0.0, 1, "sharp").log_bound[1]) == -math.inf


@pytest.mark.parametrize("kind", KINDS)
def test_weights_alone(kind):
    # A weights-only bound is above the bound that knows the scores, hence above the residual.
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        san = SAN(3, 2, 6, gain=0.4, mlp=seed % 2 == 1, bias_std=0.3, seed=seed)
        X = 10 ** (-seed / 5) * torch.randn(5, 6, dtype=torch.float64, generator=generator)
        report = bounds.bound(san, X, kind)
        alone = bounds.weights_bound(san, float(report.log_residual[0]), 5, kind)
        assert alone.log_residual is None
        claimed = alone.claimed
        assert bool((alone.log_bound >= report.log_residual)[claimed].all())
        if kind not in ("stated", "gamma_free"):
            assert bool((alone.log_bound >= report.log_bound - 1e-9)[claimed].all())


def test_weights_alone_without_gamma_does_not_know_the_number_of_tokens():
    san = SAN(4, 1, 6, gain=0.5, seed=1)
    few, many = (bounds.weights_bound(san, -3.0, n).log_bound for n in (2, 4096))
    assert torch.equal(few, many)
    assert bool((bounds.weights_bound(san, -3.0, 4096, "sharp").log_bound[1:] > many[1:]).all())


def test_closed_form_and_basin():
    # c = 2, r = 1/2, L = 2: c^4 r^9 = 16/512.
    assert bounds.closed_form(math.log(2), math.log(0.5), 2) == pytest.approx(math.log(16 / 512))
    assert bounds.closed_form(1.0, -3.5, 0) == -3.5
    assert math.isfinite(bounds.closed_form(2.0, -3.0, 96))
    assert bounds.log_basin(math.log(4)) == pytest.approx(math.log(0.5))
    c = math.log(0.3)
    assert math.exp(bounds.log_basin(c) - bounds.log_basin(c + math.log(4))) == pytest.approx(2)
    inside, outside = (bounds.log_basin(c) + step for step in (-0.1, 0.1))
    assert bounds.closed_form(c, inside, 5) < inside
    assert bounds.closed_form(c, outside, 5) > outside
    # One constant for all layers is the chain with equal layers.
    san = SAN(1, 1, 4, gain=0.5, seed=1)
    report = bounds.weights_bound(san, -1.0, 4, "sharp")
    log_c = float(report.log_constant[0])
    assert bounds.closed_form(log_c, -1.0, 1) == pytest.approx(float(report.log_bound[1]))


@pytest.mark.parametrize(
    ("switches", "words"),
    [({"skip": True}, "Claim 3.1"), ({"norm": "pre"}, "LayerNorm"), ({"norm": "post"}, "LayerNorm"),
     ({"final_norm": True}, "LayerNorm")],
)  # fmt: skip
def test_networks_that_the_theorems_do_not_cover_are_refused(switches, words):
    san, X = SAN(2, 2, 4, **switches), torch.ones(3, 4, dtype=torch.float64)
    for f in (bounds.sharp_bound, bounds.paper_bound, bounds.certificate):
        with pytest.raises(ValueError, match=words):
            f(san, X)
    with pytest.raises(ValueError, match=words):
        bounds.weights_bound(san, 0.0, 3)


@pytest.mark.parametrize(
    ("gain", "message"),
    [
        (math.nan, r"san: layers\.0\.attention\.W_Q must be finite, but .* is nan"),
        (1e200, r"san: W_Q W_Kᵀ of layers\.0\.attention is not finite"),
        (1e100, "san: the residual after layer 2 is not finite: weights or X are too large"),
    ],
)
def test_weights_out_of_range_are_named(plain_types, gain, message):
    san, X = SAN(2, 2, 4), torch.eye(4, dtype=torch.float64)
    with torch.no_grad():
        for layer in san.layers:
            for W in (layer.attention.W_Q, layer.attention.W_K, layer.attention.W_V, layer.attention.W_O):
                W.mul_(gain)
    for f in (bounds.sharp_bound, bounds.paper_bound, bounds.certificate):
        with pytest.raises(ValueError, match=message):
            f(san, X)


def test_bad_input(plain_types):
    san, X = SAN(2, 2, 4), torch.ones(3, 4, dtype=torch.float64)
    with pytest.raises(TypeError, match="san must be"):
        bounds.sharp_bound("san", X)
    with pytest.raises(ValueError, match="kind must be one of"):
        bounds.bound(san, X, "sharpest")
    with pytest.raises(ValueError, match=r"X is .*expected \[\*batch, n, 4\]"):
        bounds.sharp_bound(san, torch.ones(3, 5, dtype=torch.float64))
    with pytest.raises(TypeError, match="X must hold floating-point"):
        bounds.sharp_bound(san, torch.ones(3, 4, dtype=torch.int64))
    X[1, 2] = math.nan
    with pytest.raises(ValueError, match=r"X\[1, 2\] is nan"):
        bounds.certificate(san, X)
    with pytest.raises(ValueError, match="center must be one of"):
        bounds.sharp_bound(san, torch.ones(3, 4, dtype=torch.float64), "centroid")
    with pytest.raises(ValueError, match=r"center is .*expected"):
        bounds.sharp_bound(san, torch.ones(3, 4, dtype=torch.float64), torch.ones(3, dtype=torch.float64))
    with pytest.raises(TypeError, match="log_residual must be a number, but is str 'small'"):
        bounds.weights_bound(san, "small", 3)
    with pytest.raises(ValueError, match="log_residual must be"):
        bounds.weights_bound(san, math.nan, 3)
    with pytest.raises(ValueError, match="tokens must be at least 1"):
        bounds.weights_bound(san, 0.0, 0)
    with pytest.raises(ValueError, match="depth must be at least 0"):
        bounds.closed_form(0.0, 0.0, -1)
