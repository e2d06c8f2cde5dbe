"""Embedding tables and their optimisers in float32, beside what torch has for the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import fastqt.optim
from benchmarks.measure.timing import in_turns_with
from benchmarks.measure.workloads import sentences
from fastqt.nn.sparse_gradients import bag_sum
from fastqt.optim import Adam

# V, D, and the B sentences of a batch: QuickThoughts' table, skip-thoughts', and one of wide vectors.
SIZES = [(50_000, 300, 400), (50_000, 300, 1000), (20_000, 620, 400), (20_000, 1200, 400)]
ROUNDS = 15
sizes = pytest.mark.parametrize(("V", "D", "B"), SIZES)

Lookup = Callable[[Tensor, Tensor, Tensor], Tensor]  # of a table, ids and offsets
Clip = Callable[[list[nn.Parameter], float], Tensor]


class Batch:
    """Sentences as bags of words, and the gradient of a loss by their vectors."""

    def __init__(self, B: int, V: int, D: int) -> None:
        tokens, lengths = sentences(B, V)
        self.ids = tokens[torch.arange(tokens.shape[1]) < lengths[:, None]]
        self.offsets = lengths.cumsum(0) - lengths
        self.upstream = torch.randn(B, D)

    def differentiate(self, lookup: Lookup, table: nn.Parameter) -> None:
        lookup(table, self.ids, self.offsets).backward(self.upstream)


def dense(table: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
    return F.embedding_bag(ids, table, offsets, mode="sum")


def sparse(table: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
    return F.embedding_bag(ids, table, offsets, mode="sum", sparse=True)


def new_table(V: int, D: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(V, D).uniform_(-0.1, 0.1))


def record(benchmark, times: tuple[float, dict[str, float]], **more: object) -> None:
    """Stores the seconds of each contestant, and how many times as long as ours it takes."""
    ours, others = times
    benchmark.extra_info.update(
        **more,
        threads=torch.get_num_threads(),
        other_seconds=others,
        times_faster={name: seconds / ours for name, seconds in others.items()},
    )


@sizes
def test_bag_forward_and_backward(benchmark, V, D, B):
    """The gradient "sparse" names a word as often as it occurs; "coalesced" adds those of a word up."""
    torch.manual_seed(0)
    batch, table = Batch(B, V, D), new_table(V, D)

    def run(lookup: Lookup, *, coalesce: bool = False) -> Callable[[], None]:
        def step() -> None:
            table.grad = None
            batch.differentiate(lookup, table)
            if coalesce:
                table.grad = table.grad.coalesce()

        return step

    others = {"dense": run(dense), "sparse": run(sparse), "coalesced": run(sparse, coalesce=True)}
    times = in_turns_with(benchmark, run(bag_sum), others, ROUNDS)
    record(benchmark, times, V=V, D=D, B=B, words=len(batch.ids))


def bag_step(
    batch: Batch, table: nn.Parameter, lookup: Lookup, optimizer: torch.optim.Optimizer, clip: Clip
) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        batch.differentiate(lookup, table)
        clip([table], 5.0)
        optimizer.step()

    return step


@sizes
def test_step_of_all_rows(benchmark, V, D, B):
    """A training step of a table whose rows all move by their momentum: gradient, clipping and Adam."""
    torch.manual_seed(0)
    batch = Batch(B, V, D)
    table = new_table(V, D)
    others = {}
    for name, options in {"fused": {"fused": True}, "foreach": {"foreach": True}}.items():
        theirs = new_table(V, D)
        adam = torch.optim.Adam([theirs], lr=5e-4, **options)
        others[name] = bag_step(batch, theirs, dense, adam, clip_grad_norm_)
    ours = bag_step(batch, table, bag_sum, Adam([table], lr=5e-4), fastqt.optim.clip_grad_norm_)
    record(benchmark, in_turns_with(benchmark, ours, others, ROUNDS), V=V, D=D, B=B, words=len(batch.ids))


@pytest.mark.parametrize("H", [300, 1000])
def test_step_of_a_gru(benchmark, H):
    """Clipping and Adam for the weights of a layer, whose gradients are dense."""
    torch.manual_seed(0)

    def run(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], clip: Clip) -> Callable[[], None]:
        weights = list(nn.GRU(300, H).parameters())
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer = make(weights)

        def step() -> None:
            clip(weights, 5.0)
            optimizer.step()

        return step

    others = {
        "fused": run(lambda weights: torch.optim.Adam(weights, lr=5e-4, fused=True), clip_grad_norm_),
        "foreach": run(lambda weights: torch.optim.Adam(weights, lr=5e-4, foreach=True), clip_grad_norm_),
    }
    subject = run(lambda weights: Adam(weights, lr=5e-4), fastqt.optim.clip_grad_norm_)
    record(benchmark, in_turns_with(benchmark, subject, others, 3 * ROUNDS), H=H, W=300)
