"""open_clip's losses: the same arguments, methods, values and gradients, without the matrix of scores.

    loss = fastqt.integrations.open_clip.ClipLoss(
        local_loss=True, gather_with_grad=True, rank=rank, world_size=world_size
    )
    losses = loss(**model(images, texts), output_dict=True)  # a model of open_clip with output_dict=True

They are no subclasses of open_clip's, so that neither open_clip nor torchvision has to be installed. As
there, the features are not normalised here; open_clip's models do that.
"""

from fastqt.integrations.open_clip.clip import ClipLoss
from fastqt.integrations.open_clip.distillation import DistillClipLoss
from fastqt.integrations.open_clip.siglip import SigLipLoss

__all__ = ["ClipLoss", "DistillClipLoss", "SigLipLoss"]
