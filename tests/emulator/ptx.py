"""Reads a kernel of PTX, as Triton and nvcc write it, into basic blocks of instructions.

Source: Parallel Thread Execution ISA, chapters 4 (syntax), 5 (state spaces and types), 11 (directives).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

# What ends a basic block: control goes elsewhere, or the thread may have to wait for others.
ENDS_A_BLOCK = ("bra", "brx", "ret", "exit", "bar", "barrier")

_REGISTER = re.compile(r"%[a-zA-Z_$][\w$]*(?:\.[xyz])?")
_TOKEN = re.compile(r"\[[^\]]*\]|\{[^}]*\}|[^,{}()\[\]\s]+")
_ADDRESS = re.compile(r"\[\s*([^+\-\s]+)\s*(?:([+-])\s*(-?\w+))?\s*\]")
_INSTRUCTION = re.compile(r"(?:@(!?)(%[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)


@dataclass(frozen=True)
class Address:
    """[base + offset], of which the base is a register or the name of a variable."""

    base: str
    offset: int


@dataclass(frozen=True)
class TensorAddress:
    """[base, {coordinates}]: a box of a tensor, whose innermost coordinate is the first."""

    base: str
    coordinates: tuple[str, ...]


# A register or a constant, an address, a vector.
Operand = str | Address | TensorAddress | tuple[str, ...]


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: "ld.global.v2.b32" as "ld".
        modifiers: the rest of it, ("global", "v2", "b32").
        guard: the predicate that it is executed under, with whether it is to be false; None for always.
        line: where the kernel's source has it.
    """

    name: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: tuple[str, bool] | None
    line: str
    text: str

    @property
    def type(self) -> str:
        """The last modifier, which is the type of the result."""
        return self.modifiers[-1]


@dataclass
class Block:
    """Instructions that are executed one after the other; only the last may branch or wait."""

    number: int
    instructions: list[Instruction] = field(default_factory=list)


@dataclass
class Kernel:
    """An entry of a module.

    Attributes:
        parameters: their names and sizes in bytes.
        threads: of a block, from .reqntid.
        registers: the types of registers, by the beginning of their names ("%rd": "b64"), or by a whole name.
        blocks: in the order of the text, which is that of the compiler's layout.
        labels: the numbers of the blocks that they stand before.
        tables: of labels, by their names.
        shared: where in a block's shared memory the variables of the module are.
        constants: the bytes of the module's initialised variables in global memory, by their names.
    """

    name: str
    parameters: dict[str, int]
    threads: int
    registers: dict[str, str]
    blocks: list[Block]
    labels: dict[str, int]
    tables: dict[str, list[str]] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    constants: dict[str, bytes] = field(default_factory=dict)

    def type_of(self, register: str) -> str:
        """The type that a register was declared with."""
        exact = self.registers.get(register)
        return self.registers[register.rstrip("0123456789")] if exact is None else exact


def parse(text: str) -> Kernel:
    """The only entry of a PTX module."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, flags=re.MULTILINE))
    entry = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)\s*(.*?)\{(.*)", text, flags=re.DOTALL)
    if entry is None or len(re.findall(r"\.entry\b", text)) != 1:
        raise ValueError("PTX: want one .entry")

    name, parameters, directives, body = entry.groups()
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", directives)
    kernel = Kernel(name, _parameters(parameters), int(threads[1]) if threads else 1024, {}, [Block(0)], {})
    kernel.shared, kernel.constants = _shared(text), _constants(text)
    body = re.sub(r"//[^\n]*", "", body[: _end(body)])

    line, scopes, label = "", 0, ""
    renamed: list[dict[str, str]] = []  # the registers of inner scopes, which get names of their own
    for statement in _statements(body):
        if statement == "{":
            scopes += 1
            renamed.append({})
        elif statement == "}":
            renamed.pop()
        elif statement.endswith(":"):
            _begin_block(kernel)
            label = statement[:-1].strip()
            if renamed:  # inline code has labels of its own, and may stand in several places
                renamed[-1][label] = f"in{scopes}_{label}"
            kernel.labels[_renamed(label, renamed)] = kernel.blocks[-1].number
        elif statement.startswith(".branchtargets"):
            kernel.tables[label] = [x.strip() for x in statement.split(None, 1)[1].split(",")]
        elif statement.startswith(".loc"):
            file, at = statement.split()[1:3]
            line = f"{files.get(file, file).rsplit('/', 1)[-1]}:{at}"
        elif statement.startswith(".reg") or (statement.startswith(".param") and renamed):
            # A parameter of a call lives in the call's scope, and is written and read once: a register does.
            _declare(kernel, statement, renamed, scopes)
        elif not statement.startswith("."):
            instruction = _instruction(_renamed(statement, renamed), line)
            kernel.blocks[-1].instructions.append(instruction)
            if instruction.name in ENDS_A_BLOCK:
                _begin_block(kernel)
    return kernel


def _parameters(text: str) -> dict[str, int]:
    """.param .u64 name, or .param .align 64 .b8 name[128]."""
    sizes = {}
    for one in filter(str.strip, text.split(",")):
        found = re.search(r"\.[a-z](\d+)\s.*?([\w$]+)\s*(?:\[(\d+)\])?\s*$", one.strip(), flags=re.DOTALL)
        if found is None:
            raise ValueError(f"PTX: no parameter: {one.strip()}")
        sizes[found[2]] = int(found[1]) // 8 * int(found[3] or 1)
    return sizes


def _shared(text: str) -> dict[str, int]:
    """.shared .align 8 .b8 name[64], one after the other; .extern .shared .b8 name[] begins after them."""
    found = re.findall(
        r"^\s*((?:\.\w+\s+)*)\.shared\s+(?:\.align\s+(\d+)\s+)?\.[a-z](\d+)\s+([\w$]+)\s*(?:\[(\d*)\])?\s*;",
        text,
        flags=re.MULTILINE,
    )
    places, used = {}, 0
    for before, alignment, bits, name, count in sorted(found, key=lambda x: "extern" in x[0]):
        width = int(bits) // 8
        multiple = int(alignment or width)
        used = -(-used // multiple) * multiple
        places[name] = used
        if "extern" not in before:
            used += width * int(count or 1)
    return places


def _constants(text: str) -> dict[str, bytes]:
    """.global .align 1 .b8 name[3] = {97, 98};, what is not named being 0."""
    found = re.findall(
        r"^\s*(?:\.\w+\s+)*\.global\s+(?:\.align\s+\d+\s+)?\.[bu]8\s+([\w$]+)\[(\d+)\]\s*=\s*\{([\d,\s]*)\}\s*;",
        text,
        flags=re.MULTILINE,
    )
    return {
        name: bytes(map(int, numbers.split(","))).ljust(int(size), b"\0") for name, size, numbers in found
    }


def _end(body: str) -> int:
    """Where the brace that ends the entry is."""
    depth = 1
    for found in re.finditer(r"[{}]", body):
        depth += 1 if found[0] == "{" else -1
        if depth == 0:
            return found.start()
    raise ValueError("PTX: the entry has no end")


def _statements(body: str) -> Iterator[str]:
    """Labels with their colon, single braces of scopes, and what semicolons or, after .loc, lines end."""
    position = 0
    while position < len(body):
        found = _NEXT.match(body, position)
        if found is None:
            if body[position:].strip():
                raise ValueError(f"PTX: no statement: {body[position : position + 80]!r}")
            return
        position = found.end()
        statement = found[1] or found[2] or found[3] or found[4]
        yield " ".join(statement.rstrip(";").split())


_NEXT = re.compile(
    r"\s*(?:"
    r"(\.loc[^\n]*)"  # ends with its line
    r"|([\w$]+\s*:)(?!:)"
    r"|([{}])"
    r"|((?:[^;{}]|\{[^{};]*\})+;)"  # vectors have braces, too
    r")"
)


def _begin_block(kernel: Kernel) -> None:
    """A new block, unless the last has nothing in it yet."""
    if kernel.blocks[-1].instructions:
        kernel.blocks.append(Block(len(kernel.blocks)))


def _declare(kernel: Kernel, statement: str, renamed: list[dict[str, str]], scopes: int) -> None:
    """.reg .b32 %r<841>, or .reg .pred p, q in an inner scope."""
    _, kind, names = statement.split(None, 2)
    for name in (x.strip() for x in names.split(",")):
        prefix, angle, _ = name.partition("<")
        if renamed:
            inner = f"%in{scopes}_{prefix.lstrip('%')}" + ("" if angle else "_")
            renamed[-1][prefix] = inner
            kernel.registers[inner] = kind[1:]
        else:
            kernel.registers[prefix] = kind[1:]


def _renamed(statement: str, renamed: list[dict[str, str]]) -> str:
    for scope in reversed(renamed):
        for name, inner in scope.items():
            statement = re.sub(rf"(?<![\w$%.]){re.escape(name)}(?![\w$])", inner, statement)
    return statement


def _instruction(statement: str, line: str) -> Instruction:
    found = _INSTRUCTION.fullmatch(statement)
    if found is None:
        raise ValueError(f"PTX: no instruction: {statement}")
    negated, guard, opcode, operands = found.groups()
    name, *modifiers = opcode.replace("::", "__").split(".")
    return Instruction(
        name,
        tuple(modifiers),
        tuple(_operand(x) for x in _TOKEN.findall(operands)),
        (guard, negated == "!") if guard else None,
        line,
        statement,
    )


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(x.strip() for x in text[1:-1].split(","))
    if text.startswith("[") and "{" in text:
        base, coordinates = text[1:-1].split(",", 1)
        return TensorAddress(
            base.strip(), tuple(x.strip() for x in coordinates.strip().strip("{}").split(","))
        )
    if text.startswith("["):
        found = _ADDRESS.fullmatch(text)
        if found is None:
            raise ValueError(f"PTX: no address: {text}")
        base, sign, offset = found.groups()
        return Address(base, int(f"{'-' if sign == '-' else ''}{offset}", 0) if sign else 0)
    return text
