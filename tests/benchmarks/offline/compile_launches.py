"""Compiles what the launcher of the warp-specialised kernel asks of Triton, for a Hopper that is not there.

The tests run this in a process of its own, in which Triton does not interpret. Tensors are on the CPU, and a
driver that only knows its target makes Triton's own launcher specialise and compile. No kernel is launched.
"""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu import tune
from benchmarks.offline.compile import USAGE, compiler

HOPPER_BYTES = 227 * 1024


class Driver:
    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(config: Any, *, first: int = 0, rows: int = 300) -> dict[str, Any]:
    """A launch with all that a softmax has: partial tiles, exact cells, E and its sums."""
    from triton.runtime.jit import JITFunction

    from fastqt.kernels.scores import Tile, column_tiles, warp_specialized_launch
    from fastqt.kernels.scores.epilogues import EXP

    queries, candidates = (torch.empty(n, 768, dtype=torch.bfloat16) for n in (300, 700))
    starts, columns = torch.arange(301), torch.arange(300)
    tile = Tile(first, rows, candidates, first, True, starts, columns, columns.int(), columns.int())
    operands = {
        "out": torch.empty(rows, 704, dtype=torch.bfloat16)[:, :700],
        "row_shift_log2": torch.empty(300),
        "row_factors": None,
        "tile_row_sums": torch.empty(column_tiles(700, config), rows),
    }
    found: list[Any] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        found.append(run(kernel, *args, warmup=True, **kwargs))

    log = io.StringIO()
    with mock.patch.object(JITFunction, "run", compile_only), contextlib.redirect_stdout(log):
        refused = warp_specialized_launch.why_not(tile, queries, config, EXP, operands)
        if refused is None:
            warp_specialized_launch.launch(tile, queries, torch.ones(()), config, operands)
    usage = USAGE.search(log.getvalue())
    return {
        **{"config": asdict(config), "refused": refused, "first": first, "rows": rows},
        "unspilled": usage is not None and not any(map(int, usage.groups())),
        "shared": found[0].metadata.shared,
        "estimate": warp_specialized_launch.shared_bytes(config, 2),
        "threads": 32 * found[0].metadata.num_warps,
    }


def main() -> None:
    with compiler():
        from triton.runtime import driver

        driver.set_active(Driver())
        configs = tune.PLAN.space.configs(2, HOPPER_BYTES)
        roles = [config for config in configs if config.warp_specialized]
        # Arguments that are 1 are constants to Triton.
        launches = [(config, 0, 300) for config in roles] + [(roles[0], 1, 299), (roles[0], 0, 1)]
        print(json.dumps([compiled(config, first=first, rows=rows) for config, first, rows in launches]))


if __name__ == "__main__":
    main()
