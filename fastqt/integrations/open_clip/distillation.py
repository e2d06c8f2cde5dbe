"""`DistillClipLoss`: CLIP beside a teacher's softmaxes, in each of open_clip's ways to join the ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastqt.integrations.open_clip.base import number, scaled
from fastqt.integrations.open_clip.clip import ClipLoss, divided
from fastqt.losses import distillation_loss


class DistillClipLoss(ClipLoss):
    """`open_clip.loss.DistillClipLoss`, computed by `fastqt.clip_loss` and `fastqt.distillation_loss`.

    A call returns two losses, which open_clip adds up: that of `ClipLoss`, and the mean over both directions
    of the cross-entropy of the student's softmaxes with the teacher's. With several processes both have the
    values and gradients that the table of `ClipLoss` says. Arguments and errors are those of `ClipLoss`.

    Example:
        >>> import torch
        >>> from fastqt.integrations.open_clip import DistillClipLoss
        >>> images, texts = torch.nn.functional.normalize(torch.randn(2, 8, 16), dim=-1)
        >>> teacher = torch.nn.functional.normalize(torch.randn(2, 8, 32), dim=-1)
        >>> scale, of_teacher = torch.tensor(20.0), torch.tensor(50.0)
        >>> contrastive, distill = DistillClipLoss()(images, texts, scale, *teacher, of_teacher)
        >>> contrastive.shape, distill.shape
        (torch.Size([]), torch.Size([]))
    """

    # As in open_clip, a call of the subclass takes more arguments than one of its base.
    def forward(  # type: ignore[override]
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        dist_image_features: Tensor,
        dist_text_features: Tensor,
        dist_logit_scale: Tensor | float,
        output_dict: bool = False,
    ) -> tuple[Tensor, Tensor] | dict[str, Tensor]:
        """Both losses of a batch.

        Args:
            image_features, text_features, logit_scale: as of `ClipLoss`.
            dist_image_features, dist_text_features: (n, D'), the teacher's, to which no gradient flows.
            dist_logit_scale: the teacher's 1 / temperature.
            output_dict: return {"contrastive_loss": ..., "distill_loss": ...}.

        Returns:
            The contrastive loss and that of the distillation, scalars as `ClipLoss` returns.

        Raises:
            ValueError, TypeError: naming the argument, what is wanted and what came.
        """
        contrastive = self.contrastive_loss(image_features, text_features, logit_scale)
        images, scale = scaled(image_features, logit_scale)
        # The teacher's scale may be a tensor on a GPU, whose value is not read.
        of_images = (number(dist_logit_scale) * dist_image_features).detach()
        sides = (images, of_images), (text_features, dist_text_features.detach())
        distill = (self._direction(*sides, scale) + self._direction(*sides[::-1], scale)) / 2
        if output_dict:
            return {"contrastive_loss": contrastive, "distill_loss": distill}
        return contrastive, distill

    def _direction(
        self, rows: tuple[Tensor, Tensor], columns: tuple[Tensor, Tensor], scale: Tensor | float
    ) -> Tensor:
        """The cross-entropy of the rows' softmaxes over the columns, of the student and of the teacher."""
        (x, of_x), (y, of_y) = rows, columns
        options: dict[str, Any] = {"scale": scale, "teacher_scale": 1.0}
        options |= {"normalize": False, "cross_entropy": True}
        of_x, of_y = of_x.to(x.dtype), of_y.to(y.dtype)
        if self.world_size <= 1:
            return distillation_loss(x, y, of_x, of_y, **options)

        if self.local_loss and not self.gather_with_grad:
            self.agreed(x, y, scale=scale)
            every, of_every = (self.gathered(side, with_grad=False) for side in (y, of_y))
            return distillation_loss(x, every, of_x, of_every, **options)

        if self.local_loss:
            return distillation_loss(x, y, of_x, of_y, reduction="none", group=self.group(), **options).mean()
        if not self.gather_with_grad:
            x, y = (divided(side, self.world_size) for side in (x, y))
        return distillation_loss(x, y, of_x, of_y, group=self.group(), **options)
