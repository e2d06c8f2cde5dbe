"""Optimisers that know sparse gradients: Adam and AdamW of whole tables, or of the rows of a batch."""

from fastqt.optim.adam import Adam, AdamW
from fastqt.optim.clipping import clip_grad_norm_

__all__ = ["Adam", "AdamW", "clip_grad_norm_"]


def __dir__() -> list[str]:
    """The public names, without the modules that hold them."""
    return __all__
