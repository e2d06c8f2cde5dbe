"""Losses of a batch that several processes hold, beside one process with the whole batch.

for loss in contrastive_loss info_nce_loss clip_loss; do
    pytest --benchmark --benchmark-json benchmarks/results/distributed-$loss.json \\
        benchmarks/bench_distributed.py -k $loss
done

Each loss's run is stored on its own. Each process has one thread, and what counts is the CPU time of all
processes together, Gloo's threads and the system's work included: with more processes than cores the wall
clock would measure how they take turns. The times are of calls after the first, in which ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import pytest
import torch.distributed as dist

import fastqt
from benchmarks.measure.ranks import Ranks, cpu_seconds
from benchmarks.measure.workloads import embeddings, forward_and_backward, peak_above_gradients
from fastqt.distributed import Group

N, D = 8192, 768
SIZES = 1, 2, 4
EXCHANGES = "gather", "ring"
ROUNDS = 3
OPTIONS = {"info_nce_loss": {"scale": 20.0}, "clip_loss": {"scale": 20.0}}


def contestants(loss: str, rows: int) -> dict[str, Callable[[], Any]]:
    """What a rank can do: the CPU seconds of a step by either exchange, and its peak memory."""
    size, rank = dist.get_world_size(), dist.get_rank()
    leaves = [
        x.detach()[rank * rows // size : (rank + 1) * rows // size].clone()
        for x in embeddings(rows, rows, D=D)
    ]
    for leaf in leaves:
        leaf.requires_grad_()
    function = partial(getattr(fastqt, loss), *leaves, **OPTIONS.get(loss, {}))
    if size == 1:
        steps = {"alone": forward_and_backward(function, *leaves)}
    else:
        steps = {
            exchange: forward_and_backward(partial(function, group=Group(exchange=exchange)), *leaves)
            for exchange in EXCHANGES
        }

    def seconds(step: Callable[[], None]) -> float:
        dist.barrier()
        begin = cpu_seconds()
        step()
        return cpu_seconds() - begin

    found: dict[str, Callable[[], Any]] = {}
    for name, step in steps.items():
        found[name] = partial(seconds, step)
        found[f"{name} peak"] = partial(peak_above_gradients, step, leaves)
    return found


@pytest.mark.parametrize("loss", ["contrastive_loss", "info_nce_loss", "clip_loss"])
def test_distributed(benchmark, loss):
    rows = 256 if benchmark.disabled else N
    pools = [Ranks(size, contestants, loss, rows) for size in SIZES]
    alone, *others = pools
    names = {(1, "alone"): alone, **{(pool.size, name): pool for pool in others for name in EXCHANGES}}
    seconds: dict[tuple[int, str], list[float]] = {key: [] for key in names}

    def turn() -> None:
        for (size, name), pool in names.items():
            seconds[size, name].append(sum(pool.run(name)))

    try:
        peaks = {(size, name): max(pool.run(f"{name} peak")) for (size, name), pool in names.items()}
        benchmark.pedantic(turn, rounds=ROUNDS)
    finally:
        for pool in pools:
            pool.close()
    once = median(seconds[1, "alone"])
    benchmark.extra_info.update(
        loss=loss,
        N=rows,
        D=D,
        rounds=ROUNDS,
        threads=1,
        seconds_alone=once,
        peak_alone=peaks[1, "alone"],
        ranks=[
            {
                "size": size,
                "exchange": name,
                "cpu_seconds": median(times),
                "ratio_to_one": median(times) / once,
                "peak_above_gradients": peaks[size, name],
            }
            for (size, name), times in seconds.items()
            if size > 1
        ],
    )
