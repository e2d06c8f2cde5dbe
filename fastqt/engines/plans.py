"""What is known of a call before its values are: that its embeddings fit each other, and what computes them.

That depends on types, shapes, dtypes, devices and what is asked for, which are those of the step before in
most steps of a training. It is therefore kept. No plan holds a tensor, and none answers for a value.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from fastqt.devices import is_described
from fastqt.engines import Engine, choose, requested
from fastqt.problem import AnyProblem
from fastqt.torch_modes import autocast_dtype, input_dtype, is_traced

MOST_KNOWN = 1024  # After so many plans all are forgotten: batches whose sizes vary would be kept for ever.


class Plan(NamedTuple):
    """How a call is computed."""

    engine: Engine  # what computes it
    dtype: torch.dtype  # what a matrix product would read the embeddings in
    computed: torch.dtype  # what the engine reads them in
    as_given: bool  # whether they are known to have that dtype


known: dict[Hashable, Plan] = {}


def kept(kind: Hashable | None) -> Plan | None:
    """The plan of a kind, if there is one."""
    # A graph of torch.compile, which has no kind, would be one for as many plans as there are at the moment.
    return None if kind is None else known.get(kind)


def kind_of(
    problem: type[AnyProblem], a: Tensor, b: Tensor, backend: str | None, shapes: Hashable | None = None
) -> Hashable | None:
    """What tells the plan of a call from others; None if none is kept, as for what is no plain tensor.

    Args:
        problem: its class.
        a, b: the embeddings, as they were given.
        backend: what the user asks for.
        shapes: what tells their types, shapes, dtypes, devices and layouts from others, if that is known.
    """
    if shapes is not None and a.is_cpu and not is_described():
        return problem, shapes, autocast_dtype(a), requested(backend)
    if is_traced(a, b) or not a.is_cpu or a.is_nested or b.is_nested or is_described():
        return None  # Only the CPU's engine has plans.
    return (
        problem,
        a.shape,
        a.dtype,
        a.device,
        a.layout,
        b.shape,
        b.dtype,
        b.device,
        b.layout,
        autocast_dtype(a),
        requested(backend),
    )


def plan(kind: Hashable | None, p: AnyProblem, backend: str | None) -> Plan:
    """The plan for a problem whose embeddings were found to fit; kept under its kind.

    The problem's tensors still have the dtype that the user gave. ValueError as of `choose`.
    """
    dtype = input_dtype(p.queries)
    engine = choose(backend, p, dtype)
    computed = engine.dtype_for(p, dtype)
    as_given = kind is not None and p.queries.dtype is p.candidates.dtype is dtype is computed
    found = Plan(engine, dtype, computed, as_given)
    if kind is not None and dtype in engine.by_kind:
        if len(known) >= MOST_KNOWN:
            known.clear()
        known[kind] = found
    return found
