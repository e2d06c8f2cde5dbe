"""The table of what other libraries' kernels execute, from the counts of benchmarks.counters_peers."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.paths import RESULTS

PEERS = RESULTS / "counters-peers.json"
LOSSES = ("softmax", "CLIP", "sigmoid")
FIGURES = ("instructions", "tensor", "special", "shared wavefronts", "global sectors")


def stored_peers() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(PEERS.read_text())
    return record


def of_peers(counts: dict[str, Any]) -> str:
    """A row a library and GPU, loss by loss."""
    lines = [
        f"| loss | library | products | N × M | GPU | {' | '.join(FIGURES)} | instructions a row |",
        f"|---|---|---:|---:|---|{'---:|' * len(FIGURES)}---:|",
    ]
    for record in sorted(counts["contestants"].values(), key=lambda record: LOSSES.index(record["loss"])):
        inside, outside = record["products"]
        library, cells = f"{record['package']} {record['version']}", f"{record['N']:,} × {record['M']:,}"
        for arch in filter(lambda name: name.startswith("sm_"), record):
            figures = " | ".join(f"{record[arch]['a cell'].get(name, 0):.2f}" for name in FIGURES)
            which = f"{record['loss']} | {library} | {inside} + {outside} | {cells} | {arch}"
            of_rows = record[arch]["a row"]["instructions"]
            lines.append(f"| {which} | {figures} | {of_rows:,.0f} |")
    return "\n".join(lines)


def machine_of_peers(counts: dict[str, Any]) -> str:
    """What the counts depend on."""
    return f"Triton {counts['triton']}, {counts['problem']['dtype']}, D = {counts['problem']['D']}"
