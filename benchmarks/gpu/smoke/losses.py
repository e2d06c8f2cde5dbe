"""Whole losses with their gradients: both engines, in a CUDA graph, and on streams of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import fastqt
from benchmarks.gpu.correctness import Problem, problem_verdict, random_inputs, taken, truth
from benchmarks.gpu.cuda_graphs import captured, host_graph
from benchmarks.gpu.forced import large_test
from benchmarks.gpu.recorder import recorded_check
from benchmarks.gpu.sections import NotTakenError, Options, Record, Verdict
from benchmarks.gpu.smoke.compare import near

ONE_LAUNCH = "cuda"  # the engine of small problems
LAUNCHES = 200
OFFSETS = (-1, 1)  # the targets of Window(1)
MOST_LOSS_ERROR = 1e-4
MOST_GRADIENT_ERROR = 4  # times the dtype's epsilon: E, the weighted rows and the result are rounded

Step = Callable[[], list[Tensor]]
Comparisons = dict[str, tuple[Tensor, Tensor, float]]  # results, exact values, bounds


def problem(options: Options, N: int, D: int) -> Problem:
    size = (13, 13, 8) if options.dry_run else (N, N, D)
    return Problem("smoke", "random", *size, OFFSETS, "zero", seeds=2 if options.dry_run else 1)


def dtype_of(options: Options) -> torch.dtype:
    """The interpreter computes with numpy, which has no bfloat16."""
    return torch.float16 if options.dry_run else torch.bfloat16


def loss(options: Options, memory: str) -> Iterator[Record]:
    """The whole loss beside the formulas in float64 and beside eager PyTorch's error."""
    asked = problem(options, 1500, 1000)
    test = partial(problem_verdict, asked, dtype_of(options), memory, options.device)
    yield recorded_check(f"loss and gradients, {memory}", test)


def large_tiles(options: Options, memory: str) -> Iterator[Record]:
    """The loss with Hopper's default for large problems."""
    yield recorded_check(f"descriptors, {memory}", large_test(options, memory, 768))


def tf32(options: Options, memory: str) -> Iterator[Record]:
    """The loss of float32 where torch allows TF32, as most trainings in float32 do.

    A dry run does not allow it: eager PyTorch, whose error counts, has no TF32 on a CPU.
    """
    asked = problem(options, 1500, 1000)
    test = partial(problem_verdict, asked, torch.float32, memory, options.device)

    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = before if options.dry_run else "tf32"
    try:
        yield recorded_check(f"loss and gradients in TF32, {memory}", test)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def one_launch(options: Options) -> Iterator[Record]:
    """The kernel that computes a small batch in one launch: right, and the same every time."""
    asked, dtype = problem(options, 400, 1000), dtype_of(options)
    test = partial(problem_verdict, asked, dtype, "fast", options.device, ONE_LAUNCH)
    yield recorded_check("loss and gradients", test, operators=True)
    repeated = partial(repeats_verdict, asked, dtype, options.device)
    yield recorded_check(f"{LAUNCHES} launches give the same", repeated)


def repeats_verdict(asked: Problem, dtype: torch.dtype, device: torch.device) -> Verdict:
    """Whether every launch on the same inputs gives the same bits; one that races does not."""
    leaves = [x.to(device, dtype).requires_grad_() for x in random_inputs(asked, 0)]
    step = step_of(leaves, ONE_LAUNCH)
    first = step()
    return equal_verdict(torch.stack([differences(first, step()) for _ in range(LAUNCHES)]))


def equal_verdict(differ: Tensor) -> Verdict:
    """Whether no launch differs from the first; `differ` (launches, 3) says by how much at most."""
    counts = dict(zip(("loss", "dF", "dG"), differ.ne(0).sum(0).tolist(), strict=True))
    largest = differ.amax(0).tolist()
    told = ", ".join(f"{name} {count} times" for name, count in counts.items() if count)
    return Verdict(not told, f"differ: {told}; by at most {largest}" if told else f"{len(differ)} are equal")


def differences(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """The largest difference of each of the results; inf where one is NaN. Nothing waits for it."""
    largest = (((x.double() - y.double()).abs()).amax() for x, y in zip(a, b, strict=True))
    return torch.stack([x.nan_to_num(nan=float("inf")) for x in largest])


def step_of(leaves: list[Tensor], backend: str) -> Step:
    def step() -> list[Tensor]:
        value = taken(fastqt.contrastive_loss, *leaves, backend=backend)
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    return step


def compared(leaves: list[Tensor], results: list[Tensor], name: str = "") -> Comparisons:
    """A step's results, the exact ones and their bounds."""
    rows, *gradients = truth(*(x.detach() for x in leaves), OFFSETS, "zero")
    bound = MOST_GRADIENT_ERROR * torch.finfo(leaves[0].dtype).eps
    bounds = (MOST_LOSS_ERROR, bound, bound)
    exact = (rows.mean(), *gradients)
    return {
        f"{part}{name}": compare
        for part, *compare in zip(("loss", "dF", "dG"), results, exact, bounds, strict=True)
    }


def graph(options: Options) -> Iterator[Record]:
    """A step is captured, and replayed on other inputs, on either engine."""
    for backend, N, D in (("triton", 1500, 256), (ONE_LAUNCH, 400, 256)):
        test = partial(graph_verdict, problem(options, N, D), dtype_of(options), options.device, backend)
        yield recorded_check(f"graph, {backend}", test)


def graph_verdict(asked: Problem, dtype: torch.dtype, device: torch.device, backend: str) -> Verdict:
    leaves = [x.to(device, dtype).requires_grad_() for x in random_inputs(asked, 0)]
    capture = captured if device.type == "cuda" else host_graph
    made, results = capture(step_of(leaves, backend), warm_ups=3)
    with torch.no_grad():
        for leaf, values in zip(leaves, random_inputs(asked, 1), strict=True):
            leaf.copy_(values)
    made.replay()
    return near(compared(leaves, results))


def side_stream(options: Options) -> Iterator[Record]:
    """The first use of a process is on a side stream; the default one and another follow without a wait."""
    for backend, N, D in (("triton", 1500, 256), (ONE_LAUNCH, 400, 256)):
        test = partial(streams_verdict, problem(options, N, D), dtype_of(options), options.device, backend)
        yield recorded_check(f"first use on a side stream, {backend}", test)


def streams_verdict(asked: Problem, dtype: torch.dtype, device: torch.device, backend: str) -> Verdict:
    """On each stream the inputs arrive late, so that work on another stream would read the old ones."""
    if backend == ONE_LAUNCH and device.type != "cuda":
        raise NotTakenError("the one-launch kernel needs a GPU")
    size = 4096 if device.type == "cuda" else 16

    runs = []
    for seed in range(3):
        leaves = [
            torch.zeros(asked.N, asked.D, device=device, dtype=dtype).requires_grad_() for _ in range(2)
        ]
        values = [x.to(device, dtype) for x in random_inputs(asked, seed)]
        runs.append((leaves, values))

    if device.type == "cuda":
        torch.cuda.synchronize()

    results = []
    for (leaves, values), stream in zip(runs, streams(device), strict=True):
        with stream:
            with torch.no_grad():
                busy = torch.randn(size, size, device=device)
                for _ in range(20):
                    busy = busy @ busy
                    busy /= busy.norm()
                for leaf, value in zip(leaves, values, strict=True):
                    leaf.copy_(value)
            results.append(step_of(leaves, backend)())

    if device.type == "cuda":
        torch.cuda.synchronize()

    comparisons: Comparisons = {}
    for place, ((leaves, _), result) in enumerate(zip(runs, results, strict=True)):
        comparisons |= compared(leaves, result, f" on stream {place}")
    return near(comparisons)


def streams(device: torch.device) -> list[contextlib.AbstractContextManager[object]]:
    """A side stream, the default one, another side stream."""
    if device.type != "cuda":
        return [contextlib.nullcontext()] * 3
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    return [torch.cuda.stream(side), torch.cuda.stream(torch.cuda.default_stream()), torch.cuda.stream(other)]
