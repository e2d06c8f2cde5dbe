"""Targets from a sparse matrix in compressed rows, whose indices are checked and whose cells are summed."""

from __future__ import annotations

import torch
from torch import Tensor

from fastqt.checks import FLOATING, require
from fastqt.devices import accumulation_dtype
from fastqt.targets.base import TargetRows, Targets, check_shape


class Sparse(Targets):
    """Targets from a sparse CSR tensor.

    Args:
        csr_tensor: (N, M), layout torch.sparse_csr, floating point, entries >= 0. A cell that occurs several
            times has the sum of its entries, as in torch. No gradient flows to it.

    Raises:
        ValueError: another layout, a tensor that is not 2-D, or row boundaries that do not rise from 0 to
            the number of entries. On a GPU these trigger an assertion on the device.
        TypeError: not a tensor, or a dtype that is not floating point.

    Example:
        >>> import torch, fastqt
        >>> weights = torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])
        >>> targets = fastqt.Sparse(weights.to_sparse_csr())
        >>> queries, candidates = torch.randn(2, 16), torch.randn(3, 16)
        >>> fastqt.contrastive_loss(queries, candidates, targets, diagonal="keep", reduction="none").shape
        torch.Size([2])
    """

    def __init__(self, csr_tensor: Tensor) -> None:
        if not isinstance(csr_tensor, Tensor):
            raise TypeError(f"csr_tensor: want a tensor, got {type(csr_tensor).__name__}")
        if csr_tensor.layout is not torch.sparse_csr or csr_tensor.dim() != 2:
            advice = "; convert it by to_sparse_csr()" if csr_tensor.dim() == 2 else ""
            raise ValueError(
                f"csr_tensor: want a 2-D tensor of layout torch.sparse_csr, got {csr_tensor.dim()}-D of "
                f"layout {csr_tensor.layout}{advice}"
            )
        if csr_tensor.dtype not in FLOATING:
            raise TypeError(f"csr_tensor: want a floating-point dtype, got {csr_tensor.dtype}")
        if csr_tensor.is_meta:
            raise ValueError("csr_tensor: want a tensor with values, got one on the device meta")

        csr_tensor = csr_tensor.detach()
        self.shape = tuple(csr_tensor.shape)
        starts, columns = csr_tensor.crow_indices().long(), csr_tensor.col_indices().long()
        weights = csr_tensor.values()
        _check_indices(starts, columns, weights, self.shape[0])
        self._rows = TargetRows(
            *_summed(starts, columns, weights.to(accumulation_dtype(weights.device)), self.shape[1])
        )

    def check(self, N: int, M: int, diagonal: str) -> None:
        check_shape(self.shape, N, M)

    def rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        starts, columns, weights = self._rows.compressed()
        return TargetRows(
            starts.to(device), columns.to(device), weights.to(device, accumulation_dtype(device))
        )


def _check_indices(starts: Tensor, columns: Tensor, weights: Tensor, N: int) -> None:
    """That the boundaries of N rows rise from 0 to the number of entries: engines read by them."""
    entries = columns.numel()
    if tuple(starts.shape) != (N + 1,) or columns.dim() != 1 or columns.shape != weights.shape:
        raise ValueError(
            f"csr_tensor: want N + 1 = {N + 1} crow_indices and a value for each of {entries} col_indices, "
            f"got {starts.numel()} and {weights.numel()}"
        )
    rising = (starts[0] == 0) & (starts[-1] == entries) & (starts.diff() >= 0).all()
    require(
        rising,
        "csr_tensor: want crow_indices that rise from 0 to {entries}, the entries",
        starts,
        entries=entries,
    )


def _summed(
    starts: Tensor,  # (N + 1,)
    columns: Tensor,  # (nnz,)
    weights: Tensor,  # (nnz,)
    M: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows with the sum of a cell's entries at its first one, and 0 at the others."""
    row = torch.repeat_interleave(starts.diff(), output_size=columns.numel())
    if columns.is_cpu:
        rising = (columns[1:] > columns[:-1]) | (row[1:] != row[:-1])
        if bool(rising.all()) or bool(((columns < 0) | (columns >= M)).any()):
            return starts, columns, weights  # Engines name the row of a column outside.
    else:  # Asking for the values would make the host wait.
        require(
            ((columns >= 0) & (columns < M)).all(), "csr_tensor: want col_indices in 0..{last}", last=M - 1
        )
    # Sorted by row and column, the entries of a cell follow each other.
    order = (row * M + columns).argsort(stable=True)
    columns, weights = columns[order], weights[order]
    first = torch.ones_like(columns, dtype=torch.bool)
    first[1:] = (columns[1:] != columns[:-1]) | (row[1:] != row[:-1])
    cell = first.cumsum(0) - 1
    sums = torch.zeros_like(weights).index_add_(0, cell, weights)
    return starts, columns, sums[cell].where(first, 0)
