"""The Triton kernels as machine code for AMD's GPUs, which are not there: what they use of one.

python -m benchmarks.offline.amd                # compiles what cases.py lists, writes results/amd.json
python -m benchmarks.offline.amd --quick        # one launch of each kernel for one GPU, prints it

Triton's own backend and the assembler that comes with it compile what the schedule would launch there.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.measure.tables import table
from benchmarks.offline.cases import CASES
from benchmarks.offline.compile import chosen, compiler
from tests.shared.launches import Gpu, Launch, noted, specialised

RESULTS = Path(__file__).parents[1] / "results" / "amd.json"
WAVEFRONT = 64  # threads
# `arch` is what torch answers as the compute capability there; `shared` is LDS.
GPUS = {
    "gfx90a": Gpu("AMD Instinct MI250X", 90, 110, 64 * 1024, 64 * 2**30),
    "gfx942": Gpu("AMD Instinct MI300X", 94, 304, 64 * 1024, 192 * 2**30),
    "gfx950": Gpu("AMD Instinct MI350X", 95, 256, 160 * 1024, 288 * 2**30),
}
# What the assembler says of a kernel. Scalar registers spill into lanes of vector registers, not into memory.
SAID = {
    "vgprs": "vgpr_count",
    "agprs": "agpr_count",
    "sgprs": "sgpr_count",
    "vgpr_spills": "vgpr_spill_count",
    "sgpr_spills": "sgpr_spill_count",
    "scratch": "private_segment_fixed_size",  # bytes of a thread in memory
}


def launches(gpu: Gpu) -> Iterator[tuple[str, Launch]]:
    """What all cases launch on a GPU that has no descriptors, each specialisation once."""
    seen = set()
    for case in CASES:
        if case.descriptors or case.archs == (100,):
            continue
        for wanted in case.wanted:
            launch = chosen(noted(replace(case, descriptors=False), gpu), wanted)
            if launch is None:
                continue
            asked = repr((launch.kernel.__name__, specialised(launch), sorted(launch.options.items())))
            if asked not in seen:
                seen.add(asked)
                yield f"{case.name}: {wanted}", launch


def compiled(launch: Launch, arch: str) -> dict[str, Any]:
    """What a kernel uses of a GPU: registers, bytes of LDS and of memory, and its matrix instructions."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, alignments = specialised(launch)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=alignments)
    kernel = triton.compile(source, target=GPUTarget("hip", arch, WAVEFRONT), options=launch.options)
    text = kernel.asm["amdgcn"]
    figures = {}
    for name, of_assembler in SAID.items():
        figure = re.search(rf"\.{of_assembler}:\s+(\d+)", text)
        if figure is None:
            raise RuntimeError(f"the assembler said nothing of {of_assembler}")
        figures[name] = int(figure[1])
    products = len(re.findall(r"^\s*v_mfma", text, flags=re.MULTILINE))
    return {**figures, "lds": kernel.metadata.shared, "matrix_instructions": products}


def table_of(path: Path, archs: Collection[str], memory: str, used: Sequence[Sequence[str]]) -> str:
    """Of each kernel and GPU what the largest of its specialisations uses.

    Args:
        path: of the stored figures.
        archs: the GPUs.
        memory: what the table calls the memory of a block.
        used: the figures that add up to registers, to bytes of that memory, and to what is spilled.
    """
    of_kernels: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, figures in json.loads(path.read_text())["specialisations"].items():
        arch = name.split(":")[0]
        of_kernels.setdefault(figures["kernel"], {}).setdefault(arch, []).append(figures)

    def largest(specialisations: list[dict[str, Any]]) -> str:
        registers, size, spilled = (
            max(sum(figures[name] for name in names) for figures in specialisations) for names in used
        )
        return f"{registers}, {size / 1024:.0f} KiB, {spilled}"

    header = ["kernel", "compiled", *(f"{arch}: registers, {memory}, spilled" for arch in archs)]
    rows = []
    for kernel, of_archs in sorted(of_kernels.items()):
        count = sum(map(len, of_archs.values()))
        rows.append([f"`{kernel}`", str(count), *(largest(of_archs[arch]) for arch in archs)])
    return table(header, rows)


def stored_table() -> str:
    return table_of(RESULTS, GPUS, "LDS", (("vgprs", "agprs"), ("lds",), ("vgpr_spills", "scratch")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one launch of each kernel for gfx942")
    quick = parser.parse_args().quick
    # fastqt.kernels asks this when it is imported.
    with mock.patch.object(torch.version, "hip", "offline"), compiler():
        import triton

        specialisations: dict[str, dict[str, Any]] = {}
        for arch in ["gfx942"] if quick else GPUS:
            kernels = set()
            for name, launch in launches(GPUS[arch]):
                if quick and launch.kernel.__name__ in kernels:
                    continue
                kernels.add(launch.kernel.__name__)
                figures = {"kernel": launch.kernel.__name__, **compiled(launch, arch)}
                specialisations[f"{arch}: {name}"] = figures
        result = {"triton": triton.__version__, "specialisations": specialisations}
        if quick:
            print(json.dumps(result))
        else:
            RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
