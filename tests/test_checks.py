import dataclasses
import inspect
from functools import partial

import numpy as np
import pytest
import torch

from rc_lib import (
    ablation,
    bounds,
    checks,
    collapse_order,
    corpus,
    experiments,
    layer_centers,
    layer_constants,
    models,
    path_effectiveness,
    path_walks,
    paths,
    plotting,
    pretrained,
    rank,
    results,
    token_classifier,
    training,
    training_plan,
    variants,
    weights,
)
from rc_lib.attention import MultiHeadAttention
from rc_lib.blocks import MLP
from rc_lib.experiments import sorting as sorting_experiment
from rc_lib.experiments import token_tasks
from rc_lib.san import SAN, Layer
from rc_lib.tasks import convex_hull, memorization, sorting, two_arcs
from tests.test_ablation import small
from tests.test_house import public_names


def test_checks_return_their_argument_itself():
    X = torch.ones(2, 3)
    assert checks.floats("X", X) is X
    assert checks.finite("X", X) is X
    assert checks.matrix("X", X) is X
    assert checks.one_of("center", "mean", ("mean", "median")) == "mean"
    assert checks.positive_int("depth", np.int64(7)) == 7
    assert [checks.positive_int("depth", 1), checks.positive_int("depth", 0, minimum=0)] == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_finite_says_where_and_prints_nothing(dtype, bad, capfd):
    X = torch.zeros(2, 3, 5, dtype=dtype)
    X[1, 2, 4] = bad
    with pytest.raises(ValueError, match=r"tokens\[1, 2, 4\] is .*1 of 30") as error:
        checks.finite("tokens", X)
    assert str(bad) in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_finite_reports_the_first_of_several():
    X = torch.zeros(3, 2)
    X[1, 0] = X[2, 1] = float("nan")
    with pytest.raises(ValueError, match=r"X\[1, 0\] is nan \(2 of 6"):
        checks.finite("X", X)


def test_finite_accepts_the_largest_number_and_an_empty_tensor():
    checks.finite("X", torch.full((2, 2), torch.finfo(torch.float64).max, dtype=torch.float64))
    checks.finite("X", torch.zeros(0))


@pytest.mark.parametrize(
    ("X", "error", "message"),
    [
        ([[1.0]], TypeError, r"W must be a torch tensor, but is list \[\[1\.0\]\]"),
        (torch.ones(2, 3, dtype=torch.int64), TypeError, r"floating-point.*int64 tensor of shape \(2, 3\)"),
        (torch.ones(2, 3, dtype=torch.complex64), TypeError, "floating-point.*complex64"),
        (torch.ones(3), ValueError, r"W must have shape \[\*batch, n, d\], but is a float32.*\(3,\)"),
        (torch.ones(4, 0, 3), ValueError, r"W must not be empty.*\(4, 0, 3\)"),
        (torch.tensor([[0.0, float("nan")]]), ValueError, r"W\[0, 1\] is nan"),
    ],
)
def test_matrix_names_the_argument_and_what_it_was(X, error, message, plain_types):
    with pytest.raises(error, match=message):
        checks.matrix("W", X)


@pytest.mark.parametrize("value", ["Mean", None, True, 0])
def test_one_of_lists_the_choices(value):
    with pytest.raises(ValueError, match=r"norm must be one of 'none', 'pre', 1, but is "):
        checks.one_of("norm", value, ("none", "pre", 1))


@pytest.mark.parametrize("value", [1.0, "3", None, True, torch.tensor(3)])
def test_positive_int_wants_a_whole_number(value):
    with pytest.raises(TypeError, match="depth must be a whole number"):
        checks.positive_int("depth", value)


@pytest.mark.parametrize(("value", "minimum"), [(0, 1), (-3, 1), (1, 2)])
def test_positive_int_has_a_minimum(value, minimum):
    with pytest.raises(ValueError, match=f"depth must be at least {minimum}, but is {value}"):
        checks.positive_int("depth", value, minimum)


def test_describe_keeps_long_values_short():
    assert len(checks.describe("x" * 1000)) < 80


@pytest.mark.parametrize("value", [0, 1, "yes", None, np.True_])
def test_boolean_takes_nothing_for_true(value):
    with pytest.raises(TypeError, match="skip must be True or False, but is "):
        checks.boolean("skip", value)
    assert [checks.boolean("skip", True), checks.boolean("skip", False)] == [True, False]


@pytest.mark.parametrize("value", [1, None, "12", torch.ones(2)])
def test_listed_wants_a_sequence(value):
    with pytest.raises(TypeError, match="lengths must be a sequence, but is "):
        checks.listed("lengths", value)
    assert checks.listed("lengths", range(2)) == checks.listed("lengths", np.arange(2)) == [0, 1]


def test_a_seed_is_a_whole_number_that_generators_hold():
    assert [checks.seed(0), checks.seed(2**62 - 1), checks.seed(np.int64(7))] == [0, 2**62 - 1, 7]
    assert type(checks.seed(np.int64(7))) is int
    with pytest.raises(ValueError, match="first must be at least 0, but is -1"):
        checks.seed(-1, "first")


# ------------------------------------------------------------- one rule for seeds and for booleans everywhere

TASK = sorting.make(train=2, test=2)
MODEL = token_classifier.for_task(TASK, 1, 1, 2)
QUICK = token_tasks.chosen(sorting_experiment.EXPERIMENT.presets["quick"], "ours")
IDS = torch.tensor([[1, 2, 3]])
X = torch.eye(3, 2, dtype=torch.float64)
NETWORK = SAN(1, 1, 2)
BRANCHES = {"mlp": None, "skip": True, "mlp_skip": True, "norm": "none", "eps": 1e-5, "dropout": 0.0}
NUMBERS = {"lr": 1.0, "weight_decay": 0.0, "schedule": "constant", "warmup": 0, "clip": None, "every": 1}
FITTED = (torch.nn.Linear(2, 1), lambda model, x: model(x).mean(), (torch.ones(3, 2),))

# Every public function that takes a seed or a switch, with its other arguments; a test finds what is missing.
CALLS = {
    "ablation.ablate": lambda **given: ablation.ablate(small("bert"), **given).__enter__(),
    "attention.MultiHeadAttention": partial(MultiHeadAttention, 1, 2),
    "blocks.MLP": partial(MLP, 2),
    "bounds.certificate": partial(bounds.certificate, NETWORK, X),
    "bounds.paper_bound": partial(bounds.paper_bound, NETWORK, X),
    "collapse_order.order_of_collapse": partial(collapse_order.order_of_collapse, "softmax"),
    "collapse_order.rate_of_collapse": partial(collapse_order.rate_of_collapse, "softmax"),
    "collapse_order.tokens_around": partial(collapse_order.tokens_around, 3, 2),
    "corpus.encode": partial(corpus.encode, "a text"),
    "corpus.tokens": partial(corpus.tokens, 1),
    "experiments.runner.run": partial(
        experiments.run, sorting_experiment.EXPERIMENT, "quick", [0], "nowhere"
    ),
    "experiments.token_tasks.build": partial(token_tasks.build, QUICK, TASK),
    "experiments.token_tasks.measure": partial(token_tasks.measure, QUICK, MODEL, TASK),
    "experiments.token_tasks.train": partial(token_tasks.train, QUICK, TASK),
    "layer_centers.feed": partial(layer_centers.feed, mlp=MLP(2), t=None),
    "layer_constants.mlp_lipschitz": partial(layer_constants.mlp_lipschitz, MLP(2)),
    "models.initialised": partial(models.initialised, None),
    "path_effectiveness.along": partial(path_effectiveness.along, MODEL, TASK.test, [(1,)]),
    "path_effectiveness.sampled": partial(path_effectiveness.sampled, MODEL, TASK.test),
    "path_walks.Walk": partial(path_walks.Walk, SAN(1, 1, 2, skip=True), X),
    "path_walks.draw": partial(path_walks.draw, 1, 1, 1, 1),
    "paths.all_paths": partial(paths.all_paths, 2, 2),
    "paths.count_by_length": partial(paths.count_by_length, 2, 2),
    "paths.count_paths": partial(paths.count_paths, 2, 2),
    "paths.sum_by_length": partial(paths.sum_by_length, NETWORK, X),
    "plotting.residual_axes": plotting.residual_axes,
    "pretrained.load": partial(pretrained.load, "minilm"),
    "pretrained.measure": lambda **given: pretrained.measure(small("bert"), IDS, **given),
    "pretrained.trace": lambda **given: pretrained.trace(small("bert"), IDS, **given),
    "rank.rank_one_distance": partial(rank.rank_one_distance, X),
    "results.read": partial(results.read, "nowhere"),
    "san.Layer": lambda **given: Layer(MultiHeadAttention(1, 2), **{**BRANCHES, **given}),
    "san.SAN": partial(SAN, 1, 1, 2),
    "tasks.convex_hull.make": partial(convex_hull.make, train=1, test=1),
    "tasks.memorization.make": partial(memorization.make, tokenizer="words"),
    "tasks.sorting.make": partial(sorting.make, train=1, test=1),
    "tasks.two_arcs.NextPoint": partial(two_arcs.NextPoint, 2),
    "token_classifier.TokenClassifier": partial(token_classifier.TokenClassifier, NETWORK, 2, symbols=2),
    "token_classifier.for_task": partial(token_classifier.for_task, TASK, 1, 1, 2),
    "training.fit": partial(training.fit, *FITTED, epochs=1, batch_size=3),
    "training_plan.Plan": partial(training_plan.Plan, 1, 1, rows=1, **NUMBERS),
    "training_plan.number": partial(training_plan.number, "lr", 1.0),
    "variants.san": partial(variants.san, "softmax", 1, 1, 2),
    "weights.Gaussian": weights.Gaussian,
    "weights.generator": partial(weights.generator, purpose="a"),
}
PATTERNS = {each.pattern.__name__: each.pattern for each in variants.VARIANTS.values()}


def call(name):
    """The function with its other arguments; patterns all take the same."""
    short = name.removeprefix("rc_lib.")
    return CALLS[short] if short in CALLS else partial(PATTERNS[short.split(".")[-1]], 1, 2)


def parameters(wanted):
    """``(function, parameter)`` for every public function that has a parameter of this kind."""
    for name, function in public_names():
        if inspect.isfunction(function) or "__init__" in vars(function):
            for each in inspect.signature(function).parameters.values():
                if wanted(function, each):
                    yield name, each.name


def seeds():
    return sorted(parameters(lambda function, each: each.name == "seed"))


def switches():
    """Data classes that the library fills itself are left out."""
    return sorted(
        parameters(
            lambda function, each: (
                each.annotation in (bool, bool | None) and not dataclasses.is_dataclass(function)
            )
        )
    )


def test_the_lists_are_not_empty():
    assert len(seeds()) > 20
    assert len(switches()) > 30


@pytest.mark.parametrize(("name", "parameter"), seeds())
def test_every_seed_is_a_whole_number_from_0(name, parameter, plain_types):
    for value in (-1, 2**62):
        with pytest.raises(ValueError, match=r"^seed must be (at least 0|below)"):
            call(name)(seed=value)
    for value in (0.5, "1", True, None):
        with pytest.raises(TypeError, match=r"^seed must be a whole number"):
            call(name)(seed=value)


@pytest.mark.parametrize(("name", "parameter"), switches())
def test_every_switch_is_true_or_false(name, parameter, plain_types):
    for value in ("no", 0):
        with pytest.raises(TypeError, match=f"^{parameter} must be True or False"):
            call(name)(**{parameter: value})
