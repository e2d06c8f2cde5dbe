"""Scores as the losses of fastqt take them, and what they give as the program has it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastqt.promises.promise import Promise
from fastqt.promises.rules import RULES
from fastqt.promises.scores import Product, Scores, equal, width


class Columns(NamedTuple):
    """Scores as the general losses take them.

    Attributes:
        options: of these losses.
        first: where the columns of the product begin that has targets.
        numbers: (N, k), columns that are numbers, and before which product they stand.
    """

    options: dict[str, Any]
    first: int
    product: Product
    numbers: Tensor | None

    @property
    def without_numbers(self) -> dict[str, Any]:
        """The options of the products alone."""
        return self.options | {"row_scores": None}


def columns_of(scores: Scores) -> Columns | None:
    """The scores as arguments of the losses; None where they cannot have them."""
    blocks = _for_loss(scores.blocks)
    product = next(x for x in blocks if isinstance(x, Product))
    first = sum(map(width, itertools.takewhile(lambda block: block is not product, blocks)))
    more, numbers = [], []
    for block in blocks:
        if isinstance(block, Tensor):
            numbers.append(block)
        elif block is not product:
            same = block.queries is product.queries and equal(block.scale, product.scale)
            if not same or not block.is_plain or not block.has_no_bias or not product.has_no_bias:
                return None
            more.append(block.candidates)

    of_rows = torch.cat(numbers, 1) if numbers else None
    options: dict[str, Any] = {
        "queries": product.queries,
        "candidates": product.candidates,
        "scale": product.scale,
        "bias": product.bias,
        "exclude": product.mask,
        "diagonal": product.diagonal,
        "negatives": torch.cat(more) if more else None,
        "normalize": product.is_cosine,
    }
    if of_rows is not None:
        options["row_scores"] = of_rows
    if not isinstance(product.scale, Tensor) and product.scale <= 0:
        options |= {"queries": product.queries * product.scale, "scale": 1.0}
    return Columns(options, first, product, of_rows)


def _for_loss(blocks: tuple[Product | Tensor, ...]) -> list[Product | Tensor]:
    """The blocks as one loss can have them: all of cosines or all of rows."""
    for_loss = [x.for_loss() if isinstance(x, Product) else x for x in blocks]
    products = [x for x in for_loss if isinstance(x, Product)]
    # The scale of cosines is above 0, unless it is a tensor.
    are_cosines = all(x.is_cosine and (isinstance(x.scale, Tensor) or x.scale > 0) for x in products)
    return for_loss if are_cosines else [x.of_rows() if isinstance(x, Product) else x for x in blocks]


def computed(loss: Callable[..., Tensor], **options: Any) -> Any:
    """A loss; NotImplemented where it refuses what plain PyTorch has an answer to."""
    try:
        value = loss(**options)
    except (ValueError, TypeError):
        return NotImplemented
    RULES.taken = f"fastqt.{loss.__name__}"
    return value


def with_rows(result: Tensor, scores: Scores) -> Tensor:
    """A result that what is added to whole rows does not change, unless that is no number."""
    for row in () if scores.row is None else scores.row.tensors:
        result = result + 0 * row.sum()
    return result


def like(result: Any, s: Promise, function_casts: bool = True) -> Any:
    """A result in the dtype that plain PyTorch's has."""
    if result is NotImplemented:
        return result
    in_float32 = function_casts and torch.is_autocast_enabled(s.device.type)
    return result.to(torch.float32 if in_float32 else s.dtype)


def is_plain(scores: Scores) -> bool:
    return len(scores.blocks) == 1 and scores.first.is_plain
