import dataclasses
import itertools

import numpy as np
import pytest
import torch

from rc_lib import experiments, results, training
from rc_lib import path_effectiveness as pe
from rc_lib.experiments import Context, convex_hull, memorization, sorting, token_tasks
from rc_lib.tasks import Examples, Task
from rc_lib.tasks import convex_hull as hull_task
from rc_lib.tasks import memorization as pairs_task
from rc_lib.tasks import sorting as sorting_task
from rc_lib.token_classifier import TokenClassifier

MODULES = {"sorting": sorting, "convex_hull": convex_hull, "memorization": memorization}
TASKS = {"sorting": sorting_task, "convex_hull": hull_task, "memorization": pairs_task}

# Small enough for a second, with another prime for every axis.
TINY = {
    **token_tasks.TRAINING,
    "depth": 2,
    "heads": 2,
    "dim": 6,
    "epochs": 2,
    "batch_size": 7,
    "lr": 1e-2,
    "warmup": 2,
    "every": 1,
    "paths": [2, 3, 5],
    "repeats": 4,
    "sampled_sets": 11,
    "choices": {"ours": {}, "long": {"epochs": 3}},
    "scale": "tiny",
    "seeds": [5, 3],
}
DATA = {
    "sorting": {"train": 23, "test": 13, "symbols": 5, "length": 3},
    "convex_hull": {"train": 23, "test": 13, "points": 5},
    "memorization": {"pairs": 13, "max_tokens": 17},
}


def tiny(name, **changes):
    return {**TINY, "data": DATA[name], **changes}


def same(a, b):
    """Whether two units' arrays agree in everything but the time that they took."""
    assert a.keys() == b.keys()
    return all(np.array_equal(a[key], b[key]) for key in a if key != "seconds")


@pytest.fixture(scope="module")
def ran():
    """One unit of every experiment."""
    unit = {"choice": "ours", "seed": 3}
    return {name: module.run_unit(tiny(name), unit, Context()) for name, module in MODULES.items()}


# ------------------------------------------------------------------------------------------- the presets


@pytest.mark.parametrize("name", MODULES)
def test_the_experiment_is_registered_with_its_presets(name):
    experiment = experiments.get(name)
    assert experiment is MODULES[name].EXPERIMENT
    assert experiment is experiments.get(name.replace("_", "-"))
    assert experiment.name == name
    assert {"quick", "paper", "choices"} <= set(experiment.presets)
    assert experiment.run_unit is MODULES[name].run_unit
    # A worker process imports it by name.
    assert experiment.run_unit.__qualname__ == "run_unit"


@pytest.mark.parametrize(
    ("name", "sizes", "data"),
    [
        ("sorting", (6, 2, 48), {"train": 1000, "test": 1000}),
        ("convex_hull", (6, 3, 84), {"train": 10_000, "test": 1000}),
        ("memorization", (6, 2, 250), {"pairs": 500, "max_tokens": 128}),
    ],
)
def test_the_paper_preset_has_the_papers_sizes(name, sizes, data):
    assert experiments.get(name).presets["paper"]["data"] == data
    for scale in ("paper", "choices"):
        settings = experiments.get(name).presets[scale]
        assert tuple(settings[key] for key in ("depth", "heads", "dim")) == sizes
        assert {5, 20} <= set(settings["paths"])
        assert settings["repeats"] == 5
        assert (settings["norm"], settings["affine"]) == ("post", False)


@pytest.mark.parametrize("name", MODULES)
def test_presets_are_complete_and_choices_override_what_there_is(name):
    for preset in experiments.get(name).presets.values():
        assert token_tasks.TRAINING.keys() <= preset.keys()
        assert "ours" in preset["choices"]
        for overrides in preset["choices"].values():
            assert overrides.keys() <= preset.keys() - {"choices"}
    # "ours" is the same training in both, but perhaps for how long and on how much.
    paper, choices = (experiments.get(name).presets[scale] for scale in ("paper", "choices"))
    assert paper["choices"] == {"ours": {}}
    assert choices["choices"]["ours"] == {}
    amount = {"choices", "data", "epochs", "every"}
    assert paper.keys() == choices.keys()
    assert {key for key in paper if paper[key] != choices[key]} <= amount


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("scale", ["quick", "paper", "choices"])
def test_every_choice_builds_a_network_for_its_task(name, scale):
    preset = experiments.get(name).settings(scale, [0])
    little = {"memorization": {"pairs": 5, "max_tokens": 9}}.get(name, {"train": 5, "test": 5})
    for choice in preset["choices"]:
        settings = token_tasks.chosen(preset, choice)
        task = TASKS[name].make(seed=0, **{**settings["data"], **little})
        model = token_tasks.build(settings, task, seed=0)
        san = model.san
        assert (san.depth, san.heads, san.dim) == tuple(settings[k] for k in ("depth", "heads", "dim"))
        assert (san.skip, san.mlp, san.norm) == (True, False, settings["norm"])
        assert model(task.test.inputs, task.test.real).shape == (5, task.test.inputs.shape[1], task.classes)


# ----------------------------------------------------------------------------------------- the settings


def test_chosen_overrides_and_leaves_the_preset_alone():
    settings = tiny("sorting")
    assert token_tasks.chosen(settings, "long") == {**settings, "epochs": 3}
    assert token_tasks.chosen(settings, "ours") == settings
    assert settings["epochs"] == 2


def test_chosen_refuses_an_unknown_choice():
    with pytest.raises(ValueError, match=r"choice='other': there is ours, long"):
        token_tasks.chosen(TINY, "other")


def test_units_are_every_choice_and_seed_once():
    assert token_tasks.units(TINY) == [
        {"choice": "ours", "seed": 5},
        {"choice": "ours", "seed": 3},
        {"choice": "long", "seed": 5},
        {"choice": "long", "seed": 3},
    ]


# -------------------------------------------------------------------------------------- loss and baseline


class Says(TokenClassifier):
    """A model that answers with fixed logits."""

    def __init__(self, logits):
        torch.nn.Module.__init__(self)
        self.logits, self.seen = logits, None

    def forward(self, inputs, real=None):
        self.seen = inputs.shape
        return self.logits[:, : inputs.shape[1]]


def test_loss_is_the_mean_over_real_tokens_by_hand():
    # Three tokens of which two are real, two classes. Logits (0, log 3): probabilities 1/4 and 3/4.
    logits = torch.tensor([[[0.0, 3.0], [0.0, 3.0], [0.0, 9.0]]], dtype=torch.float64)
    logits[..., 1] = logits[..., 1].log()
    real = torch.tensor([[True, True, False]])
    found = token_tasks.loss(Says(logits), torch.tensor([[4, 4, 0]]), torch.tensor([[0, 1, 0]]), real)
    assert found.item() == pytest.approx((np.log(4) + np.log(4 / 3)) / 2, rel=1e-12)


def test_loss_leaves_out_columns_that_are_padding_in_the_whole_batch():
    model = Says(torch.zeros(2, 5, 3))
    real = torch.tensor([[True, False, False, False, False], [True, True, True, False, False]])
    labels = torch.zeros(2, 5, dtype=torch.int64)
    assert token_tasks.loss(model, labels, labels, real).item() == pytest.approx(np.log(3), rel=1e-6)
    assert model.seen == (2, 3)


def sequences(*rows):
    labels = torch.tensor(rows)
    return Examples(labels, labels, torch.ones_like(labels, dtype=torch.bool))


def test_position_only_by_hand():
    # Most frequent in training: 0 at the first position, 2 at the second; in the test 1 and 2 of 2 are so.
    train, test = sequences([0, 2], [0, 1], [1, 2]), sequences([0, 2], [1, 2])
    task = Task("sorting", train, test, 3, 3, None, True, chance=1 / 3, majority=0.0)
    assert sorting.position_only(task) == 0.75


def test_position_only_matches_a_count_and_tells_repeats_from_none():
    task = sorting_task.make(seed=2, train=500, test=500)
    train, test = task.train.labels.numpy(), task.test.labels.numpy()
    guess = [np.bincount(column).argmax() for column in train.T]
    assert sorting.position_only(task) == pytest.approx(np.mean(test == guess))
    # 8 symbols of 10: with repeats the position says about a third, without more than half.
    assert 0.28 < sorting.position_only(task) < 0.4
    assert sorting.position_only(sorting_task.make(seed=2, train=500, test=500, repeats=False)) > 0.5


def test_position_only_needs_positions(plain_types):
    points = hull_task.make(train=3, test=2, points=4)
    with pytest.raises(ValueError, match=r"task must have a token at each of its positions, .*'convex_hull'"):
        sorting.position_only(points)
    task = sorting_task.make(train=3, test=2)
    real = task.train.real.clone()
    real[0, 7] = False
    padded = Examples(task.train.inputs, task.train.labels, real)
    with pytest.raises(ValueError, match="task must have a token at each"):
        sorting.position_only(dataclasses.replace(task, train=padded))
    with pytest.raises(TypeError, match="task must be a Task, but is NoneType"):
        sorting.position_only(None)


# ------------------------------------------------------------------------------------------------- a unit


@pytest.mark.parametrize("name", MODULES)
def test_run_unit_returns_every_measurement_in_its_shape(ran, name):
    arrays = ran[name]
    exact = {"alone", "cumulative", "leave_one_out", "norms", "residuals"}
    scalars = {"train_accuracy", "test_accuracy", "bias", "reconstruction", "seconds", *token_tasks.BASELINES}
    extra = {"position_only"} if name == "sorting" else set()
    assert set(arrays) == exact | scalars | extra | {"sampled", "sampled_frozen", "loss", "curve"}
    assert all(arrays[key].shape == (3,) for key in exact)
    assert all(arrays[key].shape == () for key in scalars | extra)
    assert arrays["sampled"].shape == arrays["sampled_frozen"].shape == (3, 3, 4)
    assert arrays["loss"].shape == (2,)
    assert arrays["curve"].tolist()[0] == [1, 2]
    assert all(np.isfinite(values).all() for values in arrays.values())


@pytest.mark.parametrize("name", MODULES)
def test_run_unit_measures_what_it_says(ran, name):
    """Done by hand: the same task, the same training, the same measurements."""
    arrays, settings = ran[name], tiny(name)
    task = TASKS[name].make(seed=3, **DATA[name])
    model, history = token_tasks.train(settings, task, 3)
    assert not model.training
    assert np.allclose(arrays["loss"], history.loss, rtol=1e-6)
    assert arrays["train_accuracy"] == pe.accuracy(model, task.train)
    # One is float32, the other float64: an answer that is a tie up to rounding may go either way.
    assert arrays["test_accuracy"] == pytest.approx(pe.accuracy(model, task.test), abs=0.02)
    some = task.test.take(slice(0, 11))
    for i, count in enumerate((2, 3, 5)):
        for key, frozen in (("sampled", False), ("sampled_frozen", True)):
            again = pe.sampled(model, some, count, 4, 3, frozen=frozen)
            assert np.allclose(arrays[key][i], again, atol=0.02)
    spectrum = pe.exact(model, task.test)
    assert arrays["alone"].tolist() == spectrum.alone.tolist()
    assert arrays["leave_one_out"].tolist() == spectrum.leave_one_out.tolist()
    assert arrays["reconstruction"] < 1e-10
    assert [arrays[key] for key in token_tasks.BASELINES] == [task.chance, task.majority, task.ceiling]


def test_train_hands_the_preset_and_the_seed_to_the_loop():
    settings = tiny("sorting", dropout=0.2, lr=3e-3, clip=0.1, weight_decay=0.5, schedule="linear")
    task = sorting_task.make(seed=3, **DATA["sorting"])
    model = token_tasks.build(settings, task, 3)
    data = (task.train.inputs, task.train.labels, task.train.real)
    numbers = {"epochs": 2, "batch_size": 7, "lr": 3e-3, "warmup": 2, "clip": 0.1, "weight_decay": 0.5}
    by_hand = training.fit(model, token_tasks.loss, data, **numbers, schedule="linear", seed=3)
    trained, history = token_tasks.train(settings, task, 3)
    assert history.loss == by_hand.loss
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trained.parameters(), strict=True))
    assert history.metrics["epoch"] == [1, 2]
    assert history.metrics["accuracy"][-1] == pe.accuracy(trained, task.test)


@pytest.mark.parametrize("name", MODULES)
def test_a_unit_run_again_is_the_same(ran, name):
    again = MODULES[name].run_unit(tiny(name), {"choice": "ours", "seed": 3}, Context())
    assert same(ran[name], again)


def test_seed_and_choice_matter(ran):
    other = sorting.run_unit(tiny("sorting"), {"choice": "ours", "seed": 5}, Context())
    longer = sorting.run_unit(tiny("sorting"), {"choice": "long", "seed": 3}, Context())
    assert not np.array_equal(other["loss"], ran["sorting"]["loss"])
    assert longer["loss"].shape == (3,)


def test_a_choice_may_change_the_data():
    changed = {**DATA["sorting"], "repeats": False}
    settings = tiny("sorting", choices={"no repeats": {"data": changed}})
    arrays = sorting.run_unit(settings, {"choice": "no repeats", "seed": 3}, Context())
    task = sorting_task.make(seed=3, **changed)
    assert arrays["position_only"] == sorting.position_only(task)
    assert arrays["majority"] == task.majority


class Killed(Exception):
    pass


def test_an_interrupted_unit_resumes_to_the_same_numbers(ran, tmp_path, monkeypatch):
    file, unit = tmp_path / "unit", {"choice": "ours", "seed": 3}
    calls, accuracy = itertools.count(), pe.accuracy

    def dies_once(*arguments):
        if next(calls) == 1:  # the measurement after the second epoch
            raise Killed
        return accuracy(*arguments)

    monkeypatch.setattr(pe, "accuracy", dies_once)
    monkeypatch.setattr("rc_lib.training._Saver.tick", lambda self, run: self.save(run))
    with pytest.raises(Killed):
        sorting.run_unit(tiny("sorting"), unit, Context(checkpoint=file))
    assert file.is_file()
    assert same(ran["sorting"], sorting.run_unit(tiny("sorting"), unit, Context(checkpoint=file)))


# --------------------------------------------------------------------------- putting together and telling


def part(unit):
    """A unit's arrays, small and recognisable."""
    value = unit["seed"] / 10 + (unit["choice"] == "long")
    names = ("test_accuracy", "train_accuracy", "ceiling", "majority", "chance", "seconds")
    lengths = {name: np.full(3, value) for name in ("alone", "cumulative", "leave_one_out")}
    return {name: np.array(value) for name in names} | lengths | {"sampled": np.full((3, 3, 4), value)}


@pytest.fixture
def result():
    units = token_tasks.units(TINY)
    arrays, tables = token_tasks.combine(TINY, units, [part(unit) for unit in units])
    return results.Result("sorting", TINY, arrays, tables)


def test_combine_stacks_the_seeds_of_each_choice_in_their_order(result):
    assert result.arrays["ours/test_accuracy"].tolist() == [0.5, 0.3]
    assert result.arrays["long/alone"].tolist() == [[1.5] * 3, [1.3] * 3]
    assert result.arrays["ours/sampled"].shape == (2, 3, 3, 4)
    assert "axes" in result.tables


def test_combine_refuses_parts_that_are_missing():
    units = token_tasks.units(TINY)
    with pytest.raises(ValueError, match="zip"):
        token_tasks.combine(TINY, units, [part(unit) for unit in units[:-1]])


def test_stored_gives_one_choice_by_plain_names(result):
    found = token_tasks.stored(result, "long")
    assert set(found) == set(part({"choice": "ours", "seed": 0}))
    assert found["test_accuracy"].tolist() == [1.5, 1.3]
    assert token_tasks.stored(result)["test_accuracy"].tolist() == [0.5, 0.3]
    with pytest.raises(ValueError, match="choice='none'"):
        token_tasks.stored(result, "none")


def test_a_choice_whose_name_begins_another_is_kept_apart():
    settings = {**TINY, "choices": {"a": {}, "a b": {}}}
    arrays = {"a/n": np.array([1]), "a b/n": np.array([2])}
    found = token_tasks.stored(results.Result("x", settings, arrays), "a")
    assert {key: values.tolist() for key, values in found.items()} == {"n": [1]}


def test_describe_names_every_choice_and_count(result):
    text = token_tasks.describe(result)
    assert "ours: test accuracy 0.4000" in text
    assert "long: test accuracy 1.4000" in text
    for count in TINY["paths"]:
        assert text.count(f"sampled, {count} paths") == 2
    for name in ("alone", "cumulative", "leave_one_out"):
        assert f"{name:22} 0.400  0.400  0.400" in text


# ---------------------------------------------------------------------------------- what the book stores


STORED = [path for name in MODULES for path in results.files(name)]


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_a_stored_result_has_its_presets_settings(path):
    result = results.read(path)
    experiment = experiments.get(result.name)
    settings = result.settings
    now = experiment.settings(settings["scale"], settings["seeds"])
    assert path.name == results.file_name(result.name, now)
    for choice in settings["choices"]:
        found = token_tasks.stored(result, choice)
        assert {len(values) for values in found.values()} == {len(settings["seeds"])}
        assert found["sampled"].shape[1:] == (len(settings["paths"]), settings["depth"] + 1, 5)
        epochs = token_tasks.chosen(settings, choice)["epochs"]
        assert found["loss"].shape[1] == found["curve"][0, 0, -1] == epochs
    assert experiment.describe(result)


@pytest.mark.parametrize("name", MODULES)
def test_the_baselines_of_a_stored_result_come_out_again(name):
    """The data are made again from the first seed; the training is too long to be repeated here."""
    for path in results.files(name):
        result = results.read(path)
        seed = result.settings["seeds"][0]
        task = TASKS[name].make(seed=seed, **result.settings["data"])
        found = token_tasks.stored(result)
        for key in token_tasks.BASELINES:
            assert found[key][0] == getattr(task, key)
        if name == "sorting":
            assert found["position_only"][0] == sorting.position_only(task)
