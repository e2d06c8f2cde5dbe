"""The general losses of one process: an ordinary problem each, and what is lowered to one before."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastqt.checks import check_option
from fastqt.functional.euclidean import SIMILARITIES, Completed, check_euclidean, lower_euclidean, moments
from fastqt.functional.lowering import checked, computed_loss, prepare
from fastqt.functional.row_scores import check_row_cells, one_cell_a_row
from fastqt.problem import REDUCTIONS, TARGET_REDUCTIONS, reduce
from fastqt.targets import NoTargets, Targets


def loss_of_process(
    queries: Tensor, candidates: Tensor, targets: Targets, reduction: str, options: dict[str, Any]
) -> Tensor:
    """The loss of the rows of one process.

    Args:
        queries, candidates: as they were given.
        targets: of the queries, over the candidates.
        reduction: of the rows.
        options: the other arguments of `checked`, and `similarity` where it is not "dot".

    Raises:
        ValueError, TypeError: as of the losses.
    """
    similarity, lacking, completed = options.pop("similarity", "dot"), None, None
    if similarity != "dot" or options["row_scores"] is not None or _is_stacked(options["row_negatives"]):
        check_row_cells(queries, candidates, options)
        check_option("similarity", similarity, SIMILARITIES)
        if similarity == "euclidean":
            queries, candidates, completed = _in_products(queries, candidates, options)
        lacking = one_cell_a_row(queries, candidates, options)
    p, plan = checked(queries, candidates, targets, **options)
    prepare(p, plan)
    check_option("reduction", reduction, TARGET_REDUCTIONS if p.link == "softmax" else REDUCTIONS)
    if reduction == "mean_of_targets":
        return computed_loss(p, "sum", plan.engine) / p.targets.rows_with_targets().clamp(min=1)
    found = computed_loss(p, reduction, plan.engine)
    if lacking is not None:
        found = found + reduce(lacking, reduction)
    return found if completed is None else completed(found)


def _is_stacked(row_negatives: object) -> bool:
    return isinstance(row_negatives, Tensor) and row_negatives.dim() == 3


def _in_products(
    queries: Tensor, candidates: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Completed]:
    check_euclidean(queries, candidates, options)

    def of_negatives(queries: Tensor, negatives: Tensor, options: dict[str, Any]) -> Tensor:
        return loss_of_process(queries, negatives, NoTargets(), "none", options)

    return lower_euclidean(
        queries, candidates, options, moments(queries, candidates, options["negatives"]), of_negatives
    )
