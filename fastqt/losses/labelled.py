"""What the losses from labels share: arguments, the logsumexp of negatives, reductions, and groups."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt import autograd
from fastqt.arguments import Argument, Known, ids_of, is_given
from fastqt.distributed.batch import Batch
from fastqt.distributed.shards import Shards
from fastqt.engines import requested
from fastqt.exclusions import Same
from fastqt.functional import contrastive_loss, log_sum_exp
from fastqt.loss import Arguments
from fastqt.losses.common import row_numbers, scores
from fastqt.losses.positives import Positives, SameLabel, blocks_of, find_positives
from fastqt.losses.same_label import SAME_LABEL, SameLabelProblem
from fastqt.matryoshka import Matryoshka
from fastqt.options import Backend, Memory, Reduction
from fastqt.problem import loss_dtype, reduce, unit_rows
from fastqt.torch_modes import input_dtype

FUNCTIONS = {"supcon": "fastqt.supcon_loss", "ntxent": "fastqt.ntxent_loss"}


def _labels_of(rows: str, of: str) -> Argument:
    """Labels, one for each of the rows that are counted as `rows`, which become int64."""
    ids = ids_of(rows, of)
    assert ids.check is not None
    as_ids = ids.check

    def check(name: str, labels: Any, known: Known) -> Tensor:
        if isinstance(labels, Tensor) and labels.dim() == 2 and labels.is_floating_point():
            raise ValueError(
                f"{name}: want a 1-D tensor of integers, got shape {tuple(labels.shape)} of {labels.dtype}; "
                "of two views, give torch.cat([z1, z2]) and the labels torch.arange(len(z1)).repeat(2)"
            )
        found: Tensor = as_ids(name, labels, known)
        return found

    return Argument(check, is_given)


Labels = Annotated[Tensor, _labels_of("rows", "embeddings")]
CandidateLabels = Annotated[Tensor, _labels_of("candidates", "candidates")]


def fit_candidates(candidates: Tensor | None, candidate_labels: Tensor | None) -> None:
    """Raises ValueError for candidates without labels, or these without those."""
    if (candidates is None) != (candidate_labels is None):
        missing = "candidates" if candidates is None else "candidate_labels"
        raise ValueError(
            f"{missing}: want it together with the other of the two, got None; give both or neither"
        )


class Labelled(NamedTuple):
    """Rows and the candidates that they are compared with, checked."""

    embeddings: Tensor  # (N, D)
    labels: Tensor  # (N,) int64
    candidates: Tensor  # (M, D)
    candidate_labels: Tensor  # (M,) int64
    own: Tensor | None  # (N,) int64, the candidate of the same label that is the row itself; -1: none


class Scoring(NamedTuple):
    """How scores are computed; each as of `fastqt.supcon_loss`."""

    scale: float | Tensor
    normalize: bool
    memory: Memory
    backend: Backend | None
    matryoshka: Matryoshka | None = None


def loss_from_labels(link: str, call: Arguments) -> Tensor:
    """The reduced loss "supcon" or "ntxent" of all ranks' rows, each rank's against the candidates of all."""
    if torch.compiler.is_compiling():
        # Every batch has blocks of other sizes: the loss is left out of the graph.
        loss: Tensor = torch.compiler.disable(loss_from_labels)(link, call)
        return loss

    values, batch = call.values, call.batch
    embeddings, reduction = values["embeddings"], values["reduction"]
    scoring = Scoring(
        values["scale"], values["normalize"], values["memory"], values["backend"], values.get("matryoshka")
    )
    rows = _among_all(batch, embeddings, values["labels"], values["candidates"], values["candidate_labels"])
    terms = 0

    def loss_of_rows(part: str) -> Tensor:
        nonlocal terms
        positives = positives_of(rows, scoring.memory)
        terms = _terms(link, positives)
        return labelled_loss(link, rows, positives, part, scoring)

    leaves = embeddings, rows.candidates, scoring.scale
    if reduction != "mean":
        return batch.loss(reduction, leaves, loss_of_rows)
    return batch.loss("sum", leaves, loss_of_rows) / batch.sum_of_counts(terms, rows.candidates.device)


def _among_all(
    batch: Batch,
    embeddings: Tensor,
    labels: Tensor,
    candidates: Tensor | None,
    candidate_labels: Tensor | None,
) -> Labelled:
    """This rank's rows, and the candidates of all ranks."""
    dtype, of = input_dtype(embeddings), "rows" if candidates is None else "candidates"
    if isinstance(batch, Shards):  # What travels is where the embeddings are.
        labels = labels.to(embeddings.device)
    own = None
    if candidates is None:
        own = row_numbers(len(embeddings), labels.device) + batch.first(of)
        candidates, candidate_labels = embeddings, labels
    assert candidate_labels is not None
    return Labelled(
        embeddings,
        labels,
        batch.gather(candidates, of, dtype),
        batch.gather_constant(candidate_labels.to(labels.device), of),
        own,
    )


def positives_of(x: Labelled, memory: Memory) -> Positives:
    """The positives of each row."""
    return find_positives(x.labels, x.candidate_labels, x.own, x.embeddings.is_cuda, memory)


def labelled_loss(
    link: str,
    x: Labelled,
    positives: Positives,
    reduction: str,
    scoring: Scoring,
) -> Tensor:
    """The losses of rows (N,) for reduction="none", otherwise their sum."""
    scale, normalize, memory, backend, *_ = scoring

    # With one positive a row it competes with the same cells in both losses.
    alike = link == "supcon" or positives.pairs == len(positives.rows)
    eager = requested(backend) == "reference"
    if alike and (eager or positives.may_be_listed(x.embeddings.is_cuda)):
        return _of_targets(x, positives, reduction, scoring)
    if (prefixes := scoring.matryoshka) is not None:
        of_one = scoring._replace(matryoshka=None)
        return prefixes.sum(lambda dim: labelled_loss(link, _prefix(x, dim), positives, reduction, of_one))

    # As an engine would do: rounded to what a product reads, then to norm 1.
    queries = _prepared(x.embeddings, normalize)
    candidates = queries if x.candidates is x.embeddings else _prepared(x.candidates, normalize)
    others = log_sum_exp(
        queries,
        candidates,
        scale=scale,
        exclude=Same(x.labels, x.candidate_labels),
        memory=memory,
        backend=backend,
    )

    dtype = loss_dtype(queries)
    queries, candidates = queries.to(dtype), candidates.to(dtype)
    if eager:
        return reduce(_eager_pairs(queries, candidates, others, scale, positives), reduction)
    blocks = blocks_of(positives, queries.shape[1], queries.element_size())
    p = SameLabelProblem(queries, candidates, others, scale, positives.to(queries.device), blocks, link)
    return autograd.loss_of(p, reduction, SAME_LABEL, FUNCTIONS[link])


def _prefix(x: Labelled, dim: int) -> Labelled:
    """The first `dim` columns of rows and candidates."""
    embeddings = x.embeddings[:, :dim]
    same = x.candidates is x.embeddings
    return x._replace(embeddings=embeddings, candidates=embeddings if same else x.candidates[:, :dim])


def _of_targets(
    x: Labelled,
    positives: Positives,
    reduction: str,
    scoring: Scoring,
) -> Tensor:
    """SupCon as a cross-entropy whose targets are listed."""
    N, device = len(x.embeddings), x.embeddings.device
    itself_alone = None
    itself = x.own is not None and x.candidates is x.embeddings
    if x.own is not None and not itself:
        # Only a row and the candidate that is the row itself share a group.
        own, ids = x.own.to(device), row_numbers(N, device)
        columns = ids.new_full((len(x.candidates),), -1)
        columns[own[own >= 0]] = ids[own >= 0]
        itself_alone = Same(ids, columns)

    loss = contrastive_loss(
        x.embeddings,
        x.candidates,
        SameLabel(positives, N),
        diagonal="exclude" if itself else "keep",
        scale=scoring.scale,
        normalize=scoring.normalize,
        matryoshka=scoring.matryoshka,
        exclude=itself_alone,
        reduction=cast(Reduction, reduction),
        memory=scoring.memory,
        backend=scoring.backend,
    )

    # That loss is the cross-entropy less the targets' entropy, which is the logarithm of their number.
    if positives.log_counts == 0:
        return loss
    weight = 1.0 if scoring.matryoshka is None else sum(scoring.matryoshka.weights)
    if reduction == "sum":
        return loss + weight * positives.log_counts
    entropies = weight * positives.counts.to(loss).log()
    return loss + torch.zeros_like(loss).index_copy_(0, positives.rows.to(device), entropies)


def _prepared(x: Tensor, normalize: bool) -> Tensor:
    x = x.to(input_dtype(x))
    return unit_rows(x) if normalize else x


def _eager_pairs(
    queries: Tensor, candidates: Tensor, others: Tensor, scale: float | Tensor, positives: Positives
) -> Tensor:
    """NT-Xent's losses of rows (N,) in plain PyTorch, from the list of all pairs."""
    rows, columns = (index.to(queries.device) for index in positives.listed())
    leads = others[rows] - scores(queries[rows], candidates[columns], scale)
    return torch.zeros_like(others).index_add(0, rows, F.softplus(leads, threshold=50))


def _terms(link: str, positives: Positives) -> int:
    """What a mean divides by: rows that have a positive, or all pairs."""
    return len(positives.rows) if link == "supcon" else positives.pairs
