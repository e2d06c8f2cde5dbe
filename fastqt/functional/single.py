"""The general losses of one process: an ordinary problem each, and what is lowered to one before."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastqt.checks import check_option
from fastqt.functional.euclidean import SIMILARITIES, check_euclidean, lower_euclidean, moments
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
    similarity, more = options.pop("similarity", "dot"), None
    if similarity != "dot" or options["row_scores"] is not None or _is_stacked(options["row_negatives"]):
        check_row_cells(queries, candidates, options)
        check_option("similarity", similarity, SIMILARITIES)
        if similarity == "euclidean":
            queries, candidates, own = _in_products(queries, candidates, options)
            more = own if options["link"] == "log_sum_exp" else None
        lacking = one_cell_a_row(queries, candidates, options)
        more = lacking if more is None else more
    p, plan = checked(queries, candidates, targets, **options)
    prepare(p, plan)
    check_option("reduction", reduction, TARGET_REDUCTIONS if p.link == "softmax" else REDUCTIONS)
    if reduction == "mean_of_targets":
        return computed_loss(p, "sum", plan.engine) / p.targets.rows_with_targets().clamp(min=1)
    found = computed_loss(p, reduction, plan.engine)
    return found if more is None else found + reduce(more, reduction)


def _is_stacked(row_negatives: object) -> bool:
    return isinstance(row_negatives, Tensor) and row_negatives.dim() == 3


def _in_products(
    queries: Tensor, candidates: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    check_euclidean(queries, candidates, options)

    def of_negatives(queries: Tensor, negatives: Tensor, options: dict[str, Any]) -> Tensor:
        return loss_of_process(queries, negatives, NoTargets(), "none", options)

    return lower_euclidean(queries, candidates, options, moments(candidates), of_negatives)
