"""The arguments of a general loss as one record, which each lowering turns into another one.

A lowering gives a record, and what its loss still lacks: a `Completion`, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TypeAlias

from torch import Tensor

from fastqt.checks import (
    FLOATING,
    check_bias,
    check_embeddings,
    check_flag,
    check_mask,
    check_option,
    check_scale,
    check_tensor,
)
from fastqt.distributed.group import Group
from fastqt.distributed.local import local_rows, with_a_row
from fastqt.guide import Guide, check_margin_of_false_negatives
from fastqt.ids import as_groups
from fastqt.matryoshka import Matryoshka, MatryoshkaLike, prefixes_of
from fastqt.negatives import Mixed
from fastqt.options import Backend, DiagonalMode, MarginStrategy, Memory, Similarity, TargetReduction
from fastqt.problem import DIAGONALS, REDUCTIONS, SIMILARITIES, TARGET_REDUCTIONS, Inputs, check_memory
from fastqt.targets import Targets
from fastqt.torch_modes import is_traced

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
    """

    link: str
    queries: Tensor
    candidates: Tensor
    targets: Targets
    diagonal: DiagonalMode
    scale: float | Tensor
    bias: float | Tensor
    normalize: bool
    reduction: TargetReduction
    memory: Memory
    backend: Backend | None
    negatives: Tensor | None = None
    row_negatives: Tensor | Mixed | None = None
    row_scores: Tensor | None = None
    query_groups: Tensor | None = None
    candidate_groups: Tensor | None = None
    mask: Tensor | None = None
    guide: Guide | None = None
    similarity: Similarity = "dot"
    matryoshka: MatryoshkaLike | None = None
    false_negative_margin: float | None = None
    false_negative_margin_strategy: MarginStrategy = "absolute"
    thresholds: Tensor | None = None  # of `log_sum_exp`, or what a margin is lowered to

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
    def prefixes(self) -> Matryoshka | None:
        """The prefixes of a checked call, if its loss is a sum over some."""
        return prefixes_of(self.matryoshka)

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

    def sizes(self) -> dict[str, int]:
        """The number of rows of each of the embeddings that may have others than this one."""
        # `len` of a tensor takes several times as long.
        sizes = {"queries": self.queries.shape[0], "candidates": self.candidates.shape[0]}
        if self.negatives is not None:
            sizes["negatives"] = self.negatives.shape[0]
        return sizes

    def local(self, ranks: Group) -> Call:
        """The same with this rank's rows of tensors that are DTensors."""
        call = replace(self)
        for name in WITH_ROWS:
            x = getattr(call, name)
            if isinstance(x, Tensor):
                setattr(call, name, local_rows(ranks, name, x))
        return call


# The rest follows from the fields, so that a new one is in no list to forget it in: gradients flow to
# `LEAVES`, those `WITH_ROWS` are no numbers, and `MAY_LACK` are the tensors that may be None.
LEAVES = Inputs._fields
_TYPES = {field.name: str(field.type) for field in fields(Call)}
WITH_ROWS = tuple(name for name in LEAVES if "float" not in _TYPES[name])
MAY_LACK = tuple(name for name, type_ in _TYPES.items() if "Tensor" in type_ and "None" in type_)


def checked(call: Call, ranks: Group | None, *, fits: bool = False) -> Call:
    """The call with this process's rows, and its groups as int64.

    It raises for what is wrong by itself, before the ranks agree.

    Args:
        call: of one process, or of a rank.
        ranks: None for one process.
        fits: whether the embeddings are known to fit each other.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.
    """
    if ranks is not None:
        call = call.local(ranks)
    queries, candidates = call.queries, call.candidates
    if not fits:
        check_embeddings(
            ("negatives", "row_negatives"),
            queries=with_a_row(ranks, queries),
            candidates=with_a_row(ranks, candidates),
            negatives=with_a_row(ranks, call.negatives),
            row_negatives=with_a_row(ranks, call.given_row_negatives),
        )

    n, m, device = queries.shape[0], candidates.shape[0], queries.device
    check_option("diagonal", call.diagonal, DIAGONALS)
    check_option("reduction", call.reduction, TARGET_REDUCTIONS if call.link == "softmax" else REDUCTIONS)
    check_memory(call.memory)
    check_flag("normalize", call.normalize)
    check_scale(call.scale, queries.dtype)
    margin = call.false_negative_margin
    check_margin_of_false_negatives(margin, call.false_negative_margin_strategy, queries.dtype)
    if not (type(call.bias) is float and call.bias == 0):
        check_bias(call.bias, m, device, queries.dtype)

    if call.mask is not None:
        check_mask(call.mask, n, m if ranks is None else None, device)
    if call.similarity != "dot":
        _check_similarity(call)
    if margin is not None or call.thresholds is not None:
        _check_thresholds(call)
    if call.row_scores is not None:
        _check_row_scores(call)
    if call.guide is not None:
        _check_guide(call, ranks)
    if call.matryoshka is not None:
        prefixes_of(call.matryoshka, queries.shape[1])

    if call.query_groups is None and call.candidate_groups is None:
        return call
    query_groups, candidate_groups = as_groups(call.query_groups, call.candidate_groups, n, m, device)
    return replace(call, query_groups=query_groups, candidate_groups=candidate_groups)


def _check_similarity(call: Call) -> None:
    check_option("similarity", call.similarity, SIMILARITIES)
    if call.diagonal == "zero":
        raise ValueError(
            "diagonal: want 'keep' or 'exclude' with similarity='euclidean', whose scores are at most 0, "
            "got 'zero'"
        )
    if call.guide is not None and call.negatives is not None:
        raise ValueError(
            "guide: want None with negatives and similarity='euclidean'; join them to candidates"
        )
    if isinstance(call.row_negatives, Mixed):
        raise ValueError("row_negatives: want a tensor or None with similarity='euclidean', got Mixed")


def _check_thresholds(call: Call) -> None:
    name = "thresholds" if call.false_negative_margin is None else "false_negative_margin"
    if call.similarity != "dot":
        raise ValueError(f"{name}: want None with similarity={call.similarity!r}")
    if call.false_negative_margin is not None:
        return
    thresholds, n, device = call.thresholds, call.queries.shape[0], call.queries.device
    check_tensor(name, thresholds)
    assert thresholds is not None
    if thresholds.dtype not in FLOATING:
        raise TypeError(f"{name}: want a floating-point dtype of 16 to 64 bits, got {thresholds.dtype}")
    if tuple(thresholds.shape) != (n,):
        raise ValueError(f"{name}: want shape ({n},), got {tuple(thresholds.shape)}")
    if thresholds.device != device:
        raise ValueError(f"{name}: want device {device} as queries, got {thresholds.device}")


def _check_row_scores(call: Call) -> None:
    row_scores, n, device = call.row_scores, len(call.queries), call.queries.device
    check_tensor("row_scores", row_scores)
    assert isinstance(row_scores, Tensor)
    shape = tuple(row_scores.shape)
    if len(shape) not in (1, 2) or shape[0] != n or 0 in shape[1:]:
        raise ValueError(f"row_scores: want shape ({n},) or ({n}, K), K >= 1, got {shape}")
    if row_scores.dtype not in FLOATING:
        raise TypeError(f"row_scores: want a floating-point dtype of 16 to 64 bits, got {row_scores.dtype}")
    if row_scores.device != device:
        raise ValueError(f"row_scores: want device {device} as queries, got {row_scores.device}")


def _check_guide(call: Call, ranks: Group | None) -> None:
    guide, queries = call.guide, call.queries
    if not isinstance(guide, Guide):
        raise TypeError(f"guide: want a fastqt.Guide, got {type(guide).__name__}")
    if ranks is not None and ranks.exchange == "ring":
        raise ValueError("exchange: want 'auto' or 'gather' with a guide, got 'ring'")
    if is_traced(queries):
        raise ValueError("guide: want plain tensors with it, and no tracer's, which have no operator for it")
    negatives = None if call.negatives is None else len(call.negatives)
    guide.check(len(queries), len(call.candidates), negatives, queries.device)
