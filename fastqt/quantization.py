"""Vectors of 8 bits or of 1 bit a number, as a retriever stores them, with gradients for training.

Losses take the quantised vectors as they take others. Only the rounding has no derivative of its own: it
counts as the identity, the straight-through estimator, and everything around it has its exact derivative.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import get_args

import torch
from torch import Tensor

from fastqt.checks import FLOATING, check_embeddings, check_option, check_tensor, require
from fastqt.distributed.agreement import agree, facts_of_embeddings
from fastqt.distributed.group import Group, GroupLike
from fastqt.distributed.local import local_rows, with_a_row
from fastqt.options import Quantization

QUANTIZATIONS: tuple[str, ...] = get_args(Quantization)


def quantized(x: Tensor, precision: Quantization, ranges: Tensor | None = None) -> Tensor:
    """Embeddings as they are after quantisation, through which gradients flow to those before it.

        ranges = fastqt.quantization_ranges(torch.cat([queries, documents]))
        as_int8 = [fastqt.quantized(x, "int8", ranges) for x in (queries, documents)]
        as_binary = [fastqt.quantized(x, "binary") for x in (queries, documents)]
        loss = sum(fastqt.info_nce_loss(*pair) for pair in ((queries, documents), as_int8, as_binary))

    The values are those that sentence_transformers.quantize_embeddings stores, as floating-point numbers:

    - "int8": a range of each column is cut into 255 steps, and a number becomes that of the step in which it
      is: floor(255 (x - least) / (greatest - least)) - 128, from -128 to 127. Numbers outside the range
      become the nearest of these. A column whose range has no width has steps of 1.
    - "binary": 1 for numbers above 0, and -1 for all others, 0 too. The inner product of two vectors is D
      less twice the number of bits in which they differ, so both rank alike.

    The gradient is that of the values before they are rounded. For "int8" it is that of the upstream times
    255 / (greatest - least), and 0 outside the range. For "binary" it is that of the upstream divided by the
    mean of |x| over the vector: with that factor, its signs are the nearest to it. Thus a loss of cosines has
    gradients of one size for the vectors before and after quantisation, whatever their norms are. Ranges and
    the mean have no gradient.

    Each column is quantised alone. The first columns of quantised vectors are therefore the quantised first
    columns, with these columns of the ranges, and the losses' `matryoshka` takes the prefixes that an index
    can be cut to. Losses that normalise do so afterwards. Where an index holds vectors of norm 1, normalise
    before as well, which changes nothing for "binary".

    Args:
        x: (..., D) floating point. NaN stays NaN, for "binary" in the whole vector; an infinity is outside
            the range of "int8", and becomes NaN for "binary".
        precision: "int8" or "binary".
        ranges: of "int8", (2, D) floating point, the least and the greatest number of each column, as of
            `fastqt.quantization_ranges`; those of x itself if None. Queries and documents need the same.

    Returns:
        As x in shape and dtype. It is computed in float32, in float64 for float64, and the levels are exact
        in all dtypes.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> x = torch.tensor([[-2.0, 0.3], [0.0, -0.7], [5.0, 0.9]], requires_grad=True)
        >>> ranges = torch.tensor([[-1.0, -1.0], [1.0, 1.0]])
        >>> fastqt.quantized(x, "int8", ranges).tolist()
        [[-128.0, 37.0], [-1.0, -90.0], [127.0, 114.0]]
        >>> fastqt.quantized(x, "binary").tolist()
        [[-1.0, 1.0], [-1.0, -1.0], [1.0, 1.0]]

    Source: Bengio et al., "Estimating or propagating gradients through stochastic neurons for conditional
    computation" (2013), section 4 (straight-through); Jacob et al., "Quantization and training of neural
    networks for efficient integer-arithmetic-only inference" (2018), section 3 (ranges); Rastegari et al.,
    "XNOR-Net" (2016), eq. 6 (the mean of |x|).
    """
    check_option("precision", precision, QUANTIZATIONS)
    _check_vectors(x)
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    if precision == "int8":
        if ranges is not None:
            _check_ranges(ranges, x)
        unrounded, levels = _steps(values, _ranges_of(values) if ranges is None else ranges)
    elif ranges is None:
        unrounded, levels = _signs(values)
    else:
        raise ValueError("ranges: want None with precision 'binary', got a tensor")
    # A sum with 0, so that the levels are exact.
    return (levels.detach() + (unrounded - unrounded.detach())).to(x.dtype)


def quantization_ranges(x: Tensor, *, group: GroupLike | None = None) -> Tensor:
    """The least and the greatest number of each column, for `quantized` and to quantise an index by.

    Args:
        x: (N, D) floating point; what is to be quantised, or a sample of it.
        group: as of `contrastive_loss`: the ranges are those of the rows of all ranks, and on each the same.

    Returns:
        (2, D) without a gradient; float64 for float64 inputs, float32 otherwise.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> fastqt.quantization_ranges(torch.tensor([[0.0, -3.0], [0.5, 1.0], [1.0, 2.0]]))
        tensor([[ 0., -3.],
                [ 1.,  2.]])
    """
    local = x

    def check(ranks: Group | None) -> dict[str, int]:
        nonlocal local
        local = local_rows(ranks, "x", x)
        check_embeddings(x=with_a_row(ranks, local))
        return {"rows": 1}

    def facts(ranks: Group) -> Mapping[str, Hashable]:
        return facts_of_embeddings(local)

    batch = agree(group, "fastqt.quantization_ranges", check, facts)
    values = local.detach().to(torch.promote_types(local.dtype, torch.float32))
    if not len(values):
        nothing = torch.full_like(values.new_empty(values.shape[1]), torch.inf)
        return _joined(batch.gather_constant(torch.stack([nothing, -nothing])[None]))
    return _joined(batch.gather_constant(_ranges_of(values)[None]))


def _joined(ranges: Tensor) -> Tensor:
    """The range of several ranges (n, 2, D)."""
    return torch.stack([ranges[:, 0].amin(0), ranges[:, 1].amax(0)])


def _ranges_of(values: Tensor) -> Tensor:
    """The least and the greatest number of each column, (2, D)."""
    rows = values.detach().reshape(-1, values.shape[-1])
    return torch.stack([rows.amin(0), rows.amax(0)])


def _steps(values: Tensor, ranges: Tensor) -> tuple[Tensor, Tensor]:
    """Values in units of the steps of their range, and the numbers of the steps in which they are."""
    least, greatest = ranges.detach().to(values.dtype)
    steps = (greatest - least) / 255
    steps = torch.where(steps == 0, 1.0, steps)
    levels = ((values - least) / steps).floor().clamp(0, 255) - 128
    # The ends of a range belong to it, though their quotients may round to numbers beyond 0 and 255.
    inside = values.clamp(least, torch.maximum(greatest, least + 255 * steps))
    return inside / steps, levels


def _signs(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values in units of the mean size of their vector's, and their signs."""
    size = values.detach().abs().mean(-1, keepdim=True)
    unrounded = values / torch.where(size == 0, 1.0, size)
    return unrounded, torch.where(values > 0, 1.0, -1.0)


def _check_vectors(x: Tensor) -> None:
    check_tensor("x", x)
    if x.dtype not in FLOATING:
        raise TypeError(f"x: want a floating-point dtype of 16 to 64 bits, got {x.dtype}")
    if not x.dim() or 0 in x.shape:
        raise ValueError(f"x: want shape (..., D) with at least one vector, got {tuple(x.shape)}")


def _check_ranges(ranges: Tensor, x: Tensor) -> None:
    check_tensor("ranges", ranges)
    D = x.shape[-1]
    if tuple(ranges.shape) != (2, D):
        raise ValueError(f"ranges: want shape (2, D) = (2, {D}), got {tuple(ranges.shape)}")
    if ranges.dtype not in FLOATING:
        raise TypeError(f"ranges: want a floating-point dtype of 16 to 64 bits, got {ranges.dtype}")
    if ranges.device != x.device:
        raise ValueError(f"ranges: want device {x.device} as x, got {ranges.device}")
    # NaN, of a training that diverges, is no error here.
    ordered = ~(ranges[0] > ranges[1]).any()
    require(ordered, "ranges: want the least number of each column before the greatest")
