import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "_build" / "html"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def lacking(what):
    """A check that cannot run is a failure in CI, and a skip that says why on a person's machine."""
    (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(what)


@pytest.fixture(scope="session")
def browser():
    """Return Debian's Chromium, headless."""
    if CHROMIUM is None:
        lacking("no Chromium found (chromium, chromium-browser or google-chrome): the page checks need one")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def site():
    """Return the folder of the rendered book."""
    if not (SITE / "index.html").is_file():
        lacking("the book is not built: call make book first")
    return SITE
