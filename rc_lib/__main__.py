"""The experiments of section 8 from a terminal: ``python -m rc_lib run``, ``list`` and ``show``.

Results go to stdout, progress to stderr. Exit codes: 0 done, 1 the experiment or a file failed, 2 the command
was wrong, 130 interrupted (what is kept is said, and the same command goes on from there).
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from rc_lib import __version__, checkpoints, experiments, results

_BAR = "{desc} {percentage:3.0f}%|{bar}| {elapsed} gone{postfix}"

SEEDS_HELP = "repetitions: 0-4, or 0,2,7, or 3 (default: 0-4)"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, without the usage above it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def parse_seeds(text: str) -> list[int]:
    """Return the seeds that a range or a list names.

    Args:
        text: ``"0-4"``, ``"0,2,7"``, ``"3"`` or a mixture, ``"0-2,7"``.

    Returns:
        The integers in the order given.

    Raises:
        argparse.ArgumentTypeError: anything else; a range that runs backwards; a seed given twice.
    """
    seeds = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of seeds; expected e.g. 0-4 or 0,2,7")
        if int(last or first) - int(first) >= 10_000:
            raise argparse.ArgumentTypeError(f"{text!r} names more than 10000 seeds")
        seeds.extend(range(int(first), int(last or first) + 1))
    if not seeds or len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text!r} names no seed, or one twice; expected e.g. 0-4 or 0,2,7")
    return seeds


def parse_seed(text: str) -> list[int]:
    """Return the one seed that a number names.

    Args:
        text: ``"3"``.

    Returns:
        A list of the one integer.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no seed; expected one number, e.g. 0")
    return [int(text)]


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("'' is no folder; leave the option out for the book's")
    return Path(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes; expected 1 or more")
    return int(text)


def _add_seeds(parser: argparse.ArgumentParser, text: str, default: str | None) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--seeds", type=parse_seeds, default=default, help=text)
    # Both write to `seeds`; the default is the other's.
    one = {"dest": "seeds", "type": parse_seed, "default": argparse.SUPPRESS}
    group.add_argument("--seed", metavar="SEED", help="short for --seeds with one number", **one)


def _add_places(run: argparse.ArgumentParser) -> None:
    """Add the options that say where units are computed."""
    run.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 or mps (default: cpu)")
    places = run.add_mutually_exclusive_group()
    text = "processes of this machine that share the units and its cores (default: none but this one)"
    places.add_argument("--workers", type=_count, default=0, metavar="N", help=text)
    text = "a Dask scheduler whose workers compute the units, e.g. tcp://10.0.0.1:8786"
    places.add_argument("--scheduler", metavar="ADDRESS", help=text)


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m rc_lib", description="Run the book's experiments and show their results."
    )
    parser.add_argument("--version", action="version", version=f"rc_lib {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{run,list,show}")
    out = _Parser(add_help=False)
    out.add_argument("--out", type=_folder, metavar="DIR", help="folder of the results (default: the book's)")
    run = commands.add_parser("run", parents=[out], help="run an experiment and store its result")
    run.add_argument("experiment", help="a name that `list` prints")
    run.add_argument("--scale", default="quick", help="size of the run (default: quick)")
    _add_seeds(run, SEEDS_HELP, "0-4")
    run.add_argument("--again", action="store_true", help="run even if the result is stored already")
    text = "go on from what an unfinished run left (the default); --no-resume drops that first"
    run.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help=text)
    _add_places(run)
    commands.add_parser("list", parents=[out], help="list experiments and stored results")
    show = commands.add_parser("show", parents=[out], help="print a stored result")
    show.add_argument("name", help="an experiment's name, or a result's file")
    show.add_argument("--scale", help="which one, when several are stored")
    _add_seeds(show, "which one, when several are stored", None)
    return parser


class _Progress:
    """A bar on stderr that counts each unit by its weight, so that the time left is an honest estimate.

    It is drawn from ``begin`` on: what is refused before the first unit gets a message and no bar.

    Units stored by an earlier run (0 seconds) are no evidence about the speed. With ``lanes`` units computed
    side by side, what is left takes a lane's time for them divided by ``lanes``; how many lanes a cluster
    has is not known (None) and shows in the time gone.
    """

    def __init__(self, experiment: experiments.Experiment, settings: experiments.Settings, lanes: int | None):
        self.weight, self.lanes = experiment.weight, lanes
        self.seconds = self.computed = 0.0
        self.total = sum(self.weight(unit) for unit in experiment.units(settings))
        self.name = experiments.spoken(experiment.name)
        self.bar: tqdm | None = None

    def begin(self) -> None:
        self.bar = tqdm(total=self.total, desc=self.name, bar_format=_BAR, file=sys.stderr, mininterval=0)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()

    def __call__(self, unit: experiments.Unit, seconds: float) -> None:
        weight = self.weight(unit)
        if seconds:
            self.seconds += seconds
            self.computed += weight
        self.bar.n += weight
        words = [f"{self.left()} left", *map(str, unit.values())]
        self.bar.set_postfix_str(" ".join(words))

    def left(self) -> str:
        if not self.computed:
            return "?"
        gone = self.bar.format_dict["elapsed"] if self.lanes is None else self.seconds / self.lanes
        return tqdm.format_interval((self.total - self.bar.n) * gone / self.computed)


def _is_stored(path: Path) -> bool:
    try:
        results.read(path)
    except results.UnknownResultError:
        return False
    except results.CorruptResultError as error:
        print(error, file=sys.stderr)
        return False
    return True


def _run(arguments: argparse.Namespace, parser: _Parser) -> int:
    try:
        experiment = experiments.get(arguments.experiment)
        settings = experiment.settings(arguments.scale, arguments.seeds)
        if arguments.scheduler is None:  # a cluster's workers look for theirs
            experiments.check_device(arguments.device)
    except ValueError as error:
        parser.error(str(error))
    folder = arguments.out or results.default_folder()
    path = folder / results.file_name(experiment.name, settings)
    if not arguments.again and _is_stored(path):
        print(f"{path} is stored already; --again runs it anew")
        return 0
    lanes = max(1, arguments.workers) if arguments.scheduler is None else None
    progress = _Progress(experiment, settings, lanes)
    options = {key: getattr(arguments, key) for key in ("device", "resume", "workers", "scheduler")}
    options |= {"bars": sys.stderr.isatty(), "begin": progress.begin}
    with contextlib.closing(progress):
        path = experiments.run(experiment, arguments.scale, arguments.seeds, folder, progress, **options)
    print(path)
    return 0


def _line(path: Path) -> str:
    try:
        result = results.read(path, arrays=False)
    except results.CorruptResultError as error:
        return f"  {error}"
    seeds = ",".join(str(seed) for seed in result.settings.get("seeds", []))
    facts = (
        f"{result.settings.get('scale', '-')}, seeds {seeds or '-'}, {result.seconds:.0f} s, {result.made}"
    )
    return f"  {path.name}: {facts}"


def _list(arguments: argparse.Namespace, parser: _Parser) -> int:
    print("experiments")
    for name in sorted(experiments.MODULES):
        experiment = experiments.get(name)
        print(f"  {experiments.spoken(name)} ({', '.join(experiment.presets)}): {experiment.about}")
    stored = results.files(folder=arguments.out)
    print(f"stored results in {arguments.out or results.default_folder()}")
    print("\n".join(_line(path) for path in stored) or "  none")
    return 0


def _show(arguments: argparse.Namespace, parser: _Parser) -> int:
    wanted = {key: getattr(arguments, key) for key in ("scale", "seeds") if getattr(arguments, key)}
    if arguments.name.endswith(".npz"):
        result = results.read(arguments.name)
    else:
        result = results.load(arguments.name.replace("-", "_"), folder=arguments.out, **wanted)
    print(f"{result.name}: {result.path}")
    print("settings " + json.dumps(result.settings))
    print("versions " + json.dumps(result.versions))
    print(f"made {result.made} in {result.seconds:.0f} s")
    for name, array in sorted(result.arrays.items()):
        print(f"  {name}: {array.dtype} {list(array.shape)}")
    if result.name in experiments.MODULES:
        print(experiments.get(result.name).describe(result))
    return 0


def _interrupted(arguments: argparse.Namespace) -> str:
    """Say what an interrupted command leaves behind."""
    if arguments.command != "run":
        return "interrupted"
    # A cluster's workers keep their checkpoints to themselves.
    kept = "finished units" + ("" if arguments.scheduler else " and trainings' last checkpoints")
    without = "" if arguments.resume else " without --no-resume"
    return f"interrupted; {kept} are kept: the same command{without} goes on from there"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after ``python -m rc_lib``; the process's own unless given.

    Returns:
        The exit code: 0 or 1 (a wrong command exits with 2 by SystemExit, as argparse does).
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    command = {"run": _run, "list": _list, "show": _show}[arguments.command]
    try:
        return command(arguments, parser)
    except KeyboardInterrupt:
        print(_interrupted(arguments), file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1
    except (results.ResultError, experiments.SweepError, ImportError, OSError, ValueError) as error:
        hint = " (--no-resume drops it)" if isinstance(error, checkpoints.CheckpointError) else ""
        print(f"{parser.prog}: {error}{hint}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
