"""Repeats the tables of the papers in small: trains, evaluates, and stores each run's figures.

python -m benchmarks.papers                 # lists the tables, and how many of their runs are stored
python -m benchmarks.papers blog            # makes the runs of a table that are not stored yet
python -m benchmarks.papers few-labels      # makes the parts of a figure that are not stored yet
python -m benchmarks.render         # writes docs/papers.md from what is stored

A run that was stopped goes on from its last checkpoint, in a folder under --work. Each training takes one
thread. The files of --data are those that docs/papers.md names.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.papers.parts import NotReadyError, Part
from benchmarks.papers.plans import TABLES
from benchmarks.papers.runs import Places, Run, perform
from benchmarks.papers.store import add, missing
from benchmarks.papers.studies import STUDIES
from benchmarks.paths import ROOT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    known: dict[str, Sequence[Run | Part]] = {**TABLES, **STUDIES}

    parser.add_argument("table", nargs="?", choices=sorted(known), help="which table or figure")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", metavar="DIR")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "papers", metavar="DIR")
    parser.add_argument("--only", default="", metavar="TEXT", help="runs whose name begins so")

    options = parser.parse_args()
    if options.table is None:
        for name, runs in known.items():
            print(f"{name:16} {len(runs) - len(missing(name, runs))} of {len(runs)} runs are stored")
        return

    places = Places(options.data.resolve(), options.work.resolve())
    for run in missing(options.table, known[options.table]):
        if run.name.startswith(options.only):
            print(run.name, flush=True)
            try:
                done = perform(options.table, run, places) if isinstance(run, Run) else run.perform(places)
            except NotReadyError as error:
                print(f"  not yet: {error}", flush=True)
            else:
                add(options.table, run.name, done)


if __name__ == "__main__":
    main()
