"""What can be wrong with a rendered page, seen by a browser that has no network.

Each function looks for one kind of fault and returns a list of complaints; no complaint, no fault.
"""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import axe_playwright_python

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
LEVELS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
LOCAL = ("file:", "data:", "blob:", "about:")

# Hidden proofs and solutions count too: open everything that can be opened.
# Without their animation: a text that is still fading in has too little contrast, for a moment.
OPEN_ALL = """() => {
  const still = document.createElement("style");
  still.textContent = "*, *::before, *::after { animation: none !important; transition: none !important; }";
  document.head.append(still);
  document.querySelectorAll("details").forEach((e) => { e.open = true; });
  document.querySelectorAll(".toggle-hidden").forEach((e) => e.classList.remove("toggle-hidden"));
}"""

# Formulas that MathJax left, in any text that is not code; the book has no prices.
RAW_MATH = r"""() => {
  const left = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    if (node.parentElement.closest("script, style, code, pre, mjx-container, textarea")) continue;
    if (/\\\(|\\\[|\$|\\begin\{/.test(node.textContent)) left.push(node.textContent.trim().slice(0, 80));
  }
  return left;
}"""

IMAGES = """() => [...document.images]
  .map((i) => [i.getAttribute("alt") || "", i.naturalWidth, i.outerHTML.slice(0, 120)])"""

WIDE = """() => {
  const width = document.documentElement.clientWidth;
  if (Math.max(document.documentElement.scrollWidth, document.body.scrollWidth) <= width) return [];
  const clipped = (e) => e.closest("pre, .highlight, mjx-container, .math, [style*='overflow']");
  return [...document.querySelectorAll("body *")]
    .filter((e) => e.getBoundingClientRect().right > width + 1 && !clipped(e.parentElement))
    .slice(0, 5).map((e) => e.outerHTML.slice(0, 120)).concat(["the page is wider than " + width + " px"]);
}"""


@dataclass
class Log:
    """What the browser reported while the page was open."""

    console: list = field(default_factory=list)
    requests: list = field(default_factory=list)


@contextlib.contextmanager
def visit(browser, file, theme="light", width=1280, **options):
    """Open a file in a fresh browser context without network; yield the settled page and its log."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=theme, offline=True, **options
    )
    context.add_init_script(
        f"localStorage.setItem('mode', '{theme}'); localStorage.setItem('theme', '{theme}');"
    )
    log, page = Log(), context.new_page()
    page.on("console", lambda m: log.console.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: log.console.append(str(error)))
    page.on("requestfailed", lambda r: log.requests.append(f"failed: {r.url[:200]}"))
    page.on(
        "request",
        lambda r: None if r.url.startswith(LOCAL) else log.requests.append(f"foreign: {r.url[:200]}"),
    )
    page.on("websocket", lambda socket: log.requests.append(f"foreign: {socket.url}"))
    try:
        page.goto(file.as_uri())
        page.evaluate("async () => { if (window.MathJax?.startup) await MathJax.startup.promise; }")
        page.evaluate("() => document.fonts.ready.then(() => true)")
        yield page, log
    finally:
        context.close()


def noise(page, log):
    """Console errors and warnings, failed requests, requests to another host."""
    return log.console + log.requests


def untypeset(page):
    """Mathematics that MathJax did not set."""
    left = [f"raw mathematics: {text}" for text in page.evaluate(RAW_MATH)]
    formulas, typeset = page.locator(".math").count(), page.locator("mjx-container").count()
    errors = page.locator("mjx-merror").count()
    if formulas > typeset:
        left.append(f"{formulas} formulas, {typeset} typeset")
    return left + ([f"{errors} formulas with an error"] if errors else [])


def undescribed(page):
    """Images without a description, and images that did not load."""
    images = page.evaluate(IMAGES)
    lacking = [f"no alt text: {html}" for alt, _, html in images if not alt.strip()]
    return lacking + [f"not loaded: {html}" for _, width, html in images if not width]


def too_wide(page):
    """Whatever makes the page scroll sideways."""
    return page.evaluate(WIDE)


def barriers(page):
    """Violations of WCAG 2.2, levels A and AA, that axe-core finds.

    Text in the very colour of its background is a fault too; axe-core leaves that one for a person to judge.
    """
    page.evaluate(AXE)
    found = page.evaluate("(tags) => axe.run(document, { runOnly: tags, preload: false })", LEVELS)
    nodes = [(rule["id"], node) for rule in found["violations"] for node in rule["nodes"]]
    unsure = [
        node for rule in found["incomplete"] if rule["id"] == "color-contrast" for node in rule["nodes"]
    ]
    nodes += [("unseen", node) for node in unsure if _ratio(node) == 1]
    return [f"{rule}: {node['html'][:160]} ({node['failureSummary'][:300]})" for rule, node in nodes]


def _ratio(node):
    return next((check["data"].get("contrastRatio") for check in node["any"] if check["data"]), None)


def dead_controls(page):
    """Controls that do not move by mouse or keyboard, or whose figure stays as it is."""
    complaints = []
    for figure in page.locator(".rc-explore").all():
        for control in figure.locator("input, select").all():
            name = figure.locator(f"label[for='{control.get_attribute('id')}']").inner_text()
            if not control.is_visible():
                complaints.append(f"{name}: the control is not shown")
                continue
            pictures, heard = _moved(page, figure, control)
            if not heard:
                complaints.append(f"{name}: its text did not follow the keyboard")
            if len(pictures) < 2:
                complaints.append(f"{name}: the figure's pixels did not change")
    return complaints


def _moved(page, figure, control):
    """Move a control by mouse and by keyboard; return the pictures seen, and whether its text followed."""
    kind = control.get_attribute("type") or "select"
    picture = figure.locator("img")
    picture.scroll_into_view_if_needed()
    start = control.evaluate("e => [e.value, e.checked]")
    pictures, texts = {picture.screenshot()}, {_text(figure, control)}
    if kind == "range":
        _drag(page, control)
        pictures.add(picture.screenshot())
    control.focus()
    for key in {"range": ["Home", "ArrowRight", "End"], "checkbox": ["Space"]}.get(
        kind, ["ArrowDown", "ArrowUp", "End"]
    ):
        control.press(key)
        pictures.add(picture.screenshot())
        texts.add(_text(figure, control))
    control.evaluate(
        "(e, [value, checked]) => { e.value = value; e.checked = checked;"
        " e.dispatchEvent(new Event('input', { bubbles: true })); }",
        start,
    )
    return pictures, len(texts) > 1


def _text(figure, control):
    if control.evaluate("e => e.tagName") == "SELECT":
        return control.evaluate("e => e.selectedOptions[0].text")
    return figure.locator(f"output[for='{control.get_attribute('id')}']").inner_text()


def _drag(page, control):
    """Drag the handle to the far end of its track."""
    low, high, value = control.evaluate("e => [+e.min, +e.max, +e.value]")
    control.scroll_into_view_if_needed()
    box = control.bounding_box()
    place = (value - low) / (high - low)
    inner, y = box["width"] - 16, box["y"] + box["height"] / 2  # the handle is 16 px wide
    page.mouse.move(box["x"] + 8 + inner * place, y)
    page.mouse.down()
    page.mouse.move(box["x"] + (4 if place > 0.5 else box["width"] - 4), y, steps=6)
    page.mouse.up()
