"""A memory bank: embeddings of earlier batches, first in, first out."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastqt.checks import FLOATING, check_embeddings, check_flag, check_size, check_tensor, shown
from fastqt.distributed.agreement import agree, facts_of_embeddings
from fastqt.distributed.group import Group, GroupLike, as_group
from fastqt.distributed.local import local_rows, with_a_row
from fastqt.ids import as_ids

MOST_ENQUEUED = 2**62  # With further rows the count stays below the end of int64.


class Queue(nn.Module):
    """The last `size` embeddings that were enqueued, as negatives or candidates of later batches.

        negatives = queue.embeddings  # None until something has been enqueued
        loss = fastqt.info_nce_loss(queries, keys, negatives=negatives)
        queue.enqueue(keys)
        loss.backward()

    Its rows are buffers, which move with the module and are saved in its state dict, as is how many there are
    and where the next ones go. They have no gradient. While the queue fills, reading it waits for a GPU and
    interrupts a graph of torch.compile; once it is full, neither happens. `load_state_dict` loads all of it,
    or nothing where a part is missing or wrong, which its RuntimeError names.

    Args:
        size: the most rows that it holds.
        width: D, the width of the embeddings.
        dtype: what the rows are stored in; that of the loss's other embeddings, which it compares.
        device: where the rows are stored.
        labels: whether each row has a label.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> queue = fastqt.nn.Queue(4096, 16)
        >>> for queries, keys in torch.randn(3, 2, 8, 16):
        ...     loss = fastqt.info_nce_loss(queries, keys, negatives=queue.embeddings)
        ...     queue.enqueue(keys)
        >>> queue.embeddings.shape
        torch.Size([24, 16])

    Source: He et al., "Momentum contrast for unsupervised visual representation learning" (2020); Wang et
    al., "Cross-batch memory for embedding learning" (2020).
    """

    rows: Tensor  # (size, D)
    row_labels: Tensor | None  # (size,) int64
    enqueued: Tensor  # () int64: how many rows were enqueued, those that have been overwritten included

    def __init__(
        self,
        size: int,
        width: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | int | None = None,
        labels: bool = False,
    ) -> None:
        super().__init__()
        check_size("size", size)
        check_size("width", width)
        check_flag("labels", labels)
        if dtype not in FLOATING:
            raise TypeError(f"dtype: want a floating-point dtype of 16 to 64 bits, got {dtype}")
        self.size, self.width = size, width
        integer: dict[str, Any] = {"dtype": torch.int64, "device": device}
        self.register_buffer("rows", torch.zeros(size, width, dtype=dtype, device=device))
        self.register_buffer("row_labels", torch.zeros(size, **integer) if labels else None)
        self.register_buffer("enqueued", torch.zeros((), **integer))
        # Whether it was full when it was last read, and which tensor of which version the count was then: who
        # copies into the buffers makes another version.
        self._full, self._read = False, (0, 0)

    def reset_parameters(self) -> None:
        """Empties the queue, as after `to_empty` of one that was made on the meta device."""
        for buffer in self.buffers():
            buffer.zero_()
        self._full = False

    @property
    def filled(self) -> int:
        """How many rows it holds."""
        if self._full and (torch.compiler.is_compiling() or self._read == self._count_now()):
            return self.size
        count = int(self.enqueued)
        self._full, self._read = count >= self.size, self._count_now()
        return min(count, self.size)

    def _count_now(self) -> tuple[int, int]:
        """Which tensor the count is, and how often it was written to; (0, 0) where torch does not know it."""
        if torch.compiler.is_compiling() or self.enqueued.is_inference():
            return 0, 0
        return id(self.enqueued), self.enqueued._version

    @property
    def embeddings(self) -> Tensor | None:
        """A copy of the rows (filled, D), which later calls of `enqueue` do not change; None if it is empty.

        They are in the order in which they were enqueued until the queue is full. Then each new row takes the
        place of the oldest.
        """
        filled = self.filled
        return self.rows[:filled].clone() if filled else None

    @property
    def labels(self) -> Tensor | None:
        """A copy of the labels (filled,) of `embeddings`; None if there are no rows, or no labels."""
        filled = self.filled
        return self.row_labels[:filled].clone() if filled and self.row_labels is not None else None

    def shard(self, group: GroupLike) -> Tensor | None:
        """This rank's part of `embeddings`, for a loss with `group=`, which joins the negatives of all ranks.

        All ranks hold the same rows, and with all of them given by each rank they would count several times.

        Args:
            group: of the loss. While the queue fills, and if its size is no multiple of the number of ranks,
                it has to be a `Group(shards="uneven")`.

        Returns:
            A copy (K, D), where ranks' K differ by 1 at most; None if the queue is empty.
        """
        ranks, filled = as_group(group), self.filled
        return self.rows[ranks.rank : filled : ranks.size].clone() if filled else None

    @torch.no_grad()
    def enqueue(
        self, embeddings: Tensor, labels: Tensor | None = None, *, group: GroupLike | None = None
    ) -> None:
        """Stores rows in the place of the oldest ones; of more than `size` rows the last.

        Losses and graphs that were made before are not changed by it, so that it may come before `backward`.

        Args:
            embeddings: (n, D) floating point, on the queue's device; n may be 0 without a group.
            labels: (n,) integers, if the queue was made with labels.
            group: the processes whose rows are stored, in the order of the ranks, on every one of them.

        Raises:
            ValueError, TypeError: naming the argument, what is wanted and what came.
        """
        local = embeddings

        def check(ranks: Group | None) -> dict[str, int]:
            nonlocal local
            local = local_rows(ranks, "embeddings", embeddings)
            self._check(local, labels)
            if ranks is not None:
                check_embeddings(embeddings=with_a_row(ranks, local))
            return {"embeddings": len(local)}

        def facts(ranks: Group) -> dict[str, Hashable]:
            return {
                "size": self.size,
                "dtype of the queue": str(self.rows.dtype),
                "labels of the queue": self.row_labels is not None,
                **facts_of_embeddings(local),
            }

        batch = agree(group, "fastqt.nn.Queue.enqueue", check, facts)
        added = batch.gather_constant(local.detach().to(self.rows.dtype), "embeddings")
        new_labels = None
        if labels is not None:
            new_labels = batch.gather_constant(as_ids("labels", labels).to(added.device), "embeddings")

        kept = min(len(added), self.size)
        dropped = len(added) - kept
        places = (self.enqueued + dropped + torch.arange(kept, device=added.device)) % self.size
        self.rows.index_copy_(0, places, added[dropped:])
        if self.row_labels is not None and new_labels is not None:
            self.row_labels.index_copy_(0, places, new_labels[dropped:])
        # A compiled step would be guarded by a count that the next one changes.
        known = not torch.compiler.is_compiling() and self._read == self._count_now()
        self.enqueued += len(added)
        if known:  # More rows leave a full queue full.
            self._read = self._count_now()

    def extra_repr(self) -> str:
        labels = ", labels=True" if self.row_labels is not None else ""
        return f"{self.size}, {self.width}, dtype={self.rows.dtype}{labels}"

    def _check(self, embeddings: Tensor, labels: Tensor | None) -> None:
        check_tensor("embeddings", embeddings)
        if embeddings.dim() != 2 or embeddings.shape[1] != self.width:
            raise ValueError(f"embeddings: want shape (n, {self.width}), got {tuple(embeddings.shape)}")
        if embeddings.dtype not in FLOATING:
            raise TypeError(
                f"embeddings: want a floating-point dtype of 16 to 64 bits, got {embeddings.dtype}"
            )
        if embeddings.device != self.rows.device:
            raise ValueError(
                f"embeddings: want device {self.rows.device} as the queue, got {embeddings.device}"
            )
        if (labels is None) == (self.row_labels is not None):
            wanted = "a label for each row, as the queue has labels" if labels is None else "None"
            raise ValueError(f"labels: want {wanted}, got {'None' if labels is None else 'labels'}")
        if labels is not None and as_ids("labels", labels).numel() != len(embeddings):
            raise ValueError(f"labels: want {len(embeddings)}, one a row, got {labels.numel()}")

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Loads the whole state or, where a part of it is missing or wrong, nothing."""
        wanted = {prefix + name: buffer for name, buffer in self.named_buffers(recurse=False)}
        missing = [key for key in wanted if key not in state_dict]
        present = [(key, state_dict[key], buffer) for key, buffer in wanted.items() if key in state_dict]
        errors = [error for part in present for error in self._wrong(*part)]
        if missing or errors:
            missing_keys.extend(missing)
            error_msgs.extend(errors)
            return
        self._full = False
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _wrong(self, key: str, value: object, buffer: Tensor) -> Iterator[str]:
        """What is wrong with a part of a state dict that is to be loaded into a buffer."""
        if not isinstance(value, Tensor):
            yield f"{key}: want a tensor, got {shown(value)}"
        elif value.shape != buffer.shape:
            yield f"{key}: want shape {tuple(buffer.shape)}, got {tuple(value.shape)}"
        elif buffer.is_floating_point() and value.dtype not in FLOATING:
            yield f"{key}: want a floating-point dtype of 16 to 64 bits, got {value.dtype}"
        elif not buffer.is_floating_point() and value.dtype is not torch.int64:
            yield f"{key}: want dtype torch.int64, got {value.dtype}"
        elif buffer is self.enqueued and not value.is_meta and not 0 <= int(value) <= MOST_ENQUEUED:
            yield f"{key}: want how many rows were enqueued, from 0 to 2**62, got {int(value)}"
