"""What the Triton engine would launch for a problem without data, on a GPU that is only described.

The schedule itself walks over tensors of device "meta"; what it would launch is noted and not made.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# fastqt is imported within functions: Triton looks once, and early, whether it is to interpret.
if TYPE_CHECKING:
    from fastqt.problem import AnyProblem, Problem


@dataclass(frozen=True)
class Gpu:
    """What the schedule and the compiler ask of one; sizes in bytes."""

    name: str
    arch: int
    multiprocessors: int
    shared: int  # that a block can have
    memory: int


GPUS = (
    Gpu("NVIDIA A100-SXM4-80GB", 80, 108, 163 * 1024, 79 * 2**30),
    Gpu("NVIDIA H100 80GB HBM3", 90, 132, 227 * 1024, 79 * 2**30),
    Gpu("NVIDIA B200", 100, 148, 227 * 1024, 178 * 2**30),
)


@dataclass(frozen=True)
class Case:
    """A problem without data, and which of its launches are compiled.

    Attributes:
        wanted: a kernel's name, choices such as EPILOGUE=EXP, flags and optional operands that it has and,
            with a minus, those that it has not: its first such launch.
        loads_ahead: whether the loads of the scores' kernel can be in flight beside its products.
    """

    name: str
    dtype: str = "bfloat16"
    N: int = 4096  # enough for shifts to be sampled, and for the largest tiles
    D: int = 768
    memory: str = "fast"
    precision: str = "high"  # torch's name for TF32
    gradients: bool = True
    upstream: bool = False  # the gradients are multiplied by an upstream one
    diagonal: str = "zero"
    targets: str = "window"  # or "own", "dense", "smoothed", "none", or "listed", those of no band
    row_negatives: str | None = None  # or "given", "mixed", "scores"
    negatives: int = 0
    groups: bool = False
    mask: bool = False
    thresholds: bool = False
    scale: bool = False  # has a gradient
    bias: bool = False
    link: str = "softmax"
    normalize: bool = False
    clip: bool = False  # CLIP's loss, of rows and of columns
    multiples: tuple[float, ...] = ()  # of its scores, whose sums and their gradients take the loss's place
    far: bool = False  # rows of embeddings lie so far apart that offsets within a tile take 64 bits
    descriptors: bool | None = None  # read the operands of the scores' product; None: as the engine chooses
    tuned: bool = False  # the GPU's table knows plain exponentials alone, and has the largest tiles for them
    maxsim: bool = False  # of N / 16 queries of 32 tokens and N / 8 documents
    tokens: int = 180  # of such a document, without its padding
    guide: bool = False  # whose N rows are compared with as many candidates
    three_blocks: str | None = None  # MixCSE's: "both" mixed ones, or that of the "candidates"
    stop_gradient: bool = True  # there, as the following
    weight: float = 0.0
    archs: tuple[int, ...] = (80, 90, 100)
    wanted: tuple[str, ...] = ()
    loads_ahead: bool = True


NOT_FLAGS = ("BLOCK", "GROUP_", "UNIT", "COMPUTE", "PRECISION")  # how constants are named that are none


def flag_names(kernel: Any) -> list[str]:
    """The parameters of a kernel that are flags or choices, and its optional operands, which may be None."""
    optional = {p.name for p in kernel.params if p.has_default and p.default is None}
    constants = {p.name for p in kernel.params if p.is_constexpr and not p.name.startswith(NOT_FLAGS)}
    return [p.name for p in kernel.params if p.name in optional | constants]


@dataclass(frozen=True)
class Launch:
    """One of a Triton kernel."""

    kernel: Any  # a triton.JITFunction
    programs: int
    arguments: dict[str, Any]  # by name; tensors have no data
    options: dict[str, Any]
    grid: tuple[int, ...] = ()  # the programs along each axis, empty where there is one axis

    @property
    def constants(self) -> dict[str, Any]:
        named = {p.name: self.arguments[p.name] for p in self.kernel.params if p.is_constexpr}
        return {name: getattr(value, "value", value) for name, value in named.items()}

    @property
    def flags(self) -> dict[str, int | str]:
        """What chooses the code that is compiled, not its tiles: constants, and which operands are given."""
        flags: dict[str, int | str] = {}
        for name in flag_names(self.kernel):
            value = self.arguments[name]
            value = getattr(value, "value", value)
            number = value if isinstance(value, int) else value is not None
            flags[name] = value if isinstance(value, str) else int(number)
        return flags

    def matches(self, wanted: str) -> bool:
        """Whether it is of the kernel and has the flags that one of a case's `wanted` names."""
        name, *flags = wanted.split()
        return name == self.kernel.__name__ and all(map(self._has, flags))

    def _has(self, flag: str) -> bool:
        name, _, value = flag.lstrip("-").partition("=")
        value_of_flag = self.flags[name]
        return (str(value_of_flag) == value if value else bool(value_of_flag)) != flag.startswith("-")


_TYPES = {
    **{torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"},
    **{torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.uint32: "u32", torch.bool: "u1"},
}


def specialised(launch: Launch) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], Any]]:
    """The signature, constants and alignments that Triton compiles a launch for."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    signature, constants, alignments = {}, {}, {}
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        aligned = False
        is_one = _is_int(value) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
            signature[parameter.name], constants[(place,)] = "constexpr", value
        elif isinstance(value, Tensor):
            # An allocation begins at a multiple of 256 bytes, a part of one where its offset says.
            aligned = value.storage_offset() * value.element_size() % 16 == 0
            signature[parameter.name] = "*" + _TYPES[value.dtype]
        elif isinstance(value, TensorDescriptor):
            block = f"{_TYPES[value.base.dtype]}[{','.join(map(str, value.block_shape))}]"
            signature[parameter.name] = f"tensordesc<{block}>"
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
    """Notes torch's own products, which are not made, and its other operations."""

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
            made_like = name.startswith("new_") or name.endswith("_like")  # another, which is not read
            read = {key: value for key, value in kwargs.items() if key != "out"}
            flat = torch.utils._pytree.tree_leaves(out if made_like else (args, read, out))
            size = sum(x.numel() * x.element_size() for x in flat if isinstance(x, Tensor))
            self.events.append(Operation(name, size))
        return out


def table_of_large_tiles(gpu: Gpu) -> dict[str, Any]:
    """What `tune` would have written before it measured other epilogues than plain exponentials."""
    config = {"rows": 128, "columns": 256, "width": 64, "stages": 4, "descriptors": True}
    entries = [{"most_scores": 2**62, "most_width": 2**62, "config": config}]
    return {gpu.name: {"bfloat16": entries}}


def table_of(case: Case, gpu: Gpu) -> dict[str, Any] | None:
    """The table of tiles that a case supposes; None for those that are installed."""
    return table_of_large_tiles(gpu) if case.tuned else None


@contextlib.contextmanager
def standing_in(
    gpu: Gpu,
    descriptors: bool | None,
    launched: Callable[[Launch], None],
    table: dict[str, Any] | None = None,  # of tiles, in place of those that are installed
) -> Iterator[None]:
    """Triton and torch's questions find `gpu`; what would be launched there is handed over instead."""
    from triton.runtime.jit import JITFunction

    from fastqt import devices
    from fastqt.engines.triton import scores
    from fastqt.kernels import tuning

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        arguments = dict(zip(kernel.arg_names, args, strict=False))
        arguments.update({name: value for name, value in kwargs.items() if name in kernel.arg_names})
        for parameter in kernel.params:
            if parameter.name not in arguments:
                arguments[parameter.name] = parameter.default
        options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
        axes = tuple(grid({**arguments, **options}) if callable(grid) else grid)
        launched(Launch(kernel, math.prod(axes), arguments, options, axes))

    def config(_: torch.device, *shape: Any) -> Any:
        tiles = tuning.score_config(torch.device("cuda"), *shape)
        return tiles if descriptors is None else replace(tiles, descriptors=descriptors)

    properties = SimpleNamespace(
        name=gpu.name,
        major=gpu.arch // 10,
        minor=gpu.arch % 10,
        multi_processor_count=gpu.multiprocessors,
        shared_memory_per_block_optin=gpu.shared,
        total_memory=gpu.memory,
    )
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (JITFunction, "run", launch),
        (torch.cuda, "device", lambda _: contextlib.nullcontext()),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_properties", lambda _: properties),
        (scores, "score_config", config),
        *([] if table is None else [(tuning, "tables", lambda: table)]),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, new in replaced:
            stack.enter_context(mock.patch.object(owner, name, new))
        stack.callback(devices.known_properties.cache_clear)
        devices.known_properties.cache_clear()
        yield


@contextlib.contextmanager
def all_is_free(gpu: Gpu) -> Iterator[None]:
    """The memory of a GPU that is only described holds nothing."""
    with (
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(gpu.memory, gpu.memory)),
        mock.patch.object(torch.cuda, "memory_reserved", return_value=0),
        mock.patch.object(torch.cuda, "memory_allocated", return_value=0),
    ):
        yield


@contextlib.contextmanager
def described(
    gpu: Gpu, descriptors: bool | None = None, table: dict[str, Any] | None = None
) -> Iterator[list[Event]]:
    """The schedule's tensors of device "meta" seem to be on `gpu`; what would be launched is noted."""
    events: list[Event] = []
    with (
        standing_in(gpu, descriptors, events.append, table),
        all_is_free(gpu),
        mock.patch.object(Tensor, "is_cuda", True, create=True),
        _Noting(events),
    ):
        yield events


def noted(case: Case, gpu: Gpu) -> list[Event]:
    """What the loss and its gradients of a problem launch on a GPU."""
    from fastqt.engines import ENGINES
    from fastqt.losses.maxsim import MAXSIM

    if case.guide:
        return noted_of_guide(case, gpu)
    engine = ENGINES["triton"]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(case.precision)
    everywhere = replace(engine, why_not_here=None)  # also where tensors have no data
    try:
        with torch.device("meta"), mock.patch.dict(ENGINES, triton=everywhere):
            problem, needs = maxsim_problem_of(case) if case.maxsim else problem_of(case)
            computation = MAXSIM if case.maxsim else engine.computation(problem)
            with described(gpu, case.descriptors, table_of(case, gpu)) as events:
                if case.multiples:
                    differentiate_sums(computation, problem, needs)
                elif case.gradients:
                    loss, gradients = computation.forward_with_gradients(problem, 1 / case.N, needs)
                    if case.upstream:
                        engine.scale_gradients([g for g in gradients if g is not None], loss, 1.0)
                else:
                    computation.forward(problem)
    finally:
        torch.set_float32_matmul_precision(before)
    return events


def differentiate_sums(computation: Any, p: Any, needs: Any) -> None:
    """The sums of several multiples of CLIP's scores, and their gradients."""
    from fastqt.problem import ClipSide

    positive, *sums = computation.sums(p)
    computation.gradients_from(p, *(ClipSide(x, x) for x in sums), positive, needs)


def noted_of_guide(case: Case, gpu: Gpu) -> list[Event]:
    """What the comparison of a guide's scores with thresholds launches."""
    from fastqt.engines.triton.guide import GuideKernels

    with torch.device("meta"):
        of_guide = [torch.empty(case.N, case.D, dtype=getattr(torch, case.dtype)) for _ in range(2)]
        mask, thresholds = torch.empty(case.N, case.N, dtype=torch.bool), torch.empty(case.N)
        with described(gpu) as events:
            rows = GuideKernels(of_guide[0], thresholds, normalize=case.normalize)
            rows.write_above(mask, of_guide[1])
    return events


def problem_of(case: Case) -> tuple[AnyProblem, tuple[bool, ...]]:
    """A case as the engine takes it, on torch's default device, and which gradients are needed."""
    from fastqt.problem import ClipProblem, Needs, ThreeBlockNeeds, ThreeBlockProblem

    N, D, dtype = case.N, case.D, getattr(torch, case.dtype)
    if case.three_blocks:
        sides = (torch.empty(N, D, dtype=dtype) for _ in range(2))
        shares = (torch.empty(N) for _ in range(4))
        flags = case.three_blocks == "both", True, case.weight, case.stop_gradient, case.memory
        needs = ThreeBlockNeeds(True, True, *4 * [not case.stop_gradient], case.scale)
        return ThreeBlockProblem(*sides, *shares, torch.empty(()), *flags), needs
    negatives, row_negatives = case.negatives > 0, case.row_negatives == "given"
    of_general = Needs(
        True, True, negatives, row_negatives, case.scale, case.bias, case.row_negatives == "scores"
    )
    if case.clip:
        sides = (torch.empty(N, D, dtype=dtype) for _ in range(2))
        p = ClipProblem(*sides, 1.0, case.memory, case.normalize)
        if case.multiples:
            p = replace(p, pairs=N, keeps=True, multiples=case.multiples)
        if case.thresholds:
            p = replace(p, thresholds=torch.empty(N))
        return p, of_general
    return general_problem_of(case), of_general


def maxsim_problem_of(case: Case) -> tuple[Any, tuple[bool, ...]]:
    """A case of MaxSim; with `mask` some of the documents' tokens are padding."""
    from fastqt.losses.maxsim import MaxSimProblem

    # Tokens are computed in float32, and read by products in the dtype of the case.
    queries, documents = (
        torch.empty(case.N // rows, tokens, case.D) for rows, tokens in ((16, 32), (8, case.tokens))
    )
    bias = torch.empty(documents.shape[:2]) if case.mask else None
    p = MaxSimProblem(queries, documents, 1.0, case.dtype, bias, None, 0)
    return p, p.needs_type(True, True, case.scale)


def general_problem_of(case: Case) -> Problem:
    """A case of `contrastive_loss`, `sigmoid_loss` or `log_sum_exp`."""
    from fastqt.problem import Problem
    from fastqt.targets import Diagonal, NoTargets, TargetRows, Window

    N, D, dtype = case.N, case.D, getattr(torch, case.dtype)
    strides = (2**26 if case.far else D, 1)
    queries, candidates, rows = (torch.empty_strided((N, D), strides, dtype=dtype) for _ in range(3))
    groups, mask = torch.empty(N, dtype=torch.int64), torch.empty(N, N, dtype=torch.bool)
    negatives = torch.empty(case.negatives, D, dtype=dtype) if case.negatives else None
    lowered = {"own": Diagonal(), "none": NoTargets()}.get(case.targets, Window(1))
    targets = lowered.rows(N, N, queries.device)
    if case.targets == "listed":
        targets = replace(targets, offsets=None)
    if case.targets == "smoothed":
        targets = replace(targets, background=torch.empty(N, dtype=torch.float64))
    if case.targets == "dense":
        targets = TargetRows(dense=torch.empty(N, N, dtype=dtype))
    return Problem(
        queries,
        candidates,
        negatives,
        rows if case.row_negatives == "given" else None,
        1.0,
        targets=targets,
        diagonal=case.diagonal,
        query_groups=groups if case.groups else None,
        candidate_groups=groups if case.groups else None,
        mask=mask if case.mask else None,
        memory=case.memory,
        partners=groups if case.row_negatives == "mixed" else None,
        mix=0.2,
        bias=torch.empty(N, dtype=torch.float32) if case.bias else None,
        link=case.link,
        normalize=case.normalize,
        row_scores=torch.empty(N, dtype=torch.float32) if case.row_negatives == "scores" else None,
        thresholds=torch.empty(N, dtype=torch.float32) if case.thresholds else None,
    )
