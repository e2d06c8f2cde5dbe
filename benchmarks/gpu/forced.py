"""Losses in the tiles of large problems on Hopper, at sizes that are just large enough for them.

Its default reads the operands by tensor descriptors where the tiles are as many as the multiprocessors. The
warp-specialised kernel is taken only if a GPU's table names it. Neither is reached by smaller problems.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from unittest import mock

import torch

from benchmarks.gpu.correctness import Problem, problem_verdict
from benchmarks.gpu.sections import NotTakenError, Options, Verdict
from fastqt.devices import properties

ROWS = 2304  # 162 tiles of 128 x 256, which occupy the 132 multiprocessors of an H100
ANY = 2**62
WAYS = ("descriptors", "warp-specialised kernel")


def large_problem(options: Options, D: int) -> Problem:
    size = (13, 13, 8) if options.dry_run else (ROWS, ROWS, D)
    return Problem("large", "random", *size, (-1, 1), "zero", seeds=1)


def large_verdict(way: str, options: Options, memory: str, D: int) -> Verdict:
    """A loss and its gradients beside those of eager PyTorch, where the scores come from one of `WAYS`."""
    # The interpreter computes with numpy, which has no bfloat16.
    dtype = torch.float16 if options.dry_run else torch.bfloat16
    asked = large_problem(options, D)
    with tiles(way, asked, dtype, options):
        return problem_verdict(asked, dtype, memory, options.device)


@contextlib.contextmanager
def tiles(way: str, asked: Problem, dtype: torch.dtype, options: Options) -> Iterator[None]:
    """The engine takes the tiles; NotTakenError says why it cannot."""
    from fastqt.kernels import tuning
    from fastqt.kernels.launch import Config
    from fastqt.kernels.scores import warp_specialized_launch

    device = options.device
    if not options.dry_run and torch.cuda.get_device_capability(device)[0] != 9:
        raise NotTakenError("it is for GPUs of compute capability 9.0")

    table: dict[str, object] = {}
    if way == "warp-specialised kernel":
        refused = warp_specialized_launch.unusable()
        if refused is not None and not options.dry_run:
            raise NotTakenError(refused)
        config = {"rows": 128, "columns": 256, "width": 64, "stages": 4, "warp_specialized": True}
        entry = {"most_scores": ANY, "most_width": ANY, "config": config}
        name = "interpreter" if options.dry_run else properties(device).name
        table = {name: {"bfloat16": [entry]}}

    with mock.patch.object(tuning, "tables", return_value=table):
        chosen: Config = tuning.score_config(device, dtype, asked.N, asked.M, asked.D)
        taken = chosen.warp_specialized if way == "warp-specialised kernel" else chosen.descriptors
        if not taken and not options.dry_run:
            raise NotTakenError(f"the engine takes {chosen}, so that another kernel would be checked")
        yield


def large_tests(options: Options, memory: str, D: int) -> dict[str, partial[Verdict]]:
    """A test for each of `WAYS`."""
    return {way: partial(large_verdict, way, options, memory, D) for way in WAYS}
