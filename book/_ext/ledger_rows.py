"""The ledger's rows with what the notebooks stored for them, by verdict, by work and by statement of the paper."""

import json
import re
from collections import Counter
from dataclasses import dataclass

from sphinx.errors import ExtensionError

from rc_lib import claims

VERDICTS = {
    "reproduced": "✓ reproduced",
    "partly": "◐ partly",
    "differs": "≠ differs",
    "ours": "+ ours",
}
# A work's authors and year, at the start of a source.
DATED = re.compile(r"^.*?\b(?:19|20)\d\d\b")
# What the paper says, in its order, and how a source begins that belongs to it.
STATEMENTS = {
    "Abstract: attention alone loses rank; skips and MLPs prevent it": r"abstract",
    "Section 2: one layer in formulas, paths by length": r"section 2$",
    "Theorem 2.1: a network is a sum over its paths": r"Theorem 2\.1",
    "Theorem 2.2: one head in each layer collapses doubly exponentially": r"Theorems? 2\.2|section 2, ",
    "Theorem 2.3: so do any number of heads": r"Theorem 2\.3",
    "Appendix: the proofs of both": r"appendix",
    "Section 3: skips keep rank; how many paths there are": r"section 3($|, picture)",
    "Claim 3.1: with skips, some weights never lose rank": r"Claim 3\.1",
    "Corollary 3.2: MLPs slow the collapse down": r"Corollary 3\.2",
    "Section 3: LayerNorm plays no role": r"section 3, LayerNorm",
    "Figure 2: BERT, ALBERT and XLNet, ablated": r"figure 2",
    "Figure 3: two arcs of a circle": r"figure 3",
    "Figure 4: short paths carry the answers": r"(section 4, )?figure 4",
}


@dataclass(frozen=True)
class Row:
    """A claim, what its notebook stored for it, and that chapter's title."""

    claim: claims.Claim
    values: tuple
    title: str


def group_of(claim):
    """Where a claim stands: the paper's by verdict, those of other works (dated), the book's own."""
    if claim.status == "ours":
        return "ours"
    return "others" if DATED.match(claim.source) else claim.status


def read(book):
    """Return the ledger's rows with their stored values; raise one error that lists all that is wrong."""
    try:
        ledger = claims.load(book / "claims.yml")
    except (ValueError, FileNotFoundError) as error:
        raise ExtensionError(
            f"scoreboard: the ledger cannot be read: {error}"
        ) from None
    chapters = {chapter: _chapter(book, chapter) for chapter in chapters_of(ledger)}
    rows, faults = [], []
    for claim in ledger.values():
        title, stored = chapters[claim.chapter]
        values = tuple(dict.fromkeys(stored.get(claim.id, ())))
        faults += _faults(claim, values)
        rows.append(Row(claim, values, title))
    if faults:
        raise ExtensionError("scoreboard: " + "\n  ".join(faults))
    return rows


def chapters_of(ledger):
    """The chapters that the ledger's rows name, each once."""
    return dict.fromkeys(claim.chapter for claim in ledger.values())


def _chapter(book, chapter):
    """Title and stored values of a chapter; neither if there is no such notebook."""
    file = book / f"{chapter}.ipynb"
    if not file.is_file():
        return chapter, {}
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    text = "\n".join(
        "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
    )
    heading = re.search(r"^# +(.+)$", text, re.MULTILINE)
    return heading[1].strip() if heading else chapter, claims.stored(file)


def _faults(claim, values):
    if not values:
        yield (
            f"claim {claim.id!r} has no stored value in book/{claim.chapter}.ipynb. Run its check there "
            f"(make execute NOTEBOOKS=book/{claim.chapter}.ipynb), or take the row out of claims.yml"
        )
    for value in values:
        if value not in claim.band:
            yield f"claim {claim.id!r}: stored value {value} is outside its band, {claim.band}"


def summary(rows):
    """One sentence for each group that has rows."""
    counts = Counter(group_of(row.claim) for row in rows)
    paper = sum(counts[group] for group in ("reproduced", "partly", "differs"))
    sentences = [
        f"{len(rows)} claims, each with a value that a notebook of this book measured.",
        f"{paper} are the paper's: {counts['reproduced']} reproduced, {counts['partly']} reproduced in part, "
        f"{counts['differs']} where ours differs.",
    ]
    if counts["others"]:
        sentences.append(f"{counts['others']} are other authors'.")
    return " ".join([*sentences, f"{counts['ours']} are this book's own."])


def works(rows):
    """The claims of other authors by work (authors and year), in the ledger's order."""
    found = {}
    for row in rows:
        if group_of(row.claim) == "others":
            found.setdefault(DATED.match(row.claim.source)[0], []).append(row)
    return found


def statements(rows):
    """The paper's claims by statement, in its order; a source that fits none is an error."""
    paper = [row for row in rows if group_of(row.claim) not in ("ours", "others")]
    found = {name: [] for name in STATEMENTS}
    for row in paper:
        fits = [n for n, form in STATEMENTS.items() if re.match(form, row.claim.source)]
        if not fits:
            raise ExtensionError(
                f"scoreboard: source {row.claim.source!r} of claim {row.claim.id!r} belongs to none of the "
                f"paper's statements; write it as another row does, or add to STATEMENTS"
            )
        found[fits[0]].append(row)
    return {name: rows for name, rows in found.items() if rows}


def verdict(rows):
    """One word for several claims together."""
    kinds = {row.claim.status for row in rows}
    if kinds == {"reproduced"}:
        return "✓ confirmed"
    return "≠ not reproduced" if kinds == {"differs"} else "◐ partly"
