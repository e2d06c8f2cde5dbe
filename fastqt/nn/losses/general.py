"""The two general losses as modules."""

from __future__ import annotations

from typing import ClassVar

from fastqt.distributed.group import GroupLike
from fastqt.functional import contrastive_loss, sigmoid_loss
from fastqt.nn.losses.base import ScaledLoss, given
from fastqt.options import Backend, DiagonalMode, Memory, Reduction, Similarity, TargetReduction
from fastqt.problem import TARGET_REDUCTIONS


class ContrastiveLoss(ScaledLoss):
    """`fastqt.contrastive_loss` with its options fixed; `bias` is an argument of each call.

    A call takes the embeddings, the targets, and of the function's keyword arguments those that belong to a
    batch: `document_ids`, `bias`, `negatives`, `row_negatives`, `row_scores`, `query_groups`,
    `candidate_groups`, `mask` and `guide`.

    Args:
        scale: the scale, 1 / temperature, a number > 0; where it is learnt, what it is at first.
        learn_scale: learn the scale as the parameter `log_scale`, its logarithm, so that it stays positive.
        max_scale: the most that the scale may be, or None; see `fastqt.nn.losses.base.ScaledLoss`.
        context_size, diagonal, normalize, reduction, similarity, memory, backend, group: as of
            `fastqt.contrastive_loss`.

    Raises:
        TypeError: an option that the loss does not have, or that has a value of another type.
        ValueError: a value that the function refuses.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.ContrastiveLoss(context_size=1, normalize=True, learn_scale=True)
        >>> queries, candidates = torch.randn(2, 8, 16)
        >>> criterion(queries, candidates, document_ids=torch.arange(8) // 4).shape
        torch.Size([])
        >>> [name for name, _ in criterion.named_parameters()]
        ['log_scale']
    """

    function = staticmethod(contrastive_loss)
    choices: ClassVar[dict[str, tuple[str, ...]]] = {"reduction": TARGET_REDUCTIONS}
    batch_arguments = (
        "document_ids",
        "bias",
        "negatives",
        "row_negatives",
        "row_scores",
        "query_groups",
        "candidate_groups",
        "mask",
        "guide",
    )

    def __init__(
        self,
        *,
        context_size: int | None = None,
        diagonal: DiagonalMode = "zero",
        scale: float = 1.0,
        learn_scale: bool = False,
        max_scale: float | None = None,
        normalize: bool = False,
        reduction: TargetReduction = "mean",
        similarity: Similarity = "dot",
        memory: Memory = "fast",
        backend: Backend | None = None,
        group: GroupLike | None = None,
    ) -> None:
        super().__init__(**given(locals()))


class SigmoidLoss(ScaledLoss):
    """`fastqt.sigmoid_loss` with its options fixed; `bias` is an argument of each call.

    A call takes the same arguments as that of `ContrastiveLoss`.

    Args:
        scale, learn_scale, max_scale: as of `ContrastiveLoss`; the scale is 1 / temperature.
        context_size, diagonal, normalize, reduction, memory, backend, group: as of `fastqt.sigmoid_loss`.

    Raises:
        TypeError, ValueError: as in `ContrastiveLoss`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.SigmoidLoss(scale=2.0, reduction="none")
        >>> queries, candidates = torch.randn(2, 8, 16)
        >>> criterion(queries, candidates, bias=-1.0).shape
        torch.Size([8])
    """

    function = staticmethod(sigmoid_loss)
    batch_arguments = ContrastiveLoss.batch_arguments

    def __init__(
        self,
        *,
        context_size: int | None = None,
        diagonal: DiagonalMode = "keep",
        scale: float = 1.0,
        learn_scale: bool = False,
        max_scale: float | None = None,
        normalize: bool = False,
        reduction: Reduction = "mean",
        memory: Memory = "fast",
        backend: Backend | None = None,
        group: GroupLike | None = None,
    ) -> None:
        super().__init__(**given(locals()))
