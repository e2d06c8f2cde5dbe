"""Fuzzes a target until an input is a finding, or the time is over.

python -m tests.fuzz corpus -max_total_time=600    # and whatever else libFuzzer takes
python -m tests.fuzz corpus --keep FILE            # adds it to the inputs that the tests replay

What a target has learnt lies in build/fuzz/TARGET, and there an input that was a finding, as crash-*.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.fuzz.inputs import keep, unpack
from tests.fuzz.targets import INSTRUMENTED, TARGETS, load

BUILD = Path(__file__).parents[2] / "build" / "fuzz"
LONGEST = {"contrastive_loss": 160}  # bytes of an input; 4096 of a file


def fuzz(target: str, *arguments: str) -> None:
    """Does not return: libFuzzer ends the process, with another status than 0 where there is a finding."""
    import atheris

    learnt = BUILD / target
    learnt.mkdir(parents=True, exist_ok=True)
    limits = ["-timeout=60", "-rss_limit_mb=3072", f"-max_len={LONGEST.get(target, 4096)}"]
    folders = [str(learnt), str(unpack(target, BUILD / "kept" / target))]
    with atheris.instrument_imports(include=list(INSTRUMENTED[target])):
        run = load(target)
    command = [sys.argv[0], *limits, f"-artifact_prefix={learnt}/", *arguments, *folders]
    atheris.Setup(command, lambda data: run(data) and None)
    atheris.Fuzz()


def main(target: str, *arguments: str) -> None:
    if target not in TARGETS:
        raise SystemExit(f"target: want one of {', '.join(TARGETS)}, got {target}")
    if arguments[:1] == ("--keep",):
        keep(target, Path(arguments[1]).read_bytes())
        return
    if Path("/dev/shm").is_dir():
        tempfile.tempdir = "/dev/shm"  # where the files of inputs lie in memory
    fuzz(target, *arguments)


if __name__ == "__main__":
    main(*(sys.argv[1:] or [""]))
