"""The constructors of the loss modules: `make lists` writes this file from the signatures."""

from typing import TypedDict

from fastqt.nn.losses.base import BiasedLoss, Loss as Loss, ScaledLoss as ScaledLoss
from collections.abc import Sequence
from fastqt.distributed.group import GroupLike
from fastqt.exclusions import ExcludeLike
from fastqt.losses.gloss import PositionLoss
from fastqt.matryoshka import MatryoshkaLike
from fastqt.options import Backend
from fastqt.options import BlockNegatives
from fastqt.options import DiagonalMode
from fastqt.options import Direction
from fastqt.options import HardnessMode
from fastqt.options import MarginDiagonal
from fastqt.options import MarginStrategy
from fastqt.options import MaskedCell
from fastqt.options import Memory
from fastqt.options import MixBlocks
from fastqt.options import MixForm
from fastqt.options import MixPartner
from fastqt.options import PartitionMode
from fastqt.options import Reduction
from fastqt.options import Similarity
from fastqt.options import TargetReduction
from torch import Tensor

class AnglELoss(ScaledLoss):
    def __init__(self, *, scale: float = 20.0, learn_scale: bool = False, max_scale: float | None = None,
        group: GroupLike | None = None) -> None: ...

class ArcFaceLoss(ScaledLoss):
    def __init__(self, *, scale: float = 64.0, learn_scale: bool = False, max_scale: float | None = None,
        margin: float = 0.5, reduction: Reduction = "mean", memory: Memory = "fast",
        backend: Backend | None = None, group: GroupLike | None = None) -> None: ...

class BinaryWindowLoss(Loss):
    def __init__(self, *, context_size: int = 1, samples: int | None = None, reduction: Reduction = "mean",
        group: GroupLike | None = None) -> None: ...

class CLIPLoss(ScaledLoss):
    def __init__(self, *, scale: float = 14.285714285714285, learn_scale: bool = True,
        max_scale: float | None = 100.0, normalize: bool = True, tau_plus: float | Tensor = 0.0,
        label_smoothing: float = 0.0, exclude: ExcludeLike | None = None,
        matryoshka: MatryoshkaLike | None = None, reduction: Reduction = "mean", memory: Memory = "fast",
        backend: Backend | None = None, group: GroupLike | None = None) -> None: ...

class ContrastiveLoss(ScaledLoss):
    def __init__(self, *, context_size: int | None = None, diagonal: DiagonalMode = "zero",
        scale: float = 1.0, learn_scale: bool = False, max_scale: float | None = None,
        normalize: bool = False, exclude: ExcludeLike | None = None, matryoshka: MatryoshkaLike | None = None,
        reduction: TargetReduction = "mean", similarity: Similarity = "dot", memory: Memory = "fast",
        backend: Backend | None = None, group: GroupLike | None = None) -> None: ...

class CoSENTLoss(ScaledLoss):
    def __init__(self, *, scale: float = 20.0, learn_scale: bool = False, max_scale: float | None = None,
        group: GroupLike | None = None) -> None: ...

class CosFaceLoss(ScaledLoss):
    def __init__(self, *, scale: float = 64.0, learn_scale: bool = False, max_scale: float | None = None,
        margin: float = 0.35, reduction: Reduction = "mean", memory: Memory = "fast",
        backend: Backend | None = None, group: GroupLike | None = None) -> None: ...

class CURLBlockLoss(Loss):
    def __init__(self, *, context_size: int = 1, negatives: BlockNegatives = "shift",
        reduction: Reduction = "mean", group: GroupLike | None = None) -> None: ...

class CURLLoss(Loss):
    def __init__(self, *, reduction: Reduction = "mean", group: GroupLike | None = None) -> None: ...

class DCLLoss(ScaledLoss):
    def __init__(self, *, scale: float = 10.0, learn_scale: bool = False, max_scale: float | None = None,
        sigma: float | None = None, reduction: Reduction = "mean", memory: Memory = "fast",
        backend: Backend | None = None, group: GroupLike | None = None) -> None: ...

class DistillationLoss(ScaledLoss):
    def __init__(self, *, scale: float = 20.0, learn_scale: bool = False, max_scale: float | None = None,
        teacher_scale: float = 20.0, normalize: bool = True, cross_entropy: bool = False,
        reduction: Reduction = "mean", group: GroupLike | None = None) -> None: ...

class FlopsLoss(Loss):
    def __init__(self, *, group: GroupLike | None = None) -> None: ...

class GISTEmbedLoss(ScaledLoss):
    def __init__(self, *, scale: float = 100.0, learn_scale: bool = False, max_scale: float | None = None,
        margin: float = 0.0, margin_strategy: MarginStrategy = "absolute", contrast_anchors: bool = True,
        contrast_positives: bool = True, reduction: Reduction = "mean", memory: Memory = "fast",
        backend: Backend | None = None, group: GroupLike | None = None) -> None: ...

class GlossBagOfWordsLoss(Loss):
    def __init__(self, *, reduction: Reduction = "mean", memory: Memory = "fast",
        backend: Backend | None = None, group: GroupLike | None = None) -> None: ...

class GlossPositionalLoss(Loss):
    def __init__(self, *, position_loss: PositionLoss = "sum", reduction: Reduction = "mean",
        memory: Memory = "fast", backend: Backend | None = None, group: GroupLike | None = None) -> None: ...

class HCLLoss(ScaledLoss):
    def __init__(self, *, scale: float = 2.0, learn_scale: bool = False, max_scale: float | None = None,
        beta: float = 1.0, tau_plus: float | Tensor = 0.1, reduction: Reduction = "mean",
        memory: Memory = "fast", backend: Backend | None = None, group: GroupLike | None = None) -> None: ...

class InfoNCELoss(ScaledLoss):
    def __init__(self, *, scale: float = 20.0, learn_scale: bool = False, max_scale: float | None = None,
        normalize: bool = True, tau_plus: float | Tensor = 0.0, label_smoothing: float = 0.0,
        exclude: ExcludeLike | None = None, similarity: Similarity = "dot",
        matryoshka: MatryoshkaLike | None = None, reduction: TargetReduction = "mean",
        memory: Memory = "fast", backend: Backend | None = None, group: GroupLike | None = None) -> None: ...

class LSEPLoss(ScaledLoss):
    def __init__(self, *, scale: float = 1.0, learn_scale: bool = False, max_scale: float | None = None,
        group: GroupLike | None = None) -> None: ...

class MarginMSELoss(ScaledLoss):
    def __init__(self, *, scale: float = 1.0, learn_scale: bool = False, max_scale: float | None = None,
        reduction: Reduction = "mean", group: GroupLike | None = None) -> None: ...

class MaxMarginLoss(Loss):
    def __init__(self, *, margin: float = 1.0, diagonal: MarginDiagonal = "exclude",
        context_size: int | None = None, normalize: bool = False, reduction: Reduction = "mean",
        group: GroupLike | None = None) -> None: ...

class MaxSimLoss(ScaledLoss):
    def __init__(self, *, scale: float = 1.0, learn_scale: bool = False, max_scale: float | None = None,
        normalize: bool = True, reduction: Reduction = "mean", group: GroupLike | None = None) -> None: ...

class MixCSELoss(ScaledLoss):
    def __init__(self, *, mix: float = 0.2, scale: float = 20.0, learn_scale: bool = False,
        max_scale: float | None = None, form: MixForm = "slides", partner: MixPartner = "next",
        blocks: MixBlocks = "both", masked_cell: MaskedCell = "zero", hard_negative_weight: float = 0.0,
        stop_gradient: bool = True, exclude: ExcludeLike | None = None, reduction: Reduction = "mean",
        memory: Memory = "fast", backend: Backend | None = None, group: GroupLike | None = None) -> None: ...

class MultipleNegativesRankingLoss(ScaledLoss):
    def __init__(self, *, scale: float = 20.0, learn_scale: bool = False, max_scale: float | None = None,
        normalize: bool = True, directions: Sequence[Direction] = ("query_to_doc",),
        partition_mode: PartitionMode = "joint", hardness_mode: HardnessMode | None = None,
        hardness_strength: float = 0.0, tau_plus: float | Tensor = 0.0, exclude: ExcludeLike | None = None,
        matryoshka: MatryoshkaLike | None = None, reduction: Reduction = "mean", memory: Memory = "fast",
        backend: Backend | None = None, group: GroupLike | None = None) -> None: ...

class NegativeSamplingLoss(ScaledLoss):
    def __init__(self, *, scale: float = 1.0, learn_scale: bool = False, max_scale: float | None = None,
        reduction: Reduction = "mean", group: GroupLike | None = None) -> None: ...

class NTXentLoss(ScaledLoss):
    def __init__(self, *, scale: float = 10.0, learn_scale: bool = False, max_scale: float | None = None,
        normalize: bool = True, reduction: Reduction = "mean", memory: Memory = "fast",
        backend: Backend | None = None, group: GroupLike | None = None) -> None: ...

class ScoreDistillationLoss(ScaledLoss):
    def __init__(self, *, scale: float = 1.0, learn_scale: bool = False, max_scale: float | None = None,
        teacher_scale: float = 1.0, cross_entropy: bool = False, reduction: Reduction = "mean",
        group: GroupLike | None = None) -> None: ...

class SigLIPLoss(BiasedLoss):
    def __init__(self, *, scale: float = 10.0, learn_scale: bool = True, max_scale: float | None = None,
        bias: float = -10.0, learn_bias: bool = True, normalize: bool = True,
        exclude: ExcludeLike | None = None, matryoshka: MatryoshkaLike | None = None,
        reduction: Reduction = "mean", memory: Memory = "fast", backend: Backend | None = None,
        group: GroupLike | None = None) -> None: ...

class SigmoidLoss(ScaledLoss):
    def __init__(self, *, context_size: int | None = None, diagonal: DiagonalMode = "keep",
        scale: float = 1.0, learn_scale: bool = False, max_scale: float | None = None,
        normalize: bool = False, exclude: ExcludeLike | None = None, matryoshka: MatryoshkaLike | None = None,
        reduction: Reduction = "mean", memory: Memory = "fast", backend: Backend | None = None,
        group: GroupLike | None = None) -> None: ...

class SimCSELoss(ScaledLoss):
    def __init__(self, *, scale: float = 20.0, learn_scale: bool = False, max_scale: float | None = None,
        hard_negative_weight: float = 0.0, tau_plus: float | Tensor = 0.0, exclude: ExcludeLike | None = None,
        matryoshka: MatryoshkaLike | None = None, reduction: Reduction = "mean", memory: Memory = "fast",
        backend: Backend | None = None, group: GroupLike | None = None) -> None: ...

class SimilarityDistillationLoss(Loss):
    def __init__(self, *, normalize: bool = True, group: GroupLike | None = None) -> None: ...

class SpreadOutLoss(Loss):
    def __init__(self, *, mean_weight: float = 1.0, second_moment_weight: float = 1.0, hinge: bool = True,
        normalize: bool = True, group: GroupLike | None = None) -> None: ...

class SupConLoss(ScaledLoss):
    def __init__(self, *, scale: float = 10.0, learn_scale: bool = False, max_scale: float | None = None,
        normalize: bool = True, matryoshka: MatryoshkaLike | None = None, reduction: Reduction = "mean",
        memory: Memory = "fast", backend: Backend | None = None, group: GroupLike | None = None) -> None: ...

class SimCSEOptions(TypedDict, total=False):
    scale: float
    learn_scale: bool
    max_scale: float | None
    hard_negative_weight: float
    tau_plus: float | Tensor
    exclude: ExcludeLike | None
    matryoshka: MatryoshkaLike | None
    reduction: Reduction
    memory: Memory
    backend: Backend | None
    group: GroupLike | None

class MixCSEOptions(TypedDict, total=False):
    mix: float
    scale: float
    learn_scale: bool
    max_scale: float | None
    form: MixForm
    partner: MixPartner
    blocks: MixBlocks
    masked_cell: MaskedCell
    hard_negative_weight: float
    stop_gradient: bool
    exclude: ExcludeLike | None
    reduction: Reduction
    memory: Memory
    backend: Backend | None
    group: GroupLike | None
