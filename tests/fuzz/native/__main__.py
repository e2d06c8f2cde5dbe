"""Fuzzes one target of C++ or all of them, and stores what came of it.

python -m tests.fuzz.native loss --minutes 10
python -m tests.fuzz.native all --minutes 60           an equal share for each target
python -m tests.fuzz.native loss --inputs 1000000      until so many inputs have been executed
python -m tests.fuzz.native loss --replay FILE         one input, such as that of a finding

The corpus that a target has learnt lies in build/fuzz/corpus/native-TARGET, findings in build/fuzz/findings.
Wants a clang with libFuzzer, such as Debian's clang-19.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

from tests.fuzz.__main__ import command_line
from tests.fuzz.campaign import BUILD, fuzzed, store
from tests.fuzz.native.build import TARGETS, compiler, fuzzer

# What torch keeps until the process ends is no leak. Tracing an allocation takes longer than to make it.
SETTINGS = {
    "ASAN_OPTIONS": "detect_leaks=0:malloc_context_size=2:quarantine_size_mb=32",
    "OMP_NUM_THREADS": "1",
}
LONGEST, SEEDS = 256, 64  # bytes of an input; random inputs to begin with
NO_COVERAGE = dict.fromkeys(("coverage_edges", "coverage_features", "corpus_files"), 0)


def fuzz(target: str, seconds: float | None, inputs: int | None) -> int:
    """Runs a fuzzer and stores its result; returns whether it found something."""
    name = f"native-{target}"
    corpus = BUILD / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    write_seeds(corpus)
    program, begin = fuzzer(target), time.monotonic()
    limits = ["-timeout=10", "-rss_limit_mb=4096", f"-max_len={LONGEST}"]
    status, coverage, told = fuzzed(
        [program], name, BUILD / "findings" / name, limits, seconds, inputs, SETTINGS
    )
    store(
        name,
        {
            "inputs": _number(r"number_of_executed_units: (\d+)", told),
            "accepted calls": _number(r"accepted: (\d+)", told),
            "seconds": round(time.monotonic() - begin),
            **(NO_COVERAGE | coverage),
            "findings": int(status != 0),
            "versions": {"torch": torch.__version__, "clang": Path(str(compiler())).name},
        },
    )
    return int(status != 0)


def write_seeds(corpus: Path) -> None:
    """Writes random inputs to begin with; the short ones with which libFuzzer would begin reach little."""
    for seed in range(SEEDS):
        (corpus / f"seed-{seed}").write_bytes(random.Random(seed).randbytes(LONGEST))


def _number(pattern: str, told: list[str]) -> int:
    numbers = re.findall(pattern, "".join(told))
    return int(numbers[-1]) if numbers else 0


def replay(target: str, file: Path) -> int:
    return subprocess.run([fuzzer(target), file], env=os.environ | SETTINGS).returncode


if __name__ == "__main__":
    sys.exit(command_line("tests.fuzz.native", __doc__, TARGETS, fuzz, {"replay": replay}))
