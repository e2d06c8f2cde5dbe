"""Each loss as a module, made of the declarations of the losses.

The bases read the options from the function's signature. Written out are the modules that have more to say.
Type checkers and editors read __init__.pyi, which `make lists` writes from the same signatures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fastqt import functional, losses
from fastqt.loss import DECLARED, Declaration
from fastqt.nn.losses.base import BiasedLoss, Loss, ScaledLoss


class ContrastiveLoss(ScaledLoss):
    """`fastqt.contrastive_loss` with its options fixed; `bias` is an argument of each call.

    A call takes the embeddings, the targets, and of the function's keyword arguments those that belong to a
    batch: those that may be tensors or a guide, such as `negatives` and `mask`, but not the scale.

    Args:
        scale: the scale, 1 / temperature, a number > 0; where it is learnt, what it is at first.
        learn_scale: learn the scale as the parameter `log_scale`, its logarithm, so that it stays positive.
        max_scale: the most that the scale may be, or None; see `fastqt.nn.losses.base.ScaledLoss`.

    Raises:
        TypeError: an option that the loss does not have, or that has a value of another type.
        ValueError: a value that the function refuses.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.ContrastiveLoss(context_size=1, normalize=True, learn_scale=True)
        >>> queries, candidates = torch.randn(2, 8, 16)
        >>> criterion(queries, candidates, document_ids=torch.arange(8) // 4).shape
        torch.Size([])
        >>> [name for name, _ in criterion.named_parameters()]
        ['log_scale']
    """

    function = staticmethod(functional.contrastive_loss)


class CLIPLoss(ScaledLoss):
    """`fastqt.clip_loss` with its options fixed; by default the scale is learnt.

    A call takes two embeddings (N, D), whose rows of equal index are a pair. The scale, 1 / temperature, is
    as in `ContrastiveLoss`; by default it begins at the CLIP paper's 1 / 0.07, and is 100 at most.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.CLIPLoss()
        >>> images, texts = torch.randn(2, 8, 16)
        >>> criterion(images, texts).backward()
        >>> round(criterion.scale.item(), 2), criterion.log_scale.grad is not None
        (14.29, True)
    """

    function = staticmethod(losses.clip_loss)
    defaults: ClassVar[Mapping[str, Any]] = {"scale": 1 / 0.07, "learn_scale": True, "max_scale": 100.0}


class SigLIPLoss(BiasedLoss):
    """`fastqt.siglip_loss` with its options fixed; by default scale and bias are learnt.

    A call takes two embeddings (N, D) and (M, D), whose rows of equal index are a pair. The scale,
    1 / temperature, is as in `ContrastiveLoss`.

    Args:
        bias: the initial bias, a finite number; by default the SigLIP paper's -10, beside a scale of 10.
        learn_bias: learn the bias as a parameter.

    Raises:
        TypeError, ValueError: as in `ContrastiveLoss`, or a bias that is not a finite number.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.SigLIPLoss()
        >>> images, texts = torch.randn(2, 8, 16)
        >>> criterion(images, texts).backward()
        >>> [(name, p.shape) for name, p in criterion.named_parameters()]
        [('log_scale', torch.Size([1])), ('bias', torch.Size([1]))]
    """

    function = staticmethod(losses.siglip_loss)
    defaults: ClassVar[Mapping[str, Any]] = {
        "scale": 10.0,
        "learn_scale": True,
        "bias": -10.0,
        "learn_bias": True,
    }


def _module_of(declaration: Declaration) -> type[Loss]:
    """The module of a loss that has nothing of its own to say."""
    base = ScaledLoss if "scale" in declaration.names else Loss
    each_call = ", ".join(f"`{name}`" for name in declaration.names if name in declaration.of_batch)
    text = f"""`{declaration.title}` with its options fixed.

    A call takes what belongs to a batch: {each_call}.{SCALE if base is ScaledLoss else ""}

    Example:
        >>> import fastqt
        >>> fastqt.nn.{declaration.module}()
        """
    attributes = {"function": staticmethod(declaration.function), "__module__": __name__}
    module: type[Loss] = type(declaration.module, (base,), attributes)
    module.__doc__ = f"{text}{module()!r}\n    "
    return module


SCALE = " The scale,\n    1 / temperature, is as in `ContrastiveLoss`."
for _declaration in DECLARED.values():
    if _declaration.module is not None and _declaration.module not in globals():
        globals()[_declaration.module] = _module_of(_declaration)
