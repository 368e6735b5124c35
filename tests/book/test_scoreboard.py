"""The scoreboard shows every row once, with the value that its notebook stores, or stops the build."""

import json
import re
import sys
import warnings
from html import unescape

import pytest
from sphinx.errors import ExtensionError

from rc_lib import claims

from .conftest import ROOT

sys.path.insert(0, str(ROOT / "book" / "_ext"))

import ledger_rows
import scoreboard

LEDGER = """
- {id: one+a, kind: theorem, source: Theorem 9, statement: It <falls> & falls., chapter: part/x,
   band: {below: 1.0e-10}, status: reproduced, unit: nats}
- {id: two, kind: figure, source: figure 2, statement: It stays., chapter: part/x,
   band: {between: [0.2, 0.4]}, status: differs, note: Barely.}
- {id: three, kind: number, source: Someone et al. 2016, statement: It is so., chapter: part/x,
   band: {is: true}, status: reproduced}
- {id: four, kind: number, source: ours, statement: It is four., chapter: y,
   band: {equals: 4, within: 0}, status: ours}
"""
STORED = {"part/x": {"one+a": 2.5e-11, "two": 0.3, "three": True}, "y": {"four": 4}}
PAGE = "# Board\n\n" + "\n".join(
    f"## {group}\n\n```{{scoreboard}} {group}\n```\n" for group in ("summary", *scoreboard.GROUPS)
)
CONFIGURATION = """
extensions = ["myst_parser", "scoreboard"]
exclude_patterns = ["part", "y.ipynb"]
html_theme = "basic"
"""


def notebook(title, values):
    """A notebook as the checks leave it: a title, and an output for each outcome."""
    outputs = [
        {"output_type": "display_data", "data": {}, "metadata": {"rc_lib": {"claim": id, "value": value}}}
        for id, value in values.items()
    ]
    cells = [
        {"cell_type": "markdown", "source": [f"# {title}\n", "\n", "Text."], "metadata": {}},
        {"cell_type": "code", "source": "", "outputs": outputs, "metadata": {}},
    ]
    return json.dumps({"cells": cells})


def write(book, ledger=LEDGER, stored=STORED):
    (book / "part").mkdir(exist_ok=True)
    (book / "claims.yml").write_text(ledger, encoding="utf-8")
    for chapter, values in stored.items():
        (book / f"{chapter}.ipynb").write_text(notebook(f"Title of {chapter}", values), encoding="utf-8")
    (book / "index.md").write_text(PAGE, encoding="utf-8")
    (book / "conf.py").write_text(CONFIGURATION, encoding="utf-8")
    return book


def changed(**values):
    """What the notebooks store, with other values in the first; ``None`` leaves one out."""
    x = {id: value for id, value in (STORED["part/x"] | values).items() if value is not None}
    return STORED | {"part/x": x}


def build(book):
    """Build the page with Sphinx, in this process; return the HTML and which pages were made anew."""
    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace, patch_docutils

    read = []
    with warnings.catch_warnings(), patch_docutils(), docutils_namespace():
        warnings.simplefilter("ignore")  # other projects' deprecations
        app = Sphinx(book, book, book / "out", book / "trees", "html", status=None, warningiserror=True)
        app.connect("source-read", lambda app, name, source: read.append(name))
        app.build()
    return (book / "out" / "index.html").read_text(encoding="utf-8"), read


def text(html):
    """What a reader sees of some HTML, its spaces made one."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def cells(html):
    """The rows of a page by claim: the text of each cell, without tags."""
    rows = re.findall(r'<tr[^>]* id="row-([^"]+)"[^>]*>(.*?)</tr>', html, re.DOTALL)
    plain = [(id, re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row, re.DOTALL)) for id, row in rows]
    return [(id, [text(c) for c in found]) for id, found in plain]


# The maker of the tables


@pytest.mark.parametrize(
    ("band", "words"),
    [
        (claims.Band("below", (1e-10,)), "below 10⁻¹⁰"),
        (claims.Band("above", (-0.5,)), "above −0.5"),
        (claims.Band("between", (0.2, 3e-7)), "from 0.2 to 3 × 10⁻⁷"),
        (claims.Band("equals", (3, 0.001)), "within 0.001 of 3"),
        (claims.Band("equals", (145, 0)), "exactly 145"),
        (claims.Band("is", (True,)), "yes"),
        (claims.Band("is", (False,)), "no"),
        (claims.Band("below", (-2.5e12,)), "below −2.5 × 10¹²"),
    ],
)
def test_bands_are_said_in_words(band, words):
    assert scoreboard.in_words(band) == words


def test_rows_are_grouped_and_counted(tmp_path):
    rows = scoreboard.read(write(tmp_path))
    groups = [scoreboard.group_of(row.claim) for row in rows]
    assert groups == ["reproduced", "differs", "others", "ours"]
    assert [row.title for row in rows] == ["Title of part/x"] * 3 + ["Title of y"]
    counts = scoreboard.summary(rows)
    assert counts.startswith("4 claims,")
    assert "2 are the paper's: 1 reproduced, 0 reproduced in part, 1 where ours differs." in counts
    assert counts.endswith("1 are other authors'. 1 are this book's own.")


@pytest.mark.parametrize(
    ("stored", "ledger", "message"),
    [
        (changed(two=None), LEDGER, r"'two' has no stored value in book/part/x\.ipynb\. Run its check"),
        (changed(two=0.5), LEDGER, "'two': stored value 0.5 is outside its band, 0.2 to 0.4"),
        (STORED, LEDGER.replace("chapter: y", "chapter: z"), r"'four' has no stored value in book/z\.ipynb"),
        (STORED, LEDGER.replace("kind: figure", "kind: rumour"), "cannot be read.*kind is 'rumour'"),
        (STORED, LEDGER.replace("status: ours", "status: [ours"), "cannot be read.*no YAML"),
    ],
)
def test_what_is_missing_or_broken_stops_it(tmp_path, stored, ledger, message):
    with pytest.raises(ExtensionError, match=re.compile(message, re.DOTALL)):
        scoreboard.read(write(tmp_path, ledger, stored))


def test_all_faults_are_named_at_once(tmp_path):
    with pytest.raises(ExtensionError, match=re.compile("'one.a'.*'three'", re.DOTALL)):
        scoreboard.read(write(tmp_path, stored=changed(**{"one+a": None, "three": None})))


def test_every_tick_gets_an_id_once():
    tick = '<div class="rc-claim" style="x">It <small>check <code>{}</code></small></div>'
    context = {"body": tick.format("a+b") + tick.format("c") + tick.format("c")}
    scoreboard.anchors(None, "x", "page.html", context, None)
    assert re.findall(r'<div(?: id="([^"]*)")? class="rc-claim"', context["body"]) == [
        "claim-a+b",
        "claim-c",
        "",
    ]


def test_works_are_gathered_with_one_verdict_each(tmp_path):
    other = """
- {id: five, kind: number, source: "Someone et al. 2016, theorem 2", statement: So too., chapter: y,
   band: {is: true}, status: differs}
- {id: six, kind: number, source: Else 1999, statement: It was., chapter: y,
   band: {is: true}, status: differs}
"""
    stored = STORED | {"y": {"four": 4, "five": True, "six": True}}
    found = scoreboard.works(scoreboard.read(write(tmp_path, LEDGER + other, stored)))
    assert {work: [row.claim.id for row in rows] for work, rows in found.items()} == {
        "Someone et al. 2016": ["three", "five"],
        "Else 1999": ["six"],
    }
    words = [scoreboard.verdict(rows) for rows in (found["Someone et al. 2016"][:1], *found.values())]
    assert words == ["✓ confirmed", "◐ partly", "≠ not reproduced"]

    page = tmp_path / "index.md"
    page.write_text(page.read_text(encoding="utf-8") + "\n```{scoreboard} works\n```\n", encoding="utf-8")
    lines = re.findall(r"<tr[^>]*>.*?</tr>", build(tmp_path)[0].split("2 works")[1], re.DOTALL)
    assert [text(line) for line in lines[1:]] == [
        "Someone et al. 2016 ◐ partly ✓ reproduced: 1; ≠ differs: 1 Title of part/x Title of y",
        "Else 1999 ≠ not reproduced ≠ differs: 1 Title of y",
    ]
    page.write_text("# Works\n\n```{scoreboard} works\n:chapters: part/x\n```\n", encoding="utf-8")
    html = build(tmp_path)[0]
    assert "Someone et al. 2016" in html
    assert "Else 1999" not in html


def test_statements_of_the_paper_are_gathered_in_its_order(tmp_path):
    ledger = LEDGER.replace("Theorem 9", "Theorem 2.3")
    found = ledger_rows.statements(scoreboard.read(write(tmp_path, ledger)))
    gathered = {name.partition(":")[0]: [row.claim.id for row in rows] for name, rows in found.items()}
    assert list(gathered.items()) == [("Theorem 2.3", ["one+a"]), ("Figure 2", ["two"])]

    page = tmp_path / "index.md"
    page.write_text("# Paper\n\n```{scoreboard} statements\n```\n", encoding="utf-8")
    lines = re.findall(r"<tr[^>]*>.*?</tr>", build(tmp_path)[0], re.DOTALL)
    assert [text(line).partition(": ")[2] for line in lines[1:]] == [
        "so do any number of heads ✓ confirmed ✓ reproduced: 1 Title of part/x",
        "BERT, ALBERT and XLNet, ablated ≠ not reproduced ≠ differs: 1 Title of part/x",
    ]


def test_a_source_that_the_paper_has_not_stops_the_build(tmp_path):
    with pytest.raises(ExtensionError, match=r"'Theorem 9' of claim 'one.a' belongs to none"):
        ledger_rows.statements(scoreboard.read(write(tmp_path)))


# A page made of it


def test_a_page_is_made_and_made_anew(tmp_path):
    html, _ = build(write(tmp_path))
    rows = cells(html)
    assert [id for id, _ in rows] == ["one+a", "two", "three", "four"]
    claim, measured, verdict, where = rows[0][1]
    assert claim == "It <falls> & falls. Theorem 9 (theorem)"
    assert measured == "2.5 × 10⁻¹¹ nats accepted: below 10⁻¹⁰ nats"
    assert verdict == "✓ reproduced"
    assert where == "Title of part/x"
    assert "Barely." in rows[1][1][0]
    assert 'href="part/x.html#claim-one+a"' in html
    assert html.count('role="table"') == 4
    assert "None." in html  # no row is reproduced in part

    assert build(tmp_path)[1] == []  # nothing changed
    (tmp_path / "part/x.ipynb").write_text(notebook("Other", changed(two=0.25)["part/x"]), encoding="utf-8")
    html, read = build(tmp_path)
    assert read == ["index"]
    assert cells(html)[1][1][1].split()[0] == "0.25"
    (tmp_path / "claims.yml").write_text(LEDGER.replace("It stays.", "It stood."), encoding="utf-8")
    assert "It stood." in build(tmp_path)[0]


def test_a_missing_value_stops_the_build(tmp_path):
    with pytest.raises(ExtensionError, match="'two' has no stored value"):
        build(write(tmp_path, stored=changed(two=None)))


# The book's pages


def test_every_later_work_in_the_table_is_cited_beside_it():
    page = (ROOT / "book/beyond/after_the_paper.md").read_text(encoding="utf-8")
    chapters = re.search(r":chapters: (.*)", page)[1].split()
    rows = [row for row in scoreboard.read(ROOT / "book") if row.claim.chapter in chapters]
    cited = ",".join(re.findall(r"\{cite:t\}`([^`]+)`", page)).split(",")
    authors = [re.split(r" et al| and | (?=\d)", work)[0] for work in ledger_rows.works(rows)]
    names = [author.replace(" ", "").lower() for author in authors]
    assert len(names) > 15
    assert [name for name in names if not any(key.startswith(name) for key in cited)] == []


@pytest.mark.page
def test_the_book_shows_every_row_once_with_its_stored_value(site):
    shown = cells((site / "scoreboard.html").read_text(encoding="utf-8"))
    ledger = claims.load()
    assert sorted(id for id, _ in shown) == sorted(ledger)
    values = {chapter: claims.stored(ROOT / "book" / f"{chapter}.ipynb") for chapter in _chapters(ledger)}
    for id, row in shown:
        stored = values[ledger[id].chapter][id]
        measured = row[1].split("accepted:")[0]
        assert all(scoreboard._number(value) in measured for value in stored), id
        assert ledger[id].statement in row[0], id


@pytest.mark.page
def test_every_link_of_the_book_s_scoreboard_arrives(site):
    html = (site / "scoreboard.html").read_text(encoding="utf-8")
    links = re.findall(r'href="([^"#]+)#(claim-[^"]+)"', html)
    assert len(set(links)) == len(claims.load())
    pages = {page: (site / page).read_text(encoding="utf-8") for page, _ in links}
    assert [link for link in links if f'id="{link[1]}"' not in pages[link[0]]] == []


def _chapters(ledger):
    return dict.fromkeys(claim.chapter for claim in ledger.values())
