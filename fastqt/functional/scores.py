"""The scores of queries with candidates of their own."""

from __future__ import annotations

from typing import Annotated, Any

from torch import Tensor

from fastqt.arguments import Argument, Rows
from fastqt.checks import check_tensor
from fastqt.functional.call import Call
from fastqt.functional.row_cells import scores_of_row_negatives
from fastqt.loss import Arguments, loss
from fastqt.targets import NoTargets


def _first_candidates(name: str, x: Any) -> dict[str, Tensor]:
    """The first candidate of each row, which stands for all that a row has."""
    check_tensor(name, x)
    shape = tuple(x.shape)
    if len(shape) != 3 or not shape[1]:
        raise ValueError(f"{name}: want shape (N, K, D), K >= 1 candidates of each row, got {shape}")
    return {name: x[:, 0]}


RowCandidates = Annotated[Tensor, Argument(rows="rows", matrices=_first_candidates)]


@loss()
def candidate_scores(
    call: Arguments, queries: Rows, candidates: RowCandidates, *, normalize: bool = False
) -> Tensor:
    """The inner products, or cosines, of each query with candidates that it has alone.

    These are `torch.einsum("nd,nkd->nk", queries, candidates)`, or that of rows at norm 1. No normalised copy
    of the candidates is made, and factors of 16 bits are multiplied and added up in float32. The losses of a
    teacher's scores take them.

    Args:
        queries: (N, D) floating point.
        candidates: (N, K, D), dtype and device as `queries`: K of each query, such as its positive and its
            hard negatives.
        normalize: score by cosine.

    Returns:
        (N, K), float64 for float64 embeddings, float32 otherwise.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> queries, candidates = torch.randn(8, 16), torch.randn(8, 4, 16)
        >>> fastqt.candidate_scores(queries, candidates).shape
        torch.Size([8, 4])
        >>> fastqt.candidate_scores(torch.eye(2), 3 * torch.eye(2).repeat(2, 1, 1), normalize=True)
        tensor([[1., 0.],
                [0., 1.]])
    """
    # As the cells that a row of a softmax has alone, whose other candidates nobody reads.
    cells = Call("log_sum_exp", NoTargets(), queries, queries, row_negatives=candidates)
    cells.normalize = normalize
    return scores_of_row_negatives(cells)
