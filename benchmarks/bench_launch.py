"""What a launch of a Triton kernel costs the host, by Triton's own way and planned, and what a step costs it.

python -m benchmarks.bench_launch --out benchmarks/results/launch.json

It needs no GPU. A driver that does nothing takes the place of CUDA's, so that the times are those of Python.
The launcher would add to both, and more to Triton's own way, in which it asks the driver about each tensor.
Both ways take turns. The least time of many short ones is that which other work on the machine disturbed the
least; the median is stored with it. A process of its own runs this, in which Triton does not interpret.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure.machine import processor_and_versions
from benchmarks.measure.timing import Clock
from tests.shared import host_calls
from tests.shared.absent_driver import absent_driver

ROUNDS = 2000
CALLS = 10  # per reading of the clock
N, M, D, CHUNK = 4096, 4096, 64, 512


def scores_arguments(first: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A launch of the scores kernel as `exp_scores` makes it for a chunk of rows with a window of targets."""
    import triton.language as tl

    queries, candidates = (torch.empty(n, D, dtype=torch.bfloat16) for n in (N, M))
    lowest, highest = (torch.empty(N, dtype=torch.int32) for _ in range(2))
    positional = (
        queries,
        candidates,
        torch.empty(()),
        CHUNK,
        M,
        D // 8,
        first,
        0,
        D // 8,
        1,
        D // 8,
        1,
        M,
        0,
        0,
    )
    named = {
        "EPILOGUE": "EXP",
        "EXCLUDE_DIAGONAL": True,
        "EVEN_M": True,
        "EVEN_D": True,
        "DESCRIPTORS": False,
        "FAR": False,
        "ROUND": False,
        "UNIT": 8,
        "COMPUTE": tl.bfloat16,
        "PRECISION": "ieee",
        **{"BLOCK_N": 128, "BLOCK_M": 128, "BLOCK_D": 64, "GROUP_N": 8},
        "bias": None,
        "target_starts": torch.empty(N + 1, dtype=torch.int64),
        "target_columns": torch.empty(2 * N, dtype=torch.int64),
        "lowest_targets": lowest,
        "highest_targets": highest,
        **{"query_groups": None, "candidate_groups": None, "mask": None},
        "row_shift_log2": torch.empty(N),
        "row_factors": None,
        "out": torch.empty(CHUNK, M, dtype=torch.bfloat16),
        "tile_row_sums": torch.empty(M // 128, CHUNK),
        "tile_column_sums": None,
        **{"num_warps": 8, "enable_fp_fusion": True, "num_stages": 4},
    }
    return positional, named


def sigmoid_row_stats_arguments(first: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A launch of the kernel of a sigmoid's row statistics for the same chunk."""

    def rows(dtype: torch.dtype) -> Tensor:
        return torch.empty(N, dtype=dtype)

    targets = [torch.empty(2 * N, dtype=dtype) for dtype in (torch.int64, torch.float64, torch.float32)]
    positional = (
        torch.empty(M // 128, CHUNK),
        torch.empty(N + 1, dtype=torch.int64),
        *targets,
        rows(torch.bool),
        None,
        *(rows(torch.float64) for _ in range(2)),
        torch.empty(2 * N),
        None,
        CHUNK,
        M // 128,
        first,
    )
    named = {"ZEROED": True, "ROW_NEGATIVE": 0, "BLOCK_ROWS": 8, "BLOCK": 32}
    return positional, {**named, "num_warps": 4, "enable_fp_fusion": True}


def launches() -> dict[str, dict[str, Callable[[], None]]]:
    """For each kernel both ways of launching it, for one chunk after the other."""
    from fastqt.kernels.scores.mainloop import scores_kernel
    from fastqt.kernels.sigmoid import sigmoid_row_stats_kernel

    def repeated(kernel: Any, arguments: Callable[[int], Any]) -> Callable[[], None]:
        # An offset of 0 and one of 1 have code of their own, where 1 is possible.
        chunks = [arguments(first) for first in range(CHUNK, N, CHUNK)]

        def run() -> None:
            for i in range(CALLS):
                positional, named = chunks[i % len(chunks)]
                kernel[(1024,)](*positional, **named)

        return run

    cases = ((scores_kernel, scores_arguments), (sigmoid_row_stats_kernel, sigmoid_row_stats_arguments))
    return {
        planned.jit_function.__name__: {
            "triton": repeated(planned.jit_function, arguments),
            "planned": repeated(planned, arguments),
        }
        for planned, arguments in cases
    }


def measured() -> dict[str, Any]:
    """Microseconds of a launch, least and median, and Triton's as a multiple of a planned one."""
    clock = Clock(torch.device("cpu"))
    figures: dict[str, Any] = {}
    with absent_driver():
        for kernel, ways in launches().items():
            for run in ways.values():
                run()
            times: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(ROUNDS):
                for way, run in ways.items():
                    times[way].append(1e6 * clock.seconds(run) / CALLS)
            figures[kernel] = {
                way: {"least": min(taken), "median": statistics.median(taken)} for way, taken in times.items()
            }
            for figure in ("least", "median"):
                triton, planned = (figures[kernel][way][figure] for way in ("triton", "planned"))
                figures[kernel][f"ratio_of_{figure}s"] = triton / planned
    return figures


class _Empty(torch.autograd.Function):
    """Gives its inputs for their gradients: what torch's autograd costs by itself."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return ctx.saved_tensors


def steps() -> dict[str, dict[str, float]]:
    """Microseconds of the host for forward and backward of 64 pairs of bfloat16, whose launches do nothing.

    CPU tensors stand for those of a GPU, so that what torch's own few operations cost is that of a CPU's.
    """
    clock = Clock(torch.device("cpu"))
    inputs = host_calls.leaves()

    def stepped(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
        def step() -> None:
            for x in inputs:
                x.grad = None
            loss(*inputs).backward()

        return step

    with host_calls.taken_for_a_gpu():
        losses = host_calls.losses()
        ways = {"an empty autograd function": stepped(_Empty.apply)}
        ways |= {name: stepped(losses[name]) for name in ("InfoNCE", "QuickThoughts")}
        for run in ways.values():
            for _ in range(10):  # the second step of a kind is noted, and the next ones repeat it
                run()
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, run in ways.items():
                times[way].append(1e6 * clock.seconds(run))
    return {way: {"least": min(taken), "median": statistics.median(taken)} for way, taken in times.items()}


def main() -> None:
    import triton

    parser = argparse.ArgumentParser(description="Times launches of Triton kernels without a GPU.")
    parser.add_argument("--out", type=Path, help="where the figures are stored as JSON")
    out = parser.parse_args().out
    report = {
        **processor_and_versions(),
        "triton_version": triton.__version__,
        "rounds": ROUNDS,
        "calls": CALLS,
        "microseconds": measured(),
        "microseconds of a step": steps(),
    }
    text = json.dumps(report, indent=1) + "\n"
    print(text, end="")
    if out is not None:
        out.write_text(text)


if __name__ == "__main__":
    main()
