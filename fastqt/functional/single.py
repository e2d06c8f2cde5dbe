"""The general losses of one process: an ordinary problem each, and what is lowered to one before."""

from __future__ import annotations

from torch import Tensor

from fastqt.engines import plans
from fastqt.functional.call import Call, Completion, checked
from fastqt.functional.euclidean import in_products, moments
from fastqt.functional.lowering import computed_loss, kind_of, prepare, problem_of
from fastqt.functional.row_cells import one_cell_a_row


def loss_of_process(call: Call) -> Tensor:
    """The loss of the rows of one process.

    Raises:
        ValueError, TypeError: as of the losses.
    """
    kind = kind_of(call)
    plan = plans.known.get(kind)
    call = checked(call, None, fits=plan is not None)
    completions: list[Completion | None] = []
    if call.has_cells_to_lower:
        if call.similarity == "euclidean":
            sums = moments(call.queries, call.candidates, call.negatives)
            call, completion = in_products(call, sums, loss_of_process)
            completions.append(completion)
        call, completion = one_cell_a_row(call)
        completions.append(completion)
        kind = kind_of(call)
        plan = plans.known.get(kind)

    p, plan = problem_of(call, kind, plan)
    prepare(p, plan)
    engine = plan.engine
    of_targets = call.reduction == "mean_of_targets"
    loss = computed_loss(p, "sum" if of_targets else call.reduction, engine)
    for completion in reversed(completions):
        loss = loss if completion is None else completion(loss)
    return loss / p.targets.rows_with_targets().clamp(min=1) if of_targets else loss
