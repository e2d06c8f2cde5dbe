"""Triton's kernels executed from the PTX that they are compiled to, on tensors of the CPU.

To be used in a process in which Triton does not interpret.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.emulator.asynchronous import TensorMap
from tests.emulator.blocks import Translated, translate
from tests.emulator.machine import Machine, packed
from tests.emulator.memory import Region, region_at
from tests.emulator.ptx import Kernel, parse
from tests.emulator.reports import Reports
from tests.shared.launches import Gpu, Launch, specialised, standing_in

SCRATCH = 2  # pointers that follow the arguments of a kernel: global scratch, and that of profilers


@dataclass(frozen=True)
class Compiled:
    """A kernel as the machine takes it, and its bytes of shared memory."""

    kernel: Kernel
    code: list[Translated]
    shared: int
    ptx: str
    boxes: list[Any]  # what the compiler says of the tensor descriptors


@dataclass
class Emulation:
    """What the launches of some losses gave.

    Attributes:
        executed: how many threads have executed an instruction of each opcode, by kernels.
    """

    gpu: Gpu
    schedule: str
    seed: int
    reports: Reports = field(default_factory=Reports)
    launches: list[str] = field(default_factory=list)
    executed: dict[str, Counter[str]] = field(default_factory=dict)
    compiled: dict[str, Compiled] = field(default_factory=dict)

    def launch(self, launch: Launch) -> None:
        """Compiles a kernel, if it has not been compiled, and executes it."""
        signature, constants, alignments = specialised(launch)
        asked = repr(
            (launch.kernel.__name__, signature, constants, alignments, sorted(launch.options.items()))
        )
        if asked not in self.compiled:
            self.compiled[asked] = compiled(launch, self.gpu)
        made = self.compiled[asked]

        given = [launch.arguments[p.name] for p in launch.kernel.params if signature[p.name] != "constexpr"]
        kinds = [kind for kind in signature.values() if kind != "constexpr"]
        names, boxes = list(made.kernel.parameters), iter(made.boxes)
        values: list[Any] = []
        tensors, tensor_maps = [], {}
        for value, kind in zip(given, kinds, strict=True):
            if kind.startswith("tensordesc"):
                tensor_maps[names[len(values)]] = tensor_map(value, next(boxes))
                tensors.append(value.base)
                # A descriptor is followed by its sizes and its strides.
                values += [(bytes(128), ""), *((x, "i") for x in (*value.shape, *value.strides))]
            else:
                if isinstance(value, Tensor):
                    tensors.append(value)
                values.append((value.data_ptr() if isinstance(value, Tensor) else value, kind))
        values += [(0, "i")] * SCRATCH
        sizes = made.kernel.parameters.values()
        arguments = [packed(x, size, kind) for (x, kind), size in zip(values, sizes, strict=True)]
        x, y, z = (*(launch.grid or (launch.programs,)), 1, 1)[:3]
        machine = Machine(
            made.kernel,
            (x, y, z),
            arguments,
            regions(tensors),
            made.shared,
            self.reports,
            self.schedule,
            self.seed,
            made.code,
            tensor_maps,
        )
        machine.run()
        self.launches.append(launch.kernel.__name__)
        counted = self.executed.setdefault(launch.kernel.__name__, Counter())
        counted.update(machine.traffic)
        for at, threads in machine.executed.items():
            for instruction in made.code[at].block.instructions:
                counted[".".join((instruction.name, *instruction.modifiers))] += threads


def tensor_map(descriptor: Any, box: Any) -> TensorMap:
    """What Triton's launcher would make of a descriptor for the copy engine."""
    x = descriptor.base
    rows, columns = box["block_size"]
    return TensorMap(
        x.data_ptr(),
        tuple(descriptor.shape),
        descriptor.strides[0] * x.element_size(),
        (rows, columns),
        x.element_size(),
        box["swizzle"],
    )


def regions(tensors: list[Tensor]) -> list[Region]:
    """The memory of tensors, of which their elements may be touched, and not what lies between rows."""
    storages: dict[int, tuple[int, np.ndarray[Any, Any]]] = {}
    for x in tensors:
        storage = x.untyped_storage()
        if not x.numel():
            continue
        _, allowed = storages.setdefault(
            storage.data_ptr(), (storage.nbytes(), np.zeros(storage.nbytes(), bool))
        )
        # As many numbers as the storage holds, each with whether it is an element.
        elements = torch.zeros(storage.nbytes() // x.element_size(), dtype=torch.bool)
        elements.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(True)
        spread = np.repeat(elements.numpy(), x.element_size())
        allowed[: spread.size] |= spread
    return [
        region_at(address, size, None if allowed.all() else allowed)
        for address, (size, allowed) in storages.items()
    ]


def compiled(launch: Launch, gpu: Gpu) -> Compiled:
    """A launch's kernel as PTX, without the assembler's work."""
    from triton.compiler import ASTSource

    signature, constants, alignments = specialised(launch)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=alignments)
    return compiled_source(source, launch.options, gpu)


def compiled_source(source: Any, asked: dict[str, Any], gpu: Gpu) -> Compiled:
    """What Triton would compile, with options of a launch, as PTX."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    target = GPUTarget("cuda", gpu.arch, 32)
    backend = make_backend(target)
    options = backend.parse_options({**asked, **source.parse_options()})
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    metadata = {"target": target, **vars(options)}
    module = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    for name, stage in stages.items():
        if name == "cubin":
            break
        module = stage(module, metadata)
    kernel = parse(module)
    return Compiled(kernel, translate(kernel), metadata["shared"], module, metadata["tensordesc_meta"])


@contextlib.contextmanager
def emulated(
    gpu: Gpu,
    schedule: str = "lockstep",
    seed: int = 0,
    descriptors: bool | None = None,
) -> Iterator[Emulation]:
    """What the engine would launch on a GPU is executed here."""
    emulation = Emulation(gpu, schedule, seed)
    with standing_in(gpu, descriptors, emulation.launch):
        yield emulation
