"""Translates basic blocks of PTX into Python functions on numpy arrays with an element for each thread.

A register is an array of bits (uint16, uint32, uint64, or bool), which an instruction takes as its type
says. The function of a block takes the registers that live at its beginning and gives those that live at
its end. An instruction that this module does not know raises NotImplementedError when the kernel is
translated.

Source: Parallel Thread Execution ISA, chapter 9.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from tests.emulator import arithmetic
from tests.emulator.flow import alive_after, registers_of_products
from tests.emulator.kinds import KINDS
from tests.emulator.memory_instructions import Instructions
from tests.emulator.ptx import ENDS_A_BLOCK, Block, Instruction, Kernel

_NAMESPACE = {name: kind for name, kind in KINDS.items() if name not in ("pred",)} | {"pred": np.bool_}


@dataclass(frozen=True)
class Translated:
    """A block as a function of (machine, threads, registers) to the predicate of its branch, or None.

    Attributes:
        end: the instruction that ends it: a branch, a barrier or a return; None where the next block follows.
        target: the block that it branches to.
        classes: how often it has instructions of which class, a thread.
    """

    run: Callable[[Any, Any, dict[str, Any]], Any]
    end: Instruction | None
    target: int | None
    block: Block


def translate(kernel: Kernel) -> list[Translated]:
    """The functions of all blocks."""
    alive, of_products = alive_after(kernel), registers_of_products(kernel)
    return [
        _translated(kernel, block, alive[block.number], of_products)
        for block in kernel.blocks
        if block.instructions
    ]


def _translated(kernel: Kernel, block: Block, alive: set[str], of_products: set[str]) -> Translated:
    end = block.instructions[-1]
    ends = end.name in ENDS_A_BLOCK and end.modifiers[:1] != ("warp",)
    writer = Instructions(kernel, of_products)
    for number, instruction in enumerate(block.instructions[:-1] if ends else block.instructions):
        writer.translate(instruction, number)
    result = "None"
    if ends and end.guard:
        result = writer.predicate(end.guard)
    elif end.name == "brx":
        result = writer.register(str(end.operands[0]), "b32")
    writer.store_alive(alive)
    source = "\n    ".join([f"def block_{block.number}(m, th, R):", *writer.lines, f"return {result}"])
    namespace = {"np": np, "a": arithmetic, **writer.constants, **_NAMESPACE}
    try:
        exec(compile(source, f"<{kernel.name}, block {block.number}>", "exec"), namespace)
    except SyntaxError as error:
        raise SyntaxError(f"{error}\n{source}") from None
    target = kernel.labels[str(end.operands[0])] if end.name == "bra" else None
    run = cast(Callable[[Any, Any, dict[str, Any]], Any], namespace[f"block_{block.number}"])
    return Translated(run, end if ends else None, target, block)
