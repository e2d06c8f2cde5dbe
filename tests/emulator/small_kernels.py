"""Small kernels in PTX, and what becomes of them on the emulator."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tests.emulator.asynchronous import TensorMap
from tests.emulator.machine import Machine, packed
from tests.emulator.memory import region_at
from tests.emulator.ptx import parse
from tests.emulator.reports import Reports

HEADER = """
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry small_kernel({parameters})
.reqntid {threads}
{{
    .reg .pred %p<20>;
    .reg .b16 %h<20>;
    .reg .b32 %r<200>;
    .reg .b64 %d<50>;
    {pointers}
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, %ctaid.x;
    {body}
    ret;
}}
"""


def execute(
    body: str,
    *arrays: NDArray[np.generic],
    threads: int = 32,
    blocks: int = 1,
    shared: int = 0,
    schedule: str = "lockstep",
    seed: int = 0,
    maps: Mapping[int, TensorMap] | None = None,
) -> Reports:
    """Runs a kernel whose registers %d0, %d1, ... point to arrays, %r0 is the thread and %r1 the block.

    Of arrays that have one in `maps` a tensor map lies at the address of small_kernel_param_0, ...
    """
    names = [f"small_kernel_param_{k}" for k in range(len(arrays))]
    pointers = "\n".join(f"ld.param.b64 %d{k}, [{name}];" for k, name in enumerate(names))
    parameters = ", ".join(f".param .u64 {name}" for name in names)
    text = HEADER.format(parameters=parameters, threads=threads, pointers=pointers, body=body)
    reports = Reports()
    machine = Machine(
        parse(text),
        (blocks, 1, 1),
        [packed(x.ctypes.data, 8, "i") for x in arrays],
        [region_at(x.ctypes.data, x.nbytes) for x in arrays],
        shared,
        reports,
        schedule,
        seed,
        tensor_maps={names[k]: box for k, box in (maps or {}).items()},
    )
    machine.run()
    return reports


def of_each_thread(instructions: str, inputs: list[NDArray[np.generic]], out: NDArray[np.generic]) -> None:
    """Executes instructions on one element a thread: a, b, c stand for the inputs, and d for the result."""
    wide = {2: "%h", 4: "%r", 8: "%d"}
    lines, text = [], instructions
    for k, (name, x) in enumerate(zip("abcd", [*inputs, out], strict=False)):
        name = "d" if x is out else name
        register = f"{wide[x.itemsize]}{10 + k}"
        lines += [f"mul.wide.u32 %d{20 + k}, %r0, {x.itemsize};", f"add.s64 %d{20 + k}, %d{20 + k}, %d{k};"]
        if x is not out:
            lines.append(f"ld.global.b{8 * x.itemsize} {register}, [%d{20 + k}];")
        text = re.sub(rf"\b{name}\b", register, text)
    text += f"st.global.b{8 * out.itemsize} [%d{20 + len(inputs)}], {wide[out.itemsize]}{10 + len(inputs)};"
    reports = execute("\n".join([*lines, text]), *inputs, out, threads=len(out))
    assert not len(reports), str(reports)
