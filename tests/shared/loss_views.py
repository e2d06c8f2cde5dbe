"""What the tests of the losses share: views of sentences, and a comparison of values and gradients."""

import pytest
import torch

from tests.shared.tolerances import FLOAT64, relative

N, D, K = 9, 5, 4
BACKENDS = ("cpu", "torch", "reference")
by_backend = pytest.mark.parametrize("backend", BACKENDS)
by_memory = pytest.mark.parametrize("memory", ["fast", "low", 2**25])


def views(*rows: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, D, generator=generator, dtype=torch.float64, requires_grad=True) for n in rows]


def cosines(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a @ b.T) / a.norm(dim=1)[:, None] / b.norm(dim=1)


def check(
    loss: torch.Tensor,
    expected: torch.Tensor,
    inputs: list[torch.Tensor],
    tolerance: float = FLOAT64,
    of_expected: list[torch.Tensor] | None = None,  # the inputs of the expected loss, if they are others
) -> None:
    assert relative(loss, expected) < tolerance
    found = torch.autograd.grad(loss.sum(), inputs, allow_unused=True)
    wanted = torch.autograd.grad(expected.sum(), of_expected or inputs, allow_unused=True, retain_graph=True)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None or not a.any()) if b is None else relative(a, b) < tolerance
