"""Predicts what an H100 will take, from the compiled kernels and the Triton engine's launches.

python -m benchmarks.predict.estimate            # prints gpu_estimates.md from the stored JSON
python -m benchmarks.predict.estimate --write    # compiles the kernels for sm_90, then stores both

No GPU takes part, so nothing here is a measurement.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.measure.tables import table
from benchmarks.offline.compile import attempt, compiler
from benchmarks.predict.launches import GPUS, Case, Gpu, Launch, Operation, Product, noted
from benchmarks.predict.roofline import Rates, Stored, blocks_per_multiprocessor, event_time, gemm_time

DOCUMENT = Path(__file__).with_name("gpu_estimates.md")
STORED = DOCUMENT.with_suffix(".json")
SHAPES = ((65536, 768), (16384, 1024), (8192, 2400), (1024, 768), (400, 1000))
SIGLIP = "SigLIP"
CLIP = "CLIP"
MIXCSE = "MixCSE released"
LARGE_SHAPES = ((65536, 768), (16384, 1024))  # of these three
GOALS = {"fast": 1.12, "low": 1.45}  # times GEMM time
GOAL_SMALL = 20e-6  # seconds, of the paper's batch
SMALL = 400
KEPT = ("threads", "registers", "shared", "spills", "sass")  # of what is known of a compiled kernel
SLOWEST, FASTEST = 700e12, 790e12  # of what cuBLAS sustains in bfloat16


def row_bytes(launch: Launch) -> int:
    """What a row kernel reads and writes, targets' rows from the cache not counted."""
    arguments, programs = launch.arguments, launch.programs
    name = launch.kernel.__name__
    if name in ("row_stats_kernel", "sigmoid_row_stats_kernel"):
        sums = arguments["tile_row_sums"]
        return 4 * sums.numel() + 64 * sums.shape[1]
    if name == "loss_rows_kernel":
        out = arguments["gradients"]
        return programs * arguments["width"] * (4 + (0 if out is None else out.element_size()))
    if name == "three_block_rows_kernel":
        return programs * arguments["N"] * 4
    if name == "three_block_gradients_kernel":
        written = [arguments[side] for side in ("to_queries", "to_candidates") if arguments[side] is not None]
        return arguments["rows"] * arguments["N"] * (4 + sum(x.element_size() for x in written))
    if name == "bias_gradient_kernel":
        return 16 * arguments["columns"]
    itemsize, D = arguments["queries"].element_size(), arguments["queries"].shape[1]
    if name == "row_shifts_kernel":
        return 2 * programs * D * itemsize
    if name == "query_gradient_kernel":
        flags = launch.flags
        return programs * D * (4 + itemsize * (2 + flags["QUERIES"] + flags["WEIGHTED"]))
    if name == "candidate_gradient_kernel":
        return programs * D * (4 + 2 * itemsize)
    raise ValueError(f"no traffic is known of {name}")


def kernel_key(launch: Launch) -> str:
    flags = [
        f"{name}={value}" if isinstance(value, str) else name for name, value in launch.flags.items() if value
    ]
    sides = ("BLOCK_N", "BLOCK_M", "BLOCK_ROWS", "BLOCK_COLUMNS")
    tile = [launch.constants[name] for name in sides if name in launch.constants]
    size = " × ".join(map(str, tile)) if len(tile) == 2 else ""
    if "queries" in launch.arguments and size and launch.arguments["queries"].stride(0) % 16:
        size += " unaligned"
    return " ".join(filter(None, [launch.kernel.__name__.removesuffix("_kernel"), size, *sorted(flags)]))


def stored_event(event: Launch | Product | Operation) -> Stored:
    """What of an event the model reads."""
    if isinstance(event, Product):
        return {"kind": "product", **asdict(event)}
    if isinstance(event, Operation):
        return {"kind": "operation", "bytes": event.bytes}
    redo = event.kernel.__name__ == "repair_rows_kernel"
    if event.kernel.__name__ != "scores_kernel":
        found = {"kind": "rows", "kernel": kernel_key(event), "redo": redo, **chunk_of_cosines(event)}
        return found if redo else {**found, "bytes": row_bytes(event)}
    queries, constants = event.arguments["queries"], event.constants
    return {
        "kind": "scores",
        "kernel": kernel_key(event),
        "redo": redo,
        "rows": event.arguments["N"],
        "columns": event.arguments["candidates"].shape[0],
        "width": queries.shape[1],
        "itemsize": queries.element_size(),
        "store": event.arguments["out"] is not None,
        "tile": [constants["BLOCK_N"], constants["BLOCK_M"]],
        "step": constants["BLOCK_D"],
        "group": constants["GROUP_N"],
    }


def chunk_of_cosines(launch: Launch) -> Stored:
    """What the model reads of the kernels of MixCSE's released form; how often their code runs through."""
    if not launch.kernel.__name__.startswith("three_block"):
        return {}
    arguments, constants = launch.arguments, launch.constants
    lines, N = arguments["cosines"].shape
    if "BLOCK" in constants:
        stored = {"rows": lines, "columns": N, "store": True}
        return {**stored, "passes": launch.programs * -(-N // constants["BLOCK"])}
    return {"passes": launch.programs * -(-N // constants["BLOCK_COLUMNS"])}


def collect() -> Stored:
    """The launches of every shape, and what the compiled kernels use."""
    import torch
    import triton

    gpu = next(gpu for gpu in GPUS if gpu.arch == 90)
    schedules, kernels = [], {}
    cases = [Case("QuickThoughts", N=N, D=D) for N, D in SHAPES]
    cases += [
        Case(SIGLIP, N=N, D=D, targets="own", diagonal="keep", link="sigmoid", bias=True, scale=True)
        for N, D in LARGE_SHAPES
    ]
    cases += [
        Case(CLIP, N=N, D=D, targets="own", diagonal="keep", clip=True, scale=True) for N, D in LARGE_SHAPES
    ]
    cases += [Case(MIXCSE, N=N, D=D, three_blocks="both") for N, D in LARGE_SHAPES]
    for case in cases:
        # In low memory MixCSE's released form is three losses at these sizes.
        for memory in ("fast",) if case.three_blocks else GOALS:
            events = noted(replace(case, memory=memory), gpu)
            for launch in (event for event in events if isinstance(event, Launch)):
                if kernel_key(launch) not in kernels:
                    kernels[kernel_key(launch)] = used(launch, gpu)
            counted = Counter(json.dumps(stored_event(event)) for event in events)
            listed = [{**json.loads(event), "count": count} for event, count in counted.items()]
            made = {"loss": case.name, "N": case.N, "D": case.D, "memory": memory}
            schedules.append({**made, "events": listed})
    versions = {"triton": triton.__version__, "torch": torch.__version__.split("+")[0]}
    return {"versions": versions, "rates": asdict(Rates()), "kernels": kernels, "schedules": schedules}


def used(launch: Launch, gpu: Gpu) -> Stored:
    """What a kernel uses once compiled; nothing of one that does not compile, whose error is printed."""
    found = attempt([launch], launch.kernel.__name__, gpu, disassembled=True)
    if "error" in found:
        print(f"{kernel_key(launch)}: {found['error']}", file=sys.stderr)
        return {}
    kept = {name: found[name] for name in KEPT}
    return {**kept, "loads_ahead": found["instructions"]["cp.async"] > 0}


PARTS = {
    "scores": "scores with their exponentials",
    "product": "products by the vendor's library",
    "rows": "row kernels",
    "repair": "repair launches with nothing to do",
    "operation": "torch's small operations",
}


def part(event: Stored) -> str:
    return "repair" if event.get("redo") else event["kind"]


def seconds(schedule: Stored, stored: Stored, rates: Rates) -> float:
    return sum(e["count"] * event_time(e, stored["kernels"], rates).seconds for e in schedule["events"])


def chunks_of(schedule: Stored) -> tuple[str, int]:
    """The largest parts of the score matrix that are stored at a time, and how many there are."""
    stored = [e for e in schedule["events"] if e.get("store") and not e["redo"]]
    sizes: dict[tuple[bool, bool], tuple[int, int]] = {}
    for event in stored:
        cut = event["rows"] < schedule["N"], event["columns"] < schedule["N"]
        size = event["rows"], event["columns"]
        sizes[cut] = max(size, sizes.get(cut, size))
    text = ", ".join(f"{rows:,} × {columns:,}" for rows, columns in sizes.values())
    return text, sum(e["count"] for e in stored)


def sums_bytes(schedule: Stored) -> int:
    """Of products' results in float32, written, and read where they are added to."""
    products = [e for e in schedule["events"] if e["kind"] == "product"]
    return sum(e["count"] * e["n"] * e["m"] * e["out_itemsize"] * (1 + e["add"]) for e in products)


def milliseconds(value: float) -> str:
    return f"{value * 1e3:,.3f}" if value < 1e-3 else f"{value * 1e3:,.2f}"


def summary_table(stored: Stored) -> str:
    header = (
        *("loss", "N = M", "D", "memory", "chunks of E", "chunks", "launches", "GEMM ms", "predicted ms"),
        *("× GEMM time", "at 700 to 790 TFLOP/s", "goal", "met"),
    )
    rates = Rates(**stored["rates"])
    lines = []
    for schedule in stored["schedules"]:
        N, D, memory = schedule["N"], schedule["D"], schedule["memory"]
        sizes, chunks = chunks_of(schedule)
        total, gemm = seconds(schedule, stored, rates), gemm_time(N, D, rates)
        ratios = [
            seconds(schedule, stored, at) / gemm_time(N, D, at)
            for at in (replace(rates, tensor=SLOWEST), replace(rates, tensor=FASTEST))
        ]
        small = N <= SMALL
        goal = f"{GOAL_SMALL * 1e6:.0f} µs" if small else f"{GOALS[memory]:.2f} ×"
        met = total <= GOAL_SMALL if small else total / gemm <= GOALS[memory]
        lines.append(
            (
                *(schedule["loss"], f"{N:,}", f"{D:,}", memory, sizes, f"{chunks:,}"),
                f"{sum(e['count'] for e in schedule['events']):,}",
                *(milliseconds(gemm), milliseconds(total), f"{total / gemm:.2f}"),
                *(f"{min(ratios):.2f} to {max(ratios):.2f}", goal, "yes" if met else "no"),
            )
        )
    return table(header, lines)


def parts_table(schedule: Stored, stored: Stored) -> str:
    rates = Rates(**stored["rates"])
    header = ("part", "launches", "TFLOP", "GB", "ms", "share", "limited by")
    total = seconds(schedule, stored, rates)
    lines = []
    for name, title in PARTS.items():
        events = [e for e in schedule["events"] if part(e) == name]
        times = [(e["count"], event_time(e, stored["kernels"], rates)) for e in events]
        spent = sum(count * time.seconds for count, time in times)
        by_limit: dict[str, float] = {}
        for count, time in times:
            by_limit[time.limit] = by_limit.get(time.limit, 0.0) + count * time.seconds
        lines.append(
            (
                title,
                f"{sum(count for count, _ in times):,}",
                f"{sum(count * time.flops for count, time in times) / 1e12:,.2f}",
                f"{sum(count * time.bytes for count, time in times) / 1e9:,.2f}",
                *(milliseconds(spent), f"{spent / total:.0%}"),
                max(by_limit, key=lambda limit: by_limit[limit]) if by_limit else "–",
            )
        )
    return table(header, lines)


def kernels_table(stored: Stored) -> str:
    header = (
        *("kernel", "threads", "registers", "shared KiB", "spilled bytes", "SASS instructions"),
        "programs a multiprocessor",
    )
    rates = Rates(**stored["rates"])
    lines = []
    for name, found in sorted(stored["kernels"].items()):
        if not found:
            lines.append((f"`{name}`", "does not compile", *("–",) * 5))
            continue
        lines.append(
            (
                *(f"`{name}`", f"{found['threads']}", f"{found['registers']}"),
                *(f"{found['shared'] / 1024:.0f}", f"{found['spills']:,}", f"{found['sass']:,}"),
                f"{blocks_per_multiprocessor(found, rates)}",
            )
        )
    return table(header, lines)


def sums_table(stored: Stored) -> str:
    rates = Rates(**stored["rates"])
    header = ("loss", "N = M", "D", "memory", "float32 results GB", "ms of memory traffic", "× GEMM time")
    return table(
        header,
        (
            (
                *(s["loss"], f"{s['N']:,}", f"{s['D']:,}", s["memory"], f"{sums_bytes(s) / 1e9:.2f}"),
                milliseconds(sums_bytes(s) / rates.memory),
                f"{sums_bytes(s) / rates.memory / gemm_time(s['N'], s['D'], rates):.2f}",
            )
            for s in stored["schedules"]
        ),
    )


def rendered(stored: Stored) -> str:
    rates, versions = stored["rates"], stored["versions"]
    sections = "\n\n".join(
        f'### {s["loss"]}, N = M = {s["N"]:,}, D = {s["D"]:,}, memory="{s["memory"]}"'
        f"\n\n{parts_table(s, stored)}"
        for s in stored["schedules"]
    )
    return f"""# What an H100 should take: predictions

**These are predictions that no device has tested.** `python -m benchmarks.predict.estimate` renders them
from `gpu_estimates.json`, which holds the launches that the Triton engine would make, recorded on tensors
without data, and the registers, shared memory and instructions of the kernels compiled for sm_90 (Triton
{versions["triton"]}, torch {versions["torch"]}). The first run on an H100 is to replace them by measurements.

The model is a roofline a launch. It assumes

- {rates["multiprocessors"]} multiprocessors at {rates["clock"] / 1e9:.1f} GHz;
- {rates["tensor"] / 1e12:.0f} TFLOP/s of dense bfloat16 products, between the {SLOWEST / 1e12:.0f} and
  {FASTEST / 1e12:.0f} that cuBLAS sustains, for the scores' kernel too;
- {rates["memory"] / 1e12:.2f} TB/s of memory (0.9 of its peak), {rates["l2"] / 1e12:.0f} TB/s and
  {rates["l2_size"] / 2**20:.0f} MiB of L2 cache;
- {rates["fill"] * 1e6:.0f} µs until a tile's first operands arrive, and
  {rates["launch"] * 1e6:.1f} µs a launch in a CUDA graph.

Every SASS instruction of the scores' kernel counts once a tile, those of branches not taken included. Where
only one program fits a multiprocessor they come after the tile's products, else beside those of another.
Where no load runs ahead of the products, each step along D waits for its operands. The vendor's products take
the best of a few tiles and splits. Computed are the loss and both gradients in bfloat16, of QuickThoughts
with the targets of `Window(1)`, of SigLIP those of scale and bias too, of CLIP that of the scale; but for
CLIP the targets' lowering is not counted. MixCSE's released form has cosines in float32 for chunks of E, and
each instruction of its kernels counts once a tile of them. GEMM time is three products of the same shapes.

## Against the goals

{summary_table(stored)}

## Results of products in float32

The sums of dG are read and written by every chunk of rows; a product hides this traffic only as far as it
leaves memory idle.

{sums_table(stored)}

## The kernels as compiled

{kernels_table(stored)}

## Where the time goes

{sections}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicts what an H100 will take.")
    parser.add_argument("--write", action="store_true", help=f"store {DOCUMENT.name} and {STORED.name}")
    arguments = parser.parse_args()
    if arguments.write:
        with compiler():
            STORED.write_text(json.dumps(collect(), indent=1) + "\n")
        DOCUMENT.write_text(rendered(json.loads(STORED.read_text())))
    else:
        print(rendered(json.loads(STORED.read_text())), end="")


if __name__ == "__main__":
    main()
