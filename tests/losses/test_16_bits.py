"""Losses in plain PyTorch multiply 16 bits as they are where a device adds such products up in float32."""

import pytest
import torch

import fastqt
from tests.losses.test_every_loss import copied, eager_with_gradients, error, made, with_gradients
from tests.shared.tolerances import EAGER_FACTOR, HALF_ULP, UNIT_ROUNDOFF, relative
from tests.shared.wide_products import SIXTEEN_BITS, products_into_float32


@pytest.mark.parametrize("converged", [False, True], ids=["random", "converged"])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("name", ["distillation_loss", "maxsim_loss"])
def test_products_read_16_bits_and_errors_are_at_most_eagers(name, dtype, converged):
    ours, eagers = [], []
    for seed in range(4):
        loss, inputs = made(name, dtype, seed=seed, converged=converged)
        with products_into_float32("CPU") as multiplied:
            found = with_gradients(loss.function, inputs, **loss.options)
        assert set(multiplied) == {dtype}
        exact = eager_with_gradients(loss, copied(inputs, torch.float64), found[0])
        eager = eager_with_gradients(loss, copied(inputs), found[0])
        ours.append([error(a, b) for a, b in zip(found, exact, strict=True)])
        eagers.append([error(a, b) for a, b in zip(eager, exact, strict=True)])
    found, wanted = (torch.tensor(x).mean(0) for x in (ours, eagers))
    assert (found <= EAGER_FACTOR * wanted + HALF_ULP[torch.float32]).all(), (found, wanted)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_small_gradients_keep_their_digits(dtype):
    """Near its teacher a student has probabilities that differ by less than float16 holds."""
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(2, 300, 16, generator=generator).to(dtype)
    student = teacher.clone()
    student[:, ::7] *= 1 + 2**-7  # a difference that bfloat16 has

    def gradients(sides: torch.Tensor) -> torch.Tensor:
        leaves = sides.clone().requires_grad_()
        loss = fastqt.distillation_loss(
            *leaves, *teacher, scale=0.005, teacher_scale=0.005, normalize=False, reduction="none"
        )
        weights = torch.logspace(-4, 0, len(loss))
        return torch.autograd.grad(loss, leaves, weights)[0].double()

    with products_into_float32("CPU"):
        found = gradients(student)
    assert relative(found, gradients(student)) < 4 * UNIT_ROUNDOFF[dtype]
