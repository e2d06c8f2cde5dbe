"""NT-Xent and SupCon for `pytorch-metric-learning`, from labels or from a miner's pairs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from pytorch_metric_learning import distances, losses, reducers, regularizers
from torch import Tensor

from fastqt.checks import INTEGERS, check_flag, check_number, check_option, shown
from fastqt.engines import ENGINES
from fastqt.exclusions import Same
from fastqt.functional import log_sum_exp
from fastqt.integrations.metric_learning.listed import (
    distinct,
    logsumexp_by_row,
    ntxent_of_pairs,
    scores_of_pairs,
    supcon_of_pairs,
)
from fastqt.losses.common import row_numbers
from fastqt.losses.labelled import Labelled, Scoring, labelled_loss, positives_of
from fastqt.losses.positives import Positives
from fastqt.options import Backend, Memory
from fastqt.problem import check_memory, loss_dtype, unit_rows


class OwnColumns(NamedTuple):
    """In place of a list of pairs: all candidates of the row's label but the one that is the row itself."""

    columns: Tensor | None  # (N,) int64 index of that one, or None if the rows are not among the candidates


# What the library's options have to be.
KINDS: dict[str, type] = {
    "distance": distances.BaseDistance,
    "reducer": reducers.BaseReducer,
    "embedding_regularizer": regularizers.BaseRegularizer,
}


class Given(NamedTuple):
    """What a call is given."""

    embeddings: Tensor  # (N, D)
    labels: Tensor | None  # (N,)
    ref_emb: Tensor  # (M, D)
    ref_labels: Tensor | None  # (M,)


def why_not(distance: Any) -> str | None:
    """Why the losses cannot be computed from this distance without a matrix; None if they can."""
    name, kind = type(distance).__name__, type(distance)
    if kind in (distances.CosineSimilarity, distances.DotProductSimilarity):
        power = 1
    elif kind is distances.LpDistance:
        if distance.p != 2 or distance.power != 2 or not distance.normalize_embeddings:
            return (
                "distance: want LpDistance(p=2, power=2) with normalize_embeddings=True, whose squares are "
                f"inner products, got p={distance.p}, power={distance.power}, "
                f"normalize_embeddings={distance.normalize_embeddings}"
            )
        return None
    else:
        return f"distance: want CosineSimilarity, DotProductSimilarity or LpDistance, got {name}"
    if distance.power != power:
        return f"distance: want {name}(power=1), an inner product, got power={distance.power}"
    if distance.normalize_embeddings and distance.p != 2:
        return f"distance: want {name}(p=2), which scales rows to norm 1, got p={distance.p}"
    return None


class _FromLabels(losses.BaseMetricLossFunction):
    """What the two losses share, with the arguments of `NTXentLoss`; the first of their bases."""

    link: str
    distance: Any
    reducer: Any
    temperature: float

    def __init__(
        self,
        temperature: float,
        *,
        memory: Memory = "fast",
        backend: Backend | None = None,
        fallback: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(temperature, Tensor):
            check_number("temperature", temperature)
        if temperature <= 0:
            raise ValueError(f"temperature: want a positive number, got {shown(temperature)}")
        for name, kind in KINDS.items():
            option = options.get(name)
            if option is not None and not isinstance(option, kind):
                raise TypeError(f"{name}: want a {kind.__name__} or None, got {shown(option)}")
        super().__init__(temperature=temperature, **options)
        check_memory(memory)
        check_flag("fallback", fallback)
        if backend is not None:
            check_option("backend", backend, tuple(ENGINES))
        self.memory, self.backend = memory, backend
        self.reason = why_not(self.distance)
        if self.reason is not None and not fallback:
            raise ValueError(f"{self.reason}; fallback=True takes the library's own loss, with its matrix")

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> dict[str, dict[str, Any]]:
        """The dictionary that reducers take."""
        if self.reason is not None:
            computed: dict[str, dict[str, Any]] = super().compute_loss(
                embeddings, labels, indices_tuple, ref_emb, ref_labels
            )
            return computed

        if labels is None and indices_tuple is None:
            raise ValueError("labels: want them or an indices_tuple, got neither")
        self._record_norms(embeddings, ref_emb)

        arguments = Given(embeddings, labels, ref_emb, ref_labels)
        if indices_tuple is None or isinstance(indices_tuple, OwnColumns):
            computed_losses = self._of_labels(arguments, indices_tuple)
        else:
            computed_losses = self._of_lists(arguments, indices_tuple)

        if computed_losses is None:
            nothing: dict[str, dict[str, Any]] = self.zero_losses()
            return nothing

        losses_of, indices, reduction_type = computed_losses
        of_all = {
            "losses": losses_of.to(embeddings.dtype),
            "indices": indices,
            "reduction_type": reduction_type,
        }
        return {"loss": of_all}

    def _of_labels(self, arguments: Given, own_columns: OwnColumns | None) -> tuple[Tensor, Any, str] | None:
        """Losses, their indices, and what a reducer calls them; None where there are no pairs."""
        x = _labelled(arguments, own_columns)
        if not len(x.embeddings) or not len(x.candidates):
            return None
        positives = positives_of(x, self.memory)
        of_own_label = positives.pairs + (0 if x.own is None else int((x.own >= 0).sum()))
        if _too_few(positives.pairs, len(x.embeddings) * len(x.candidates) - of_own_label):
            return None
        return self._of_positives(x, positives)

    def _of_positives(self, x: Labelled, positives: Positives) -> tuple[Tensor, Any, str]:
        raise NotImplementedError

    def _of_lists(self, arguments: Given, indices_tuple: Any) -> tuple[Tensor, Any, str] | None:
        """The same from lists of pairs or triplets."""
        a1, p, *others = indices_tuple  # negative pairs or, of triplets, the negatives of the same anchors
        a2, n = others if len(others) == 2 else (a1, *others)
        if not len(a1) or not len(a2) or _too_few(len(a1), len(a2)):
            return None
        queries, candidates = self._rows(arguments.embeddings), self._rows(arguments.ref_emb)

        def score(rows: Tensor, columns: Tensor) -> Tensor:
            return self._scale() * scores_of_pairs(queries, candidates, rows, columns)

        return self._of_pairs(score, (a1, p), (a2, n), len(queries), len(candidates))

    def _of_pairs(
        self, score: Any, positive: tuple[Tensor, Tensor], negative: tuple[Tensor, Tensor], N: int, M: int
    ) -> tuple[Tensor, Any, str]:
        raise NotImplementedError

    def _scale(self) -> float:
        """What inner products are multiplied by: of unit rows, a squared distance is 2 less two of them."""
        return (2 if isinstance(self.distance, distances.LpDistance) else 1) / self.temperature

    def _options(self) -> dict[str, Any]:
        return {
            "scale": self._scale(),
            "normalize": self.distance.normalize_embeddings,
            "memory": self.memory,
            "backend": self.backend,
        }

    def _rows(self, x: Tensor) -> Tensor:
        """Rows as they are multiplied, in float32 or float64."""
        return (unit_rows(x) if self.distance.normalize_embeddings else x).to(loss_dtype(x))

    def _record_norms(self, embeddings: Tensor, ref_emb: Tensor) -> None:
        """Checks and records what the distance does of its inputs."""
        self.distance.reset_stats()
        self.distance.check_shapes(embeddings, ref_emb)
        if self.distance.collect_stats:
            units = [self.distance.maybe_normalize(x) for x in (embeddings, ref_emb)]
            self.distance.set_default_stats(embeddings, ref_emb, *units)

    def _reducer_of_loss(self) -> Any:
        """The reducer that the loss itself is given to: with a regularizer there are several."""
        if isinstance(self.reducer, reducers.MultipleReducers):
            held = self.reducer.reducers
            if "loss" in held:
                return held["loss"]
            return self.reducer.default_reducer
        return self.reducer


class NTXentLoss(_FromLabels, losses.NTXentLoss):
    """`pytorch_metric_learning.losses.NTXentLoss` without a matrix of scores.

    From labels it is `fastqt.ntxent_loss`. With the reducers MeanReducer (the default) and SumReducer no list
    of pairs is made; the others are given the loss of each pair, and therefore their list. A miner's pairs or
    triplets are scored one by one.

    Args:
        temperature: by which scores are divided.
        memory, backend: as of `fastqt.contrastive_loss`.
        fallback: with a distance that is no inner product, compute the loss as the library does, with its
            matrix; otherwise such a distance is refused.
        **options: distance, reducer, embedding_regularizer and embedding_reg_weight, as of the library's.

    Raises:
        ValueError: a distance that is no inner product, or an option that is none.
        TypeError: as the library's class, or an option of another type.

    Example:
        >>> import torch
        >>> from fastqt.integrations.metric_learning import NTXentLoss
        >>> embeddings, labels = torch.randn(8, 16), torch.arange(8) % 4
        >>> NTXentLoss(temperature=0.1)(embeddings, labels).shape
        torch.Size([])
    """

    link = "ntxent"

    def __init__(self, temperature: float = 0.07, **options: Any) -> None:
        super().__init__(temperature, **options)

    def _of_positives(self, x: Labelled, positives: Positives) -> tuple[Tensor, Any, str]:
        reducer = self._reducer_of_loss()
        if type(reducer) in (reducers.MeanReducer, reducers.SumReducer) and not reducer.collect_stats:
            total = labelled_loss(self.link, x, positives, "sum", Scoring(**self._options()))
            mean = type(reducer) is reducers.MeanReducer
            return total / positives.pairs if mean else total, None, "already_reduced"
        others = log_sum_exp(
            x.embeddings,
            x.candidates,
            exclude=Same(x.labels, x.candidate_labels),
            **self._options(),
        )
        rows, columns = (index.to(others.device) for index in positives.listed())
        products = scores_of_pairs(self._rows(x.embeddings), self._rows(x.candidates), rows, columns)
        return ntxent_of_pairs(self._scale() * products, rows, others), (rows, columns), "pos_pair"

    def _of_pairs(
        self, score: Any, positive: tuple[Tensor, Tensor], negative: tuple[Tensor, Tensor], N: int, M: int
    ) -> tuple[Tensor, Any, str]:
        # A negative that is listed twice counts twice, as it does there.
        others = logsumexp_by_row(score(*negative), negative[0], N)
        return ntxent_of_pairs(score(*positive), positive[0], others), positive, "pos_pair"


class SupConLoss(_FromLabels, losses.SupConLoss):
    """`pytorch_metric_learning.losses.SupConLoss` without a matrix of scores.

    From labels it is `fastqt.supcon_loss`; a miner's pairs or triplets are scored one by one. As there, the
    default reducer is AvgNonZeroReducer.

    Args:
        temperature: by which scores are divided.
        memory, backend, fallback, **options: as of `NTXentLoss`.

    Raises:
        ValueError, TypeError: as of `NTXentLoss`.

    Example:
        >>> import torch
        >>> from fastqt.integrations.metric_learning import SupConLoss
        >>> embeddings, labels = torch.randn(8, 16), torch.arange(8) % 4
        >>> SupConLoss(temperature=0.1)(embeddings, labels).shape
        torch.Size([])
    """

    link = "supcon"

    def __init__(self, temperature: float = 0.1, **options: Any) -> None:
        super().__init__(temperature, **options)

    def _of_positives(self, x: Labelled, positives: Positives) -> tuple[Tensor, Any, str]:
        rows = labelled_loss(self.link, x, positives, "none", Scoring(**self._options()))
        return rows, row_numbers(len(rows), rows.device), "element"

    def _of_pairs(
        self, score: Any, positive: tuple[Tensor, Tensor], negative: tuple[Tensor, Tensor], N: int, M: int
    ) -> tuple[Tensor, Any, str]:
        positive, negative = distinct(*positive, M), distinct(*negative, M)
        # As the library from 2.9 on.
        both = torch.isin(positive[0] * M + positive[1], negative[0] * M + negative[1])
        assert not both.any(), "Each pair should be either be positive or negative"
        others = logsumexp_by_row(score(*negative), negative[0], N)
        rows = supcon_of_pairs(score(*positive), positive[0], others)
        return rows, row_numbers(N, rows.device), "element"


def _too_few(positive: int, negative: int) -> bool:
    """Whether the library counts these numbers of pairs as none."""
    return positive == 0 or negative == 0 or (positive <= 1 and negative <= 1)


def _labelled(arguments: Given, own_columns: OwnColumns | None) -> Labelled:
    """The rows and candidates of a call; their labels may be of any dtype."""
    labels, ref_labels = arguments.labels, arguments.ref_labels
    assert labels is not None
    if ref_labels is None:
        raise ValueError("ref_labels: want labels of ref_emb, or an indices_tuple, got None")
    if own_columns is not None:
        columns = own_columns.columns
    else:  # Without ref_emb, the library gives the labels themselves.
        columns = row_numbers(len(labels), labels.device) if ref_labels is labels else None
    if labels.dtype not in INTEGERS or ref_labels.dtype not in INTEGERS:
        ids = torch.cat([labels, ref_labels]).unique(return_inverse=True)[1]
        labels, ref_labels = ids[: len(labels)], ids[len(labels) :]
    if columns is not None:
        columns = columns.to(labels.device)
    return Labelled(arguments.embeddings, labels.long(), arguments.ref_emb, ref_labels.long(), columns)
