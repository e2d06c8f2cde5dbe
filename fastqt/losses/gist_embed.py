"""GISTEmbed: each anchor's positive among its batch, less what a guide finds closer than the positive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from fastqt.arguments import Argument, Rows, Scale
from fastqt.distributed.group import GroupLike, is_ring
from fastqt.distributed.shards import Shards
from fastqt.exclusions.guide import Guide, pair_thresholds
from fastqt.functional import contrastive_loss, log_sum_exp
from fastqt.loss import Arguments, loss
from fastqt.losses.common import joined_loss, scores
from fastqt.options import Backend, MarginStrategy, Memory, Reduction
from fastqt.problem import reduce, unit_rows
from fastqt.targets import Diagonal
from fastqt.torch_modes import input_dtype

Negatives: TypeAlias = "Tensor | Sequence[Tensor]"


def _sequence(name: str, negatives: object) -> tuple[Tensor, ...]:
    if isinstance(negatives, Tensor):
        return (negatives,)
    if not isinstance(negatives, Sequence) or not all(isinstance(x, Tensor) for x in negatives):
        raise TypeError(f"{name}: want a tensor or a sequence of tensors, got {type(negatives).__name__}")
    return tuple(negatives)


def _matrices(name: str, value: Any) -> dict[str, Tensor]:
    several = _sequence(name, value)
    return {f"{name}[{i}]" if len(several) > 1 else name: x for i, x in enumerate(several)}


OfTexts = Annotated[Tensor | Sequence[Tensor], Argument(rows="own", matrices=_matrices)]
GuideAnchors = Annotated[Tensor, Argument(like="anchors")]
GuidePositives = Annotated[Tensor, Argument(like="positives")]
GuideNegatives = Annotated[Tensor | Sequence[Tensor], Argument(like="negatives", matrices=_matrices)]


def _fit(group: GroupLike | None) -> None:
    if is_ring(group):
        raise ValueError("exchange: want 'auto' or 'gather' with a guide, got 'ring'")


@loss("GISTEmbedLoss", check=_fit)
def gist_embed_loss(
    call: Arguments,
    anchors: Rows,
    positives: Rows,
    negatives: OfTexts = (),
    *,
    guide_anchors: GuideAnchors,
    guide_positives: GuidePositives,
    guide_negatives: GuideNegatives = (),
    scale: Scale = 100.0,
    margin: float = 0.0,
    margin_strategy: MarginStrategy = "absolute",
    contrast_anchors: bool = True,
    contrast_positives: bool = True,
    reduction: Reduction = "mean",
    memory: Memory = "fast",
    backend: Backend | None = None,
    group: GroupLike | None = None,
) -> Tensor:
    """Cross-entropy of each anchor with its positive by cosine, where a guide filters false negatives.

    The softmax of pair i is over its anchor's scores with all positives, all anchors and all negatives, and
    over its positive's scores with all positives. A cell leaves it where the guide's cosine is above the
    guide's cosine of anchor i and positive i, less the margin; the pair's own cell stays. The cells of an
    anchor or a positive with itself leave by that rule too, unless the guide finds the pair as similar.

    Args:
        anchors, positives: (N, D) floating point; rows of equal index are a pair.
        negatives: (K, D) further candidates of all anchors, or several such tensors.
        guide_anchors, guide_positives, guide_negatives: the guide's embeddings of the same texts, (N, E),
            (N, E) and (K, E), in any floating-point dtype; no gradient flows to them.
        scale: 1 / temperature.
        margin, margin_strategy: as of `fastqt.Guide`.
        contrast_anchors: whether the scores of anchors with anchors are in the softmax.
        contrast_positives: whether those of positives with positives are; they take a logsumexp by itself.
        reduction: "mean" over all rows, "sum", or "none".
        memory, backend, group: as of `contrastive_loss`.

    Returns:
        A scalar, or (N,) for reduction="none".

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> anchors, positives = torch.randn(2, 8, 16)
        >>> of_guide = torch.randn(2, 8, 32)  # a second model's embeddings, of any width
        >>> guide = {"guide_anchors": of_guide[0], "guide_positives": of_guide[1]}
        >>> fastqt.gist_embed_loss(anchors, positives, **guide, scale=1 / 0.01).shape
        torch.Size([])

    Source: Solatorio, "GISTEmbed: Guided in-sample selection of training negatives for text embedding
    fine-tuning" (2024).
    """
    texts = Texts(anchors, positives, _sequence("negatives", negatives))
    guides = Texts(guide_anchors, guide_positives, _sequence("guide_negatives", guide_negatives))
    batch = call.batch
    if isinstance(batch, Shards):
        texts, guides = (
            _gathered(batch, x, differentiable=x is texts, with_anchors=contrast_anchors)
            for x in (texts, guides)
        )

    def losses(part: str) -> Tensor:
        return loss_of_own_rows(texts, guides, call.values, cast(Reduction, part))

    leaves = texts.anchors, texts.positives, texts.more_anchors, *texts.negatives, scale
    return batch.loss(reduction, leaves, losses)


class Texts(NamedTuple):
    """A model's embeddings of a batch."""

    anchors: Tensor  # (n, D)
    positives: Tensor  # (M, D), M >= n; the first n are the anchors' own
    negatives: tuple[Tensor, ...]  # (K, D) each
    more_anchors: Tensor | None = None  # (A, D) what stands for the anchors as candidates

    def others(self, with_anchors: bool) -> Tensor | None:
        """The candidates of anchors beside the positives, if any."""
        anchors = self.anchors if self.more_anchors is None else self.more_anchors
        found = [x for x in ((anchors,) if with_anchors else ()) + self.negatives if len(x)]
        return torch.cat(found) if found else None


def loss_of_own_rows(texts: Texts, guides: Texts, options: Mapping[str, Any], reduction: Reduction) -> Tensor:
    """The loss of the anchors, for options that are checked; the candidates may be more than theirs."""
    margin, strategy = options["margin"], options["margin_strategy"]
    with_anchors, scale = options["contrast_anchors"], options["scale"]
    thresholds = pair_thresholds(guides.anchors, guides.positives, margin=margin, strategy=strategy)
    of_guide = partial(Guide, thresholds=thresholds)
    guide = of_guide(guides.anchors, guides.positives, negatives=guides.others(with_anchors))
    z, how = _unit(texts), {name: options[name] for name in ("scale", "memory", "backend")}
    negatives = z.others(with_anchors)
    if not options["contrast_positives"]:
        return contrastive_loss(
            z.anchors,
            z.positives,
            Diagonal(),
            diagonal="keep",
            negatives=negatives,
            exclude=guide,
            reduction=reduction,
            **how,
        )

    n = len(z.anchors)
    own = z.positives[:n]
    among_positives = of_guide(guides.positives[:n], guides.positives)
    sums: Callable[..., Tensor] = partial(log_sum_exp, **how)
    cells = [
        sums(z.anchors, z.positives, diagonal="exclude", negatives=negatives, exclude=guide),
        sums(own, z.positives, exclude=among_positives),
    ]
    return reduce(joined_loss(scores(z.anchors, own, scale), cells), reduction)


def _unit(texts: Texts) -> Texts:
    more = texts.more_anchors
    return Texts(
        unit_rows(texts.anchors),
        unit_rows(texts.positives),
        tuple(map(unit_rows, texts.negatives)),
        None if more is None else unit_rows(more),
    )


def _gathered(shards: Shards, texts: Texts, *, differentiable: bool, with_anchors: bool) -> Texts:
    """A rank's anchors with the candidates of all ranks, its own first; negatives are one tensor.

    What is no candidate stays: all ranks take part in the backward pass of what they have gathered.
    """
    dtype = input_dtype(texts.anchors)

    def gather(x: Tensor, of: str) -> Tensor:
        return shards.gather(x, of, dtype) if differentiable else shards.gather_constant(x, of)

    return Texts(
        texts.anchors,
        shards.rolled(gather(texts.positives, "rows")),
        (gather(torch.cat(texts.negatives), "negatives"),) if texts.negatives else (),
        gather(texts.anchors, "rows") if with_anchors else None,
    )
