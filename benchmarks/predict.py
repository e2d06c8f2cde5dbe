"""Predicts what a GPU should take for a loss: products at a rate, bytes at a rate, and launches.

python -m benchmarks.predict            # prints the table from the stored launches
python -m benchmarks.predict --write    # notes the Triton engine's launches again, on tensors without data

No GPU takes part, so nothing here is a measurement. What a launch reads and writes overlaps with its
products, but for a result that is added to, which the memory has to give back first. The instructions of a
kernel are not counted beside its products, so that one with a long epilogue takes longer than is said here.

The rate of products is what siglip-kernel's published times need: its own schedule, by these rules, gives
them on a GH200 (`siglip_kernel`).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.gpu.shapes import Shape
from benchmarks.measure.tables import table
from benchmarks.paths import RESULTS

# Imported within functions: Triton looks once, and early, whether it is to interpret.
if TYPE_CHECKING:
    from tests.shared.launches import Case, Event, Launch

STORED = RESULTS / "predicted-launches.json"
PRODUCTS = 560e12  # bfloat16 operations a second that were reached in whole losses, on a GH200
LAUNCH = 1.5e-6  # seconds of a launch in a CUDA graph
LAST_SHARE = 0.9  # of the memory's peak
H100, GH200 = LAST_SHARE * 3.35e12, LAST_SHARE * 4.0e12  # bytes a second
BFLOAT16, FLOAT32 = 2, 4  # bytes
LARGE = (65536, 768), (16384, 1024)  # rows of each side, and their width
CONTESTANTS = {"fast": "fastqt window", "low": "fastqt window low"}  # of the check on a GPU, by memory=


class Work(NamedTuple):
    """Equal launches of a schedule.

    Attributes:
        count: how many there are.
        operations: of a launch's product.
        moved: bytes that a launch reads and writes.
        added: bytes of a result that is added to, read and written.
    """

    count: int
    operations: float
    moved: float
    added: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """All launches of a loss with its gradients."""

    loss: str
    N: int
    D: int
    memory: str
    work: tuple[Work, ...]


def seconds(work: Iterable[Work], memory: float = H100) -> float:
    """What a schedule takes, one launch after the other, at a pace of the memory."""
    return sum(
        w.count * (LAUNCH + max(w.operations / PRODUCTS, w.moved / memory) + w.added / memory) for w in work
    )


def product(n: int, m: int, k: int, itemsize: int, out_itemsize: int, add: bool = False) -> Work:
    """A product of (n, k) by (k, m), written or added to what is there."""
    operands, result = itemsize * k * (n + m), out_itemsize * n * m
    return Work(1, 2 * n * m * k, operands if add else operands + result, 2 * result if add else 0)


def three_products(N: int, D: int) -> list[Work]:
    """Those that no loss can do without, with results in bfloat16."""
    shapes = (N, N, D), (N, D, N), (N, D, N)
    return [product(*shape, BFLOAT16, BFLOAT16) for shape in shapes]


def siglip_kernel(N: int, D: int, chunk: int) -> list[Work]:
    """siglip-kernel's schedule: of each chunk of rows the scores twice, and the products of both gradients.

    The candidates' gradients are added up in float32.
    """
    scores = product(chunk, N, D, BFLOAT16, BFLOAT16)
    of_queries = product(chunk, D, N, BFLOAT16, BFLOAT16)
    of_candidates = product(N, D, chunk, BFLOAT16, FLOAT32, add=True)
    return [work._replace(count=N // chunk) for work in (scores, scores, of_queries, of_candidates)]


def cases() -> Iterator[Case]:
    """The problems of the table, each with its gradients times an upstream one."""
    from tests.shared.launches import Case

    for N, D in (*LARGE, (8192, 2400), (65536, 256), (65536, 64)):
        yield Case("QuickThoughts", N=N, D=D)

    pairs = Case("SigLIP", targets="own", diagonal="keep", scale=True, link="sigmoid", bias=True)
    others = (
        Case("QuickThoughts", memory="low"),
        pairs,
        replace(pairs, name="CLIP", clip=True, link="softmax", bias=False),
        Case("MixCSE released", three_blocks="both"),
    )
    for case in others:
        for N, D in LARGE:
            yield replace(case, N=N, D=D)


def noted_schedules() -> Iterator[Schedule]:
    """What the Triton engine would launch on an H100 for each problem."""
    from tests.shared.launches import GPUS, noted

    hopper = next(gpu for gpu in GPUS if gpu.arch == 90)
    for case in cases():
        counted = Counter(work_of(event) for event in noted(replace(case, upstream=True), hopper))
        work = tuple(each._replace(count=count) for each, count in counted.items())
        yield Schedule(case.name, case.N, case.D, case.memory, work)


def work_of(event: Event) -> Work:
    """The work of one launch, and of a product or an operation of torch's.

    Raises:
        ValueError: of a kernel whose bytes nobody has written down here; the message names it.
    """
    from tests.shared.launches import Operation, Product

    if isinstance(event, Product):
        return product(event.n, event.m, event.k, event.itemsize, event.out_itemsize, event.add)
    if isinstance(event, Operation):
        return Work(1, 0, event.bytes)

    name = event.kernel.__name__
    if name in IDLE or any(event.flags.get(flag) for flag in ("ONLY_OVERFLOWED", "shift_overflowed")):
        return Work(1, 0, 0)
    if name == "scores_kernel":
        return scores(event)
    if name not in BYTES:
        raise ValueError(f"kernel: want one of {', '.join(BYTES)}, got {name}: say in BYTES what it moves")
    return Work(1, 0, BYTES[name](event))


# They find nothing to do where no row has to be repaired, and where the upstream gradient is 1.
IDLE = ("raise_row_shifts_kernel", "row_products_kernel", "scale_gradients_kernel")


def scores(launch: Launch) -> Work:
    """The product of the scores, which are not stored, or are as what the epilogue makes of them."""
    arguments = launch.arguments
    queries, rows, columns = matrix(arguments["queries"]), arguments["N"], arguments["M"]
    D, out = queries.shape[1], arguments["out"]
    stored = 0 if out is None else rows * columns * out.element_size()
    return Work(1, 2 * rows * columns * D, queries.element_size() * D * (rows + columns) + stored)


def matrix(operand: Any) -> Any:
    """The tensor that a kernel is given, by a pointer or by a descriptor."""
    return getattr(operand, "base", operand)


def bytes_of_sums(launch: Launch) -> int:
    """The tiles' sums of each row, and what comes of them."""
    sums = launch.arguments["tile_row_sums"]
    return FLOAT32 * sums.numel() + 64 * sums.shape[1]


def bytes_of_cells(launch: Launch, *outputs: str) -> int:
    """The cosines of the lines that are in memory, and what is written for each of their cells."""
    cosines = launch.arguments["cosines"]
    written = (launch.arguments[name] for name in outputs)
    return cosines.numel() * (FLOAT32 + sum(x.element_size() for x in written if x is not None))


def bytes_of_gradients(launch: Launch) -> int:
    """A product's rows, those of targets or negatives that are added to them, and the gradient."""
    embeddings, sums = launch.arguments["embeddings"], launch.arguments["product"]
    of_row = embeddings.shape[1] * embeddings.element_size()
    rows = 2 if launch.arguments["of_columns"] else 2 + launch.flags["GRADIENT"] + launch.flags["WEIGHTED"]
    return launch.programs * (rows * of_row + embeddings.shape[1] * sums.element_size())


def bytes_of_pairs(launch: Launch) -> int:
    """Each query and its target."""
    queries = launch.arguments["queries"]
    return 2 * launch.programs * queries.shape[1] * queries.element_size()


def bytes_of_copies(launch: Launch) -> int:
    return sum(x.numel() * x.element_size() for x in (launch.arguments[n] for n in ("matrix", "copy")))


# What the other kernels read and write.
BYTES: dict[str, Callable[[Launch], int]] = {
    "row_shifts_kernel": bytes_of_pairs,
    "row_stats_kernel": bytes_of_sums,
    "sigmoid_row_stats_kernel": bytes_of_sums,
    "gradient_kernel": bytes_of_gradients,
    "bias_gradient_kernel": lambda launch: 16 * launch.arguments["columns"],
    "copy_rows_kernel": bytes_of_copies,
    "three_block_rows_kernel": bytes_of_cells,
    "three_block_gradients_kernel": lambda launch: bytes_of_cells(launch, "to_queries", "to_candidates"),
}


@functools.cache
def stored() -> tuple[Schedule, ...]:
    """The schedules as they were noted last."""
    schedules = json.loads(STORED.read_text())["schedules"]
    return tuple(Schedule(**{**each, "work": tuple(Work(*w) for w in each["work"])}) for each in schedules)


def as_json(schedules: Iterable[Schedule]) -> str:
    """A line for each schedule."""
    import torch
    import triton

    versions = {"triton": triton.__version__, "torch": torch.__version__.split("+")[0]}
    lines = ",\n".join(json.dumps(vars(s)) for s in schedules)
    return f'{{"versions": {json.dumps(versions)}, "schedules": [\n{lines}\n]}}\n'


def predictions() -> dict[tuple[Shape, str], tuple[float, float]]:
    """Seconds, and times the three products', by shape and contestant of the check on a GPU."""
    return {
        (Shape(s.N, s.N, s.D), CONTESTANTS[s.memory]): (
            seconds(s.work),
            seconds(s.work) / seconds(three_products(s.N, s.D)),
        )
        for s in stored()
        if s.loss == "QuickThoughts"
    }


def milliseconds(value: float) -> str:
    return f"{value * 1e3:,.2f}"


def predictions_table() -> str:
    header = ("loss", "N = M", "D", "memory", "launches", "three products, ms", "predicted ms", "× products")
    lines = []
    for s in stored():
        products, spent = seconds(three_products(s.N, s.D)), seconds(s.work)
        launches = sum(w.count for w in s.work)
        shape = s.loss, f"{s.N:,}", f"{s.D:,}", s.memory, f"{launches:,}"
        lines.append((*shape, milliseconds(products), milliseconds(spent), f"{spent / products:.2f} ×"))
    return table(header, lines)


# Of a trip past all candidates: operations in n N D, n of N rows on a rank, and bytes of messages in N D.
TRIPS = {
    "a softmax ring's first trip": (2, 2),
    "softmax or sigmoid, gradients in bfloat16": (6, 2 + 2),
    "the same, gradients in float32": (6, 2 + 4),
    "CLIP, gradients in float32": (8, 2 + 4),
}
LINKS = {"NVLink, 450 GB/s": 450e9, "8 rails, 340 GB/s": 340e9, "one NIC, 50 GB/s": 50e9}


def hidden_from(operations: float, moved: float, bandwidth: float) -> float:
    """The rows of a rank from which on products take longer than messages, whatever N and D are."""
    return moved * PRODUCTS / (operations * bandwidth)


def thresholds_table() -> str:
    lines = (
        (name, *(f"{hidden_from(*trip, bandwidth):,.0f}" for bandwidth in LINKS.values()))
        for name, trip in TRIPS.items()
    )
    return table(("rows a rank", *LINKS), lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predict", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"note the launches, into {STORED.name}")
    parser.add_argument(
        "--note", action="store_true", help="note the launches, and print what is stored of them"
    )
    arguments = parser.parse_args()

    if arguments.write or arguments.note:
        os.environ.pop("TRITON_INTERPRET", None)
        text = as_json(noted_schedules())
        if arguments.note:
            sys.stdout.write(text)
        else:
            STORED.write_text(text)
    else:
        print(predictions_table())


if __name__ == "__main__":
    main()
