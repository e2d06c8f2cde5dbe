"""The losses as modules of two views of each sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastqt import losses
from fastqt.distributed.group import GroupLike
from fastqt.losses.mixcse import check_released_alone
from fastqt.nn.losses.base import ScaledLoss, given
from fastqt.options import Backend, MaskedCell, Memory, MixBlocks, MixForm, MixPartner, Reduction


class SimCSELoss(ScaledLoss):
    """`fastqt.simcse_loss` with its options fixed.

    A call takes the views z1 and z2, and the hard negatives z3 if there are any.

    Args:
        scale, learn_scale, max_scale: as of `ContrastiveLoss`; the scale is 1 / temperature.
        hard_negative_weight, reduction, memory, backend, group: as of `fastqt.simcse_loss`.

    Raises:
        TypeError, ValueError: as in `ContrastiveLoss`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.SimCSELoss(scale=1 / 0.05)  # a temperature of 0.05
        >>> z1, z2, z3 = torch.randn(3, 8, 16)
        >>> bool(criterion(z1, z2, z3) > criterion(z1, z2))  # z3 has further negatives
        True
    """

    function = staticmethod(losses.simcse_loss)

    def __init__(
        self,
        *,
        scale: float = 20.0,
        learn_scale: bool = False,
        max_scale: float | None = None,
        hard_negative_weight: float = 0.0,
        reduction: Reduction = "mean",
        memory: Memory = "fast",
        backend: Backend | None = None,
        group: GroupLike | None = None,
    ) -> None:
        super().__init__(**given(locals()))


class MixCSELoss(ScaledLoss):
    """`fastqt.mixcse_loss` with its options fixed.

    A call takes the views z1 and z2, and the keyword argument `generator`.

    Args:
        scale, learn_scale, max_scale: as of `ContrastiveLoss`; the scale is 1 / temperature.
        mix, form, partner, blocks, masked_cell, hard_negative_weight, stop_gradient, reduction, memory,
            backend, group: as of `fastqt.mixcse_loss`.

    Raises:
        TypeError, ValueError: as in `ContrastiveLoss`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.MixCSELoss(mix=0.2, form="released")
        >>> z1, z2 = torch.randn(2, 8, 16)
        >>> criterion(z1, z2).shape
        torch.Size([])
    """

    function = staticmethod(losses.mixcse_loss)
    batch_arguments = ("generator",)

    def __init__(
        self,
        *,
        mix: float = 0.2,
        scale: float = 20.0,
        learn_scale: bool = False,
        max_scale: float | None = None,
        form: MixForm = "slides",
        partner: MixPartner = "next",
        blocks: MixBlocks = "both",
        masked_cell: MaskedCell = "zero",
        hard_negative_weight: float = 0.0,
        stop_gradient: bool = True,
        reduction: Reduction = "mean",
        memory: Memory = "fast",
        backend: Backend | None = None,
        group: GroupLike | None = None,
    ) -> None:
        super().__init__(**given(locals()))

    @classmethod
    def check_values(cls, options: Mapping[str, Any]) -> None:
        super().check_values(options)
        of_released = {"blocks": "both", "masked_cell": "zero", "hard_negative_weight": 0.0}
        if options.get("form", "slides") == "slides":
            check_released_alone(**{name: options.get(name, value) for name, value in of_released.items()})
