"""Random problems of any make on the Triton engine, against the tests' oracle, for as long as one likes.

python -m benchmarks.random_problems --minutes 60 --most 40

Shapes, strides, dtypes and options are those of tests/shared/problems.py, up to a size that crosses
tiles. Without a GPU the kernels are interpreted. Stores how many were computed and how many refused,
of which makes, and every one that came out wrong.
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

from benchmarks.gpu_sections import ROOT
from benchmarks.machine import machine, slug
from benchmarks.render import RESULTS

AT_ONCE = 20  # problems drawn from one seed


def campaign(minutes: float, most: int, first_seed: int) -> dict[str, Any]:
    """Draws until the time is over, each seed's problems until one is wrong."""
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
        except (
            Exception
        ) as error:  # an assertion or whatever a kernel raises: stored, and the next seed follows
            wrong.append({"seed": number, "error": f"{type(error).__name__}: {error}"[:1000]})
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.random_problems", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--most", type=int, default=40, help="rows and columns of a problem, at most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    result = campaign(options.minutes, options.most, options.seed)
    device = slug(result["machine"]["device"])
    path = RESULTS / f"random-problems-{device}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['computed']} computed, {len(result['wrong'])} wrong: {path.relative_to(ROOT)}")
    sys.exit(bool(result["wrong"]))


if __name__ == "__main__":
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        # numpy warns of lanes that a kernel computes and does not use.
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.runtime.interpreter")
    main()
