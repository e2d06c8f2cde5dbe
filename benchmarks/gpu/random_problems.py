"""Compares an engine with the tests' oracle on random problems, for a given time or number.

python -m benchmarks.random_problems --minutes 60 --most 40
python -m benchmarks.random_problems --backend cpu --count 20000
python -m benchmarks.random_problems --backend torch --count 10000

Shapes, strides, dtypes and options are those of tests/shared/problems.py, in sizes up to `--most`, so that
problems span several tiles. Without a GPU the Triton kernels are interpreted. The engine of torch operations
takes all rows at once, then a few and then one at a time. The stored run counts the problems that were
computed, by what is particular to them, and those that were refused; it lists the wrong ones.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import time
import warnings
from collections import Counter
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.sections import words
from benchmarks.keep import keep
from benchmarks.measure.machine import machine, slug
from benchmarks.paths import ROOT
from fastqt.engines.chunked import walk
from tests.shared.draws import Seeded
from tests.shared.problem_check import check
from tests.shared.problems import ALL_DTYPES, DTYPES, Maker

# What a chunk of the engine of torch operations may take, in bytes: all rows of these problems, a few, one.
CHUNK_BYTES = (walk.ROOM["cpu"][0], 8000, 1)


def campaign(backend: str, minutes: float, count: float, most: int, first_seed: int) -> dict[str, Any]:
    """Checks a problem a seed until the time is over, or `count` of them were computed."""
    dtypes = tuple(DTYPES) if backend == "triton" else ALL_DTYPES
    makes: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    begin, computed, number = time.monotonic(), 0, first_seed
    while time.monotonic() < begin + 60 * minutes and computed < count:
        problem = Maker(Seeded(number), dtypes, most).problem
        # A failed assertion or any error of an engine: it is stored, and the next seed follows.
        room = CHUNK_BYTES[number % len(CHUNK_BYTES)]
        try:
            with mock.patch.dict(walk.ROOM, cpu=(room, room)):
                right = check(problem, backend)
            if right:
                computed += 1
                makes.update(problem.makes)
            else:
                makes["refused"] += 1
        except Exception as error:
            wrong.append({"seed": number, "makes": problem.makes, "error": words(error)})
        number += 1
    where = machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return {
        "machine": where if backend == "triton" else where | {"device": f"{platform.machine()} CPU"},
        "backend": backend,
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "most": most,
        "seeds": [first_seed, number - 1],
        "computed": computed,
        "makes": dict(sorted(makes.items())),
        "wrong": wrong,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.random_problems", description=__doc__)
    parser.add_argument("--backend", choices=("triton", "cpu", "torch"), default="triton")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--count", type=int, default=math.inf, help="stop after so many computed problems")
    parser.add_argument("--most", type=int, default=40, help="largest number of rows and columns")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
    if options.backend == "triton" and not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        # numpy warns about lanes that a kernel computes but does not use.
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.runtime.interpreter")
    result = campaign(options.backend, options.minutes, options.count, options.most, options.seed)
    name = slug(result["machine"]["device"]) if options.backend == "triton" else options.backend
    path = keep("random-problems", name, result)
    print(f"{result['computed']} computed, {len(result['wrong'])} wrong: {path.relative_to(ROOT)}")
    return 1 if result["wrong"] else 0
