"""The engines and their registry: which of them computes a problem, and why the others do not.

An engine is a module with `why_not(p, device, dtype)`, which says why it cannot compute a problem, or None,
`dtype_for(p, dtype)`, what inputs of a dtype are computed in, and `normalizes(p, dtype)`, whether
`Problem.normalize` may be set. Its entry here says which modules compute its problems; for a `Problem` that
is the engine itself. Such a module has

    gradients_in_forward(p) -> bool
    forward(p) -> Rows
    forward_with_gradients(p, row_weight, needs) -> (total, gradients)
    backward(p, saved, row_weights, needs) -> gradients

where total = row_weight * sum_i loss_i, and `backward` gives the gradients of sum_i row_weights_i loss_i
from what `forward` has saved. A loss that an engine has no computation for is composed of those that it has.

The module of a `ClipProblem` also has what processes need that share the scores (see `ClipComputation`):

    sums(p) -> ClipSums
    gradients_from(p, rows, columns, pairs, needs) -> Gradients

They take a problem that is one rectangle of the scores: one that has `pairs`. In the reference engine that
module has these two alone.

This registry alone maps names to engines. A loss asks it once a call.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast, overload

import torch
from torch import Tensor

from fastqt._version import __version__
from fastqt.devices import is_described
from fastqt.engines import (
    chunked,
    cpu,
    cpu_clip,
    cpu_prefixes,
    cpu_three_block,
    cuda,
    cuda_clip,
    ops,
    reference,
    reference_clip,
    report,
    triton,
)
from fastqt.engines.chunked import clip as chunked_clip
from fastqt.problem import (
    AnyProblem,
    ClipProblem,
    ClipSide,
    ClipSums,
    Gradients,
    Needs,
    Problem,
    Rows,
    ThreeBlockProblem,
)


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


class EngineModule(Computation, Protocol):
    """The module of an engine."""

    def why_not(self, p: AnyProblem | None, device: torch.device, dtype: torch.dtype) -> str | None: ...
    def dtype_for(self, p: AnyProblem, dtype: torch.dtype) -> torch.dtype: ...
    def normalizes(self, p: AnyProblem, dtype: torch.dtype) -> bool: ...


@dataclass(frozen=True)
class Engine:
    """An entry of the registry."""

    name: str  # what users call it
    module: EngineModule
    # Gives the module that computes a problem, or None if it has none for its kind.
    of_kind: Callable[[Any], Any]
    mixes: bool = False  # whether it makes `Mixed` row negatives itself; otherwise they are written before
    takes_prefixes: bool = False  # whether it computes a problem of prefixes
    takes_columns: bool = False  # whether it is a `ComputationOfColumns` of a `Problem`
    eager: bool = False  # whether its loss is plain PyTorch that autograd differentiates
    # The dtypes for which `choose` and `dtype_for` ask for no more of a problem than its class and the types,
    # shapes, dtypes and devices of its embeddings.
    by_kind: tuple[torch.dtype, ...] = ()
    # Multiplies its gradients on a GPU, if torch is not to do that.
    scales: Callable[[list[Tensor], Tensor, float], list[Tensor]] | None = None

    def why_not(self, p: AnyProblem, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it cannot compute a problem; None if it can."""
        if isinstance(p, Problem) and p.prefix_dims and not self.takes_prefixes:
            return "it does not know matryoshka"
        return self.module.why_not(p, device, dtype)

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

    def normalizes(self, p: AnyProblem, dtype: torch.dtype) -> bool:
        """Whether it takes embeddings as they are where their rows are to be normalised.

        Another engine is given normalised copies, and a problem whose `normalize` is False. `dtype` is that
        of the computation, which the problem's tensors may not have yet.
        """
        return self.module.normalizes(p, dtype)

    def dtype_for(self, p: AnyProblem, dtype: torch.dtype) -> torch.dtype:
        """The dtype that the engine is given a problem in, for inputs of `dtype`."""
        return self.module.dtype_for(p, dtype)

    def scale_gradients(self, gradients: list[Tensor], upstream: Tensor, multiplier: float) -> list[Tensor]:
        """Multiplies gradients that it has made on a GPU by upstream * multiplier, in place.

        Nothing waits for the value of `upstream`. Returned are the gradients that are left for torch.
        """
        return gradients if self.scales is None else self.scales(gradients, upstream, multiplier)


_CPU: dict[type[AnyProblem], Any] = {Problem: cpu, ClipProblem: cpu_clip, ThreeBlockProblem: cpu_three_block}
_CUDA: dict[type[AnyProblem], Any] = {Problem: cuda, ClipProblem: cuda_clip}
_TORCH: dict[type[AnyProblem], Any] = {Problem: chunked, ClipProblem: chunked_clip}


def _of_reference(p: AnyProblem) -> Any:
    """The module of rectangles of CLIP's scores. Nothing else has one: autograd differentiates losses."""
    return reference_clip if isinstance(p, ClipProblem) and p.pairs is not None else None


# In the order in which they are tried.
ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "cpu",
            cast(EngineModule, cpu),
            lambda p: cpu_prefixes if isinstance(p, Problem) and p.prefix_dims else _CPU[type(p)],
            takes_prefixes=True,
            takes_columns=True,
            by_kind=(torch.float32, torch.float64, torch.float16),
        ),
        Engine("cuda", cast(EngineModule, cuda), lambda p: _CUDA.get(type(p)), mixes=True),
        Engine(
            "triton",
            cast(EngineModule, triton),
            triton.of_kind,
            mixes=True,
            scales=triton.scaled,
        ),
        Engine(
            "torch",
            cast(EngineModule, chunked),
            lambda p: _TORCH.get(type(p)),
            takes_prefixes=True,
            takes_columns=True,
        ),
        Engine("reference", cast(EngineModule, reference), _of_reference, eager=True, takes_prefixes=True),
    )
}

ON_GPUS = ("cuda", "triton")


def requested(backend: str | None) -> str | None:
    """The engine that a user asks for by a loss's argument or by FASTQT_BACKEND, if any."""
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend: want a name or None, got {type(backend).__name__}")
    return backend or os.environ.get("FASTQT_BACKEND") or None


def choose(backend: str | None, p: AnyProblem, dtype: torch.dtype) -> Engine:
    """The engine for a problem: the one asked for, by argument or FASTQT_BACKEND, or the first that can.

    The problem's tensors may still have the dtype that the user gave; `dtype` is what a matrix product would
    take them in. ValueError says why the one that was asked for cannot compute the problem.
    """
    device = p.queries.device
    name = "triton" if is_described() else requested(backend)
    if name is None:
        for engine in ENGINES.values():
            if engine.why_not(p, device, dtype) is None and engine.computes(p):
                return engine
        return ENGINES["reference"]
    origin = "backend" if backend else "FASTQT_BACKEND"
    if name not in ENGINES:
        raise ValueError(
            f"{origin}: want one of {', '.join(ENGINES)}, got {name!r}; show_config() says which work here"
        )
    reason = ENGINES[name].why_not(p, device, dtype)
    if reason is not None:
        raise ValueError(
            f"{origin}: {name!r} is not available: {reason}; without one the best that works is taken"
        )
    return ENGINES[name]


def show_config() -> None:
    """Prints what fastqt computes with: versions, products, vector instructions, GPUs and code for them.

    For each backend it prints "usable" or the reason why not, and for each device of this machine which
    backend computes there, the first that can.

    Example:
        >>> import fastqt
        >>> fastqt.show_config()  # doctest: +ELLIPSIS
        fastqt   ...
        torch    ...
        backend  reference  usable
        device   cpu        computes with ...
    """
    found = report.gpus()
    rows = [
        ("fastqt", __version__),
        ("torch", report.versions()),
        ("python", f"{sys.version.split()[0]} on {platform.system()} {platform.machine()}"),
        ("threads", str(torch.get_num_threads())),
        ("products", report.products()),
        ("simd", report.simd()),
        ("cuda", report.cuda_code()),
        *(("gpu", gpu) for gpu in found or [f"none: {report.why_no_gpu()}"]),
    ]
    for name, text in rows:
        print(f"{name:<8} {text}")
    for name in ENGINES:
        print(f"backend  {name:<10} {_why_not_here(name, bool(found)) or 'usable'}")
    for device in report.devices():
        print(f"device   {device.type:<10} {_used_on(device)}")


def _used_on(device: torch.device) -> str:
    """What computes problems of float32 on a device, in words."""
    reasons = {name: engine.module.why_not(None, device, torch.float32) for name, engine in ENGINES.items()}
    usable = [name for name, reason in reasons.items() if reason is None]
    if usable[0] == "cuda":  # It takes small problems alone.
        return f"computes with cuda, and beyond small batches with {usable[1]}"
    if usable[0] != "torch":
        return f"computes with {usable[0]}"
    why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason is not None)
    return f"computes with torch, in torch's own operations ({why})"


def _why_not_here(name: str, has_gpu: bool) -> str | None:
    """Why an engine cannot be used on this machine, or None."""
    on_gpu = name in ON_GPUS and has_gpu
    reason = ENGINES[name].module.why_not(None, torch.device("cuda" if on_gpu else "cpu"), torch.float32)
    if reason is None or has_gpu or name not in ON_GPUS:
        return reason
    if name == "cuda" and ops.cuda_error is not None:
        return ops.cuda_error
    instead = "; TRITON_INTERPRET=1 runs it slowly on a CPU" if name == "triton" else ""
    return f"it needs a GPU, and {report.why_no_gpu()}{instead}"
