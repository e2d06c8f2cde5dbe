"""Runs libFuzzer on a target in a process of its own, again after each crash, and stores the result."""

from __future__ import annotations

import json
import os
import platform
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.fuzz.inputs import unpack

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "fuzz.json"  # of each target
BUILD = ROOT / "build" / "fuzz"
LONGEST = {"contrastive_loss": 160}  # bytes of an input; 4096 of a file
MOST_CRASHES = 20
STATUS = re.compile(r"^#(\d+)\s.*cov: (\d+) ft: (\d+) corp: (\d+)/")
# What the fuzzed process tells its parent in shared memory, which a crash leaves as it is: inputs that were
# executed, those that were accepted, and findings.
COUNTERS = struct.Struct("<3Q")


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
    totals, crashes = [0, 0, 0], 0
    coverage: dict[str, int] = {}

    while crashes <= MOST_CRASHES:
        left = None if seconds is None else seconds - (time.monotonic() - begin)
        if (left is not None and left < 1) or (inputs is not None and totals[0] >= inputs):
            break

        more = None if inputs is None else inputs - totals[0]
        status, counts, reached = _process(target, findings, left, more)
        totals = [a + b for a, b in zip(totals, counts, strict=True)]
        coverage |= reached
        crashes += status != 0

    executed, accepted, raised = totals
    names = ("fastqt", "atheris", "torch", "numpy", "safetensors", "tokenizers")
    store(
        target,
        {
            "inputs": executed,
            "accepted": accepted,
            "seconds": round(time.monotonic() - begin),
            **coverage,
            "findings": raised,
            "crashes": crashes,
            "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
        },
    )
    return raised + crashes


def store(target: str, result: Mapping[str, Any]) -> None:
    """Prints the result of a target, and puts it into the file of all in place of an older one."""
    result = {"target": target, **result, "date": date.today().isoformat()}
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(dict(sorted({**stored, target: result}.items())), indent=1) + "\n")
    print(json.dumps(result), flush=True)


def fuzzed(
    command: Sequence[str | Path],
    target: str,
    findings: Path,
    limits: Sequence[str],
    seconds: float | None,
    inputs: int | None,
    settings: Mapping[str, str],
) -> tuple[int, dict[str, int], list[str]]:
    """Runs a program of libFuzzer: its exit status, the coverage that it reached, and what it told."""
    corpus = BUILD / "corpus" / target
    for folder in (findings, corpus):
        folder.mkdir(parents=True, exist_ok=True)
    arguments = [
        *limits,
        f"-artifact_prefix={findings}/",
        "-print_final_stats=1",
        *([] if seconds is None else [f"-max_total_time={max(1, round(seconds))}"]),
        *([] if inputs is None else [f"-runs={inputs}"]),
        *(str(corpus), str(unpack(target, BUILD / "kept" / target))),
    ]

    coverage: dict[str, int] = {}
    told = []
    with subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **settings},
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", file=sys.stderr)
            told.append(line)
            if status := STATUS.match(line):
                names = ("coverage_edges", "coverage_features", "corpus_files")
                coverage = dict(zip(names, map(int, status.groups()[1:]), strict=True))
    return process.returncode, coverage, told


def _process(
    target: str, findings: Path, seconds: float | None, inputs: int | None
) -> tuple[int, tuple[int, ...], Mapping[str, int]]:
    """One process of libFuzzer: its exit status, its counters, and the coverage that it reached."""
    limits = [
        # libFuzzer's own limit counts the time on the wall, of which a busy machine may take many seconds.
        "-timeout=300",
        "-rss_limit_mb=3072",
        f"-max_len={LONGEST.get(target, 4096)}",
        *(["-len_control=0"] if target in LONGEST else []),
    ]
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=in_memory) as scratch:
        counters = Path(scratch) / "counters"
        counters.write_bytes(bytes(COUNTERS.size))
        settings = {"TOKENIZERS_PARALLELISM": "false", "TMPDIR": scratch}
        command = [sys.executable, "-m", "tests.fuzz.loop", target, str(findings), str(counters)]
        status, coverage, _ = fuzzed(command, target, findings, limits, seconds, inputs, settings)
        return status, COUNTERS.unpack(counters.read_bytes()), coverage
