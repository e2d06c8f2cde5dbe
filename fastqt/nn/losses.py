"""Each loss as a module. What they have in common is in `fastqt.nn.loss`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastqt import losses
from fastqt.checks import check_flag, check_number
from fastqt.functional import contrastive_loss, sigmoid_loss
from fastqt.losses.curl import BLOCK_NEGATIVES
from fastqt.losses.mixcse import check_released_alone
from fastqt.losses.ranking_options import check_partition
from fastqt.nn.loss import Loss, ScaledLoss
from fastqt.problem import TARGET_REDUCTIONS


class ContrastiveLoss(ScaledLoss):
    """`fastqt.contrastive_loss` with its options fixed; `bias` is an argument of each call."""

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


class SigmoidLoss(ScaledLoss):
    """`fastqt.sigmoid_loss` with its options fixed; `bias` is an argument of each call."""

    function = staticmethod(sigmoid_loss)
    batch_arguments = ContrastiveLoss.batch_arguments


class MaxMarginLoss(Loss):
    """`fastqt.max_margin_loss` with its options fixed."""

    function = staticmethod(losses.max_margin_loss)
    batch_arguments = ("document_ids",)
    choices: ClassVar[dict[str, tuple[str, ...]]] = {"diagonal": ("exclude", "keep")}


class BinaryWindowLoss(Loss):
    """`fastqt.binary_window_loss` with its options fixed."""

    function = staticmethod(losses.binary_window_loss)
    batch_arguments = ("document_ids", "generator")


class NegativeSamplingLoss(ScaledLoss):
    """`fastqt.negative_sampling_loss` with its options fixed."""

    function = staticmethod(losses.negative_sampling_loss)


class InfoNCELoss(ScaledLoss):
    """`fastqt.info_nce_loss` with its options fixed."""

    function = staticmethod(losses.info_nce_loss)
    choices = ContrastiveLoss.choices
    batch_arguments = ("negatives", "guide")


class SimCSELoss(ScaledLoss):
    """`fastqt.simcse_loss` with its options fixed."""

    function = staticmethod(losses.simcse_loss)


class MixCSELoss(ScaledLoss):
    """`fastqt.mixcse_loss` with its options fixed."""

    function = staticmethod(losses.mixcse_loss)
    batch_arguments = ("generator",)

    @classmethod
    def check_values(cls, options: Mapping[str, Any]) -> None:
        super().check_values(options)
        of_released = {"blocks": "both", "masked_cell": "zero", "hard_negative_weight": 0.0}
        if options.get("form", "slides") == "slides":
            check_released_alone(**{name: options.get(name, value) for name, value in of_released.items()})


class CLIPLoss(ScaledLoss):
    """`fastqt.clip_loss` with its options fixed; by default the scale is learnt.

    Args:
        scale: the initial inverse temperature; by default the CLIP paper's 1 / 0.07.
        max_scale: the most that the scale may be; by default the paper's 100.
        learn_scale, **options: as in `ScaledLoss`.

    Raises:
        TypeError, ValueError: as in `ScaledLoss`.
    """

    function = staticmethod(losses.clip_loss)

    def __init__(
        self,
        *,
        scale: float = 1 / 0.07,
        learn_scale: bool = True,
        max_scale: float | None = 100.0,
        **options: Any,
    ) -> None:
        super().__init__(scale=scale, learn_scale=learn_scale, max_scale=max_scale, **options)


class SigLIPLoss(ScaledLoss):
    """`fastqt.siglip_loss` with its options fixed; by default scale and bias are learnt.

    Args:
        scale: the initial inverse temperature; by default the SigLIP paper's 10.
        bias: the initial bias, a finite number; by default the paper's -10.
        learn_bias: learn the bias as a parameter.
        learn_scale, **options: as in `ScaledLoss`.

    Raises:
        TypeError, ValueError: as in `ScaledLoss`, or a bias that is not a finite number.
    """

    function = staticmethod(losses.siglip_loss)
    bias: nn.Parameter | float

    def __init__(
        self,
        *,
        scale: float = 10.0,
        learn_scale: bool = True,
        bias: float = -10.0,
        learn_bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(scale=scale, learn_scale=learn_scale, **options)
        check_number("bias", bias)
        check_flag("learn_bias", learn_bias)
        self.bias = nn.Parameter(torch.tensor(float(bias))) if learn_bias else float(bias)

    def extra_repr(self) -> str:
        bias = "learn_bias=True" if isinstance(self.bias, nn.Parameter) else f"bias={self.bias}"
        return f"{super().extra_repr()}, {bias}"

    def function_options(self) -> dict[str, Any]:
        return {"bias": self.bias, **super().function_options()}


class GISTEmbedLoss(ScaledLoss):
    """`fastqt.gist_embed_loss` with its options fixed; the guide's embeddings are arguments of each call."""

    function = staticmethod(losses.gist_embed_loss)
    batch_arguments = ("guide_anchors", "guide_positives", "guide_negatives")


class CURLLoss(Loss):
    """`fastqt.curl_loss` with its options fixed."""

    function = staticmethod(losses.curl_loss)


class CURLBlockLoss(Loss):
    """`fastqt.curl_block_loss` with its options fixed."""

    function = staticmethod(losses.curl_block_loss)
    batch_arguments = ("document_ids", "generator")
    choices: ClassVar[dict[str, tuple[str, ...]]] = {"negatives": BLOCK_NEGATIVES}


class GlossBagOfWordsLoss(Loss):
    """`fastqt.gloss_bow_loss` with its options fixed."""

    function = staticmethod(losses.gloss_bow_loss)


class GlossPositionalLoss(Loss):
    """`fastqt.gloss_pos_loss` with its options fixed."""

    function = staticmethod(losses.gloss_pos_loss)


class SupConLoss(ScaledLoss):
    """`fastqt.supcon_loss` with its options fixed."""

    function = staticmethod(losses.supcon_loss)
    batch_arguments = ("candidates", "candidate_labels")


class NTXentLoss(ScaledLoss):
    """`fastqt.ntxent_loss` with its options fixed."""

    function = staticmethod(losses.ntxent_loss)
    batch_arguments = SupConLoss.batch_arguments


class MultipleNegativesRankingLoss(ScaledLoss):
    """`fastqt.multiple_negatives_ranking_loss` with its options fixed."""

    function = staticmethod(losses.multiple_negatives_ranking_loss)

    @classmethod
    def check_values(cls, options: Mapping[str, Any]) -> None:
        super().check_values(options)
        check_partition(options.get("directions", ()), options.get("partition_mode", "joint"))


MODULES: tuple[type[Loss], ...] = (
    *(ContrastiveLoss, SigmoidLoss, MaxMarginLoss, InfoNCELoss, SimCSELoss, MixCSELoss, CLIPLoss, SigLIPLoss),
    *(CURLLoss, CURLBlockLoss, GlossBagOfWordsLoss, GlossPositionalLoss),
    *(GISTEmbedLoss, SupConLoss, NTXentLoss, MultipleNegativesRankingLoss),
    *(BinaryWindowLoss, NegativeSamplingLoss),
)


def check_options(function: Callable[..., Tensor], options: Mapping[str, Any]) -> None:
    """Checks the keyword arguments that a loss function is to be called with, before there is a batch.

    Args:
        function: one of this library, whose options' values are checked too, or any other.
        options: keyword arguments of the function.

    Raises:
        TypeError: a name that the function does not have.
        TypeError, ValueError: a value that a function of this library refuses.
    """
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        unknown = sorted(options.keys() - parameters.keys())
        if unknown:
            raise TypeError(f"{', '.join(unknown)}: no option of {getattr(function, '__name__', function)}")
    for module in MODULES:
        if module.function is function:
            module.check_values(options)
