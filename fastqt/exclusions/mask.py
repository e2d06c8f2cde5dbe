"""Cells that a user names one by one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fastqt.checks import check_mask
from fastqt.exclusions.filter import Cells, Filter


@dataclass(frozen=True, eq=False)
class Mask(Filter):
    """A bool tensor (N, M) that is True where a cell leaves the loss, which a user gives as it is."""

    called = "a bool tensor"

    cells: Tensor

    def check(self, name: str, cells: Cells) -> None:
        check_mask(name, self.cells, cells.N, None if cells.of_group else cells.M, cells.device)

    def turned(self) -> Mask:
        return Mask(self.cells.T)
