"""Run notebooks from top to bottom and store their outputs: `make execute`.

Each notebook runs alone in an empty directory with rc_lib installed, as it would on Colab. What is stored
is what ran, less whatever changes from run to run (time stamps, widget state, the kernel's version).
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from notebooks import ROOT, notebooks

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def execute(notebook):
    """Run every cell of the notebook in place, in an empty directory of its own."""
    with tempfile.TemporaryDirectory() as empty:
        client = NotebookClient(
            notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": empty}}
        )
        client.execute()


def normalise(notebook):
    """Drop what changes from run to run without meaning anything."""
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i:02d}"
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
            for output in cell.outputs:
                if output.get("name") == "stderr":
                    raise ValueError(f"cell {i} wrote to stderr: {output.text[:300]!r}")


def joined(outputs):
    """Printed text in one piece: where a kernel cuts it depends on the moment."""
    whole = []
    for output in outputs:
        if whole and output.output_type == "stream" and output.name == whole[-1].get("name"):
            whole[-1].text += output.text
        else:
            whole.append(output)
    return whole


def write(notebook, path):
    """Write the notebook so that an interruption leaves the old file whole."""
    nbformat.validate(notebook)
    part = path.with_suffix(".ipynb.tmp")
    nbformat.write(notebook, part)
    os.replace(part, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="notebooks (default: all)")
    os.environ["RC_LIB_STATIC"] = "1"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for path in parser.parse_args().paths or notebooks():
        start = time.perf_counter()
        notebook = nbformat.read(path, as_version=4)
        try:
            execute(notebook)
            normalise(notebook)
        except (CellExecutionError, ValueError) as error:
            sys.exit(f"{path}: not stored, the file is as it was.\n{error}")
        write(notebook, path.resolve())
        seconds = time.perf_counter() - start
        size = path.stat().st_size / 1000
        print(f"{path.resolve().relative_to(ROOT)}: {seconds:.1f} s, {size:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
