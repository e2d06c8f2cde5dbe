"""Whether an engine computes a loss and its gradients on a device: its errors, and how large they may be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fastqt.engines import ENGINES, ON_GPUS
from fastqt.machine.cases import Case, Inputs

EAGER_FACTOR = 1.5  # errors may be at most this multiple of those of eager PyTorch in the same dtype
# Sums of float32 in another order, as those of chunks and tiles, differ by a few units in the last place.
REORDERED_ROWS = 4 * torch.finfo(torch.float32).eps
# A single number may be right in eager PyTorch by chance, and is a sum over all cells.
REORDERED_NUMBER = 16 * torch.finfo(torch.float32).eps
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Reductions and memory modes. A sum takes its gradients in the forward pass, and rows in the backward pass.
WAYS = (("sum", "fast"), ("sum", "low"), ("none", "low"))

Status = Literal["right", "wrong", "refused", "not reached"]


@dataclass(frozen=True)
class Question:
    """What is to be found out: whether an engine computes a case in one dtype, memory mode and reduction."""

    device: torch.device
    engine: str
    case: Case
    dtype: torch.dtype
    memory: str
    reduction: str

    def stand_in(self) -> dict[str, Tensor]:
        """What answers it, of tensors of the host that stand for those of the device, by any engine."""
        options = {"memory": self.memory, "reduction": self.reduction}
        return results(lambda **x: self.case.loss(**x, **options), rounded(self.case.make(), self.dtype))

    def __str__(self) -> str:
        of_rows = ", rows" if self.reduction == "none" else ""
        return f"{self.case.name}, {name_of(self.dtype)}, memory={self.memory}{of_rows}"


@dataclass(frozen=True)
class Verdict:
    """The answer. Errors are relative, in the L2 norm, each with its bound."""

    question: Question
    status: Status
    errors: dict[str, tuple[float, float]]
    message: str = ""  # why it was refused, or the error that was raised

    @property
    def worst(self) -> tuple[str, float, float] | None:
        """The result whose error is the largest part of its bound, with both; None if there is none."""
        if not self.errors:
            return None
        name, (error, bound) = max(self.errors.items(), key=lambda item: _share(*item[1]))
        return name, error, bound


class Truths:
    """The results of cases by their formulas: exact ones in float64, and those of eager PyTorch.

    The last ones are kept, as several engines and memory modes are compared with them.
    """

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._bounds: dict[str, float] = {}
        self._exact: dict[str, Tensor] = {}
        self._inputs: Inputs = {}

    def of(self, q: Question) -> tuple[Inputs, dict[str, Tensor], dict[str, float]]:
        """The inputs on the device, the exact results on the CPU, and the bounds of their errors."""
        key = (q.device, q.case.name, q.case.N, q.dtype, q.reduction)
        if key == self._key:
            return self._inputs, self._exact, self._bounds

        of_dtype = rounded(q.case.make(), q.dtype)
        formula = q.case.formula
        exact = results(lambda **x: _reduced(formula(**x), q), {n: x.double() for n, x in of_dtype.items()})
        inputs = {name: x.to(q.device) for name, x in of_dtype.items()}
        eager = results(lambda **x: _reduced(formula(**x), q), inputs)

        bounds = {}
        for name, error in errors_of(eager, exact).items():
            bounds[name] = EAGER_FACTOR * error + floor(name, exact[name], q.dtype)
        self._key, self._bounds, self._exact, self._inputs = key, bounds, exact, inputs
        return inputs, exact, bounds


def rounded(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Inputs in a dtype, but for a scale that is learnt: whatever the embeddings are, it is float32."""
    return {name: x.to(dtype) if x.ndim else x for name, x in inputs.items()}


def floor(name: str, exact: Tensor, dtype: torch.dtype) -> float:
    """The relative error that is allowed where eager PyTorch has none.

    Losses, and gradients of numbers, are float32. A gradient of embeddings is rounded to their dtype, below
    whose smallest normal number it has fewer digits.
    """
    info = torch.finfo(dtype)
    if exact.ndim == 0:
        # Its terms are scores, each of which is rounded to the dtype.
        return REORDERED_NUMBER + (2 * info.eps if dtype is not torch.float32 else 0.0)
    if name == "loss":
        return REORDERED_ROWS + info.eps / 2

    subnormal = info.smallest_normal * info.eps / 2
    return REORDERED_ROWS + info.eps / 2 + subnormal * math.sqrt(exact.numel()) / float(exact.norm())


def answer(q: Question, truths: Truths) -> Verdict:
    """Computes a case with an engine, and compares it with the formula."""
    try:
        inputs, exact, bounds = truths.of(q)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        # As of a device that has no products of this dtype.
        return Verdict(q, "refused", {}, f"eager PyTorch does not compute it: {in_words(error)}")

    try:
        answers = results(
            lambda **x: q.case.loss(**x, memory=q.memory, reduction=q.reduction, backend=q.engine), inputs
        )
    except Exception as error:  # Triton and drivers of devices raise errors of their own kinds.
        if isinstance(error, ValueError) and str(error).startswith("backend:"):
            return Verdict(q, "refused", {}, in_words(error))
        return Verdict(q, "wrong", {}, f"it raised {in_words(error)}")

    errors = {name: (error, bounds[name]) for name, error in errors_of(answers, exact).items()}
    right = all(error <= bound for error, bound in errors.values())  # NaN is not
    return Verdict(q, "right" if right else "wrong", errors)


def questions(
    device: torch.device, engines: list[str], cases: tuple[Case, ...], dtypes: tuple[torch.dtype, ...]
) -> Iterator[Question]:
    """All that is asked of the engines of a device: the cases that tell most come first.

    A plain PyTorch engine is not asked about converged inputs, where the digits of plain PyTorch, which the
    bound is made of, are a matter of chance, and not about chunks, of which it has none.
    """
    for case in cases:
        asked = [name for name in engines if not (case.beyond_eager and ENGINES[name].eager)]
        for dtype in dtypes[:1] if case.in_float32_alone else dtypes:
            for (reduction, memory), engine in itertools.product(WAYS, asked):
                yield Question(device, engine, case, dtype, memory, reduction)


def usable_engines(device: torch.device) -> list[str]:
    """The engines of the registry that compute on a device, in the order in which a loss tries them.

    Triton's interpreter, by which TRITON_INTERPRET=1 lets a CPU run the kernels of GPUs, is left out: it is
    slow, and rounds in another way than any device.
    """
    usable = [name for name, engine in ENGINES.items() if engine.why_not(None, device, torch.float32) is None]
    return [name for name in usable if device.type != "cpu" or name not in ON_GPUS]


def results(loss: Callable[..., Tensor], inputs: Inputs) -> dict[str, Tensor]:
    """A loss, () or (N,), and the gradient of each input, as float64 on the CPU.

    The gradients are those of a sum of the rows' losses, in which not all count alike.
    """
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    value = loss(**leaves)
    upstream = torch.linspace(0.5, 1.5, len(value), device=value.device) if value.ndim else None
    weights = None if upstream is None else upstream.to(value.dtype)
    gradients = torch.autograd.grad(value, list(leaves.values()), weights)

    named = {"loss": value, **dict(zip(leaves, gradients, strict=True))}
    return {name: x.detach().cpu().double() for name, x in named.items()}


def errors_of(values: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Relative errors in the L2 norm."""
    return {name: float((values[name] - x).norm() / x.norm()) for name, x in exact.items()}


def _reduced(rows: Tensor, q: Question) -> Tensor:
    """What a formula's rows are reduced to, in float32 at least, as eager code in 16 bits had better do."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    return rows.to(wide) if q.reduction == "none" else rows.sum(dtype=wide)


def _share(error: float, bound: float) -> float:
    """What part of its bound an error is; NaN is the worst."""
    return math.inf if math.isnan(error) else error / bound


def in_words(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0][:300]}"


def name_of(dtype: torch.dtype) -> str:
    """A dtype as users write it."""
    return str(dtype).removeprefix("torch.")
