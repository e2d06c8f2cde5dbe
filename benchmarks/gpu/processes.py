"""Runs sections in processes of their own, and keeps what they found even if they hang or crash.

A section writes each record to a file as soon as it is made. Only records that it had not made yet are lost.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from benchmarks.gpu import sections
from benchmarks.gpu.sections import Options, Record, Section
from benchmarks.measure.errors import shortened, traced, words
from benchmarks.paths import ROOT

GRACE = 2.0  # seconds beyond a section's limit after which its process is killed
DEATH = 0.5  # seconds that a killed process gets to end; a driver can hold it for longer
OVERHEAD = GRACE + DEATH  # what a section can take beyond its limit
MOST_OUTPUT = 24_000  # characters that are kept of what a failed section printed


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


def run_section(
    section: Section,
    options: Options,
    prefix: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Runs a section in another process, and reads the records that it made even if it was killed."""
    outcome, begin = Outcome(section.name), time.monotonic()
    # A process that cannot be killed may still write to its folder, which is then not our concern.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        lines = Path(folder) / "lines"
        asked = json.dumps({"section": asdict(section), "options": asdict(options)})
        command = [*prefix, sys.executable, "-m", "benchmarks.gpu.processes", asked, str(lines)]

        variables = {**os.environ, **section.environment, **(environment or {})}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        if options.dry_run:
            variables["TRITON_INTERPRET"] = "1"
        if section.own_cache:
            variables["TRITON_CACHE_DIR"] = str(Path(folder) / "triton")

        with (Path(folder) / "output").open("w+", errors="replace") as output:
            outcome.exit_code = _run(command, variables, output, section.seconds + GRACE)
            output.seek(0)
            outcome.output = output.read()
        records = read_lines(lines)

    ends = [record for record in records if record["kind"] == "end"]
    outcome.records = [record for record in records if record["kind"] != "end"]

    if ends:
        outcome.status, outcome.message = ends[-1]["status"], ends[-1]["message"]
        if "traceback" in ends[-1]:
            outcome.output += ends[-1]["traceback"]
    else:
        outcome.status, outcome.message = "failed", ended_early(outcome.exit_code, outcome.output)

    outcome.seconds = time.monotonic() - begin
    return outcome


def _run(command: list[str], variables: dict[str, str], output: IO[str], seconds: float) -> int | None:
    """A command's exit status; None if it was killed. Its output is a file, which children may keep open."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.returncode is None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(DEATH)


def ended_early(exit_code: int | None, output: str) -> str:
    """Why a process ended that wrote no end, from what it printed."""
    checks = re.findall(r"^check (.*)$", output, flags=re.MULTILINE)
    within = f" in the check {checks[-1]!r}" if checks else ""
    if "Timeout (" in output:
        return f"it hung{within}, at {innermost_frame(output)}"
    if exit_code is None:
        return f"it hung{within}, and was killed from outside"
    fatal = re.search(r"^Fatal Python error: .*$", output, flags=re.MULTILINE)
    ended = signal.Signals(-exit_code).name if exit_code < 0 else f"exit status {exit_code}"
    lines = [line for line in output.strip().splitlines() if not line.startswith("check ")]
    last = fatal[0] if fatal else next(reversed(lines), "no output")
    return f"{ended}{within}: {last}"


def innermost_frame(output: str) -> str:
    """Where the main thread was, the last one in what faulthandler writes."""
    dump = output[output.rindex("Timeout (") :]
    threads = re.split(r"^Thread .*$", dump, flags=re.MULTILINE)
    frame = re.search(r'File "(.*)", line (\d+) in (\S+)', threads[-1])
    return f"{Path(frame[1]).name}:{frame[2]}, {frame[3]}" if frame else "a place that is not known"


def write_records(records: Iterator[Record], seconds: float, lines: Path) -> bool:
    """Writes each record as soon as it is made, and how the records ended; whether no error ended them."""
    end = time.monotonic() + seconds
    with lines.open("w") as file:

        def write(record: Record) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()
            sections.progress()

        try:
            for record in records:
                write(record)
                if time.monotonic() > end:
                    write({"kind": "end", "status": "out of time", "message": f"after {seconds:g} s"})
                    return True
        except Exception as error:  # any error ends the section, and is recorded
            end_of_it = {"kind": "end", "status": "failed", "message": words(error)}
            write({**end_of_it, "traceback": traced(error)})
            return False
        write({"kind": "end", "status": "done", "message": ""})
        return True


def read_lines(path: Path) -> list[Record]:
    """The records in a file. A killed process may leave an incomplete last line, which is skipped."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


def kept_output(outcome: Outcome) -> str | None:
    """What is stored of a section's output: nothing of one that ended well."""
    return None if outcome.status == "done" else shortened(outcome.output, MOST_OUTPUT)


def main(asked: str, lines: str) -> int:
    """What a section's process does; its exit status is 1 if an error ended the section."""
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parsed = json.loads(asked)
    section, options = Section(**parsed["section"]), Options(**parsed["options"])
    sections.watch(section.seconds + GRACE / 2, section.quiet)

    def records() -> Iterator[Record]:  # an error of the section's import becomes a record too
        yield from section.records(options)

    ended_well = write_records(records(), section.seconds, Path(lines))
    sections.unwatch()
    return 0 if ended_well else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
