"""The memory of embeddings of earlier batches for `pytorch-metric-learning`."""

from __future__ import annotations

from typing import Any

from pytorch_metric_learning import losses
from torch import Tensor, nn

from fastqt.checks import check_size, shown
from fastqt.integrations.metric_learning.losses import OwnColumns, _FromLabels


class CrossBatchMemory(losses.CrossBatchMemory):
    """`pytorch_metric_learning.losses.CrossBatchMemory` without lists of all pairs.

    The queue is the library's. With a loss of `fastqt.integrations.metric_learning`, no miner and no
    indices_tuple, the loss is told which column of the queue is a row itself; the library lists all pairs of
    the batch with the memory instead. Other losses, and those with a miner, are given lists as there.

    Args:
        loss, embedding_size, memory_size, miner: as of the library's.

    Raises:
        TypeError, ValueError: a size that is no integer of at least 1, or a loss or miner that is no module.
        Exception: a loss that the library does not support here.

    Example:
        >>> import torch
        >>> from fastqt.integrations.metric_learning import CrossBatchMemory, SupConLoss
        >>> memory = CrossBatchMemory(SupConLoss(temperature=0.1), embedding_size=16, memory_size=64)
        >>> memory(torch.randn(8, 16), torch.arange(8) % 4).shape
        torch.Size([])
    """

    def __init__(
        self,
        loss: nn.Module,
        embedding_size: int,
        memory_size: int = 1024,
        miner: nn.Module | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(loss, nn.Module):
            raise TypeError(f"loss: want a module, got {shown(loss)}")
        if miner is not None and not isinstance(miner, nn.Module):
            raise TypeError(f"miner: want a module or None, got {shown(miner)}")
        check_size("embedding_size", embedding_size)
        check_size("memory_size", memory_size)
        super().__init__(loss, embedding_size, memory_size=memory_size, miner=miner, **options)

    def create_indices_tuple(
        self,
        embeddings: Tensor,
        labels: Tensor,
        E_mem: Tensor,
        L_mem: Tensor,
        input_indices_tuple: Any,
        do_remove_self_comparisons: bool,
    ) -> Any:
        """What the loss is given as its indices_tuple."""
        needs_lists = self.miner or input_indices_tuple is not None
        if needs_lists or not isinstance(self.loss, _FromLabels) or self.loss.reason is not None:
            return super().create_indices_tuple(
                embeddings, labels, E_mem, L_mem, input_indices_tuple, do_remove_self_comparisons
            )
        return OwnColumns(self.curr_batch_idx if do_remove_self_comparisons else None)
