"""The Triton kernels as machine code for GPUs that are not there: what they use, and what is launched.

python -m benchmarks.offline            # compiles every specialisation below, prints them as JSON

The schedule itself walks over tensors without data on a GPU that is only described; what it would launch is
noted and not made. A noted launch is compiled as a real one would be: the same argument types, constants and
alignments, by Triton and the ptxas that comes with it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Gpu:
    """What the schedule and the compiler ask of one; sizes in bytes."""

    name: str
    arch: int
    multiprocessors: int
    shared: int  # that a block can have


GPUS = (
    Gpu("NVIDIA A100-SXM4-80GB", 80, 108, 163 * 1024),
    Gpu("NVIDIA H100 80GB HBM3", 90, 132, 227 * 1024),
    Gpu("NVIDIA B200", 100, 148, 227 * 1024),
)


@dataclass(frozen=True)
class Case:
    """A problem without data, and which of its launches are compiled.

    Attributes:
        wanted: a kernel's name, flags that it has and, with a minus, flags that it has not: its first
            such launch.
        loads_ahead: whether the loads of the scores' kernel can be in flight beside its products.
    """

    name: str
    dtype: str = "bfloat16"
    N: int = 1280  # enough for references to be sampled
    D: int = 768
    memory: str = "fast"
    precision: str = "high"  # torch's name for TF32
    gradients: bool = True
    diagonal: str = "zero"
    targets: str = "window"  # or "dense", "smoothed"
    private: str | None = None  # or "rows", "mixed"
    negatives: int = 0
    groups: bool = False
    mask: bool = False
    scale: bool = False  # has a gradient
    archs: tuple[int, ...] = (80, 90, 100)
    wanted: tuple[str, ...] = ()
    loads_ahead: bool = True


CASES = (
    Case(
        "bf16",
        wanted=(
            "scores_kernel STORE REDUCE LEAVE_OUT_DIAGONAL TARGETS -ONLY_REDO",
            "references_kernel",
            "raise_references_kernel",
            "statistics_kernel -ONLY_REDO",
            "finish_queries_kernel",
            "finish_candidates_kernel",
        ),
    ),
    Case(
        "bf16, D=1000, private rows",  # a width that 8 divides and 16 does not
        D=1000,
        private="rows",
        scale=True,
        wanted=(
            "scores_kernel STORE REDUCE ONLY_REDO",
            "references_kernel",
            "statistics_kernel ONLY_REDO",
            "finish_queries_kernel",
        ),
    ),
    Case(
        "bf16, D=75, diagonal kept",
        D=75,
        diagonal="keep",
        negatives=64,
        wanted=("scores_kernel STORE REDUCE TARGETS -ONLY_REDO", "finish_candidates_kernel -TARGETS"),
        loads_ahead=False,  # a row begins anywhere, and no copy of so few bytes is asynchronous
    ),
    Case("fp16", dtype="float16", D=2400, wanted=("scores_kernel MAXIMUM ONLY_REDO",)),
    Case(
        "fp16, mixed",
        dtype="float16",
        private="mixed",
        diagonal="exclude",
        wanted=("references_kernel", "statistics_kernel ONLY_REDO", "finish_queries_kernel"),
    ),
    Case(
        "tf32, low, groups, mask",
        dtype="float32",
        memory="low",
        groups=True,
        mask=True,
        wanted=("scores_kernel FACTORS",),
    ),
    Case(
        "fp32, loss",
        dtype="float32",
        precision="highest",
        gradients=False,
        archs=(90,),
        wanted=("scores_kernel REDUCE -STORE -MAXIMUM -ONLY_REDO",),
    ),
    Case("whole rows, bf16, smoothed", targets="smoothed", wanted=("softmax_rows_kernel STORE",)),
    Case(
        "whole rows, fp32, dense",
        dtype="float32",
        targets="dense",
        diagonal="exclude",
        groups=True,
        mask=True,
        wanted=("softmax_rows_kernel STORE",),
    ),
    Case(
        "whole rows, fp16, loss",
        dtype="float16",
        targets="dense",
        diagonal="keep",
        gradients=False,
        wanted=("softmax_rows_kernel -STORE",),
    ),
)


NOT_FLAGS = ("BLOCK", "GROUP_", "UNIT", "COMPUTE", "PRECISION")  # how constants are named that are none


@dataclass(frozen=True)
class Launch:
    """One of a Triton kernel."""

    kernel: Any  # a triton.JITFunction
    programs: int
    arguments: dict[str, Any]  # by name; tensors have no data
    options: dict[str, Any]

    @property
    def constants(self) -> dict[str, Any]:
        named = {p.name: self.arguments[p.name] for p in self.kernel.params if p.is_constexpr}
        return {name: getattr(value, "value", value) for name, value in named.items()}

    @property
    def flags(self) -> dict[str, int]:
        """The constants that choose what is computed, not in which tiles."""
        return {name: int(value) for name, value in self.constants.items() if not name.startswith(NOT_FLAGS)}

    def matches(self, wanted: str) -> bool:
        name, *flags = wanted.split()
        return name == self.kernel.__name__ and all(
            bool(self.flags[flag.lstrip("-")]) != flag.startswith("-") for flag in flags
        )


@dataclass(frozen=True)
class Product:
    """A matrix product that the vendor's library makes: (n, k) by (k, m)."""

    n: int
    m: int
    k: int
    itemsize: int  # of the operands
    out_itemsize: int
    add: bool  # to what is there


@dataclass(frozen=True)
class Operation:
    """Any other of torch's that reads or writes memory."""

    name: str
    bytes: int


Event = Launch | Product | Operation


class _Noting(TorchDispatchMode):
    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if name in ("addmm", "addmm_"):
            into, a, b = args[:3]
            add = kwargs.get("beta", 1) != 0
            self.events.append(
                Product(a.shape[0], b.shape[1], a.shape[1], a.element_size(), into.element_size(), add)
            )
            return into
        out = function(*args, **kwargs)
        if not function.is_view and "empty" not in name:
            flat = torch.utils._pytree.tree_leaves((args, kwargs, out))
            size = sum(x.numel() * x.element_size() for x in flat if isinstance(x, Tensor))
            self.events.append(Operation(name, size))
        return out


@contextlib.contextmanager
def described(gpu: Gpu) -> Iterator[list[Event]]:
    """The schedule's tensors of device "meta" seem to be on `gpu`; what would be launched is noted."""
    from fastqt.kernels.tuning import score_config
    from triton.runtime.jit import JITFunction

    from fastqt import triton_schedule

    events: list[Event] = []

    def note(kernel: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        arguments = dict(zip(kernel.arg_names, args, strict=False))
        arguments.update({name: value for name, value in kwargs.items() if name in kernel.arg_names})
        for parameter in kernel.params:
            if parameter.name not in arguments:
                arguments[parameter.name] = parameter.default
        options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
        events.append(Launch(kernel, grid[0], arguments, options))

    properties = SimpleNamespace(
        multi_processor_count=gpu.multiprocessors, shared_memory_per_block_optin=gpu.shared
    )
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (JITFunction, "run", note),
        (Tensor, "is_cuda", True),
        (torch.cuda, "device", lambda _: contextlib.nullcontext()),
        (torch.cuda, "get_device_name", lambda _: gpu.name),
        (torch.cuda, "get_device_properties", lambda _: properties),
        (triton_schedule, "score_config", lambda _, *shape: score_config(torch.device("cuda"), *shape)),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, new in replaced:
            stack.enter_context(mock.patch.object(owner, name, new, create=name == "is_cuda"))
        stack.enter_context(_Noting(events))
        yield events


def noted(case: Case, gpu: Gpu) -> list[Event]:
    """What the loss and its gradients of a problem launch on a GPU."""
    from fastqt import triton_schedule
    from fastqt.problem import Problem
    from fastqt.schedule import Needs
    from fastqt.targets import TargetRows, Window

    N, D, wants = case.N, case.D, case.gradients
    dtype = getattr(torch, case.dtype)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(case.precision)
    try:
        with torch.device("meta"):
            queries, candidates, private = (torch.empty(N, D, dtype=dtype) for _ in range(3))
            groups, mask = torch.empty(N, dtype=torch.int64), torch.empty(N, N, dtype=torch.bool)
            negatives = torch.empty(case.negatives, D, dtype=dtype) if case.negatives else None
            targets = Window(1).rows(N, N, queries.device)
            if case.targets == "smoothed":
                targets = replace(targets, background=torch.empty(N, dtype=torch.float64))
            if case.targets == "dense":
                targets = TargetRows(dense=torch.empty(N, N, dtype=dtype))
            problem = Problem(
                *(queries, candidates, negatives, private if case.private == "rows" else None, 1.0),
                targets=targets,
                diagonal=case.diagonal,
                query_groups=groups if case.groups else None,
                candidate_groups=groups if case.groups else None,
                mask=mask if case.mask else None,
                memory=case.memory,
                partners=groups if case.private == "mixed" else None,
                mix=0.2,
            )
            with described(gpu) as events:
                if wants:
                    needs = Needs(True, True, negatives is not None, case.private == "rows", case.scale)
                    triton_schedule.forward_with_gradients(problem, 1 / N, needs)
                else:
                    triton_schedule.forward(problem)
    finally:
        torch.set_float32_matmul_precision(before)
    return events


_TYPES = {
    **{torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"},
    **{torch.int64: "i64", torch.int32: "i32", torch.bool: "u1"},
}


def specialised(launch: Launch) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], Any]]:
    """The signature, constants and alignments that Triton compiles a launch for."""
    signature, constants, alignments = {}, {}, {}
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        aligned = False
        if parameter.is_constexpr or value is None or (_is_int(value) and value == 1):
            signature[parameter.name], constants[(place,)] = "constexpr", value
        elif isinstance(value, Tensor):
            # An allocation begins at a multiple of 256 bytes, a part of one where its offset says.
            aligned = value.storage_offset() * value.element_size() % 16 == 0
            signature[parameter.name] = "*" + _TYPES[value.dtype]
        elif _is_int(value):
            aligned = value % 16 == 0
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        else:
            signature[parameter.name] = "fp32"
        if aligned and not parameter.do_not_specialize:
            alignments[(place,)] = [["tt.divisibility", 16]]
    return signature, constants, alignments


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


INSTRUCTIONS = ("wgmma.mma_async", "tcgen05.mma", "mma.sync", "cp.async", "ex2.approx", "st.global.v4")
_USAGE = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def compiled(launch: Launch, gpu: Gpu, *, disassembled: bool = False) -> dict[str, Any]:
    """What a kernel is on a GPU: its registers a thread, bytes of memory, and how often its PTX has what."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, alignments = specialised(launch)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=alignments)
    log = io.StringIO()
    with contextlib.redirect_stdout(log):  # where Triton shows ptxas -v
        kernel = triton.compile(source, target=GPUTarget("cuda", gpu.arch, 32), options=launch.options)
    usage = _USAGE.search(log.getvalue())
    registers = re.search(r"Used (\d+) registers", log.getvalue())
    if usage is None or registers is None:
        raise RuntimeError(f"ptxas said nothing of {launch.kernel.__name__}: {log.getvalue()!r}")
    stack, stores, loads = map(int, usage.groups())
    ptx = kernel.asm["ptx"]
    found = {
        "registers": int(registers[1]),
        "stack": stack,
        "spills": stores + loads,
        "shared": kernel.metadata.shared,
        "threads": 32 * kernel.metadata.num_warps,
        "instructions": {name: ptx.count(name) for name in INSTRUCTIONS},
    }
    return {**found, "sass": instructions(kernel.asm["cubin"])} if disassembled else found


def instructions(cubin: bytes) -> int:
    """How many a kernel has, as the disassembler that comes with Triton lists them."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        listing = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    listed = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(.*?);", listing, flags=re.MULTILINE)
    return sum(instruction.strip() != "NOP" for instruction in listed)


@contextlib.contextmanager
def compiler() -> Iterator[None]:
    """Triton compiles, into a folder that goes with it, and shows what ptxas says.

    To be entered before anything imports fastqt.kernels: Triton looks once whether it is to interpret.
    """
    os.environ.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory() as cache:
        # What comes from the cache has no ptxas to say anything, so nothing does.
        os.environ.update(TRITON_CACHE_DIR=cache, TRITON_ALWAYS_COMPILE="1", TRITON_DUMP_PTXAS_LOG="1")
        yield


def kernels() -> dict[str, list[str]]:
    """The kernels that are launched, and the names of their constants that are flags or choices."""
    import fastqt.kernels
    from triton.runtime.jit import JITFunction

    found = {}
    for module in pkgutil.iter_modules(fastqt.kernels.__path__):
        members = vars(importlib.import_module(f"fastqt.kernels.{module.name}"))
        for name, kernel in members.items():
            if isinstance(kernel, JITFunction) and name.endswith("_kernel"):
                constants = [p.name for p in kernel.params if p.is_constexpr]
                found[name] = [c for c in constants if not c.startswith(NOT_FLAGS)]
    return found


def key(gpu: Gpu, case: Case, wanted: str) -> str:
    return f"sm_{gpu.arch}: {case.name}: {wanted}"


def attempt(events: list[Event], wanted: str, gpu: Gpu, *, disassembled: bool = False) -> dict[str, Any]:
    """What became of the first launch that is wanted, or the error that did."""
    try:
        launch = next((e for e in events if isinstance(e, Launch) and e.matches(wanted)), None)
        if launch is None:
            return {"error": "the schedule makes no such launch"}
        found = compiled(launch, gpu, disassembled=disassembled)
        return {"kernel": launch.kernel.__name__, "flags": launch.flags, **found}
    except Exception as error:  # whatever Triton raises: it is shown by the test of this specialisation
        return {"error": f"{type(error).__name__}: {error}"}


def compile_all() -> dict[str, Any]:
    """The names of all kernels that are launched, and all specialisations by `key`."""
    found = {}
    for gpu in GPUS:
        for case in CASES:
            if gpu.arch not in case.archs:
                continue
            events = noted(case, gpu)
            found |= {key(gpu, case, wanted): attempt(events, wanted, gpu) for wanted in case.wanted}
    return {"kernels": kernels(), "specialisations": found}


def in_a_process_of_its_own() -> dict[str, Any]:
    """`compile_all`, from where Triton interprets."""
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.offline"], cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True
    )
    return json.loads(run.stdout)


if __name__ == "__main__":
    with compiler():
        print(json.dumps(compile_all(), indent=1))
