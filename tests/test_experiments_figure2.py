import itertools

import numpy as np
import pytest
import torch

from rc_lib import pretrained, rank, results
from rc_lib.experiments import Context, figure2

SETTINGS = {
    "random": ["bert-base", "minilm"],
    "trained": ["minilm"],
    "excerpts": 3,
    "tokens": 11,
    "metric_excerpts": 2,
    "float64": True,
    "scale": "tiny",
    "seeds": [5, 2],
}


def test_the_units_are_every_model_weights_seed_and_variant_once():
    units = figure2.units(SETTINGS)
    assert len(units) == 4 * (1 + 2 * 2)
    assert len({tuple(unit.values()) for unit in units}) == len(units)
    assert {unit["seed"] for unit in units if unit["weights"] == "trained"} == {-1}
    # Neighbours share their weights, so that each set is made once per precision.
    keys = [(u["model"], u["weights"], u["seed"], figure2.dtype_of(SETTINGS, u["variant"])) for u in units]
    assert sum(a != b for a, b in itertools.pairwise(keys)) + 1 == len(set(keys))


@pytest.fixture(scope="module")
def minilm():
    return pretrained.load("minilm", dtype=torch.float64)


def test_measure_is_the_metrics_of_the_hidden_states(minilm):
    ids = pretrained.tokens(minilm, n=3, length=11)
    found = figure2.measure(minilm, ids, "SAN+MLP", metric_excerpts=2, chunk=2)
    hidden = pretrained.trace(minilm, ids, skip=False, mlp=True).hidden
    assert found["relative residual"].shape == (3, 7)
    assert set(found) == set(figure2.METRICS)
    for name, values in found.items():
        expected = np.stack([figure2.METRICS[name](H).numpy() for H in hidden], -1)
        # The chunk is another batch size, so sums may round differently; layers amplify that.
        assert np.allclose(values, expected[: len(values)], rtol=1e-6, atol=1e-9), name
        assert len(values) == (3 if name == "relative residual" else 2)


def test_the_variants_differ_and_share_their_input(minilm):
    ids = pretrained.tokens(minilm, n=1, length=11)
    found = {v: figure2.measure(minilm, ids, v, 0)["relative residual"][0] for v in pretrained.VARIANTS}
    assert len({values[0] for values in found.values()}) == 1
    assert len({values[1] for values in found.values()}) == 4
    assert set(figure2.measure(minilm, ids, "SAN", 0)) == {"relative residual"}


def test_combine_and_curves():
    settings = {**SETTINGS, "random": ["minilm"]}
    units = figure2.units(settings)
    parts = [
        {
            "relative residual": np.full((3, 7), i) + np.arange(7) + np.array([[-1.0], [0.0], [1.0]]),
            "stable rank": np.stack([np.full(7, -i), np.zeros(7)]),
        }
        for i, _ in enumerate(units)
    ]
    arrays, tables = figure2.combine(settings, units, parts)
    assert arrays["minilm/random/SAN/relative residual"].shape == (2, 3, 7)
    assert arrays["minilm/trained/SAN/stable rank"].shape == (1, 2, 7)
    assert "axes" in tables
    stored = results.Result("figure2", settings, arrays)
    first = [
        units.index({"model": "minilm", "weights": "random", "seed": s, "variant": "SAN"}) for s in (5, 2)
    ]
    assert figure2.curves(stored, "minilm", "SAN").tolist() == [[i + l for l in range(7)] for i in first]
    assert figure2.curves(stored, "minilm", "SAN", metric="stable rank")[:, 3].tolist() == [-i for i in first]
    with pytest.raises(ValueError, match=r"'bert-base/random/SAN/relative residual' is not stored"):
        figure2.curves(stored, "bert-base", "SAN")


def test_digitised_curves_are_the_papers():
    assert figure2.digitised("bert-base", "transformer")[[0, 12]].tolist() == [0.5971, 0.3453]
    assert figure2.digitised("xlnet-base", "SAN+skip", "trained")[12] == 0.1026
    assert figure2.digitised("albert-base", "SAN").shape == (13,)
    with pytest.raises(ValueError, match="figure 2 has bert"):
        figure2.digitised("minilm", "SAN")


def test_run_unit_is_reproducible_and_draws_by_its_seed():
    units = [unit for unit in figure2.units(SETTINGS) if unit["model"] == "minilm"]
    small = {**SETTINGS, "excerpts": 1, "metric_excerpts": 1}
    random = [unit for unit in units if unit["weights"] == "random" and unit["variant"] == "SAN+skip"]
    one, two = (figure2.run_unit(small, unit, Context()) for unit in random)
    again = figure2.run_unit(small, random[0], Context())
    assert all(np.array_equal(one[name], again[name]) for name in one)
    assert not np.allclose(one["relative residual"], two["relative residual"], rtol=1e-3)
    assert one["relative residual"].shape == (1, 7)
    assert one["mean cosine"].shape == (2, 7)


SLICES = [
    ("albert-base", "random", 3, "SAN+skip"),
    ("albert-base", "random", 1, "SAN"),
    ("minilm", "random", 4, "transformer"),
    ("minilm", "trained", -1, "SAN"),
    ("minilm", "trained", -1, "SAN+MLP"),
    ("minilm", "trained", -1, "transformer"),
]


@pytest.mark.parametrize(("model", "weights", "seed", "variant"), SLICES)
def test_a_slice_of_the_stored_result_comes_out_again(model, weights, seed, variant):
    stored = results.load("figure2", scale="paper")
    settings = {**stored.settings, "excerpts": 2, "metric_excerpts": 0}
    unit = {"model": model, "weights": weights, "seed": seed, "variant": variant}
    found = figure2.run_unit(settings, unit, Context())["relative residual"]
    row = max(seed, 0) if weights == "trained" else stored.settings["seeds"].index(seed)
    expected = stored.arrays[f"{model}/{weights}/{variant}/relative residual"][row, :2]
    # Rounding differs between machines, thread counts and batch sizes: 1e-7 per operation in float32, which
    # twelve layers amplify to some 1e-5; a thousandth is a hundred times that and far below any effect here.
    # Below 1e-6 a residual is the cancellation of equal tokens: there rounding is all that is left.
    assert np.allclose(found, expected, rtol=1e-3, atol=1e-6)


def test_describe_names_every_curve():
    stored = results.load("figure2", scale="paper")
    text = figure2.describe(stored)
    assert text.count("\n") == 4 * (5 + 2)
    assert rank.METRICS.keys() < figure2.METRICS.keys()


def test_only_variants_without_skip_need_float64():
    found = {variant: figure2.dtype_of(SETTINGS, variant) for variant in pretrained.VARIANTS}
    assert found == {
        "SAN": torch.float64,
        "SAN+MLP": torch.float64,
        "SAN+skip": torch.float32,
        "transformer": torch.float32,
    }
    assert figure2.dtype_of({**SETTINGS, "float64": False}, "SAN") == torch.float32


def test_the_metrics_of_our_own(rng):
    X = torch.randn(2, 5, 3, generator=rng, dtype=torch.float64)
    assert torch.equal(
        figure2.METRICS["relative residual about the median"](X), rank.relative_residual(X, "median")
    )
    # Rows (3, 0) and (1, 0) have residuals (1, 0) and (-1, 0): column sum 2, row sum 1.
    Y = torch.tensor([[3.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    assert figure2.METRICS["residual"](Y).item() == pytest.approx(2**0.5)
