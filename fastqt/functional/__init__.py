"""The general losses and the logsumexp: one problem each, of one process or of the ranks of a group."""

from __future__ import annotations

from torch import Tensor

from fastqt.arguments import OwnRows, Rows, Scale
from fastqt.distributed.group import GroupLike
from fastqt.exclusions import ExcludeLike
from fastqt.functional.computed import loss_of
from fastqt.functional.fitting import (
    Bias,
    ExcludeUntargeted,
    GivenTargets,
    RowNegatives,
    RowScores,
    fit_exclusions,
    fit_similarity,
    fit_targets,
    fit_targets_of_cells,
)
from fastqt.functional.scores import candidate_scores as candidate_scores
from fastqt.loss import Arguments, loss
from fastqt.matryoshka import MatryoshkaLike
from fastqt.options import Backend, DiagonalMode, Memory, Reduction, Similarity, TargetReduction


@loss("ContrastiveLoss", check=(fit_similarity, fit_exclusions, fit_targets), sums_prefixes=False)
def contrastive_loss(
    call: Arguments,
    queries: Rows,
    candidates: OwnRows,
    targets: GivenTargets = None,
    *,
    context_size: int | None = None,
    document_ids: Tensor | None = None,
    diagonal: DiagonalMode = "zero",
    scale: Scale = 1.0,
    bias: Bias = 0.0,
    normalize: bool = False,
    negatives: OwnRows | None = None,
    row_negatives: RowNegatives = None,
    row_scores: RowScores = None,
    exclude: ExcludeLike | None = None,
    matryoshka: MatryoshkaLike | None = None,
    reduction: TargetReduction = "mean",
    similarity: Similarity = "dot",
    memory: Memory = "fast",
    backend: Backend | None = None,
    group: GroupLike | None = None,
) -> Tensor:
    """Kullback-Leibler divergence from the targets to the softmax of each query's scores.

    With scores S = scale * queries @ candidates.T + bias and P the softmax of a row of S, the loss of
    row i is sum_j T_ij (log T_ij - log P_ij): cross-entropy less the targets' entropy. A row
    without targets has loss 0. Gradients flow to `queries`, `candidates`, `negatives`,
    `row_negatives`, `row_scores`, `scale` and `bias`, once (a double backward needs backend="reference").

    Args:
        queries: (N, D) floating point. On a CPU float16 is computed in float32, and so is bfloat16 where
            the CPU does not multiply it faster, or with an (N, M) matrix of targets. Elsewhere
            bfloat16 is multiplied as it is: scores are rounded to it, but those of targets are not.
        candidates: (M, D), dtype and device as `queries`.
        targets: fastqt targets (`Window`, `Diagonal`, `Sparse`, `smoothed`), a (N,) integer tensor of
            target columns (-100: none), or an (N, M) matrix of weights >= 0. By default
            `Window(context_size, document_ids=document_ids)`: each sentence's neighbours.
        context_size: half-width of the default window, 1 <= context_size < N; 1 if None.
        document_ids: (N,) integers; the default window stays within equal ids.
        diagonal: what becomes of cells (i, i). "zero": the score is replaced by 0, so that exp(0) = 1
            stays in the denominator and no gradient passes; "exclude": they leave the softmax;
            "keep": they are candidates like all others.
        scale: 1 / temperature, a number > 0 or a 0-d tensor (differentiable). A temperature of 0.05 is
            scale=20.
        bias: added to the candidates' scores: a finite number, or a tensor () or (M,) (differentiable).
        normalize: score by cosine: the rows of all embeddings are first scaled to norm 1 (differentiable).
        negatives: (K, D) further candidates for all rows, which are targets of none.
        row_negatives: (N, D) one negative for each row alone, (N, K, D) several, or `Mixed(...)` from the
            candidates.
        row_scores: (N,) or (N, K) scores of further candidates of each row alone, which are given as numbers
            (differentiable): neither scaled nor biased, targets of none. -inf stands for no candidate.
        exclude: what leaves the softmax beside its targets: a filter, a bool tensor (N, M) that is True where
            a cell leaves, which is read in place, or a sequence of these. Filters are by ids, as
            `fastqt.Same`, by the similarity to the target, `fastqt.Margin`, by a limit for each row,
            `fastqt.Above`, or by a second model, `fastqt.Guide`, which takes one more product of N x (M + K)
            x E, in float64. With a guide, and with ids beside those of one `Same` of candidates, the graph of
            torch.compile breaks, and a mask is made of a few rows at a time.
        similarity: "dot", or "euclidean": scores are -scale * |queries_i - candidates_j|**2 + bias, from the
            same products. So are those of `negatives` and `row_negatives`; with `normalize` rows have norm 1
            before. Wants diagonal="keep" or "exclude", and no `Mixed`.
        matryoshka: the loss is the sum of those of the first so many columns of all embeddings, such as
            (256, 128, 64), at most D; with `normalize` each of these prefixes counts at norm 1. Weights for
            them are given by `fastqt.Matryoshka(dims, weights)`.
            All prefixes together take the matrix products of one loss of the widest on a CPU, beside
            `row_negatives` by backend="torch". With distances, `Mixed`, several cells that a row has alone,
            or a ring of ranks, and in a GPU's kernels, each prefix is a loss of its own.
        reduction: "mean" over all N rows, those without targets included, where `F.cross_entropy` divides by
            the number of rows that have a label; "mean_of_targets": over the rows that have targets, as
            there; "sum", or "none".
        memory: "fast" holds a chunk of whole rows of scores (about 48 MiB on a CPU; on a GPU 1/85 of its
            memory, but at least 512 MiB) and takes three matrix products; "low" holds 16 MiB on a CPU, and
            40 MiB on a GPU, where a softmax takes four products, as on a CPU with rows of over 65,536 scores.
            An integer, at least 2**24, is about how many bytes the loss may take beside inputs and gradients;
            it takes three products if these are enough for that.
        backend: "cpu", "cuda" (small problems), "triton", "torch" or "reference"; by default the best that
            works here (see `show_config`). The environment variable FASTQT_BACKEND sets another default.
        group: the processes whose rows make up the batch: a `fastqt.distributed.Group`, a ProcessGroup or a
            DeviceMesh of one dimension. Each rank gives its own rows of all arguments; the batch is their
            concatenation, `negatives` included. "mean" and "sum" are those of the whole batch, the same bits
            on all ranks, and "none" gives the rank's own rows. Target columns, class indices and partners are
            indices into all ranks' candidates; a bool tensor of `exclude` is (N, all candidates). See
            docs/distributed.md.

    Returns:
        A scalar, or (N,) for reduction="none"; float64 for float64 inputs, float32 otherwise.
        NaN and inf in the embeddings reach the loss, as in torch.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> queries, candidates = torch.randn(2, 6, 16)  # of six sentences in their order
        >>> documents = torch.tensor([0, 0, 0, 1, 1, 1])
        >>> fastqt.contrastive_loss(queries, candidates, document_ids=documents, reduction="none").shape
        torch.Size([6])
        >>> unit = torch.eye(4)  # InfoNCE of four pairs, by hand: log(e + 3) - 1
        >>> round(fastqt.contrastive_loss(unit, unit, fastqt.Diagonal(), diagonal="keep").item(), 4)
        0.7437

    Source: Logeswaran and Lee, "An efficient framework for learning sentence representations" (2018),
    eq. 2, with the KL form of its re-implementations; InfoNCE (van den Oord et al., 2018) is
    `targets=Diagonal(), diagonal="keep"`. Prefixes: Kusupati et al., "Matryoshka representation learning"
    (2022), eq. 1.
    """
    return loss_of(call, "softmax")


@loss("SigmoidLoss", check=(fit_exclusions, fit_targets_of_cells), sums_prefixes=False)
def sigmoid_loss(
    call: Arguments,
    queries: Rows,
    candidates: OwnRows,
    targets: GivenTargets = None,
    *,
    context_size: int | None = None,
    document_ids: Tensor | None = None,
    diagonal: DiagonalMode = "keep",
    scale: Scale = 1.0,
    bias: Bias = 0.0,
    normalize: bool = False,
    negatives: OwnRows | None = None,
    row_negatives: RowNegatives = None,
    row_scores: RowScores = None,
    exclude: ExcludeLike | None = None,
    matryoshka: MatryoshkaLike | None = None,
    reduction: Reduction = "mean",
    memory: Memory = "fast",
    backend: Backend | None = None,
    group: GroupLike | None = None,
) -> Tensor:
    """Binary cross-entropy of every query with every candidate: is this one of its targets?

    With scores S = scale * queries @ candidates.T + bias, the loss of row i is
    sum_j log(1 + exp(S_ij)) - T_ij S_ij, summed over candidates. Gradients flow to `queries`,
    `candidates`, `negatives`, `row_negatives`, `row_scores`, `scale` and `bias`, once (a double backward
    needs backend="reference").

    Args:
        queries, candidates: as of `contrastive_loss`.
        targets: as of `contrastive_loss`; probabilities, if the loss is to be a cross-entropy. By default
            `Window(context_size, document_ids=document_ids, normalize=False)`: each sentence's neighbours.
        diagonal: "keep"; "zero": the scores of cells (i, i) are replaced by 0, which adds log 2;
            "exclude": these cells leave the loss.
        memory: as of `contrastive_loss`, but "low" needs three matrix products as well, on a GPU where the
            float32 sums of the candidates' gradients fit.
        scale: 1 / temperature, as of `contrastive_loss`.
        reduction: "mean" over all N rows, "sum", or "none".

    All other arguments, matryoshka and group among them, are as of `contrastive_loss`.

    Returns:
        A scalar, or (N,) for reduction="none"; float64 for float64 inputs, float32 otherwise.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> queries, candidates = torch.randn(2, 6, 16)
        >>> fastqt.sigmoid_loss(queries, candidates, context_size=2, reduction="none").shape
        torch.Size([6])
        >>> round(fastqt.sigmoid_loss(torch.zeros(2, 8), torch.zeros(2, 8)).item(), 4)  # 2 log 2 a row
        1.3863

    Source: the binary windows that Logeswaran and Lee (2018) compare QuickThoughts with; Zhai et
    al., "Sigmoid loss for language image pre-training" (2023).
    """
    return loss_of(call, "sigmoid")


@loss(check=(fit_similarity, fit_exclusions))
def log_sum_exp(
    call: Arguments,
    queries: Rows,
    candidates: OwnRows,
    *,
    diagonal: DiagonalMode = "keep",
    scale: Scale = 1.0,
    bias: Bias = 0.0,
    normalize: bool = False,
    negatives: OwnRows | None = None,
    row_negatives: RowNegatives = None,
    row_scores: RowScores = None,
    exclude: ExcludeUntargeted = None,
    similarity: Similarity = "dot",
    memory: Memory = "fast",
    backend: Backend | None = None,
    group: GroupLike | None = None,
) -> Tensor:
    """log sum_j exp(S_ij) of each query's scores: the logarithm of its softmax's denominator.

    With scores S = scale * queries @ candidates.T + bias. Losses over several sets of candidates are made
    from it. Leave the positives out and add them once: for positives on the diagonal with the scores
    `positive` (N,) and two sets of candidates,

        a = fastqt.log_sum_exp(queries, first, diagonal="exclude")
        b = fastqt.log_sum_exp(queries, second)
        loss = torch.nn.functional.softplus(torch.logaddexp(a, b) - positive).mean()

    is the cross-entropy over both sets together. It keeps all its digits once the positives are learnt,
    when a logsumexp that contains the positive cancels against it. Gradients flow as of
    `contrastive_loss`, once (a double backward needs backend="reference").

    Args:
        queries: (N, D) floating point.
        candidates: (M, D), dtype and device as `queries`.
        diagonal: what becomes of cells (i, i): "keep"; "zero": the score is replaced by 0; "exclude": they
            leave the sum.
        scale: 1 / temperature, as of `contrastive_loss`.
        exclude: as of `contrastive_loss`, but for `fastqt.Margin`, since there are no targets; here also
            `fastqt.Above`, cells whose similarity is above a threshold of their row. Positives that are not
            on the diagonal leave by `fastqt.Same`. A guide takes its product in the backward pass once more.
        memory: as of `contrastive_loss`. On a CPU both modes work in tiles of fixed size: one matrix product
            in the forward pass, three in the backward pass, or with "fast" two of the first rows, of
            whose scores up to 32 MiB are kept.

    All other arguments are as of `contrastive_loss`.

    Returns:
        (N,), float64 for float64 inputs, float32 otherwise. A row of which every candidate is excluded
        has -inf, and a gradient of 0.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> fastqt.log_sum_exp(torch.zeros(2, 8), torch.zeros(5, 8))  # log 5 of each row
        tensor([1.6094, 1.6094])
        >>> fastqt.log_sum_exp(torch.zeros(2, 8), torch.zeros(5, 8), diagonal="exclude")  # log 4
        tensor([1.3863, 1.3863])

    Source: the denominator of Logeswaran and Lee, "An efficient framework for learning sentence
    representations" (2018), eq. 2.
    """
    return loss_of(call, "log_sum_exp")
