"""What the models in benchmarks/predict say that a contestant takes, read from their stored inputs.

The documents are rendered from the same files, so that both have the same numbers.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

from benchmarks.gpu.shapes import Shape
from benchmarks.predict import cuda_estimate, estimate
from benchmarks.predict.products import gemm_time
from benchmarks.predict.roofline import Rates
from benchmarks.predict.schedules import device_seconds

CONTESTANTS = {"fast": "fastqt window", "low": "fastqt window low"}  # that compute the model's QuickThoughts
ONE_LAUNCH = "fastqt one launch"


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step in a CUDA graph, and as a multiple of the three products' where that is predicted."""

    seconds: float
    ratio: float | None


@functools.cache
def predictions() -> dict[tuple[Shape, str], Prediction]:
    """By shape and contestant."""
    stored = json.loads(estimate.STORED.read_text())
    rates = Rates(**stored["rates"])
    by_contestant = {}
    for schedule in stored["schedules"]:
        N, D = schedule["N"], schedule["D"]
        if schedule["loss"] == "QuickThoughts":
            seconds = device_seconds(schedule, stored["kernels"], rates)
            key = Shape(N, N, D), CONTESTANTS[schedule["memory"]]
            by_contestant[key] = Prediction(seconds, seconds / gemm_time(N, D, rates))
    for N, D, phases in cuda_estimate.predictions(json.loads(cuda_estimate.STORED.read_text())):
        by_contestant[Shape(N, N, D), ONE_LAUNCH] = Prediction(sum(time for _, time, _ in phases), None)
    return by_contestant
