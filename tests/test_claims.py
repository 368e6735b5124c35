import json

import numpy as np
import pytest
import torch

from rc_lib import claims

ROW = {
    "id": "a",
    "kind": "figure",
    "source": "figure 2",
    "statement": "The residual falls.",
    "chapter": "experiments/x",
    "band": {"below": 0.1},
    "status": "reproduced",
}


def write(path, rows):
    import yaml

    path.write_text(yaml.safe_dump(rows, sort_keys=False), encoding="utf-8")
    return path


@pytest.fixture
def ledger(tmp_path, monkeypatch):
    """Make the rows given the ledger that ``check`` uses."""

    def use(*changes):
        file = write(tmp_path / "claims.yml", [ROW | change for change in changes or ({},)])
        monkeypatch.setattr(claims.data, "path", lambda name: file)
        return claims.load()

    return use


def test_the_books_own_ledger_is_well_formed():
    assert all(claims.load()[name].id == name for name in claims.load())


def test_load_reads_rows_in_order(ledger):
    rows = ledger({}, {"id": "b", "unit": "nats", "note": "two\n  lines"})
    assert list(rows) == ["a", "b"]
    assert rows["a"].band == claims.Band("below", (0.1,))
    assert (rows["b"].unit, rows["b"].note) == ("nats", "two lines")


def test_an_empty_ledger_has_no_rows(tmp_path):
    (tmp_path / "claims.yml").write_text("# nothing yet\n", encoding="utf-8")
    assert claims.load(tmp_path / "claims.yml") == {}


def test_load_sees_a_changed_file(tmp_path):
    import os

    file = write(tmp_path / "c.yml", [ROW])
    assert list(claims.load(file)) == ["a"]
    write(file, [ROW | {"id": "other"}])
    os.utime(file, ns=(1, 1))
    assert list(claims.load(file)) == ["other"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": "red"}, "unknown colour"),
        ({"kind": "guess"}, "kind is 'guess', expected one of theorem"),
        ({"status": "sure"}, "status is 'sure'"),
        ({"statement": ""}, "statement is ''"),
        ({"id": 7}, "id is 7, expected a text"),
        ({"note": None}, "note is None"),
        ({"chapter": "experiments/x.ipynb"}, "chapter is"),
        ({"chapter": "book/experiments/x"}, "chapter is"),
        ({"band": {"under": 3}}, "band is"),
        ({"band": 3}, "band is 3"),
        ({"band": {"below": 1, "above": 0}}, "band is"),
        ({"band": {"below": 1, "within": 2}}, "band is"),
        ({"band": {"equals": 1}}, "band is"),
        ({"band": {"within": 1}}, "band is"),
        ({"band": {"below": "low"}}, "expected finite numbers"),
        ({"band": {"below": float("nan")}}, "expected finite numbers"),
        ({"band": {"below": True}}, "expected finite numbers"),
        ({"band": {"between": [1, 0]}}, "low < high"),
        ({"band": {"between": [0, 1, 2]}}, "low < high"),
        ({"band": {"between": 1}}, "low < high"),
        ({"band": {"equals": 1, "within": -1}}, "tolerance ≥ 0"),
        ({"band": {"is": "yes"}}, "true or false"),
    ],
)
def test_load_refuses_a_malformed_row(tmp_path, change, message):
    file = write(tmp_path / "claims.yml", [ROW | {"id": "first"}, ROW | change])
    with pytest.raises(ValueError, match=f"row 2.*{message}"):
        claims.load(file)


@pytest.mark.parametrize("key", list(ROW))
def test_load_names_a_missing_key(tmp_path, key):
    file = write(tmp_path / "claims.yml", [{k: v for k, v in ROW.items() if k != key}])
    with pytest.raises(ValueError, match=f"missing {key}"):
        claims.load(file)


@pytest.mark.parametrize(("rows", "message"), [({"a": 1}, "list of rows"), (["a"], "keys and values")])
def test_load_refuses_what_is_no_list_of_rows(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        claims.load(write(tmp_path / "claims.yml", rows))


def test_load_says_where_the_file_is_no_yaml(tmp_path):
    (tmp_path / "claims.yml").write_text("- id: a\n  statement: BERT: falls\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"claims.yml is no YAML \(quote texts(.|\n)*line 2"):
        claims.load(tmp_path / "claims.yml")


def test_load_refuses_an_id_twice(tmp_path):
    with pytest.raises(ValueError, match="row 2: id 'a' is taken"):
        claims.load(write(tmp_path / "claims.yml", [ROW, ROW]))


def test_a_number_without_a_point_is_a_number(tmp_path):
    # YAML 1.1 reads 1e-3 as text.
    (tmp_path / "c.yml").write_text(
        "- {id: a, kind: figure, source: s, statement: t, chapter: c, band: {below: 1e-3}, status: ours}\n",
        encoding="utf-8",
    )
    assert claims.load(tmp_path / "c.yml")["a"].band == claims.Band("below", (0.001,))


@pytest.mark.parametrize(
    ("band", "inside", "outside", "text"),
    [
        ({"below": 0.1}, [0.0999, -3], [0.1, 0.2], "< 0.1"),
        ({"above": 0.6}, [0.61], [0.6, 0.1], "> 0.6"),
        ({"between": [2, 3]}, [2, 2.5, 3], [1.99, 3.01], "2 to 3"),
        ({"equals": 1.5, "within": 0.25}, [1.25, 1.75, 1.5], [1.24, 1.76], "1.5 ± 0.25"),
        ({"equals": 729, "within": 0}, [729], [728, 729.5], "exactly 729"),
        ({"is": True}, [True], [False, 1, 1.0], "yes"),
        ({"is": False}, [False], [True, 0], "no"),
        ({"above": 0.5}, [0.7], [True], "> 0.5"),
    ],
)
def test_check_returns_values_inside_the_band_and_raises_outside(ledger, band, inside, outside, text):
    row = ledger({"band": band})["a"]
    assert str(row.band) == text
    for value in inside:
        assert claims.check("a", value) == value
    for value in outside:
        with pytest.raises(claims.ClaimError, match=r"^a: .* is outside the band .*The residual falls"):
            claims.check("a", value)


@pytest.mark.parametrize(
    "value",
    [torch.tensor(0.05, dtype=torch.float64), torch.tensor([[0.05]]), np.float64(0.05), np.array([0.05])],
)
def test_check_takes_scalars_of_every_make(ledger, value):
    ledger()
    # float32's rounding of 0.05 is 7e-10.
    assert claims.check("a", value) == pytest.approx(0.05, abs=1e-8)
    assert type(claims.check("a", value)) is float


def test_check_takes_truth_values_of_every_make(ledger):
    ledger({"band": {"is": True}})
    assert claims.check("a", torch.tensor(True)) is True
    assert claims.check("a", np.bool_(True)) is True


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), torch.tensor(float("nan"))])
def test_check_refuses_values_that_are_not_finite(ledger, value):
    ledger()
    with pytest.raises(ValueError, match="finite"):
        claims.check("a", value)


@pytest.mark.parametrize("value", ["0.05", None, [0.05], torch.ones(2), np.ones(3), 1j])
def test_check_refuses_what_is_no_number(ledger, value):
    ledger()
    with pytest.raises(TypeError, match="one number or truth value"):
        claims.check("a", value)


def test_check_refuses_a_claim_that_the_ledger_does_not_know(ledger):
    ledger({"id": "fig2-bert-san"})
    with pytest.raises(claims.ClaimError, match=r"no such row; did you mean 'fig2-bert-san'\?"):
        claims.check("fig2-bert-sam", 0.0)


@pytest.mark.parametrize("id", [None, 3, ["fig2-bert-san"]])
def test_check_refuses_an_id_that_is_no_string(plain_types, ledger, id):
    ledger({"id": "fig2-bert-san"})
    with pytest.raises(TypeError, match="expected a string, the id of a row of the ledger"):
        claims.check(id, 0.0)


def test_check_prints_its_tick_outside_a_notebook(ledger, capsys):
    ledger({"unit": "nats"})
    claims.check("a", 0.012345)
    assert capsys.readouterr().out == (
        "check ✓ a: 0.01235 nats (band < 0.1) The residual falls. [figure 2]\n"
    )


def test_check_stores_its_value_in_a_notebook(ledger, monkeypatch):
    import IPython
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython, "get_ipython", lambda: object())
    monkeypatch.setattr(IPython.display, "display", lambda *args, **kwargs: shown.append((args, kwargs)))
    ledger({"statement": "a < b & c"})
    claims.check("a", 0.05)
    ((bundle,), options) = shown[0]
    assert options == {"raw": True, "metadata": {"rc_lib": {"claim": "a", "value": 0.05}}}
    assert bundle["text/plain"].startswith("check ✓ a: 0.05 (band < 0.1)")
    assert "a &lt; b &amp; c" in bundle["text/html"]
    # No colour for text: it takes the page's own, light or dark.
    assert "color:" not in bundle["text/html"].replace("border-left", "")


def test_stored_reads_every_value_back(tmp_path):
    outputs = [
        {"output_type": "display_data", "data": {}, "metadata": {"rc_lib": {"claim": name, "value": value}}}
        for name, value in [("a", 0.05), ("b", True), ("a", 0.06)]
    ]
    cells = [
        {"cell_type": "markdown"},
        {"outputs": outputs[:2]},
        {"outputs": [{"output_type": "stream"}, outputs[2]]},
    ]
    file = tmp_path / "n.ipynb"
    file.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    assert claims.stored(file) == {"a": [0.05, 0.06], "b": [True]}


def test_stored_refuses_what_is_no_notebook(tmp_path):
    (tmp_path / "n.ipynb").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="no notebook"):
        claims.stored(tmp_path / "n.ipynb")
