"""Finds the fastest tiles for the scores' kernel on a GPU; fastqt.kernels.tuning reads the table it writes.

python -m benchmarks.tune                                   # all dtypes in 10 minutes, into kernels/tuned/
python -m benchmarks.tune --dtype bfloat16 --minutes 3
python -m benchmarks.tune --dry-run --out DIR               # tiny problems on a CPU, in Triton's interpreter

Each epilogue that `fastqt.kernels.tuning` tells from others has tiles of its own, because the values that it
keeps beside a tile's take registers.
A dtype's table is replaced as soon as one of its shapes has been measured. The tables of other dtypes stay.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.peers import Shape
from benchmarks.gpu.tune_scores import EPILOGUES, Scores
from benchmarks.measure.machine import slug
from benchmarks.measure.timing import Clock, first_line
from benchmarks.paths import ROOT

# fastqt.kernels is imported within functions, because its import fixes whether Triton interprets.
if TYPE_CHECKING:
    from fastqt.kernels.launch import Config

TUNED = ROOT / "kernels" / "tuned"
DTYPES = ("bfloat16", "float16", "float32")
MOST_ACCUMULATORS = 128  # float32 for each thread; more would spill
FINALISTS = 4  # configs that are measured again, in turns and with every group
ANY = 2**62


@dataclass(frozen=True)
class Space:
    """The configs to try: every combination that fits."""

    rows: tuple[int, ...] = (64, 128, 256)
    columns: tuple[int, ...] = (64, 128, 256)
    widths: tuple[int, ...] = (128, 64, 32)
    warps: tuple[int, ...] = (8, 4)
    stages: tuple[int, ...] = (4, 3, 2, 5)
    groups: tuple[int, ...] = (8, 4, 16)
    descriptors: tuple[bool, ...] = (False, True)

    def configs(self, itemsize: int, shared_bytes: int) -> list[Config]:
        """All with the first group, those first that are most like the engine's own: time may run out.

        Of as many that are as near, large tiles mostly win.
        """
        from fastqt.kernels.launch import Config
        from fastqt.kernels.tuning import DEFAULT, HOPPER, HOPPER_TALL

        configs = [
            Config(rows, columns, width, self.groups[0], warps, stages, descriptors)
            for rows in self.rows
            for columns in self.columns
            for width in self.widths
            for warps in self.warps
            for stages in self.stages
            for descriptors in self.descriptors
        ]
        fitting = [config for config in configs if fits(config, itemsize, shared_bytes)]
        likely = [asdict(config) for config in (HOPPER, HOPPER_TALL, *DEFAULT.values())]

        def distance(config: Config) -> int:
            """How many of its numbers are others than those of a likely one."""
            numbers = asdict(config)
            return min(sum(numbers[name] != value for name, value in other.items()) for other in likely)

        return sorted(fitting, key=lambda config: (distance(config), -config.rows * config.columns))


def fits(config: Config, itemsize: int, shared_bytes: int) -> bool:
    """Whether the operands' tiles of all stages fit in shared memory, and the accumulators in registers."""
    staged = (config.rows + config.columns) * config.width * itemsize * config.stages
    accumulators = config.rows * config.columns / (32 * config.warps)
    return staged <= shared_bytes and accumulators <= MOST_ACCUMULATORS


@dataclass(frozen=True)
class Cell:
    """An entry of the table: what is measured stands for all problems of an epilogue within the limits."""

    shape: Shape
    most_scores: int
    most_width: int
    epilogue: str = "plain"

    @property
    def name(self) -> str:
        return self.shape.name if self.epilogue == "plain" else f"{self.shape.name}, {self.epilogue}"


@dataclass(frozen=True)
class Plan:
    cells: tuple[Cell, ...]  # a problem takes the first one of its epilogue whose limits it is within
    space: Space  # of the plain epilogue
    other_space: Space  # of the others: fewer configs, as the time is short
    rounds: int
    compiled_rows: int = 256  # size of the problem for which configs are compiled ahead; a multiple of 16

    def space_of(self, epilogue: str) -> Space:
        return self.space if epilogue == "plain" else self.other_space


OTHERS = tuple(name for name in EPILOGUES if name != "plain")
PLAN = Plan(
    (
        Cell(Shape(1024, 1024, 768), 2**21, ANY),
        Cell(Shape(8192, 8192, 768), 2**27, 1024),
        Cell(Shape(8192, 8192, 2400), 2**27, ANY),
        Cell(Shape(16384, 16384, 1024), ANY, 1024),
        Cell(Shape(4096, 65536, 4096), ANY, ANY),
        *(Cell(Shape(8192, 8192, 768), ANY, ANY, epilogue) for epilogue in OTHERS),
    ),
    Space(),
    Space((128, 256), (64, 128, 256), (64, 32), (8,), (4, 3), (8, 16)),
    rounds=10,
)
DRY_PLAN = Plan(
    (
        Cell(Shape(10, 10, 8), 2**8, ANY),
        Cell(Shape(12, 20, 16), ANY, ANY),
        *(Cell(Shape(12, 20, 16), ANY, ANY, epilogue) for epilogue in OTHERS),
    ),
    Space((16,), (16, 32), (16,), (4,), (2,), (2, 1), (False,)),
    Space((16,), (16, 32), (16,), (4,), (2,), (2,), (False,)),
    rounds=1,
    compiled_rows=16,
)


@dataclass
class Tuned:
    """A cell's best config, with its time and the numbers of configs tried and dropped."""

    config: Config
    seconds: float
    tried: int
    dropped: int


def tune(
    scores: Scores, plan: Plan, cell: Cell, itemsize: int, shared_bytes: int, clock: Clock, end: float
) -> Tuned | None:
    """The fastest config for a cell that is found before `end`; None if none works."""
    dropped = 0
    first_look: list[tuple[float, Config]] = []

    space = plan.space_of(cell.epilogue)
    configs = space.configs(itemsize, shared_bytes)
    look_until = end - 0.2 * (end - time.monotonic())
    tried = 0

    for config in configs:
        if first_look and time.monotonic() > look_until:
            break

        tried += 1
        seconds = attempt(scores, config, clock, min(plan.rounds, 3))
        if seconds is None:
            dropped += 1
        else:
            first_look.append((seconds, config))

    if not first_look:
        return None
    best = sorted(first_look, key=lambda look: look[0])[:FINALISTS]
    finalists = [replace(config, group=group) for _, config in best for group in space.groups]

    times: dict[Config, list[float]] = {config: [] for config in finalists}
    for config in finalists:
        if attempt(scores, config, clock, 1) is None:
            del times[config]

    for turn in range(plan.rounds):
        if turn and time.monotonic() > end:
            break
        for config, seconds in times.items():
            seconds.append(clock.seconds(lambda config=config, turn=turn: scores.launch(config, turn)))

    medians = {config: statistics.median(seconds) for config, seconds in times.items()}
    if not medians:
        return None

    winner = min(medians, key=lambda config: medians[config])
    return Tuned(winner, medians[winner], tried, dropped)


def attempt(scores: Scores, config: Config, clock: Clock, rounds: int) -> float | None:
    """Median seconds; None for a config that does not compile, does not fit or computes wrong sums."""
    try:
        if not scores.is_right(config):
            return None
        return statistics.median(
            clock.seconds(lambda turn=turn: scores.launch(config, turn)) for turn in range(rounds)
        )
    except Exception as error:  # Triton and CUDA raise many types; the config is dropped
        print(f"  {config}: {first_line(error)}", file=sys.stderr)
        return None


def compile_share(plan: Plan, dtype: torch.dtype, device: torch.device, share: int, shares: int) -> None:
    """Compiles every `shares`-th config into Triton's cache, on a problem with the same divisibilities.

    The first configs of all epilogues come before the second ones, since time may run out.
    """
    rows, clock = plan.compiled_rows, Clock(device)
    kinds = sorted({(cell.epilogue, cell.shape.D) for cell in plan.cells})
    scores = [Scores(Shape(rows, rows, D), dtype, device, epilogue) for epilogue, D in kinds]
    spaces = [plan.space_of(epilogue).configs(dtype.itemsize, shared_memory(device)) for epilogue, _ in kinds]
    for place in range(share, max(map(len, spaces)), shares):
        for of_kind, configs in zip(scores, spaces, strict=True):
            if place < len(configs):
                attempt(of_kind, configs[place], clock, 1)


def compile_ahead(dtype: str, dry_run: bool, seconds: float) -> None:
    """Compiles all configs, or as many as the time allows, in one process for each processor.

    Their errors are not shown: a config that fails here fails again, and is reported, where it is measured.
    """
    shares = 1 if dry_run else len(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "benchmarks.tune", "--dtype", dtype]
    command += ["--dry-run"] if dry_run else []
    workers = [
        subprocess.Popen([*command, "--share", f"{k}/{shares}"], cwd=ROOT, stderr=subprocess.DEVNULL)
        for k in range(shares)
    ]
    end = time.monotonic() + seconds
    for worker in workers:
        try:
            worker.wait(max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def plan_for(device: torch.device) -> Plan:
    """The plan for a device. Descriptors need Hopper or later."""
    if device.type != "cuda":
        return DRY_PLAN
    capability = torch.cuda.get_device_capability(device)
    descriptors = PLAN.space.descriptors if capability >= (9, 0) else (False,)
    space = replace(PLAN.space, descriptors=descriptors)
    return replace(PLAN, space=space, other_space=replace(PLAN.other_space, descriptors=descriptors))


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may use."""
    if device.type != "cuda":
        return 2**17
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def entries(
    plan: Plan, dtype: torch.dtype, device: torch.device, end: float, say: Callable[[str], None]
) -> Iterator[list[dict[str, Any]]]:
    """Yields the table of a dtype after each cell that is measured."""
    clock, table = Clock(device), []
    for k, cell in enumerate(plan.cells):
        now = time.monotonic()
        if table and now > end:
            say(f"{dtype}: time ended before {cell.name}")
            return

        scores = Scores(cell.shape, dtype, device, cell.epilogue)
        cell_end = now + (end - now) / (len(plan.cells) - k)

        tuned = tune(scores, plan, cell, dtype.itemsize, shared_memory(device), clock, cell_end)
        if tuned is None:
            say(f"{dtype} {cell.name}: no config works")
            continue

        f, g = scores.pair(0)
        product = statistics.median(
            clock.seconds(lambda f=f, g=g, scores=scores: torch.mm(f, g.T, out=scores.stored))
            for _ in range(1 + plan.rounds)
        )

        del scores, f, g
        clock.free()
        say(
            f"{dtype} {cell.name}: {tuned.seconds * 1e3:.3f} ms, "
            f"{tuned.seconds / product:.2f} × torch.mm, {tuned.config}, "
            f"{tuned.tried} tried, {tuned.dropped} dropped"
        )

        limits = {"most_scores": cell.most_scores, "most_width": cell.most_width}
        table.append({"epilogue": cell.epilogue, **limits, "config": asdict(tuned.config)})
        yield list(table)


def write_table(path: Path, device: str, dtype: str, table: list[dict[str, Any]]) -> None:
    """Replaces a dtype's table in a GPU's file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.loads(path.read_text()) if path.exists() else {"device": device, "scores": {}}
    content["scores"][dtype] = table
    path.write_text(json.dumps(content, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--dtype", action="append", choices=DTYPES, help="may be given several times; all by default"
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="time for all dtypes together")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"{TUNED.relative_to(ROOT)} by default")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny problems on a CPU, in Triton's interpreter"
    )
    parser.add_argument("--share", help=argparse.SUPPRESS)
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if not math.isfinite(options.minutes) or options.minutes <= 0:
        parser.error("--minutes wants a positive number")

    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        parser.error("no CUDA device was found; --dry-run needs none")

    device = torch.device("cpu") if options.dry_run else torch.device("cuda", torch.cuda.current_device())
    plan = plan_for(device)
    dtypes = options.dtype or list(DTYPES)

    if options.share is not None:
        share, shares = map(int, options.share.split("/"))
        for dtype in dtypes:
            compile_share(plan, getattr(torch, dtype), device, share, shares)
        return 0

    if options.dry_run and options.out is None:
        parser.error("--dry-run wants --out: its table is no GPU's, so it has no default place")
    name = "interpreter" if options.dry_run else torch.cuda.get_device_name(device)
    path = (options.out or TUNED) / f"{slug(name)}.json"

    measured = 0
    end = time.monotonic() + 60 * options.minutes

    for k, dtype in enumerate(dtypes):
        now = time.monotonic()
        dtype_end = now + (end - now) / (len(dtypes) - k)

        compile_ahead(dtype, options.dry_run, 0.5 * (dtype_end - now))
        for table in entries(plan, getattr(torch, dtype), device, dtype_end, print):
            write_table(path, name, dtype, table)
            measured += 1

    print(f"{path.name}: {measured} of {len(dtypes) * len(plan.cells)} entries")
    return 0 if measured else 1
