"""The FLOPS regulariser, by which vectors of the vocabulary become sparse."""

from __future__ import annotations

from torch import Tensor

from fastqt.arguments import Rows
from fastqt.devices import accumulation_dtype
from fastqt.distributed.group import GroupLike
from fastqt.loss import Arguments, loss
from fastqt.problem import loss_dtype


@loss("FlopsLoss")
def flops_loss(call: Arguments, embeddings: Rows, *, group: GroupLike | None = None) -> Tensor:
    """The FLOPS regulariser of sparse vectors: the squared mean size of each column's numbers, added up.

    With m_j = mean_i |x_ij| it is sum_j m_j^2, which is about the number of products that an inverted index
    takes to compare two of the vectors. It is added to a loss of ranking with a small weight, once for the
    queries and once for the documents, and falls most for words that many texts have. A number that is 0 has
    no gradient.

    Args:
        embeddings: (N, V) floating point, such as those of `fastqt.splade_pool`; float16 and bfloat16 are
            added up in float32 at least.
        group: as of `contrastive_loss`. The means are those of the rows of all ranks; what travels is a sum
            of V numbers, and no gradients.

    Returns:
        A scalar, of the whole batch; float64 for float64 inputs, float32 otherwise.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> fastqt.flops_loss(torch.tensor([[1.0, 0.0, 3.0], [0.0, 0.0, 1.0]])).item()  # 0.5^2 + 0 + 2^2
        4.25

    Source: Paria et al., "Minimizing FLOPs to learn efficient sparse representations" (2020), eq. 4; with
    SPLADE in Formal et al., "SPLADE: Sparse lexical and expansion model for first stage ranking" (2021).
    """
    batch = call.batch
    local = embeddings.abs().sum(0, dtype=accumulation_dtype(embeddings.device))
    means = batch.sum_replicated(local) / batch.total()
    return means.square().sum().to(loss_dtype(embeddings))
