"""What an engine is: what it takes, and which modules compute its problems.

A module that computes a kind of problem has

    gradients_in_forward(p) -> bool
    forward(p) -> Rows
    forward_with_gradients(p, row_weight, needs) -> (total, gradients)
    backward(p, saved, row_weights, needs) -> gradients

where total = row_weight * sum_i loss_i, and `backward` gives the gradients of sum_i row_weights_i loss_i
from what `forward` has saved. It may have `forward_for_backward(p)` as well, which takes the place of
`forward` where a backward pass follows, and which may save more. A loss that an engine has no computation for
is composed of those that it has.

The module of a `ClipProblem` also has what processes need that share the scores (see `ClipComputation`):

    sums(p) -> ClipSums
    gradients_from(p, rows, columns, pairs, needs) -> Gradients

They take a problem that is one rectangle of the scores: one that has `pairs`. In the reference engine that
module has these two alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, overload

import torch
from torch import Tensor

from fastqt.engines.features import COLUMNS, LEAVING, MIXED, MULTIPLES, NEEDS
from fastqt.problem import AnyProblem, ClipProblem, ClipSide, ClipSums, Gradients, Needs, Rows


class Computation(Protocol):
    """A module that computes a kind of problem; `Any` stands for a problem, its needs and its gradients."""

    def gradients_in_forward(self, p: Any) -> bool: ...
    def forward(self, p: Any) -> Rows: ...
    def forward_with_gradients(self, p: Any, row_weight: float, needs: Any) -> tuple[Tensor, Any]: ...
    def backward(self, p: Any, saved: tuple[Tensor, ...], row_weights: Tensor, needs: Any) -> Any: ...


class ComputationOfColumns(Computation, Protocol):
    """A module that also computes problems of which several processes have the columns.

    `forward` finds the loss, the logsumexp and the mass of rows of these columns alone, which add up to those
    of whole rows. `backward_of_columns` is given the logsumexp and the mass of whole rows, in place of what
    was found of these columns, and so finds their part of the gradients.
    """

    def backward_of_columns(
        self, p: Any, logsumexp: Tensor, mass: Tensor, row_weights: Tensor, needs: Any
    ) -> Any: ...


class ClipComputation(Computation, Protocol):
    """A module that computes CLIP's loss, and what can be found of a rectangle of its scores by itself.

    `sums` finds the score of each pair, and the logsumexps of the other cells in each row and column, in
    2 N M D operations. Those of all rectangles add up to the softmaxes of the whole batch, from which
    `gradients_from` finds the gradients of queries, candidates and scale that are this rectangle's part, in
    6 N M D: dL/dS_ij is

        rows.weights_i exp(S_ij - rows.logsumexp_i) + columns.weights_j exp(S_ij - columns.logsumexp_j),

    and at pair i `pairs[i]`, (pairs,) float64, which the caller computes so that it keeps its digits once the
    pair is learnt. Neither forms a matrix (N, M), unless in the reference engine. N or M may be 0.
    """

    def sums(self, p: ClipProblem) -> ClipSums: ...
    def gradients_from(
        self, p: ClipProblem, rows: ClipSide, columns: ClipSide, pairs: Tensor, needs: Needs
    ) -> Gradients: ...


@dataclass(frozen=True)
class Engine:
    """An entry of the registry."""

    name: str  # what users call it
    takes: frozenset[str]  # features, by their names
    # The module that computes a problem of this kind, or None if it has none.
    of_kind: Callable[[Any], Any]
    # The dtype that it is given a problem in, for inputs of a dtype.
    dtype_for: Callable[[AnyProblem, torch.dtype], torch.dtype]
    # Whether it takes embeddings as they are where their rows are to be normalised. Another engine is given
    # normalised copies, and a problem whose `normalize` is False. The dtype is that of the computation, which
    # the problem's tensors may not have yet.
    normalizes: Callable[[AnyProblem, torch.dtype], bool]
    devices: tuple[str, ...] | None = None  # types of those that it computes on; None: all
    dtypes: tuple[torch.dtype, ...] | None = None  # of inputs; None: all
    # Why it cannot compute here, which depends on this machine, this build or a problem's sizes. Without a
    # problem the machine and the build alone are asked.
    why_not_here: Callable[[AnyProblem | None, torch.device, torch.dtype], str | None] | None = None
    eager: bool = False  # whether its loss is plain PyTorch that autograd differentiates
    # The dtypes for which `choose` and `dtype_for` ask for no more of a problem than its class and the types,
    # shapes, dtypes and devices of its embeddings.
    by_kind: tuple[torch.dtype, ...] = ()
    # Multiplies its gradients on a GPU, if torch is not to do that.
    scales: Callable[[list[Tensor], Tensor, float], list[Tensor]] | None = None
    # By the class of a problem: whether it needs a feature that is not taken, for each of these.
    _lacks: dict[type, list[Callable[[Any], object]]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lacks = {
            kind: [is_needed for feature, is_needed in needs.items() if feature not in self.takes]
            for kind, needs in NEEDS.items()
        }
        object.__setattr__(self, "_lacks", lacks)  # found once, as each call of a loss asks for an engine

    @property
    def mixes(self) -> bool:
        """Whether it makes `Mixed` row negatives itself; otherwise they are written before."""
        return MIXED in self.takes

    @property
    def takes_columns(self) -> bool:
        """Whether its computation of a `Problem` is a `ComputationOfColumns`."""
        return COLUMNS in self.takes

    @property
    def sums_multiples(self) -> bool:
        """Whether it finds the sums of several multiples of the scores of a `ClipProblem` at once."""
        return MULTIPLES in self.takes

    @property
    def masks_pairs(self) -> bool:
        """Whether it takes a `ClipProblem` with a mask."""
        return LEAVING in self.takes

    def why_not(self, p: AnyProblem | None, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it cannot compute a problem, or with None anything on this machine; None if it can."""
        if self.devices is not None and device.type not in self.devices:
            return f"the tensors are on {device}"
        if self.dtypes is not None and dtype not in self.dtypes:
            return f"it has no {str(dtype).removeprefix('torch.')}"
        for is_needed in self._lacks[type(p)]:
            if is_needed(p):
                return self._unknown(p)
        return None if self.why_not_here is None else self.why_not_here(p, device, dtype)

    def _unknown(self, p: AnyProblem | None) -> str:
        needs = [feature for feature, is_needed in NEEDS[type(p)].items() if is_needed(p)]
        return f"it does not know {', '.join(feature for feature in needs if feature not in self.takes)}"

    def computes(self, p: AnyProblem) -> bool:
        """Whether it has a computation of its own for a problem of this kind."""
        return self.of_kind(p) is not None

    @overload
    def computation(self, p: ClipProblem) -> ClipComputation: ...
    @overload
    def computation(self, p: Any) -> Computation: ...
    def computation(self, p: Any) -> Any:
        """What computes a problem of which `choose` has given this engine."""
        module = self.of_kind(p)
        assert module is not None, f"{self.name} has no computation for {type(p).__name__}"
        return module

    def scale_gradients(self, gradients: list[Tensor], upstream: Tensor, multiplier: float) -> list[Tensor]:
        """Multiplies gradients that it has made on a GPU by upstream * multiplier, in place.

        Nothing waits for the value of `upstream`. Returned are the gradients that are left for torch.
        """
        return gradients if self.scales is None else self.scales(gradients, upstream, multiplier)
