"""GISTEmbed: each anchor's positive among its batch, less what a guide finds closer than the positive."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from fastqt.checks import check_embeddings, check_flag, check_number, check_option, check_scale
from fastqt.distributed.agreement import agree, facts_of_embeddings, facts_of_leaves
from fastqt.distributed.group import Group, GroupLike
from fastqt.distributed.local import local_rows, with_a_row
from fastqt.distributed.public import public_loss
from fastqt.distributed.shards import Shards
from fastqt.functional import contrastive_loss, log_sum_exp
from fastqt.guide import MARGIN_STRATEGIES, Guide, pair_thresholds
from fastqt.losses.common import joined_loss, scores
from fastqt.options import Backend, MarginStrategy, Memory, Reduction
from fastqt.problem import REDUCTIONS, check_memory, reduce, unit_rows
from fastqt.targets import Diagonal
from fastqt.torch_modes import input_dtype

FUNCTION = "fastqt.gist_embed_loss"
Negatives: TypeAlias = "Tensor | Sequence[Tensor]"


@public_loss
def gist_embed_loss(
    anchors: Tensor,
    positives: Tensor,
    negatives: Negatives = (),
    *,
    guide_anchors: Tensor,
    guide_positives: Tensor,
    guide_negatives: Negatives = (),
    scale: float | Tensor = 100.0,
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

    def check(ranks: Group | None) -> dict[str, int]:
        nonlocal texts, guides
        texts, guides = _local(ranks, texts, ""), _local(ranks, guides, "guide_")
        _check_rows(ranks, texts, guides)
        check_scale(scale, texts.anchors.dtype)
        check_number("margin", margin)
        check_option("margin_strategy", margin_strategy, MARGIN_STRATEGIES)
        check_flag("contrast_anchors", contrast_anchors)
        check_flag("contrast_positives", contrast_positives)
        check_option("reduction", reduction, REDUCTIONS)
        check_memory(memory)
        if ranks is not None and ranks.exchange == "ring":
            raise ValueError("exchange: want 'auto' or 'gather' with a guide, got 'ring'")
        sizes = {"rows": len(texts.anchors)}
        if texts.negatives:
            sizes["negatives"] = sum(map(len, texts.negatives))
        return sizes

    def facts(ranks: Group) -> dict[str, Hashable]:
        return {
            "margin": margin,
            "margin_strategy": margin_strategy,
            "contrast_anchors": contrast_anchors,
            "contrast_positives": contrast_positives,
            "reduction": reduction,
            "given": tuple(texts.named()),
            **facts_of_embeddings(texts.anchors),
            "guide width": guides.anchors.shape[1],
            "guide dtype": str(guides.anchors.dtype),
            **facts_of_leaves(ranks, {**texts.named(), "scale": scale}),
        }

    batch = agree(group, FUNCTION, check, facts)
    if isinstance(batch, Shards):
        texts, guides = (
            _gathered(batch, x, differentiable=x is texts, with_anchors=contrast_anchors)
            for x in (texts, guides)
        )

    def loss(part: str) -> Tensor:
        return loss_of_own_rows(
            texts,
            guides,
            scale=scale,
            margin=margin,
            margin_strategy=margin_strategy,
            contrast_anchors=contrast_anchors,
            contrast_positives=contrast_positives,
            reduction=cast(Reduction, part),
            memory=memory,
            backend=backend,
        )

    leaves = texts.anchors, texts.positives, texts.more_anchors, *texts.negatives, scale
    return batch.loss(reduction, leaves, loss)


class Texts(NamedTuple):
    """A model's embeddings of a batch."""

    anchors: Tensor  # (n, D)
    positives: Tensor  # (M, D), M >= n; the first n are the anchors' own
    negatives: tuple[Tensor, ...]  # (K, D) each
    more_anchors: Tensor | None = None  # (A, D) what stands for the anchors as candidates

    def named(self, prefix: str = "") -> dict[str, Tensor]:
        """The embeddings by the names of the arguments."""
        several = len(self.negatives) > 1
        names = [
            f"{prefix}negatives[{i}]" if several else f"{prefix}negatives" for i in range(len(self.negatives))
        ]
        return {
            f"{prefix}anchors": self.anchors,
            f"{prefix}positives": self.positives,
            **dict(zip(names, self.negatives, strict=True)),
        }

    def others(self, with_anchors: bool) -> Tensor | None:
        """The candidates of anchors beside the positives, if any."""
        anchors = self.anchors if self.more_anchors is None else self.more_anchors
        found = [x for x in ((anchors,) if with_anchors else ()) + self.negatives if len(x)]
        return torch.cat(found) if found else None


def loss_of_own_rows(
    texts: Texts,
    guides: Texts,
    *,
    scale: float | Tensor,
    margin: float,
    margin_strategy: MarginStrategy,
    contrast_anchors: bool,
    contrast_positives: bool,
    reduction: Reduction,
    memory: Memory,
    backend: Backend | None,
) -> Tensor:
    """The loss of the anchors, for arguments that are checked; the candidates may be more than theirs."""
    thresholds = pair_thresholds(guides.anchors, guides.positives, margin=margin, strategy=margin_strategy)
    guide = Guide(
        guides.anchors,
        guides.positives,
        thresholds=thresholds,
        negatives=guides.others(contrast_anchors),
    )
    z = _unit(texts)
    negatives = z.others(contrast_anchors)
    if not contrast_positives:
        return contrastive_loss(
            z.anchors,
            z.positives,
            Diagonal(),
            diagonal="keep",
            scale=scale,
            negatives=negatives,
            guide=guide,
            reduction=reduction,
            memory=memory,
            backend=backend,
        )

    n = len(z.anchors)
    own = z.positives[:n]
    among_positives = Guide(guides.positives[:n], guides.positives, thresholds=thresholds)
    sums = partial(log_sum_exp, scale=scale, memory=memory, backend=backend)
    cells = [
        sums(z.anchors, z.positives, diagonal="exclude", negatives=negatives, guide=guide),
        sums(own, z.positives, guide=among_positives),
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


def _sequence(name: str, negatives: Negatives) -> tuple[Tensor, ...]:
    if isinstance(negatives, Tensor):
        return (negatives,)
    if not isinstance(negatives, Sequence) or not all(isinstance(x, Tensor) for x in negatives):
        raise TypeError(f"{name}: want a tensor or a sequence of tensors, got {type(negatives).__name__}")
    return tuple(negatives)


def _check_rows(ranks: Group | None, texts: Texts, guides: Texts) -> None:
    """Checks that the embeddings of texts and guide fit each other; a rank may have no rows."""
    for embeddings in (texts.named(), guides.named("guide_")):
        check_embeddings(**{name: with_a_row(ranks, x) for name, x in embeddings.items()})
    if len(texts.positives) != len(texts.anchors):
        raise ValueError(
            f"positives: want a row for each of the {len(texts.anchors)} anchors, got {len(texts.positives)}"
        )
    if len(guides.negatives) != len(texts.negatives):
        raise ValueError(
            f"guide_negatives: want as many tensors as negatives, which are {len(texts.negatives)}, "
            f"got {len(guides.negatives)}"
        )
    rows = zip(texts.named().values(), guides.named("guide_").items(), strict=True)
    for x, (name, of_guide) in rows:
        if len(of_guide) != len(x):
            raise ValueError(f"{name}: want a row for each of the {len(x)} texts, got {len(of_guide)}")


def _local(ranks: Group | None, texts: Texts, prefix: str) -> Texts:
    anchors, positives, *negatives = (local_rows(ranks, name, x) for name, x in texts.named(prefix).items())
    return Texts(anchors, positives, tuple(negatives))


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
