"""CoSENT and AnglE: pairs of texts ranked by their labels, by the cosine or in complex space."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.arguments import Rows, Scale
from fastqt.devices import accumulation_dtype
from fastqt.distributed.group import GroupLike
from fastqt.loss import Arguments, loss
from fastqt.losses.lsep import Ranks, ranking_loss
from fastqt.norms import LEAST_NORM
from fastqt.problem import loss_dtype


@loss("CoSENTLoss")
def cosent_loss(
    call: Arguments,
    a: Rows,
    b: Rows,
    labels: Ranks,
    *,
    scale: Scale = 20.0,
    group: GroupLike | None = None,
) -> Tensor:
    """`lsep_loss` of the cosines of pairs: a pair of a higher label is to have a higher cosine.

    log(1 + sum exp(scale (cos_j - cos_i))) over all pairs i and j for which label i is greater than label j,
    by one sort. It takes O(N D + N log N).

    Args:
        a, b: (N, D) floating point, whose rows of equal index are a pair; float16 and bfloat16 are computed
            in float32.
        labels: (N,) numbers or bools on their device, such as how similar two texts are. Only their order
            counts, and equal labels are not compared.
        scale: 1 / temperature, a number or 0-d tensor (differentiable).
        group: as of `contrastive_loss`. Pairs of all ranks are compared; only their cosines and labels
            travel, and no gradients.

    Returns:
        A scalar, of the whole batch; float64 for float64 inputs, float32 otherwise.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> a, b = torch.randn(2, 8, 16)
        >>> fastqt.cosent_loss(a, b, labels=torch.rand(8)).shape
        torch.Size([])
        >>> b = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # cosines of 1 and 0
        >>> round(fastqt.cosent_loss(torch.eye(2)[:1].repeat(2, 1), b, torch.tensor([0, 1])).item(), 4)
        20.0

    Source: Su, "CoSENT" (2022), and Huang et al., "CoSENT: Consistent sentence embedding via similarity
    ranking" (2024).
    """
    return ranking_loss(call.batch, row_cosines(a, b), labels, scale).to(loss_dtype(a))


@loss("AnglELoss")
def angle_loss(
    call: Arguments,
    a: Rows,
    b: Rows,
    labels: Ranks,
    *,
    scale: Scale = 20.0,
    group: GroupLike | None = None,
) -> Tensor:
    """`cosent_loss` with AnglE's similarity in complex space in place of the cosine.

    The first half of a row is the real part of D / 2 complex numbers, and the second half the imaginary one;
    a row of odd width gets a zero at its end. With rows at norm 1, the similarity is the absolute value of
    the sum of the real and imaginary parts of a times the conjugate of b.

    Args:
        a, b, labels, group: as of `cosent_loss`.
        scale: 1 / temperature, a number or 0-d tensor (differentiable).

    Returns:
        A scalar, of the whole batch; float64 for float64 inputs, float32 otherwise.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> a, b = torch.randn(2, 8, 16)
        >>> fastqt.angle_loss(a, b, labels=torch.rand(8)).shape
        torch.Size([])
        >>> one, i = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # i times the conjugate of 1 is i
        >>> pairs = torch.stack([i, i]), torch.stack([one, -one])  # similarities of 1 and 1
        >>> round(fastqt.angle_loss(*pairs, torch.tensor([0, 1])).item(), 4)  # log 2
        0.6931

    Source: Li and Li, "AnglE-optimized text embeddings" (2023), as their released code has the similarity.
    """
    return ranking_loss(call.batch, angle_similarity(a, b), labels, scale).to(loss_dtype(a))


def angle_similarity(
    a: Tensor,  # (N, D)
    b: Tensor,  # (N, D)
) -> Tensor:
    """AnglE's similarity of each row of a with that of b, (N,)."""
    odd = a.shape[1] % 2
    a, b = F.pad(a, (0, odd)), F.pad(b, (0, odd))
    real, imaginary = b.to(loss_dtype(b)).chunk(2, 1)
    # Re + Im of (p + i q)(r - i t) is p (r - t) + q (r + t): the inner product with b turned by 45 degrees,
    # times the square root of 2, which is also what the norm of the turned row is too large by.
    turned = torch.cat([real - imaginary, real + imaginary], 1)
    return math.sqrt(2) * row_cosines(a, turned, math.sqrt(2) * LEAST_NORM).abs()


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
