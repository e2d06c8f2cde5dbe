"""Losses in the tiles of large problems on Hopper, at sizes that are just large enough for them.

There the operands are read by tensor descriptors, where the tiles are as many as the multiprocessors.
"""

from __future__ import annotations

from functools import partial
from unittest import mock

import torch

from benchmarks.gpu.correctness import Problem, problem_verdict
from benchmarks.gpu.sections import NotTakenError, Options, Verdict

ROWS = 2304  # 162 tiles of 128 x 256, which occupy the 132 multiprocessors of an H100


def large_verdict(options: Options, memory: str, D: int) -> Verdict:
    """A loss and its gradients beside those of eager PyTorch, where descriptors read the operands."""
    from fastqt.kernels import tuning

    # The interpreter computes with numpy, which has no bfloat16.
    dtype = torch.float16 if options.dry_run else torch.bfloat16
    size = (13, 13, 8) if options.dry_run else (ROWS, ROWS, D)
    asked = Problem("large", "random", *size, (-1, 1), "zero", seeds=1)

    with mock.patch.object(tuning, "tables", return_value={}):
        if not options.dry_run:
            if torch.cuda.get_device_capability(options.device)[0] != 9:
                raise NotTakenError("it is for GPUs of compute capability 9.0")
            chosen = tuning.score_config(options.device, dtype, asked.N, asked.M, asked.D)
            if not chosen.descriptors:
                raise NotTakenError(f"the engine takes {chosen}, so that another kernel would be checked")

        return problem_verdict(asked, dtype, memory, options.device)


def large_test(options: Options, memory: str, D: int) -> partial[Verdict]:
    return partial(large_verdict, options, memory, D)
