"""The house stands as CONTRIBUTING.md says: floors, pins, addresses, documented names."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "rc_lib"

# Ground floor first. A file may import from files above it in this list, never from one below.
FLOORS = (
    "checks",
    "data",
    "norms",
    "minimizer",
    "rank",
    "masks",
    "weights",
    "heads",
    "attention",
    "trace",
    "blocks",
    "san",
    "frozen",
    "attribution",
    "float64",
    "paths",
    "one_layer",
    "log_scaled",
    "layer_constants",
    "layer_centers",
    "bound_report",
    "bounds",
    "residual_flow",
    "variants",
    "high_precision",
    "collapse_order",
    "excerpts",
    "corpus",
    "models",
    "ablation",
    "recording",
    "pretrained",
    "real_paths",
    "results",
    "generators",
    "checkpoints",
    "training_plan",
    "training",
    "tasks",
    "token_classifier",
    "path_walks",
    "path_effectiveness",
    "experiments",
    "claims",
    "plotting",
    "figure4",
    "frames",
    "pictures",
    "explore_live",
    "explore",
    "explore_page",
    "__main__",
)


def modules():
    return sorted(p for p in LIBRARY.rglob("*.py") if p.name != "__init__.py" or p.parent != LIBRARY)


def floor(path: Path) -> str:
    """The floor of a file: its name, or its package's name."""
    return path.relative_to(LIBRARY).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The floors that a file imports from, wherever in the file it does so."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rc_lib":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("rc_lib.")}
    return found & set(FLOORS)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(LIBRARY)))
def test_nothing_is_imported_upward(path):
    assert floor(path) in FLOORS, f"{path.name} has no floor yet: give it one in FLOORS"
    below = set(FLOORS[: FLOORS.index(floor(path))])
    assert imported(path) - {floor(path)} <= below


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(LIBRARY)))
def test_functions_and_files_are_short(path):
    tree = ast.parse(path.read_text())
    lengths = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            lengths[node.name] = body[-1].end_lineno - body[0].lineno + 1
    assert {name: n for name, n in lengths.items() if n > 50} == {}
    assert len(path.read_text().splitlines()) <= 450


def public_names():
    for path in modules():
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if name.endswith("__main__"):
            continue
        module = importlib.import_module(name)
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or getattr(value, "__module__", None) != name:
                continue
            if inspect.isfunction(value) or inspect.isclass(value):
                yield f"{name}.{attribute}", value


def test_every_public_function_says_what_it_takes_and_gives():
    silent = []
    for name, value in public_names():
        text = value.__doc__ or ""
        parameters = list(inspect.signature(value).parameters) if inspect.isfunction(value) else []
        if (
            not text
            or (parameters and "Args:" not in text)
            or (parameters and "Returns:" not in text + _yields(value))
        ):
            silent.append(name)
    assert silent == []


def _yields(function):
    """A function that returns nothing, or yields, need not say Returns."""
    text = function.__doc__ or ""
    returns = inspect.signature(function).return_annotation
    return "Returns:" if "Yields:" in text or returns is None else ""


def test_every_module_is_on_the_api_page():
    page = (ROOT / "book" / "api.md").read_text()
    internal = {"rc_lib.__main__", "rc_lib.explore_page"}
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in modules()}
    assert {n for n in names - internal if f"automodule:: {n}\n" not in page} == set()


def test_requirements_are_pinned_exactly():
    for file in ("requirements.txt", "requirements-models.txt"):
        lines = [line.split("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
        loose = [line for line in lines if line and not re.fullmatch(r"[\w.-]+==[\w.]+", line)]
        assert loose == []


def test_every_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = (ROOT / "requirements.txt").read_text()
    for requirement in project["dependencies"]:
        assert f"\n{re.split('[<>=]', requirement)[0]}==" in pinned


def test_the_version_is_the_same_everywhere():
    import rc_lib

    assert f"version: {rc_lib.__version__}" in (ROOT / "CITATION.cff").read_text()


def test_the_repository_has_one_address():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = project["urls"]["Repository"].removeprefix("https://github.com/")
    owner = name.split("/")[0]
    files = ["README.md", "_config.yml", "CITATION.cff", *(ROOT / "book").rglob("*.ipynb")]
    for file in (ROOT / f for f in files):
        if "_build" in file.parts:
            continue
        for found in re.findall(rf"\b{owner}/[A-Za-z0-9._-]+", file.read_text()):
            assert found.removesuffix(".git") == name, file


def test_the_readme_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) == 4
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_wheel_carries_what_chapters_load(tmp_path):
    command = [
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run([sys.executable, *command], check=True)
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    wanted = [ROOT / "book" / "claims.yml", *(ROOT / "book" / "data").iterdir()]
    wanted += (ROOT / "book" / "results").glob("*.npz")
    for file in wanted:
        assert f"rc_lib/_book/{file.relative_to(ROOT / 'book').as_posix()}" in names
    assert {"rc_lib/explore.css", "rc_lib/explore.js"} <= set(names)


def test_importing_the_library_is_cheap():
    heavy = "{'transformers', 'matplotlib', 'scipy', 'ipywidgets', 'IPython', 'yaml'}"
    code = f"import sys, rc_lib; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_make_help_lists_every_target():
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.M)[1].split()
    listed = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [t for t in phony if f"make {t} " not in listed] == []
