"""Losses of a whole batch: the formula of each with a matrix, a library's class, and ours, on drawn rows.

`benchmarks.peers_whole_batch` measures them.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import fastqt
from benchmarks.peers import OPEN_CLIP, Given, module_of, siglip

ROWS, D = (512, 4096, 8192), 768

Loss = Callable[..., Tensor]  # of the embeddings, (N, D) each


class Case(NamedTuple):
    """A loss in up to three implementations.

    Attributes:
        label: what the tables call it.
        inputs: the embeddings for a number of rows, random or, with True, as at the end of a training.
        matrix: the formula with a matrix, from the rows' embeddings.
        theirs: makes the library's loss; None where it has none.
        ours: fastqt's.
        most_rows: that it is measured with; each row of some losses has a product with all others.
    """

    label: str
    inputs: Callable[[int, bool], list[Tensor]]
    matrix: Loss
    theirs: Callable[[], Loss] | None
    ours: Loss
    most_rows: int = ROWS[-1]


def labels_of(rows: Tensor) -> Tensor:
    """Similarities of pairs in 0..1, of which many are equal."""
    return torch.arange(len(rows)) * 7 % 21 / 20


def labelled_pairs(N: int, learnt: bool) -> list[Tensor]:
    """Pairs, and once learnt with cosines of the order of their labels."""
    a, b = torch.randn(2, N, D, generator=torch.Generator().manual_seed(0))
    if learnt:
        steps = 4 * labels_of(a)[:, None].round(decimals=1) - 2
        b = steps * a + 0.1 * b
    return [a, b]


def ranking(scores: Tensor, labels: Tensor) -> Tensor:
    differences = scores[None] - scores[:, None]
    lower = differences.masked_fill(labels[:, None] <= labels, -torch.inf)
    return torch.cat([lower.flatten(), lower.new_zeros(1)]).logsumexp(0)


def cosent_of_matrix(a: Tensor, b: Tensor) -> Tensor:
    return ranking(20 * F.cosine_similarity(a, b), labels_of(a))


def angle_of_matrix(a: Tensor, b: Tensor) -> Tensor:
    (p, q), (r, t) = (F.normalize(x, dim=1).chunk(2, 1) for x in (a, b))
    return ranking(20 * (p * r + q * t + q * r - p * t).sum(1).abs(), labels_of(a))


def ranked_by(name: str) -> Loss:
    from sentence_transformers.sentence_transformer import losses

    loss = getattr(losses, name)(Given())
    return lambda a, b: loss.compute_loss_from_embeddings([a, b], labels_of(a))


def spread_rows(N: int, learnt: bool) -> list[Tensor]:
    """Random rows, which are a little more alike than random directions; learnt, nearly a basis."""
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
    return [torch.eye(D).repeat(N // D + 1, 1)[:N] + 1e-3 * x if learnt else x + 0.2]


def moments_of_matrix(x: Tensor) -> Tensor:
    unit = F.normalize(x, dim=1)
    scores = (unit @ unit.T).masked_fill(torch.eye(len(x), dtype=torch.bool), 0)
    pairs = len(x) * (len(x) - 1)
    return (scores.sum() / pairs).square() + (scores.square().sum() / pairs - 1 / x.shape[1]).relu()


def taught_rows(N: int, learnt: bool) -> list[Tensor]:
    """A student's rows, and once learnt nearly those of its teacher, turned."""
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
    if not learnt:
        return [x]
    rotation = torch.linalg.qr(torch.randn(D, D, generator=torch.Generator().manual_seed(2)))[0]
    return [teacher_of(x) @ rotation + 1e-3 * x]


def teacher_of(rows: Tensor) -> Tensor:
    return _teacher(len(rows), rows.dtype)


@functools.cache
def _teacher(N: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(N, D, generator=torch.Generator().manual_seed(1)).to(dtype)


def distilled_by_matrices(x: Tensor) -> Tensor:
    student, teacher = (F.normalize(y, dim=1) for y in (x, teacher_of(x)))
    return (student @ student.T - teacher @ teacher.T).square().mean()


def regularised() -> Loss:
    from sentence_transformers.sentence_transformer import losses

    loss = losses.GlobalOrthogonalRegularizationLoss(Given())
    return lambda x: sum(loss.compute_loss_from_embeddings([x]).values())


def labelled_rows(N: int, learnt: bool) -> list[Tensor]:
    """Rows of eight a label, which are near each other, and once learnt nearly equal."""
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
    centres = torch.randn(N // 8 + 1, D, generator=torch.Generator().manual_seed(1))
    return [0.05 * (centres[labels_of_rows(x)] + (0.01 if learnt else 3.0) * x)]


def labels_of_rows(rows: Tensor) -> Tensor:
    return torch.arange(len(rows)) // 8


def triplets_of_matrix(x: Tensor, form: str) -> Tensor:
    distances, labels = torch.cdist(x, x), labels_of_rows(x)
    same = labels == labels[:, None]
    positive = same & ~torch.eye(len(x), dtype=torch.bool)
    negatives = distances.masked_fill(same, torch.inf)
    if form == "BatchAllTripletLoss":
        triplets = (distances[positive][:, None] - negatives[positive.nonzero()[:, 0]] + 5).relu()
        return triplets.sum() / (triplets > 0).sum().clamp(min=1)
    if form == "BatchSemiHardTripletLoss":
        in_order = negatives.sort(1).values
        place = torch.searchsorted(in_order.detach(), distances.detach(), right=True)
        last = (~same).sum(1, keepdim=True) - 1
        return (distances - in_order.gather(1, place.minimum(last)) + 5)[positive].relu().mean()
    lead = (distances * positive).amax(1) - negatives.amin(1)
    return (F.softplus(lead) if form == "BatchHardSoftMarginTripletLoss" else (lead + 5).relu()).mean()


def triplets_by(library: str, form: str) -> Loss:
    loss = getattr(importlib.import_module(library), form)(Given())
    return lambda x: loss.compute_loss_from_embeddings([x], labels_of_rows(x))


def two_views(N: int, learnt: bool) -> list[Tensor]:
    """Two views of each row, and once learnt nearly the same."""
    x, y = torch.randn(2, N, D, generator=torch.Generator().manual_seed(0))
    return [x, x + 0.05 * y if learnt else y]


def pairs_and_negatives(a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Of both views of N rows, the scores with the other view, (2 N,), and with other rows, (2 N, 2 N)."""
    both = F.normalize(torch.cat([a, b]), dim=1)
    scores = scale * both @ both.T
    rows = torch.arange(2 * len(a)) % len(a)
    negatives = scores.masked_fill(rows[:, None] == rows, -torch.inf)
    return scores.diagonal(len(a)).repeat(2), negatives


def with_own_rows(N: int, learnt: bool) -> list[Tensor]:
    """Pairs, and four hard negatives of each query alone."""
    return [*two_views(N, learnt), torch.randn(N, 4, D, generator=torch.Generator().manual_seed(3))]


def of_own_rows(a: Tensor, rows: Tensor) -> Tensor:
    """The cosines of queries with their own rows, (N, K)."""
    return torch.einsum("nd,nkd->nk", F.normalize(a, dim=1), F.normalize(rows, dim=2))


def own_rows_of_matrix(a: Tensor, b: Tensor, rows: Tensor) -> Tensor:
    cosines = F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
    return F.cross_entropy(20 * torch.cat([cosines, of_own_rows(a, rows)], 1), torch.arange(len(a)))


def qwen_of_matrices(a: Tensor, b: Tensor, rows: Tensor) -> Tensor:
    """Equations 1 and 2 of Qwen3-Embedding's report."""
    x, y = F.normalize(a, dim=1), F.normalize(b, dim=1)
    pairs = (x * y).sum(1, keepdim=True)
    blocks = [
        z.fill_diagonal_(-torch.inf).masked_fill(z > pairs + 0.1, -torch.inf)
        for z in (x @ y.T, x @ x.T, y @ y.T)
    ]
    own = of_own_rows(a, rows)
    cells = [pairs, *blocks, own.masked_fill(own > pairs + 0.1, -torch.inf)]
    return F.cross_entropy(20 * torch.cat(cells, 1), torch.zeros(len(a), dtype=torch.long))


def qwen(a: Tensor, b: Tensor, rows: Tensor) -> Tensor:
    return fastqt.multiple_negatives_ranking_loss(
        a,
        b,
        row_negatives=rows,
        directions=("query_to_doc", "query_to_query", "doc_to_doc"),
        exclude=fastqt.Margin(0.1),
    )


def debiased_of_matrix(a: Tensor, b: Tensor, tau_plus: float = 0.001) -> Tensor:
    scores = 20 * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
    pairs, count = scores.diagonal(), len(a) - 1
    negatives = scores.masked_fill(torch.eye(len(a), dtype=torch.bool), -torch.inf).exp().sum(1)
    estimate = (negatives - tau_plus * count * pairs.exp()) / (1 - tau_plus)
    return torch.log1p(estimate.clamp(min=count * math.exp(-20)) / pairs.exp()).mean()


def dcl_of_matrix(a: Tensor, b: Tensor) -> Tensor:
    pairs, negatives = pairs_and_negatives(a, b, 10.0)
    return (negatives.logsumexp(1) - pairs).mean()


def hcl_of_matrix(a: Tensor, b: Tensor, tau_plus: float = 0.001) -> Tensor:
    pairs, negatives = pairs_and_negatives(a, b, 2.0)
    count = 2 * len(a) - 2
    hard = count * (negatives.softmax(1) * negatives.exp()).sum(1)
    estimate = (hard - tau_plus * count * pairs.exp()) / (1 - tau_plus)
    return torch.log1p(estimate.clamp(min=count * math.exp(-2)) / pairs.exp()).mean()


def sides_of_teacher(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The teacher's queries and candidates."""
    return teacher_of(rows), teacher_of(rows).roll(1, 1)


def softmaxes_of_matrices(a: Tensor, b: Tensor) -> Tensor:
    student, teacher = (
        20 * F.normalize(x, dim=1) @ F.normalize(y, dim=1).T for x, y in ((a, b), sides_of_teacher(a))
    )
    return F.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="batchmean")


def softmaxes(a: Tensor, b: Tensor) -> Tensor:
    return fastqt.distillation_loss(a, b, *sides_of_teacher(a))


def info_nce_of_matrix(a: Tensor, b: Tensor) -> Tensor:
    scores = 20 * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
    return F.cross_entropy(scores, torch.arange(len(a)))


def clip_of_matrix(a: Tensor, b: Tensor) -> Tensor:
    scores, rows = 20 * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T, torch.arange(len(a))
    return (F.cross_entropy(scores, rows) + F.cross_entropy(scores.T, rows)) / 2


def simclr_of_matrix(a: Tensor, b: Tensor) -> Tensor:
    both = F.normalize(torch.cat([a, b]), dim=1)
    scores = (both @ both.T / 0.5).masked_fill(torch.eye(len(both), dtype=torch.bool), -torch.inf)
    return F.cross_entropy(scores, torch.arange(len(both)).roll(len(a)))


def linear_in_chunks() -> Loss:
    """Torch's linear layer and cross-entropy at once, whose classes are the candidates."""
    if not hasattr(F, "linear_cross_entropy"):
        raise ImportError("torch has F.linear_cross_entropy from version 2.13 on")
    options = torch.nn.LinearCrossEntropyOptions()

    def loss(a: Tensor, b: Tensor) -> Tensor:
        a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
        return F.linear_cross_entropy(20 * a, b, torch.arange(len(a)), options=options)

    return loss


def siglip_of_matrix(a: Tensor, b: Tensor) -> Tensor:
    scores = 10 * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T - 10
    return -F.logsigmoid((2 * torch.eye(len(a)) - 1).to(a) * scores).sum() / len(a)


def siglip_in_chunks() -> Loss:
    """open_clip's, a thousand images at a time; the scores of all chunks are kept for the backward pass."""
    try:
        return siglip(module_of(OPEN_CLIP.theirs), chunk_size=1024)
    except TypeError as error:
        raise ImportError("this version of open_clip has no SigLIP in chunks") from error


CASES = (
    Case(
        "InfoNCE", two_views, info_nce_of_matrix, linear_in_chunks, partial(fastqt.info_nce_loss, scale=20.0)
    ),
    *(
        Case(f"{name} in the block", two_views, loss, None, fastqt.fused()(loss), most_rows=most_rows)
        for name, loss, most_rows in (
            ("InfoNCE", info_nce_of_matrix, ROWS[-1]),
            ("CLIP", clip_of_matrix, ROWS[-1]),
            ("SimCLR", simclr_of_matrix, 4096),
        )
    ),
    Case(
        "SigLIP",
        two_views,
        siglip_of_matrix,
        siglip_in_chunks,
        partial(fastqt.siglip_loss, scale=10.0, bias=-10.0),
    ),
    Case(
        "CoSENT",
        labelled_pairs,
        cosent_of_matrix,
        partial(ranked_by, "CoSENTLoss"),
        lambda a, b: fastqt.cosent_loss(a, b, labels_of(a)),
    ),
    Case(
        "AnglE",
        labelled_pairs,
        angle_of_matrix,
        partial(ranked_by, "AnglELoss"),
        lambda a, b: fastqt.angle_loss(a, b, labels_of(a)),
    ),
    *(
        Case(
            form,
            labelled_rows,
            partial(triplets_of_matrix, form=form),
            partial(triplets_by, "sentence_transformers.sentence_transformer.losses", form),
            lambda x, form=form: triplets_by("fastqt.integrations.sentence_transformers", form)(x),
            most_rows=4096,
        )
        for form in (
            "BatchAllTripletLoss",
            "BatchSemiHardTripletLoss",
            "BatchHardTripletLoss",
            "BatchHardSoftMarginTripletLoss",
        )
    ),
    Case("spread-out (GOR)", spread_rows, moments_of_matrix, regularised, fastqt.spread_out_loss),
    Case(
        "distillation of scores",
        taught_rows,
        distilled_by_matrices,
        None,
        lambda x: fastqt.similarity_distillation_loss(x, teacher_of(x)),
    ),
    Case("distillation of softmaxes", two_views, softmaxes_of_matrices, None, softmaxes, most_rows=4096),
    Case(
        "InfoNCE, own negatives",
        with_own_rows,
        own_rows_of_matrix,
        None,
        lambda a, b, rows: fastqt.info_nce_loss(a, b, row_negatives=rows),
        most_rows=4096,
    ),
    Case("Qwen3-Embedding", with_own_rows, qwen_of_matrices, None, qwen, most_rows=4096),
    Case(
        "InfoNCE, debiased",
        two_views,
        debiased_of_matrix,
        None,
        partial(fastqt.info_nce_loss, tau_plus=0.001),
        most_rows=4096,
    ),
    Case("DCL", two_views, dcl_of_matrix, None, fastqt.dcl_loss, most_rows=4096),
    Case(
        "HCL",
        two_views,
        hcl_of_matrix,
        None,
        partial(fastqt.hcl_loss, tau_plus=0.001),
        most_rows=4096,
    ),
)
