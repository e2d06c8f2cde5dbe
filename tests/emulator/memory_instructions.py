"""What instructions become that other threads, memory or asynchronous units take part in.

Source: Parallel Thread Execution ISA, chapter 9.
"""

from __future__ import annotations

import re

from tests.emulator.instructions import OfRegisters
from tests.emulator.kinds import SPACES, bits_of, storage
from tests.emulator.ptx import Address, Instruction, Operand, TensorAddress
from tests.emulator.strong import ATOMIC

# Copies of a box into shared memory. A block's own memory has the same addresses in its cluster's.
LOADS = [("tensor", "2d", where, "global") for where in ("shared__cta", "shared__cluster")]
ORDERS = ("relaxed", "acquire", "release", "acq_rel")


class Instructions(OfRegisters):
    """All instructions: those between threads and on memory are added."""

    def do_shfl(self, i: Instruction) -> None:
        result, source, lane, clamp, members = i.operands
        self.all_members(members)
        a, b, c = self.value(str(source), "b32"), self.value(str(lane), "b32"), self.value(str(clamp), "b32")
        taken, (register, *inside) = self.variable(), str(result).split("|")
        self.line(f'{taken} = m.warps.shuffle(th, "{i.modifiers[1]}", {a}, {b}, {c})')
        self.write(register, "b32", f"{taken}[0]")
        for predicate in inside:
            self.write(predicate, "pred", f"{taken}[1]")

    def do_redux(self, i: Instruction) -> None:
        a = self.value(str(i.operands[1]), i.type)
        self.write(i.operands[0], i.type, f'm.warps.reduce(th, "{i.modifiers[1]}", {a})')

    def do_elect(self, i: Instruction) -> None:
        lane, elected = str(i.operands[0]).split("|")
        self.write(lane, "b32", "th.full(b32(0))")  # the first of a whole warp
        self.write(elected, "pred", "m.warps.elect(th)")

    def do_bar(self, i: Instruction) -> None:
        """bar.warp.sync; all others end a block."""
        if i.modifiers[:2] != ("warp", "sync"):
            self.unknown(i.text)
        self.all_members(i.operands[0])
        self.line("m.whole_warps(th, th.at)")

    def all_members(self, mask: Operand) -> None:
        """Instructions between some lanes of a warp, and not all, are unknown."""
        if str(mask) not in ("-1", "0xffffffff"):
            self.line(f"m.warps.want_all(th.array({self.value(str(mask), 'b32')}))")

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
        return next((x.split("__")[0] for x in i.modifiers if x in SPACES), "global")

    def do_ld(self, i: Instruction) -> None:
        space = self.space(i)
        to = i.operands[0] if isinstance(i.operands[0], tuple) else (i.operands[0],)
        width = bits_of(i.type) // 8
        if space == "param":
            self.load_parameter(i, to, width)
            return
        address = self.address(i.operands[1], 64 if space == "global" else 32)
        where = self.guard or "None"
        loaded = self.variable()
        wanted = f"th, {address}, {where}, {width}, {len(to)}"
        if space == "global" and {*ORDERS, "volatile"} & {*i.modifiers}:
            self.line(f"{loaded} = m.strong.load({wanted}, {self.ordering(i)})")
        else:
            self.line(f"{loaded} = m.{space}_memory.load({wanted})")
        for k, register in enumerate(to):
            self.write(register, i.type, f"{loaded}[{k}].view({i.type})")

    def load_parameter(self, i: Instruction, to: tuple[Operand, ...], width: int) -> None:
        """ld.param of the kernel's parameters, by their names or by an address in one of them."""
        place = i.operands[1]
        assert isinstance(place, Address)
        for k, register in enumerate(to):
            offset = place.offset + k * width
            if place.base in self.kernel.parameters:
                value = f'th.full(m.parameter("{place.base}", {offset}, {i.type}))'
            else:
                value = f"m.parameters_at({self.address(Address(place.base, offset), 64)}, {i.type})"
            self.write(register, i.type, value)

    def do_st(self, i: Instruction) -> None:
        space = self.space(i)
        if space == "param":
            self.give_parameter(i)
            return
        address = self.address(i.operands[0], 64 if space == "global" else 32)
        source = i.operands[1] if isinstance(i.operands[1], tuple) else (str(i.operands[1]),)
        kind = storage(i.type)
        values = ", ".join(f"th.array({self.value(x, kind)})" for x in source)
        if {*ORDERS, "volatile"} & {*i.modifiers}:
            self.unknown(i.text)
        self.line(f"m.{space}_memory.store(th, {address}, {self.guard or 'None'}, [{values}])")

    def give_parameter(self, i: Instruction) -> None:
        """st.param, which gives a function that is called a parameter."""
        place = i.operands[0]
        if not isinstance(place, Address) or place.offset or isinstance(i.operands[1], tuple):
            self.unknown(i.text)
            return
        kind = storage(i.type)
        self.write(place.base, kind, f"th.array({self.value(str(i.operands[1]), kind)})")

    def do_call(self, i: Instruction) -> None:
        """Of functions a kernel here calls only the one that ends the launch where an assertion fails."""
        if i.operands[0] != "__assertfail" or i.guard is not None:
            self.unknown(i.text)
        self.line(f"m.fail(th, m.text_at({self.value(str(i.operands[1]), 'b64')}[0]))")

    def do_trap(self, i: Instruction) -> None:
        if i.guard is not None:
            self.unknown(i.text)
        self.line('m.fail(th, "trap")')

    def ordering(self, i: Instruction) -> str:
        """What a strong access orders, and for whom: .volatile is .relaxed."""
        order = next((x for x in i.modifiers if x in ORDERS), "relaxed")
        if "cluster" in i.modifiers:
            self.unknown(i.text)
        return f'"{order}", "{"cta" if "cta" in i.modifiers else "gpu"}"'

    def do_atom(self, i: Instruction) -> None:
        to, place, operand = i.operands[:3]
        # Code by hand has the operation before the order, as atom.add.release.gpu.u32.
        how = next((x for x in i.modifiers[:-1] if x in ATOMIC), None)
        if how is None or self.space(i) != "global" or len(i.operands) > 3:
            self.unknown(i.text)
        address, where = self.address(place, 64), self.guard or "None"
        value = f"th.array({self.value(str(operand), i.type)})"
        self.write(
            to, i.type, f'm.strong.atomic(th, {address}, {where}, "{how}", {self.ordering(i)}, {value})'
        )

    def do_fence(self, i: Instruction) -> None:
        if "async" in i.modifiers:
            self.line("m.clocks.fence_proxy(np.unique(th.warp))")
        elif i.modifiers[0] not in ("mbarrier_init", "proxy"):
            self.unknown(i.text)

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
        if i.modifiers[2:6] in LOADS and not {"multicast__cluster", "cta_group__2"} & set(i.modifiers):
            to, maps, coordinates = self.address(i.operands[0], 32), *self.box(i.operands[1])
            barrier = self.address(i.operands[2], 32)
            self.line(f"m.bulk.load(th, {to}, {maps}, {coordinates}, {barrier}, {where})")
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
        self.line(f"{loaded} = m.warps.load_matrices(th, {address}, {count}, {'trans' in i.modifiers})")
        for k, register in enumerate(to):
            self.write(register, "b32", f"{loaded}[{k}]")

    def do_stmatrix(self, i: Instruction) -> None:
        address, source = self.address(i.operands[0], 32), i.operands[1]
        values = ", ".join(
            self.value(x, "b32") for x in (source if isinstance(source, tuple) else (str(source),))
        )
        self.line(f"m.warps.store_matrices(th, {address}, [{values}], {'trans' in i.modifiers})")

    def do_mma(self, i: Instruction) -> None:
        """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"""
        shape, kind, of_sums = i.modifiers[2], i.modifiers[-2], i.modifiers[-1]
        if self.guard or i.modifiers[:2] != ("sync", "aligned") or i.modifiers[3:5] != ("row", "col"):
            self.unknown(i.text)
        a, b = ([self.value(x, "b32") for x in i.operands[k]] for k in (1, 2))
        c = [self.value(x, of_sums) for x in i.operands[3]]
        result = self.variable()
        operands = ", ".join(f"[{', '.join(part)}]" for part in (a, b, c))
        self.line(f'{result} = m.warps.multiply(th, "{shape}", "{kind}", {operands})')
        for k, register in enumerate(i.operands[0]):
            self.write(register, of_sums, f"{result}[{k}]")
