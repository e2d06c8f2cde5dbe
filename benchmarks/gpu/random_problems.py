"""Compares the Triton engine with the tests' oracle on random problems for a given time.

python -m benchmarks.random_problems --minutes 60 --most 40

Shapes, strides, dtypes and options are those of tests/shared/problems.py, in sizes up to `--most`, so that
problems span several tiles. Without a GPU the kernels are interpreted. The stored run counts the problems
that were computed, by link, dtype and memory mode, and those that were refused; it lists the wrong ones.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections import Counter
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from benchmarks.gpu.sections import words
from benchmarks.measure.machine import machine, slug
from benchmarks.paths import RESULTS, ROOT

AT_ONCE = 20  # problems drawn from one seed


def campaign(minutes: float, most: int, first_seed: int) -> dict[str, Any]:
    """Draws problems until the time is over; a wrong one ends its seed."""
    sys.path.insert(0, str(ROOT / "tests" / "shared"))
    from problems import DTYPES, check, problems

    makes: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    end = time.monotonic() + 60 * minutes
    number = first_seed
    while time.monotonic() < end:

        @seed(number)
        @settings(
            max_examples=AT_ONCE,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(problems(DTYPES, most))
        def draw(problem: tuple[str, dict[str, Any]]) -> None:
            link, arguments = problem
            if time.monotonic() > end:
                return
            dtype = str(arguments["queries"].dtype).removeprefix("torch.")
            computed = check(link, {**arguments, "backend": "triton"})
            makes[f"{link}, {dtype}, {arguments['memory']}" if computed else "refused"] += 1

        try:
            draw()
        # A failed assertion or any error of a kernel: it is stored, and the next seed follows.
        except Exception as error:
            wrong.append({"seed": number, "error": words(error)})
        number += 1
    computed = sum(count for make, count in makes.items() if make != "refused")
    return {
        "machine": machine(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "minutes": minutes,
        "most": most,
        "seeds": [first_seed, number],
        "computed": computed,
        "makes": dict(sorted(makes.items())),
        "wrong": wrong,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.random_problems", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--most", type=int, default=40, help="largest number of rows and columns")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        # numpy warns about lanes that a kernel computes but does not use.
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.runtime.interpreter")
    result = campaign(options.minutes, options.most, options.seed)
    device = slug(result["machine"]["device"])
    path = RESULTS / f"random-problems-{device}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['computed']} computed, {len(result['wrong'])} wrong: {path.relative_to(ROOT)}")
    return 1 if result["wrong"] else 0
