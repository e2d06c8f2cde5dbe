"""Lightning (the extra `lightning`): a module that trains encoders with a contrastive loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastqt.checks import check_number, check_option, shown
from fastqt.distributed import Group
from fastqt.integrations._libraries import load_library
from fastqt.nn.losses import Loss

load_library("lightning")
import lightning  # noqa: E402  # after the check of its version

__all__ = ["ContrastiveModule"]


class ContrastiveModule(lightning.LightningModule):
    """Encoders and a loss of their embeddings, trained by `lightning.Trainer`.

        module = ContrastiveModule(encoder, fastqt.nn.SimCSELoss(), learning_rate=1e-4)
        lightning.Trainer(strategy="ddp", devices=8).fit(module, loader)

    A batch is a sequence of views, one for each argument of the loss: a tensor that the encoder is called
    with, or a tuple or a mapping of its arguments. SimCSE takes the same view twice, as dropout makes them
    differ. Parameters of the loss, such as a learnt scale, are trained with the others. Logged are the
    `train_loss`, the `val_loss`, and a learnt `scale`.

    Args:
        encoders: one for all views, or a sequence with one for each view, such as CLIP's two.
        loss: a module of `fastqt.nn`, or another one that takes the embeddings.
        learning_rate, weight_decay: of AdamW; the loss's parameters do not decay. Override
            `configure_optimizers` for another optimiser.
        group: whose embeddings are candidates of each other, unless the loss module was made with a group.
            "auto": those of all processes that Lightning starts. Their shards have to be of equal length,
            which `drop_last=True` of a loader sees to; a mapping of options of `fastqt.distributed.Group`,
            such as {"shards": "uneven"}, takes others. None: those of each process alone.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> from fastqt.integrations.lightning import ContrastiveModule
        >>> module = ContrastiveModule(torch.nn.Linear(32, 16), fastqt.nn.InfoNCELoss(learn_scale=True))
        >>> [embeddings.shape for embeddings in module(*torch.randn(2, 8, 32))]
        [torch.Size([8, 16]), torch.Size([8, 16])]
    """

    def __init__(
        self,
        encoders: nn.Module | Sequence[nn.Module],
        loss: nn.Module,
        *,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.01,
        group: str | Mapping[str, Any] | None = "auto",
    ) -> None:
        super().__init__()

        for name, value in (("learning_rate", learning_rate), ("weight_decay", weight_decay)):
            check_number(name, value)
            if value < 0:
                raise ValueError(f"{name}: want a number of at least 0, got {value}")

        if not isinstance(loss, nn.Module):
            raise TypeError(f"loss: want a module, got {shown(loss)}")

        if isinstance(group, Mapping):
            if not isinstance(loss, Loss):
                raise TypeError(
                    f"group: want None or 'auto' for a loss that is not fastqt's, got {dict(group)}"
                )
        elif group is not None:
            check_option("group", group, ("auto",))

        single = isinstance(encoders, nn.Module) and not isinstance(encoders, nn.ModuleList)
        several = cast("Sequence[nn.Module]", [encoders] if single else encoders)
        listed = isinstance(several, (Sequence, nn.ModuleList))
        if not listed or not all(isinstance(each, nn.Module) for each in several):
            raise TypeError(f"encoders: want a module or a sequence of modules, got {shown(encoders)}")
        if not len(several):
            raise ValueError("encoders: want at least one, got none")

        self.encoders = nn.ModuleList(several)
        self.shares_encoder = single

        self.loss: Any = loss
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        has_group = isinstance(loss, Loss) and loss.options.get("group") is not None
        self.group = None if has_group else group

    def setup(self, stage: str) -> None:
        """Gives the loss the group of all processes, which Lightning has started by now."""
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if self.group is None or not several or not isinstance(self.loss, Loss):
            return
        options = self.group if isinstance(self.group, Mapping) else {}
        self.loss.options = {**self.loss.options, "group": Group(**options)}

    def forward(self, *views: Any) -> list[Tensor]:
        """The embeddings of each view.

        Raises:
            ValueError: another number of views than of encoders.
        """
        encoders = list(self.encoders) * (len(views) if self.shares_encoder else 1)
        if len(encoders) != len(views):
            raise ValueError(f"batch: want a view for each of {len(encoders)} encoders, got {len(views)}")
        return [_encoded(encoder, view) for encoder, view in zip(encoders, views, strict=True)]

    def training_step(self, batch: Sequence[Any], index: int) -> Tensor:
        return self._loss_of(batch, "train_loss")

    def validation_step(self, batch: Sequence[Any], index: int) -> Tensor:
        return self._loss_of(batch, "val_loss")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [
            {"params": list(self.encoders.parameters())},
            {"params": list(self.loss.parameters()), "weight_decay": 0.0},
        ]
        filled = [group for group in groups if group["params"]]
        return torch.optim.AdamW(filled, lr=self.learning_rate, weight_decay=self.weight_decay)

    def _loss_of(self, batch: Sequence[Any], name: str) -> Tensor:
        embeddings = self(*batch)
        loss: Tensor = self.loss(*embeddings)
        rows = len(embeddings[0])

        # In a group it is the same on all ranks, and nothing is left to reduce.
        alone = getattr(self.loss, "options", {}).get("group") is None
        self.log(name, loss, prog_bar=True, batch_size=rows, sync_dist=alone)

        if name == "train_loss" and getattr(self.loss, "log_scale", None) is not None:
            self.log("scale", self.loss.scale.detach(), batch_size=rows)
        return loss


def _encoded(encoder: nn.Module, view: Any) -> Tensor:
    embeddings: Tensor
    if isinstance(view, Mapping):
        embeddings = encoder(**view)
    elif isinstance(view, (tuple, list)):
        embeddings = encoder(*view)
    else:
        embeddings = encoder(view)
    return embeddings
