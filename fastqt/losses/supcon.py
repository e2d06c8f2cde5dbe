"""SupCon: each row is to find all others of its label among all others."""

from __future__ import annotations

from torch import Tensor

from fastqt.arguments import OwnRows, Rows, Scale
from fastqt.distributed.group import GroupLike
from fastqt.loss import Arguments, loss
from fastqt.losses.labelled import CandidateLabels, Labels, fit_candidates, loss_from_labels
from fastqt.matryoshka import MatryoshkaLike
from fastqt.options import Backend, Memory, Reduction


@loss("SupConLoss", check=fit_candidates, sums_prefixes=False)
def supcon_loss(
    call: Arguments,
    embeddings: Rows,
    labels: Labels,
    *,
    candidates: OwnRows | None = None,
    candidate_labels: CandidateLabels | None = None,
    scale: Scale = 10.0,
    normalize: bool = True,
    matryoshka: MatryoshkaLike | None = None,
    reduction: Reduction = "mean",
    memory: Memory = "fast",
    backend: Backend | None = None,
    group: GroupLike | None = None,
) -> Tensor:
    """Cross-entropy of each row with all of its positives alike, the other rows of the same label.

    With scores S = scale * cosine and P(i) the positives of row i, its loss is the mean over p in P(i) of
    -log(exp(S_ip) / sum_a exp(S_ia)), where a is every row but i. It is at least log |P(i)|. The scores of
    all pairs are not formed. Where the positive pairs fit a list, three matrix products are enough, as for
    other losses: on a CPU of up to 786,432 pairs with memory="fast", on a GPU of up to 8 a row. Otherwise it
    takes four, and three of rows with the ranges of columns in which their positives lie; with two classes
    of N / 2 rows each, these are as much as one and a half products of all rows.

    Args:
        embeddings: (N, D) floating point.
        labels: (N,) integers, in any order. The host reads where equal labels lie, for which it
            waits if they are on a GPU.
        candidates: (M, D) what the rows are compared with in place of each other. A row is then not taken
            out of them: its positives are all candidates of its label.
        candidate_labels: (M,) integers.
        scale: 1 / temperature, a number or 0-d tensor (differentiable).
        normalize: score by cosine.
        matryoshka: as of `contrastive_loss`. Where the positive pairs fit no list,
            each prefix is a loss of its own.
        reduction: "mean" over the rows that have a positive; the losses of others are 0. "sum", or "none".
        memory: as of `contrastive_loss`; a class of any size is visited in parts that fit it.
        backend: as of `contrastive_loss`, for the candidates of other labels. Those of the row's own are
            scored in float32, or float64, by torch.
        group: as of `contrastive_loss`; the candidates are those of all ranks, which are always gathered.

    Returns:
        A scalar, or (N,) for reduction="none"; float64 for float64 inputs, float32 otherwise.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> embeddings, labels = torch.randn(8, 16), torch.arange(8) % 4
        >>> fastqt.supcon_loss(embeddings, labels, scale=1 / 0.1, reduction="none").shape  # temperature 0.1
        torch.Size([8])
        >>> rows = torch.eye(2).repeat_interleave(3, 0)  # two labels of three equal rows
        >>> round(fastqt.supcon_loss(rows, torch.tensor([0, 0, 0, 1, 1, 1]), scale=50.0).item(), 4)  # log 2
        0.6931

    Source: Khosla et al., "Supervised contrastive learning" (2020), eq. 2.
    """
    return loss_from_labels("supcon", call)
