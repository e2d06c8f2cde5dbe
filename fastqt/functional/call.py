"""The call of a general loss as one record, which each lowering turns into another one.

A lowering gives a record, and what its loss still lacks: a `Completion`, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

from torch import Tensor

from fastqt.exclusions import Above, Exclusions, Guide, Margin, Mask, OfIds, Padding, Same, groups_of
from fastqt.matryoshka import Matryoshka
from fastqt.negatives import Mixed
from fastqt.options import Backend, DiagonalMode, Memory, Similarity, TargetReduction
from fastqt.problem import Inputs
from fastqt.targets import NoTargets, Targets, given_or_window

# Makes of the lowered call's loss that of the call; on a rank of a group, of the sum of its rows.
Completion: TypeAlias = "Callable[[Tensor], Tensor]"

FUNCTIONS = {
    "softmax": "fastqt.contrastive_loss",
    "sigmoid": "fastqt.sigmoid_loss",
    "log_sum_exp": "fastqt.log_sum_exp",
}


@dataclass  # Not frozen: making a frozen instance takes three times as long.
class Call:
    """What a user has asked for; each field as of the argument of `fastqt.contrastive_loss`.

    Attributes:
        link: as of `Problem`.
        targets: of this rank's queries; over the candidates of the whole batch once the ranks have
            agreed.
        mask, guide, margin, ids, thresholds, is_padding: what `exclude` has; thresholds are also what a
            margin is lowered to.
        spares_row_negatives: whether thresholds say nothing of these.
    """

    link: str
    targets: Targets
    queries: Tensor
    candidates: Tensor
    diagonal: DiagonalMode = "keep"
    scale: float | Tensor = 1.0
    bias: float | Tensor = 0.0
    normalize: bool = False
    negatives: Tensor | None = None
    row_negatives: Tensor | Mixed | None = None
    row_scores: Tensor | None = None
    memory: Memory = "fast"
    backend: Backend | None = None
    reduction: TargetReduction = "none"
    matryoshka: Matryoshka | None = None
    similarity: Similarity = "dot"
    mask: Tensor | None = None
    guide: Guide | None = None
    margin: Margin | None = None
    ids: tuple[OfIds, ...] = ()
    thresholds: Tensor | None = None
    spares_row_negatives: bool = False
    is_padding: Tensor | None = None

    @property
    def function(self) -> str:
        """The public function, which errors name."""
        return FUNCTIONS[self.link]

    @property
    def given_row_negatives(self) -> Tensor | None:
        """The row negatives, unless they are mixed from the candidates."""
        rows = self.row_negatives
        return None if rows is None or isinstance(rows, Mixed) else rows

    @property
    def is_filtered(self) -> bool:
        """Whether what leaves is found some rows at a time, because no engine knows it."""
        return self.guide is not None or (len(self.ids) > 0 and self.groups is None)

    @property
    def groups(self) -> Same | None:
        """The ids that engines compare themselves, if there are no others."""
        return groups_of(self.ids)

    def prefix(self, dim: int) -> Call:
        """The call of the first `dim` columns of all embeddings."""
        rows = self.row_negatives
        return replace(
            self,
            queries=self.queries[:, :dim],
            candidates=self.candidates[:, :dim],
            negatives=None if self.negatives is None else self.negatives[:, :dim],
            row_negatives=rows[..., :dim] if isinstance(rows, Tensor) else rows,
            matryoshka=None,
        )

    def with_columns(self, change: Callable[[Tensor], Tensor], of_ids: Callable[[OfIds], OfIds]) -> Call:
        """The call with another bias and other ids for each candidate."""
        changed = replace(self, ids=tuple(map(of_ids, self.ids)))
        if isinstance(self.bias, Tensor) and self.bias.dim():
            changed.bias = change(self.bias)
        return changed


# Gradients flow to these.
LEAVES = Inputs._fields
# What every general loss is given under the names that it has here: the fields from `queries` to `backend`.
_OF_ALL = tuple(field.name for field in fields(Call))[2:13]
# Each sentence's neighbours, where a loss is given no targets.
_DEFAULT_TARGETS = {
    "softmax": given_or_window(None, None, None),
    "sigmoid": given_or_window(None, None, None, normalize=False),
    "log_sum_exp": NoTargets(),
}


def call_of(link: str, values: Mapping[str, Any]) -> Call:
    """The call of a general loss from its checked arguments."""
    targets: Targets | None = values.get("targets")
    if targets is None:
        targets = _DEFAULT_TARGETS[link]
    # torch.compile knows no itemgetter.
    call = Call(link, targets, *[values[name] for name in _OF_ALL])
    if link != "log_sum_exp":
        call.reduction, call.matryoshka = values["reduction"], values["matryoshka"]
    if link != "sigmoid":
        call.similarity = values["similarity"]

    exclusions: Exclusions | None = values["exclude"]
    if exclusions is not None:
        device = call.queries.device
        mask, call.guide = exclusions.of(Mask), exclusions.of(Guide)
        call.margin, above = exclusions.of(Margin), exclusions.of(Above)
        padding = exclusions.of(Padding)
        call.is_padding = None if padding is None else padding.is_padding
        call.mask = None if mask is None else mask.cells
        call.thresholds = None if above is None else above.thresholds
        of_similarity = (x for x in (call.margin, above) if x is not None)
        call.spares_row_negatives = any(x.spare_own_negatives for x in of_similarity)
        call.ids = exclusions.ids(device)
    return call
