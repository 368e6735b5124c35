"""Every rendered page, opened from the file system in headless Chromium with the network off."""

import matplotlib
import pytest
import yaml

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from rc_lib import explore, explore_page

from . import browser as look
from .conftest import ROOT
from .toc import named

pytestmark = pytest.mark.page


PAGES = named(yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8")))


def test_the_table_of_contents_names_pages():
    assert PAGES[0] == "intro"
    assert len(set(PAGES)) == len(PAGES)


@pytest.mark.parametrize("name", [*PAGES, "search", "genindex"])
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_page_has_no_fault(browser, site, name, theme, width):
    with look.visit(browser, site / f"{name}.html", theme, width) as (page, log):
        page.evaluate(look.OPEN_ALL)
        faults = look.untypeset(page) + look.undescribed(page) + look.too_wide(page) + look.barriers(page)
        shown = page.evaluate("document.documentElement.dataset.theme")
        assert look.noise(page, log) + faults == []
        assert shown == theme


@pytest.mark.parametrize("name", PAGES)
def test_every_control_moves_its_figure(browser, site, name):
    with look.visit(browser, site / f"{name}.html") as (page, log):
        assert look.dead_controls(page) == []
        assert look.noise(page, log) == []


@pytest.mark.parametrize("name", ["theory/", "experiments/", "beyond/"])
def test_every_chapter_has_a_control(site, name):
    chapters = [page for page in PAGES if page.startswith(name) and (ROOT / f"book/{page}.ipynb").is_file()]
    lacking = [
        c for c in chapters if 'class="rc-explore"' not in (site / f"{c}.html").read_text(encoding="utf-8")
    ]
    assert lacking == []


# The faults that these checks must see, on small pages made for it


def plot(depth=2, kind="line", on=False):
    _, ax = plt.subplots(figsize=(3, 2))
    ax.plot([0, depth], [0, 1 + on], "o-" if kind == "line" else "s")
    ax.set(xlim=(0, 4), ylim=(0, 3))


@pytest.fixture(scope="module")
def control():
    """The HTML of one figure with a slider, a list and a checkbox."""
    axes = explore._axes(plot, {"depth": [1, 2, 3], "kind": ["line", "marks"], "on": [False, True]})
    content = explore.stored(explore._Grid(plot, axes, "a line"))[0][explore.MIME]
    return explore_page.page(content)


@pytest.fixture
def made(tmp_path, browser):
    """Write a small page and open it."""
    visits = []

    def write(body, script="", **options):
        file = tmp_path / "page.html"
        file.write_text(
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>t</title>'
            f'<meta name="viewport" content="width=device-width"><script>{script}</script></head>'
            f"<body><main><h1>t</h1>{body}</main></body></html>",
            encoding="utf-8",
        )
        visits.append(look.visit(browser, file, **options))
        return visits[-1].__enter__()

    yield write
    for open_visit in visits:
        open_visit.__exit__(None, None, None)


def every_complaint(page, log):
    checks = (look.untypeset, look.undescribed, look.too_wide, look.barriers, look.dead_controls)
    return [complaint for check in checks for complaint in check(page)] + look.noise(page, log)


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_sound_control_gives_no_complaint(made, control, theme, width):
    page, log = made(control, explore_page.script(), theme=theme, width=width)
    assert every_complaint(page, log) == []


PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("<script>throw new Error('broken')</script>", "broken"),
        ("<script>console.error('broken')</script>", "broken"),
        ('<img alt="x" src="https://example.org/x.png">', "foreign: https://example.org/x.png"),
        (
            "<script>fetch('https://example.org/x.json').catch(() => 0)</script>",
            "foreign: https://example.org/x.json",
        ),
        ('<link rel="stylesheet" href="absent.css">', "absent.css"),
        (f'<img src="{PIXEL}">', "no alt text"),
        (f'<img alt=" " src="{PIXEL}">', "no alt text"),
        ('<img alt="x" src="absent.png">', "not loaded"),
        (r"<p>Here \(x^2\) stays.</p>", "raw mathematics"),
        ("<p>where T$, is set as text.</p>", "raw mathematics"),
        (r'<div class="math">x</div>', "1 formulas, 0 typeset"),
        ('<div style="width:500px">wide</div>', "wider than 360 px"),
        ('<p style="color:#aaa;background:#fff">pale</p>', "color-contrast"),
        ('<p style="color:#fff;background:#fff">unseen</p>', "unseen"),
        ('<input type="range">', "label"),
    ],
)
def test_each_fault_is_seen(made, body, complaint):
    page, log = made(body, width=360)
    assert [c for c in every_complaint(page, log) if complaint in c]


def test_code_may_hold_formulas(made):
    page, _ = made(r"<pre>\(x\)</pre><p><code>$$</code></p>")
    assert look.untypeset(page) == []


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (lambda js: "", "the control is not shown"),
        (
            lambda js: js.replace('root.addEventListener("input"', 'root.addEventListener("never"'),
            "text did not follow",
        ),
        (lambda js: js.replace("picture.src =", "picture.unused ="), "pixels did not change"),
        (
            lambda js: js.replace("outputs[i].textContent =", "outputs[i].unused ="),
            "depth: its text did not follow",
        ),
        (lambda js: js.replace("const figures", "const const"), "Unexpected token"),
    ],
)
def test_a_broken_script_is_seen(made, control, broken, complaint):
    changed = broken(explore_page.script())
    assert changed != explore_page.script()
    page, log = made(control, changed)
    assert [c for c in every_complaint(page, log) if complaint in c]


def test_a_control_without_label_is_seen(made, control):
    page, _ = made(control.replace("<label", "<span").replace("</label>", "</span>"), explore_page.script())
    assert [c for c in look.barriers(page) if c.startswith(("label:", "select-name:"))]


# The control itself


def test_pictures_follow_their_places(made, control):
    page, _ = made(control, explore_page.script())
    image, depth = page.locator("img"), page.locator("input[type=range]")
    assert image.get_attribute("alt") == "a line. Shown: depth 2, kind line, on off."
    depth.press("ArrowRight")
    page.locator("select").select_option("marks")
    page.locator("input[type=checkbox]").check()
    assert image.get_attribute("alt") == "a line. Shown: depth 3, kind marks, on on."
    assert depth.get_attribute("aria-valuetext") == "3"


def test_two_controls_on_a_page_do_not_move_each_other(made, control):
    page, _ = made(control + control.replace('"explore-', '"second-'), explore_page.script())
    first, second = page.locator(".rc-explore").all()
    before = second.locator("img").screenshot()
    first.locator("input[type=range]").press("End")
    assert second.locator("img").screenshot() == before
    assert first.locator("output").first.inner_text() == "3"


def test_a_screen_reader_hears_where_the_reader_stopped(made, control):
    page, _ = made(control, explore_page.script())
    page.locator("input[type=range]").press("End")
    spoken = page.locator(".rc-explore-spoken")
    spoken.filter(has_text="Shown: depth 3").wait_for(state="attached", timeout=3000)
    assert spoken.get_attribute("aria-live") == "polite"


def test_a_finger_moves_the_slider(made, control):
    page, _ = made(control, explore_page.script(), width=360, has_touch=True)
    box = page.locator("input[type=range]").bounding_box()
    page.touchscreen.tap(box["x"] + box["width"] - 3, box["y"] + box["height"] / 2)
    assert page.locator("output").first.inner_text() == "3"
    assert box["height"] >= 24  # WCAG 2.2, success criterion 2.5.8


def test_print_shows_the_default_frame_and_what_moves(made, control):
    page, _ = made(control, explore_page.script())
    default = page.locator("img").get_attribute("src")
    page.locator("input[type=range]").press("End")
    moved = page.locator("img").get_attribute("src")
    page.evaluate("window.printed = ''; window.addEventListener('beforeprint', () => {"
                  " window.printed = document.querySelector('img').src; })")  # fmt: skip
    page.pdf()
    assert page.evaluate("window.printed") == default != moved
    assert page.locator("img").get_attribute("src") == moved
    page.emulate_media(media="print")
    assert page.locator(".rc-explore-moves").is_visible()
    assert not page.locator("input[type=range]").is_visible()


def test_without_a_script_the_default_frame_and_its_line_are_there(made, control):
    page, log = made(control)
    assert page.locator("img").is_visible()
    assert page.locator(".rc-explore-moves").inner_text().startswith("Moves with: depth (1–3)")
    assert not page.locator("select").is_visible()
    assert look.noise(page, log) == []
