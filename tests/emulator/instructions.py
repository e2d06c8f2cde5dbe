"""What instructions that take and give registers become.

Source: Parallel Thread Execution ISA, chapter 9, in the order of its sections.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.emulator.kinds import OPPOSITE, ORDERED, ROUNDINGS, bits_of, is_float, storage
from tests.emulator.ptx import Instruction
from tests.emulator.writer import Writer

SIGNS = {"add": "+", "sub": "-"}  # mul has other forms
UNARY = {"neg": "-{}", "not": "~{}"}
BINARY = {"and": "{a} & {b}", "or": "{a} | {b}", "xor": "{a} ^ {b}", "rem": "a.remainder({a}, th.array({b}))"}
EXTREMES = {"min": "minimum", "max": "maximum"}
SHIFTS = {"shl": "left", "shr": "right"}


class OfRegisters(Writer):
    """Arithmetic, comparisons, bits, moves and conversions."""

    def method_of(self, name: str) -> Callable[[Instruction], None] | None:
        """Of the instructions in the tables above, and of those that have a method of their own."""
        for table, method in (
            (SIGNS, self.float_binary),
            (UNARY, self.unary),
            (BINARY, self.binary),
            (EXTREMES, self.extreme),
            (SHIFTS, self.shift),
        ):
            if name in table:
                return lambda i: method(i, table[name])
        return super().method_of(name)

    def unary(self, i: Instruction, expression: str) -> None:
        self.write(i.operands[0], i.type, expression.format(self.value(str(i.operands[1]), i.type)))

    def extreme(self, i: Instruction, name: str) -> None:
        if not is_float(i.type):
            self.binary(i, f"np.{name}({{a}}, {{b}})")
            return
        if i.type not in ("f16", "f32", "f64") or set(i.modifiers[:-1]) - {"NaN", "ftz"}:
            self.unknown(i.text)
        extreme = f"a.{name}({{a}}, {{b}}, keeps_nan={'NaN' in i.modifiers})"
        self.binary(i, f"a.flush({extreme})" if "ftz" in i.modifiers else extreme)

    def shift(self, i: Instruction, way: str) -> None:
        a, by = self.value(str(i.operands[1]), i.type), self.value(str(i.operands[2]), "b32")
        self.write(i.operands[0], i.type, f"a.shift_{way}({a}, {by}, {bits_of(i.type)})")

    def binary(self, i: Instruction, expression: str, kind: str | None = None) -> None:
        kind = kind or i.type
        a, b = (self.value(str(x), kind) for x in i.operands[1:3])
        self.write(i.operands[0], kind, expression.format(a=a, b=b, kind=kind))

    def float_binary(self, i: Instruction, sign: str) -> None:
        if i.type in ("bf16", "bf16x2", "f16x2") or {"rz", "rm", "rp", "sat"} & set(i.modifiers):
            self.unknown(i.text)
        flushed = "ftz" in i.modifiers
        plain = f"a.flush(a.flush({{a}}) {sign} a.flush({{b}}))" if flushed else f"{{a}} {sign} {{b}}"
        self.binary(i, plain)

    def do_mul(self, i: Instruction) -> None:
        if "wide" in i.modifiers:
            wide = f"{i.type[0]}{2 * bits_of(i.type)}"
            a, b = (self.value(str(x), i.type) for x in i.operands[1:3])
            self.write(i.operands[0], wide, f"{a}.astype({wide}) * {wide}({b})")
        elif "hi" in i.modifiers:
            self.unknown(i.text)
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
        rounding = "rm" if "rm" in i.modifiers and i.type == "f32" else "rn"
        if i.type not in ("f32", "f64") or rounding not in i.modifiers or "sat" in i.modifiers:
            self.unknown(i.text)
        of_f32 = {"rm": "fma_rm", "rn": "fma_f32"}[rounding]
        a, b, c = (self.value(str(x), i.type) for x in i.operands[1:4])
        if i.type == "f64":
            expression = f"a.fma_f64({a}, {b}, {c})"
        elif "ftz" in i.modifiers:
            expression = f"a.flush(a.{of_f32}(a.flush({a}), a.flush({b}), a.flush({c})))"
        else:
            expression = f"a.{of_f32}({a}, {b}, {c})"
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

    def approximated(self, i: Instruction, function: str, ulps: float) -> None:
        a = self.value(str(i.operands[1]), "f32")
        flushed = f"a.flush({a})" if "ftz" in i.modifiers else a
        result = f"a.approximate({function}(f64({flushed})), {ulps}, {a}.view(b32))"
        self.write(i.operands[0], "f32", f"a.flush({result})" if "ftz" in i.modifiers else result)

    def do_ex2(self, i: Instruction) -> None:
        if i.type != "f32":
            self.unknown(i.text)
        self.approximated(i, "np.exp2", 2.0)

    def do_rcp(self, i: Instruction) -> None:
        if i.type == "f64":
            self.write(i.operands[0], "f64", f"a.rcp_approx_f64({self.value(str(i.operands[1]), 'f64')})")
        elif "rn" in i.modifiers:
            self.write(i.operands[0], "f32", f"f32(1) / {self.value(str(i.operands[1]), 'f32')}")
        else:
            self.approximated(i, "np.reciprocal", 1.0)

    def do_sqrt(self, i: Instruction) -> None:
        if "approx" in i.modifiers:
            self.approximated(i, "np.sqrt", 2.0)
        else:
            self.write(i.operands[0], i.type, f"np.sqrt({self.value(str(i.operands[1]), i.type)})")

    def do_abs(self, i: Instruction) -> None:
        a = self.value(str(i.operands[1]), i.type)
        if i.type == "bf16":
            expression = f"{a} & b16(0x7FFF)"
        else:
            expression = f"a.flush(np.abs({a}))" if "ftz" in i.modifiers else f"np.abs({a})"
        self.write(i.operands[0], i.type, expression)

    def do_prmt(self, i: Instruction) -> None:
        a, b = (self.value(str(x), "b32") for x in i.operands[1:3])
        selector = int(str(i.operands[3]).rstrip("U"), 0)
        self.write(i.operands[0], "b32", f"a.prmt(th.array({a}), th.array({b}), {selector})")

    def do_bfe(self, i: Instruction) -> None:
        if bits_of(i.type) != 32:
            self.unknown(i.text)
        a, position, length = (self.value(str(x), "b32") for x in i.operands[1:4])
        self.write(i.operands[0], "b32", f"a.bfe({a}, {position}, {length}, signed={i.type == 's32'})")

    def do_bfi(self, i: Instruction) -> None:
        a, b = (self.value(str(x), i.type) for x in i.operands[1:3])
        position, length = (self.value(str(x), "b32") for x in i.operands[3:5])
        self.write(i.operands[0], i.type, f"a.bfi(th.array({a}), {b}, {position}, {length})")

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
            expression = f"{a} {ORDERED[compare]} {b}"
        elif compare in ("num", "nan"):
            expression = unordered if compare == "nan" else f"~{unordered}"
        elif compare.endswith("u"):
            expression = (
                f"~({a} {OPPOSITE[compare[:-1]]} {b})" if compare != "equ" else f"({a} == {b}) | {unordered}"
            )
            if compare == "neu":
                expression = f"{a} != {b}"
        else:
            expression = f"{a} {ORDERED[compare]} {b}"
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
        rounding = next((x for x in i.modifiers if x in ROUNDINGS), None)
        flushed = "ftz" in i.modifiers
        if {"relu", "rz", "rm", "rp"} & set(i.modifiers[:-2]):
            self.unknown(i.text)
        if "sat" in i.modifiers and (to, source) != ("f32", "f32"):
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
            expression = f"a.to_integer(np.{ROUNDINGS[rounding or 'rzi']}({a}), {to})"
        elif is_float(source) and rounding:
            expression = f"np.{ROUNDINGS[rounding]}({a}).astype({to})"
        elif "sat" in i.modifiers:
            expression = f"a.saturated({a})"
        else:
            expression = f"{a}.astype({to})"
        self.write(i.operands[0], to, expression)
