"""What every computation on a GPU has: its operands, the gradients that it writes, the memory it may take."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastqt.devices import on_gpu, properties
from fastqt.engines.triton.free_memory import room_within
from fastqt.problem import Gradients, Inputs, Needs, Problem, room_of

if TYPE_CHECKING:
    from fastqt.engines.triton.copies import Copies
    from fastqt.kernels.cells import RowNegatives

FAST_BYTES = 512 * 2**20  # beside inputs and gradients, the least
FAST_SHARE = 85  # of the device's memory, where that is more: 1 GB on a GPU of 80 GiB
LOW_BYTES = 40 * 2**20
ROW_MULTIPLE = 128

# E holds this many times the probabilities in float16, whose range is too small for exponentials with a
# rough shift. The logsumexp is found first there.
FP16_PROB_SCALE = 2.0**15


@dataclass
class Block:
    """Candidates or negatives: columns of E that are common to all rows."""

    matrix: Tensor  # (columns, D)
    operand: Tensor  # (columns, width): the matrix as products read it
    first: int  # column of E
    gradient: Tensor | None
    product: Tensor | None = None  # (columns, width) float32: the gradient's sum over chunks of rows

    @property
    def columns(self) -> slice:
        return slice(self.first, self.first + self.matrix.shape[0])


class Operands:
    """A problem with its row weights, its gradients to come, and what is found of its rows."""

    def __init__(
        self,
        p: Problem,
        weights: float | Tensor,
        needs: Needs,
        copies: Copies | None = None,
        *,
        kept: Tensor | None = None,  # of the scores, which the computation's room has too
    ) -> None:
        # This module is imported where Triton is not installed, and its modules with kernels are not.
        from fastqt.engines.triton.copies import Copies
        from fastqt.kernels.cells import RowNegatives

        self.p, self.needs = p, needs
        self.copies = copies or Copies.of(p, room_for(p))
        self.kept_bytes = 0 if kept is None else kept.nbytes
        self.N, self.D = p.queries.shape
        self.M = p.candidates.shape[0]
        new, dtype = p.queries.new_empty, p.queries.dtype
        self.scale = scale_tensor(p.queries.device, p.scale)
        self.equal_weight = None if isinstance(weights, Tensor) else weights
        if not isinstance(weights, Tensor):
            weights = p.queries.new_full((self.N,), weights, dtype=torch.float64)
        self.weights = weights  # (N,) float64: how much each row's loss counts
        # What is stored of probabilities is multiplied by this.
        self.prob_scale = FP16_PROB_SCALE if dtype is torch.float16 else 1.0

        def gradient_of(x: Tensor | None, wanted: bool | None) -> Tensor | None:
            return new(x.shape) if wanted and x is not None else None

        self.query_gradient = gradient_of(p.queries, needs.queries)
        self.row_negative_gradient = gradient_of(p.row_negatives, needs.row_negatives)
        # What the kernels write, whether or not it is wanted: it costs nothing beside the row's loss.
        self.row_score_gradient: Tensor | None = None
        self.scored_row_negatives: RowNegatives | None = None  # whose scores are given
        if p.row_scores is not None:
            self.row_score_gradient = torch.empty_like(p.row_scores)
            self.scored_row_negatives = RowNegatives(None, p.row_scores, None, self.row_score_gradient)
        self.scale_gradient = new(self.N, dtype=torch.float32) if needs.scale else None  # a part a row
        self.bias_gradient = new(self.M, dtype=torch.float32) if needs.bias else None
        gradient = gradient_of(p.candidates, needs.candidates)
        self.blocks = [Block(p.candidates, self.copies.candidates, 0, gradient)]
        if p.negatives is not None and self.copies.negatives is not None:
            gradient = gradient_of(p.negatives, needs.negatives)
            self.blocks.append(Block(p.negatives, self.copies.negatives, self.M, gradient))
        self.width = self.blocks[-1].columns.stop  # the columns of E, of candidates and negatives
        self.logsumexp, self.mass, self.loss = (new(self.N, dtype=torch.float64) for _ in range(3))

    @functools.cached_property
    def weight_norm(self) -> Tensor:
        """() float64: row weights are divided by the largest one, so that they fit the range of any dtype."""
        if self.equal_weight is None:
            norm = self.weights.abs().amax().clamp(min=torch.finfo(torch.float64).tiny)
        else:
            norm = self.weights[0]
        t = self.p.targets
        in_every_cell = t.dense is not None or t.background is not None  # what is stored is less the targets
        if self.p.queries.dtype is torch.float16 and (self.p.link == "softmax" or in_every_cell):
            norm = norm * t.largest_mass(len(self.p.candidates)).clamp(min=1)
        return norm

    @property
    def padded(self) -> bool:
        """Whether the operands of products are wider than the embeddings."""
        return self.copies.width != self.D

    @property
    def differentiates(self) -> bool:
        """Whether a gradient is wanted that is not known with the loss of each row."""
        return any(self.needs._replace(row_scores=False))

    def product_of(self, gradient: Tensor, *, alone: bool) -> Tensor:
        """Where a gradient's product is stored, float32 or in the gradient's own memory.

        It is as wide as the operands of products, which may be wider than the gradient.

        A product that is `alone`, to which no other is added, is rounded to bfloat16: it lacks the exact
        cells, so that little of the gradient is rounded twice. float16 has too little range for E's sums, and
        what is subtracted from gradients of cosines must not be rounded before.
        """
        rounded = alone and gradient.dtype is torch.bfloat16 and not self.p.normalize
        dtype = gradient.dtype if rounded else torch.float32
        if gradient.dtype is dtype and not self.padded:
            return gradient
        return gradient.new_empty(len(gradient), self.copies.width, dtype=dtype)

    def make_products(self, *, alone: bool = False) -> None:
        """Makes room for the sums over chunks of rows; there is one chunk if they are `alone`."""
        for block in self.blocks:
            if block.gradient is not None:
                block.product = self.product_of(block.gradient, alone=alone)

    def product_of_queries(self, rows: slice, *, alone: bool) -> Tensor | None:
        """Where the product of some rows of E and all columns is stored, if anything needs it."""
        if self.query_gradient is not None:
            return self.product_of(self.query_gradient[rows], alone=alone and len(self.blocks) == 1)
        if self.needs.scale:
            return self.p.queries.new_empty(rows.stop - rows.start, self.copies.width, dtype=torch.float32)
        return None

    @functools.cached_property
    def room(self) -> int:
        """Bytes that may be taken beside inputs, their copies and gradients, and scores that are kept."""
        return room_for(self.p) - self.copies.bytes - self.kept_bytes

    @property
    def product_bytes(self) -> int:
        """What `make_products` takes."""
        if self.p.queries.dtype is torch.float32 and not self.padded:
            return 0
        return sum(4 * block.operand.numel() for block in self.blocks if block.gradient is not None)

    @property
    def room_beside_products(self) -> int:
        """Bytes for all else: at least half of the room, and at most half of the free memory."""
        most, queries = self.room, self.p.queries
        if queries.is_cuda:
            whole = self.N * self.width * queries.element_size()
            most = room_within(most, queries.device, whole)
        return max(most - self.product_bytes, most // 2)

    def gradients(self) -> Gradients:
        by_row = self.scale_gradient
        return Inputs(
            queries=self.query_gradient,
            candidates=self.blocks[0].gradient,
            negatives=self.blocks[1].gradient if len(self.blocks) > 1 else None,
            row_negatives=self.row_negative_gradient,
            scale=None if by_row is None else by_row.sum(dtype=torch.float64),
            bias=self.bias_gradient,
            row_scores=self.row_score_gradient if self.needs.row_scores else None,
        )


def scale_tensor(device: torch.device, scale: float | Tensor) -> Tensor:
    """A scale as kernels read it; nothing waits for a device that holds it."""
    if isinstance(scale, Tensor) and scale.device == device:
        return scale.detach().float()
    return torch.full((), float(scale.item() if isinstance(scale, Tensor) else scale), device=device)


def weighted_sum(loss: Tensor, row_weight: float) -> Tensor:
    """row_weight * sum_i loss_i, () float32, in two launches."""
    return torch.mul(loss.sum(), row_weight, out=loss.new_empty((), dtype=torch.float32))


def room_for(p: Problem) -> int:
    """Bytes that a problem's computation may take beside inputs and gradients."""
    return room_of(p.memory, fast_bytes(p.queries), LOW_BYTES)


def fast_bytes(x: Tensor) -> int:
    """What memory="fast" may take on the device of `x`."""
    if not on_gpu(x):
        return FAST_BYTES
    total: int = properties(x.device).total_memory
    return max(FAST_BYTES, total // FAST_SHARE)


def fitting(room: int, line_bytes: int) -> int:
    """How many rows or columns fit, a multiple of a tile's; of the largest tile's where that many fit."""
    lines = room // line_bytes
    multiple = ROW_MULTIPLE if lines < 2 * ROW_MULTIPLE else 2 * ROW_MULTIPLE
    return max(lines // multiple, 1) * multiple


def aligned(columns: int) -> int:
    """A row length with which every row starts at a multiple of 16 bytes, as matrix products prefer."""
    return -(-columns // 64) * 64


def ranges(n: int, step: int) -> Iterator[slice]:
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def needs_whole_rows(p: Problem) -> bool:
    """Whether any cell may be a target, so that they cannot be listed."""
    return p.targets.dense is not None or p.targets.background is not None
