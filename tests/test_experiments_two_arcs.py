import math

import numpy as np
import pytest
import torch
from torch import nn

from rc_lib import results
from rc_lib.experiments import Context, two_arcs
from rc_lib.tasks.two_arcs import arcs

SETTINGS = {
    "epochs": 1,
    "batch_size": 100,
    "lr": 1e-3,
    "schedule": "cosine",
    "steps": 50,
    "grid": [
        {"norm": "post", "variants": ["SAN", "authors"], "dims": [6, 4]},
        {"norm": "none", "variants": ["SAN+skip"], "dims": [4]},
    ],
    "scale": "tiny",
    "seeds": [3, 1],
}


def test_the_units_are_every_cell_of_the_grid_once():
    units = two_arcs.units(SETTINGS)
    assert len(units) == 2 * (2 * 2 + 1)
    assert len({tuple(unit.values()) for unit in units}) == len(units)
    assert units[0] == {"variant": "SAN", "norm": "post", "dim": 6, "seed": 3}
    paper = two_arcs.units(two_arcs.EXPERIMENT.settings("paper", range(5)))
    cells = {(unit["variant"], unit["norm"], unit["dim"]) for unit in paper}
    assert {(v, n, d) for v in two_arcs.PAPER for n in ("post", "none") for d in (32, 64, 128)} < cells
    assert len(paper) == 5 * len(cells)


def test_kept_steps_are_dense_at_first():
    assert two_arcs.kept_steps(50).tolist() == [*range(40), 40, 44, 48]
    assert two_arcs.kept_steps(7).tolist() == list(range(8))
    assert two_arcs.kept_steps(300)[-1] == 300


def test_run_unit_is_reproducible_and_draws_by_its_seed():
    one, two = (two_arcs.run_unit(SETTINGS, unit, Context()) for unit in two_arcs.units(SETTINGS)[:2])
    again = two_arcs.run_unit(SETTINGS, two_arcs.units(SETTINGS)[0], Context())
    assert all(np.array_equal(one[name], again[name], equal_nan=True) for name in one)
    assert one["loss"] != two["loss"]
    assert one["states"].shape == (43, 2, 2)
    assert one["distance"].shape == (51,)
    assert np.allclose(one["states"][0], arcs()[0], atol=1e-7)
    shapes = {name: one[name].shape for name in ("growth", "middle_growth", "difference_growth", "loss")}
    assert shapes == {"growth": (4,), "middle_growth": (2,), "difference_growth": (2,), "loss": ()}


def test_the_variants_differ_by_what_they_say():
    units = {unit["variant"]: unit for unit in two_arcs.units(SETTINGS) if unit["dim"] == 4}
    found = {name: two_arcs.train(SETTINGS, unit)[0] for name, unit in units.items()}
    assert {name: model.skip for name, model in found.items()} == {
        "SAN": False,
        "authors": False,
        "SAN+skip": True,
    }
    assert found["authors"].san.layers[0].skip
    assert not found["SAN"].san.layers[0].skip
    assert found["SAN+skip"].san.layers[0].norm1 is None
    # At a hundredth of the rate the weights move about a hundredth as far from their start.
    starts = {"SAN": "unit", "authors": "bert"}
    far, near = (
        (found[name].read.weight - two_arcs.NextPoint(4, seed=1, init=init).double().read.weight).norm()
        for name, init in starts.items()
    )
    assert near < 0.1 * far


def test_an_interrupted_training_goes_on(tmp_path):
    unit = two_arcs.units(SETTINGS)[0]
    context = Context(checkpoint=tmp_path / "unit.checkpoint")
    first = two_arcs.run_unit(SETTINGS, unit, context)
    assert context.checkpoint.is_file()
    again = two_arcs.run_unit(SETTINGS, unit, context)  # finished: read and not trained
    assert all(np.array_equal(first[name], again[name], equal_nan=True) for name in first)


class Away(nn.Module):
    """Every step multiplies the state by ten."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(10.0, dtype=torch.float64))

    def forward(self, X):
        return self.factor * X


def test_what_runs_away_ends_in_nan_and_says_when():
    found = two_arcs.measure(Away(), 50)
    assert found["diverged"] == 4
    assert found["merged"] == two_arcs.NEVER
    assert found["left"] == 1
    assert np.isnan(found["distance"]).tolist() == [False] * 5 + [True] * 46
    assert np.isnan(found["states"]).any((1, 2)).tolist() == [False] * 5 + [True] * 38
    assert found["growth"].tolist() == pytest.approx([10.0] * 4)
    # Ten times the start instead of one point on: both tokens are off by nine radii, but for the turn.
    assert found["first_error"] == pytest.approx(9 * 0.3 * math.sqrt(2), rel=1e-3)


def test_combine_and_field():
    units = two_arcs.units(SETTINGS)
    parts = [{"merged": np.array(i), "loss": np.array(i / 2)} for i in range(len(units))]
    arrays, tables = two_arcs.combine(SETTINGS, units, parts)
    stored = results.Result("two_arcs", SETTINGS, arrays)
    assert two_arcs.field(stored, "SAN", "post", 4, "merged").tolist() == [2, 3]
    assert two_arcs.field(stored, "SAN+skip", "none", 4, "loss").tolist() == [4.0, 4.5]
    assert "axes" in tables
    with pytest.raises(ValueError, match=r"'SAN/none/4/loss' is not stored; there is SAN\+skip/none/4, SAN/"):
        two_arcs.field(stored, "SAN", "none", 4, "loss")


def test_predicted_stay():
    # A tenth of the radius is 0.03; an error of 0.003 that grows tenfold is there one step after the first.
    found = two_arcs.predicted_stay(np.array([0.003, 3e-5, 0.1, 0.003]), np.array([10.0, 10.0, 10.0, 0.9]))
    assert found[:3].tolist() == pytest.approx([2.0, 4.0, 1.0])
    assert math.isinf(found[3])


def test_the_cheapest_unit_of_the_stored_result_comes_out_again():
    stored = results.load("two_arcs", scale="paper")
    unit = {"variant": "SAN", "norm": "post", "dim": 32, "seed": stored.settings["seeds"][0]}
    found = two_arcs.run_unit(stored.settings, unit, Context())
    expected = {name: two_arcs.field(stored, "SAN", "post", 32, name)[0] for name in found}
    # A training is a long product of roundings: other machines and thread counts end at other weights, and
    # an error then grows several-fold per step of the roll-out. What does not depend on that is compared.
    assert 0.1 < found["loss"] / expected["loss"] < 10
    assert found["loss"] < 1e-4
    assert found["order"] == pytest.approx(3, abs=0.01)
    assert expected["order"] == pytest.approx(3, abs=0.01)
    assert 0 < found["merged"] <= 100
    assert 0 < expected["merged"] <= 100
    assert found["growth"][0] > 1.2
    assert np.allclose(found["states"][1], expected["states"][1], atol=0.06)  # errors of one step: 1e-2


def test_describe_has_a_line_for_every_module():
    stored = results.load("two_arcs", scale="paper")
    text = two_arcs.describe(stored)
    assert text.count("\n") == len(two_arcs.units({**stored.settings, "seeds": [0]}))
    assert "SAN+skip/none/128" in text
