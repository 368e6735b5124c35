"""The commands behind the Makefile: set-up messages, a fork's address, storing and re-running a notebook."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import rerun  # noqa: E402

import execute  # noqa: E402
import repository  # noqa: E402
import setup  # noqa: E402


def test_an_old_python_gets_one_sentence(monkeypatch):
    monkeypatch.setattr(setup.sys, "version_info", (3, 9, 2))
    with pytest.raises(SystemExit, match=r"Python 3\.11 or newer is needed, and .* is 3\.9"):
        setup.main()


def test_a_missing_venv_module_gets_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(SystemExit, match="apt install python3-venv"):
        setup.create(str(tmp_path / "venv"))


def test_a_failed_install_speaks_of_the_network(monkeypatch, tmp_path):
    monkeypatch.setattr(setup, "run", lambda *command: 1)
    with pytest.raises(SystemExit, match="no way to the Python Package Index"):
        setup.install(str(tmp_path), [])


def test_setup_parses_on_an_old_python():
    import ast

    ast.parse((ROOT / "tools" / "setup.py").read_text(), feature_version=(3, 7))


def test_a_fork_rewrites_every_use(monkeypatch, tmp_path):
    files = {
        "pyproject.toml": 'Repository = "https://github.com/a/b"',
        "README.md": "see a/b and a/b/c",
        "c.md": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.setattr(repository, "ROOT", tmp_path)
    changed = repository.rewrite("a/b", "new/home")
    assert {f.name for f in changed} == {"pyproject.toml", "README.md"}
    assert (tmp_path / "README.md").read_text() == "see new/home and new/home/c"


@pytest.mark.parametrize("bad", ["", "noslash", "a/b/c", "https://github.com/a/b", "a b/c"])
def test_a_bad_fork_name_is_refused(monkeypatch, bad):
    monkeypatch.setattr(sys, "argv", ["repository.py", bad])
    with pytest.raises(SystemExit, match="expected owner/name"):
        repository.main()


def stored(*sources):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    return nbformat.v4.new_notebook(cells=cells)


def test_a_notebook_is_stored_as_it_ran(tmp_path, monkeypatch, capsys):
    path = tmp_path / "a.ipynb"
    nbformat.write(stored("import os\nos.listdir()", "1 + 1"), path)
    monkeypatch.setattr(execute, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["execute.py", str(path)])
    execute.main()
    after = nbformat.read(path, as_version=4)
    assert [c.execution_count for c in after.cells] == [1, 2]
    assert [c.outputs[0].data["text/plain"] for c in after.cells] == ["[]", "2"]
    assert [c.id for c in after.cells] == ["cell-00", "cell-01"]


def test_printed_text_is_stored_in_one_piece():
    pieces = [("stdout", "a\n"), ("stdout", "b\n"), ("stderr", "c"), ("stdout", "d")]
    outputs = [nbformat.v4.new_output("stream", name=name, text=text) for name, text in pieces]
    outputs.insert(2, nbformat.v4.new_output("display_data", {"text/plain": "x"}))
    joined = execute.joined(outputs)
    assert [o.get("text") for o in joined] == ["a\nb\n", None, "c", "d"]


@pytest.mark.parametrize("source", ["1 / 0", "import sys; print('x', file=sys.stderr)"])
def test_a_notebook_that_fails_is_not_stored(tmp_path, monkeypatch, source):
    path = tmp_path / "a.ipynb"
    nbformat.write(stored(source), path)
    before = path.read_bytes()
    monkeypatch.setattr(sys, "argv", ["execute.py", str(path)])
    with pytest.raises(SystemExit, match="not stored"):
        execute.main()
    assert path.read_bytes() == before


FAST, SLOW = rerun.Outcome(True, 5, 0.4), rerun.Outcome(True, 61, 0.4)


@pytest.mark.parametrize(
    ("runs", "wrong"),
    [
        ([FAST], []),
        ([SLOW, FAST], []),
        ([SLOW, SLOW], ["slower than its bar of 60 s"]),
        ([rerun.Outcome(False, 5, 0.4)], ["a cell failed"]),
        ([rerun.Outcome(True, 5, 1.6)], ["larger than its bar of 1.5 GB"]),
        ([rerun.Outcome(False, 61, 0.4)], ["a cell failed", "slower than its bar of 60 s"]),
        ([SLOW, rerun.Outcome(False, 5, 0.4)], ["a cell failed"]),
    ],
)
def test_only_a_slow_notebook_gets_a_second_run(monkeypatch, runs, wrong):
    left = iter(runs)
    monkeypatch.setattr(rerun, "run", lambda path: next(left))
    assert rerun.faults(Path("a.ipynb")) == [f"a.ipynb: {fault}" for fault in wrong]
    assert not list(left)


def test_a_failed_cell_is_named_in_the_last_lines(tmp_path, monkeypatch, capfd):
    nbformat.write(stored("1 + 1"), tmp_path / "good.ipynb")
    nbformat.write(stored("1 / 0"), tmp_path / "bad.ipynb")
    monkeypatch.setattr(sys, "argv", ["rerun.py", str(tmp_path / "good.ipynb"), str(tmp_path / "bad.ipynb")])
    with pytest.raises(SystemExit) as stop:
        rerun.main()
    assert stop.value.code == 1
    assert capfd.readouterr().out.splitlines()[-2:] == ["bad.ipynb: a cell failed", "1 passed, 1 failed"]
