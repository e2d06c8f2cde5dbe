"""The cosine of each row with the row of equal index, in few passes over the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastqt.devices import accumulation_dtype
from fastqt.norms import LEAST_NORM
from fastqt.problem import loss_dtype


def row_cosines(
    a: Tensor,  # (N, D)
    b: Tensor,  # (N, D)
    least: float = LEAST_NORM,
) -> Tensor:
    """The cosine of each row of a with that of b, (N,), in the dtype in which a few numbers are added up.

    Shorter rows are divided by `LEAST_NORM`, those of b by `least`.
    """
    products, *squares = _row_products(a.to(loss_dtype(a)), b.to(loss_dtype(b)))
    dtype = accumulation_dtype(a.device)
    # Not the square root of the smallest norm itself, whose derivative at 0 is infinite.
    a_norms, b_norms = (
        x.to(dtype).clamp(min=norm**2).sqrt() for x, norm in zip(squares, (LEAST_NORM, least), strict=True)
    )
    return products.to(dtype) / (a_norms * b_norms)


class _RowProducts(torch.autograd.Function):
    """The inner products of rows with rows, and of each side with itself, (N,) each.

    Normalised rows would be two more matrices to write, to keep, and to differentiate.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (a * b).sum(1), (a * a).sum(1), (b * b).sum(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        of_product, of_a, of_b = (x[:, None] for x in upstream)
        d_a = torch.addcmul(of_product * b, a, 2 * of_a) if ctx.needs_input_grad[0] else None
        d_b = torch.addcmul(of_product * a, b, 2 * of_b) if ctx.needs_input_grad[1] else None
        return d_a, d_b


# torch gives `apply` no types.
_row_products: Callable[..., tuple[Tensor, Tensor, Tensor]] = _RowProducts.apply
