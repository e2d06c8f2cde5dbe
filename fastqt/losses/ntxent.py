"""NT-Xent from labels: each pair of equal labels against the first one's negatives."""

from __future__ import annotations

from torch import Tensor

from fastqt.arguments import OwnRows, Rows, Scale
from fastqt.distributed.group import GroupLike
from fastqt.loss import Arguments, loss
from fastqt.losses.labelled import CandidateLabels, Labels, fit_candidates, loss_from_labels
from fastqt.options import Backend, Memory, Reduction


@loss("NTXentLoss", check=fit_candidates)
def ntxent_loss(
    call: Arguments,
    embeddings: Rows,
    labels: Labels,
    *,
    candidates: OwnRows | None = None,
    candidate_labels: CandidateLabels | None = None,
    scale: Scale = 10.0,
    normalize: bool = True,
    reduction: Reduction = "mean",
    memory: Memory = "fast",
    backend: Backend | None = None,
    group: GroupLike | None = None,
) -> Tensor:
    """Cross-entropy of each pair of rows of the same label, among itself and the first row's negatives.

    With scores S = scale * cosine, the loss of a pair (a, p) of different rows with the same label is
    -log(exp(S_ap) / (exp(S_ap) + sum_n exp(S_an))), where n is every row of another label. Positives do not
    compete with each other, which they do in `supcon_loss`. With one positive a row, as where two views of a
    sentence share a label, the two losses are equal. Otherwise the pairs are never listed, and operations are
    those that `supcon_loss` takes then.

    Args:
        embeddings, labels, candidates, candidate_labels, normalize, memory, backend, group: as of
            `supcon_loss`.
        scale: 1 / temperature, a number or 0-d tensor (differentiable).
        reduction: "mean" over all pairs; "sum"; "none" for the sum over each row's pairs.

    Returns:
        A scalar, or (N,) for reduction="none"; float64 for float64 inputs, float32 otherwise.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> z1, z2 = torch.randn(2, 8, 16)  # two views of eight texts
        >>> labels = torch.arange(8).repeat(2)
        >>> fastqt.ntxent_loss(torch.cat([z1, z2]), labels, scale=1 / 0.5).shape  # a temperature of 0.5
        torch.Size([])
        >>> rows = torch.eye(2).repeat_interleave(3, 0)  # positives do not compete with each other
        >>> round(fastqt.ntxent_loss(rows, torch.tensor([0, 0, 0, 1, 1, 1]), scale=50.0).item(), 4)
        0.0

    Source: Sohn, "Improved deep metric learning with multi-class N-pair loss objective" (2016), and Chen et
    al., "A simple framework for contrastive learning of visual representations" (2020), over all pairs of
    equal labels, as the library pytorch-metric-learning has it.
    """
    return loss_from_labels("ntxent", call)
