"""Runs libFuzzer on a target in a process of its own, again after each crash, and stores the result."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import date, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.fuzz.counters import COUNTERS
from tests.fuzz.inputs import unpack

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "fuzz"
BUILD = ROOT / "build" / "fuzz"
LONGEST = {"contrastive_loss": 160}  # bytes of an input; 4096 of a file
MOST_CRASHES = 20
STATUS = re.compile(r"^#(\d+)\s.*cov: (\d+) ft: (\d+) corp: (\d+)/")


def campaign(target: str, seconds: float | None, inputs: int | None) -> int:
    """Fuzzes a target for a time or a number of inputs, whichever ends first.

    Args:
        target: its name.
        seconds: how long; None for as long as the inputs take.
        inputs: how many inputs; None for as many as there is time for.

    Returns:
        The number of findings, crashes included.
    """
    findings = BUILD / "findings" / f"{target}-{datetime.now():%Y%m%d-%H%M%S}"
    begin = time.monotonic()
    executed = accepted = raised = crashes = 0
    coverage: dict[str, int] = {}

    while True:
        left = None if seconds is None else seconds - (time.monotonic() - begin)
        if (left is not None and left < 1) or (inputs is not None and executed >= inputs):
            break

        more = None if inputs is None else inputs - executed
        status, counts, reached = _process(target, findings, left, more)
        executed, accepted, raised = (
            a + b for a, b in zip((executed, accepted, raised), counts, strict=True)
        )
        coverage |= reached
        crashes += status != 0
        if crashes > MOST_CRASHES:
            break

    result = {
        "target": target,
        "inputs": executed,
        "accepted": accepted,
        "seconds": round(time.monotonic() - begin),
        **coverage,
        "findings": raised,
        "crashes": crashes,
        "versions": _versions(),
        "date": date.today().isoformat(),
    }

    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{target}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)
    return raised + crashes


def _process(
    target: str, findings: Path, seconds: float | None, inputs: int | None
) -> tuple[int, tuple[int, ...], Mapping[str, int]]:
    """One process of libFuzzer: its exit status, its counters, and the coverage that it reached."""
    corpus = BUILD / "corpus" / target
    findings.mkdir(parents=True, exist_ok=True)
    corpus.mkdir(parents=True, exist_ok=True)
    kept = unpack(target, BUILD / "kept" / target)

    arguments = [
        # libFuzzer's own limit counts the time on the wall, of which a busy machine may take many seconds.
        "-timeout=300",
        "-rss_limit_mb=3072",
        f"-max_len={LONGEST.get(target, 4096)}",
        *(["-len_control=0"] if target in LONGEST else []),
        f"-artifact_prefix={findings}/",
        "-print_final_stats=1",
        *([] if seconds is None else [f"-max_total_time={max(1, round(seconds))}"]),
        *([] if inputs is None else [f"-runs={inputs}"]),
        str(corpus),
        str(kept),
    ]

    coverage: dict[str, int] = {}
    with tempfile.TemporaryDirectory(dir=_memory()) as scratch:
        counters = Path(scratch) / "counters"
        counters.write_bytes(bytes(COUNTERS.size))
        settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TMPDIR": scratch}
        command = [sys.executable, "-m", "tests.fuzz.loop", target, str(findings), str(counters), *arguments]

        with subprocess.Popen(
            command, cwd=ROOT, env=os.environ | settings, stderr=subprocess.PIPE, text=True, errors="replace"
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                print(line, end="", file=sys.stderr)
                if status := STATUS.match(line):
                    names = ("coverage_edges", "coverage_features", "corpus_files")
                    coverage = dict(zip(names, map(int, status.groups()[1:]), strict=True))
        return process.returncode, COUNTERS.unpack(counters.read_bytes()), coverage


def _memory() -> str | None:
    """A file system in memory, where there is one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _versions() -> dict[str, Any]:
    names = ("fastqt", "atheris", "torch", "numpy", "safetensors", "tokenizers")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}
