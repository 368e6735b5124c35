"""Point every link of the book at a fork: `make repository REPO=owner/name`.

The address is written by hand in one place, pyproject.toml; this command rewrites it there and everywhere it
is used (launch buttons, Colab cells, badges, citation).
"""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
USES = ("pyproject.toml", "_config.yml", "README.md", "CITATION.cff", "CONTRIBUTING.md", "book", "tools")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*/[A-Za-z0-9._-]+")


def current() -> str:
    """Return owner/name of the repository, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["urls"]["Repository"].removeprefix("https://github.com/")


def uses(name: str) -> list[Path]:
    """Return the tracked or new text files that name the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *USES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = (ROOT / line for line in listed.stdout.splitlines())
    return [f for f in files if f.is_file() and name.encode() in f.read_bytes()]


def rewrite(old: str, new: str) -> list[Path]:
    """Replace the repository's name in every file that uses it; return these files."""
    changed = uses(old)
    for file in changed:
        file.write_bytes(file.read_bytes().replace(old.encode(), new.encode()))
    return changed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", help="owner/name of the fork on GitHub")
    name = parser.parse_args().name
    if name is None:
        sys.exit(f"The repository is {current()}; name another with make repository REPO=owner/name")
    if not NAME.fullmatch(name):
        sys.exit(f"REPO was {name!r}; expected owner/name, as in {current()}")
    for file in rewrite(current(), name):
        print(file.relative_to(ROOT))


if __name__ == "__main__":
    main()
