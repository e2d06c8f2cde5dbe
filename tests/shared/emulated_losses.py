"""Whole losses whose Triton kernels are executed from PTX, beside those of plain PyTorch and of float64.

python -m tests.shared.emulated_losses 90 --schedule random --seed 3      # all losses on one architecture
python -m tests.shared.emulated_losses 90 --orders 10     # in lockstep, alone and in ten random orders

A line of JSON is printed for each. With --orders the command fails where anything is reported.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)  # before anything imports fastqt.kernels

import torch
import torch.nn.functional as F
from torch import Tensor

import fastqt
from fastqt.engines import ENGINES
from tests.shared.emulation import Emulation, emulated
from tests.shared.gaps import NoGaps
from tests.shared.launches import GPUS


@dataclass(frozen=True)
class Loss:
    """A loss of random embeddings.

    Attributes:
        K: negatives that all rows share; row_negatives: whether each row has one of its own.
        spread: what embeddings are multiplied by.
        options: of the loss; of a function of (N, M, generator) what it draws.
        descriptors: whether the scores' kernel reads its operands by them.
        precision: torch's name for that of products of float32.
        rounded: whether what is exact is the loss of embeddings that are rounded to TF32, as those of all
            products are. Exact cells are not, so that the loss must not have any.
        copied: whether products read copies, as those of large problems do.
        archs: the GPUs that it runs on.
    """

    function: Callable[..., Tensor] = fastqt.contrastive_loss
    dtype: str = "bfloat16"
    N: int = 150
    M: int = 150
    D: int = 64
    K: int = 0
    row_negatives: bool = False
    spread: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    descriptors: bool | None = None
    precision: str = "highest"
    rounded: bool = False
    copied: bool = False
    archs: tuple[int, ...] = (80, 90)


QUERY_TOKENS, DOCUMENT_TOKENS = 5, 70


def maxsim(
    queries: Tensor,  # (N T, D)
    documents: Tensor,  # (M U, D)
    document_mask: Tensor | None = None,
    *,
    scale: float,
    backend: str,
) -> Tensor:
    """MaxSim, by kernels or, for "reference", in plain PyTorch with all products of tokens."""
    q, d = queries.unflatten(0, (-1, QUERY_TOKENS)), documents.unflatten(0, (-1, DOCUMENT_TOKENS))
    if backend != "reference":
        with mock.patch.dict(os.environ, FASTQT_BACKEND=backend):
            return fastqt.maxsim_loss(q, d, document_mask=document_mask, scale=scale, normalize=False)
    q, d = (x.to(ENGINES["reference"].dtype_for(None, x.dtype)) for x in (q, d))
    of_tokens = torch.einsum("itd,jud->ijtu", q, d)
    if document_mask is not None:
        of_tokens = of_tokens.masked_fill(~document_mask[:, None], -torch.inf)
    return F.cross_entropy(scale * of_tokens.amax(3).sum(2), torch.arange(len(q)))


def guided(queries: Tensor, candidates: Tensor, *, guide_dtype: str, backend: str) -> Tensor:
    """InfoNCE whose false negatives a guide finds, by kernels or, for "reference", in plain PyTorch.

    The guide's first query is 0, and so is its threshold: its cells are near it, to the end of a row.
    """
    generator = torch.Generator().manual_seed(2)
    of_queries, of_candidates = (
        torch.randn(len(x), 40, generator=generator).to(getattr(torch, guide_dtype))
        for x in (queries, candidates)
    )
    of_queries[0], of_candidates[6:12] = 0, of_candidates[:6]
    guide = fastqt.Guide(of_queries, of_candidates)
    name = {} if backend == "reference" else {"FASTQT_BACKEND": backend}
    with mock.patch.dict(os.environ, name):
        return fastqt.info_nce_loss(queries, candidates, exclude=guide, backend=backend)


def some_tokens(N: int, M: int, generator: torch.Generator) -> Tensor:
    mask = torch.rand(M // DOCUMENT_TOKENS, DOCUMENT_TOKENS, generator=generator) < 0.6
    mask[1, 20:], mask[:, 0] = False, True
    return mask


def own(N: int, M: int, generator: torch.Generator) -> Tensor:
    return torch.arange(N) % M


def listed(N: int, M: int, generator: torch.Generator) -> Tensor:
    return torch.randint(M, (N,), generator=generator)


def dense(N: int, M: int, generator: torch.Generator) -> Tensor:
    return torch.softmax(3 * torch.randn(N, M, generator=generator), 1)


def smoothed(N: int, M: int, generator: torch.Generator) -> Any:
    return fastqt.targets.smoothed(own(N, M, generator), 0.1)


def mask(N: int, M: int, generator: torch.Generator) -> Tensor:
    return (torch.rand(N, M, generator=generator) < 0.2) & (torch.arange(M) != own(N, M, generator)[:, None])


def excluded(N: int, M: int, generator: torch.Generator) -> list[Any]:
    return [mask(N, M, generator), fastqt.Same(torch.arange(N) % 7, torch.arange(M) % 7)]


def same(N: int, M: int, generator: torch.Generator) -> fastqt.Same:
    return fastqt.Same(torch.arange(N) % 7)


def bias(N: int, M: int, generator: torch.Generator) -> Tensor:
    return torch.randn(M, generator=generator)


def row_scores(N: int, M: int, generator: torch.Generator) -> Tensor:
    return torch.randn(N, generator=generator)


def mixed(N: int, M: int, generator: torch.Generator) -> fastqt.Mixed:
    return fastqt.Mixed(0.3, torch.arange(N).roll(1))


KEEP = {"targets": own, "diagonal": "keep"}
EXCLUDED = {**KEEP, "exclude": excluded}
IN_TF32: dict[str, Any] = {"dtype": "float32", "precision": "high"}
LOSSES = {
    "plain": Loss(options={"scale": 0.3}),
    "half": Loss(dtype="float16", D=128, N=97, M=97, options={"scale": 0.2, "diagonal": "exclude"}),
    "single": Loss(dtype="float32", N=70, M=131, D=40, options={**KEEP, "scale": 0.4}),
    "TF32": Loss(**IN_TF32, options={**KEEP, "scale": 0.2}),
    "TF32, log-sum-exp": Loss(fastqt.log_sum_exp, rounded=True, **IN_TF32, options={"scale": 0.2}),
    "TF32, copied": Loss(fastqt.log_sum_exp, rounded=True, copied=True, **IN_TF32, options={"scale": 0.2}),
    "TF32, overflow": Loss(
        fastqt.log_sum_exp, rounded=True, spread=4.0, **IN_TF32, options={"scale": 5.0, "memory": "low"}
    ),
    "TF32, clip": Loss(fastqt.clip_loss, **IN_TF32, options={"scale": 100.0}),
    "TF32, sigmoid": Loss(fastqt.sigmoid_loss, **IN_TF32, copied=True, options={**KEEP, "scale": 0.2}),
    "deep": Loss(dtype="float16", N=100, M=100, D=256, options={"scale": 0.05}),
    "odd width": Loss(D=37, N=66, M=66, options={**KEEP, "scale": 0.3}),
    "odd width, copied": Loss(D=300, N=66, M=66, copied=True, options={**KEEP, "scale": 0.01}),
    "odd width, copied, low": Loss(
        dtype="float16",
        D=50,
        K=70,
        N=100,
        M=130,
        copied=True,
        options={**KEEP, "scale": 0.2, "memory": "low"},
    ),
    "low": Loss(dtype="float16", options={**KEEP, "scale": 0.2, "memory": "low"}),
    "groups and mask": Loss(options={**EXCLUDED, "scale": 0.2}),
    "groups and mask, low": Loss(options={**EXCLUDED, "scale": 0.2, "memory": "low"}),
    "negatives, scale": Loss(K=70, N=100, M=130, options={**KEEP, "scale": torch.tensor(0.2)}),
    "bias, row negatives": Loss(
        N=90, M=133, D=44, row_negatives=True, options={**KEEP, "scale": 0.3, "bias": bias}
    ),
    "mixed": Loss(dtype="float16", options={**KEEP, "scale": 0.1, "row_negatives": mixed}),
    "row scores, listed": Loss(
        N=75, options={"targets": listed, "diagonal": "keep", "scale": 0.2, "row_scores": row_scores}
    ),
    "dense": Loss(dtype="float16", N=50, M=50, options={"targets": dense, "diagonal": "keep", "scale": 0.2}),
    "smoothed": Loss(N=50, M=140, options={"targets": smoothed, "diagonal": "keep", "scale": 0.2}),
    "margin": Loss(K=70, options={**KEEP, "scale": 0.3, "exclude": fastqt.Margin(2.0)}),
    "margin, cosines, low": Loss(
        row_negatives=True,
        options={**KEEP, "scale": 20.0, "normalize": True, "memory": "low", "exclude": fastqt.Margin(0.4)},
    ),
    "cosines": Loss(options={**KEEP, "scale": 20.0, "normalize": True}),
    # More candidates than a sample has, whose maxima of rows beyond the end are zeros of both signs.
    "cosines, sample": Loss(fastqt.info_nce_loss, N=45, M=1050),
    "overflow": Loss(spread=4.0, N=130, options={**KEEP, "scale": 5.0}),
    "overflow, negatives": Loss(dtype="float16", spread=4.0, K=140, options={**KEEP, "scale": 2.0}),
    "sigmoid": Loss(fastqt.sigmoid_loss, options={**KEEP, "scale": 0.2, "bias": bias}),
    "sigmoid, low": Loss(
        fastqt.sigmoid_loss, dtype="float16", options={**KEEP, "scale": 0.2, "memory": "low"}
    ),
    "log-sum-exp": Loss(fastqt.log_sum_exp, N=60, K=50, options={"scale": 0.3, "diagonal": "exclude"}),
    "clip": Loss(fastqt.clip_loss, options={"scale": 20.0}),
    "clip, kept": Loss(fastqt.clip_loss, N=140, D=640, options={"scale": 5.0}),
    "clip, kept, TF32": Loss(fastqt.clip_loss, N=140, D=320, **IN_TF32, options={"scale": 5.0}),
    "clip, mask": Loss(fastqt.clip_loss, N=140, M=140, options={"scale": 5.0, "exclude": excluded}),
    "clip, margin": Loss(
        fastqt.clip_loss, N=140, M=140, options={"scale": 5.0, "exclude": fastqt.Margin(-0.4)}
    ),
    "hcl": Loss(fastqt.hcl_loss, N=70, options={"scale": 2.0}),
    "hcl, filtered": Loss(fastqt.hcl_loss, N=140, M=140, options={"scale": 2.0, "exclude": same}),
    "clip, low": Loss(fastqt.clip_loss, dtype="float16", D=48, options={"scale": 20.0, "memory": "low"}),
    "released MixCSE": Loss(fastqt.mixcse_loss, N=64, options={"form": "released"}),
    "released MixCSE, learnt": Loss(
        fastqt.mixcse_loss, N=64, options={"form": "released", "stop_gradient": False}
    ),
    "maxsim": Loss(maxsim, N=40, M=560, options={"scale": 0.3, "document_mask": some_tokens}),
    "maxsim, odd width": Loss(maxsim, dtype="float16", N=40, M=560, D=75, options={"scale": 0.3}),
    "maxsim, steps": Loss(maxsim, dtype="float32", N=40, M=560, options={"scale": 0.3}),
    "maxsim, TF32": Loss(
        maxsim,
        dtype="float32",
        N=40,
        M=560,
        precision="high",
        rounded=True,
        options={"scale": 0.3, "document_mask": some_tokens},
    ),
    "guide": Loss(guided, N=45, M=75, options={"guide_dtype": "bfloat16"}),
    "guide, float32": Loss(guided, N=45, M=75, options={"guide_dtype": "float32"}),
    "descriptors": Loss(D=96, descriptors=True, archs=(90,), options={**KEEP, "scale": 0.2}),
    "descriptors, sigmoid, low": Loss(
        fastqt.sigmoid_loss,
        dtype="float16",
        descriptors=True,
        archs=(90,),
        options={**KEEP, "scale": 0.2, "memory": "low"},
    ),
}

NAMES = {
    fastqt.clip_loss: ("a", "b"),
    fastqt.hcl_loss: ("z1", "z2"),
    fastqt.mixcse_loss: ("z1", "z2"),
    maxsim: ("queries", "documents"),
}
SQUARE = (fastqt.clip_loss, fastqt.hcl_loss, fastqt.mixcse_loss)
DIFFERENTIABLE = ("scale", "bias", "row_scores")


def embeddings(loss: Loss) -> dict[str, Tensor]:
    """Embeddings by their names, whose rows of equal index are near each other."""
    first, second = NAMES.get(loss.function, ("queries", "candidates"))
    sizes = {first: loss.N, second: loss.N if loss.function in SQUARE else loss.M}
    sizes |= {"negatives": loss.K} if loss.K else {}
    sizes |= {"row_negatives": loss.N} if loss.row_negatives else {}

    generator = torch.Generator().manual_seed(0)
    common = torch.randn(max(sizes.values()), loss.D, generator=generator)
    drawn = {}
    for name, size in sizes.items():
        noise = torch.randn(size, loss.D, generator=generator)
        drawn[name] = (loss.spread * (common[:size] + noise)).to(getattr(torch, loss.dtype))
    return drawn


def rounded_to_tf32(x: Tensor) -> Tensor:
    """The nearest values with 11 significant bits, of two that are as near the larger one, float64."""
    mantissa, exponent = torch.frexp(x.double().abs())
    return torch.ldexp((2**11 * mantissa + 0.5).floor() / 2**11, exponent).copysign(x.double())


def value_and_gradients(loss: Loss, dtype: torch.dtype | None, backend: str) -> list[Tensor]:
    """A loss and the gradients of whatever has one, of embeddings that are computed in another dtype."""
    generator = torch.Generator().manual_seed(1)
    options = {name: x(loss.N, loss.M, generator) if callable(x) else x for name, x in loss.options.items()}
    leaves = {name: x.to(dtype or x.dtype) for name, x in embeddings(loss).items()}
    if loss.rounded and dtype is torch.float64:
        leaves = {name: rounded_to_tf32(x) for name, x in leaves.items()}
    leaves |= {name: options[name] for name in DIFFERENTIABLE if isinstance(options.get(name), Tensor)}
    leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    value = loss.function(**{**options, **leaves}, backend=backend).sum()
    return [value.detach(), *torch.autograd.grad(value, list(leaves.values()))]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Of each the norm of its difference from what is exact, relative to the norm."""
    return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(found, exact, strict=True)]


def emulate(
    loss: Loss,
    arch: int,
    schedule: str = "lockstep",
    seed: int = 0,
) -> tuple[Emulation, list[Tensor] | None]:
    """What the emulator has seen, and the value and gradients, None where the kernels wait for ever."""
    gpu = next(gpu for gpu in GPUS if gpu.arch == arch)
    before = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    torch.set_float32_matmul_precision(loss.precision)
    # Memory that nobody has written is NaN then. It could hold the right values of an earlier run.
    torch.use_deterministic_algorithms(True)
    try:
        with (
            mock.patch.dict(ENGINES, triton=replace(ENGINES["triton"], why_not_here=None)),
            # So that several programs repair a block of rows.
            mock.patch("fastqt.kernels.row_stats.multiprocessors", return_value=16),
            # So that tiles are those of the GPU, whose memory the tensors are not in.
            mock.patch("fastqt.kernels.maxsim.on_gpu", return_value=True),
            # So that several programs, of which one has columns beyond the end, compare a row with a guide's.
            mock.patch("fastqt.kernels.guide.COLUMNS", 64),
            mock.patch("fastqt.engines.triton.copies.LEAST_CELLS", 0 if loss.copied else 2**62),
            emulated(gpu, schedule, seed, loss.descriptors) as emulation,
        ):
            return emulation, value_and_gradients(loss, None, "triton")
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.use_deterministic_algorithms(before[1])


def run(
    name: str,
    arch: int,
    schedule: str = "lockstep",
    seed: int = 0,
) -> dict[str, Any]:
    """One loss: its errors and those of plain PyTorch, and what the emulator reports.

    In 16 bits "reference" is plain PyTorch that computes in float32, as the reference engine does; "eager" is
    plain PyTorch in 16 bits.
    """
    loss = LOSSES[name]
    exact = value_and_gradients(loss, torch.float64, "reference")
    in_float32 = value_and_gradients(loss, None, "reference")
    reference = replace(ENGINES["reference"], dtype_for=lambda p, dtype: dtype)
    with mock.patch.dict(ENGINES, reference=reference):
        eager = value_and_gradients(loss, None, "reference")
    emulation, ours = emulate(loss, arch, schedule, seed)
    return {
        "name": name,
        "arch": arch,
        "errors": errors(ours, exact),
        "reference": errors(in_float32, exact),
        "eager": errors(eager, exact),
        "dtype": loss.dtype if loss.precision == "highest" else "tf32",
        "finite": all(math.isfinite(x.double().sum()) for x in ours),
        "reports": [str(report) for report in emulation.reports],
        "launches": emulation.launches,
    }


def schedules(orders: int) -> list[tuple[str, int]]:
    """Warps in lockstep, each alone, and in so many random orders: a schedule and its seed."""
    return [("lockstep", 0), ("alone", 0), *(("random", seed) for seed in range(orders))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("arch", type=int, nargs="?")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--schedule", default="lockstep")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--orders", type=int, help="all schedules, of which so many are random")
    parser.add_argument("--list", action="store_true", help="print the names of the losses")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.list:
        print(json.dumps(list(LOSSES)))
    else:
        chosen = [(asked.schedule, asked.seed)] if asked.orders is None else schedules(asked.orders)
        sound = True
        for schedule, seed in chosen:
            for name in asked.names or LOSSES:
                if asked.arch in LOSSES[name].archs:
                    with NoGaps():
                        result = run(name, asked.arch, schedule, seed)
                    sound &= result["finite"] and not result["reports"]
                    print(json.dumps({**result, "schedule": schedule, "seed": seed}), flush=True)
        if asked.orders is not None and not sound:
            sys.exit("reported: see the lines above")
