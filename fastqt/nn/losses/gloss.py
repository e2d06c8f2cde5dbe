"""GLOSS's two losses as modules."""

from __future__ import annotations

from typing import ClassVar

from fastqt import losses
from fastqt.distributed.group import GroupLike
from fastqt.losses.gloss import POSITION_LOSSES
from fastqt.nn.losses.base import Loss, given
from fastqt.options import Backend, Memory, PositionLoss, Reduction


class GlossBagOfWordsLoss(Loss):
    """`fastqt.gloss_bow_loss` with its options fixed.

    A call takes latents, weight, bias, token_ids and offsets.

    Args:
        reduction, memory, backend, group: as of `fastqt.gloss_bow_loss`.

    Raises:
        TypeError, ValueError: as in `ContrastiveLoss`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.GlossBagOfWordsLoss()
        >>> latents, weight, bias = torch.randn(2, 8), torch.randn(10, 8), torch.zeros(10)
        >>> words, offsets = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 3])  # of three words and of one
        >>> criterion(latents, weight, bias, words, offsets).shape
        torch.Size([])
    """

    function = staticmethod(losses.gloss_bow_loss)

    def __init__(
        self,
        *,
        reduction: Reduction = "mean",
        memory: Memory = "fast",
        backend: Backend | None = None,
        group: GroupLike | None = None,
    ) -> None:
        super().__init__(**given(locals()))


class GlossPositionalLoss(Loss):
    """`fastqt.gloss_pos_loss` with its options fixed.

    A call takes latents, positions, weight, bias, token_ids and lengths.

    Args:
        position_loss, reduction, memory, backend, group: as of `fastqt.gloss_pos_loss`.

    Raises:
        TypeError, ValueError: as in `ContrastiveLoss`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.GlossPositionalLoss(position_loss="mean")
        >>> latents, positions = torch.randn(2, 8), torch.randn(3, 8)
        >>> weight, bias = torch.randn(10, 8), torch.zeros(10)
        >>> words, lengths = torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([3, 1])
        >>> criterion(latents, positions, weight, bias, words, lengths).shape
        torch.Size([])
    """

    function = staticmethod(losses.gloss_pos_loss)
    choices: ClassVar[dict[str, tuple[str, ...]]] = {"position_loss": POSITION_LOSSES}

    def __init__(
        self,
        *,
        position_loss: PositionLoss = "sum",
        reduction: Reduction = "mean",
        memory: Memory = "fast",
        backend: Backend | None = None,
        group: GroupLike | None = None,
    ) -> None:
        super().__init__(**given(locals()))
