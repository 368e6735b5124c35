"""Where ledger, notebooks and prose disagree. Each function returns a list of complaints."""

import ast
import re
from itertools import pairwise

NUMBER = re.compile(
    r"(?<![\w.])(?P<digits>\d[\d,]*(?:\.\d+)?(?:[eE][-+−]?\d+)?)(?P<percent>\s?%)?(?!\w|\.\d)"
)
SCALES = {False: (1,), True: (1, 100)}  # a printed 99.6% is 99.6 and 0.996
# Names that end in a number (never one that starts with 0): no measurement.
NAMES = re.compile(
    r"(?i)\b(?:theorem|lemma|claim|corollary|proposition|definition|remark|section|chapter|appendix|figure|fig\."
    r"|table|equation|eq\.|exercise|algorithm|python|version|torch|transformers|cc by(?:-sa)?|wcag|arxiv)s?"
    r"[\s:~]*v?[1-9]\d*(?:\.\d+)*(?:(?:,| and| or| to|–)\s*[1-9]\d*(?:\.\d+)+)*"
)
TEXT_DIRECTIVES = (
    "code-cell",
    "code",
    "code-block",
    "math",
    "bibliography",
    "literalinclude",
    "mermaid",
    "raw",
)


def checked(notebook):
    """Ids of the checks that the notebook's code calls with a literal id."""
    ids = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            source = "\n".join(x for x in _text(cell["source"]).splitlines() if not re.match(r"\s*[%!]", x))
            with_magics = re.search(r"^\s*[%!]", _text(cell["source"]), re.MULTILINE)
            try:
                tree = ast.parse(source)
            except SyntaxError:
                if with_magics:  # a block that held nothing but a magic is empty now
                    continue
                raise
            ids += [_literal(node) for node in ast.walk(tree) if _literal(node) is not None]
    return ids


def _literal(node):
    if not isinstance(node, ast.Call) or getattr(node.func, "id", getattr(node.func, "attr", "")) != "check":
        return None
    first = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "id"), None)
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None


def stored(notebook):
    """Pairs (id, value) of the checks whose outcome the notebook stores."""
    found = [o.get("metadata", {}).get("rc_lib", {}) for o in _outputs(notebook)]
    return [(item["claim"], item["value"]) for item in found if "claim" in item]


def disagreements(claims, notebooks):
    """Rows that no notebook checks, checks that no row knows, values outside bands, and wrong chapters.

    ``claims`` maps ids to rows, ``notebooks`` maps chapters (paths without extension) to notebooks.
    """
    complaints, proved = [], set()
    for chapter, notebook in notebooks.items():
        values = stored(notebook)
        proved |= {id for id, _ in values}
        for id in dict.fromkeys([*checked(notebook), *(id for id, _ in values)]):
            complaints += _of_check(claims, chapter, id, [v for i, v in values if i == id])
    complaints += [f"{id}: no notebook stores a check of this row" for id in claims if id not in proved]
    return complaints


def _of_check(claims, chapter, id, values):
    if id not in claims:
        return [f"{chapter}: checks {id!r}, which the ledger does not know"]
    claim = claims[id]
    complaints = [] if values else [f"{chapter}: calls check({id!r}) but stores no outcome of it"]
    if claim.chapter != chapter:
        complaints.append(f"{chapter}: checks {id!r}, which the ledger gives to {claim.chapter}")
    return complaints + [f"{id}: stored {v} is outside {claim.band}" for v in values if v not in claim.band]


def disorder(claims, pages):
    """Rows whose chapter is no page, or stands before a row of an earlier page."""
    unknown = [
        f"{c.id}: chapter {c.chapter} is not in the table of contents"
        for c in claims
        if c.chapter not in pages
    ]
    places = [(pages.index(c.chapter), c) for c in claims if c.chapter in pages]
    misplaced = [(a, b) for (i, a), (j, b) in pairwise(places) if j < i]
    return unknown + [f"{b.id}: should stand before {a.id}" for a, b in misplaced]


# Numbers in prose


def prose(markdown):
    """What a reader of a Markdown cell reads as prose: no code, mathematics, roles, links or options."""
    text = re.sub(r"<!--.*?-->", " ", markdown, flags=re.DOTALL)
    text = _without_blocks(text)
    text = re.sub(r"(\$\$)(?:.|\n)*?\1(?:\s*\([\w:-]+\))?", " ", text)
    text = re.sub(r"\\begin\{(\w+\*?)\}(?:.|\n)*?\\end\{\1\}", " ", text)
    text = re.sub(r"(?<![\\$])\$(?!\s)(?:\\.|[^$\\])+?\$", " ", text)
    text = re.sub(r"\{[\w:+-]+\}(`+)(?:.|\n)*?\1", " ", text)
    text = re.sub(r"(`+)(?:.|\n)*?\1", " ", text)
    text = re.sub(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^()\s]*(?:\([^()]*\)[^()\s]*)*\)", r" \1 ", text)
    text = re.sub(r"<[^>\s][^>]*>|\bhttps?://\S+|\b10\.\d{4,}/\S+|\{[#.%][^}\n]*\}", " ", text)
    text = re.sub(r"^\([\w:.-]+\)=\s*$", " ", text, flags=re.MULTILINE)
    return NAMES.sub(" ", text)


def _without_blocks(text):
    """Drop fenced code; of directives keep the body without its option lines, unless it is code too."""
    kept, fences = [], []  # fences: (marker, whether its content is dropped)
    options = False
    for line in text.splitlines():
        fence = re.match(r"\s*(`{3,}|~{3,}|:{3,})\s*(?:\{([\w:-]+)\})?(.*)$", line)
        dropped = any(drop for _, drop in fences)
        if fence and fences and not fence[2] and not fence[3].strip() and fence[1].startswith(fences[-1][0]):
            fences.pop()
        elif fence and not dropped:
            fences.append((fence[1], not fence[2] or fence[2] in TEXT_DIRECTIVES))
            kept.append(fence[3] if fence[2] and fence[2] not in TEXT_DIRECTIVES else "")
            options = True
            continue
        elif not dropped and not (options and re.match(r"\s*:[\w-]+:", line)):
            kept.append(line)
        options = options and bool(re.match(r"\s*:[\w-]+:", line))
    return "\n".join(kept)


def numbers(text):
    """Every number of a text: as written, its size, and half a unit of its last digit."""
    found = []
    for match in NUMBER.finditer(text):
        digits = match["digits"].rstrip(",").replace(",", "").replace("−", "-")
        mantissa, _, exponent = digits.lower().partition("e")
        decimals = len(mantissa.partition(".")[2])
        half = 0.5 * 10.0 ** (int(exponent or 0) - decimals)
        found.append((match[0].strip(), float(digits), half, bool(match["percent"])))
    return found


def unsupported(notebook, rows=()):
    """Decimal numbers and percentages in prose that no output prints to their digits and no row contains."""
    known = _known(notebook, rows)
    complaints = []
    for place, text in _prose_of(notebook):
        for written, value, half, percent in numbers(text):
            if not percent and "." not in written and "e" not in written.lower():
                continue  # a whole number counts things
            sizes = [(value, half), (value / 100, half / 100)] if percent else [(value, half)]
            if not any(abs(p - v) <= h * (1 + 1e-9) for v, h in sizes for p in known):
                complaints.append(f"{place}: {written} is printed by no output and stands in no row")
    return complaints


def _prose_of(notebook):
    for index, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "markdown":
            yield f"cell {index}", prose(_text(cell["source"]))
        options = cell.get("metadata", {}).get("mystnb", {})
        for text in (options.get("figure", {}).get("caption"), options.get("image", {}).get("alt")):
            if text:
                yield f"cell {index}, caption or alt text", prose(text)


def _known(notebook, rows):
    texts = [text for output in _outputs(notebook) for text in _texts(output)]
    for row in rows:
        texts += [row.statement, row.note, row.source]
    printed = [(value, percent) for text in texts for _, value, _, percent in numbers(text)]
    known = {value / scale for value, percent in printed for scale in SCALES[percent]}
    known |= {abs(float(v)) for _, v in stored(notebook) if not isinstance(v, bool)}
    return known | {abs(float(x)) for row in rows if row.band.kind != "is" for x in row.band.numbers}


def _texts(output):
    data = output.get("data", {})
    yield _text(output.get("text", ""))
    yield _text(data.get("text/plain", ""))
    yield re.sub(r"<style.*?</style>|<[^>]*>", " ", _text(data.get("text/html", "")), flags=re.DOTALL)
    yield _text(data.get("text/markdown", ""))
    yield _text(data.get("text/latex", ""))


def _outputs(notebook):
    return [output for cell in notebook["cells"] for output in cell.get("outputs", [])]


def _text(source):
    return "".join(source) if isinstance(source, list) else source
