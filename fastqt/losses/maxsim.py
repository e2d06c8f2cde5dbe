"""MaxSim, ColBERT's late interaction: the softmax loss of queries and documents of a vector for each token.

The scores of tokens are made in tiles, of some queries with some documents, and leave a tile as the maxima
over each document's tokens. A chunk of whole queries keeps the places of these maxima, from which its
gradients are sums of a few rows: for a query's token of one row of each document, and for a document's token
of the queries' tokens that it is the maximum of. These sums are added up in the order of the rows, without
atomic operations, so the same inputs give the same bits. On a GPU the maxima and the sums are kernels of
Triton; what is here in torch's operations is for all other devices, and for float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt import autograd
from fastqt.arguments import Argument, Scale, exclusions_of, mask_of
from fastqt.checks import check_paired, check_tensor, require
from fastqt.devices import accumulation_dtype
from fastqt.distributed.batch import Batch
from fastqt.distributed.group import GroupLike
from fastqt.engines import has_kernels_for
from fastqt.engines.own_products import product_read, read_in
from fastqt.engines.triton.maxsim import TokenKernels
from fastqt.exclusions import ExcludeLike, Exclusions, Mask, OfIds
from fastqt.loss import Arguments, loss
from fastqt.losses.scored import ScoreNeeds, ScoreOperator, ScoreProblem, Scoring, slices
from fastqt.options import Reduction
from fastqt.problem import loss_dtype, unit_rows
from fastqt.torch_modes import without_autocast

TOKENS = "tokens of documents"  # under which ranks know how many tokens a document is padded to


class Room(NamedTuple):
    """How many numbers there are at a time: on a CPU few, so that they stay near the caches."""

    tile: int  # scores of tokens
    places: int  # maxima of a chunk of queries, in all documents
    block: int  # of the documents whose gradients are computed at once


ROOM, CPU_ROOM = Room(2**25, 2**24, 2**24), Room(2**18, 2**19, 2**19)


def _first_tokens(name: str, x: Any) -> dict[str, Tensor]:
    """The first vector of each row, which stands for all that a row has."""
    check_tensor(name, x)
    shape = tuple(x.shape)
    if x.dim() != 3:
        advice = "; give a vector for each token, or info_nce_loss one for each text" * (x.dim() == 2)
        raise ValueError(f"{name}: want shape (rows, tokens, D), got {shape}{advice}")
    if not shape[1]:
        raise ValueError(f"{name}: want at least one token, got shape {shape}; skip such a batch")
    return {name: x[:, 0]}


def _length(documents: Tensor) -> dict[str, int]:
    return {TOKENS: documents.shape[1]}


Queries = Annotated[Tensor, Argument(rows="rows", matrices=_first_tokens)]
Documents = Annotated[Tensor, Argument(rows="own", matrices=_first_tokens, counts=_length)]
TokenMask = Annotated[Tensor | None, mask_of("a token")]
Exclude = Annotated[ExcludeLike | None, exclusions_of(OfIds, Mask)]


def check_masks(
    queries: Tensor, documents: Tensor, query_mask: Tensor | None, document_mask: Tensor | None
) -> None:
    """Raises ValueError for a mask that has not one number for each token."""
    for name, mask, x in (
        ("query_mask", query_mask, queries),
        ("document_mask", document_mask, documents),
    ):
        if mask is not None and mask.shape != x.shape[:2]:
            raise ValueError(
                f"{name}: want shape {tuple(x.shape[:2])}, one for each token, got {tuple(mask.shape)}"
            )


def _fit(queries: Tensor, documents: Tensor, document_mask: Tensor | None) -> None:
    check_paired("queries", len(queries), "documents", len(documents))
    if document_mask is not None:
        have_tokens = document_mask[: len(queries)].any(1).all()
        require(have_tokens, "document_mask: want at least one token of the document of each query")


@loss("MaxSimLoss", check=(check_masks, _fit))
def maxsim_loss(
    call: Arguments,
    queries: Queries,
    documents: Documents,
    *,
    query_mask: TokenMask = None,
    document_mask: TokenMask = None,
    scale: Scale = 1.0,
    normalize: bool = True,
    exclude: Exclude = None,
    reduction: Reduction = "mean",
    group: GroupLike | None = None,
) -> Tensor:
    """Cross-entropy of each query with its own document among all documents, by ColBERT's MaxSim.

    Queries and documents have a vector for each token. The score of query i with document j is the sum over
    the query's tokens t of max_u <q_it, d_ju>, the best of the document's tokens u, and the loss is that of a
    softmax of scale * score over all documents. Document i is that of query i; documents beyond the N of the
    queries, such as hard negatives, are candidates of every query.

    The scores of tokens are made in tiles, and no matrix of them is stored. It takes one product of all
    queries' tokens with all documents' tokens, and for the gradients N Tq M sums of D numbers. On a GPU
    Triton's kernels compute both of 16 bits and float32; all else is plain PyTorch. Where several tokens of
    a document are the maximum, the gradient flows to the first, so the same inputs give the same bits.

    Args:
        queries: (N, Tq, D) floating point; products of float16 and bfloat16 are added up in float32, and
            gradients too. On a GPU products and gradients read tokens of norm 1 rounded to 16 bits.
        documents: (M, Td, D) with M >= N, dtype and device as `queries`.
        query_mask, document_mask: (N, Tq) and (M, Td) bool, as an attention mask: True where there is a
            token, False for padding, whose values do not count. By default all are tokens. A query without
            tokens scores 0 with all documents. A document without tokens is no candidate, as its score is
            minus infinity; that of a query needs one.
        scale: 1 / temperature, a number or 0-d tensor (differentiable).
        normalize: tokens count at norm 1, as those of ColBERT do; otherwise as they are.
        exclude: filters by ids and a bool tensor (N, M), as of `contrastive_loss`; of ids one is made.
        reduction: "mean" over the queries, "sum", or "none".
        group: as of `contrastive_loss`. The documents of all ranks are gathered, and are candidates. Equal
            shards have documents of one padded length; uneven shards are padded to the longest.

    Returns:
        A scalar, or (N,) for reduction="none"; float64 for float64 inputs, float32 otherwise. It is
        differentiable once.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> queries, documents = torch.randn(8, 5, 16), torch.randn(24, 9, 16)  # two hard negatives each
        >>> fastqt.maxsim_loss(queries, documents).shape
        torch.Size([])
        >>> queries, documents = torch.eye(2)[:, None], torch.eye(2).repeat(2, 1, 1)  # scores 1, 1 and 1, 1
        >>> lengths = torch.tensor([1, 2])  # so that the first document has the first query's token alone
        >>> document_mask = torch.arange(2) < lengths[:, None]
        >>> losses = fastqt.maxsim_loss(
        ...     queries, documents, document_mask=document_mask, reduction="none"
        ... )
        >>> [round(loss, 4) for loss in losses.tolist()]  # log(e + e) - 1, and log(1 + e) - 1
        [0.6931, 0.3133]

    Source: Khattab and Zaharia, "ColBERT: Efficient and effective passage search via contextualized late
    interaction over BERT" (2020), eq. 3; negatives of the batch as in Santhanam et al., "ColBERTv2" (2022).
    """
    batch = call.batch
    candidates, mask_of_candidates = _gathered(batch, documents, document_mask)
    excluded = _excluded(batch, exclude, queries.device)

    def losses(part: str) -> Tensor:
        p = problem_of(queries, candidates, query_mask, mask_of_candidates, normalize)
        p.scale, p.excluded, p.first = scale, excluded, batch.first("documents")
        return autograd.loss_of(p, part, MAXSIM, call.function)

    return batch.loss(reduction, (queries, candidates, scale), losses)


def _excluded(batch: Batch, exclude: Any, device: torch.device) -> Tensor | None:
    """Which cells of this process's queries with all documents leave, (n, M) bool."""
    exclusions: Exclusions | None = exclude
    if exclusions is None:
        return None
    mask = exclusions.of(Mask)
    excluded = None if mask is None else mask.cells
    for ids in exclusions.ids(device):
        leave = ids.excludes(ids.query_ids, batch.gather_constant(ids.columns, "documents"))
        excluded = leave if excluded is None else excluded | leave
    return excluded


def _gathered(batch: Batch, documents: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The documents of all ranks, padded to the longest of them, and their mask."""
    lengths = batch.each(TOKENS)
    if any(length != lengths[0] for length in lengths[1:]):
        most, length = max(lengths), documents.shape[1]
        if mask is None:
            mask = torch.ones(documents.shape[:2], dtype=torch.bool, device=documents.device)
        documents, mask = F.pad(documents, (0, 0, 0, most - length)), F.pad(mask, (0, most - length))
    if mask is not None and not batch.is_of_process:
        # As bytes, which all backends exchange.
        mask = batch.gather_constant(mask.to(torch.uint8), "documents").bool()
    return batch.gather(documents, "documents"), mask


def _tokens(x: Tensor, mask: Tensor | None, normalize: bool) -> Tensor:
    """The vectors as they are computed with. Those of padding are zeros, whatever was there."""
    x = x.to(loss_dtype(x))
    if mask is not None:
        x = x.masked_fill(~mask[:, :, None], 0)
    return (unit_rows(x) if normalize else x).contiguous()


@dataclass
class MaxSimProblem(ScoreProblem):
    """Queries (N, T, D) and documents (M, U, D) of a vector for each token, and zeros where there is none."""

    bias: Tensor | None  # (M, U), 0, or minus infinity where there is no token
    excluded: Tensor | None  # (N, M) bool, the cells that leave the softmax unless they are positives
    first: int  # the document of the first query; those of the others follow

    def positives(self, rows: slice) -> Tensor:
        """The document of each of some queries, (n, 1)."""
        numbers = torch.arange(rows.start, rows.stop, device=self.queries.device)
        return numbers[:, None] + self.first


def problem_of(
    queries: Tensor,
    documents: Tensor,
    query_mask: Tensor | None,
    document_mask: Tensor | None,
    normalize: bool,
) -> MaxSimProblem:
    """The problem of tokens and their masks with a scale of 1."""
    bias = None
    if document_mask is not None:
        bias = torch.zeros(document_mask.shape, dtype=loss_dtype(queries), device=queries.device)
        bias = bias.masked_fill(~document_mask, -torch.inf)
    return MaxSimProblem(
        _tokens(queries, query_mask, normalize),
        _tokens(documents, document_mask, normalize),
        1.0,
        read_in(queries),
        bias,
        excluded=None,
        first=0,
    )


class MaxSim(Scoring):
    """Scores that are sums of maxima, of which the places are kept until the gradients of their rows."""

    p: MaxSimProblem

    def __init__(self, p: MaxSimProblem, row_weights: Tensor | None, needs: ScoreNeeds) -> None:
        super().__init__(p, row_weights, needs)
        self.wants_places = row_weights is not None and (needs.queries or needs.candidates)
        self.kernels: TokenKernels | None = None
        reads = getattr(torch, p.reads)
        if has_kernels_for(p.queries, reads):
            self.kernels = TokenKernels(p.queries, p.candidates, reads, p.bias)

    @property
    def rows_at_once(self) -> int:
        (M, U, _), T = self.p.candidates.shape, self.p.queries.shape[1]
        room = CPU_ROOM if self.p.queries.is_cpu else ROOM
        rows = room.places // (T * M)
        return max(rows if self.kernels else min(rows, room.tile // (T * U)), 1)

    def maxima(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """The sums of maxima (n, M), and if they are wanted their places (n T, M)."""
        if self.kernels is not None:
            return self.kernels.maxima(rows, self.wants_places)
        return _maxima(self.p.queries[rows].flatten(0, 1), self.p, self.wants_places)

    def weights_of_maxima(self, d_scores: Tensor, dtype: torch.dtype) -> Tensor:
        """The derivatives of the loss by the maxima, (n T, M)."""
        return (self.scale * d_scores).to(dtype).repeat_interleave(self.p.queries.shape[1], 0)

    def scores(self, rows: slice) -> Tensor:
        self.sums, self.places = self.maxima(rows)
        scores = self.scale * self.sums
        if self.p.bias is not None:  # also where the scale is 0
            scores.masked_fill_(self.sums.isneginf(), -torch.inf)
        if self.p.excluded is not None:
            leaving = self.p.excluded[rows].scatter(1, self.p.positives(rows), False)
            scores.masked_fill_(leaving, -torch.inf)
            self.sums.masked_fill_(leaving, -torch.inf)
        return scores

    def add(self, rows: slice, d_scores: Tensor) -> None:
        assert self.row_weights is not None
        p, sums = self.p, self.sums
        d_scores *= self.row_weights[rows, None]
        if self.d_scale is not None:
            # The derivatives of a row add up to 0, so a difference from the positive has the same sum.
            differences = (sums - sums.gather(1, p.positives(rows))).masked_fill_(sums.isneginf(), 0)
            self.d_scale += (d_scores * differences).sum()
        if self.places is None:
            return
        if self.kernels is not None:
            weights = self.scale * d_scores
            self.kernels.add_gradients(rows, self.places, weights, self.d_queries, self.d_candidates)
        else:
            tokens = p.queries[rows].flatten(0, 1)
            weights = self.weights_of_maxima(d_scores, tokens.dtype)
            of_rows = None if self.d_queries is None else self.d_queries[rows].view(tokens.shape)
            _add_gradients(tokens, p, self.places, weights, of_rows, self.d_candidates)

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.d_queries, self.d_candidates, self.d_scale


def _maxima(
    tokens: Tensor,  # (n T, D), of n queries
    p: MaxSimProblem,
    wants_places: bool,
) -> tuple[Tensor, Tensor | None]:
    """The sums of maxima, (n, M) in the dtype of accumulation, and in which of a document's tokens they are.

    The places are (n T, M) int32; of equal maxima it is the first one's.
    """
    (M, U, D), T, R = p.candidates.shape, p.queries.shape[1], len(tokens)
    room = CPU_ROOM if tokens.is_cpu else ROOM
    dtype = accumulation_dtype(tokens.device)
    sums = tokens.new_empty(R // T, M, dtype=dtype)
    places = tokens.new_empty(R, M, dtype=torch.int32) if wants_places else None

    for tile in slices(M, max(room.tile // (R * U), 1)):
        columns = p.candidates[tile].reshape(-1, D).T
        with without_autocast(tokens):
            products = product_read(tokens, columns, p.reads)
        if p.bias is not None:
            products += p.bias[tile].flatten()
        products = products.view(R, -1, U)
        if places is None:
            most = products.amax(2)
        else:
            most, places[:, tile] = products.max(2)
        sums[:, tile] = most.view(-1, T, most.shape[1]).sum(1, dtype=dtype)
    return sums, places


def cross_entropy(
    p: MaxSimProblem, rows: slice, scores: Tensor, wants_derivatives: bool
) -> tuple[Tensor, Tensor]:
    """The losses of rows, (n,), and their derivatives with respect to the scores.

    The other cells' logsumexp keeps its distance from the positive's score, so that both keep their digits
    where the positive has nearly all probability.
    """
    columns = p.positives(rows)
    positive = scores.gather(1, columns)
    others = scores.scatter(1, columns, -torch.inf).logsumexp(1, keepdim=True)
    # Two infinities cancel each other where the positive's score is infinite, as 0 * positive says: NaN.
    lead = others - positive + 0 * positive
    losses = F.softplus(lead, threshold=50)
    derivatives = (scores - positive - losses).exp_()
    return losses.squeeze(1), derivatives.scatter_(1, columns, -lead.sigmoid())


def _add_gradients(
    tokens: Tensor,  # (R, D), of some queries
    p: MaxSimProblem,
    places: Tensor,  # (R, M)
    weights: Tensor,  # (R, M), the derivatives of the loss by the maxima
    d_tokens: Tensor | None,  # (R, D)
    d_documents: Tensor | None,  # (M, U, D)
) -> None:
    """Adds the gradients of the maxima's weighted sum to those of the tokens.

    A token's gradient is a bag of rows: of the documents' tokens that have its maxima, or of the queries'
    tokens whose maximum it is.
    """
    (M, U, D), R = p.candidates.shape, len(tokens)
    room = CPU_ROOM if tokens.is_cpu else ROOM

    for block in slices(M, max(room.block // (max(U, R) * D), 1)):
        of_block, of_places, count = weights[:, block], places[:, block], block.stop - block.start
        numbers = torch.arange(count, device=tokens.device)
        if d_tokens is not None:
            rows = p.candidates[block].reshape(-1, D)
            bags = of_places + U * numbers
            d_tokens += F.embedding_bag(bags, rows, per_sample_weights=of_block.contiguous(), mode="sum")

        if d_documents is not None:
            # For each document the queries' tokens in the order of the document's, and where each begins.
            ordered, order = of_places.T.contiguous().sort(dim=1, stable=True)
            wanted = torch.arange(U, dtype=ordered.dtype, device=tokens.device).repeat(count, 1)
            starts = torch.searchsorted(ordered, wanted) + R * numbers[:, None]
            bags = F.embedding_bag(
                order.flatten(),
                tokens,
                starts.flatten(),
                per_sample_weights=of_block.T.gather(1, order).flatten(),
                mode="sum",
            )
            d_documents[block] += bags.view(-1, U, D)


MAXSIM = ScoreOperator("maxsim", MaxSimProblem, cross_entropy, MaxSim)
