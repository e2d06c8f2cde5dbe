"""Who is measured on a GPU: the loss, the products it is made of, and all who compute it too; in turns.

Every contestant takes forward and backward of a softmax cross-entropy with one target a row, in the dtype
of its inputs. A peer that is not installed or fails gets a reason in place of a time.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastqt
from benchmarks.baselines import eager_contrastive_loss, window_matrix
from fastqt.bench import MIB, peak_memory

CACHE_BYTES = 128 * 2**20  # no GPU's L2 holds more
MOST_SETS = 32
MOST_ROUNDS = 50


@dataclass(frozen=True)
class Effort:
    warm_ups: int = 3
    least_rounds: int = 3
    seconds: float = 3.0  # of turns, for a shape


EFFORT, DRY_EFFORT = Effort(), Effort(1, 1, 0.01)


@dataclass(frozen=True)
class Shape:
    N: int
    M: int
    D: int

    @property
    def name(self) -> str:
        sides = f"{self.N:,}" if self.N == self.M else f"{self.N:,} × {self.M:,}"
        return f"{sides}, D={self.D:,}"


SHAPES = (
    Shape(65536, 65536, 768),
    Shape(8192, 128256, 4096),  # a linear cross-entropy over a large vocabulary
    Shape(16384, 16384, 1024),
    Shape(8192, 8192, 2400),
    Shape(400, 400, 1000),  # the QuickThoughts paper's batch
    Shape(1024, 1024, 768),
    Shape(32768, 32768, 768),
)
QUICK_SHAPES = (SHAPES[2], SHAPES[5])
DRY_SHAPES = (Shape(6, 6, 8), Shape(5, 9, 8))
LARGEST_GRAPHED = 1024  # rows: beyond, launches are no part of the time
LARGEST_WINDOW = 4096  # rows: eager PyTorch takes a dense target matrix
LOW_MEMORY = (SHAPES[0], DRY_SHAPES[0])

# Times over those of the three products, as the design has them, before they are measured.
PREDICTIONS: Mapping[tuple[Shape, str], float] = {
    (SHAPES[0], "fastqt"): 1.12,
    (SHAPES[0], "fastqt low"): 1.45,
}


@dataclass(frozen=True)
class Inputs:
    """Copies enough that no step finds its inputs in the cache from the last one."""

    sets: list[tuple[Tensor, Tensor]]  # queries (N, D) and candidates (M, D), leaves
    labels: Tensor  # (N,) int64

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.sets[i % len(self.sets)]


Step = Callable[
    [int], list[Tensor]
]  # on the i-th set: the loss and its gradients, or what products there are
Contestant = Callable[[Inputs], Step]


def make_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Random inputs whose scores vary as a trained model's do; square ones have diagonal targets."""
    generator = torch.Generator(device).manual_seed(0)

    def leaf(rows: int) -> Tensor:
        x = torch.randn(rows, shape.D, device=device, generator=generator) / shape.D**0.25
        return x.to(dtype).requires_grad_()

    set_bytes = 2 * (shape.N + shape.M) * shape.D * dtype.itemsize
    sets = max(2, min(MOST_SETS, -(-CACHE_BYTES // set_bytes))) if device.type == "cuda" else 2
    if shape.N == shape.M:
        labels = torch.arange(shape.N, device=device)
    else:
        labels = torch.randint(shape.M, (shape.N,), device=device, generator=generator)
    return Inputs([(leaf(shape.N), leaf(shape.M)) for _ in range(sets)], labels)


def products(inputs: Inputs) -> Step:
    """The three matrix products of a score matrix and its two gradients, into memory that is there."""
    f, g = inputs[0]
    S = f.new_empty(len(f), len(g))
    dF, dG = torch.empty_like(f, requires_grad=False), torch.empty_like(g, requires_grad=False)
    sets = [(f.detach(), g.detach()) for f, g in inputs.sets]

    def step(i: int) -> list[Tensor]:
        f, g = sets[i % len(sets)]
        torch.mm(f, g.T, out=S)
        torch.mm(S, g, out=dF)
        torch.mm(S.T, f, out=dG)
        return []

    return step


def differentiated(inputs: Inputs, loss: Callable[[Tensor, Tensor], Tensor]) -> Step:
    def step(i: int) -> list[Tensor]:
        leaves = inputs[i]
        value = loss(*leaves)
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    return step


def fused(memory: str = "fast") -> Contestant:
    def make(inputs: Inputs) -> Step:
        return differentiated(
            inputs,
            lambda f, g: fastqt.contrastive_loss(
                f, g, inputs.labels, diagonal="keep", memory=memory, backend="triton"
            ),
        )

    return make


def fused_window(inputs: Inputs) -> Step:
    """The loss of QuickThoughts, as the library's default."""
    return differentiated(inputs, lambda f, g: fastqt.contrastive_loss(f, g, backend="triton"))


def cross_entropy(f: Tensor, g: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(f @ g.T, labels)


def eager(inputs: Inputs) -> Step:
    return differentiated(inputs, lambda f, g: cross_entropy(f, g, inputs.labels))


def eager_window(inputs: Inputs) -> Step:
    f, _ = inputs[0]
    targets = window_matrix(len(f), 1).to(f)
    return differentiated(inputs, lambda f, g: eager_contrastive_loss(f, g, targets))


def compiled(inputs: Inputs) -> Step:
    """Eager PyTorch through torch.compile; on a CPU only traced, to spare it a compiler."""
    torch.compiler.reset()  # what other shapes left, their memory too
    options = {"mode": "max-autotune"} if inputs.labels.is_cuda else {"backend": "eager"}
    function = torch.compile(cross_entropy, dynamic=False, **options)
    step = differentiated(inputs, lambda f, g: function(f, g, inputs.labels))

    def marked(i: int) -> list[Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        return step(i)

    return marked


def liger(inputs: Inputs) -> Step:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return differentiated(inputs, lambda f, g: loss(g, f, inputs.labels))


def cut_cross_entropy(inputs: Inputs) -> Step:
    """In its exact mode: no gradient is left out for being small."""
    from cut_cross_entropy import linear_cross_entropy

    return differentiated(inputs, lambda f, g: linear_cross_entropy(f, g, inputs.labels, filter_eps=None))


def quack(inputs: Inputs) -> Step:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return differentiated(
        inputs, lambda f, g: chunked_linear_cross_entropy(f, g, inputs.labels, chunk_size=4096)
    )


def siglip(inputs: Inputs) -> Step:
    """A sigmoid in place of the softmax, on rows of norm 1: another loss, from as large products."""
    from siglip_kernel import fused_siglip_loss

    f, g = inputs[0]
    if len(f) != len(g):
        raise ValueError("it wants as many candidates as queries")
    log_scale, bias = (torch.tensor(x, device=f.device, requires_grad=True) for x in (2.302, -10.0))
    unit = Inputs(
        [
            tuple(F.normalize(x.detach().float(), dim=1).to(x.dtype).requires_grad_() for x in leaves)
            for leaves in inputs.sets
        ],
        inputs.labels,
    )
    return differentiated(unit, lambda f, g: fused_siglip_loss(f, g, log_scale, bias))


PEERS: dict[str, Contestant] = {
    "liger-kernel": liger,
    "cut-cross-entropy": cut_cross_entropy,
    "quack-kernels": quack,
    "siglip-kernel": siglip,
}


def in_graph(make: Contestant) -> Contestant:
    """All sets one after the other in one CUDA graph, so that launches cost next to nothing."""

    def make_graph(inputs: Inputs) -> Step:
        step, every = make(inputs), range(len(inputs.sets))
        if not inputs.labels.is_cuda:
            return lambda _: [step(i) for i in every][-1]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for i in every:
                step(i)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [step(i) for i in every]

        def replay(_: int) -> list[Tensor]:
            graph.replay()
            return results[-1]

        return replay

    return make_graph


def fused_and_eager(shape: Shape) -> dict[str, Contestant]:
    chosen: dict[str, Contestant] = {"fastqt": fused(), "eager": eager}
    if shape in LOW_MEMORY:
        chosen["fastqt low"] = fused("low")
    if shape.N == shape.M:
        chosen["fastqt window"] = fused_window
        if shape.N <= LARGEST_WINDOW:
            chosen["eager window"] = eager_window
    return chosen


class Clock:
    """Seconds that a device needs for what a function asks of it, its launches included."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, function: Callable[[], object]) -> float:
        self.wait()
        if self.device.type != "cuda":
            begin = time.perf_counter()
            function()
            return time.perf_counter() - begin
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def free(self) -> None:
        """Hands back what a failed attempt left."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def peak_above_results(clock: Clock, step: Step) -> tuple[list[Tensor], int | None]:
    """A step's results, and by how much memory in use rose at most beside them; None if nobody tells."""
    if clock.device.type == "cuda":
        clock.wait()
        torch.cuda.reset_peak_memory_stats(clock.device)
        before = torch.cuda.memory_allocated(clock.device)
        results = step(0)
        clock.wait()
        peak = torch.cuda.max_memory_allocated(clock.device) - before
    else:
        results, peak = peak_memory(lambda: step(0))
    if peak is None:
        return results, None
    return results, max(peak - sum(x.numel() * x.element_size() for x in results), 0)


@dataclass
class Result:
    """What is known of a contestant; `reason` says why there is no time."""

    seconds: float | None = None  # median of a step
    rounds: int = 0
    peak_bytes: int | None = None  # above inputs and gradients
    loss: float | None = None
    reason: str | None = None


def in_turns(
    contestants: Mapping[str, Contestant],
    inputs: Inputs,
    clock: Clock,
    effort: Effort,
    sets_a_step: int = 1,
) -> dict[str, Result]:
    """Every contestant once a round, on the next set of inputs.

    With `sets_a_step` a step does as many sets at once, and its time is divided by them.
    """
    results = {name: Result() for name in contestants}
    steps: dict[str, Step] = {}
    times: dict[str, list[float]] = {name: [] for name in contestants}

    def drop(name: str, error: Exception) -> None:
        results[name].reason = f"{type(error).__name__}: {error}".split("\n")[0][:200]
        steps.pop(name, None)

    def prepare(make: Contestant, result: Result) -> Step:
        step = make(inputs)
        for i in range(effort.warm_ups):
            step(i)
        found, peak = peak_above_results(clock, step)
        if found and found[0].isfinite():
            result.loss = float(found[0])
        result.peak_bytes = peak if sets_a_step == 1 else None
        return step

    for name, make in contestants.items():
        try:
            steps[name] = prepare(make, results[name])
        except Exception as error:
            drop(name, error)
        if name not in steps:
            clock.free()

    begin = time.perf_counter()
    for turn in range(MOST_ROUNDS):
        if turn >= effort.least_rounds and time.perf_counter() - begin > effort.seconds:
            break
        for name, step in list(steps.items()):
            try:
                times[name].append(clock.seconds(lambda step=step, turn=turn: step(turn)))
            except Exception as error:
                drop(name, error)
    for name in steps:
        results[name].seconds = statistics.median(times[name]) / sets_a_step
        results[name].rounds = len(times[name])
    return results


def measure(
    shape: Shape,
    contestants: Mapping[str, Contestant],
    dtype: torch.dtype,
    device: torch.device,
    effort: Effort,
    graphed: bool = False,
) -> list[dict[str, Any]]:
    """A row for each contestant, beside the three products of the same shape."""
    entrants: dict[str, Contestant] = {"GEMMs": products, **contestants}
    if graphed:
        entrants = {name: in_graph(make) for name, make in entrants.items()}
    clock = Clock(device)
    inputs = make_inputs(shape, dtype, device)
    results = in_turns(entrants, inputs, clock, effort, len(inputs.sets) if graphed else 1)
    del inputs
    clock.free()
    gemm_seconds = results["GEMMs"].seconds
    return [
        {
            "shape": shape.name,
            **asdict(shape),
            "dtype": str(dtype).removeprefix("torch."),
            "graphed": graphed,
            "contestant": name,
            **asdict(result),
            "gemm_seconds": gemm_seconds,
            "ratio_to_gemm": result.seconds / gemm_seconds if result.seconds and gemm_seconds else None,
            "predicted_ratio": None if graphed else PREDICTIONS.get((shape, name)),
        }
        for name, result in results.items()
    ]


HEADER = ("shape", "contestant", "ms", "× GEMMs", "predicted", "MiB above", "loss", "or why not")


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row as it is printed under `HEADER`."""

    def shown(value: float | None, form: str, unit: float = 1) -> str:
        return "–" if value is None else format(value / unit, form)

    return (
        row["shape"],
        row["contestant"] + (", graph" if row["graphed"] else ""),
        shown(row["seconds"], ",.3f", 1e-3),
        shown(row["ratio_to_gemm"], ".2f"),
        shown(row["predicted_ratio"], ".2f"),
        shown(row["peak_bytes"], ",.0f", MIB),
        shown(row["loss"], ".4f"),
        (row["reason"] or "")[:70],
    )
