"""The Triton kernels as machine code for NVIDIA's GPUs with less shared memory than those of data centers.

python -m benchmarks.offline.small_nvidia    # compiles what cases.py lists, writes results/small-nvidia.json
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.offline.amd import launches, table_of
from benchmarks.offline.compile import compiled, compiler
from tests.shared.launches import Gpu

RESULTS = Path(__file__).parents[1] / "results" / "small-nvidia.json"
GPUS = {
    "sm_89": Gpu("NVIDIA GeForce RTX 4090", 89, 128, 99 * 1024, 24 * 2**30),
    "sm_120": Gpu("NVIDIA GeForce RTX 5090", 120, 170, 99 * 1024, 32 * 2**30),
}


def stored_table() -> str:
    return table_of(RESULTS, GPUS, "shared memory", (("registers",), ("shared",), ("spills", "stack")))


def main() -> None:
    with compiler():
        import triton

        specialisations = {}
        for arch, gpu in GPUS.items():
            for name, launch in launches(gpu):
                figures = compiled(launch, gpu)
                figures.pop("instructions")
                specialisations[f"{arch}: {name}"] = {"kernel": launch.kernel.__name__, **figures}
        result = {"triton": triton.__version__, "specialisations": specialisations}
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
