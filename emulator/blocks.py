"""Translates basic blocks of PTX into Python functions on numpy arrays with an element for each thread.

A register is an array of bits (uint16, uint32, uint64, or bool), which an instruction takes as its type
says. The function of a block takes the registers that live at its beginning and gives those that live at
its end. An instruction that this module does not know raises NotImplementedError when the kernel is
translated.

Source: Parallel Thread Execution ISA, chapter 9.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from emulator import arithmetic
from emulator.ptx import ENDS_A_BLOCK, Address, Block, Instruction, Kernel, Operand, TensorAddress

_WIDTHS = {"8": np.uint8, "16": np.uint16, "32": np.uint32, "64": np.uint64}
_KINDS: dict[str, type[np.generic]] = {
    **{f"{letter}{bits}": kind for letter in "ub" for bits, kind in _WIDTHS.items()},
    **{"s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64},
    **{"f16": np.float16, "f32": np.float32, "f64": np.float64, "bf16": np.uint16, "pred": np.bool_},
    **{"bf16x2": np.uint32, "f16x2": np.uint32, "tf32": np.uint32},
}
_ROUNDINGS = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
_ORDERED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_ORDERED |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_OPPOSITE = {"eq": "!=", "ne": "==", "lt": ">=", "le": ">", "gt": "<=", "ge": "<"}

_SPACES = ("param", "global", "shared", "shared__cta", "local")


def bits_of(kind: str) -> int:
    return int(re.sub(r"x2$", "", kind).lstrip("busftp")) if kind != "pred" else 1


def storage(kind: str) -> str:
    """The type that a register of this size is stored in."""
    return kind if kind == "pred" else f"b{8 * np.dtype(_KINDS[kind]).itemsize}"


def is_float(kind: str) -> bool:
    return kind.startswith(("f", "bf"))


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
    alive, of_products = _alive_after(kernel), _of_products(kernel)
    return [
        _translated(kernel, block, alive[block.number], of_products)
        for block in kernel.blocks
        if block.instructions
    ]


def successors(kernel: Kernel, block: Block) -> list[int]:
    """The blocks that may follow one."""
    end = block.instructions[-1] if block.instructions else None
    following = [block.number + 1] if block.number + 1 < len(kernel.blocks) else []
    if end is None:
        return following
    if end.name == "bra":
        return [kernel.labels[str(end.operands[0])], *(following if end.guard else [])]
    if end.name == "brx":
        return [kernel.labels[x] for x in kernel.tables[str(end.operands[1])]]
    if end.name in ("ret", "exit"):
        return following if end.guard else []
    return following


def order_of_execution(kernel: Kernel) -> list[int]:
    """A rank of each block, such that threads that have parted meet again where their ways do.

    Those with the lowest rank go on, and a block has a higher rank than all from which it is reached: what
    follows a loop has a higher one than what is in it. Edges back to the head of a loop do not count.
    """
    edges = {block.number: successors(kernel, block) for block in kernel.blocks}
    ranks: dict[int, int] = {}
    _rank({*edges}, edges, ranks)
    return [ranks[block.number] for block in kernel.blocks]


def _rank(blocks: set[int], edges: dict[int, list[int]], ranks: dict[int, int]) -> None:
    """Ranks some blocks, loop by loop."""
    for component in _components(blocks, edges):
        if len(component) > 1:
            outside = [b for b in edges if b not in component]
            heads = {t for b in outside for t in edges[b] if t in component} or {min(component)}
            inner = {b: [t for t in edges[b] if t not in heads] for b in component}
            _rank(component, inner, ranks)
        else:
            ranks[next(iter(component))] = len(ranks)


def _components(blocks: set[int], edges: dict[int, list[int]]) -> list[set[int]]:
    """Strongly connected components, each before those that are reached from it.

    Blocks that were left last in a walk along the edges come first; a walk against them from each takes what
    leads to it (Kosaraju's algorithm).
    """
    left: list[int] = []
    seen: set[int] = set()
    for start in sorted(blocks):
        path = [] if start in seen else [(start, iter(edges[start]))]
        seen.add(start)
        while path:
            block, targets = path[-1]
            for target in targets:
                if target in blocks and target not in seen:
                    seen.add(target)
                    path.append((target, iter(edges[target])))
                    break
            else:
                path.pop()
                left.append(block)

    sources: dict[int, list[int]] = {block: [] for block in blocks}
    for block in blocks:
        for target in edges[block]:
            if target in blocks:
                sources[target].append(block)

    components: list[set[int]] = []
    taken: set[int] = set()
    for start in reversed(left):
        if start in taken:
            continue
        component, ahead = set(), [start]
        while ahead:
            block = ahead.pop()
            if block not in taken:
                taken.add(block)
                component.add(block)
                ahead += sources[block]
        components.append(component)
    return components


def registers_of(operand: Operand) -> list[str]:
    """The registers that an operand names, without the machine's own."""
    if isinstance(operand, Address):
        names = [operand.base]
    elif isinstance(operand, TensorAddress):
        names = [operand.base, *operand.coordinates]
    elif isinstance(operand, tuple):
        names = list(operand)
    else:
        names = operand.split("|")
    return [x for x in (name.lstrip("!-") for name in names) if x.startswith("%") and not _is_special(x)]


def _is_special(name: str) -> bool:
    return name.split(".")[0] in ("%tid", "%ntid", "%ctaid", "%nctaid", "%laneid", "%warpid")


# Instructions that write no register, by the beginnings of their names with modifiers.
_WRITE_NOTHING = (
    *("st.", "stmatrix", "bra", "brx", "bar", "ret", "exit", "red.", "fence", "membar", "cp.", "prefetch"),
    *("setmaxnreg", "wgmma.fence", "wgmma.commit", "wgmma.wait", "mbarrier.init", "mbarrier.inval"),
)


def written(instruction: Instruction) -> list[str]:
    """The registers that an instruction writes."""
    name = ".".join((instruction.name, *instruction.modifiers))
    if name.startswith(_WRITE_NOTHING) or not instruction.operands:
        return []
    return registers_of(instruction.operands[0])


def read(instruction: Instruction) -> list[str]:
    """What it reads: under a guard also what it writes, which stays where the guard is false."""
    results = written(instruction)
    operands = instruction.operands[1:] if results else instruction.operands
    names = [name for operand in operands for name in registers_of(operand)]
    if instruction.name == "wgmma":
        names += results
    if instruction.guard:
        names += [instruction.guard[0], *results]
    return names


def _alive_after(kernel: Kernel) -> list[set[str]]:
    """The registers whose values at the end of each block may be read later."""
    used: list[set[str]] = []
    made: list[set[str]] = []
    for block in kernel.blocks:
        uses: set[str] = set()
        makes: set[str] = set()
        for instruction in block.instructions:
            uses |= set(read(instruction)) - makes
            if not instruction.guard:
                makes |= set(written(instruction))
        used.append(uses)
        made.append(makes)

    before: list[set[str]] = [set() for _ in kernel.blocks]
    after: list[set[str]] = [set() for _ in kernel.blocks]
    changed = True
    while changed:
        changed = False
        for block in reversed(kernel.blocks):
            at = block.number
            after[at] = set().union(*(before[s] for s in successors(kernel, block)))
            now = used[at] | (after[at] - made[at])
            changed |= now != before[at]
            before[at] = now
    return after


def _translated(kernel: Kernel, block: Block, alive: set[str], of_products: set[str]) -> Translated:
    end = block.instructions[-1]
    ends = end.name in ENDS_A_BLOCK and end.modifiers[:1] != ("warp",)
    writer = _Writer(kernel, of_products)
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


_NAMESPACE = {name: kind for name, kind in _KINDS.items() if name not in ("pred",)} | {"pred": np.bool_}


def _of_products(kernel: Kernel) -> set[str]:
    """The registers that may hold the result of an asynchronous product, and so those that it is moved to."""
    instructions = [i for block in kernel.blocks for i in block.instructions]
    found = {x for i in instructions if i.name == "wgmma" for x in written(i)}
    moves = [i for i in instructions if i.name == "mov" and found]
    while more := {x for i in moves if found & {*read(i)} for x in written(i)} - found:
        found |= more
    return found


class _Writer:
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
            return self.special(operand) if _is_special(operand) else self.register(operand, kind)
        if operand in self.kernel.parameters:  # its address
            return f'{kind}(m.parameter_address("{operand}"))'
        if re.fullmatch(r"-?(0[fFdD][0-9a-fA-F]+|0x[0-9a-fA-F]+U?|\d+U?)", operand):
            return self.constant(immediate(operand, kind))
        return self.constant(_KINDS[kind](0) if operand == "global_smem" else self.unknown(operand))

    def unknown(self, what: str) -> Any:
        raise NotImplementedError(f"{self.kernel.name}: {what}")

    def special(self, name: str) -> str:
        register, _, axis = name[1:].partition(".")
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
        if np.dtype(_KINDS[kind]).itemsize == np.dtype(_KINDS[declared]).itemsize:
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

    # Instructions.

    def translate(self, instruction: Instruction, number: int) -> None:
        method = getattr(self, f"do_{instruction.name}", None)
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

    def binary(self, i: Instruction, expression: str, kind: str | None = None) -> None:
        kind = kind or i.type
        a, b = (self.value(str(x), kind) for x in i.operands[1:3])
        self.write(i.operands[0], kind, expression.format(a=a, b=b, kind=kind))

    def float_binary(self, i: Instruction, sign: str) -> None:
        if i.type in ("bf16", "bf16x2", "f16x2") or {"rz", "rm", "rp", "sat"} & set(i.modifiers):
            self.unknown(i.text)
        flushed = "ftz" in i.modifiers
        self.binary(i, f"a.flush(a.flush({{a}}) {sign} a.flush({{b}}))" if flushed else f"{{a}} {sign} {{b}}")

    def do_add(self, i: Instruction) -> None:
        self.float_binary(i, "+")

    def do_sub(self, i: Instruction) -> None:
        self.float_binary(i, "-")

    def do_mul(self, i: Instruction) -> None:
        if "wide" in i.modifiers:
            wide = f"{i.type[0]}{2 * bits_of(i.type)}"
            a, b = (self.value(str(x), i.type) for x in i.operands[1:3])
            self.write(i.operands[0], wide, f"{a}.astype({wide}) * {wide}({b})")
        elif "hi" in i.modifiers:
            self.binary(i, "a.high_product({a}, np.broadcast_to({b}, {a}.shape))")
        else:
            self.float_binary(i, "*")

    def do_mad(self, i: Instruction) -> None:
        if "hi" in i.modifiers:
            self.unknown(i.text)
        wide = f"{i.type[0]}{2 * bits_of(i.type)}" if "wide" in i.modifiers else i.type
        a, b = (self.value(str(x), i.type) for x in i.operands[1:3])
        c = self.value(str(i.operands[3]), wide)
        self.write(i.operands[0], wide, f"{wide}({a}) * {wide}({b}) + {c}")

    def do_fma(self, i: Instruction) -> None:
        if i.type not in ("f32", "f64") or "rn" not in i.modifiers or "sat" in i.modifiers:
            self.unknown(i.text)
        a, b, c = (self.value(str(x), i.type) for x in i.operands[1:4])
        if i.type == "f64":
            expression = f"a.fma_f64({a}, {b}, {c})"
        elif "ftz" in i.modifiers:
            expression = f"a.flush(a.fma_f32(a.flush({a}), a.flush({b}), a.flush({c})))"
        else:
            expression = f"a.fma_f32({a}, {b}, {c})"
        self.write(i.operands[0], i.type, expression)

    def do_div(self, i: Instruction) -> None:
        a, b = (self.value(str(x), i.type) for x in i.operands[1:3])
        if not is_float(i.type):
            expression = f"a.quotient({a}, th.array({b}))"
        elif i.type == "f64" or "rn" in i.modifiers:
            expression = f"{a} / {b}"
        else:
            ulps = 2.0  # of both .approx and .full, within the range that .approx has
            expression = f"a.approximate(f64({a}) / f64({b}), {ulps}, th.array({b}).view(b32))"
        self.write(i.operands[0], i.type, expression)

    def do_rem(self, i: Instruction) -> None:
        a, b = (self.value(str(x), i.type) for x in i.operands[1:3])
        self.write(i.operands[0], i.type, f"a.remainder({a}, th.array({b}))")

    def approximated(self, i: Instruction, function: str, ulps: float) -> None:
        a = self.value(str(i.operands[1]), "f32")
        flushed = f"a.flush({a})" if "ftz" in i.modifiers else a
        result = f"a.approximate({function}(f64({flushed})), {ulps}, {a}.view(b32))"
        self.write(i.operands[0], "f32", f"a.flush({result})" if "ftz" in i.modifiers else result)

    def do_ex2(self, i: Instruction) -> None:
        if i.type != "f32":
            self.unknown(i.text)
        self.approximated(i, "np.exp2", 2.0)

    def do_lg2(self, i: Instruction) -> None:
        self.approximated(i, "np.log2", 2.0)

    def do_rcp(self, i: Instruction) -> None:
        if i.type == "f64":
            self.write(i.operands[0], "f64", f"a.rcp_approx_f64({self.value(str(i.operands[1]), 'f64')})")
        elif "rn" in i.modifiers:
            self.write(i.operands[0], "f32", f"f32(1) / {self.value(str(i.operands[1]), 'f32')}")
        else:
            self.approximated(i, "np.reciprocal", 1.0)

    def do_rsqrt(self, i: Instruction) -> None:
        self.approximated(i, "1 / np.sqrt", 2.0)

    def do_sqrt(self, i: Instruction) -> None:
        if "approx" in i.modifiers:
            self.approximated(i, "np.sqrt", 2.0)
        else:
            self.write(i.operands[0], i.type, f"np.sqrt({self.value(str(i.operands[1]), i.type)})")

    def do_tanh(self, i: Instruction) -> None:
        self.approximated(i, "np.tanh", 2.0**13)  # 2^-11 of the result

    def do_neg(self, i: Instruction) -> None:
        self.write(i.operands[0], i.type, f"-{self.value(str(i.operands[1]), i.type)}")

    def do_abs(self, i: Instruction) -> None:
        a = self.value(str(i.operands[1]), i.type)
        if i.type == "bf16":
            expression = f"{a} & b16(0x7FFF)"
        else:
            expression = f"a.flush(np.abs({a}))" if "ftz" in i.modifiers else f"np.abs({a})"
        self.write(i.operands[0], i.type, expression)

    def extreme(self, i: Instruction, of_floats: str, of_integers: str) -> None:
        if not is_float(i.type) or "NaN" in i.modifiers:
            self.binary(i, f"np.{of_integers}({{a}}, {{b}})")
        else:
            self.binary(i, f"a.{of_floats}({{a}}, {{b}})")

    def do_min(self, i: Instruction) -> None:
        self.extreme(i, "minimum", "minimum")

    def do_max(self, i: Instruction) -> None:
        self.extreme(i, "maximum", "maximum")

    def do_and(self, i: Instruction) -> None:
        self.binary(i, "{a} & {b}")

    def do_or(self, i: Instruction) -> None:
        self.binary(i, "{a} | {b}")

    def do_xor(self, i: Instruction) -> None:
        self.binary(i, "{a} ^ {b}")

    def do_not(self, i: Instruction) -> None:
        self.write(i.operands[0], i.type, f"~{self.value(str(i.operands[1]), i.type)}")

    def do_lop3(self, i: Instruction) -> None:
        """Any function of three bits, whose table the last operand is."""
        a, b, c = (self.value(str(x), "b32") for x in i.operands[1:4])
        table = int(str(i.operands[4]).rstrip("U"), 0)
        terms = [
            " & ".join(x if k >> (2 - place) & 1 else f"~{x}" for place, x in enumerate((a, b, c)))
            for k in range(8)
            if table >> k & 1
        ]
        self.write(i.operands[0], "b32", " | ".join(f"({term})" for term in terms) or "th.full(b32(0))")

    def do_shl(self, i: Instruction) -> None:
        a, by = self.value(str(i.operands[1]), i.type), self.value(str(i.operands[2]), "b32")
        self.write(i.operands[0], i.type, f"a.shift_left({a}, {by}, {bits_of(i.type)})")

    def do_shr(self, i: Instruction) -> None:
        a, by = self.value(str(i.operands[1]), i.type), self.value(str(i.operands[2]), "b32")
        self.write(i.operands[0], i.type, f"a.shift_right({a}, {by}, {bits_of(i.type)})")

    def do_shf(self, i: Instruction) -> None:
        low, high, by = (self.value(str(x), "b32") for x in i.operands[1:4])
        both = f"({low}.astype(b64) | (th.array({high}).astype(b64) << b64(32)))"
        amount = f"({by} & b32(31))" if "wrap" in i.modifiers else f"np.minimum({by}, b32(32))"
        shifted = (
            f"{both} >> b64({amount})" if "r" in i.modifiers else f"({both} << b64({amount})) >> b64(32)"
        )
        self.write(i.operands[0], "b32", f"({shifted}).astype(b32)")

    def do_prmt(self, i: Instruction) -> None:
        a, b = (self.value(str(x), "b32") for x in i.operands[1:3])
        selector = int(str(i.operands[3]).rstrip("U"), 0)
        self.write(i.operands[0], "b32", f"a.prmt(th.array({a}), th.array({b}), {selector})")

    def do_bfe(self, i: Instruction) -> None:
        if bits_of(i.type) != 32:
            self.unknown(i.text)
        a, position, length = (self.value(str(x), "b32") for x in i.operands[1:4])
        self.write(i.operands[0], "b32", f"a.bfe({a}, {position}, {length}, signed={i.type == 's32'})")

    def do_clz(self, i: Instruction) -> None:
        self.write(i.operands[0], "b32", f"a.leading_zeros({self.value(str(i.operands[1]), 'b32')})")

    def do_popc(self, i: Instruction) -> None:
        self.write(i.operands[0], "b32", f"a.set_bits({self.value(str(i.operands[1]), i.type)})")

    def do_selp(self, i: Instruction) -> None:
        a, b = (self.value(str(x), i.type) for x in i.operands[1:3])
        self.write(i.operands[0], i.type, f"np.where({self.register(str(i.operands[3]), 'pred')}, {a}, {b})")

    def do_setp(self, i: Instruction) -> None:
        compare, kind = i.modifiers[0], i.type
        a, b = (self.value(str(x), kind) for x in i.operands[1:3])
        if kind == "bf16":
            a, b, kind = f"a.from_bf16({a})", f"a.from_bf16(th.array({b}))", "f32"
        unordered = f"(np.isnan({a}) | np.isnan({b}))"
        if not is_float(kind):
            expression = f"{a} {_ORDERED[compare]} {b}"
        elif compare in ("num", "nan"):
            expression = unordered if compare == "nan" else f"~{unordered}"
        elif compare.endswith("u"):
            expression = (
                f"~({a} {_OPPOSITE[compare[:-1]]} {b})" if compare != "equ" else f"({a} == {b}) | {unordered}"
            )
            if compare == "neu":
                expression = f"{a} != {b}"
        else:
            expression = f"{a} {_ORDERED[compare]} {b}"
            if compare == "ne":
                expression = f"({expression}) & ~{unordered}"
        joined = [x for x in i.modifiers[1:-1] if x in ("and", "or", "xor")]
        results = str(i.operands[0]).split("|")
        if joined or len(results) > 1:
            self.unknown(i.text)
        self.write(results[0], "pred", expression)

    def do_mov(self, i: Instruction) -> None:
        to, source = i.operands[:2]
        if isinstance(to, tuple):
            bits = bits_of(i.type) // len(to)
            whole = self.value(str(source), i.type)
            for place, part in enumerate(to):
                shifted = f"({whole} >> {storage(i.type)}({bits * place})).astype(b{bits})"
                self.write(part, f"b{bits}", shifted)
        elif isinstance(source, tuple):
            bits = bits_of(i.type) // len(source)
            whole, half = storage(i.type), f"b{bits}"
            parts = [
                f"(th.array({self.value(x, half)}).astype({whole}) << {whole}({bits * k}))"
                for k, x in enumerate(source)
            ]
            self.write(to, i.type, " | ".join(parts))
        elif i.type == "pred":
            same = (
                self.register(str(source), "pred")
                if str(source).startswith("%")
                else f"th.full(np.bool_({source}))"
            )
            self.write(to, "pred", same)
        else:
            value = self.value(str(source), i.type)
            self.write(to, i.type, value if str(source).startswith("%") else f"th.full({value})")

    def do_cvta(self, i: Instruction) -> None:
        """Addresses of shared memory are generic ones as they are: they are below all others."""
        self.write(i.operands[0], i.type, self.value(str(i.operands[1]), i.type))

    def do_cvt(self, i: Instruction) -> None:
        to, source = i.modifiers[-2:]
        rounding = next((x for x in i.modifiers if x in _ROUNDINGS), None)
        flushed = "ftz" in i.modifiers
        if {"sat", "relu", "rz", "rm", "rp"} & set(i.modifiers[:-2]):
            self.unknown(i.text)

        if to in ("bf16x2", "f16x2"):
            high, low = (self.value(str(x), "f32") for x in i.operands[1:3])
            half = "a.to_bf16({})" if to == "bf16x2" else "{}.astype(f16).view(b16)"
            parts = [f"{half.format(f'th.array({x})')}.astype(b32)" for x in (high, low)]
            self.write(i.operands[0], to, f"({parts[0]} << b32(16)) | {parts[1]}")
            return

        a = self.value(str(i.operands[1]), source)
        if flushed:
            a = f"a.flush({a})"
        if source == "bf16":
            a, source = f"a.from_bf16({a})", "f32"
        if to == "tf32":
            expression = f"(({a}.view(b32) + b32(0x1000)) & b32(0xFFFFE000))"
        elif to == "bf16":
            expression = f"a.to_bf16({a})"
        elif is_float(source) and not is_float(to):
            expression = f"a.to_integer(np.{_ROUNDINGS[rounding or 'rzi']}({a}), {to})"
        elif is_float(source) and rounding:
            expression = f"np.{_ROUNDINGS[rounding]}({a}).astype({to})"
        else:
            expression = f"{a}.astype({to})"
        self.write(i.operands[0], to, expression)

    # Other threads and memory.

    def do_shfl(self, i: Instruction) -> None:
        result, source, lane, clamp, members = i.operands
        if str(members) not in ("-1", "0xffffffff") or "|" in str(result):
            self.unknown(i.text)
        a, b, c = self.value(str(source), "b32"), self.value(str(lane), "b32"), self.value(str(clamp), "b32")
        self.write(result, "b32", f'm.shuffle(th, "{i.modifiers[1]}", {a}, {b}, {c})')

    def do_redux(self, i: Instruction) -> None:
        a = self.value(str(i.operands[1]), i.type)
        self.write(i.operands[0], i.type, f'm.reduce(th, "{i.modifiers[1]}", {a})')

    def do_vote(self, i: Instruction) -> None:
        how = i.modifiers[1]
        a = self.predicate((str(i.operands[1]).lstrip("!"), str(i.operands[1]).startswith("!")))
        self.write(i.operands[0], "b32" if how == "ballot" else "pred", f'm.vote(th, "{how}", {a})')

    def do_elect(self, i: Instruction) -> None:
        lane, elected = str(i.operands[0]).split("|")
        self.write(lane, "b32", "th.full(b32(0))")  # the first of a whole warp
        self.write(elected, "pred", "m.elect(th)")

    def do_bar(self, i: Instruction) -> None:
        """bar.warp.sync; all others end a block."""
        if i.modifiers[:2] != ("warp", "sync") or str(i.operands[0]) not in ("-1", "0xffffffff"):
            self.unknown(i.text)
        self.line("m.whole_warps(th, th.at)")

    def do_setmaxnreg(self, i: Instruction) -> None:
        """Registers are not counted here."""

    def do_mbarrier(self, i: Instruction) -> None:
        how, where = i.modifiers[0], self.guard or "None"
        if how == "init":
            count = int(str(i.operands[1]), 0)
            self.line(f"m.mbarriers.init(th, {self.address(i.operands[0], 32)}, {where}, {count})")
        elif how == "inval":
            self.line(f"m.mbarriers.inval(th, {self.address(i.operands[0], 32)}, {where})")
        elif how == "arrive":
            if str(i.operands[0]) != "_":
                self.unknown(i.text)
            size = self.value(str(i.operands[2]), "b32") if "expect_tx" in i.modifiers else "0"
            self.line(f"m.mbarriers.arrive(th, {self.address(i.operands[1], 32)}, {where}, {size})")
        elif how in ("try_wait", "test_wait") and "parity" in i.modifiers and not self.guard:
            address, parity = self.address(i.operands[1], 32), self.value(str(i.operands[2]), "b32")
            self.write(i.operands[0], "pred", f"m.mbarriers.waited(th, {address}, th.array({parity}))")
        else:
            self.unknown(i.text)

    def do_wgmma(self, i: Instruction) -> None:
        """wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {d}, a, b, scale-d, 1, 1, transposed."""
        how = i.modifiers[0]
        if how == "fence":
            self.line("m.whole_warps(th, th.at)")
        elif how == "commit_group":
            self.line("m.products.commit(th)")
        elif how == "wait_group":
            self.line(f"m.products.wait(th, {int(str(i.operands[0]))})")
        else:
            shape, of_sums, kind = i.modifiers[3], i.modifiers[4], i.modifiers[5]
            d, a, b, add, *rest = i.operands
            scales, transposed = (
                [int(str(x)) for x in rest[:2]],
                [str(x) == "1" for x in rest[2:4]] or [False] * 2,
            )
            if of_sums != "f32" or self.guard or scales != [1, 1] or i.modifiers[5] != i.modifiers[6]:
                self.unknown(i.text)
            if isinstance(a, tuple):
                of_a = f"[{', '.join(self.value(x, 'b32') for x in a)}]"
                transposed = [False, transposed[-1] if len(rest) > 2 else False]
            else:
                of_a = f"th.array({self.value(str(a), 'b64')})"
            added = self.register(str(add), "pred") if str(add).startswith("%") else f"np.bool_({add})"
            sums = ", ".join(self.value(x, "f32") for x in d)
            n, result = int(shape[4 : shape.index("k")]), self.variable()
            self.line(
                f'{result} = m.products.multiply(th, {n}, "{kind}", [{sums}], {of_a}, '
                f"th.array({self.value(str(b), 'b64')}), {added}, {tuple(transposed)})"
            )
            for k, register in enumerate(d):
                self.write(register, "f32", f"{result}[{k}]")

    def do_activemask(self, i: Instruction) -> None:
        self.unknown(i.text)

    def address(self, operand: Operand, bits: int) -> str:
        assert isinstance(operand, Address)
        base = self.value(operand.base, f"b{bits}")
        return (
            f"th.array({base} + b{bits}({operand.offset % 2**bits}))"
            if operand.offset
            else f"th.array({base})"
        )

    def space(self, i: Instruction) -> str:
        """Which memory an instruction takes; generic addresses are global ones here."""
        return next((x.split("__")[0] for x in i.modifiers if x in _SPACES), "global")

    def lanes(self, i: Instruction) -> int:
        return next((int(x[1:]) for x in i.modifiers if re.fullmatch(r"v[248]", x)), 1)

    def do_ld(self, i: Instruction) -> None:
        space = self.space(i)
        if space == "param":
            assert isinstance(i.operands[1], Address)
            place = i.operands[1]
            self.write(
                i.operands[0], i.type, f'th.full(m.parameter("{place.base}", {place.offset}, {i.type}))'
            )
            return
        address = self.address(i.operands[1], 64 if space == "global" else 32)
        where = self.guard or "None"
        to = i.operands[0] if isinstance(i.operands[0], tuple) else (i.operands[0],)
        loaded = self.variable()
        width = bits_of(i.type) // 8
        self.line(f"{loaded} = m.{space}_memory.load(th, {address}, {where}, {width}, {len(to)})")
        for k, register in enumerate(to):
            self.write(register, i.type, f"{loaded}[{k}].view({i.type})")

    def do_st(self, i: Instruction) -> None:
        space = self.space(i)
        address = self.address(i.operands[0], 64 if space == "global" else 32)
        source = i.operands[1] if isinstance(i.operands[1], tuple) else (str(i.operands[1]),)
        kind = storage(i.type)
        values = ", ".join(f"th.array({self.value(x, kind)})" for x in source)
        self.line(f"m.{space}_memory.store(th, {address}, {self.guard or 'None'}, [{values}])")

    def do_atom(self, i: Instruction) -> None:
        to, place, operand = i.operands[:3]
        how = i.modifiers[-2]
        value = self.value(str(operand), i.type)
        address = self.address(place, 64)
        others = "".join(f", th.array({self.value(str(x), i.type)})" for x in i.operands[3:])
        order = '"acq_rel"' if "acq_rel" in i.modifiers else '"relaxed"'
        call = f'm.atomic(th, {address}, {self.guard or "None"}, "{how}", {order}, th.array({value}){others})'
        self.write(to, i.type, call)

    def do_red(self, i: Instruction) -> None:
        place, operand = i.operands[:2]
        value, address = self.value(str(operand), i.type), self.address(place, 64)
        order = '"acq_rel"' if {"acq_rel", "release"} & set(i.modifiers) else '"relaxed"'
        where, how = self.guard or "None", i.modifiers[-2]
        self.line(f'm.atomic(th, {address}, {where}, "{how}", {order}, th.array({value}))')

    def do_fence(self, i: Instruction) -> None:
        if "async" in i.modifiers:
            self.line("m.clocks.fence(np.unique(th.warp))")

    def do_cp(self, i: Instruction) -> None:
        where = self.guard or "None"
        if i.modifiers[:2] == ("async", "bulk"):
            self.bulk(i, where)
            return
        if i.modifiers[:1] != ("async",):
            self.unknown(i.text)
        if "commit_group" in i.modifiers:
            self.line(f"m.copies.commit(th, {where})")
        elif "wait_group" in i.modifiers or "wait_all" in i.modifiers:
            pending = int(str(i.operands[0])) if i.operands else 0
            self.line(f"m.copies.wait(th, {pending})")
        else:
            to, source = self.address(i.operands[0], 32), self.address(i.operands[1], 64)
            size = int(str(i.operands[2]), 0)
            taken = f"th.array({self.value(str(i.operands[3]), 'b32')})" if len(i.operands) > 3 else "None"
            self.line(f"m.copies.issue(th, {to}, {source}, {where}, {size}, {taken})")

    def bulk(self, i: Instruction, where: str) -> None:
        """cp.async.bulk"""
        if "commit_group" in i.modifiers:
            self.line(f"m.bulk.commit(th, {where})")
        elif "wait_group" in i.modifiers:
            self.line(f"m.bulk.wait(th, {int(str(i.operands[0]))})")
        elif i.modifiers[2:6] == ("tensor", "2d", "shared__cta", "global"):
            to, maps, coordinates = self.address(i.operands[0], 32), *self.box(i.operands[1])
            barrier = self.address(i.operands[2], 32)
            self.line(f"m.bulk.load(th, {to}, {maps}, {coordinates}, {barrier}, {where})")
        elif i.modifiers[2:6] == ("tensor", "2d", "global", "shared__cta"):
            maps, coordinates = self.box(i.operands[0])
            self.line(f"m.bulk.store(th, {maps}, {coordinates}, {self.address(i.operands[1], 32)}, {where})")
        else:
            self.unknown(i.text)

    def box(self, operand: Operand) -> tuple[str, str]:
        """The address of a tensor map, and the coordinates."""
        assert isinstance(operand, TensorAddress)
        coordinates = ", ".join(f"th.array({self.value(x, 's32')})" for x in operand.coordinates)
        return f"th.array({self.value(operand.base, 'b64')})", f"[{coordinates}]"

    def do_ldmatrix(self, i: Instruction) -> None:
        count = next(int(x[1:]) for x in i.modifiers if re.fullmatch(r"x[124]", x))
        to = i.operands[0]
        assert isinstance(to, tuple)
        loaded = self.variable()
        address = self.address(i.operands[1], 32)
        self.line(f"{loaded} = m.load_matrices(th, {address}, {count}, {'trans' in i.modifiers})")
        for k, register in enumerate(to):
            self.write(register, "b32", f"{loaded}[{k}]")

    def do_stmatrix(self, i: Instruction) -> None:
        address, source = self.address(i.operands[0], 32), i.operands[1]
        values = ", ".join(
            self.value(x, "b32") for x in (source if isinstance(source, tuple) else (str(source),))
        )
        self.line(f"m.store_matrices(th, {address}, [{values}], {'trans' in i.modifiers})")

    def do_mma(self, i: Instruction) -> None:
        """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"""
        shape, kind, of_sums = i.modifiers[2], i.modifiers[-2], i.modifiers[-1]
        if self.guard or i.modifiers[:2] != ("sync", "aligned") or i.modifiers[3:5] != ("row", "col"):
            self.unknown(i.text)
        a, b = ([self.value(x, "b64" if kind == "f64" else "b32") for x in i.operands[k]] for k in (1, 2))
        c = [self.value(x, of_sums) for x in i.operands[3]]
        result = self.variable()
        operands = ", ".join(f"[{', '.join(part)}]" for part in (a, b, c))
        self.line(f'{result} = m.multiply(th, "{shape}", "{kind}", {operands})')
        for k, register in enumerate(i.operands[0]):
            self.write(register, of_sums, f"{result}[{k}]")


def immediate(text: str, kind: str) -> Any:
    """A constant as a scalar of a type: 0f3F800000, 0d3FF0000000000000, 0x10U, -7."""
    negative = text.startswith("-")
    text = text.lstrip("-").rstrip("U")
    if text[:2].lower() == "0f" and len(text) == 10:
        value: Any = np.float32(struct.unpack(">f", bytes.fromhex(text[2:]))[0])
        bits: Any = np.uint32(int(text[2:], 16))
    elif text[:2].lower() == "0d" and len(text) == 18:
        value = np.float64(struct.unpack(">d", bytes.fromhex(text[2:]))[0])
        bits = np.uint64(int(text[2:], 16))
    else:
        number = -int(text, 0) if negative else int(text, 0)
        if kind == "pred":
            return np.bool_(number != 0)
        if kind in ("f16", "f32", "f64"):
            width = np.dtype(_KINDS[kind]).itemsize * 8
            return _WIDTHS[str(width)](number % 2**width).view(_KINDS[kind])
        width = np.dtype(_KINDS[kind]).itemsize * 8
        return _WIDTHS[str(width)](number % 2**width).view(_KINDS[kind])
    if is_float(kind):
        return -value if negative else value
    return bits
