"""Runs pytorch-metric-learning's own tests with fastqt's losses in place of its own, and prints counts.

    python tests/peers/metric_learning.py CHECKOUT

CHECKOUT is a folder with the sources of https://github.com/KevinMusgrave/pytorch-metric-learning. In the JSON
that is printed, "refusing" has the losses as they are, which refuse distances that are no inner products.
"falling back" has them with fallback=True, so that in the same tests the library computes these itself.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from swapped import compared, run

TESTS = (
    *(f"tests/losses/test_{name}.py" for name in ("ntxent_loss", "cross_batch_memory")),
    *(f"tests/losses/test_{name}.py" for name in ("losses_without_labels", "self_supervised_loss")),
    *(f"tests/trainers/test_{name}.py" for name in ("key_checking", "metric_loss_only")),
)
LIBRARY = "pytorch_metric_learning.losses"
OURS = "fastqt.integrations.metric_learning"
REACHED = [f"{OURS}.losses:_FromLabels._of_labels", f"{OURS}.losses:_FromLabels._of_lists"]
MEMORY = {f"{LIBRARY}:CrossBatchMemory": f"{OURS}:CrossBatchMemory"}
SWAPS = {
    "refusing": {f"{LIBRARY}:{name}": f"{OURS}:{name}" for name in ("NTXentLoss", "SupConLoss")} | MEMORY,
    "falling back": {f"{LIBRARY}:{name}": f"falling_back:{name}" for name in ("NTXentLoss", "SupConLoss")}
    | MEMORY,
}
# What the tests read. They want a GPU by default; in float16 some fail on a CPU as they are.
DEFAULTS = {"TEST_DEVICE": "cpu", "TEST_DTYPES": "float32,float64"}
ENVIRONMENT = {name: os.environ.get(name, value) for name, value in DEFAULTS.items()}


def counts(checkout: Path) -> dict[str, Any]:
    """What the tests do with and without fastqt's losses."""
    tests = [test for test in TESTS if (checkout / test).exists()]
    common: dict[str, Any] = {"environment": ENVIRONMENT, "sources": "src"}
    before = run(checkout, tests, **common)
    found = {}
    for name, swaps in SWAPS.items():
        after = run(checkout, tests, swaps=swaps, reached=REACHED, **common)
        refused = {test: why for test, how in after.items() if (why := refusal(how["why"]))}
        found[name] = compared(before, after, refused if name == "refusing" else {})
    return found


def refusal(why: str) -> str:
    """The message of a distance that was refused, from what pytest says of a failure; "" for another one."""
    lines = [line[1:].strip() for line in why.splitlines() if line.startswith("E ")]
    return next((line for line in lines if line.startswith("ValueError: distance: want")), "")


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1], "src", "pytorch_metric_learning").is_dir():
        sys.exit(__doc__)
    found = counts(Path(sys.argv[1]).resolve())
    print(json.dumps(found, indent=2))
    if any(each["broken"] for each in found.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
