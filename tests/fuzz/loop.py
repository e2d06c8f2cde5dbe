"""What libFuzzer drives: `python -m tests.fuzz.loop TARGET FINDINGS COUNTERS` and libFuzzer's arguments."""

from __future__ import annotations

import mmap
import sys
import time
from pathlib import Path

import atheris

from tests.fuzz.campaign import COUNTERS
from tests.fuzz.findings import Findings
from tests.fuzz.targets import INSTRUMENTED, load, memory_limited

LONGEST = 5  # seconds of processor time for an input


class TooSlowError(Exception):
    """An input that takes too long. One that never ends is libFuzzer's to find."""


def main(target: str, findings_folder: str, counters_file: str, *arguments: str) -> None:
    with atheris.instrument_imports(include=list(INSTRUMENTED[target])):
        run = load(target)
    findings = Findings(Path(findings_folder))
    with open(counters_file, "r+b") as file:
        counters = mmap.mmap(file.fileno(), COUNTERS.size)
    executed = accepted = 0

    def one_input(data: bytes) -> None:
        nonlocal executed, accepted
        executed += 1
        begin = time.process_time()
        try:
            accepted += run(data)
            if time.process_time() - begin > LONGEST:
                raise TooSlowError(f"took more than {LONGEST} seconds of a processor")
        except KeyboardInterrupt:
            raise
        # Panics of Rust are no Exception. What leaves a target is stored, and fuzzing goes on.
        except BaseException as error:
            findings.add(data, error)
        COUNTERS.pack_into(counters, 0, executed, accepted, len(findings.counts))

    atheris.Setup([sys.argv[0], *arguments], one_input)
    with memory_limited():
        atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
