"""A second model's embeddings of a batch, which say which candidates are no negatives of a query."""

from __future__ import annotations

from collections.abc import Hashable
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.checks import (
    FLOATING,
    check_embeddings,
    check_flag,
    check_number,
    check_option,
    check_tensor,
)
from fastqt.devices import accumulation_dtype
from fastqt.exclusions.filter import Cells, Filter
from fastqt.norms import LEAST_NORM
from fastqt.options import MarginStrategy

MARGIN_STRATEGIES: tuple[str, ...] = get_args(MarginStrategy)
PAIR_ROWS = 4096  # of which the scores of pairs are found at a time


class Guide(Filter):
    """Filters false negatives: candidates that a guide finds too similar to a query leave the loss.

    Cell (i, j) leaves the loss, as by a mask, where the guide's score of query i and candidate j is above
    threshold i, unless it is a target. A score that equals the threshold stays, so that a copy of the
    positive stays with a margin of 0. Scores are summed in float64 and compared in float32, which makes those
    of equal embeddings equal.

    Args:
        queries: (N, E) the guide's embeddings of the loss's queries, in any floating-point dtype and of any
            width E. No gradient flows to any of the guide's tensors.
        candidates: (M, E) those of its candidates.
        margin: how far below the score of query i and candidate i its threshold is.
        margin_strategy: with t the score of query i and candidate i, the threshold is t - margin for
            "absolute" and t - |t| * margin for "relative".
        thresholds: (N,) thresholds in place of these. Without them there are at least as many candidates as
            queries, and candidate i is the positive of query i.
        normalize: the guide scores by cosine; otherwise by inner products.
        negatives: (K, E) the guide's embeddings of the loss's `negatives`. Private negatives of rows are not
            filtered.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> queries, candidates = torch.randn(2, 8, 16)
        >>> guide = fastqt.Guide(*torch.randn(2, 8, 32), margin=0.1)  # a second model's embeddings
        >>> bool(
        ...     fastqt.info_nce_loss(queries, candidates, exclude=guide)
        ...     < fastqt.info_nce_loss(queries, candidates)
        ... )
        True

    Source: Solatorio, "GISTEmbed: Guided in-sample selection of training negatives for text embedding
    fine-tuning" (2024); the margins are those of NV-Retriever (Moreira et al., 2024).
    """

    def __init__(
        self,
        queries: Tensor,
        candidates: Tensor,
        *,
        margin: float = 0.0,
        margin_strategy: MarginStrategy = "absolute",
        thresholds: Tensor | None = None,
        normalize: bool = True,
        negatives: Tensor | None = None,
    ) -> None:
        embeddings = {"queries": queries, "candidates": candidates, "negatives": negatives}
        # A process of a group may have no rows.
        check_embeddings(("negatives",), **{name: _with_a_row(x) for name, x in embeddings.items()})

        check_number("margin", margin)
        check_option("margin_strategy", margin_strategy, MARGIN_STRATEGIES)
        check_flag("normalize", normalize)

        if thresholds is not None:
            _check_thresholds(thresholds, queries)
            if margin != 0:
                raise ValueError(f"margin: want 0 where thresholds are given, got {margin}")
            if margin_strategy != "absolute":
                raise ValueError(
                    f"margin_strategy: want it where no thresholds are given, got {margin_strategy!r}"
                )

        self.queries, self.candidates = queries.detach(), candidates.detach()
        self.negatives = None if negatives is None else negatives.detach()
        self.margin, self.margin_strategy, self.normalize = float(margin), margin_strategy, normalize
        self.thresholds = None if thresholds is None else thresholds.detach()

    def check(self, name: str, cells: Cells) -> None:
        rows = {"queries": cells.N, "candidates": cells.M, "negatives": cells.K}
        for of, wanted in rows.items():
            x = getattr(self, of)
            if (x is None) != (wanted is None):
                has, lacks = ("the loss", "the guide") if x is None else ("the guide", "the loss")
                raise ValueError(
                    f"{name}: want {of} of loss and guide or of none, {has} has them and {lacks} has not"
                )
            if x is not None and len(x) != wanted:
                raise ValueError(f"{name}: want a guide of each of the {wanted} {of}, got {len(x)}")
        if not cells.of_group:
            self.check_pairs(cells.N, cells.M)
        if self.queries.device != cells.device:
            raise ValueError(f"{name}: want a guide on {cells.device} as queries, got {self.queries.device}")

    def check_pairs(self, N: int, M: int) -> None:
        """Raises ValueError where not each of N queries has a positive among M candidates."""
        if self.thresholds is None and M < N:
            raise ValueError(
                "exclude: want a guide with thresholds where there are fewer candidates than queries, "
                f"got M={M}, N={N}"
            )

    def alike(self) -> Hashable:
        options = self.margin, self.margin_strategy, self.normalize, self.thresholds is not None
        return (self.name(), self.candidates.shape[1], str(self.candidates.dtype), *options)

    @property
    def is_of_negatives(self) -> bool:
        return True  # of those that the loss has

    def against(self, candidates: Tensor, negatives: Tensor | None, thresholds: Tensor) -> Guide:
        """The same queries with other candidates and negatives, and thresholds that are known."""
        return Guide(
            self.queries, candidates, thresholds=thresholds, normalize=self.normalize, negatives=negatives
        )

    def turned(self) -> Guide:
        if self.thresholds is not None or self.negatives is not None:
            return super().turned()
        return Guide(
            self.candidates,
            self.queries,
            margin=self.margin,
            margin_strategy=self.margin_strategy,
            normalize=self.normalize,
        )

    def row_thresholds(self, positives: Tensor | None = None) -> Tensor:
        """The threshold of each query, (N,) float32.

        They are those that were given, or come from `positives`, (N, E) the guide's embeddings of the
        queries' positives; by default these are the first candidates. ValueError where these are fewer than
        the queries.
        """
        if self.thresholds is not None:
            return self.thresholds.float().contiguous()

        if positives is None:
            self.check_pairs(len(self.queries), len(self.candidates))
            positives = self.candidates

        return pair_thresholds(
            self.queries,
            positives,
            margin=self.margin,
            strategy=self.margin_strategy,
            normalize=self.normalize,
        )


def pair_thresholds(
    queries: Tensor, positives: Tensor, *, margin: float, strategy: str, normalize: bool = True
) -> Tensor:
    """The score of each query with its positive less the margin, (N,) float32; rows beyond are not read."""
    blocks = zip(queries.split(PAIR_ROWS), positives[: len(queries)].split(PAIR_ROWS), strict=True)
    scores = torch.cat([_pair_scores(q, p, normalize) for q, p in blocks])
    return scores - (margin if strategy == "absolute" else scores.abs() * margin)


def _pair_scores(queries: Tensor, positives: Tensor, normalize: bool) -> Tensor:
    """The scores of queries and their positives, (n,) float32, summed as `scorable` says."""
    dtype = accumulation_dtype(queries.device)
    queries, positives = queries.to(dtype), positives.to(dtype)
    scores = (queries * positives).sum(1)
    if normalize:
        for x in (queries, positives):
            scores /= torch.linalg.vector_norm(x, dim=1).clamp(min=LEAST_NORM)
    return scores.float()


def scorable(x: Tensor, normalize: bool) -> Tensor:
    """A guide's embeddings as their inner products are taken: in float64, and for cosines at norm 1.

    On a device that has no float64 they are float32.

    Sums in float64 differ by their order in digits that are rounded away. The score of a copy of the positive
    is then the positive's own, whoever has added it up.
    """
    x = x.to(accumulation_dtype(x.device))
    return F.normalize(x, dim=1) if normalize else x


def factors_and_norms(x: Tensor, normalize: bool) -> tuple[Tensor, Tensor]:
    """What products with rows (n, E) are multiplied by for scores, and the rows' norms, (n,) float64."""
    norms = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
    return 1 / norms.clamp(min=LEAST_NORM) if normalize else torch.ones_like(norms), norms


def _with_a_row(x: Tensor | None) -> Tensor | None:
    empty = isinstance(x, Tensor) and x.dim() == 2 and not len(x)
    return x.new_empty(1, x.shape[1]) if x is not None and empty else x


def _check_thresholds(thresholds: Tensor, queries: Tensor) -> None:
    check_tensor("thresholds", thresholds)
    if thresholds.dtype not in FLOATING:
        raise TypeError(f"thresholds: want a floating-point dtype, got {thresholds.dtype}")
    if tuple(thresholds.shape) != (len(queries),):
        raise ValueError(f"thresholds: want shape ({len(queries)},), got {tuple(thresholds.shape)}")
    if thresholds.device != queries.device:
        raise ValueError(f"thresholds: want device {queries.device} as queries, got {thresholds.device}")
