"""Whether a GPU computes the right loss and gradients, in the tests' cases and in larger problems.

Small cases are compared with the tests' oracle. Larger problems are compared with the formulas in float64 on
the device; their errors may not be much larger than those of eager PyTorch in the inputs' dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fastqt
from benchmarks.gpu.sections import Options, Record, Verdict, check, refusals
from tests.shared.cases import CASES
from tests.shared.excluding import excluding
from tests.shared.tolerances import CUT_OFF, EAGER_FACTOR, FLOAT32, THREE_ROUNDINGS, relative


def cases(options: Options, dtype: str, memory: str, backend: str = "triton") -> Iterator[Record]:
    """Every case of the tests: its mean, and its rows under an upstream gradient for each."""
    of = getattr(torch, dtype)
    chosen = CASES[:: 10 if options.dry_run else 5 if options.quick else 1]
    for case in chosen:
        for reduction in ("mean", "none"):
            test = partial(case_verdict, case, of, memory, reduction, options.device, backend)
            yield check(f"{case.name}, {reduction}", test)


def case_verdict(
    case: Any, dtype: torch.dtype, memory: str, reduction: str, device: torch.device, backend: str = "triton"
) -> Verdict:
    """Whether the loss and the gradients of one of the tests' cases equal the oracle's."""
    inputs = case.inputs(dtype)
    there = {name: x.detach().to(device).requires_grad_() for name, x in inputs.items()}
    arguments = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in case.arguments.items()}
    arguments = excluding(arguments)
    loss = taken(case.function, **there, **arguments, reduction=reduction, memory=memory, backend=backend)

    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(loss.shape, generator=generator)
    weights = upstream.double().numpy() if reduction == "none" else None
    expected = case.expected(inputs, weights)
    if reduction == "mean":
        upstream = torch.ones(())
    gradients = torch.autograd.grad(loss, list(there.values()), upstream.to(loss))
    # The loss is summed in float32. E, the weighted rows and the gradient are each rounded to the dtype, and
    # Triton's interpreter, on a CPU, cuts bfloat16 off where a GPU rounds to nearest.
    rounding = 0.0 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
    if device.type == "cpu":
        rounding = THREE_ROUNDINGS[dtype]
    exact = expected.loss if reduction == "none" else expected.loss.mean()
    bounds = {"loss": (relative(loss.cpu(), exact), FLOAT32)}
    for name, gradient in zip(there, gradients, strict=True):
        bounds[name] = relative(gradient.cpu(), getattr(expected, name)), FLOAT32 + rounding
    return within(bounds)


def taken(loss: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    """The loss of one GPU engine; NotTakenError where that engine does not support the problem."""
    with refusals():
        return loss(*args, **options)


def within(bounds: Mapping[str, tuple[float, float]]) -> Verdict:
    """Whether each error is within its bound; NaN never is. Those that are not are told first."""
    right = {name: error <= bound for name, (error, bound) in bounds.items()}
    errors = (
        f"{name} {bounds[name][0]:.3g} (at most {bounds[name][1]:.3g})"
        for name in sorted(right, key=right.get)
    )
    return Verdict(all(right.values()), ", ".join(errors))


@dataclass(frozen=True)
class Problem:
    """A problem that is too large for the oracle; its inputs are drawn anew for each seed."""

    name: str
    kind: str  # of INPUTS
    N: int
    M: int
    D: int
    offsets: tuple[int, ...]  # the targets of row i are candidates i + offset
    diagonal: str
    seeds: int = 3
    clip: bool = False  # CLIP's loss, over rows and over columns


PROBLEMS = (
    Problem("window", "random", 1021, 1021, 253, (-1, 1), "zero"),
    Problem("more candidates", "random", 515, 1337, 65, (0,), "keep"),
    Problem("fewer candidates", "random", 777, 130, 96, (0,), "keep"),
    Problem("converged, diagonal", "converged", 1024, 1024, 256, (0,), "keep"),
    Problem("converged, next", "converged", 1023, 1023, 256, (1,), "zero"),
    Problem("overflow, nothing sampled", "overflow", 700, 700, 256, (0,), "keep"),
    Problem("overflow, sampled", "overflow", 1500, 5000, 256, (0,), "keep"),
    Problem("many chunks", "random", 16500, 18000, 64, (1,), "zero", seeds=1),
    Problem("CLIP", "random", 1021, 1021, 253, (0,), "keep", clip=True),
    Problem("CLIP, converged", "converged", 1024, 1024, 256, (0,), "keep", clip=True),
    Problem("CLIP, overflow", "overflow", 1500, 1500, 256, (0,), "keep", clip=True),
    Problem("CLIP, many chunks", "random", 16500, 16500, 64, (0,), "keep", seeds=1, clip=True),
)
QUICK_PROBLEMS = (PROBLEMS[0], PROBLEMS[3], PROBLEMS[6], PROBLEMS[9])
DRY_PROBLEMS = (
    Problem("window", "random", 13, 13, 11, (-1, 1), "zero", seeds=2),
    Problem("overflow", "overflow", 11, 17, 24, (0,), "keep", seeds=2),
    Problem("CLIP", "random", 11, 11, 7, (0,), "keep", seeds=1, clip=True),
)


def accuracy(options: Options, dtype: str, memory: str, backend: str = "triton") -> Iterator[Record]:
    """The errors of every problem beside those of eager PyTorch."""
    of = getattr(torch, dtype)
    problems = QUICK_PROBLEMS if options.quick else PROBLEMS
    for problem in DRY_PROBLEMS if options.dry_run else problems:
        test = partial(problem_verdict, problem, of, memory, options.device, backend)
        yield check(problem.name, test)
    for noise in (None, 0.1):
        size = (13, 24) if options.dry_run else (1021, 250)
        test = partial(three_block_verdict, *size, noise, of, memory, options.device, backend)
        yield check(f"three-block MixCSE, {'random' if noise is None else 'converged'}", test)


def problem_verdict(
    problem: Problem, dtype: torch.dtype, memory: str, device: torch.device, backend: str = "triton"
) -> Verdict:
    """Whether the mean errors of loss and gradients are within `eager_factor` of eager PyTorch's."""
    ours: list[list[float]] = []
    eagers: list[list[float]] = []
    for seed in range(problem.seeds):
        f, g = (x.to(device, dtype).requires_grad_() for x in INPUTS[problem.kind](problem, seed))
        exact = true_losses(problem, f.detach(), g.detach())
        assert_kind(problem, exact[0])

        loss = partial(fused_loss(problem), f, g, memory=memory, backend=backend)
        rows = taken(loss, reduction="none")
        mean = torch.autograd.grad(taken(loss), (f, g))
        ours.append(_errors((rows.detach(), *mean), exact))

        rows = eager_rows(f, g, problem.offsets, problem.diagonal)
        if problem.clip:
            rows = (rows + eager_rows(g, f, problem.offsets, problem.diagonal)) / 2
        eagers.append(_errors((rows.detach(), *torch.autograd.grad(rows.mean(), (f, g))), exact))

    # Eager PyTorch may round to the exact value by chance, so half an ulp is always allowed.
    slack = (torch.finfo(torch.float32).eps / 2, *(torch.finfo(dtype).eps / 2,) * 2)
    names = ("loss", "queries", "candidates")
    factor = eager_factor(dtype, device)

    bounds = {}
    for k, name in enumerate(names):
        bound = factor * sum(e[k] for e in eagers) / len(eagers) + slack[k]
        bounds[name] = sum(e[k] for e in ours) / len(ours), bound
    return within(bounds)


def eager_factor(dtype: torch.dtype, device: torch.device) -> float:
    """How many times eager PyTorch's error is allowed: it rounds where the interpreter cuts off."""
    return EAGER_FACTOR * (CUT_OFF[dtype] if device.type == "cpu" else 1.0)


def fused_loss(p: Problem) -> Callable[..., Tensor]:
    if p.clip:
        return partial(fastqt.clip_loss, scale=1.0, normalize=False)
    targets = fastqt.Window(offsets=list(p.offsets))
    return partial(fastqt.contrastive_loss, targets=targets, diagonal=p.diagonal)


def true_losses(p: Problem, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The losses, and the gradients of their mean, in float64."""
    of_queries = truth(f, g, p.offsets, p.diagonal)

    if not p.clip:
        return of_queries
    losses, dG, dF = truth(g, f, p.offsets, p.diagonal)
    return (of_queries[0] + losses) / 2, (of_queries[1] + dF) / 2, (of_queries[2] + dG) / 2


def three_block_verdict(
    N: int, D: int, noise: float | None, dtype: torch.dtype, memory: str, device: torch.device, backend: str
) -> Verdict:
    """Whether three-block MixCSE is within `eager_factor` of eager PyTorch's errors.

    The two views are random, or differ by `noise`.
    """
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(N, D, generator=generator) for _ in range(2)]
    if noise is not None:
        made[1] = made[0] + noise * made[1]
    views = [x.to(device, dtype).requires_grad_() for x in made]
    exact, eager = (_rows_and_gradients(three_block_rows, x) for x in ([x.double() for x in views], views))
    ours = _rows_and_gradients(
        lambda *z: taken(
            fastqt.mixcse_loss, *z, form="released", reduction="none", memory=memory, backend=backend
        ),
        views,
    )
    slack = (torch.finfo(torch.float32).eps / 2, *(torch.finfo(dtype).eps / 2,) * 2)
    factor = eager_factor(dtype, device)
    bounds = [factor * error + least for error, least in zip(_errors(eager, exact), slack, strict=True)]
    return within(
        dict(zip(("loss", "z1", "z2"), zip(_errors(ours, exact), bounds, strict=True), strict=True))
    )


def _rows_and_gradients(rows: Callable[..., Tensor], views: list[Tensor]) -> tuple[Tensor, ...]:
    """The rows' losses and the gradients of their sum; those of the mean could underflow in float16."""
    leaves = [x.detach().requires_grad_() for x in views]
    loss = rows(*leaves)
    return (loss.detach(), *torch.autograd.grad(loss.sum(), leaves))


def three_block_rows(z1: Tensor, z2: Tensor) -> Tensor:
    """The rows' losses of three-block MixCSE in plain PyTorch, in the inputs' dtype."""
    normalize = torch.nn.functional.normalize
    h1, h2 = normalize(z1), normalize(z2)
    a, m = (normalize(0.2 * z + 0.8 * z.roll(-1, 0)).detach() for z in (z1, z2))
    after = torch.eye(len(z1), dtype=torch.bool, device=z1.device).roll(1, 1)
    positive = 20 * h1 @ h2.T
    mixed = (20 * h1 @ m.T).masked_fill(after.T, 0), (20 * a @ h2.T).masked_fill(after, 0)
    return torch.cat([positive, *mixed], 1).logsumexp(1) - positive.diagonal()


def random_inputs(p: Problem, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, p.D, generator=generator) / p.D**0.25 for rows in (p.N, p.M))


def converged_inputs(p: Problem, seed: int) -> tuple[Tensor, Tensor]:
    """Each row scores 24 with its one target and little with all other candidates."""
    queries, candidates = random_inputs(p, seed)
    candidates /= candidates.norm(dim=1, keepdim=True)
    row = torch.arange(p.N)
    has = (row + p.offsets[0] >= 0) & (row + p.offsets[0] < p.M)
    queries[has] = 24 * candidates[row[has] + p.offsets[0]]
    return queries, candidates


def overflowing_inputs(p: Problem, seed: int) -> tuple[Tensor, Tensor]:
    """Every third row scores 200 with a candidate that is no target of such a row."""
    queries, candidates = random_inputs(p, seed)
    loud = torch.arange(0, p.N, 3)
    others = torch.randperm(p.M, generator=torch.Generator().manual_seed(seed))
    others = others[others % 3 != 0][: len(loud)]
    loud = loud[: len(others)]
    candidates[others] = 200 * queries[loud] / (queries[loud] ** 2).sum(1, keepdim=True)
    return queries, candidates


INPUTS = {"random": random_inputs, "converged": converged_inputs, "overflow": overflowing_inputs}


def assert_kind(problem: Problem, losses: Tensor) -> None:
    """Raises AssertionError if the inputs are not as hard as their kind says."""
    if problem.kind == "converged" and losses.max() > 1e-3:
        raise AssertionError(f"inputs are not converged: p = {math.exp(-losses.max()):.4f}")
    loud = 50 if problem.clip else 100  # CLIP: the mean of a large and a small loss
    if problem.kind == "overflow" and (losses > loud).sum() < problem.N // 5:
        raise AssertionError("inputs overflow too few rows")


def _errors(results: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> list[float]:
    """Relative errors in the L2 norm."""
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(results, exact, strict=True)]


def target_matrix(rows: Tensor, M: int, offsets: tuple[int, ...]) -> Tensor:
    """The given rows of T, (len(rows), M) float64, each divided by its sum."""
    T = torch.zeros(len(rows), M, dtype=torch.float64, device=rows.device)
    for offset in offsets:
        column = rows + offset
        inside = (column >= 0) & (column < M)
        T[inside.nonzero().squeeze(1), column[inside]] = 1.0
    return T / T.sum(1, keepdim=True).clamp(min=1)


def truth(
    queries: Tensor, candidates: Tensor, offsets: tuple[int, ...], diagonal: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows' losses and the gradients of their mean, by the formulas in float64, in blocks of rows."""
    F, G = queries.double(), candidates.double()
    N, M = len(F), len(G)
    losses, dF, dG = F.new_empty(N), torch.empty_like(F), torch.zeros_like(G)
    for rows in torch.arange(N, device=F.device).split(2048):
        T = target_matrix(rows, M, offsets)
        S = F[rows] @ G.T
        diagonal_cells = rows[:, None] == torch.arange(M, device=F.device) if diagonal == "zero" else None
        if diagonal_cells is not None:
            S.masked_fill_(diagonal_cells, 0)
        log_P = S.log_softmax(1)
        losses[rows] = (torch.special.xlogy(T, T) - T * log_P).sum(1)
        dS = (T.sum(1, keepdim=True) * log_P.exp() - T) / N
        if diagonal_cells is not None:
            dS.masked_fill_(diagonal_cells, 0)
        dF[rows] = dS @ G
        dG += dS.T @ F[rows]
    return losses, dF, dG


def eager_rows(f: Tensor, g: Tensor, offsets: tuple[int, ...], diagonal: str) -> Tensor:
    """The rows' losses in plain PyTorch, in the inputs' dtype."""
    T = target_matrix(torch.arange(len(f), device=f.device), len(g), offsets).to(f.dtype)
    scores = f @ g.T
    if diagonal == "zero":
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu().tril(), 0)
    return torch.nn.functional.kl_div(scores.log_softmax(1), T, reduction="none").sum(1)
