"""The table of what other libraries' kernels execute beside ours, from counts that are stored."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.measure.tables import table
from benchmarks.paths import RESULTS

PEERS = RESULTS / "counters-peers.json"
LOSSES = ("softmax", "CLIP", "sigmoid")
# Of the stored counts, and what the table calls them.
FIGURES = {
    "instructions": "instructions",
    "tensor": "tensor",
    "special": "special",
    "shared wavefronts": "shared",
    "global sectors": "sectors",
}


def stored_peers() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(PEERS.read_text())
    return record


def of_peers(counts: dict[str, Any]) -> str:
    """A row a library and GPU, loss by loss."""
    rows = []
    for record in sorted(counts["contestants"].values(), key=lambda record: LOSSES.index(record["loss"])):
        inside, outside = record["products"]
        library, cells = f"{record['package']} {record['version']}", f"{record['N']:,} × {record['M']:,}"
        for arch in filter(lambda name: name.startswith("sm_"), record):
            figures = (f"{record[arch]['a cell'].get(name, 0):.2f}" for name in FIGURES)
            of_rows = f"{record[arch]['a row']['instructions']:,.0f}"
            rows.append((record["loss"], library, f"{inside} + {outside}", cells, arch, *figures, of_rows))
    header = ("loss", "library", "products", "N × M", "GPU", *FIGURES.values(), "a row")
    return table(header, rows)


def machine_of_peers(counts: dict[str, Any]) -> str:
    """What the counts depend on."""
    return f"Triton {counts['triton']}, {counts['problem']['dtype']}, D = {counts['problem']['D']}"
