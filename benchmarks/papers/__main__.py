"""Repeats the tables of the papers in small: trains, evaluates, and stores each run's figures.

python -m benchmarks.papers                 # lists the tables, and how many of their runs are stored
python -m benchmarks.papers blog            # makes the runs of a table that are not stored yet
python -m benchmarks.render                 # writes docs/papers.md from what is stored

A run that was stopped goes on from its last checkpoint, in a folder under --work. Each training takes one
thread. The files of --data are those that docs/papers.md names.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.papers.plans import TABLES
from benchmarks.papers.runs import Places, perform
from benchmarks.papers.store import add, missing
from benchmarks.paths import ROOT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("table", nargs="?", choices=sorted(TABLES), help="which table")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", metavar="DIR")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "papers", metavar="DIR")
    parser.add_argument("--only", default="", metavar="TEXT", help="runs whose name begins so")

    options = parser.parse_args()
    if options.table is None:
        for name, runs in TABLES.items():
            print(f"{name:16} {len(runs) - len(missing(name, runs))} of {len(runs)} runs are stored")
        return

    places = Places(options.data.resolve(), options.work.resolve())
    for run in missing(options.table, TABLES[options.table]):
        if run.name.startswith(options.only):
            print(run.name, flush=True)
            add(options.table, run.name, perform(options.table, run, places))


if __name__ == "__main__":
    main()
