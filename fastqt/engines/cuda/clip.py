"""CLIP's loss on a GPU for small batches: the one-launch kernel for each direction, half of each loss."""

from __future__ import annotations

from torch import Tensor

from fastqt.engines.cuda import contrastive
from fastqt.problem import ClipProblem, Gradients, Inputs, Needs, Problem, Rows
from fastqt.targets import Diagonal


def gradients_in_forward(p: ClipProblem) -> bool:
    """Whether a scalar loss takes its gradients in the forward pass."""
    return True


def forward(p: ClipProblem) -> Rows:
    """The loss of each pair."""
    rows, columns = (contrastive.forward(direction) for direction in _directions(p))
    return Rows((rows.loss + columns.loss) / 2, ())


def forward_with_gradients(p: ClipProblem, row_weight: float, needs: Needs) -> tuple[Tensor, Gradients]:
    """row_weight * sum_i loss_i, and its gradients."""
    rows, columns = _directions(p)
    of_rows, row_gradients = contrastive.forward_with_gradients(rows, row_weight / 2, needs)
    of_columns, column_gradients = contrastive.forward_with_gradients(
        columns, row_weight / 2, _transposed(needs)
    )
    return of_rows + of_columns, _sum(row_gradients, column_gradients)


def backward(p: ClipProblem, saved: tuple[Tensor, ...], row_weights: Tensor, needs: Needs) -> Gradients:
    """The gradients of sum_i row_weights_i loss_i, all computed anew, which is cheaper than reading."""
    rows, columns = _directions(p)
    half = row_weights / 2
    return _sum(
        contrastive.backward(rows, (), half, needs),
        contrastive.backward(columns, (), half, _transposed(needs)),
    )


def _directions(p: ClipProblem) -> tuple[Problem, Problem]:
    """Queries among candidates, and candidates among queries."""
    targets = Diagonal().rows(len(p.queries), len(p.candidates), p.queries.device)
    no_more = None, None, p.scale, targets, "keep", None, None, None
    return Problem(p.queries, p.candidates, *no_more), Problem(p.candidates, p.queries, *no_more)


def _transposed(needs: Needs) -> Needs:
    return needs._replace(queries=needs.candidates, candidates=needs.queries)


def _sum(rows: Gradients, columns: Gradients) -> Gradients:
    """Of both directions; the queries of one are the candidates of the other."""

    def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        return None if a is None or b is None else a.add_(b)

    return Inputs(
        queries=add(rows.queries, columns.candidates),
        candidates=add(rows.candidates, columns.queries),
        scale=add(rows.scale, columns.scale),
    )
