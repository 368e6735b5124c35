"""The ledger, the notebooks and their prose agree; and the test of it sees each way in which they may not."""

import json

import pytest
import yaml

from rc_lib import claims

from . import ledger
from .conftest import ROOT
from .toc import named

BOOK = ROOT / "book"
PAGES = named(yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8")))
NOTEBOOKS = {
    name: json.loads((BOOK / f"{name}.ipynb").read_text(encoding="utf-8"))
    for name in PAGES
    if (BOOK / f"{name}.ipynb").is_file()
}


def test_ledger_and_notebooks_agree():
    assert ledger.disagreements(claims.load(), NOTEBOOKS) == []


def test_rows_stand_in_the_order_of_the_table_of_contents():
    assert ledger.disorder(list(claims.load().values()), PAGES) == []


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_number_in_prose_is_printed_or_claimed(name):
    rows = [claim for claim in claims.load().values() if claim.chapter == name]
    assert ledger.unsupported(NOTEBOOKS[name], rows) == []


# Small made ones


def row(id="a", chapter="x", band=None, **more):
    fields = {"kind": "figure", "source": "figure 2", "statement": "It falls.", "status": "ours"} | more
    return claims.Claim(id=id, chapter=chapter, band=band or claims.Band("below", (0.1,)), **fields)


def markdown(text):
    return {"cell_type": "markdown", "source": text, "metadata": {}}


def code(source="", *outputs, **mystnb):
    return {"cell_type": "code", "source": source, "outputs": list(outputs), "metadata": {"mystnb": mystnb}}


def printed(text):
    return {"output_type": "stream", "name": "stdout", "text": text}


def outcome(id, value):
    return {"output_type": "display_data", "data": {}, "metadata": {"rc_lib": {"claim": id, "value": value}}}


def notebook(*cells):
    return {"cells": list(cells)}


GOOD = notebook(code('check("a", 0.05)', outcome("a", 0.05)))


@pytest.mark.parametrize(
    ("rows", "notebooks", "complaints"),
    [
        ([row()], {"x": GOOD}, []),
        ([row(), row("b")], {"x": GOOD}, ["b: no notebook stores"]),
        ([], {"x": GOOD}, ["x: checks 'a', which the ledger does not know"]),
        (
            [row()],
            {"x": notebook(code('check("a", 1)', outcome("a", 0.3)))},
            ["a: stored 0.3 is outside < 0.1"],
        ),
        ([row(chapter="y")], {"x": GOOD}, ["x: checks 'a', which the ledger gives to y"]),
        (
            [row()],
            {"x": notebook(code('claims.check(id="a", value=1)'))},
            ["x: calls check('a') but stores no outcome", "a: no notebook stores"],
        ),
        ([], {"x": notebook(code("check(name, 1)", outcome("z", 0.05)))}, ["x: checks 'z', which"]),
        ([row()], {"x": notebook(code("%time 1\n!ls\ncheck('a', 1)", outcome("a", 0.05)))}, []),
        ([row()], {"x": notebook(code("if x:\n    %pip install y"), *GOOD["cells"])}, []),
        ([row()], {"x": notebook(code("# check('b', 1)\ns = \"check('c', 1)\""), *GOOD["cells"])}, []),
        ([row(band=claims.Band("is", (True,)))], {"x": notebook(code("", outcome("a", True)))}, []),
    ],
)
def test_disagreements_are_seen(rows, notebooks, complaints):
    found = ledger.disagreements({r.id: r for r in rows}, notebooks)
    assert len(found) == len(complaints)
    assert all(text.startswith(start) for text, start in zip(found, complaints, strict=True))


def test_disorder_is_seen():
    pages = ["intro", "x", "y"]
    assert ledger.disorder([row("a", "x"), row("b", "x"), row("c", "y")], pages) == []
    assert ledger.disorder([row("a", "y"), row("b", "x")], pages) == ["b: should stand before a"]
    assert ledger.disorder([row("a", "z")], pages) == ["a: chapter z is not in the table of contents"]


@pytest.mark.parametrize(
    "text",
    [
        "It is 0.596 at layer 1.",
        "It is 0.596.",
        "In the table 0.596, in figure 2 0.596.",
        "(0.596)",
        "between 0.596–0.596",
        "It is −0.596",
        "**0.596**",
        "| 0.596 | 0.596 |",
        "about 59.6%",
        "about 59.6 %",
        "5.96e-1",
        "```{note}\nIt is 0.596.\n```",
        ":::{exercise}\n:label: e\n\nIt is 0.596.\n:::",
        "````{prf:theorem} It is 0.596\n:label: t\n```{note}\nx\n```\n````",
        "[0.596](https://example.org)",
        "Price \\$5 and 0.596 and \\$6",
    ],
)
def test_a_number_in_prose_must_be_printed(text):
    assert ledger.unsupported(notebook(markdown(text), code("", printed("0.7")))) != []
    assert ledger.unsupported(notebook(markdown(text), code("", printed("x=0.5961")))) == []


@pytest.mark.parametrize(
    "text",
    [
        "12 layers, 32 × 128 tokens",
        "`0.596`",
        "```python\nx = 0.596\n```",
        "~~~\n0.596\n~~~",
        "```{code-block} python\nx = 0.596\n```",
        "```{math}\n0.596\n```",
        "$x = 0.596$",
        "$$x = 0.596$$ (eq-x)",
        "$$\nx = 0.596\n$$",
        "\\begin{align}\n0.596\n\\end{align}",
        "{cite}`dong2021`, {eq}`e0.596`",
        "[paper](https://arxiv.org/abs/2103.03404)",
        "<https://example.org/0.596>",
        "https://example.org/0.596",
        "arXiv 2103.03404, arXiv:2103.03404v2",
        "Theorem 2.1, Theorems 2.2 and 2.3, Claim 3.1, section 3.2, Corollary 3.2",
        "Python 3.11, CC BY 4.0",
        "rc_lib v0.1.0",
        "```{figure} x.png\n:width: 0.596\n:name: f\nText.\n```",
        "<!-- 0.596 -->",
        '<span style="width:0.596em">x</span>',
        "(label-0.596)=",
    ],
)
def test_what_is_no_number_in_prose_is_left_alone(text):
    assert ledger.unsupported(notebook(markdown(text))) == []


@pytest.mark.parametrize(
    ("written", "output", "supported"),
    [
        ("0.596", "0.5963", True),
        ("0.596", "0.5957", True),
        ("0.596", "0.5953", False),
        ("0.596", "0.6", False),
        ("0.6", "0.596", True),
        ("0.60", "0.596", True),
        ("1e-3", "0.00104", True),
        ("1e-3", "0.0021", False),
        ("1.2e-16", "1.1999e-16", True),
        ("99.6%", "0.996", True),
        ("99.6%", "99.6 %", True),
        ("0.996", "99.6%", True),
        ("99.6%", "0.99", False),
        ("1.5", "15", False),
    ],
)
def test_printed_means_to_the_digits_written(written, output, supported):
    found = ledger.unsupported(notebook(markdown(f"It is {written} here."), code("", printed(output))))
    assert (found == []) == supported


def test_outputs_of_every_kind_count():
    html = {"output_type": "display_data", "data": {"text/html": '<td width="0.9">0.25</td>'}, "metadata": {}}
    plain = {"output_type": "execute_result", "data": {"text/plain": "0.5"}, "metadata": {}}
    cells = code("", html), code("", plain), code("", outcome("a", 0.125))
    assert ledger.unsupported(notebook(markdown("0.25, 0.5 and 0.125"), *cells)) == []
    assert len(ledger.unsupported(notebook(markdown("0.9"), *cells))) == 1


def test_rows_of_the_chapter_count():
    rows = [row(band=claims.Band("between", (0.15, 0.45)), statement="It was 0.607.", note="Seen 0.449.")]
    assert ledger.unsupported(notebook(markdown("0.15, 0.45, 0.607, 0.449")), rows) == []
    assert len(ledger.unsupported(notebook(markdown("0.15, 0.45, 0.607, 0.449")))) == 4


def test_captions_and_alt_texts_are_prose():
    cell = code("", figure={"caption": "Falls to 0.25."}, image={"alt": "falls to 0.75"})
    assert len(ledger.unsupported(notebook(cell))) == 2
