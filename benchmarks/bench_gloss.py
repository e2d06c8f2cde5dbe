"""GLOSS's inference of unseen sentences beside its matrix products, and one step beside plain PyTorch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure.timing import Clock, beside_products, in_turns_with
from fastqt.machine.memory import peak_above_results
from fastqt.nn import Gloss

V, D, WORDS, RADIUS = 50_000, 300, 13, 2.0


def plain_inference(gloss: Gloss, tokens: Tensor, steps: int) -> Tensor:
    """Stochastic gradient descent from zero in a few lines of PyTorch."""
    weight, bias = gloss.weight.detach(), gloss.bias.detach()
    latents = torch.zeros(len(tokens), D)
    optimizer = torch.optim.SGD([latents.requires_grad_()], lr=1.0)
    named = torch.zeros(len(tokens), V).scatter_(1, tokens, 1)
    named[:, 0] = 0
    for _ in range(steps):
        optimizer.zero_grad()
        if gloss.positions is None:
            logits = latents @ weight.T + bias
            loss = F.binary_cross_entropy_with_logits(logits, named, reduction="sum")
        else:
            logits = (latents[:, None] + gloss.positions[:WORDS].detach()) @ weight.T + bias
            loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum")
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            latents *= RADIUS / latents.norm(dim=1, keepdim=True).clamp(min=RADIUS)
    return latents.detach()


def products(weight: Tensor, latents: Tensor) -> list[Tensor]:
    """The two products of a step that every method for bags of words needs."""
    scores = latents @ weight.T
    return [scores, scores @ weight]


@pytest.mark.parametrize(("decoder", "sentences"), [("bow", 1000), ("pos", 128)])
def test_inference_step(benchmark, decoder, sentences):
    torch.manual_seed(0)
    gloss = Gloss(V, D, decoder=decoder, radius=RADIUS)
    tokens = torch.randint(V, (sentences, WORDS))
    lengths = torch.full((sentences,), WORDS)

    # The safeguard would evaluate the loss once more.
    ours = partial(gloss.infer, tokens, lengths, steps=1, safeguard=False)
    eager = partial(plain_inference, gloss, tokens, 1)
    peaks = [peak_above_results(lambda run=run: [run()])[1] for run in (ours, eager)]

    latents = ours()
    others = {"gemm": partial(products, gloss.weight.detach(), latents), "eager": eager}
    median, seconds = in_turns_with(benchmark, ours, others, rounds=5)

    benchmark.extra_info.update(
        decoder=decoder,
        sentences=sentences,
        words=WORDS,
        steps=1,
        V=V,
        D=D,
        rounds=5,
        **beside_products(median, seconds),
        peak=peaks[0],
        eager_peak=peaks[1],
    )


def test_inference(benchmark):
    """Inference as in `Gloss.encode`: 1,000 sentences at once, steps that raise the loss are undone."""
    torch.manual_seed(0)
    gloss = Gloss(V, D, radius=RADIUS)
    sentences, steps = 1000, 1 if benchmark.disabled else 250
    tokens = torch.randint(V, (sentences, WORDS))
    ours = partial(gloss.infer, tokens, torch.full((sentences,), WORDS), steps=steps)
    weight, latents = gloss.weight.detach(), torch.randn(sentences, D)

    def all_products() -> None:
        for _ in range(steps):
            products(weight, latents)

    clock = Clock(torch.device("cpu"))
    gemm_seconds = clock.seconds(all_products)
    seconds = benchmark.pedantic(clock.seconds, (ours,))
    benchmark.extra_info.update(
        decoder="bow",
        sentences=sentences,
        words=WORDS,
        steps=steps,
        V=V,
        D=D,
        rounds=1,
        **beside_products(seconds, {"gemm": gemm_seconds}),
    )
