"""What is measured on a GPU: the loss, its matrix products, and other libraries that compute the same.

A contestant of `PEERS` runs forward and backward of a softmax cross-entropy with one target for each row, one
of `OF_PAIRS` SigLIP's or CLIP's loss of rows at norm 1, in the dtype of its inputs. `benchmarks.gpu.stages`
knows which module each of the other libraries is imported from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import fastqt
from benchmarks.gpu.cuda_graphs import captured
from benchmarks.gpu.shapes import Shape
from benchmarks.measure.baselines import eager_contrastive_loss, loss_products, window_matrix
from benchmarks.measure.timing import Step

CACHE_BYTES = 128 * 2**20  # at least the size of any GPU's L2 cache
MOST_SETS = 32


@dataclass(frozen=True)
class Inputs:
    """So many sets of inputs that no step finds its own in the cache from an earlier step."""

    sets: list[tuple[Tensor, Tensor]]  # queries (N, D) and candidates (M, D), leaves
    labels: Tensor  # (N,) int64

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.sets[i % len(self.sets)]


Contestant = Callable[[Inputs], Step]


def make_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, sets: int | None = None) -> Inputs:
    """Random inputs whose scores vary as a trained model's do; with N = M the targets are the diagonal.

    By default there are as many sets as it takes to be larger than a GPU's cache.
    """
    generator = torch.Generator(device).manual_seed(0)

    def leaf(rows: int) -> Tensor:
        x = torch.randn(rows, shape.D, device=device, generator=generator) / shape.D**0.25
        return x.to(dtype).requires_grad_()

    set_bytes = 2 * (shape.N + shape.M) * shape.D * dtype.itemsize
    enough = max(2, min(MOST_SETS, -(-CACHE_BYTES // set_bytes))) if device.type == "cuda" else 2
    if shape.N == shape.M:
        labels = torch.arange(shape.N, device=device)
    else:
        labels = torch.randint(shape.M, (shape.N,), device=device, generator=generator)
    return Inputs([(leaf(shape.N), leaf(shape.M)) for _ in range(sets or enough)], labels)


def products(inputs: Inputs) -> Step:
    """The matrix products alone: a lower bound that no contestant should beat."""
    run = loss_products(*inputs[0])
    sets = [(f.detach(), g.detach()) for f, g in inputs.sets]

    def step(i: int) -> list[Tensor]:
        run(*sets[i % len(sets)])
        return []

    return step


def differentiated(inputs: Inputs, loss: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """Forward and backward of a loss of queries and candidates."""

    def step(i: int) -> list[Tensor]:
        leaves = inputs[i]
        value = loss(*leaves)
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    return step


def fused(memory: str = "fast", backend: str = "triton") -> Contestant:
    """The library's loss as the others compute it: one target for each row, no special diagonal."""

    def make(inputs: Inputs) -> Step:
        return differentiated(
            inputs,
            lambda f, g: fastqt.contrastive_loss(
                f, g, inputs.labels, diagonal="keep", memory=memory, backend=backend
            ),
        )

    return make


def fused_window(memory: str = "fast", backend: str = "triton") -> Contestant:
    """The library's default, the loss of QuickThoughts."""

    def make(inputs: Inputs) -> Step:
        return differentiated(
            inputs, lambda f, g: fastqt.contrastive_loss(f, g, memory=memory, backend=backend)
        )

    return make


def cross_entropy(f: Tensor, g: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(f @ g.T, labels)


def eager(inputs: Inputs) -> Step:
    return differentiated(inputs, lambda f, g: cross_entropy(f, g, inputs.labels))


def eager_window(inputs: Inputs) -> Step:
    f, _ = inputs[0]
    targets = window_matrix(len(f), 1).to(f)
    return differentiated(inputs, lambda f, g: eager_contrastive_loss(f, g, targets))


def compiled(inputs: Inputs) -> Step:
    """Eager PyTorch through torch.compile; on a CPU it is only traced, which needs no compiler."""
    torch.compiler.reset()  # drops what was compiled for other shapes, and its memory
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
    """In its exact mode, which leaves out no small gradient."""
    from cut_cross_entropy import linear_cross_entropy

    return differentiated(inputs, lambda f, g: linear_cross_entropy(f, g, inputs.labels, filter_eps=None))


def quack(inputs: Inputs) -> Step:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return differentiated(
        inputs, lambda f, g: chunked_linear_cross_entropy(f, g, inputs.labels, chunk_size=4096)
    )


def of_unit_rows(inputs: Inputs, loss: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """Forward and backward of a loss of rows that are at norm 1 already."""
    unit = Inputs(
        [
            tuple(F.normalize(x.detach().float(), dim=1).to(x.dtype).requires_grad_() for x in leaves)
            for leaves in inputs.sets
        ],
        inputs.labels,
    )
    return differentiated(unit, loss)


SCALE, BIAS = 10.0, -10.0  # of SigLIP as it begins


def fused_siglip(inputs: Inputs) -> Step:
    options = {"scale": SCALE, "bias": BIAS, "normalize": False, "backend": "triton"}
    return of_unit_rows(inputs, lambda f, g: fastqt.siglip_loss(f, g, **options))


def eager_siglip(inputs: Inputs) -> Step:
    """As open_clip has it, with the signs of all pairs."""
    signs = 2 * torch.eye(len(inputs.labels), device=inputs.labels.device) - 1

    def loss(f: Tensor, g: Tensor) -> Tensor:
        return -F.logsigmoid(signs * (SCALE * f @ g.T + BIAS)).sum() / len(f)

    return of_unit_rows(inputs, loss)


def siglip_kernel(inputs: Inputs) -> Step:
    from siglip_kernel import fused_siglip_loss

    device = inputs.labels.device
    log_scale, bias = (torch.tensor(x, device=device, requires_grad=True) for x in (math.log(SCALE), BIAS))
    return of_unit_rows(inputs, lambda f, g: fused_siglip_loss(f, g, log_scale, bias))


def fused_clip(inputs: Inputs) -> Step:
    options = {"scale": SCALE, "normalize": False, "backend": "triton"}
    return of_unit_rows(inputs, lambda f, g: fastqt.clip_loss(f, g, **options))


def eager_clip(inputs: Inputs) -> Step:
    def loss(f: Tensor, g: Tensor) -> Tensor:
        scores = SCALE * f @ g.T
        return (F.cross_entropy(scores, inputs.labels) + F.cross_entropy(scores.T, inputs.labels)) / 2

    return of_unit_rows(inputs, loss)


def memeff(inputs: Inputs) -> Step:
    """With gradients that are those of its loss, which its "stable" ones are a multiple of."""
    from memeff import MemoryEfficientCLIPLoss

    return of_unit_rows(
        inputs, MemoryEfficientCLIPLoss(temperature=1 / SCALE, normalized_inputs=True, stable=False)
    )


PEERS: dict[str, Contestant] = {
    "liger-kernel": liger,
    "cut-cross-entropy": cut_cross_entropy,
    "quack-kernels": quack,
}
OF_PAIRS: dict[str, Contestant] = {
    "fastqt SigLIP": fused_siglip,
    "eager SigLIP": eager_siglip,
    "siglip-kernel": siglip_kernel,
    "fastqt CLIP": fused_clip,
    "eager CLIP": eager_clip,
    "memeff": memeff,
}


def in_graph(make: Contestant) -> Contestant:
    """Runs all sets one after the other in one CUDA graph, so that launches cost next to nothing."""

    def make_graph(inputs: Inputs) -> Step:
        step, every = make(inputs), range(len(inputs.sets))
        if not inputs.labels.is_cuda:
            return lambda _: [step(i) for i in every][-1]
        graph, results = captured(lambda: [step(i) for i in every])

        def replay(_: int) -> list[Tensor]:
            graph.replay()
            return results[-1]

        return replay

    return make_graph
