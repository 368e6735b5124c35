"""Sphinx extension: the scoreboard, made from the ledger and from what the notebooks stored.

``{scoreboard} GROUP`` gives one group of the ledger's rows as tables, ``summary`` the counts of all groups,
``statements`` one line for each statement of the paper and ``works`` one for each work of other authors (with
``:chapters:``, of those that these chapters check). Every row shows the value that its chapter's notebook stores.
A row without such a value stops the build.
"""

import re
from collections import Counter
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from ledger_rows import (
    VERDICTS,
    chapters_of,
    group_of,
    read,
    statements,
    summary,
    verdict,
    works,
)
from sphinx.errors import NoUri
from sphinx.util.docutils import SphinxDirective

from rc_lib import claims

COLUMNS = ("Claim", "Measured here", "Verdict", "Checked in")
GATHERED = ("Verdict", "Its claims here", "Checked in")
# A group, and whether its rows stand in one table or in one for each chapter.
GROUPS = {
    "reproduced": False,
    "partly": False,
    "differs": False,
    "others": True,
    "ours": True,
}


def in_words(band):
    """The values that a band accepts, in words."""
    first, last = (_number(x) for x in (band.numbers[0], band.numbers[-1]))
    return {
        "below": f"below {first}",
        "above": f"above {first}",
        "between": f"from {first} to {last}",
        "equals": f"within {last} of {first}"
        if band.numbers[-1]
        else f"exactly {first}",
        "is": first,
    }[band.kind]


SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _number(value):
    """A value as the ticks show it, with powers of ten written out and a true minus sign."""
    text = claims.format_value(value)
    if isinstance(value, bool):
        return text
    mantissa, _, exponent = text.replace("-", "−").partition("e")
    if not exponent:
        return mantissa
    power = "10" + str(int(exponent.replace("−", "-"))).translate(SUPERSCRIPTS)
    return power if mantissa == "1" else f"{mantissa} × {power}"


class html_element(nodes.General, nodes.Element):
    """An HTML element that docutils has no node for; its text is searched like any other."""


def element(tag, *children, **attributes):
    """An element with text or nodes in it; ``classes`` and ``ids`` are lists, other attributes are HTML's."""
    lists = {key: attributes.pop(key, []) for key in ("classes", "ids")}
    node = html_element("", **lists)
    node["tag"] = tag
    node["html"] = {key.replace("_", "-"): value for key, value in attributes.items()}
    node += [nodes.Text(c) if isinstance(c, str) else c for c in children]
    return node


def visit_html(translator, node):
    """Open the element."""
    translator.body.append(
        translator.starttag(node, node["tag"], suffix="", **node["html"])
    )


def depart_html(translator, node):
    """Close the element."""
    translator.body.append(f"</{node['tag']}>")


def leave_out(translator, node):
    """Other formats than HTML have no scoreboard."""
    raise nodes.SkipNode


def table(rows, caption, link):
    """A table of rows; ``link(row)`` is the address of a row's check, or ``None``.

    The roles say what the tags say: a narrow screen shows rows as cards, and tables that are displayed as
    blocks lose their meaning otherwise.
    """
    return _board(COLUMNS, caption, [_tr(row, link(row)) for row in rows])


def gathered_table(found, heading, caption, link):
    """A table with a line for each name in ``found``, its rows taken together; ``link(row)`` as for ``table``."""
    lines = []
    for name, rows in found.items():
        counts = Counter(VERDICTS[row.claim.status] for row in rows)
        cells = (
            [element("strong", verdict(rows))],
            [
                "; ".join(
                    f"{word}: {count}".replace(" ", "\u00a0")
                    for word, count in counts.items()
                )
            ],
            [_where(row, link(row)) for row in _first_of_each_chapter(rows)],
        )
        lines.append(_line([name], GATHERED, cells))
    return _board((heading, *GATHERED), caption, lines, "rc-gathered")


def _first_of_each_chapter(rows):
    first = {}
    for row in rows:
        first.setdefault(row.claim.chapter, row)
    return first.values()


def _board(columns, caption, lines, *classes):
    head = [
        element("th", name, scope="col", role="columnheader", classes=[f"rc-{i}"])
        for i, name in enumerate(columns)
    ]
    return element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *head, role="row"), role="rowgroup"),
        element("tbody", *lines, role="rowgroup"),
        role="table",
        classes=["rc-board", *classes],
    )


def _line(heading, names, cells, **attributes):
    return element(
        "tr",
        element("th", *heading, scope="row", role="rowheader"),
        *(
            element("td", *cell, role="cell", data_label=name)
            for name, cell in zip(names, cells, strict=True)
        ),
        role="row",
        **attributes,
    )


def _where(row, address):
    """The chapter's title, with a link to the row's check if there is an address."""
    if not address:
        return nodes.inline("", row.title)
    where = nodes.paragraph(
        "", "", nodes.reference("", row.title, refuri=address, internal=True)
    )
    where["classes"].append("rc-where")
    return where


def _tr(row, address):
    claim = row.claim
    source = "this book" if claim.source == "ours" else claim.source
    parts = [element("small", f"{source} ({claim.kind})", classes=["rc-source"])]
    if claim.note:
        parts.append(element("small", claim.note, classes=["rc-note"]))
    unit = f" {claim.unit}" if claim.unit else ""
    value = ", ".join(_number(value) for value in row.values) + unit
    accepted = element("small", f"accepted: {in_words(claim.band)}{unit}")
    cells = (
        [element("strong", value), accepted],
        [VERDICTS[claim.status]],
        [_where(row, address)],
    )
    return _line(
        [claim.statement, *parts],
        COLUMNS[1:],
        cells,
        ids=[f"row-{claim.id}"],
        classes=[f"rc-{claim.status}"],
    )


class Scoreboard(SphinxDirective):
    """``{scoreboard} GROUP``."""

    required_arguments = 1
    option_spec: ClassVar = {"chapters": str.split}

    def run(self):
        """Return the tables of the group, or the summary."""
        group = self.arguments[0]
        known = ("summary", "statements", "works", *GROUPS)
        if group not in known:
            raise self.error(
                f"scoreboard: no group {group!r}; there are {', '.join(known)}"
            )
        book = Path(self.env.srcdir)
        self._depend(book)
        rows = read(book)
        if group == "summary":
            return [nodes.paragraph("", summary(rows))]
        if group == "works":
            chapters = self.options.get("chapters", [r.claim.chapter for r in rows])
            found = works([row for row in rows if row.claim.chapter in chapters])
            caption = f"{len(found)} works"
            return [gathered_table(found, "Work", caption, self._link)]
        if group == "statements":
            caption = "The paper, statement by statement"
            return [gathered_table(statements(rows), "Statement", caption, self._link)]
        return self._tables(
            [row for row in rows if group_of(row.claim) == group], group
        )

    def _depend(self, book):
        """Make the page anew when the ledger or a notebook changes."""
        self.env.note_dependency(str(book / "claims.yml"))
        try:
            ledger = claims.load(book / "claims.yml")
        except (ValueError, FileNotFoundError):
            return
        for chapter in chapters_of(ledger):
            self.env.note_dependency(str(book / f"{chapter}.ipynb"))

    def _tables(self, rows, group):
        if not rows:
            return [nodes.paragraph("", "None.")]
        if not GROUPS[group]:
            return [table(rows, _counted(rows), self._link)]
        chapters = dict.fromkeys(row.claim.chapter for row in rows)
        parts = [
            [r for r in rows if r.claim.chapter == chapter] for chapter in chapters
        ]
        return [
            table(part, f"{part[0].title}: {_counted(part)}", self._link)
            for part in parts
        ]

    def _link(self, row):
        try:
            page = self.env.app.builder.get_relative_uri(
                self.env.docname, row.claim.chapter
            )
        except NoUri:
            return None
        return f"{page}#claim-{row.claim.id}"


def _counted(rows):
    return f"{len(rows)} claim{'s' if len(rows) > 1 else ''}"


TICK = re.compile(
    r'<div class="rc-claim"(?=(?:(?!</div>).)*?check <code>([^<]+)</code>)', re.DOTALL
)


def anchors(app, pagename, templatename, context, doctree):
    """Give every tick on a page an id, so that the scoreboard can point at it."""
    seen = set()

    def named(match):
        if match[1] in seen:
            return match[0]
        seen.add(match[1])
        return f'<div id="claim-{match[1]}" class="rc-claim"'

    if "rc-claim" in context.get("body", ""):
        context["body"] = TICK.sub(named, context["body"])


def setup(app):
    """Connect to Sphinx."""
    others = ("latex", "text", "man", "texinfo")
    app.add_node(
        html_element,
        html=(visit_html, depart_html),
        **dict.fromkeys(others, (leave_out, None)),
    )
    app.add_directive("scoreboard", Scoreboard)
    app.connect("html-page-context", anchors)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
