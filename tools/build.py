"""Build the rendered book into _build/html: `make book`, or strict with `make strict`."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "_build" / "html" / "index.html"
BUILD = ["book", "--config", "_config.yml", "--toc", "_toc.yml", "--path-output", ".", "--quiet"]
STRICT = ["-n", "-W", "--keep-going", "--all"]


def main():
    strict = "--strict" in sys.argv[1:]
    command = [sys.executable, "-m", "jupyter_book", "build", *BUILD, *(STRICT if strict else [])]
    done = subprocess.run(command, cwd=ROOT)
    if done.returncode != 0:
        sys.exit("The book did not build; the messages above say where.")
    print(f"The book is ready. Open {PAGE.as_uri()}")


if __name__ == "__main__":
    main()
