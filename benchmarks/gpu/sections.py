"""The sections of `benchmarks.gpu_check`: each runs in its own process and within a time limit.

A section writes each record to a file as soon as it is made. If it hangs or breaks the device, only the
records that it had not made yet are lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.paths import ROOT

GRACE = 5.0  # seconds that a section has to end after its time limit
MEMORY = ("fast", "low")  # the loss's memory modes; everything is checked in both

Record = dict[str, Any]  # one result; "kind" is "machine", "check", "benchmark" or "end"


@dataclass(frozen=True)
class Options:
    quick: bool = False
    dry_run: bool = False

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.dry_run else torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True)
class Section:
    """A generator of records, which is not asked for another one after `seconds`."""

    name: str
    seconds: float
    records: Callable[[Options], Iterator[Record]]


class Verdict(NamedTuple):
    """Whether a check passed, and the figures or the message behind that."""

    ok: bool | None  # None where it does not apply
    detail: str


class NotTakenError(Exception):
    """The engine refuses a case that it does not support."""


def check(name: str, test: Callable[[], Verdict]) -> Record:
    """Runs a test and returns its record."""
    try:
        verdict = test()
    except NotTakenError as reason:
        verdict = Verdict(None, str(reason))
    except Exception as error:  # Triton, CUDA and torch raise many types; the check fails with the message
        verdict = Verdict(False, words(error))
    return check_record(name, verdict)


def check_record(name: str, verdict: Verdict) -> Record:
    return {"kind": "check", "name": name, **verdict._asdict()}


def words(error: BaseException) -> str:
    """An error as a record holds it."""
    return f"{type(error).__name__}: {error}"[:1000]


@dataclass
class Outcome:
    """The records of a section, and how it ended."""

    name: str
    status: str = "done"  # or "out of time", or "failed"
    message: str = ""
    seconds: float = 0.0
    records: list[Record] = field(default_factory=list)
    exit_code: int | None = None
    output: str = ""


def write_lines(section: Section, options: Options, lines: Path) -> None:
    """Runs a section in this process, and writes each record as soon as it is made."""
    end = time.monotonic() + section.seconds
    with lines.open("w") as file:

        def write(record: Record) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        try:
            for record in section.records(options):
                write(record)
                if time.monotonic() > end:
                    write({"kind": "end", "status": "out of time", "message": f"after {section.seconds:g} s"})
                    return
        except Exception as error:  # any error ends the section, is recorded and is raised again
            write({"kind": "end", "status": "failed", "message": words(error)})
            raise
        write({"kind": "end", "status": "done", "message": ""})


def run_section(
    section: Section,
    options: Options,
    prefix: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Runs a section in another process, and reads the records that it made even if it was killed."""
    outcome, begin = Outcome(section.name), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines"
        command = [*prefix, sys.executable, "-m", "benchmarks.gpu_check", "--section", section.name]
        command += ["--lines", str(lines)]
        command += [f"--{name.replace('_', '-')}" for name, on in asdict(options).items() if on]
        variables = {**os.environ, **(environment or {})}
        if options.dry_run:
            variables["TRITON_INTERPRET"] = "1"
        try:
            process = subprocess.run(
                command,
                cwd=ROOT,
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=section.seconds + GRACE,
            )
            outcome.exit_code, outcome.output = process.returncode, process.stdout
        except subprocess.TimeoutExpired as expired:
            outcome.output = (expired.stdout or b"").decode(errors="replace")
            outcome.status, outcome.message = "failed", f"did not end within {expired.timeout:g} s"
        found = read_lines(lines)
    ends = [record for record in found if record["kind"] == "end"]
    outcome.records = [record for record in found if record["kind"] != "end"]
    if ends:
        outcome.status, outcome.message = ends[-1]["status"], ends[-1]["message"]
    elif outcome.status == "done":
        last = outcome.output.strip().splitlines()[-1:] or ["no output"]
        outcome.status, outcome.message = "failed", f"exit status {outcome.exit_code}: {last[0]}"
    outcome.seconds = time.monotonic() - begin
    return outcome


def read_lines(path: Path) -> list[Record]:
    """The records in a file. A killed process may leave an incomplete last line, which is skipped."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found
