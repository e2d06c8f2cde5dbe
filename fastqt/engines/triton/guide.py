"""Rows of a guide on a GPU: products in 16 bits, and a kernel that sums again what they do not decide."""

from __future__ import annotations

import torch
from torch import Tensor

from fastqt.devices import AMD
from fastqt.engines import products
from fastqt.exclusions.guide import factors_and_norms
from fastqt.torch_modes import adds_up_in_float16

ROUNDING = torch.finfo(torch.float32).eps / 2  # of a result in float32, relative to it
LEAST = torch.finfo(torch.float32).tiny  # below which results may be rounded to 0
# A tensor core adds some products to a sum at once, and cuts off of each, and of the sum, what is below the
# last bit of the largest. That is less than two roundings each: four for every product, if it adds one at a
# time. What is known of the tensor cores of Ampere, Hopper and Blackwell is less than half of that.
ROUNDINGS_OF_PRODUCT = 4
MORE_ROUNDINGS = 32  # those of factors, of their products, of subnormal elements, and of the comparison
# Elements of float32 are rounded to float16, which is half of a last bit for each of two factors. That needs
# rows of about one norm; this one leaves elements room for squares, and few of them are subnormal numbers.
UNIT_NORM = 2.0**12
OF_ROUNDED = torch.finfo(torch.float16).eps
NORMS = 1e-30, 1e30  # of rows that can be brought to that norm in float32


def takes(dtype: torch.dtype) -> bool:
    """Whether embeddings of a dtype are multiplied in 16 bits, and products added up in float32.

    Not on AMD's GPUs, of whose matrix units these bounds are not, and which are as fast in float64.
    """
    if AMD or dtype is torch.float64:
        return False
    return dtype is torch.bfloat16 or not adds_up_in_float16()


class GuideKernels:
    """Some rows of a guide's queries, as `GuideRows`.

    Embeddings of 16 bits are multiplied as they are. Those of float32 are rounded to float16 at one norm: a
    product of 16 bits takes a small part of the time of one in float32, reads half of the bytes, and does not
    depend on whether TF32 is allowed. Its error of 0.001 in a cosine leaves few cells for sums in float64.
    Three products of two parts each would leave fewer, in three times the time.
    """

    cell_bytes = 4  # of a product

    def __init__(self, queries: Tensor, thresholds: Tensor, *, normalize: bool) -> None:
        self.queries, self.thresholds, self.normalize = queries, thresholds, normalize
        self.of_units = queries.dtype is torch.float32
        self.operand, self.rows = self._operand(queries)

        roundings = ROUNDINGS_OF_PRODUCT * queries.shape[1] + MORE_ROUNDINGS
        self.error = 1.01 * (roundings * ROUNDING + OF_ROUNDED * self.of_units)
        self.least_error = roundings * LEAST

    def write_above(self, mask: Tensor, candidates: Tensor) -> None:
        """Writes to `mask` (n, m) which scores with candidates (m, E) are above their rows' thresholds."""
        operand, columns = self._operand(candidates)
        self._write(mask, candidates, self._products(operand), columns)

    def masks_both_ways(self, candidates: GuideKernels) -> tuple[Tensor, Tensor]:
        """(n, m) bool each: the scores above their rows' thresholds, and those above their columns'.

        The columns are the rows of another guide's part, of the same kind. One product serves both.
        """
        n, m = len(self.queries), len(candidates.queries)
        of_rows, of_columns = (self.thresholds.new_empty(x, dtype=torch.bool) for x in ((n, m), (m, n)))
        approximate = self._products(candidates.operand)
        self._write(of_rows, candidates.queries, approximate, candidates.rows)
        candidates._write(of_columns, self.queries, approximate.T.contiguous(), self.rows)
        return of_rows, of_columns.T.contiguous()

    def _products(self, operand: Tensor) -> Tensor:
        """(n, m) float32, with the operand of candidates."""
        approximate = operand.new_empty(len(self.queries), len(operand), dtype=torch.float32)
        products.multiply(approximate, self.operand, operand.T, add=False)
        return approximate

    def _write(
        self, mask: Tensor, candidates: Tensor, approximate: Tensor, columns: tuple[Tensor, Tensor]
    ) -> None:
        from fastqt.kernels.guide import write_above

        write_above(
            mask,
            approximate,
            self.queries,
            candidates,
            self.thresholds,
            self.rows,
            columns,
            of_units=self.of_units,
            multiplier=UNIT_NORM**-2 if self.of_units else 1.0,
            error=self.error,
            least_error=self.least_error,
        )

    def _operand(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """What stands for embeddings (n, E) in the product, and their factors and lengths, (n,) float64."""
        factors, norms = factors_and_norms(x, self.normalize)
        lengths = factors * norms
        if not self.of_units:
            return x, (factors, lengths)

        least, most = NORMS
        scales = (UNIT_NORM / norms.clamp(min=least)).float()
        # No product decides cells of rows that have another norm then: their bounds are NaN.
        usable = (norms == 0) | ((norms >= least) & (norms <= most))
        return (x * scales[:, None]).half(), (factors, lengths.where(usable, torch.nan))
