"""The arguments of the general losses that no other loss has, and what has to fit together of them."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from fastqt.arguments import Argument, Known, exclusions_of, is_given
from fastqt.checks import FLOATING, check_bias, check_tensor
from fastqt.distributed.group import GroupLike, is_ring
from fastqt.exclusions import Above, ExcludeLike, Exclusions, Guide, Margin, Mask, OfIds, Padding
from fastqt.negatives import Mixed
from fastqt.options import DiagonalMode, Similarity
from fastqt.targets import Targets, TargetsLike, given_or_window
from fastqt.torch_modes import is_traced


def _as_they_are(name: str, value: Any, known: Known) -> Any:
    return value  # `fit_targets` checks targets together with the options of the default window.


def _check_bias(name: str, bias: Any, known: Known) -> Any:
    if known.device is not None:
        check_bias(bias, known.sizes["candidates"], known.device, known.dtype)
    return bias


def _check_scores(name: str, scores: Any, known: Known) -> Any:
    check_tensor(name, scores)
    shape, n = tuple(scores.shape), known.sizes["rows"]
    if len(shape) not in (1, 2) or shape[0] != n or 0 in shape[1:]:
        raise ValueError(f"{name}: want shape ({n},) or ({n}, K), K >= 1, got {shape}")
    if scores.dtype not in FLOATING:
        raise TypeError(f"{name}: want a floating-point dtype of 16 to 64 bits, got {scores.dtype}")
    if scores.device != known.device:
        raise ValueError(f"{name}: want device {known.device} as queries, got {scores.device}")
    return scores


def _matrices(name: str, value: Any) -> dict[str, Tensor]:
    """Row negatives as embeddings, which mixtures of candidates are not yet."""
    return {} if isinstance(value, Mixed) else {name: value}


def _kind(targets: Any) -> Any:
    return targets.kind()


def _is_per_candidate(bias: Any) -> bool:
    return isinstance(bias, Tensor) and bias.dim() == 1


GivenTargets = Annotated[TargetsLike | None, Argument(_as_they_are, _kind, of_each_call=True)]
Bias = Annotated[
    float | Tensor, Argument(_check_bias, _is_per_candidate, is_leaf=True, is_local=True, of_each_call=True)
]
RowNegatives = Annotated[Tensor | Mixed | None, Argument(rows="rows", matrices=_matrices)]
# A margin is above the similarity of a target, of which a loss without targets has none.
ExcludeUntargeted = Annotated[ExcludeLike | None, exclusions_of(Above, OfIds, Guide, Padding, Mask)]
RowScores = Annotated[Tensor | None, Argument(_check_scores, is_given, is_leaf=True, is_local=True)]


def fit_targets(
    targets: TargetsLike | None, context_size: int | None, document_ids: Tensor | None, known: Known
) -> dict[str, Targets]:
    """The targets that a user has given or the default window, checked as far as a rank can do that alone."""
    return _fitting(given_or_window(targets, context_size, document_ids), known)


def fit_targets_of_cells(
    targets: TargetsLike | None, context_size: int | None, document_ids: Tensor | None, known: Known
) -> dict[str, Targets]:
    """The same, where the weights of a window are 1 each."""
    return _fitting(given_or_window(targets, context_size, document_ids, normalize=False), known)


def _fitting(targets: Targets, known: Known) -> dict[str, Targets]:
    if known.of_group:
        targets.check_queries(known.sizes["rows"])
    return {"targets": targets}


def fit_similarity(
    similarity: Similarity,
    diagonal: DiagonalMode,
    negatives: Tensor | None,
    row_negatives: Tensor | Mixed | None,
    exclude: Exclusions | None,
) -> None:
    """Raises ValueError for what distances cannot have."""
    if similarity == "dot":
        return
    if diagonal == "zero":
        raise ValueError(
            "diagonal: want 'keep' or 'exclude' with similarity='euclidean', whose scores are at most 0, "
            "got 'zero'"
        )
    if isinstance(row_negatives, Mixed):
        raise ValueError("row_negatives: want a tensor or None with similarity='euclidean', got Mixed")
    for x in () if exclude is None else exclude.filters:
        if isinstance(x, Margin | Above):
            raise ValueError(f"exclude: want no {type(x).__name__} with similarity='euclidean'")
        if negatives is not None and x.is_of_negatives:
            raise ValueError(
                f"exclude: want no {type(x).__name__} of negatives with similarity='euclidean'; "
                "join them to candidates"
            )


def fit_padding(exclude: Exclusions | None, row_negatives: Tensor | Mixed | None) -> None:
    """Raises ValueError unless what is called padding is of the row negatives."""
    padding = None if exclude is None else exclude.of(Padding)
    if padding is None:
        return
    if not isinstance(row_negatives, Tensor):
        came = "no row_negatives" if row_negatives is None else "Mixed"
        raise ValueError(f"exclude: want Padding with row_negatives that are a tensor, got {came}")
    K = row_negatives.shape[1] if row_negatives.dim() == 3 else 1
    if padding.is_padding.shape[1] != K:
        N = len(row_negatives)
        raise ValueError(
            f"exclude: want padding of shape ({N}, {K}) as row_negatives, "
            f"got {tuple(padding.is_padding.shape)}"
        )


def fit_exclusions(
    exclude: Exclusions | None,
    row_negatives: Tensor | Mixed | None,
    queries: Tensor,
    group: GroupLike | None,
) -> None:
    """Raises ValueError for padding of nothing, and where masks of some rows at a time cannot be made."""
    fit_padding(exclude, row_negatives)
    if exclude is None or not exclude.needs_masks:
        return
    if is_ring(group):
        raise ValueError(f"exchange: want 'auto' or 'gather' with exclude={exclude.names}, got 'ring'")
    if is_traced(queries) and not torch.compiler.is_compiling():
        raise ValueError(
            f"exclude: want plain tensors with {exclude.names}, and no tracer's, which have no operator"
        )
