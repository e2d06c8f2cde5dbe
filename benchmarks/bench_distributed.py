"""Losses of a batch that several processes hold, beside one process with the whole batch.

pytest --benchmark --benchmark-json benchmarks/results/distributed.json benchmarks/bench_distributed.py

Each process has one thread, and what counts is the CPU time of all processes together, Gloo's threads and the
system's work included: with more processes than cores the wall clock would measure how they take turns. As in
a training, a step follows another: the one before it is not counted, in which the system hands out memory
that it has taken back while the other contestants ran.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

import fastqt
from benchmarks.measure.ranks import Ranks, cpu_seconds
from benchmarks.measure.workloads import embeddings, forward_and_backward, peak_above_gradients
from fastqt.distributed import Group
from fastqt.engines.cpu import contrastive as cpu

N, D = 8192, 768
EXCHANGES = "gather", "ring"
ROUNDS = 3
OPTIONS = {"info_nce_loss": {"scale": 20.0}, "clip_loss": {"scale": 20.0}}
# Rows of all candidates that a rank holds with "gather": they, their gradients and what arrives of these;
# and a copy in another order where its own come first, for the diagonal or the pairs.
COPIES = {"contrastive_loss": 4, "info_nce_loss": 3, "clip_loss": 4}
VISITING = 6  # shards in a ring, beside the gradients that are kept


def contestants(loss: str, rows: int) -> dict[str, Callable[[], Any]]:
    """What a rank can do: the CPU seconds of a step by either exchange, and its peak memory."""
    size, rank = dist.get_world_size(), dist.get_rank()
    whole = [x.detach() for x in embeddings(rows, rows, D=D)]
    local_rows = [x[rank * rows // size : (rank + 1) * rows // size].clone().requires_grad_() for x in whole]
    few = [x.detach()[:64].clone().requires_grad_() for x in local_rows]

    def step(leaves: list[Tensor], **group: Any) -> Callable[[], None]:
        function = partial(getattr(fastqt, loss), *leaves, **OPTIONS.get(loss, {}), **group)
        return forward_and_backward(function, *leaves)

    def seconds(step: Callable[[], None]) -> float:
        step()
        dist.barrier()
        begin = cpu_seconds()
        step()
        return cpu_seconds() - begin

    groups = {"alone": {}} if size == 1 else {x: {"group": Group(exchange=x)} for x in EXCHANGES}
    functions: dict[str, Callable[[], Any]] = {}
    for name, group in groups.items():
        functions[name] = partial(seconds, step(local_rows, **group))
        functions[f"{name} peak"] = partial(peak_above_gradients, step(local_rows, **group), local_rows)
        # What libraries allocate once is no memory of a call.
        step(few, **({"group": Group(exchange=name)} if group else {}))()
    return functions


def predicted_peak(loss: str, size: int, exchange: str) -> int:
    """The bytes that a rank is to take above its rows and their gradients: rows, and a tile of scores."""
    rows, tile = N // size, cpu.CHUNK_BYTES
    if exchange == "gather":
        return 4 * COPIES[loss] * N * D + tile
    cells = min(rows, cpu.TILE_ROWS) * min(rows, cpu.TILE_COLUMNS)
    if loss == "clip_loss" and 4 * rows * rows <= tile:
        cells = rows * rows
    return 4 * (VISITING * rows * D + cells)


@pytest.mark.parametrize("size", [2, 4], ids="size{}".format)
@pytest.mark.parametrize("loss", ["clip_loss", "contrastive_loss", "info_nce_loss"])
def test_distributed(benchmark, loss, size):
    rows = 256 if benchmark.disabled else N
    one, several = (Ranks(ranks, contestants, loss, rows) for ranks in (1, size))
    alone: list[float] = []
    seconds: dict[str, list[float]] = {name: [] for name in EXCHANGES}

    def turn() -> None:
        alone.extend(one.run("alone"))
        for name, times in seconds.items():
            times.append(sum(several.run(name)))

    try:
        peak_alone = one.run("alone peak")[0]
        peaks = {name: max(several.run(f"{name} peak")) for name in EXCHANGES}
        benchmark.pedantic(turn, rounds=ROUNDS)
    finally:
        one.close()
        several.close()
    benchmark.extra_info.update(
        loss=loss,
        size=size,
        N=rows,
        D=D,
        rounds=ROUNDS,
        threads_of_each_process=1,
        cpu_seconds_alone=median(alone),
        peak_alone=peak_alone,
        exchanges={
            name: {
                "cpu_seconds": median(times),
                "ratio_to_one": median(ours / theirs for ours, theirs in zip(times, alone, strict=True)),
                "peak_above_gradients": peaks[name],
                "predicted_peak": predicted_peak(loss, size, name),
            }
            for name, times in seconds.items()
        },
    )
