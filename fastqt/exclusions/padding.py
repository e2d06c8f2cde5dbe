"""Row negatives that are only padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastqt.checks import check_tensor
from fastqt.exclusions.filter import Cells, Filter, check_length


@dataclass(frozen=True, eq=False)
class Padding(Filter):
    """Excludes row negatives that are only padding, where rows have different numbers of them.

    Row negatives are (N, K, D), with K the most that a row has. What stands in the other places has to be
    finite, gets a gradient of 0, and changes nothing. A row may have no negative of its own at all.

    Args:
        is_padding: (N, K) bool, True where there is no negative, as `key_padding_mask` of
            `torch.nn.MultiheadAttention` has it.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> queries, candidates = torch.randn(2, 4, 16)
        >>> hard = torch.randn(4, 3, 16)  # up to three of each query alone
        >>> counts = torch.tensor([3, 0, 1, 2])
        >>> padding = fastqt.Padding(torch.arange(3) >= counts[:, None])
        >>> loss = fastqt.info_nce_loss(queries, candidates, row_negatives=hard, exclude=padding)
        >>> loss < fastqt.info_nce_loss(queries, candidates, row_negatives=hard)
        tensor(True)
    """

    is_padding: Tensor

    def __post_init__(self) -> None:
        check_tensor("is_padding", self.is_padding)
        if self.is_padding.dtype is not torch.bool:
            raise TypeError(f"is_padding: want a bool tensor, got {self.is_padding.dtype}")
        if self.is_padding.dim() != 2:
            raise ValueError(f"is_padding: want shape (N, K), got {tuple(self.is_padding.shape)}")

    def check(self, name: str, cells: Cells) -> None:
        check_length(name, "rows of padding", self.is_padding, cells.N)
        if self.is_padding.device != cells.device:
            raise ValueError(
                f"{name}: want padding on {cells.device} as queries, got {self.is_padding.device}"
            )
