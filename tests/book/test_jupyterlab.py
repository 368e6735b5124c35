"""A real JupyterLab, driven once by a headless browser: live controls move, stored ones show a picture."""

import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request

import matplotlib
import nbformat
import pytest
from nbformat import v4

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from rc_lib import explore

pytestmark = [pytest.mark.page, pytest.mark.slow]

PATIENCE = 60_000  # milliseconds: a kernel that imports torch on a busy machine takes its time
CELL = """\
import matplotlib.pyplot as plt
from rc_lib.explore import explore

def plot(depth=2, on=False):
    _, ax = plt.subplots(figsize=(3, 2))
    ax.plot([0, depth], [0, 1 + on])
    ax.set(xlim=(0, 9), ylim=(0, 3))
    if depth == 5:
        raise ZeroDivisionError("of the plot")

explore(plot, alt="a line", depth=range(1, 9), on=[False, True])"""


def plot(depth=2, kind="line"):
    _, ax = plt.subplots(figsize=(3, 2))
    ax.plot([0, depth], [0, 1], "o-" if kind == "line" else "s")


def write(path, cell, **metadata):
    notebook = v4.new_notebook(cells=[cell], metadata=metadata)
    notebook.cells[0].id = "one"
    nbformat.write(notebook, path)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Start JupyterLab on the loopback address; return its address and token."""
    root = tmp_path_factory.mktemp("lab")
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    write(root / "live.ipynb", v4.new_code_cell(CELL), kernelspec=kernel)
    bundle, metadata = explore.stored(
        explore._Grid(plot, explore._axes(plot, {"depth": [1, 2, 3], "kind": ["line", "marks"]}), "a line")
    )
    output = v4.new_output("display_data", data=bundle, metadata=metadata)
    write(root / "stored.ipynb", v4.new_code_cell("explore(...)", execution_count=1, outputs=[output]))
    token, port = secrets.token_hex(8), free_port()
    folders = {f"JUPYTER_{name}_DIR": str(root / f".{name}") for name in ("CONFIG", "RUNTIME", "DATA")}
    environment = {k: v for k, v in os.environ.items() if k != "RC_LIB_STATIC"} | folders
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--ServerApp.root_dir={root}"),
        *("--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"),
        *(f"--IdentityProvider.token={token}", "--LabApp.news_url=", "--LabApp.extension_manager=readonly"),
    ]
    with (root / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            wait_for(f"http://127.0.0.1:{port}/api?token={token}", server, root / "server.log")
            yield f"http://127.0.0.1:{port}/lab/tree/{{}}?token={token}&reset"
        finally:
            stop(server)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(address, server, log):
    until = time.monotonic() + 60
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    pytest.fail("JupyterLab did not start:\n" + log.read_text()[-2000:])


def stop(server):
    """Stop the server; it stops its kernels, and a kernel whose server is gone stops itself."""
    server.terminate()
    try:
        server.wait(timeout=20)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait(timeout=10)


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    context.set_default_timeout(PATIENCE)
    # No host but this one: what would be asked for elsewhere is refused.
    context.route(lambda url: "://127.0.0.1" not in url, lambda route: route.abort())
    yield context.new_page()
    context.close()


def test_live_control_moves_its_figure(lab, page):
    page.goto(lab.format("live.ipynb"))
    page.locator(".jp-Notebook .jp-CodeCell .cm-content").first.click()
    page.locator(".jp-NotebookPanel .jp-Notebook-ExecutionIndicator[data-status='idle']").wait_for(
        state="attached"
    )
    page.keyboard.press("Shift+Enter")
    figure = page.locator(".jp-OutputArea .widget-html img")
    figure.wait_for()
    assert figure.get_attribute("alt") == "a line. Shown: depth 2, on off."
    before = figure.screenshot()
    handle = page.locator(".jp-OutputArea .widget-slider .noUi-handle").first
    handle.press("ArrowRight")
    page.locator(".widget-html img[alt='a line. Shown: depth 3, on off.']").wait_for()
    assert figure.screenshot() != before
    page.locator(".jp-OutputArea .widget-checkbox input").check()
    page.locator(".widget-html img[alt='a line. Shown: depth 3, on on.']").wait_for()
    handle.press("ArrowRight")
    handle.press("ArrowRight")
    page.locator(".widget-html [role=alert]").filter(has_text="ZeroDivisionError: of the plot").wait_for()
    assert page.get_by_text("Error displaying widget").count() == 0


def test_stored_control_shows_its_picture_without_a_kernel(lab, page):
    page.goto(lab.format("stored.ipynb"))
    # Of the dialog: the toolbar behind it has a button of the same name.
    page.locator(".jp-Dialog").get_by_role("button", name="No Kernel", exact=True).click()
    image = page.locator(".jp-OutputArea-output img")
    image.wait_for()
    assert image.get_attribute("alt") is None or "Moves with" in image.get_attribute("alt")
    assert image.evaluate("i => i.complete && i.naturalWidth > 0")
    assert page.locator(".jp-OutputArea-output").count() == 1
    assert page.locator(".jp-OutputArea-output").inner_text().strip() == ""
    assert page.locator(".jp-NotebookPanel").get_by_text("No Kernel", exact=True).count() == 1
