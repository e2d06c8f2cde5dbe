"""The loss of a checked call, of one process or of ranks: it is lowered, and an engine computes it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fastqt.devices import product_dtype
from fastqt.distributed.batch import Batch
from fastqt.distributed.collectives import nothing
from fastqt.distributed.shards import Shards
from fastqt.engines import usual
from fastqt.engines.features import MATRYOSHKA
from fastqt.functional.call import LEAVES, Call, Completion, call_of
from fastqt.functional.euclidean import in_products, moments
from fastqt.functional.false_negatives import with_thresholds
from fastqt.functional.lowering import computed_loss, kind_of, lowered
from fastqt.functional.ranks import gathered, loss_of_ring, takes_ring
from fastqt.functional.row_cells import joins_cells, one_cell_a_row
from fastqt.loss import Arguments
from fastqt.negatives import Mixed
from fastqt.options import Backend, Reduction
from fastqt.targets import TargetRows
from fastqt.torch_modes import input_dtype


def loss_of(arguments: Arguments, link: str) -> Tensor:
    """The loss of the rows of one process, or of all ranks'.

    Args:
        arguments: of this process's queries; the targets are over the candidates of all ranks, and the
            reduction is of all ranks' rows, "none" for this rank's.
        link: as of `Problem`.
    """
    call, batch = call_of(link, arguments.values), arguments.batch
    if arguments.values["exclude"] is not None and call.is_filtered and torch.compiler.is_compiling():
        # No operator makes masks of some rows: the graph of torch.compile breaks here.
        loss: Tensor = torch.compiler.disable(_loss_of_call)(batch, call)
        return loss
    return _loss_of_call(batch, call, arguments.known.shapes)


def _loss_of_call(batch: Batch, call: Call, shapes: Hashable | None = None) -> Tensor:
    prefixes = call.matryoshka
    if prefixes is not None and not _takes_one_walk(batch, call):
        return prefixes.sum(lambda dim: _loss_of_batch(batch, call.prefix(dim), kind_of(call.prefix(dim))))
    return _loss_of_batch(batch, call, kind_of(call, shapes))


def _takes_one_walk(batch: Batch, call: Call) -> bool:
    """Whether one problem has all prefixes of a call, because nothing else differs between them.

    The squared norms of a distance, a mixture at norm 1, and the scores that are joined to one cell of each
    row are others for each prefix, and so are the similarities that a margin is compared with; a ring joins
    the rows' logsumexps.
    """
    if call.margin is not None or call.thresholds is not None:
        return False
    if call.similarity == "euclidean" or isinstance(call.row_negatives, Mixed) or joins_cells(call):
        return False
    if isinstance(batch, Shards) and takes_ring(batch, call):
        return False
    return has_a_walk_of_prefixes(call.queries, call.backend)


def has_a_walk_of_prefixes(queries: Tensor, backend: Backend | None) -> bool:
    """Whether what computes on a device takes several prefixes at once, and in the dtype of a single one.

    The kernels of GPUs take one prefix at a time. That is several times as fast as a walk over all of them
    in torch's operations, whose running sums are float32, where a GPU multiplies 16 bits by matrix units.
    """
    dtype = input_dtype(queries)
    engine = usual(backend, queries.device, dtype)
    if MATRYOSHKA not in engine.takes:
        return False
    return queries.is_cpu or engine.eager or product_dtype(queries.device, dtype).itemsize > 2


def _loss_of_batch(batch: Batch, call: Call, kind: Hashable | None) -> Tensor:
    """The loss of a checked call on which all ranks agree; the arguments as of `_local_loss`."""
    if batch.is_of_process and call.similarity == "dot" and call.reduction != "mean_of_targets":
        return _computed(call, call.reduction, kind)[0]

    targets = batch.targets(call.targets, "rows", "candidates")
    if targets is not call.targets:
        call = replace(call, targets=targets)

    completion: Completion | None = None
    if call.similarity == "euclidean":
        # All ranks have to move their embeddings by the same vector, to the bit.
        sums = batch.sum_of_constants(moments(call.queries, call.candidates, call.negatives))
        call, completion = in_products(call, sums, partial(_of_negatives, batch))
        kind = kind_of(call)

    reduction = "sum" if call.reduction == "mean_of_targets" else call.reduction
    local, rows = _local_loss(batch, call, batch.local_reduction(reduction), kind)
    local = local if completion is None else completion(local)
    loss = batch.whole(local, reduction)
    if call.reduction != "mean_of_targets":
        return loss
    count = 0 if rows is None else rows.rows_with_targets()
    return loss / batch.sum_of_counts(count, call.queries.device)


def _local_loss(
    batch: Batch, call: Call, reduction: Reduction, kind: Hashable | None
) -> tuple[Tensor, TargetRows | None]:
    """The loss of this process's rows, and their targets, None where it has no rows.

    Args:
        batch: the rows of all ranks.
        call: one of products.
        reduction: of this process's rows.
        kind: under which the plan of the call is kept.
    """
    if reduction != call.reduction:
        call = replace(call, reduction=reduction)
    if isinstance(batch, Shards):
        if takes_ring(batch, call):
            return loss_of_ring(batch, call)
        call, kind = gathered(batch, call), None

    with batch.agreeing():
        if not batch.sizes["rows"]:
            return nothing([getattr(call, name) for name in LEAVES], reduction), None

        return _computed(call, reduction, kind)


def _computed(call: Call, reduction: Reduction, kind: Hashable | None) -> tuple[Tensor, TargetRows]:
    """The loss of a call's rows, and their targets; the arguments as of `_local_loss`."""
    call = with_thresholds(call)
    one, completion = one_cell_a_row(call)
    p, engine = lowered(one, kind if one is call else kind_of(one))
    loss = computed_loss(p, reduction, engine)
    return loss if completion is None else completion(loss), p.targets


def _of_negatives(batch: Batch, call: Call) -> Tensor:
    """The logsumexp of this process's queries with the negatives of all ranks, the call's candidates."""
    local, _ = _local_loss(batch.of(rows="rows", candidates="negatives"), call, "none", kind_of(call))
    return local
