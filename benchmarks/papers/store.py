"""The stored runs of the papers' tables: one file a table, with a record for each run by its name."""

from __future__ import annotations

import fcntl
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks.papers.runs import STORED


class Planned(Protocol):
    """What is made once and stored: a name, and the settings that decide the result."""

    @property
    def name(self) -> str: ...

    def settings(self) -> dict[str, Any]: ...


P = TypeVar("P", bound=Planned)


def stored(table: str) -> dict[str, dict[str, Any]]:
    """The records of a table's runs; none if nothing is stored."""
    path = STORED / f"{table}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def missing(table: str, runs: Iterable[P]) -> list[P]:
    """The runs that are not stored, or were made with other settings."""
    known = stored(table)
    return [run for run in runs if known.get(run.name, {}).get("settings") != run.settings()]


def add(table: str, name: str, record: dict[str, Any]) -> None:
    """Stores a run's record. Several processes may store runs of a table."""
    STORED.mkdir(parents=True, exist_ok=True)
    with Path(tempfile.gettempdir(), f"fastqt-papers-{table}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        records = {**stored(table), name: record}
        ordered = {key: records[key] for key in sorted(records)}
        (STORED / f"{table}.json").write_text(json.dumps(ordered, indent=1) + "\n")
