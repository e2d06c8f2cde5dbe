"""Fuzzes one target of C++ or all of them, and stores what came of it.

python -m tests.fuzz.native loss --minutes 10
python -m tests.fuzz.native all --minutes 60           an equal share for each target
python -m tests.fuzz.native loss --inputs 1000000      until so many inputs have been executed
python -m tests.fuzz.native loss --replay FILE         one input, such as that of a finding

The corpus that a target has learnt lies in build/fuzz/corpus/native-TARGET, findings in build/fuzz/findings.
Wants a clang with libFuzzer, such as Debian's clang-19.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import torch

from tests.fuzz.inputs import unpack
from tests.fuzz.native.build import TARGETS, compiler, fuzzer

ROOT = Path(__file__).parents[3]
RESULTS, BUILD = ROOT / "benchmarks" / "results" / "fuzz", ROOT / "build" / "fuzz"
COVERAGE = re.compile(r"cov: (\d+) ft: (\d+) corp: (\d+)/")
# What torch keeps until the process ends is no leak. Tracing an allocation takes longer than to make it.
SETTINGS = {
    "ASAN_OPTIONS": "detect_leaks=0:malloc_context_size=2:quarantine_size_mb=32",
    "OMP_NUM_THREADS": "1",
}
LONGEST, SEEDS = 256, 64  # bytes of an input; random inputs to begin with


def fuzz(target: str, minutes: float | None, inputs: int | None) -> bool:
    """Runs a fuzzer and stores its result as JSON; returns whether it found nothing."""
    corpus, findings = BUILD / "corpus" / f"native-{target}", BUILD / "findings" / f"native-{target}"
    corpus.mkdir(parents=True, exist_ok=True)
    findings.mkdir(parents=True, exist_ok=True)
    write_seeds(corpus)

    kept = unpack(f"native-{target}", BUILD / "kept" / f"native-{target}")
    arguments = [
        "-timeout=10",
        "-rss_limit_mb=4096",
        f"-max_len={LONGEST}",
        "-print_final_stats=1",
        f"-artifact_prefix={findings}/",
        str(corpus),
        str(kept),
        *([] if minutes is None else [f"-max_total_time={max(1, round(60 * minutes))}"]),
        *([] if inputs is None else [f"-runs={inputs}"]),
    ]

    program, begin = fuzzer(target), time.monotonic()
    told = []
    with subprocess.Popen(
        [program, *arguments], env=os.environ | SETTINGS, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", file=sys.stderr)
            told.append(line)

    log = "".join(told)
    edges, features, files = (COVERAGE.findall(log) or [(0, 0, 0)])[-1]
    result = {
        "target": f"native-{target}",
        "inputs": _number(r"number_of_executed_units: (\d+)", log),
        "accepted calls": _number(r"accepted: (\d+)", log),
        "seconds": round(time.monotonic() - begin),
        **{"coverage_edges": int(edges), "coverage_features": int(features), "corpus_files": int(files)},
        "findings": int(process.returncode != 0),
        "versions": {"torch": torch.__version__, "clang": Path(str(compiler())).name},
        "date": date.today().isoformat(),
    }

    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"native-{target}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)
    return process.returncode == 0


def write_seeds(corpus: Path) -> None:
    """Writes random inputs to begin with; short ones reach little."""
    for seed in range(SEEDS):
        (corpus / f"seed-{seed}").write_bytes(random.Random(seed).randbytes(LONGEST))


def _number(pattern: str, text: str) -> int:
    numbers = re.findall(pattern, text)
    return int(numbers[-1]) if numbers else 0


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.native", description=__doc__, formatter_class=form
    )
    parser.add_argument("target", choices=(*TARGETS, "all"))
    parser.add_argument("--minutes", type=float, help="how long, all targets together")
    parser.add_argument("--inputs", type=int, help="stop a target after so many inputs")
    parser.add_argument("--replay", type=Path, metavar="FILE")
    options = parser.parse_args()
    targets = TARGETS if options.target == "all" else (options.target,)
    if options.replay is not None:
        command = [fuzzer(options.target), options.replay]
        return subprocess.run(command, env=os.environ | SETTINGS).returncode
    if options.minutes is None and options.inputs is None:
        parser.error("want --minutes, --inputs or both")
    minutes = None if options.minutes is None else options.minutes / len(targets)
    failed = [target for target in targets if not fuzz(target, minutes, options.inputs)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
