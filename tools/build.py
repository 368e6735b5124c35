"""Build the rendered book into _build/html: `make book`, or strict with `make strict`."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "_build" / "html" / "index.html"
# Jupyter Book looks for a relative table of contents below book/: name both files in full.
SETTINGS = ["--config", ROOT / "_config.yml", "--toc", ROOT / "_toc.yml"]
BUILD = [ROOT / "book", *SETTINGS, "--path-output", ROOT, "--quiet"]
STRICT = ["-n", "-W", "--keep-going", "--all"]


def main():
    strict = "--strict" in sys.argv[1:]
    jupyter_book = Path(sys.executable).parent / "jupyter-book"
    command = [jupyter_book, "build", *BUILD, *(STRICT if strict else [])]
    done = subprocess.run(command, cwd=ROOT)
    if done.returncode != 0:
        sys.exit("The book did not build; the messages above say where.")
    print(f"The book is ready. Open {PAGE.as_uri()}")


if __name__ == "__main__":
    main()
