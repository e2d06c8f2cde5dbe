"""Puts results into a file that holds all of their kind, each by its name, in place of an older one.

python -m benchmarks.keep evaluation bow.json gloss-bow.json   # what `fastqt evaluate --json` has written
python -m benchmarks.keep trainings quickthoughts-bow          # the folders of runs
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.paths import RESULTS


def kept(kind: str) -> dict[str, Any]:
    """The results of a kind by their names."""
    path = RESULTS / f"{kind}.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return results


def keep(kind: str, name: str, result: Any) -> Path:
    """Writes a result to the file of its kind, and returns the file."""
    path = RESULTS / f"{kind}.json"
    results = dict(sorted({**kept(kind), name: result}.items()))
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    return path


def training(folder: Path) -> dict[str, Any]:
    """The settings of a run, what it reported, and its sentences' neighbours, if there are some."""
    lines, neighbours = (folder / "metrics.jsonl").read_text().splitlines(), folder / "neighbours.txt"
    return {
        "config": json.loads((folder / "config.json").read_text()),
        "metrics": [json.loads(line) for line in lines],
        **({"neighbours": neighbours.read_text()} if neighbours.exists() else {}),
    }


def main(kind: str, *paths: str) -> None:
    for path in map(Path, paths):
        keep(kind, path.stem, training(path) if kind == "trainings" else json.loads(path.read_text()))


if __name__ == "__main__":
    main(*sys.argv[1:])
