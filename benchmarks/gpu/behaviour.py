"""Properties of the loss on a GPU: equal repeated runs, NaNs, CUDA graphs, other streams, no hidden waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fastqt
from benchmarks.gpu import agreement
from benchmarks.gpu.agreement import Sums
from benchmarks.gpu.cuda_graphs import captured
from benchmarks.gpu.sections import MEMORY, Options, Record, Verdict, check

LOSSES: dict[str, Callable[..., Tensor]] = {
    "rows": fastqt.contrastive_loss,
    "rows and columns": partial(fastqt.clip_loss, scale=20.0),
    "three-block MixCSE": partial(fastqt.mixcse_loss, form="released"),
}


def _sums(name: str, N: int, D: int) -> Sums:
    """What a loss leaves to cuBLAS."""
    if name == "three-block MixCSE":
        return agreement.of_three_blocks(N, D)
    return agreement.of_unit_rows(N) if name == "rows and columns" else agreement.of_rows(N)


def behaviour(options: Options) -> Iterator[Record]:
    """The checks that one call's result does not answer."""
    device = options.device
    dtype = torch.float16 if options.dry_run else torch.bfloat16
    N, D = (9, 8) if options.dry_run else (4000, 128)
    for memory in MEMORY:
        yield check(f"NaN stays in its row, {memory}", partial(_nan, N, D, dtype, device, memory))
        for name, loss in LOSSES.items():
            problem = partial(_problem, N, D, dtype, device, memory, loss)
            yield check(f"two runs are equal, {name}, {memory}", partial(_repeats, problem))
            if device.type == "cuda":
                sums = _sums(name, N, D)
                yield check(f"a CUDA graph agrees, {name}, {memory}", partial(_graph, problem, sums))
                yield check(f"another stream is respected, {name}, {memory}", partial(_stream, problem, sums))
    for name, loss in LOSSES.items():
        yield check(f"a gradient scaler's 2^16, {name}", partial(_scaled, N, D, device, loss))
    if device.type == "cuda":
        for name, arguments in _waitless(device):
            yield check(f"nothing waits for the device: {name}", partial(_no_wait, arguments, device))


def _problem(
    N: int,
    D: int,
    dtype: torch.dtype,
    device: torch.device,
    memory: str,
    loss: Callable[..., Tensor] = LOSSES["rows"],
) -> tuple[list[Tensor], Callable[[], list[Tensor]], list[Tensor]]:
    """The leaves, a step that runs forward and backward on them, and other values of the same shape."""
    generator = torch.Generator().manual_seed(0)
    first, second = (
        [(torch.randn(N, D, generator=generator) / D**0.25).to(device, dtype) for _ in range(2)]
        for _ in range(2)
    )
    leaves = [x.requires_grad_() for x in first]

    def step() -> list[Tensor]:
        value = loss(*leaves, memory=memory, backend="triton")
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    return leaves, step, second


def equal(a: list[Tensor], b: list[Tensor]) -> Verdict:
    """Whether two results of a step are bitwise equal."""
    differ = [name for name, x, y in zip(("loss", "dF", "dG"), a, b, strict=True) if not torch.equal(x, y)]
    return Verdict(not differ, f"differ: {', '.join(differ)}" if differ else "bitwise")


def _repeats(problem: Callable[[], Any]) -> Verdict:
    _, step, _ = problem()
    return equal(step(), step())


def _nan(N: int, D: int, dtype: torch.dtype, device: torch.device, memory: str) -> Verdict:
    """A NaN in a query reaches the loss and the gradient of its own row, and of no other row."""
    (f, g), _, _ = _problem(N, D, dtype, device, memory)
    with torch.no_grad():
        f[7, 2] = math.nan
    rows = fastqt.contrastive_loss(f, g, reduction="none", memory=memory, backend="triton")
    others = torch.arange(N, device=device) != 7
    (dF,) = torch.autograd.grad(rows.sum(), f)
    ok = bool(rows[7].isnan() & rows[others].isfinite().all() & dF[others].isfinite().all())
    detail = f"row 7 has {float(rows[7])}, {int((~rows[others].isfinite()).sum())} others are not finite"
    return Verdict(ok, detail)


def _graph(problem: Callable[[], Any], sums: Sums) -> Verdict:
    """A graph is captured on some inputs and replayed on others, after batches of many other sizes."""
    leaves, step, fresh = problem()
    graph, results = captured(step, warm_ups=3)
    for N in range(8, 32):  # the caches of targets now hold these batches', not those that the graph reads
        fastqt.contrastive_loss(*(x.detach()[:N] for x in leaves), backend="triton")
    with torch.no_grad():
        for leaf, values in zip(leaves, fresh, strict=True):
            leaf.copy_(values)
    graph.replay()
    torch.cuda.synchronize()
    return Verdict(*agreement.agree(results, step(), sums))


def _scaled(N: int, D: int, device: torch.device, loss: Callable[..., Tensor]) -> Verdict:
    """Float16 gradients under an upstream gradient beyond float16's range, against float32's."""
    halves, _, _ = _problem(N, D, torch.float16, device, "fast", loss)
    small = partial(
        loss, scale=0.05, backend="triton"
    )  # so that the gradients themselves are in float16's range
    upstream = torch.tensor(2.0**16, device=device)
    scaled, wanted = (
        torch.autograd.grad(small(*leaves), leaves, upstream)
        for leaves in (halves, [x.detach().float().requires_grad_() for x in halves])
    )
    error = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(scaled, wanted, strict=True))
    return Verdict(error <= 2.0**-8, f"{error:.1e} of the largest, want {2.0**-8:.1e}")


def _stream(problem: Callable[[], Any], sums: Sums) -> Verdict:
    """Inputs arrive late on a busy side stream, so that work on another stream would read the old values."""
    leaves, step, fresh = problem()
    step()
    busy = torch.randn(4096, 4096, device=leaves[0].device)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(20):
            busy = busy @ busy
            busy /= busy.norm()
        for leaf, values in zip(leaves, fresh, strict=True):
            leaf.copy_(values)
        with torch.enable_grad():
            result = step()
    torch.cuda.synchronize()
    return Verdict(*agreement.agree(result, step(), sums))


def _waitless(device: torch.device) -> list[tuple[str, dict[str, Any]]]:
    """Calls that must not wait for the device: a name, and the arguments with the number of rows N."""
    N = 40_000  # too many rows for a window's targets to be cached from the last call
    ids = torch.arange(N, device=device)
    return [
        ("small", {"N": 400}),
        ("large", {"N": N}),
        ("documents", {"N": N, "document_ids": ids // 50}),
        ("class indices", {"N": N, "targets": ids, "diagonal": "keep"}),
        ("a learnt scale", {"N": 400, "scale": torch.tensor(2.0, device=device, requires_grad=True)}),
        ("normalised", {"N": 400, "normalize": True, "scale": 20.0}),
        ("rows", {"N": 400, "reduction": "none"}),
        ("low memory", {"N": N, "memory": "low"}),
        ("both ways", {"N": N, "loss": fastqt.clip_loss, "scale": 20.0}),
        ("both ways, low memory", {"N": N, "loss": fastqt.clip_loss, "scale": 20.0, "memory": "low"}),
        ("three-block MixCSE", {"N": 16_000, "loss": partial(fastqt.mixcse_loss, form="released")}),
        ("bags of words", {"N": 4000, "loss": _bags_of_words}),
    ]


def _bags_of_words(latents: Tensor, weight: Tensor, **options: Any) -> Tensor:
    """GLOSS's loss of as many sentences as words, ten words each."""
    offsets = 10 * torch.arange(len(latents), device=latents.device)
    ids = torch.randint(len(weight), (10 * len(latents),), device=latents.device)
    return fastqt.gloss_bow_loss(latents, weight, weight.new_zeros(len(weight)), ids, offsets, **options)


def _no_wait(arguments: dict[str, Any], device: torch.device) -> Verdict:
    """Runs a step in the mode in which torch raises at every wait; the error would fail the check."""
    arguments = dict(arguments)
    N, function = arguments.pop("N"), arguments.pop("loss", fastqt.contrastive_loss)
    leaves = [
        torch.randn(N, 64, device=device, dtype=torch.bfloat16).mul_(0.3).requires_grad_() for _ in range(2)
    ]
    scale = arguments.get("scale")
    wanted = [*leaves, scale] if isinstance(scale, Tensor) else leaves

    def step() -> None:
        loss = function(*leaves, **arguments, backend="triton")
        torch.autograd.grad(loss, wanted, torch.ones_like(loss))

    step()  # the first call may wait while it compiles and allocates
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Verdict(True, "forward and backward")
