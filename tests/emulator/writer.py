"""Writes the lines of a block's function: registers as variables, and what an instruction sets."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.emulator.flow import is_special, read
from tests.emulator.kinds import KINDS, immediate, storage
from tests.emulator.ptx import Instruction, Kernel, Operand


class Writer:
    """Writes the lines of one block."""

    def __init__(self, kernel: Kernel, of_products: set[str]) -> None:
        self.kernel = kernel
        self.of_products = of_products
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self.names: dict[
            str, dict[str, str]
        ] = {}  # of each register the variables that hold it, by their types
        self.guard: str | None = None
        self.fresh = 0
        self.loaded: set[str] = set()
        self.changed: set[str] = set()

    # Operands.

    def line(self, text: str) -> None:
        self.lines.append(text)

    def variable(self) -> str:
        self.fresh += 1
        return f"t{self.fresh}"

    def constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def value(self, operand: str, kind: str) -> str:
        """An expression for an operand as an array, or a scalar, of a type."""
        if operand.startswith("%"):
            return self.special(operand) if is_special(operand) else self.register(operand, kind)
        if operand in self.kernel.parameters:  # its address
            return f'{kind}(m.parameter_address("{operand}"))'
        if re.fullmatch(r"-?(0[fFdD][0-9a-fA-F]+|0x[0-9a-fA-F]+U?|\d+U?)", operand):
            return self.constant(immediate(operand, kind))
        if operand in self.kernel.constants:
            return f'{kind}(m.constant_address("{operand}"))'
        place = self.kernel.shared.get(operand)
        return self.constant(KINDS[kind](self.unknown(operand) if place is None else place))

    def unknown(self, what: str) -> Any:
        """Refuses what the emulator does not know: a guess would give wrong values in silence."""
        raise NotImplementedError(f"{self.kernel.name}: {what}")

    def special(self, name: str) -> str:
        register, _, axis = name[1:].partition(".")
        if register.startswith("envreg"):
            return f"th.full(b32(m.environment[{int(register[6:])}]))"
        return {
            "tid": f"th.tid.{axis}",
            "ctaid": f"th.ctaid.{axis}",
            "laneid": "th.lane",
            "warpid": "th.warp_of_block",
        }.get(register) or f"th.full(m.{register}.{axis})"

    def register(self, name: str, kind: str) -> str:
        """A register as a variable of a type; narrower types take its lower bits."""
        views = self.names.setdefault(name, {})
        declared = storage(self.kernel.type_of(name))
        if not views:
            variable = name.lstrip("%").replace("$", "_")
            self.line(f'{variable} = R["{name}"] if "{name}" in R else m.undefined(th, {declared})')
            views[declared] = variable
        if kind in views:
            return views[kind]
        if declared == "pred" or kind == "pred":
            return self.unknown(f"{name} as {kind}")
        variable = f"{next(iter(views.values())).split('_as_')[0]}_as_{kind}"
        source = views.get(declared) or next(iter(views.values()))
        if np.dtype(KINDS[kind]).itemsize == np.dtype(KINDS[declared]).itemsize:
            self.line(f"{variable} = {source}.view({kind})")
        else:
            bits = self.register(name, declared) if declared in views else f"{source}.view({declared})"
            narrow = storage(kind)
            self.line(f"{variable} = {bits}.astype({narrow}).view({kind})")
        views[kind] = variable
        return variable

    def predicate(self, guard: tuple[str, bool]) -> str:
        name, negated = guard
        return f"~{self.register(name, 'pred')}" if negated else self.register(name, "pred")

    def write(self, operand: Operand, kind: str, expression: str) -> None:
        """Sets a register, where the guard is true, to an array of a type; wider ones get its extension."""
        assert isinstance(operand, str)
        if operand == "_":
            return
        declared = storage(self.kernel.type_of(operand))
        if storage(kind) != declared:  # ld and cvt may write a wider register
            wide = re.sub(r"\d+", declared[1:], kind if kind[0] in "us" else f"u{declared[1:]}")
            expression, kind = f"({expression}).astype({wide})", wide
        variable = f"{operand.lstrip('%').replace('$', '_')}_{self.fresh}"
        self.fresh += 1
        if self.guard is not None:
            before = self.register(operand, kind)
            expression = f"np.where({self.guard}, {expression}, {before})"
        self.line(f"{variable} = {expression}")
        self.names[operand] = {kind: variable}
        self.changed.add(operand)

    def store_alive(self, alive: set[str]) -> None:
        """The registers that are read later, and no others."""
        for name in sorted(self.changed & alive):
            kind = storage(self.kernel.type_of(name))
            variable = self.register(name, kind)
            self.line(f'R["{name}"] = {variable}')
        self.line(f"m.keep(R, {self.constant(frozenset(alive))})")

    def method_of(self, name: str) -> Callable[[Instruction], None] | None:
        return getattr(self, f"do_{name}", None)

    def translate(self, instruction: Instruction, number: int) -> None:
        method = self.method_of(instruction.name)
        if method is None:
            self.unknown(instruction.text)
        self.guard = self.predicate(instruction.guard) if instruction.guard else None
        before = len(self.lines)
        if instruction.name not in ("mov", "wgmma"):
            for register in self.of_products & {*read(instruction)}:
                self.line(f"m.products.used(th, {self.register(register, 'b32')})")
        method(instruction)
        if any("(th, " in line for line in self.lines[before:]):  # it may report something
            self.lines.insert(before, f"th.at = {number}")
        self.guard = None
