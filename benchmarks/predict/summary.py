"""The table of predictions in docs/benchmarks.md, from the stored inputs of both models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.measure.tables import table
from benchmarks.predict import cuda_estimate, estimate
from benchmarks.predict.products import gemm_time
from benchmarks.predict.report import milliseconds
from benchmarks.predict.roofline import Rates
from benchmarks.predict.schedules import device_seconds

LARGEST_OF_ONE_LAUNCH = 1024  # rows; larger problems are the Triton engine's


@dataclass(frozen=True)
class Prediction:
    engine: str
    loss: str
    N: int
    D: int
    seconds: float
    gemm_seconds: float | None  # None where the engine's model has no time of the three GEMMs alone

    def cells(self) -> tuple[str, ...]:
        shape = self.engine, self.loss, f"{self.N:,}", f"{self.D:,}"
        seconds = milliseconds(self.seconds)
        if self.gemm_seconds is None:
            return *shape, "–", seconds, "–"
        ratio = f"{self.seconds / self.gemm_seconds:.2f} ×"
        return *shape, milliseconds(self.gemm_seconds), seconds, ratio


def of_triton() -> Iterator[Prediction]:
    """The Triton engine's predictions, with memory="fast"."""
    stored = json.loads(estimate.STORED.read_text())
    rates = Rates(**stored["rates"])
    for schedule in stored["schedules"]:
        N, D = schedule["N"], schedule["D"]
        if schedule["memory"] == "fast" and N > LARGEST_OF_ONE_LAUNCH:
            seconds = device_seconds(schedule, stored["kernels"], rates)
            yield Prediction("triton", schedule["loss"], N, D, seconds, gemm_time(N, D, rates))


def of_one_launch() -> Iterator[Prediction]:
    """The predictions of the kernel that takes a small batch in one launch."""
    stored = json.loads(cuda_estimate.STORED.read_text())
    for N, D, phases in cuda_estimate.predictions(stored):
        seconds = sum(time for _, time, _ in phases)
        yield Prediction("cuda", "QuickThoughts", N, D, seconds, None)


def predictions_table() -> str:
    header = ("engine", "loss", "N = M", "D", "three GEMMs, ms", "predicted ms", "× GEMMs")
    return table(header, (prediction.cells() for prediction in [*of_triton(), *of_one_launch()]))
