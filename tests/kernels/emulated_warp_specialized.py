"""Single launches of the warp-specialised kernel, executed from the PTX that Triton makes of it for Hopper.

python -m tests.kernels.emulated_warp_specialized reads a JSON list of objects with fields of `Request`, and
prints what became of each as a line of JSON. It is a process of its own, in which Triton does not interpret.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import re
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before anything imports fastqt.kernels

import torch
from torch import Tensor

from emulator.machine import StoppedError
from fastqt.kernels.launch import Config
from fastqt.kernels.scores import Tile, warp_specialized, warp_specialized_launch
from tests.shared.emulation import Compiled, Edit, Emulation
from tests.shared.launches import GPUS, Launch, standing_in
from tests.shared.tolerances import relative

HOPPER = next(gpu for gpu in GPUS if gpu.arch == 90)
ROWS, COLUMNS, DEPTH = 128, 64, 16  # the smallest tile and step that the kernel's layouts allow
ALIGNED = 8  # elements of two bytes, of which rows that are copied begin at multiples
SCALE = 0.2
NOWHERE = 2**31 - 1


@dataclass(frozen=True)
class Request:
    """A launch, in several orders of the warps.

    Attributes:
        shape: rows, columns, depth, and where the rows and columns begin among all.
        orders: schedules with their seeds, one after the other until something is wrong.
        source: what is changed in the kernel's source, and to what.
        ptx: a pattern of what is changed in the kernel's PTX, and to what.
    """

    shape: tuple[int, int, int, int, int]
    diagonal: bool = True
    targets: bool = True
    factors: bool = False
    stored: bool = True
    summed: bool = True
    programs: int = 1
    stages: int = 3
    lead: int = 2
    orders: tuple[tuple[str, int], ...] = (("lockstep", 0),)
    source: tuple[str, str] | None = None
    ptx: tuple[str, str] | None = None


class Problem:
    """The matrices of a request, and what is to be written, which is NaN before."""

    def __init__(self, request: Request) -> None:
        self.request = request
        rows, columns, depth, first_n, first_m = request.shape
        everyone = first_n + rows + 5

        generator = torch.Generator().manual_seed(rows)
        self.queries = aligned_rows(torch.randn(everyone, depth, generator=generator))
        self.candidates = aligned_rows(torch.randn(columns, depth, generator=generator))
        self.shifts = torch.linspace(-1, 1, everyone)
        self.factors = torch.linspace(1, -2, everyone) if request.factors else None
        self.targets: list[list[int]] = [[] for _ in range(everyone)]  # of each row, sorted
        if request.targets:
            span = first_m + columns
            for i in {*range(everyone)} - {first_n + 1}:
                self.targets[i] = sorted({i + 1, i // 2, (7 * i) % span} & {*range(span)})

        self.E = aligned_rows(torch.full((rows, columns), math.nan)) if request.stored else None
        self.sums = torch.full((-(-columns // COLUMNS), rows), math.nan) if request.summed else None

    def launch(self) -> None:
        """Has the kernel's launcher launch it."""
        request = self.request
        rows, _, _, first_n, first_m = request.shape
        lists: dict[str, Tensor] = {}
        if request.targets:
            lengths = torch.tensor([len(of_row) for of_row in self.targets])
            lists = {
                "target_starts": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
                "target_columns": torch.tensor([j for of_row in self.targets for j in of_row]),
                "lowest_targets": int32([min(of_row, default=NOWHERE) for of_row in self.targets]),
                "highest_targets": int32([max(of_row, default=-1) for of_row in self.targets]),
            }

        tile = Tile(first_n, rows, self.candidates, first_m, request.diagonal, **lists)
        config = Config(ROWS, COLUMNS, DEPTH, stages=request.stages, warp_specialized=True)
        operands = {
            "out": self.E,
            "row_shift_log2": self.shifts,
            "row_factors": self.factors,
            "tile_row_sums": self.sums,
        }
        warp_specialized_launch.launch(tile, self.queries, torch.tensor(SCALE), config, operands)

    def errors(self) -> dict[str, float]:
        """Of every cell, relative to itself, and of every sum, against float64; infinite where 0 is not 0."""
        rows, columns, _, first_n, first_m = self.request.shape
        part = slice(first_n, first_n + rows)
        x = SCALE * self.queries[part].double() @ self.candidates.double().T
        exact = (x - math.log(2) * self.shifts[part, None].double()).exp()

        i, j = torch.arange(rows)[:, None] + first_n, torch.arange(columns) + first_m
        excluded = (i == j) & self.request.diagonal
        for k, of_row in enumerate(self.targets[part]):
            excluded[k] |= torch.isin(j, torch.tensor(of_row, dtype=torch.int64))
        exact[excluded] = 0

        errors = {}
        if self.sums is not None:
            errors["sums"] = relative(self.sums, torch.stack([x.sum(1) for x in exact.split(COLUMNS, 1)]))
        if self.E is not None:
            if self.factors is not None:
                exact = exact * self.factors[part, None].double()
            difference = (self.E.double() - exact).abs()
            relative_to_itself = torch.where(difference == 0, 0.0, difference / exact.abs())
            errors["cells"] = relative_to_itself.max().item()
        return errors


def aligned_rows(x: Tensor) -> Tensor:
    """A matrix in bfloat16 whose rows the copy engine can read and write."""
    pitch = -(-x.shape[1] // ALIGNED) * ALIGNED
    return torch.full((x.shape[0], pitch), math.nan, dtype=torch.bfloat16)[:, : x.shape[1]].copy_(x)


def int32(x: list[int]) -> Tensor:
    return torch.tensor(x, dtype=torch.int32)


@functools.cache
def kernel(source: tuple[str, str] | None) -> Any:
    """The kernel, or what it is after a change of its source."""
    if source is None:
        return warp_specialized.warp_specialized_scores_kernel
    text = Path(warp_specialized.__file__).read_text()
    if text.count(source[0]) != 1:
        raise ValueError(f"source: want a text that the kernel has once, got {source[0]!r}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "changed.py")
        path.write_text(text.replace(*source))
        spec = importlib.util.spec_from_file_location("changed", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module.warp_specialized_scores_kernel


@functools.cache
def compilations(source: tuple[str, str] | None, ptx: tuple[str, str] | None) -> dict[str, Compiled]:
    """What has been compiled of a kernel, which requests share."""
    return {}


def outcome(request: Request) -> dict[str, Any]:
    """What became of the first order in which something is wrong, or of the last one."""
    result: dict[str, Any] = {}
    for schedule, seed in request.orders:
        result = executed(request, schedule, seed)
        if result["stopped"] or result["reports"]:
            break
    return result


def executed(request: Request, schedule: str, seed: int) -> dict[str, Any]:
    """What a launch writes, and what the emulator has to say of it."""
    changed, edit = kernel(request.source), None
    if request.ptx is not None:
        pattern, instead = request.ptx
        edit = Edit(changed.__name__, lambda ptx: re.sub(pattern, instead, ptx))
    compiled = compilations(request.source, request.ptx)
    emulation = Emulation(HOPPER, schedule, seed, edit, compiled=compiled)

    def launched(launch: Launch) -> None:
        arguments = {**launch.arguments, "LEAD": request.lead}
        emulation.launch(replace(launch, kernel=changed, arguments=arguments, grid=(request.programs,)))

    problem, stopped = Problem(request), False
    try:
        with standing_in(HOPPER, None, launched):
            problem.launch()
    except StoppedError:
        stopped = True
    return {
        "order": [schedule, seed],
        "stopped": stopped,
        "kinds": sorted(emulation.reports.kinds()),
        "reports": [str(report) for report in emulation.reports],
        "errors": problem.errors(),
    }


def hashable(value: Any) -> Any:
    return tuple(map(hashable, value)) if isinstance(value, list) else value


if __name__ == "__main__":
    torch.set_num_threads(1)
    for fields in json.load(sys.stdin):
        request = Request(**{name: hashable(value) for name, value in fields.items()})
        print(json.dumps(outcome(request)), flush=True)
