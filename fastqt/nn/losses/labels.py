"""The losses as modules whose calls take labels or indices of candidates."""

from __future__ import annotations

from fastqt import losses
from fastqt.distributed.group import GroupLike
from fastqt.nn.losses.base import ScaledLoss, given
from fastqt.options import Backend, Memory, Reduction


class SupConLoss(ScaledLoss):
    """`fastqt.supcon_loss` with its options fixed.

    A call takes embeddings (N, D), labels (N,), and the keyword arguments `candidates` and
    `candidate_labels`.

    Args:
        scale, learn_scale, max_scale: as of `ContrastiveLoss`; the scale is 1 / temperature.
        normalize, reduction, memory, backend, group: as of `fastqt.supcon_loss`.

    Raises:
        TypeError, ValueError: as in `ContrastiveLoss`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.SupConLoss(scale=1 / 0.1)  # a temperature of 0.1
        >>> embeddings, labels = torch.randn(8, 16), torch.arange(8) % 4
        >>> criterion(embeddings, labels).shape
        torch.Size([])
    """

    function = staticmethod(losses.supcon_loss)
    batch_arguments = ("candidates", "candidate_labels")

    def __init__(
        self,
        *,
        scale: float = 10.0,
        learn_scale: bool = False,
        max_scale: float | None = None,
        normalize: bool = True,
        reduction: Reduction = "mean",
        memory: Memory = "fast",
        backend: Backend | None = None,
        group: GroupLike | None = None,
    ) -> None:
        super().__init__(**given(locals()))


class NTXentLoss(ScaledLoss):
    """`fastqt.ntxent_loss` with its options fixed.

    A call takes the same arguments as that of `SupConLoss`.

    Args:
        scale, learn_scale, max_scale: as of `ContrastiveLoss`; the scale is 1 / temperature.
        normalize, reduction, memory, backend, group: as of `fastqt.ntxent_loss`.

    Raises:
        TypeError, ValueError: as in `ContrastiveLoss`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.NTXentLoss(scale=1 / 0.5)  # a temperature of 0.5
        >>> embeddings, labels = torch.randn(8, 16), torch.arange(8) % 4  # two views of four texts
        >>> criterion(embeddings, labels).shape
        torch.Size([])
    """

    function = staticmethod(losses.ntxent_loss)
    batch_arguments = SupConLoss.batch_arguments

    def __init__(
        self,
        *,
        scale: float = 10.0,
        learn_scale: bool = False,
        max_scale: float | None = None,
        normalize: bool = True,
        reduction: Reduction = "mean",
        memory: Memory = "fast",
        backend: Backend | None = None,
        group: GroupLike | None = None,
    ) -> None:
        super().__init__(**given(locals()))


class NegativeSamplingLoss(ScaledLoss):
    """`fastqt.negative_sampling_loss` with its options fixed.

    A call takes queries, candidates, and the indices of positives (N,) and of negatives (N, K).

    Args:
        scale, learn_scale, max_scale: as of `ContrastiveLoss`; the scale is 1 / temperature.
        reduction, group: as of `fastqt.negative_sampling_loss`.

    Raises:
        TypeError, ValueError: as in `ContrastiveLoss`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.NegativeSamplingLoss()
        >>> words, contexts = torch.randn(2, 100, 16)
        >>> pairs = torch.randint(100, (8, 2))
        >>> noise = fastqt.Noise(torch.ones(100)).draw(8, 5)
        >>> criterion(words[pairs[:, 0]], contexts, pairs[:, 1], noise).shape
        torch.Size([])
    """

    function = staticmethod(losses.negative_sampling_loss)

    def __init__(
        self,
        *,
        scale: float = 1.0,
        learn_scale: bool = False,
        max_scale: float | None = None,
        reduction: Reduction = "mean",
        group: GroupLike | None = None,
    ) -> None:
        super().__init__(**given(locals()))
