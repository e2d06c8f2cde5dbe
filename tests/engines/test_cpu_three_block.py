"""The walk over MixCSE's three blocks equals its definition for any pieces, chunks, threads and layouts.

The definition scores the mixtures themselves, as vectors; the walk adds cosines.
"""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from fastqt import autograd
from fastqt.engines import cpu, cpu_three_block
from fastqt.problem import ThreeBlockProblem
from tests.shared.tolerances import FLOAT32, FLOAT64, REORDERED, relative

NAMES = ("queries", "candidates", "own columns", "next columns", "own rows", "next rows", "scale")
OPTIONS = [
    {"third_block": third, "masks_excluded": excluded, "own_mixture_weight": 0.6, "stop_gradient": stop}
    for third, excluded, stop in product((True, False), repeat=3)
]
by_options = pytest.mark.parametrize("options", OPTIONS, ids=str)


def problem(N: int, dtype: torch.dtype = torch.float64, **options) -> ThreeBlockProblem:
    generator = torch.Generator().manual_seed(N)
    sides = [
        F.normalize(torch.randn(N, 6, generator=generator, dtype=torch.float64), dim=1) for _ in range(2)
    ]
    shares = [torch.rand(N, generator=generator, dtype=torch.float64) + 0.2 for _ in range(4)]
    inputs = [*sides, *shares, torch.tensor(5.0, dtype=torch.float64)]
    return ThreeBlockProblem(*(x.to(dtype).requires_grad_() for x in inputs), **{**OPTIONS[0], **options})


def definition(p: ThreeBlockProblem) -> torch.Tensor:
    """The loss of each row."""
    N, own = len(p.queries), torch.eye(len(p.queries), dtype=p.queries.dtype)
    queries, candidates = (x.detach() if p.stop_gradient else x for x in (p.queries, p.candidates))
    after = (torch.arange(N) + 1) % N
    m = p.own_columns[:, None] * candidates + p.next_columns[:, None] * candidates[after]
    a = p.own_rows[:, None] * queries + p.next_rows[:, None] * queries[after]
    masked = torch.zeros(N, N, dtype=torch.bool)
    masked[torch.arange(N), after] = True
    value = -math.inf if p.masks_excluded else 0.0
    first = p.scale * p.queries @ p.candidates.T
    second = (p.scale * p.queries @ m.T + p.own_mixture_weight * own).masked_fill(masked.T, value)
    third = (p.scale * a @ p.candidates.T + p.own_mixture_weight * own).masked_fill(masked, value)
    columns = torch.cat([first, second, third] if p.third_block else [first, second], 1)
    return columns.logsumexp(1) - first.diagonal()


def ours(p: ThreeBlockProblem, reduction: str = "sum") -> torch.Tensor:
    return autograd.loss_of(p, reduction, cpu_three_block, "fastqt.mixcse_loss")


def check(p: ThreeBlockProblem, loss: torch.Tensor, expected: torch.Tensor) -> None:
    assert relative(loss, expected) < FLOAT64
    names, inputs = zip(*(x for x in zip(NAMES, p.inputs(), strict=True) if x[1].requires_grad), strict=True)
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    wanted = torch.autograd.grad(expected, inputs, allow_unused=True)
    for name, a, b in zip(names, found, wanted, strict=True):
        if b is None:
            assert a is None or not a.any(), name
        elif not (
            p.stop_gradient and name in NAMES[2:6]
        ):  # shares of a mixture that no gradient flows through
            assert relative(a, b) < FLOAT64, name


@by_options
@pytest.mark.parametrize("N", [2, 31, 33, 100])
def test_is_the_definition(N, options):
    """A thread takes pieces of 32 rows, and a mixture at their border has a part in each."""
    p = problem(N, **options)
    check(p, ours(p), definition(p).sum())


@by_options
@pytest.mark.parametrize("rows", [1, 33, 64, 99])
def test_chunks_do_not_change_the_result(monkeypatch, rows, options):
    monkeypatch.setattr(cpu, "CHUNK_BYTES", 1)
    monkeypatch.setattr(cpu, "MIN_CHUNK_ROWS", rows)
    p = problem(100, **options)
    weights = torch.linspace(-1, 2, 100, dtype=torch.float64)
    check(p, (weights * ours(p, "none")).sum(), (weights * definition(p)).sum())


@by_options
def test_one_gradient_alone(options):
    for wanted in NAMES:
        p = problem(40, **options)
        for name, x in zip(NAMES, p.inputs(), strict=True):
            x.requires_grad_(name == wanted)
        expected = definition(p).sum()
        if expected.requires_grad:  # The rows' shares are in the third block alone.
            check(p, ours(p), expected)


def test_memory_is_what_the_chunks_take():
    p = problem(4096)
    assert [cpu_three_block._chunk_rows(replace(p, memory=m)) for m in ("fast", "low", 2**25, 2**40)] == [
        *(512, 164, 316, 512)
    ]


def test_digits_of_learnt_pairs():
    """Positives of probability 1 - 1e-11: in float32 that is 1, and a gradient of p - 1 would be 0."""
    p = problem(64, torch.float32, own_mixture_weight=0.0, masks_excluded=True)
    for share, value in zip(p.inputs()[2:6], (0.1, 0.05, 0.1, 0.05), strict=True):
        share.detach().fill_(value)
    vectors = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    p.queries = F.normalize(vectors, dim=1).requires_grad_()
    p.candidates = p.queries.detach().clone().requires_grad_()
    p.scale.detach().fill_(40.0)
    exact = replace(
        p,
        **{
            name: getattr(p, name).detach().double().requires_grad_()
            for name in (
                "queries",
                "candidates",
                "own_columns",
                "next_columns",
                "own_rows",
                "next_rows",
                "scale",
            )
        },
    )
    loss, expected = ours(p), definition_of_learnt_pairs(exact)
    assert expected / 64 < 1e-10
    assert relative(loss, expected) < FLOAT32
    inputs, exact_inputs = ([q.queries, q.candidates, q.scale] for q in (p, exact))
    found, wanted = torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, exact_inputs)
    for a, b in zip(found, wanted, strict=True):
        assert relative(a, b) < FLOAT32


def definition_of_learnt_pairs(p: ThreeBlockProblem) -> torch.Tensor:
    """The sum of the losses, as log(1 + exp(others - positive)), which in float64 keeps these digits."""
    N, after = len(p.queries), (torch.arange(len(p.queries)) + 1) % len(p.queries)
    m = (
        p.own_columns[:, None] * p.candidates.detach()
        + p.next_columns[:, None] * p.candidates.detach()[after]
    )
    a = p.own_rows[:, None] * p.queries.detach() + p.next_rows[:, None] * p.queries.detach()[after]
    masked = torch.eye(N).roll(1, 1).bool()
    first = p.scale * p.queries @ p.candidates.T
    others = [
        first.masked_fill(torch.eye(N).bool(), -math.inf),
        (p.scale * p.queries @ m.T).masked_fill(masked.T, -math.inf),
        (p.scale * a @ p.candidates.T).masked_fill(masked, -math.inf),
    ]
    return F.softplus(torch.cat(others, 1).logsumexp(1) - first.diagonal()).sum()


def test_threads_agree_and_runs_repeat():
    threads, found = torch.get_num_threads(), []
    p = problem(200, torch.float32, stop_gradient=False)
    try:
        for count in (2, 2, 1):
            torch.set_num_threads(count)
            loss = ours(p)
            found.append([loss.detach(), *torch.autograd.grad(loss, p.inputs())])
    finally:
        torch.set_num_threads(threads)
    two, again, one = found
    assert all(torch.equal(x, y) for x, y in zip(two, again, strict=True))
    assert all(relative(x, y) < REORDERED[torch.float32] for x, y in zip(one, two, strict=True))


def test_strides_do_not_change_the_result():
    p = problem(40)
    transposed, sliced = p.queries.detach().T.contiguous().T, torch.zeros(40, 12, dtype=torch.float64)
    sliced[:, ::2] = p.candidates.detach()
    laid_out = replace(p, queries=transposed.requires_grad_(), candidates=sliced[:, ::2].requires_grad_())
    check(laid_out, ours(laid_out), definition(laid_out).sum())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_reaches_the_loss(value):
    p = problem(40)
    p.queries = p.queries.detach().clone()
    p.queries[7, 2] = value
    p.queries.requires_grad_()
    loss = ours(p, "none")
    # Row 6 has a mixture with row 7.
    assert loss.isnan().nonzero().flatten().tolist() == [6, 7]
    assert torch.autograd.grad(loss.sum(), p.queries)[0][7].isnan().any()
