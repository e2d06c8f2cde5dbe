"""NT-Xent from labels: each pair of equal labels against the first one's negatives."""

from __future__ import annotations

from torch import Tensor

from fastqt.distributed.group import GroupLike
from fastqt.losses.labelled import loss_from_labels


def ntxent_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    candidates: Tensor | None = None,
    candidate_labels: Tensor | None = None,
    scale: float | Tensor = 10.0,
    normalize: bool = True,
    reduction: str = "mean",
    memory: str | int = "fast",
    backend: str | None = None,
    group: GroupLike | None = None,
) -> Tensor:
    """Cross-entropy of each pair of rows of the same label, among itself and the first row's negatives.

    With scores S = scale * cosine, the loss of a pair (a, p) of different rows with the same label is
    -log(exp(S_ap) / (exp(S_ap) + sum_n exp(S_an))), where n is every row of another label. Positives do not
    compete with each other, which they do in `supcon_loss`. With one positive a row, as where two views of a
    sentence share a label, the two losses are equal. Otherwise the pairs are never listed, and operations are
    those that `supcon_loss` takes then.

    Args:
        embeddings, labels, candidates, candidate_labels, scale, normalize, memory, backend, group: as of
            `supcon_loss`.
        reduction: "mean" over all pairs; "sum"; "none" for the sum over each row's pairs.

    Returns:
        A scalar, or (N,) for reduction="none"; float64 for float64 inputs, float32 otherwise.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Source: Sohn, "Improved deep metric learning with multi-class N-pair loss objective" (2016), and Chen et
    al., "A simple framework for contrastive learning of visual representations" (2020), over all pairs of
    equal labels, as the library pytorch-metric-learning has it.
    """
    return loss_from_labels(
        *("ntxent", embeddings, labels, candidates, candidate_labels, reduction, group),
        scale=scale,
        normalize=normalize,
        memory=memory,
        backend=backend,
    )
