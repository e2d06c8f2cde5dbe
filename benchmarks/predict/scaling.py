"""Predicts a loss over up to 4,096 GPUs by formula and by simulation of the ranks, and draws it.

python -m benchmarks.predict.scaling            # prints the tables of docs/distributed.md as stored
python -m benchmarks.predict.scaling --write    # computes anew, and stores scaling.json and scaling.svg

No GPU takes part, so nothing here is a measurement.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from benchmarks.measure.tables import table
from benchmarks.predict.report import milliseconds
from benchmarks.predict.roofline import Stored
from benchmarks.predict.scaling_formulas import (
    CLIP,
    CLIP_DIRECT,
    CLIP_GATHER,
    CLIP_RING,
    FLOPS,
    INF_CL,
    OPEN_CLIP,
    ROWS,
    SOFTMAX_DIRECT,
    SOFTMAX_GATHER,
    SOFTMAX_RING,
    TF32,
    Method,
    Network,
    compute_seconds,
    hidden_from,
    loss_seconds,
    memory,
    transfer_seconds,
)
from benchmarks.predict.scaling_simulation import NO_NOISE, Noise, simulated

STORED = Path(__file__).with_name("scaling.json")
PLOT = STORED.with_suffix(".svg")
D = 768
ROWS_A_RANK = 8192
BATCH = 2**20  # rows that a growing number of ranks shares
RANKS = tuple(2**k for k in range(3, 13))
SHOWN = (8, 64, 512, 4096)
SHARDS = (512, 2048, 8192, 16384)  # rows a rank, to compare the simulation with the formulas
DRAWN = (CLIP_GATHER, CLIP_RING, CLIP_DIRECT)  # by simulation too
NOISES = {
    "one rank takes 1.5 times as long": Noise(slowest=1.5),
    "the paces of ranks spread by 5 %": Noise(spread=0.05),
    "the times of blocks spread by 30 %": Noise(jitter=0.3),
    "one rank begins 100 ms late": Noise(late=0.1),
}
PAIRS, GPUS = 12 * 2**20, 32  # of the largest batch that Inf-CL's authors trained with
METHODS = {method.name: method for method in (*ROWS, *CLIP)}
COMPARED = (SOFTMAX_GATHER, SOFTMAX_RING, SOFTMAX_DIRECT)
NOISY_ROWS = SHARDS[-1]  # so many that products hide all messages of the rings


def significant(seconds: float) -> float:
    """Six digits, which every machine computes alike."""
    return float(f"{seconds:.6g}")


def by_formula(rows: Iterable[tuple[Method, int, int]], network: Network) -> list[Stored]:
    return [
        {"method": m.name, "n": n, "P": P, "seconds": significant(loss_seconds(m, n, P, D, network))}
        for m, n, P in rows
    ]


def by_simulation(
    rows: Iterable[tuple[Method, int, int]], network: Network, noise: Noise = NO_NOISE
) -> list[Stored]:
    return [
        {"method": m.name, "n": n, "P": P, "seconds": significant(simulated(m, n, P, D, network, noise))}
        for m, n, P in rows
    ]


def collect() -> Stored:
    """All that the tables and the plot show."""
    network = Network()
    drawn = [(m, n, P) for m in CLIP for P in RANKS for n in (ROWS_A_RANK, BATCH // P)]
    compared = [(m, n, P) for m in COMPARED for n in SHARDS for P in SHOWN]
    both = compared + [row for row in drawn if row[0] in DRAWN and row not in compared]
    noisy = [(m, NOISY_ROWS, P) for m in COMPARED for P in SHOWN[1::2]]
    return {
        "network": asdict(network),
        "flops": FLOPS,
        "D": D,
        "formulas": by_formula(compared + [row for row in drawn if row not in compared], network),
        "simulated": by_simulation(both, network),
        "noisy": {name: by_simulation(noisy, network, noise) for name, noise in NOISES.items()},
    }


def stored() -> Stored:
    return json.loads(STORED.read_text())


def seconds_of(rows: Iterable[Stored], method: str, n: int, P: int) -> float:
    return next(r["seconds"] for r in rows if (r["method"], r["n"], r["P"]) == (method, n, P))


def parts_table(figures: Stored) -> str:
    """Products and messages of a softmax loss whose gradients return in bfloat16."""
    network, (trip,) = Network(**figures["network"]), SOFTMAX_GATHER.trips
    lines = []
    for P in SHOWN:
        N = ROWS_A_RANK * P
        compute = compute_seconds(trip.operations, ROWS_A_RANK, N, D, figures["flops"])
        transfer = transfer_seconds(trip.bytes, N, D, network.bandwidth(P))
        room = f"{memory(CLIP_GATHER, ROWS_A_RANK, P, D) / 1e9:,.1f}"
        lines.append((f"{P:,}", f"{N:,}", milliseconds(compute), milliseconds(transfer), room))
    header = ("GPUs", "rows of the batch", "products ms", "messages ms", "GB of candidates and gradients")
    return table(header, lines)


def thresholds_table(figures: Stored) -> str:
    network = Network(**figures["network"])
    links = {"NVLink": network.nvlink, "8 rails": network.rails, "one NIC": network.nic}
    kinds = {
        "a softmax ring's first trip": (2, 2),
        "softmax or sigmoid, gradients in bfloat16": (4, 6),
        "the same, gradients in float32": (6, 6),
        "CLIP, gradients in float32": (CLIP_GATHER.bytes, CLIP_GATHER.operations),
    }
    lines = [
        (name, *(f"{hidden_from(moved, operations, link, figures['flops']):,.0f}" for link in links.values()))
        for name, (moved, operations) in kinds.items()
    ]
    return table(("rows a rank", *(f"{k}, {v / 1e9:.0f} GB/s" for k, v in links.items())), lines)


def clip_table(figures: Stored) -> str:
    header = (
        "CLIP",
        "operations / nND",
        "bytes / ND",
        *(f"{P:,} GPUs, ms" for P in SHOWN),
        "GB at 4,096 GPUs",
    )
    lines = []
    for m in CLIP:
        times = [milliseconds(seconds_of(figures["formulas"], m.name, ROWS_A_RANK, P)) for P in SHOWN]
        room = f"{memory(m, ROWS_A_RANK, SHOWN[-1], D) / 1e9:,.1f}"
        operations = f"{m.operations:.0f}{' in TF32' if m.pace == TF32 else ''}"
        lines.append((m.name, operations, f"{m.bytes:.0f}", *times, room))
    return table(header, lines)


def pairs_table(figures: Stored) -> str:
    n = PAIRS // GPUS
    lines = []
    for m in (CLIP_RING, OPEN_CLIP, INF_CL):
        products = compute_seconds(m.operations, n, PAIRS, D, figures["flops"] * m.pace)
        lines.append((m.name, f"{products:,.0f}", f"{memory(m, n, GPUS, D) / 1e9:,.0f}"))
    header = (f"{PAIRS:,} pairs on {GPUS} GPUs", "products, s", "GB a GPU")
    return table(header, lines)


def agreement_table(figures: Stored) -> str:
    lines = []
    for m in COMPARED:
        for n in SHARDS:
            ratios = [
                seconds_of(figures["simulated"], m.name, n, P) / seconds_of(figures["formulas"], m.name, n, P)
                for P in SHOWN
            ]
            lines.append((m.name, f"{n:,}", *(f"{ratio:.3f}" for ratio in ratios)))
    return table(("simulated / formula", "rows a rank", *(f"{P:,} GPUs" for P in SHOWN)), lines)


def noise_table(figures: Stored) -> str:
    columns = [(m.name, P) for m in COMPARED for P in SHOWN[1::2]]
    lines = []
    for name, rows in figures["noisy"].items():
        ratios = [
            seconds_of(rows, m, NOISY_ROWS, P) / seconds_of(figures["simulated"], m, NOISY_ROWS, P)
            for m, P in columns
        ]
        lines.append((name, *(f"{ratio:.2f}" for ratio in ratios)))
    header = (f"{m.split(', ')[1]}, {P:,} GPUs" for m, P in columns)
    return table(("times as long as without noise", *header), lines)


def plot(figures: Stored, path: Path) -> None:
    """The time of a CLIP loss with its gradients over the GPUs: the same rows a rank, and the same batch."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "fastqt", "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(12.5, 3.8), layout="constrained")
    titles = (
        f"{ROWS_A_RANK:,} rows a GPU",
        f"{BATCH:,} rows in all",
        f"memory with {ROWS_A_RANK:,} rows a GPU",
    )
    for number, m in enumerate((*DRAWN, OPEN_CLIP, INF_CL)):
        style = {"color": f"C{number}", "linewidth": 1.2}
        label = m.name.split(",")[0] if m in (OPEN_CLIP, INF_CL) else m.name
        for axes, shard in ((panels[0], lambda _: ROWS_A_RANK), (panels[1], lambda P: BATCH // P)):
            times = [seconds_of(figures["formulas"], m.name, shard(P), P) for P in RANKS]
            axes.loglog(RANKS, times, label=label, **style)
            if m in DRAWN:
                times = [seconds_of(figures["simulated"], m.name, shard(P), P) for P in RANKS]
                axes.loglog(RANKS, times, "o", markersize=4, label=f"{label}, simulated", **style)
        room = [memory(m, ROWS_A_RANK, P, D) / 1e9 for P in RANKS]
        panels[2].loglog(RANKS, room, label=label, **style)
    for axes, title in zip(panels, titles, strict=True):
        axes.set(xlabel="GPUs", title=title, ylabel="seconds, loss and gradients")
        axes.set_xticks(RANKS[::3], [f"{P:,}" for P in RANKS[::3]])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[2].set_ylabel("GB a GPU")
    panels[0].legend(fontsize="x-small")
    figure.savefig(path, metadata={"Date": None})


TABLES = {
    "scaling": parts_table,
    "scaling thresholds": thresholds_table,
    "scaling clip": clip_table,
    "scaling pairs": pairs_table,
    "scaling simulation": agreement_table,
    "scaling stragglers": noise_table,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicts a loss over up to 4,096 GPUs.")
    parser.add_argument("--write", action="store_true", help=f"store {STORED.name} and {PLOT.name}")
    if parser.parse_args().write:
        collected = collect()
        text = json.dumps(collected, indent=1).replace("\n   ", " ").replace("\n  }", " }")
        STORED.write_text(text + "\n")
        plot(collected, PLOT)
    print("\n\n".join(render(stored()) for render in TABLES.values()))


if __name__ == "__main__":
    main()
