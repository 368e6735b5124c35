import itertools
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rc_lib.tasks import Examples, Task, majority, sorting


def rows(examples):
    return [tuple(row) for row in examples.inputs.tolist()]


def test_labels_are_the_symbols_in_order_whatever_stands_there():
    task = sorting.make(seed=3, train=40, test=10, symbols=4, length=4)
    for sequence, labels in zip(task.train.inputs.tolist(), task.train.labels.tolist(), strict=True):
        assert labels == sorted(sequence)
    assert any(len(set(row)) < 4 for row in rows(task.train))  # ties do occur and are no special case


def test_the_papers_sizes_are_the_default():
    task = sorting.make()
    assert (len(task.train), len(task.test), task.classes, task.symbols) == (1000, 1000, 10, 10)
    assert task.train.inputs.shape == (1000, 8)
    assert (task.features, task.positions, task.chance, task.ceiling) == (None, True, 0.1, 1.0)
    assert task.train.real.all()
    assert 0.08 < task.majority < 0.13  # ten classes, none much more frequent


@given(st.integers(0, 10**6), st.integers(2, 7), st.integers(1, 5), st.booleans())
@settings(deadline=None, derandomize=True, max_examples=40)
def test_sequences_are_distinct_in_range_and_never_in_both_parts(seed, symbols, length, repeats):
    if not repeats:
        length = min(length, symbols)
    space = (symbols**length) if repeats else len(list(itertools.permutations(range(symbols), length)))
    train, test = (space + 1) // 2, space // 2  # the whole space is used up
    task = sorting.make(seed, train, test, symbols, length, repeats)
    everything = rows(task.train) + rows(task.test)
    assert len(set(everything)) == len(everything) == space
    assert all(0 <= s < symbols for row in everything for s in row)
    if not repeats:
        assert all(len(set(row)) == length for row in everything)


def test_every_sequence_is_equally_likely():
    # 9 sequences of length 2 over 3 symbols, drawn first 450 times: each 50 ± 6.7; five deviations allowed.
    first = [rows(sorting.make(seed, 1, 1, 3, 2).train)[0] for seed in range(450)]
    counts = [first.count(pair) for pair in itertools.product(range(3), repeat=2)]
    assert all(abs(count - 50) < 33 for count in counts)


def test_without_repeats_every_arrangement_is_equally_likely():
    first = [rows(sorting.make(seed, 1, 1, 3, 2, repeats=False).train)[0] for seed in range(300)]
    counts = [first.count(pair) for pair in itertools.permutations(range(3), 2)]
    assert sum(counts) == 300
    assert all(abs(count - 50) < 32 for count in counts)  # five deviations of 6.5


def test_a_seed_fixes_the_data_apart_from_the_global_state():
    torch.manual_seed(1)
    a = sorting.make(seed=5, train=20, test=20)
    torch.manual_seed(2)
    b = sorting.make(seed=5, train=20, test=20)
    assert torch.equal(a.train.inputs, b.train.inputs)
    assert torch.equal(a.test.inputs, b.test.inputs)
    assert not torch.equal(a.train.inputs, sorting.make(seed=6, train=20, test=20).train.inputs)
    # more sequences begin with the same ones
    assert torch.equal(sorting.make(seed=5, train=31, test=20).train.inputs[:20], a.train.inputs)


@pytest.mark.usefixtures("plain_types")
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"symbols": 2, "length": 3, "train": 8, "test": 1}, ValueError, "9 different.*allow 8"),
        ({"symbols": 3, "length": 2, "train": 6, "test": 1, "repeats": False}, ValueError, "allow 6"),
        ({"symbols": 4, "length": 5, "repeats": False}, ValueError, "length=5 exceeds symbols=4"),
        ({"symbols": 1}, ValueError, "symbols must be at least 2"),
        ({"length": 0}, ValueError, "length"),
        ({"train": 0}, ValueError, "train"),
        ({"test": 1.5}, TypeError, "test"),
        ({"repeats": 1}, TypeError, "repeats"),
        ({"seed": 1.0}, TypeError, "seed"),
    ],
)
def test_bad_input_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        sorting.make(**arguments)


# ---------------------------------------------------------------------------------------------------
# What all tasks share: Examples, Task, majority


def three_sets():
    inputs = torch.tensor([[1, 2], [3, 4], [5, 6]])
    labels = torch.tensor([[0, 1], [1, 0], [2, 0]])  # padding would make 0 the most frequent
    return Examples(inputs, labels, torch.tensor([[True, True], [True, False], [True, False]]))


def test_take_accepts_slices_lists_numbers_and_tensors():
    examples = three_sets()
    assert len(examples) == 3
    assert examples.take(slice(1, None)).inputs.tolist() == [[3, 4], [5, 6]]
    assert examples.take([2, 0]).labels.tolist() == [[2, 0], [0, 1]]
    assert examples.take(1).real.tolist() == [[True, False]]
    assert len(examples.take([])) == 0
    assert examples.take(torch.tensor([2])).inputs.tolist() == [[5, 6]]
    with pytest.raises(IndexError):
        examples.take([3])


def test_trim_drops_what_is_padding_everywhere():
    examples = three_sets()
    assert examples.trim().inputs.shape == (3, 2)
    assert examples.take([1, 2]).trim().inputs.tolist() == [[3], [5]]
    assert examples.take([]).trim().inputs.shape == (0, 1)


def test_to_converts_coordinates_and_leaves_symbols():
    assert three_sets().to("cpu", torch.float64).inputs.dtype == torch.int64
    points = Examples(torch.zeros(3, 2, 5), three_sets().labels, three_sets().real)
    assert points.to(dtype=torch.float64).inputs.dtype == torch.float64
    assert points.to("meta").labels.device.type == "meta"


@pytest.mark.usefixtures("plain_types")
def test_examples_must_fit_together():
    inputs, labels, real = three_sets().inputs, three_sets().labels, three_sets().real
    for arguments, error, message in [
        ((inputs.int(), labels, real), TypeError, "inputs"),
        ((inputs[0], labels, real), ValueError, "inputs must be int64"),
        ((torch.zeros(3, 2), labels, real), ValueError, "inputs must be int64"),
        ((inputs, labels.float(), real), TypeError, "labels"),
        ((inputs, labels[:2], real), ValueError, re.escape("labels is a int64 tensor of shape (2, 2)")),
        ((inputs, labels, real.long()), TypeError, "real"),
        ((inputs, labels, real[:, :1]), ValueError, "real"),
    ]:
        with pytest.raises(error, match=message):
            Examples(*arguments)
    with pytest.raises(TypeError, match="dtype"):
        three_sets().to(dtype=torch.int32)


def test_majority_is_chosen_on_train_and_judged_on_test_without_padding():
    examples = three_sets()
    # real labels 0 1 1 2: class 1, right for two of four
    assert majority(examples, examples) == 0.5
    # the real labels of test alone: 2, of which class 1 is none
    assert majority(examples, examples.take(2)) == 0.0


@pytest.mark.usefixtures("plain_types")
def test_majority_names_what_it_cannot_count():
    examples = three_sets()
    nothing = examples.take([])
    with pytest.raises(ValueError, match="train has no real token"):
        majority(nothing, examples)
    with pytest.raises(ValueError, match="test has no real token"):
        majority(examples, nothing)
    with pytest.raises(TypeError, match="test must be Examples, but is NoneType"):
        majority(examples, None)


@pytest.mark.usefixtures("plain_types")
def test_what_is_real_has_a_class_and_finite_coordinates_in_every_set():
    points, labels, real = torch.ones(3, 2, 5), three_sets().labels, three_sets().real
    for bad in (math.nan, math.inf):
        wrong = points.clone()
        wrong[1, 0, 4] = bad
        with pytest.raises(ValueError, match=rf"inputs must be finite .*inputs\[1, 0, 4\] is float {bad}"):
            Examples(wrong, labels, real)
    with pytest.raises(ValueError, match=r"labels must be 0 or more .*labels\[2, 0\] is int -2"):
        Examples(points, labels - 2 * (labels == 2) * 2, real)
    none = real.clone()
    none[1] = False
    with pytest.raises(
        ValueError, match=r"real must mark .*every set, but real\[1\] is list \[False, False\]"
    ):
        Examples(points, labels, none)
    with pytest.raises(ValueError, match="real must mark one token or more of every set"):
        Examples(points[:, :0], labels[:, :0], real[:, :0])


def test_padding_may_hold_anything():
    points, labels, real = torch.ones(3, 2, 5), three_sets().labels.clone(), three_sets().real
    points[1, 1], labels[1, 1] = math.nan, -1
    assert len(Examples(points, labels, real).take([1])) == 1


def test_a_task_moves_as_a_whole_and_keeps_test_the_same_as_train():
    task = sorting.make(train=3, test=2)
    assert isinstance(task.to("meta"), Task)
    assert task.to("meta").test.inputs.device.type == "meta"
    one = Task("x", task.train, task.train, 10, 10, None, True, 0.1, 0.1)
    moved = one.to("cpu")
    assert moved.test is moved.train
