"""Fuzzes one target or all of them, and stores what came of it.

python -m tests.fuzz corpus --minutes 10
python -m tests.fuzz all --minutes 60              an equal share for each target
python -m tests.fuzz corpus --inputs 1000000       until so many inputs have been executed
python -m tests.fuzz corpus --minimise FILE        makes the input of a finding smaller, in place
python -m tests.fuzz corpus --keep FILE            adds it to the inputs that the tests replay

The corpus that a target has learnt lies in build/fuzz/corpus, findings in build/fuzz/findings.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.fuzz.campaign import campaign
from tests.fuzz.inputs import keep
from tests.fuzz.minimise import minimised
from tests.fuzz.targets import TARGETS, load


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__, formatter_class=form)
    parser.add_argument("target", choices=(*TARGETS, "all"))
    parser.add_argument("--minutes", type=float, help="how long, all targets together")
    parser.add_argument("--inputs", type=int, help="stop a target after so many inputs")
    parser.add_argument("--minimise", type=Path, metavar="FILE")
    parser.add_argument("--keep", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.minimise is not None:
        smaller = minimised(load(options.target), options.minimise.read_bytes())
        options.minimise.write_bytes(smaller)
        return 0
    if options.keep is not None:
        keep(options.target, options.keep.read_bytes())
        return 0
    if options.minutes is None and options.inputs is None:
        parser.error("want --minutes, --inputs or both")
    targets = TARGETS if options.target == "all" else (options.target,)
    seconds = None if options.minutes is None else 60 * options.minutes / len(targets)
    return 1 if sum(campaign(target, seconds, options.inputs) for target in targets) else 0


if __name__ == "__main__":
    sys.exit(main())
