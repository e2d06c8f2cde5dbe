"""The losses as modules, for those who keep their options in one place or learn the scale.

A module takes its function's options once, and at each call what changes from batch to batch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastqt import losses
from fastqt.checks import check_number, check_scale
from fastqt.functional import contrastive_loss, sigmoid_loss
from fastqt.losses.max_margin import max_margin_loss


class Loss(nn.Module):
    """A loss function with its options fixed.

    Args:
        **options: the function's keyword arguments, other than those of a batch.

    Raises:
        TypeError: an option that the function has not, by name.

    Attributes:
        function: the loss.
        of_batch: its keyword arguments that come with each call.
    """

    function: ClassVar[Callable[..., Tensor]]
    of_batch: ClassVar[tuple[str, ...]] = ()

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.named = frozenset(self._defaults())
        unknown = sorted(options.keys() - self.named)
        if unknown:
            raise TypeError(f"{', '.join(unknown)}: no option of {type(self).__name__}")
        self.options = options

    def forward(self, *data: Any, **of_batch: Any) -> Tensor:
        """The loss of a batch: all but the options, as the function takes it."""
        fixed = sorted(of_batch.keys() & self.named)
        if fixed:
            raise TypeError(f"{', '.join(fixed)}: want it when {type(self).__name__} is made, not in a call")
        return type(self).function(*data, **of_batch, **self._fixed())

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())

    def _fixed(self) -> dict[str, Any]:
        """What the function gets beside a batch."""
        return self.options

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        """The options that there are, and the function's own values of them."""
        parameters = inspect.signature(cls.function).parameters.values()
        named = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        return {name: named[name] for name in named.keys() - set(cls.of_batch)}


class ScaledLoss(Loss):
    """A loss function of scaled scores with its options fixed.

    Args:
        scale: inverse temperature; a finite number, > 0 if it is learnt. By default the function's.
        learn_scale: make it a parameter, `log_scale`, so that it stays positive.
        **options: the function's keyword arguments, other than those of a batch.

    Raises:
        TypeError, ValueError: an option that the function has not, or a scale that cannot be used.
    """

    log_scale: nn.Parameter | None

    def __init__(self, *, scale: float | None = None, learn_scale: bool = False, **options: Any) -> None:
        super().__init__(**options)
        scale = self._defaults()["scale"] if scale is None else scale
        check_scale(scale)
        if learn_scale and not scale > 0:
            raise ValueError(f"scale: want a positive number to learn from, got {scale}")
        self.initial_scale = float(scale)
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale))) if learn_scale else None

    @property
    def scale(self) -> float | Tensor:
        """The inverse temperature in use."""
        return self.initial_scale if self.log_scale is None else self.log_scale.exp()

    def extra_repr(self) -> str:
        learnt = ", learn_scale=True" if self.log_scale is not None else ""
        options = super().extra_repr()
        return f"scale={self.initial_scale}{learnt}" + (f", {options}" if options else "")

    def _fixed(self) -> dict[str, Any]:
        return {"scale": self.scale, **super()._fixed()}


class ContrastiveLoss(ScaledLoss):
    """`fastqt.contrastive_loss` with its options fixed; its bias is one of a batch's arguments."""

    function = staticmethod(contrastive_loss)
    of_batch = (
        "document_ids",
        "bias",
        "negatives",
        "row_negatives",
        "query_groups",
        "candidate_groups",
        "mask",
    )


class SigmoidLoss(ScaledLoss):
    """`fastqt.sigmoid_loss` with its options fixed; its bias is one of a batch's arguments."""

    function = staticmethod(sigmoid_loss)
    of_batch = ContrastiveLoss.of_batch


class MaxMarginLoss(Loss):
    """`fastqt.max_margin_loss` with its options fixed."""

    function = staticmethod(max_margin_loss)
    of_batch = ("document_ids",)


class InfoNCELoss(ScaledLoss):
    """`fastqt.info_nce_loss` with its options fixed."""

    function = staticmethod(losses.info_nce_loss)
    of_batch = ("negatives",)


class SimCSELoss(ScaledLoss):
    """`fastqt.simcse_loss` with its options fixed."""

    function = staticmethod(losses.simcse_loss)


class MixCSELoss(ScaledLoss):
    """`fastqt.mixcse_loss` with its options fixed."""

    function = staticmethod(losses.mixcse_loss)
    of_batch = ("generator",)


class CLIPLoss(ScaledLoss):
    """`fastqt.clip_loss` with its options fixed; its scale begins at the paper's 1 / 0.07 and is learnt."""

    function = staticmethod(losses.clip_loss)

    def __init__(self, *, scale: float = 1 / 0.07, learn_scale: bool = True, **options: Any) -> None:
        super().__init__(scale=scale, learn_scale=learn_scale, **options)


class SigLIPLoss(ScaledLoss):
    """`fastqt.siglip_loss` with its options fixed; its scale and bias begin at the paper's and are learnt.

    Args:
        bias: a finite number.
        learn_bias: make it a parameter.
        scale, learn_scale, **options: as of `ScaledLoss`.
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
        check_number("bias", bias, "none")
        self.bias = nn.Parameter(torch.tensor(float(bias))) if learn_bias else float(bias)

    def extra_repr(self) -> str:
        bias = "learn_bias=True" if isinstance(self.bias, nn.Parameter) else f"bias={self.bias}"
        return f"{super().extra_repr()}, {bias}"

    def _fixed(self) -> dict[str, Any]:
        return {"bias": self.bias, **super()._fixed()}


class CURLLoss(Loss):
    """`fastqt.curl_loss` with its options fixed."""

    function = staticmethod(losses.curl_loss)


class CURLBlockLoss(Loss):
    """`fastqt.curl_block_loss` with its options fixed."""

    function = staticmethod(losses.curl_block_loss)
    of_batch = ("document_ids", "generator")


class GlossBagOfWordsLoss(Loss):
    """`fastqt.gloss_bow_loss` with its options fixed."""

    function = staticmethod(losses.gloss_bow_loss)


class GlossPositionalLoss(Loss):
    """`fastqt.gloss_pos_loss` with its options fixed."""

    function = staticmethod(losses.gloss_pos_loss)
