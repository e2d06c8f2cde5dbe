"""The losses as modules whose rows come in pairs: query and candidate i, image and text i, two views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fastqt import losses
from fastqt.checks import check_flag, check_number
from fastqt.distributed.group import GroupLike
from fastqt.losses.ranking_options import check_partition
from fastqt.nn.losses.base import ScaledLoss, given
from fastqt.nn.losses.general import ContrastiveLoss
from fastqt.options import (
    Backend,
    Direction,
    HardnessMode,
    MarginStrategy,
    Memory,
    PartitionMode,
    Reduction,
    Similarity,
    TargetReduction,
)


class InfoNCELoss(ScaledLoss):
    """`fastqt.info_nce_loss` with its options fixed.

    A call takes queries, candidates, and the keyword arguments `negatives` and `guide`.

    Args:
        scale, learn_scale, max_scale: as of `ContrastiveLoss`; the scale is 1 / temperature.
        normalize, label_smoothing, similarity, reduction, memory, backend, group: as of
            `fastqt.info_nce_loss`.

    Raises:
        TypeError, ValueError: as in `ContrastiveLoss`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.InfoNCELoss(scale=1 / 0.05)  # a temperature of 0.05
        >>> queries, candidates = torch.randn(2, 8, 16)
        >>> bool(criterion(queries, queries) < criterion(queries, candidates))
        True
    """

    function = staticmethod(losses.info_nce_loss)
    choices = ContrastiveLoss.choices
    batch_arguments = ("negatives", "guide")

    def __init__(
        self,
        *,
        scale: float = 20.0,
        learn_scale: bool = False,
        max_scale: float | None = None,
        normalize: bool = True,
        label_smoothing: float = 0.0,
        similarity: Similarity = "dot",
        reduction: TargetReduction = "mean",
        memory: Memory = "fast",
        backend: Backend | None = None,
        group: GroupLike | None = None,
    ) -> None:
        super().__init__(**given(locals()))


class CLIPLoss(ScaledLoss):
    """`fastqt.clip_loss` with its options fixed; by default the scale is learnt.

    A call takes two embeddings (N, D), whose rows of equal index are a pair.

    Args:
        scale: the initial scale, 1 / temperature; by default the CLIP paper's 1 / 0.07.
        learn_scale: as of `ContrastiveLoss`.
        max_scale: the most that the scale may be; by default the paper's 100.
        normalize, label_smoothing, reduction, memory, backend, group: as of `fastqt.clip_loss`.

    Raises:
        TypeError, ValueError: as in `ContrastiveLoss`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.CLIPLoss()
        >>> images, texts = torch.randn(2, 8, 16)
        >>> criterion(images, texts).backward()
        >>> round(criterion.scale.item(), 2), criterion.log_scale.grad is not None
        (14.29, True)
    """

    function = staticmethod(losses.clip_loss)

    def __init__(
        self,
        *,
        scale: float = 1 / 0.07,
        learn_scale: bool = True,
        max_scale: float | None = 100.0,
        normalize: bool = True,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        memory: Memory = "fast",
        backend: Backend | None = None,
        group: GroupLike | None = None,
    ) -> None:
        super().__init__(**given(locals()))


class SigLIPLoss(ScaledLoss):
    """`fastqt.siglip_loss` with its options fixed; by default scale and bias are learnt.

    A call takes two embeddings (N, D) and (M, D), whose rows of equal index are a pair.

    Args:
        scale: the initial scale, 1 / temperature; by default the SigLIP paper's 10.
        bias: the initial bias, a finite number; by default the paper's -10.
        learn_bias: learn the bias as a parameter.
        learn_scale, max_scale: as of `ContrastiveLoss`.
        normalize, reduction, memory, backend, group: as of `fastqt.siglip_loss`.

    Raises:
        TypeError, ValueError: as in `ContrastiveLoss`, or a bias that is not a finite number.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.SigLIPLoss()
        >>> images, texts = torch.randn(2, 8, 16)
        >>> criterion(images, texts).backward()
        >>> [(name, p.shape) for name, p in criterion.named_parameters()]
        [('log_scale', torch.Size([])), ('bias', torch.Size([]))]
    """

    function = staticmethod(losses.siglip_loss)
    bias: nn.Parameter | float

    def __init__(
        self,
        *,
        scale: float = 10.0,
        learn_scale: bool = True,
        max_scale: float | None = None,
        bias: float = -10.0,
        learn_bias: bool = True,
        normalize: bool = True,
        reduction: Reduction = "mean",
        memory: Memory = "fast",
        backend: Backend | None = None,
        group: GroupLike | None = None,
    ) -> None:
        super().__init__(**given(locals(), "bias", "learn_bias"))
        check_number("bias", bias)
        check_flag("learn_bias", learn_bias)
        self.bias = nn.Parameter(torch.tensor(float(bias))) if learn_bias else float(bias)

    def extra_repr(self) -> str:
        bias = "learn_bias=True" if isinstance(self.bias, nn.Parameter) else f"bias={self.bias}"
        return f"{super().extra_repr()}, {bias}"

    def function_options(self) -> dict[str, Any]:
        return {"bias": self.bias, **super().function_options()}


class GISTEmbedLoss(ScaledLoss):
    """`fastqt.gist_embed_loss` with its options fixed; the guide's embeddings are arguments of each call.

    A call takes anchors, positives, negatives if there are any, and the keyword arguments `guide_anchors`,
    `guide_positives` and `guide_negatives`.

    Args:
        scale, learn_scale, max_scale: as of `ContrastiveLoss`; the scale is 1 / temperature.
        margin, margin_strategy, contrast_anchors, contrast_positives, reduction, memory, backend, group: as
            of `fastqt.gist_embed_loss`.

    Raises:
        TypeError, ValueError: as in `ContrastiveLoss`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.GISTEmbedLoss(scale=100.0)  # a temperature of 0.01
        >>> anchors, positives = torch.randn(2, 8, 16)
        >>> of_guide = torch.randn(2, 8, 32)
        >>> criterion(anchors, positives, guide_anchors=of_guide[0], guide_positives=of_guide[1]).shape
        torch.Size([])
    """

    function = staticmethod(losses.gist_embed_loss)
    batch_arguments = ("guide_anchors", "guide_positives", "guide_negatives")

    def __init__(
        self,
        *,
        scale: float = 100.0,
        learn_scale: bool = False,
        max_scale: float | None = None,
        margin: float = 0.0,
        margin_strategy: MarginStrategy = "absolute",
        contrast_anchors: bool = True,
        contrast_positives: bool = True,
        reduction: Reduction = "mean",
        memory: Memory = "fast",
        backend: Backend | None = None,
        group: GroupLike | None = None,
    ) -> None:
        super().__init__(**given(locals()))


class MultipleNegativesRankingLoss(ScaledLoss):
    """`fastqt.multiple_negatives_ranking_loss` with its options fixed.

    A call takes queries (N, D), and documents (N, D) or a sequence of such matrices.

    Args:
        scale, learn_scale, max_scale: as of `ContrastiveLoss`; the scale is 1 / temperature.
        normalize, directions, partition_mode, hardness_mode, hardness_strength, reduction, memory, backend,
            group: as of `fastqt.multiple_negatives_ranking_loss`.

    Raises:
        TypeError, ValueError: as in `ContrastiveLoss`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.MultipleNegativesRankingLoss(directions=("query_to_doc", "doc_to_query"))
        >>> queries, positives, hard_negatives = torch.randn(3, 8, 16)
        >>> criterion(queries, [positives, hard_negatives]).shape
        torch.Size([])
    """

    function = staticmethod(losses.multiple_negatives_ranking_loss)

    def __init__(
        self,
        *,
        scale: float = 20.0,
        learn_scale: bool = False,
        max_scale: float | None = None,
        normalize: bool = True,
        directions: Sequence[Direction] = ("query_to_doc",),
        partition_mode: PartitionMode = "joint",
        hardness_mode: HardnessMode | None = None,
        hardness_strength: float = 0.0,
        reduction: Reduction = "mean",
        memory: Memory = "fast",
        backend: Backend | None = None,
        group: GroupLike | None = None,
    ) -> None:
        super().__init__(**given(locals()))

    @classmethod
    def check_values(cls, options: Mapping[str, Any]) -> None:
        super().check_values(options)
        check_partition(options.get("directions", ()), options.get("partition_mode", "joint"))
