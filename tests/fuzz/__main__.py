"""Fuzzes one target or all of them, and stores what came of it.

python -m tests.fuzz corpus --minutes 10
python -m tests.fuzz all --minutes 60              an equal share for each target
python -m tests.fuzz corpus --inputs 1000000       until so many inputs have been executed
python -m tests.fuzz corpus --keep FILE            adds it to the inputs that the tests replay

The corpus that a target has learnt lies in build/fuzz/corpus, findings in build/fuzz/findings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.fuzz.campaign import campaign
from tests.fuzz.inputs import keep
from tests.fuzz.targets import TARGETS


def command_line(
    program: str,
    text: str | None,
    targets: Sequence[str],
    fuzz: Callable[[str, float | None, int | None], int],
    with_files: dict[str, Callable[[str, Path], int]],
) -> int:
    """Fuzzes what the command line asks for, or does one of `with_files`; returns the exit status."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=text, formatter_class=form)
    parser.add_argument("target", choices=(*targets, "all"))
    parser.add_argument("--minutes", type=float, help="how long, all targets together")
    parser.add_argument("--inputs", type=int, help="stop a target after so many inputs")
    for name in with_files:
        parser.add_argument(f"--{name}", type=Path, metavar="FILE")
    options = parser.parse_args()
    for name, function in with_files.items():
        if (file := getattr(options, name)) is not None:
            return function(options.target, file)
    if options.minutes is None and options.inputs is None:
        parser.error("want --minutes, --inputs or both")
    asked = targets if options.target == "all" else (options.target,)
    seconds = None if options.minutes is None else 60 * options.minutes / len(asked)
    return 1 if sum(fuzz(target, seconds, options.inputs) for target in asked) else 0


def keep_file(target: str, file: Path) -> int:
    keep(target, file.read_bytes())
    return 0


if __name__ == "__main__":
    sys.exit(command_line("tests.fuzz", __doc__, TARGETS, campaign, {"keep": keep_file}))
