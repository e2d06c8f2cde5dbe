"""The overhead of a call, layer by layer, beside an empty autograd function.

With 8 rows and 8 columns nearly all time is spent in Python and torch, not in the kernels. Each layer
contains those after it, except `targets`, which is a part of `problem`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fastqt
from benchmarks.measure.baselines import loss_products
from benchmarks.measure.timing import in_turns_with
from benchmarks.measure.workloads import embeddings, forward_and_backward
from fastqt import autograd
from fastqt.engines import ENGINES
from fastqt.engines.cpu import contrastive as cpu
from fastqt.functional.call import Call
from fastqt.functional.lowering import lowered
from fastqt.problem import Needs, Problem

SIZE = 8
CALLS = 4  # per reading of the clock: enough to hide its cost, few enough to finish undisturbed
ROUNDS = 500


class Empty(torch.autograd.Function):
    """A loss of two matrices that computes nothing."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, candidates: Tensor) -> Tensor:
        ctx.save_for_backward(queries, candidates)
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty(SIZE, SIZE), torch.empty(SIZE, SIZE)


def problem(queries: Tensor, candidates: Tensor) -> Problem:
    """The problem that `contrastive_loss` makes from its arguments and their defaults."""
    call = Call(
        "softmax", fastqt.Window(), queries, candidates, diagonal="zero", reduction="mean", backend="cpu"
    )

    made, _ = lowered(call)
    return made


def layers(queries: Tensor, candidates: Tensor) -> dict[str, Callable[[], object]]:
    leaves = queries, candidates
    values = [x.detach() for x in leaves]
    made, plain, needs = problem(*leaves), problem(*values), Needs(True, True)
    products = loss_products(*leaves)
    operator = torch.ops.fastqt.contrastive_loss_with_gradients.default
    arguments = (*cpu.problem_arguments(plain), SIZE, None, 1 / SIZE, needs)

    def targets() -> None:
        window = fastqt.Window()
        window.check(SIZE, SIZE, "zero")
        window.rows(SIZE, SIZE, queries.device)

    return {
        "empty": forward_and_backward(lambda: Empty.apply(*leaves), *leaves),
        "forward": lambda: fastqt.contrastive_loss(*leaves),
        "problem": lambda: problem(*leaves),
        "targets": targets,
        "function": lambda: autograd.loss_of(made, "mean", ENGINES["cpu"], "fastqt.contrastive_loss"),
        "engine": lambda: cpu.forward_with_gradients(plain, 1 / SIZE, needs),
        "operator": lambda: operator(*arguments),
        "products": lambda: products(*values),
    }


def repeated(function: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(CALLS):
            function()

    return run


def test_call(benchmark):
    queries, candidates = embeddings(SIZE, SIZE, D=SIZE)
    call = forward_and_backward(lambda: fastqt.contrastive_loss(queries, candidates), queries, candidates)
    others = {name: repeated(function) for name, function in layers(queries, candidates).items()}
    median, seconds = in_turns_with(benchmark, repeated(call), others, rounds=ROUNDS)
    microseconds = {name: 1e6 * total / CALLS for name, total in {"call": median, **seconds}.items()}
    benchmark.extra_info.update(
        N=SIZE,
        D=SIZE,
        calls=CALLS,
        rounds=ROUNDS,
        microseconds=microseconds,
        above_empty=microseconds["call"] - microseconds["empty"],
    )
