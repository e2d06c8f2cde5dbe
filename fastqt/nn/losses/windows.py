"""The losses as modules of sentences and their neighbours: max-margin, binary windows and CURL."""

from __future__ import annotations

from typing import ClassVar

from fastqt import losses
from fastqt.distributed.group import GroupLike
from fastqt.losses.curl import BLOCK_NEGATIVES
from fastqt.losses.max_margin import MARGIN_DIAGONALS
from fastqt.nn.losses.base import Loss, given
from fastqt.options import BlockNegatives, MarginDiagonal, Reduction


class MaxMarginLoss(Loss):
    """`fastqt.max_margin_loss` with its options fixed.

    A call takes queries, candidates, targets if they are no window, and the keyword argument `document_ids`.

    Args:
        margin, diagonal, context_size, normalize, reduction, group: as of `fastqt.max_margin_loss`.

    Raises:
        TypeError, ValueError: as in `ContrastiveLoss`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.MaxMarginLoss(margin=0.5, context_size=1)
        >>> queries, candidates = torch.randn(2, 8, 16)
        >>> criterion(queries, candidates, document_ids=torch.arange(8) // 4).shape
        torch.Size([])
    """

    function = staticmethod(losses.max_margin_loss)
    batch_arguments = ("document_ids",)
    choices: ClassVar[dict[str, tuple[str, ...]]] = {"diagonal": MARGIN_DIAGONALS}

    def __init__(
        self,
        *,
        margin: float = 1.0,
        diagonal: MarginDiagonal = "exclude",
        context_size: int | None = None,
        normalize: bool = False,
        reduction: Reduction = "mean",
        group: GroupLike | None = None,
    ) -> None:
        super().__init__(**given(locals()))


class BinaryWindowLoss(Loss):
    """`fastqt.binary_window_loss` with its options fixed.

    A call takes queries, candidates, and the keyword arguments `document_ids` and `generator`.

    Args:
        context_size, samples, reduction, group: as of `fastqt.binary_window_loss`.

    Raises:
        TypeError, ValueError: as in `ContrastiveLoss`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.BinaryWindowLoss(context_size=2, samples=3)
        >>> queries, candidates = torch.randn(2, 8, 16)
        >>> criterion(queries, candidates).shape
        torch.Size([])
    """

    function = staticmethod(losses.binary_window_loss)
    batch_arguments = ("document_ids", "generator")

    def __init__(
        self,
        *,
        context_size: int = 1,
        samples: int | None = None,
        reduction: Reduction = "mean",
        group: GroupLike | None = None,
    ) -> None:
        super().__init__(**given(locals()))


class CURLLoss(Loss):
    """`fastqt.curl_loss` with its options fixed.

    A call takes queries, positives and negatives, (N, D) each.

    Args:
        reduction, group: as of `fastqt.curl_loss`.

    Raises:
        TypeError, ValueError: as in `ContrastiveLoss`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.CURLLoss(reduction="none")
        >>> queries, positives, negatives = torch.randn(3, 8, 16)
        >>> criterion(queries, positives, negatives).shape
        torch.Size([8])
    """

    function = staticmethod(losses.curl_loss)

    def __init__(self, *, reduction: Reduction = "mean", group: GroupLike | None = None) -> None:
        super().__init__(**given(locals()))


class CURLBlockLoss(Loss):
    """`fastqt.curl_block_loss` with its options fixed.

    A call takes queries, candidates, and the keyword arguments `document_ids` and `generator`.

    Args:
        context_size, negatives, reduction, group: as of `fastqt.curl_block_loss`.

    Raises:
        TypeError, ValueError: as in `ContrastiveLoss`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.CURLBlockLoss(context_size=1, negatives="complement")
        >>> queries, candidates = torch.randn(2, 8, 16)
        >>> criterion(queries, candidates).shape
        torch.Size([])
    """

    function = staticmethod(losses.curl_block_loss)
    batch_arguments = ("document_ids", "generator")
    choices: ClassVar[dict[str, tuple[str, ...]]] = {"negatives": BLOCK_NEGATIVES}

    def __init__(
        self,
        *,
        context_size: int = 1,
        negatives: BlockNegatives = "shift",
        reduction: Reduction = "mean",
        group: GroupLike | None = None,
    ) -> None:
        super().__init__(**given(locals()))
