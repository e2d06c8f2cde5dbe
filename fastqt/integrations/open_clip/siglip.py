"""`SigLipLoss`: SigLIP, whose value is that of a rank's images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastqt.checks import check_option, check_size
from fastqt.functional import sigmoid_loss
from fastqt.integrations.open_clip.base import LossOfRanks, bias_of, scaled
from fastqt.losses import siglip_loss
from fastqt.options import Backend, Memory

# How ranks exchange text features: at once, or so that one other rank's at a time may visit.
EXCHANGES = {"bidir": "auto", "shift": "auto", "reduce": "gather", "gather": "gather"}


class SigLipLoss(LossOfRanks):
    """`open_clip.loss.SigLipLoss`, computed by `fastqt.siglip_loss`.

    The value is the loss of this rank's images with the texts of all ranks, over the number of its images.
    The gradients of features are P times those of the mean over P processes, which DDP's average makes right,
    as with every `dist_impl` of open_clip. `fastqt.siglip_loss(..., group=)` has the same value on all ranks.

    Args:
        cache_labels: of no effect on the loss, which needs no labels.
        rank, world_size: the place among all processes of torch.distributed, whose shards are equal.
        dist_impl: how ranks exchange texts, which does not change the loss. "gather" and "reduce": each rank
            gathers all of them; "bidir" (the default) and "shift": it does if they and their gradients take
            at most an eighth of the memory, and otherwise they visit it, one rank's after the other.
        chunk_size: of open_clip's development version; of no effect, as the scores are computed in
            parts of the size that `memory` says.
        use_horovod: False.
        memory, backend: as of `fastqt.siglip_loss`.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch
        >>> from fastqt.integrations.open_clip import SigLipLoss
        >>> images, texts = torch.nn.functional.normalize(torch.randn(2, 8, 16), dim=-1)
        >>> SigLipLoss()(images, texts, logit_scale=torch.tensor(10.0), logit_bias=torch.tensor(-10.0)).shape
        torch.Size([])
    """

    def __init__(
        self,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dist_impl: str | None = None,
        chunk_size: int = 0,
        use_horovod: bool = False,
        *,
        memory: Memory = "fast",
        backend: Backend | None = None,
    ) -> None:
        dist_impl = "bidir" if dist_impl is None else dist_impl
        check_option("dist_impl", dist_impl, tuple(EXCHANGES))
        check_size("chunk_size", chunk_size, least=0)
        group_options = {"gradients": "sum", "exchange": EXCHANGES[dist_impl]}
        super().__init__(cache_labels, rank, world_size, use_horovod, memory, backend, **group_options)
        self.dist_impl, self.chunk_size = dist_impl, chunk_size

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The loss of a batch, as of `ClipLoss.forward`; logit_bias may also be a tensor, or None for 0."""
        arguments = image_features, text_features, logit_scale, logit_bias
        loss = self._loss(*arguments) if self.world_size <= 1 else self._of_ranks(*arguments)
        return {"contrastive_loss": loss} if output_dict else loss

    def _of_ranks(
        self, images: Tensor, texts: Tensor, logit_scale: Tensor | float, logit_bias: Tensor | float | None
    ) -> Tensor:
        images, scale = scaled(images, logit_scale)
        options: dict[str, Any] = {"scale": scale, "bias": bias_of(logit_bias), **self.options}
        group = self.group()
        if group.takes_ring(len(texts) * self.world_size, texts):
            return siglip_loss(images, texts, reduction="none", group=group, **options).mean()
        shards = self.agreed(images, texts, scale=options["scale"], bias=options["bias"])
        pairs = torch.arange(len(images), device=images.device) + shards.first("rows")
        return sigmoid_loss(images, self.gathered(texts), pairs, **options)

    def _loss(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        negative_only: bool = False,
    ) -> Tensor:
        """The loss of one process's images and texts, or with `negative_only` of such that form no pairs."""
        image_features, scale = scaled(image_features, logit_scale)
        options: dict[str, Any] = {"scale": scale, "bias": bias_of(logit_bias), **self.options}
        if not negative_only:
            return siglip_loss(image_features, text_features, **options)
        none = torch.full((len(image_features),), -100, device=image_features.device)
        return sigmoid_loss(image_features, text_features, none, **options)

    def get_ground_truth(
        self, device: torch.device, dtype: torch.dtype, num_logits: int, negative_only: bool = False
    ) -> Tensor:
        """1 for pairs and -1 for others, (num_logits, num_logits)."""
        labels = torch.full((num_logits, num_logits), -1, device=device, dtype=dtype)
        return labels if negative_only else labels.fill_diagonal_(1)

    def get_logits(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
    ) -> Tensor:
        """The matrix of scores, which `forward` does not form."""
        logits = logit_scale * image_features @ text_features.T
        return logits if logit_bias is None else logits + logit_bias
