"""The binary alternative to QuickThoughts: windows of sentences are told from implausible ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.arguments import ContextSize, Rows
from fastqt.checks import require
from fastqt.devices import product_dtype
from fastqt.distributed import collectives
from fastqt.distributed.group import GroupLike
from fastqt.distributed.shards import Shards
from fastqt.exclusions import Same
from fastqt.functional import sigmoid_loss
from fastqt.loss import Arguments, loss
from fastqt.losses.common import check_window, device_of, row_numbers
from fastqt.losses.negative_sampling import negative_sampling_loss
from fastqt.options import Reduction
from fastqt.problem import loss_dtype, reduce
from fastqt.targets import IGNORE_INDEX, Diagonal, Pairs, TargetRows, Targets, Window
from fastqt.torch_modes import is_traced, without_autocast

GREAT = 2**62  # Beside it a batch is so small that no remainder is more frequent than another.
NOBODY_ELSE = "samples: want another sentence with neighbours to draw from, got none"


@loss("BinaryWindowLoss", check=check_window)
def binary_window_loss(
    call: Arguments,
    queries: Rows,
    candidates: Rows,
    *,
    context_size: ContextSize = 1,
    document_ids: Tensor | None = None,
    samples: int | None = None,
    generator: torch.Generator | None = None,
    reduction: Reduction = "mean",
    group: GroupLike | None = None,
) -> Tensor:
    """Binary cross-entropy of whether a sentence and a context belong together.

    The context c_i of sentence i is the sum of its neighbours' embeddings, and the score of a window is
    <f_i, c_j>: the sum of the sentence's scores with all neighbours at once. The window is plausible for
    j = i, and implausible for the contexts of other sentences. (`sigmoid_loss` with `Window` targets
    classifies each pair of sentences for itself.)

    A sentence without neighbours has no window: its loss is 0, and its context is no negative.

    Args:
        queries, candidates: (N, D) floating point; float16 and bfloat16 are computed in float32.
        context_size: half-width k of the window, at least 1 and less than N.
        document_ids: (N,) integers; the window stays within equal ids.
        samples: K, the number of contexts that are drawn for each sentence from those of the others, with
            replacement. None: all of them.
        generator: draws the samples; torch's default generator if None. With a `group` each rank draws for
            its own sentences. A generator breaks the graph of torch.compile.
        reduction: "mean" over all N rows, "sum", or "none".
        group: as of `contrastive_loss`.

    Returns:
        A scalar, or (N,) for reduction="none"; float64 for float64 inputs, float32 otherwise.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> queries, candidates = torch.randn(2, 8, 16)  # of eight sentences in their order
        >>> fastqt.binary_window_loss(queries, candidates, context_size=2, reduction="none").shape
        torch.Size([8])
        >>> fastqt.binary_window_loss(queries, candidates, samples=3).shape  # three negatives a sentence
        torch.Size([])

    Source: the classifier of plausible and implausible context windows that Logeswaran and Lee
    (arXiv:1803.02893), section 3, compare theirs with.
    """
    batch = call.batch
    n, window = len(queries), batch.targets(Window(context_size, normalize=False, document_ids=document_ids))
    gathered = batch.gather(candidates)
    with batch.agreeing():
        window.check(n, batch.total(), "zero")
        contexts, known = _contexts(window, gathered, n)
    # 16 bits stay where products of them add up in float32; neighbours are added up in float32 everywhere.
    contexts = contexts.to(product_dtype(contexts.device, candidates.dtype))
    queries = queries.to(contexts.dtype)

    if isinstance(batch, Shards):
        return _losses_of_ranks(batch, queries, contexts, known, gathered, samples, generator, reduction)
    if document_ids is None:  # Then each sentence has a neighbour.
        return reduce(_losses(queries, contexts, samples, generator), reduction)
    if is_traced(queries):
        return reduce(_losses_where(known, queries, contexts, samples, generator), reduction)
    rows = known.nonzero()[:, 0]
    if not len(rows):
        return reduce((queries * contexts).sum(1), reduction)
    losses = _losses(queries[rows], contexts[rows], samples, generator)
    return reduce(losses.new_zeros(n).index_copy(0, rows, losses), reduction)


def _losses(
    queries: Tensor, contexts: Tensor, samples: int | None, generator: torch.Generator | None
) -> Tensor:
    """The loss of each row, where all have neighbours, (n,)."""
    if samples is None:
        return sigmoid_loss(queries, contexts, Diagonal(), reduction="none")
    own = row_numbers(len(queries), queries.device)
    drawn = _others(own, len(queries), samples, generator)
    return negative_sampling_loss(queries, contexts, own, drawn, reduction="none")


def _losses_where(
    known: Tensor,  # (N,) bool: whether a sentence has neighbours
    queries: Tensor,
    contexts: Tensor,
    samples: int | None,
    generator: torch.Generator | None,
) -> Tensor:
    """The loss of each row, (N,), without asking how many sentences have neighbours, as a graph cannot."""
    # The zeros keep rows that are not finite out of the gradient, where the loss is 0.
    queries, contexts = (x.where(known[:, None], 0) for x in (queries, contexts))
    own = row_numbers(len(queries), queries.device)
    if samples is None:
        # The contexts of sentences without neighbours are in the group of all queries, which excludes them.
        targets = own.where(known, IGNORE_INDEX)
        others = Same(own * 0, known.long())
        losses = sigmoid_loss(queries, contexts, targets, exclude=others, reduction="none")
    else:
        count = known.sum()
        require(count != 1, NOBODY_ELSE)
        # Those with neighbours are numbered from 0 on, in their order.
        numbers = known.cumsum(0) - 1
        drawn = _others(numbers, count, samples, generator)
        drawn = (~known).long().argsort(stable=True)[drawn]
        losses = negative_sampling_loss(queries, contexts, own, drawn, reduction="none")
    return losses.where(known, 0)


def _contexts(window: Targets, candidates: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The sums of the neighbours of n rows, (n, D), and which of them have a neighbour, (n,) bool."""
    if not n:
        return candidates[:0].to(loss_dtype(candidates)), candidates.new_zeros(0, dtype=torch.bool)
    targets: TargetRows = window.rows(n, len(candidates), candidates.device)
    starts, columns, weights = targets.compressed()
    dtype = loss_dtype(candidates)

    def sums(matrix: Tensor) -> Tensor:
        of_entries = weights.to(matrix.dtype)
        return F.embedding_bag(columns, matrix, starts[:-1], mode="sum", per_sample_weights=of_entries)

    with without_autocast(candidates):
        return sums(candidates.to(dtype)), sums(candidates.new_ones(len(candidates), 1, dtype=dtype))[
            :, 0
        ] > 0


def _others(own: Tensor, count: int | Tensor, samples: int, generator: torch.Generator | None) -> Tensor:
    """Numbers in [0, count) that differ from each row's own, (n, samples).

    Of a count that is a tensor, which is not read, the remainders of great numbers are as good as uniform.
    """
    if isinstance(count, int) and count < 2:
        raise ValueError(NOBODY_ELSE)
    device = device_of(generator, own.device)
    shape = (len(own), samples)
    most = count - 1 if isinstance(count, int) else GREAT
    drawn = torch.randint(most, shape, generator=generator, device=device).to(own.device)
    if isinstance(count, Tensor):
        drawn = drawn % (count - 1).clamp(min=1)
    return drawn + (drawn >= own[:, None])


def _losses_of_ranks(
    shards: Shards,
    queries: Tensor,  # (n, D), as the contexts and `known` of this rank's sentences
    contexts: Tensor,
    known: Tensor,
    gathered: Tensor,  # (N, D), the candidates of all ranks
    samples: int | None,
    generator: torch.Generator | None,
    reduction: Reduction,
) -> Tensor:
    """The loss of all ranks' sentences, of which those with neighbours make up a batch of their own."""
    group, rows = shards.group, known.nonzero()[:, 0]
    counts: list[int] = collectives.gather_constant(known.sum()[None], [1] * group.size, group).tolist()
    numbers = row_numbers(len(rows), rows.device) + sum(counts[: group.rank])
    part: Reduction = "none" if reduction == "none" else "sum"
    if counts != list(shards.each()) and not torch.compiler.is_compiling():
        group = group.uneven()

    if not sum(counts):
        losses = collectives.nothing((queries, gathered), part)
    elif samples is None:
        losses = sigmoid_loss(queries[rows], contexts[rows], Pairs(), reduction=part, group=group)
    else:
        with shards.agreeing():
            drawn = _others(numbers, sum(counts), samples, generator)
        every = collectives.gather(contexts[rows], counts, group)
        losses = negative_sampling_loss(queries[rows], every, numbers, drawn, reduction=part, group=group)

    if reduction == "none":
        return losses.new_zeros(len(queries)).index_copy(0, rows, losses)
    return losses / shards.total() if reduction == "mean" else losses
