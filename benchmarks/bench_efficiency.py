"""A training step of QuickThoughts beside one of skip-thoughts with encoders of the same size, in turns.

Logeswaran and Lee (arXiv:1803.02893) compare the efficiency of the two. Here both see the same sentences and
use the same optimiser and fastqt's GRU, losses and sparse gradients, so that only the models differ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import fastqt
from benchmarks.measure.timing import in_turns_with
from benchmarks.measure.workloads import sentences
from fastqt.nn import GRUEncoder, QuickThoughts, SkipThoughts
from fastqt.optim import Adam, clip_grad_norm_

V, W, H, B = 20_000, 300, 300, 128
ROUNDS = 3


def training_step(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    parameters = list(model.parameters())
    optimizer = Adam(parameters, lr=5e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        clip_grad_norm_(parameters, 5.0)
        optimizer.step()

    return step


def test_quickthoughts_beside_skip_thoughts(benchmark):
    torch.manual_seed(0)
    tokens, lengths = sentences(B, V)
    quick = QuickThoughts(*(GRUEncoder(V, W, H, sparse=True) for _ in range(2)))
    skip = SkipThoughts(V, W, H, sparse=True)

    seconds, others = in_turns_with(
        benchmark,
        training_step(quick, lambda: fastqt.contrastive_loss(*quick(tokens, lengths))),
        {"skip-thoughts": training_step(skip, lambda: skip.loss(tokens, lengths))},
        ROUNDS,
    )

    skip_seconds = others["skip-thoughts"]
    benchmark.extra_info.update(
        B=B,
        V=V,
        W=W,
        H=H,
        words=int(lengths.sum()),
        threads=torch.get_num_threads(),
        parameters=sum(parameter.numel() for parameter in quick.parameters()),
        skip_thoughts_parameters=sum(parameter.numel() for parameter in skip.parameters()),
        sentences_per_second=B / seconds,
        skip_thoughts_seconds=skip_seconds,
        skip_thoughts_sentences_per_second=B / skip_seconds,
        times_faster=skip_seconds / seconds,
    )
