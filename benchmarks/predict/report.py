"""The tables of the document of predictions."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.measure.tables import table
from benchmarks.predict.products import gemm_time
from benchmarks.predict.roofline import Rates, Stored, blocks_per_multiprocessor
from benchmarks.predict.schedules import PLANNED, device_seconds, eager_seconds, event_time, planned

GOALS = {"fast": 1.12, "low": 1.45}  # times GEMM time, from D = 768 on
GOAL_NARROW, NARROWEST = 1.15, 256  # of narrower embeddings, and from which D on there is one
GOAL_SMALL = 20e-6  # seconds, of the paper's batch
SMALL, LARGE = 400, 8192  # rows
SLOWEST, FASTEST = 700e12, 790e12  # of what cuBLAS sustains in bfloat16

PARTS = {
    "scores": "scores with their exponentials",
    "product": "products by the vendor's library",
    "rows": "row kernels",
    "repair": "launches that find nothing to do",
    "operation": "torch's small operations",
}


def part(event: Stored) -> str:
    return "repair" if event.get("redo") else event["kind"]


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


def goal_times(D: int, memory: str) -> float | None:
    """What a large loss is to take at most, times GEMM time."""
    if D >= 768 or memory == "low":
        return GOALS[memory]
    return GOAL_NARROW if D >= NARROWEST else None


def summary_table(stored: Stored) -> str:
    header = (
        "loss",
        "N = M",
        "D",
        "memory",
        "chunks of E",
        "chunks",
        "launches",
        "GEMM ms",
        "predicted ms",
        "× GEMM time",
        f"at {SLOWEST / 1e12:.0f} to {FASTEST / 1e12:.0f} TFLOP/s",
        "goal",
        "met",
    )

    rates, kernels = Rates(**stored["rates"]), stored["kernels"]
    lines = []
    for schedule in stored["schedules"]:
        N, D, memory = schedule["N"], schedule["D"], schedule["memory"]

        sizes, chunks = chunks_of(schedule)
        total, gemm = device_seconds(schedule, kernels, rates), gemm_time(N, D, rates)
        ratios = [
            device_seconds(schedule, kernels, at) / gemm_time(N, D, at)
            for at in (replace(rates, tensor=SLOWEST), replace(rates, tensor=FASTEST))
        ]

        small = N <= SMALL
        times = goal_times(D, memory)
        goal = f"{GOAL_SMALL * 1e6:.0f} µs" if small else f"{times:.2f} ×" if times else "–"
        met = total <= GOAL_SMALL if small else not times or total / gemm <= times

        lines.append(
            (
                schedule["loss"],
                f"{N:,}",
                f"{D:,}",
                memory,
                sizes,
                f"{chunks:,}",
                f"{sum(e['count'] for e in schedule['events']):,}",
                milliseconds(gemm),
                milliseconds(total),
                f"{total / gemm:.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
                goal,
                "–" if goal == "–" else "yes" if met else "no",
            )
        )

    return table(header, lines)


def comparison_table(before: Stored, after: Stored) -> str:
    """Each schedule as it was and as it is, under a CUDA graph and launched one by one."""
    rates = Rates(**after["rates"])
    header = (
        "loss",
        "N = M",
        "D",
        "memory",
        "launches",
        "graph, ms",
        "× GEMM time",
        "eager, ms",
        f"eager at {PLANNED * 1e6:.0f} µs a launch, ms",
    )

    lines = []
    for new in after["schedules"]:
        which = [new[name] for name in ("loss", "N", "D", "memory")]
        pair = [
            (schedule, stored["kernels"])
            for stored in (before, after)
            for schedule in stored["schedules"]
            if [schedule[name] for name in ("loss", "N", "D", "memory")] == which
        ]

        gemm = gemm_time(new["N"], new["D"], rates)
        graph = [device_seconds(*each, rates) for each in pair]
        columns = (
            [f"{sum(e['count'] for e in schedule['events']):,}" for schedule, _ in pair],
            [milliseconds(spent) for spent in graph],
            [f"{spent / gemm:.2f}" for spent in graph],
            [milliseconds(eager_seconds(*each, rates)) for each in pair],
            [milliseconds(eager_seconds(*each, planned(rates))) for each in pair],
        )

        name = (new["loss"], f"{new['N']:,}", f"{new['D']:,}", new["memory"])
        lines.append((*name, *(" → ".join(values) for values in columns)))

    return table(header, lines)


def sensitivity_table(stored: Stored) -> str:
    """Large problems' times GEMM time, each with one assumption less favourable."""
    rates, kernels = Rates(**stored["rates"]), stored["kernels"]
    slower = replace(rates, descriptors=0.9 * rates.descriptors, pointers=0.9 * rates.pointers)
    others = {
        "as assumed": rates,
        "scores' products at 0.9 of it": slower,
        "L2 cache at 0.8": replace(rates, l2=0.8 * rates.l2),
        "memory at 0.8": replace(rates, memory=0.8 * rates.memory),
        "no split of products": replace(rates, splits=1),
    }
    lines = []
    for schedule in stored["schedules"]:
        N, D = schedule["N"], schedule["D"]
        if N >= LARGE:
            times = (
                f"{device_seconds(schedule, kernels, at) / gemm_time(N, D, at):.2f}" for at in others.values()
            )
            lines.append((schedule["loss"], f"{N:,}", f"{D:,}", schedule["memory"], *times))
    return table(("loss", "N = M", "D", "memory", *others), lines)


def parts_table(schedule: Stored, stored: Stored) -> str:
    rates = Rates(**stored["rates"])
    header = ("part", "launches", "TFLOP", "GB", "ms", "share", "limited by")
    total = device_seconds(schedule, stored["kernels"], rates)

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
                milliseconds(spent),
                f"{spent / total:.0%}",
                max(by_limit, key=lambda limit: by_limit[limit]) if by_limit else "–",
            )
        )

    return table(header, lines)


def kernels_table(stored: Stored) -> str:
    header = (
        "kernel",
        "threads",
        "registers",
        "shared KiB",
        "spilled bytes",
        "SASS instructions",
        "programs a multiprocessor",
    )

    rates = Rates(**stored["rates"])
    lines = []
    for name, resources in sorted(stored["kernels"].items()):
        if not resources:
            lines.append((f"`{name}`", "does not compile", *("–",) * 5))
            continue
        lines.append(
            (
                f"`{name}`",
                f"{resources['threads']}",
                f"{resources['registers']}",
                f"{resources['shared'] / 1024:.0f}",
                f"{resources['spills']:,}",
                f"{resources['sass']:,}",
                f"{blocks_per_multiprocessor(resources, rates)}",
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
                s["loss"],
                f"{s['N']:,}",
                f"{s['D']:,}",
                s["memory"],
                f"{sums_bytes(s) / 1e9:.2f}",
                milliseconds(sums_bytes(s) / rates.memory),
                f"{sums_bytes(s) / rates.memory / gemm_time(s['N'], s['D'], rates):.2f}",
            )
            for s in stored["schedules"]
        ),
    )
