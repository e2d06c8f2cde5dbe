"""`ClipLoss`: CLIP in each of the four ways in which open_clip joins the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastqt.checks import check_flag
from fastqt.functional import contrastive_loss
from fastqt.integrations.open_clip.base import LossOfRanks, number, scaled
from fastqt.losses import clip_loss
from fastqt.options import Backend, Memory


class ClipLoss(LossOfRanks):
    """`open_clip.loss.ClipLoss`, computed by `fastqt.clip_loss`.

    With world_size = P processes, let L be the loss of all pairs, and L_r that of rank r's n pairs among all
    candidates, so that L is the mean of the L_r. Values and gradients are those of open_clip:

    | local_loss | gather_with_grad | value | gradient of a rank's features | DDP's average of it |
    |---|---|---|---|---|
    | False | False (default) | L | that of L | 1 / P of the gradient of L |
    | False | True | L | P times that of L | the gradient of L |
    | True | False | L_r | that of L_r, all candidates being constants | another direction |
    | True | True | L_r | P times that of L | the gradient of L |

    In all four, DDP's average of the gradient of logit_scale is that of L; before the average, a rank's part
    may be another than open_clip's. Use gather_with_grad=True where the gradient of the batch is wanted;
    `fastqt.clip_loss(..., group=)` has that gradient, and its value L on all ranks.

    Args:
        local_loss, gather_with_grad: see above.
        cache_labels: of no effect on the loss, which needs no labels.
        rank, world_size: the place among all processes of torch.distributed, whose shards are equal.
        use_horovod: False.
        memory, backend: as of `fastqt.clip_loss`.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch
        >>> from fastqt.integrations.open_clip import ClipLoss
        >>> images, texts = torch.nn.functional.normalize(torch.randn(2, 8, 16), dim=-1)
        >>> ClipLoss()(images, texts, logit_scale=torch.tensor(1 / 0.07)).shape
        torch.Size([])
    """

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
        *,
        memory: Memory = "fast",
        backend: Backend | None = None,
    ) -> None:
        check_flag("local_loss", local_loss)
        check_flag("gather_with_grad", gather_with_grad)
        # The ranks' own losses add up to P times that of the batch, which the average of gradients undoes.
        gradients = "sum" if local_loss and gather_with_grad else "average"
        place = cache_labels, rank, world_size, use_horovod
        super().__init__(*place, memory, backend, gradients=gradients)
        self.local_loss, self.gather_with_grad = local_loss, gather_with_grad

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The loss of a batch.

        Args:
            image_features, text_features: (n, D), rows of equal index are a pair.
            logit_scale: 1 / temperature, a number or a tensor of one.
            logit_bias: added to all scores, which changes neither value nor gradients of a softmax.
            output_dict: return {"contrastive_loss": loss}.

        Returns:
            A scalar, in float32 or, for float64 features, float64.

        Raises:
            ValueError, TypeError: naming the argument, what is wanted and what came.
        """
        loss = self.contrastive_loss(image_features, text_features, logit_scale)
        if isinstance(logit_bias, Tensor):
            loss = loss + 0 * number(logit_bias)  # DDP waits for its gradient, which is 0.
        return {"contrastive_loss": loss} if output_dict else loss

    def contrastive_loss(
        self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor | float
    ) -> Tensor:
        """CLIP's loss of a batch, a scalar; the arguments as of a call."""
        image_features, scale = scaled(image_features, logit_scale)
        if self.world_size <= 1:
            return clip_loss(image_features, text_features, scale=scale, **self.options)
        return self._of_ranks(image_features, text_features, scale)

    def _of_ranks(self, images: Tensor, texts: Tensor, scale: Tensor | float) -> Tensor:
        options: dict[str, Any] = {"scale": scale, **self.options}

        if self.local_loss and not self.gather_with_grad:
            shards = self.agreed(images, texts, scale=scale)
            first = shards.first("rows")
            pairs = torch.arange(first, first + len(images), device=images.device)
            options |= {"diagonal": "keep"}
            losses = [
                contrastive_loss(x, self.gathered(y, with_grad=False), pairs, **options)
                for x, y in ((images, texts), (texts, images))
            ]
            return (losses[0] + losses[1]) / 2

        if self.local_loss:
            return clip_loss(images, texts, reduction="none", group=self.group(), **options).mean()
        if not self.gather_with_grad:
            images, texts = (divided(x, self.world_size) for x in (images, texts))
        return clip_loss(images, texts, group=self.group(), **options)

    def get_ground_truth(self, device: torch.device, num_logits: int) -> Tensor:
        """The column of each row's own pair in the scores of `get_logits`, (num_logits,) int64."""
        if self.prev_num_logits == num_logits and device in self.labels:
            return self.labels[device]
        first = num_logits * self.rank if self.world_size > 1 and self.local_loss else 0
        labels = torch.arange(first, first + num_logits, device=device)
        if self.cache_labels:
            self.labels[device], self.prev_num_logits = labels, num_logits
        return labels

    def get_logits(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Both matrices of scores, which `forward` does not form: for subclasses that need them."""
        images = all_images = image_features
        texts = all_texts = text_features
        if self.world_size > 1:
            all_images, all_texts = (self.gathered(x, self.gather_with_grad) for x in (images, texts))
            if not self.local_loss:
                if not self.gather_with_grad:
                    local_rows = slice(self.rank * len(images), (self.rank + 1) * len(images))
                    all_images[local_rows], all_texts[local_rows] = images, texts
                images, texts = all_images, all_texts
        per_image, per_text = logit_scale * images @ all_texts.T, logit_scale * texts @ all_images.T
        if logit_bias is not None:
            per_image, per_text = per_image + logit_bias, per_text + logit_bias
        return per_image, per_text


class _Divided(torch.autograd.Function):
    """A tensor as it is, whose gradient is divided."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, divisor: int) -> Tensor:
        ctx.divisor = divisor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0] / ctx.divisor, None


# torch gives `apply` no types.
divided: Callable[..., Tensor] = _Divided.apply
