"""What several benchmarks compute: random inputs, a loss with its gradients, the memory that it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastqt.machine.memory import peak_above_results


def embeddings(*rows: int, D: int) -> list[Tensor]:
    """Leaves (n, D) whose scores vary about as much as a trained model's."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(n, D, generator=generator) / D**0.25).requires_grad_() for n in rows]


def sentences(B: int, V: int) -> tuple[Tensor, Tensor]:
    """Token ids (B, 40) and lengths (B,), which are uniform from 3 to 40.

    Low ids are more frequent, as in a vocabulary sorted by frequency.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = (V ** torch.rand(B, 40, generator=generator)).long().clamp_(max=V - 1)
    return tokens, torch.randint(3, 41, (B,), generator=generator)


def forward_and_backward(loss: Callable[[], Tensor], *leaves: Tensor) -> Callable[[], None]:
    """A function that computes a loss and the gradients of these leaves anew at each call."""

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        loss().backward()

    return run


def peak_above_gradients(run: Callable[[], None], leaves: Sequence[Tensor]) -> int | None:
    """By how many bytes memory grows at most while gradients are computed, these not counted.

    None where the system does not report it.
    """

    def gradients() -> list[Tensor]:
        run()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    for leaf in leaves:
        leaf.grad = None
    return peak_above_results(gradients)[1]
