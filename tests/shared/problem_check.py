"""Compares a random problem's loss and gradients with the oracle's, within bounds of what rounding does."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fastqt
from fastqt.devices import product_dtype
from fastqt.engines import cpu
from tests.shared import oracle
from tests.shared.problems import Problem
from tests.shared.tolerances import FLUSHED, THREE_ROUNDINGS, UNIT_ROUNDOFF

EMBEDDINGS = ("queries", "candidates", "negatives", "row_negatives")
TINIEST_NORM = 1e-12  # torch.nn.functional.normalize divides by no less


@np.errstate(all="ignore")  # embeddings may be infinite, bounds too, and numpy interprets kernels
def check(problem: Problem, backend: str | None = None) -> bool:
    """Whether there is a loss, which is then the oracle's.

    Args:
        problem: as drawn.
        backend: of the loss.

    Raises:
        AssertionError: a loss or a gradient that differs from the oracle's, a refusal that names another
            argument than it may or than the reference does, or a loss where there must be none.
    """
    arguments = {**problem.arguments, "backend": backend}
    arguments |= {name: arguments[name].detach().requires_grad_() for name in problem.needs}
    loss, refusal = outcome(problem, arguments)
    if loss is None:
        name = first_word(refusal)
        _, other = outcome(problem, {**arguments, "backend": "reference"})
        assert name in problem.refusals | ({"backend"} if backend else set()), refusal
        assert name in ("backend", first_word(other)), f"{refusal} but {other}"
        return False
    assert problem.targets is not None, "accepted"
    N = len(arguments["queries"])
    assert loss.dtype is torch.promote_types(arguments["queries"].dtype, torch.float32)
    assert loss.shape == ((N,) if arguments["reduction"] == "none" else ())
    gradients: tuple[Tensor, ...] = ()
    if problem.needs:
        given = [arguments[name] for name in problem.needs]
        gradients = torch.autograd.grad(loss, given, problem.upstream)
    _compare(problem, Prefixes(problem, backend), loss, gradients)
    return True


def _compare(problem: Problem, truth: Prefixes, loss: Tensor, gradients: tuple[Tensor, ...]) -> None:
    if not all(part.comparable for part in truth.parts):
        problem.makes.append("not compared: infinite, or near the largest number")
        return
    if max(part.score_error for part in truth.parts) > 0.01:
        problem.makes.append("compared within wide bounds: scores of few digits")
    wanted, bound = truth.loss()
    error = np.abs(loss.detach().double().numpy() - wanted)
    assert (error <= bound).all(), f"loss wrong by {error.max()}"
    for name, gradient in zip(problem.needs, gradients, strict=True):
        argument = problem.arguments[name]
        assert (gradient.dtype, gradient.shape) == (argument.dtype, argument.shape), name
        wanted, bound = truth.gradient(name)
        error = np.abs(gradient.double().numpy() - wanted)
        right = (error <= bound) | (np.abs(wanted) + bound > truth.parts[0].largest_gradient(name))
        assert right.all(), f"gradient of {name} wrong by {error.max()}"


def first_word(message: str) -> str:
    """What a refusal names: "size" of "size (context_size): want an integer"."""
    return re.split(r"\W", message, maxsplit=1)[0]


def outcome(problem: Problem, arguments: dict[str, Any]) -> tuple[Tensor | None, str]:
    loss = fastqt.sigmoid_loss if problem.link == "sigmoid" else fastqt.contrastive_loss
    cast = nullcontext() if problem.autocast is None else torch.autocast("cpu", problem.autocast)
    try:
        with cast:
            return loss(**arguments), ""
    except (ValueError, TypeError) as error:
        return None, str(error)


class Prefixes:
    """The truth of each prefix of the embeddings, or of the embeddings as they are, and their weighted sums.

    A sum's error is at most that of its terms, and a rounding for each of them.
    """

    def __init__(self, problem: Problem, backend: str | None) -> None:
        arguments = dict(problem.arguments)
        prefixes = arguments.pop("matryoshka", [None])
        dims = getattr(prefixes, "dims", prefixes)
        self.weights = [*getattr(prefixes, "weights", [1.0] * len(dims))]
        self.parts = [Truth(replace(problem, arguments=_narrowed(arguments, dim)), backend) for dim in dims]
        self.whole = problem.arguments

    def loss(self) -> tuple[np.ndarray, np.ndarray | float]:
        return self._sum([(part.loss(), part.bound_of_loss()) for part in self.parts], self.parts[0].computed)

    def gradient(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The gradient of an argument, and for each of its elements the largest error."""
        pairs = [part.gradient(name) for part in self.parts]
        if name in EMBEDDINGS:
            shape = self.whole[name].shape
            pairs = [(_padded(a, shape), _padded(np.broadcast_to(b, a.shape), shape)) for a, b in pairs]
        return self._sum(pairs, self.whole[name].dtype)

    def _sum(self, pairs: list[tuple[Any, Any]], dtype: torch.dtype) -> tuple[Any, Any]:
        if len(pairs) == 1 and self.weights == [1.0]:
            return pairs[0]
        rounding = len(pairs) * UNIT_ROUNDOFF[dtype]
        wanted = sum(weight * value for weight, (value, _) in zip(self.weights, pairs, strict=True))
        bound = sum(
            max(weight, 1.0) * error + rounding * weight * np.abs(value)
            for weight, (value, error) in zip(self.weights, pairs, strict=True)
        )
        return wanted, bound


def _narrowed(arguments: dict[str, Any], dim: int | None) -> dict[str, Any]:
    rows = {name: arguments[name] for name in EMBEDDINGS if isinstance(arguments.get(name), Tensor)}
    return {**arguments, **{name: x[..., :dim] for name, x in rows.items()}}


def _padded(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, shape[-1] - x.shape[-1])])


class Truth:
    """The oracle's loss and gradients, and how far rounding can bring a result from them.

    Let u be the unit roundoff of the dtype of the computation.

    - A score is a sum of D products, scaled, with a bias. Its error is at most (D + 4) u times the largest
      score that is possible, which is |scale| max_ij sum_d |f_id g_jd| + |bias|. Embeddings that are scaled
      to norm 1 bring (D + 8) u each, and mixed negatives what is lost where the two parts cancel each other.
    - A probability is wrong by the factor exp of twice that at most: the logsumexp has the same error.
    - An element of a gradient is a sum of at most n terms, each a coefficient times an embedding's element.
      The sum adds a relative error of n u. It is relative to the absolute values of the terms, which the
      oracle sums up as well: where terms cancel each other, their errors remain.
    - Where a CPU computes in bfloat16, scores and coefficients are rounded to it, and products of these.
    - What else is rounded once (the exponential, the coefficient, its product with the scale) adds 8 u.

    Attributes:
        comparable: whether the inputs are finite, and the scores far from the largest number of the dtype.
    """

    def __init__(self, problem: Problem, backend: str | None) -> None:
        arguments = self.arguments = problem.arguments
        self.problem = problem
        self.targets, self.link, self.backend = problem.targets, problem.link, backend
        self.upstream = problem.upstream.double().numpy()
        self.dtype = arguments["queries"].dtype
        self.read_as = self.dtype if problem.autocast in (None, torch.float64) else problem.autocast
        if self.dtype is torch.float64:
            self.read_as = torch.float64
        self.computed = torch.promote_types(self.dtype, torch.float32)
        # On a CPU bfloat16 problems may have scores, dS and products of it in bfloat16.
        self.rounds = (
            self.read_as is torch.bfloat16 and backend in (None, "cpu") and cpu.has_bfloat16_products()
        )
        self.rounding = UNIT_ROUNDOFF[torch.bfloat16] if self.rounds else 0.0
        # The engine of torch operations multiplies in 16 bits where torch adds such products up in float32.
        self.rounds_operands = (
            backend == "torch"
            and self.read_as in (torch.float16, torch.bfloat16)
            and product_dtype(torch.device("cpu"), self.read_as) is self.read_as
        )
        self.unit = UNIT_ROUNDOFF[self.computed]
        self.scale = float(arguments.get("scale", 1.0))
        self.bias = self._bias()
        self.given = {
            name: arguments[name].to(self.read_as).double().numpy()
            for name in EMBEDDINGS
            if isinstance(arguments.get(name), Tensor)
        }
        self.normalize = arguments.get("normalize", False)
        self.norms = {name: _norms(x) if self.normalize else None for name, x in self.given.items()}
        self.scored = {
            name: x / self.norms[name][..., None] if self.normalize else x for name, x in self.given.items()
        }
        self.similarity = arguments.get("similarity", "dot")
        self.row_scores = None
        if "row_scores" in arguments:
            self.row_scores = arguments["row_scores"].double().numpy()
        # Whether embeddings are read by the engine and outside of it, so that autograd adds up two gradients.
        several = "several row negatives" in problem.makes
        self.in_parts = several or self.similarity == "euclidean" or self.row_scores is not None
        self.score_error = self.product_error = 0.0
        self.mixed_error, self.mixes_cancel = np.zeros(self.given["queries"].shape), False
        if isinstance(arguments.get("row_negatives"), fastqt.Mixed):
            self._mix(arguments["row_negatives"])
        self._measure()
        if self.comparable:
            N = len(self.targets)
            mean = arguments["reduction"] == "mean"
            self.row_weights = np.broadcast_to(self.upstream / (N if mean else 1), (N,))
            self.result = self._computed()

    def _bias(self) -> np.ndarray | float:
        bias = self.arguments.get("bias", 0.0)
        if not isinstance(bias, Tensor):
            return bias
        return bias.double().numpy()

    def _mix(self, mixed: fastqt.Mixed) -> None:
        candidates, N = self.scored["candidates"], len(self.given["queries"])
        partners = np.arange(1, N + 1) % N if mixed.partners is None else mixed.partners.numpy()
        own, other = mixed.mix * candidates[:N], (1 - mixed.mix) * candidates[partners]
        norms = _norms(own + other)[:, None]
        self.scored["row_negatives"] = (own + other) / norms
        parts = (np.abs(own) + np.abs(other)) / norms
        rounding = self.unit + (UNIT_ROUNDOFF[self.read_as] if self.backend or self.rounds else 0.0)
        self.mixed_error = (candidates.shape[1] + 8) * rounding * parts
        self.product_error = (self.mixed_error * np.abs(self.scored["queries"])).sum(1).max()
        self.score_error += abs(self.scale) * self.product_error
        # Where the two parts cancel each other, the direction of what is left is that of the rounding errors.
        self.mixes_cancel = parts.sum(1).max() > 1e4

    def _measure(self) -> None:
        size = {name: np.abs(x) for name, x in self.scored.items()}
        columns = [size[name] for name in ("candidates", "negatives") if name in size]
        pairs = [(size["queries"][:, None], x) for x in columns]
        private = 0
        if "row_negatives" in size:
            rows = size["row_negatives"].reshape(len(size["queries"]), -1, size["queries"].shape[1])
            pairs.append((size["queries"][:, None], rows))
            private += rows.shape[1]
        distances = self.similarity == "euclidean"  # of which each part can be twice as large
        products = [(np.square(a + b) if distances else a * b).sum(2) for a, b in pairs]
        self.largest_score = abs(self.scale) * max(x.max() for x in products) + np.abs(self.bias).max()
        if self.row_scores is not None:
            self.largest_score += np.abs(self.row_scores[np.isfinite(self.row_scores)]).max(initial=0)
            private += self.row_scores.size // len(self.row_scores)
        if distances:  # They are moved before they are rounded to what they are read in.
            self.score_error += 4 * UNIT_ROUNDOFF[self.read_as] * self.largest_score
        N, D = size["queries"].shape
        roundings = D + 4 + (2 * (D + 8) if self.normalize else 0)
        self.score_error += roundings * self.unit * self.largest_score
        self.score_error += self.rounding * self.largest_score
        if self.backend and self.normalize:
            self.score_error += 2 * UNIT_ROUNDOFF[self.dtype] * self.largest_score
        self.terms = N + sum(map(len, columns)) + private + 8
        self.cells = (  # how often a score or a logsumexp enters the loss of a row
            self.targets.sum(1).max() + (0 if self.link == "softmax" else sum(map(len, columns)) + private)
        )
        limit = torch.finfo(self.computed).max * 1e-6
        finite = all(np.isfinite(x).all() for x in self.scored.values())
        weight = max(1.0, self.targets.max()) * max(1.0, abs(self.scale))
        self.largest = largest = max(x.max() for x in size.values()) if finite else 0.0
        self.largest_product = max(x.max() for x in products)
        finite &= not self.mixes_cancel
        self.comparable = finite and self.largest_score * weight * max(1.0, largest) < limit
        if self.backend == "triton":
            # It computes scores twice, in different orders. Where these differ by so much that exp overflows,
            # its loss is inf. Such scores have no digit left after the point.
            self.comparable &= bool(self.score_error < 1)

    def _computed(self) -> oracle.Result:
        arguments, margin = self.arguments, self.problem.margin
        return oracle.contrastive(
            self.scored["queries"],
            self.scored["candidates"],
            self.targets,
            diagonal=arguments["diagonal"],
            scale=self.scale,
            negatives=self.scored.get("negatives"),
            row_negatives=self.scored.get("row_negatives"),
            row_scores=self.row_scores,
            similarity=self.similarity,
            row_weights=self.row_weights,
            bias=self.bias,
            link=self.link,
            mask=self.problem.excluded,
            negatives_mask=self.problem.excluded_negatives,
            margin=None if margin is None else margin.margin,
            margin_strategy="absolute" if margin is None else margin.strategy,
        )

    def loss(self) -> Any:
        rows = self.result.loss
        return {"mean": rows.mean(), "sum": rows.sum(), "none": rows}[self.arguments["reduction"]]

    def bound_of_loss(self) -> float:
        rows = len(self.targets) if self.arguments["reduction"] == "sum" else 1
        sums = self.terms * self.unit * (1 + 2 * self.largest_score)
        entropy = 8 * self.unit * np.abs(self.targets * np.log(np.maximum(self.targets, 1e-300))).sum(1).max()
        return rows * (max(self.cells, 1e-6) * (2 * self.score_error + sums) + entropy)

    def gradient(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The gradient of an argument, and for each of its elements the largest error."""
        wanted, size = np.asarray(getattr(self.result, name)), np.asarray(self.result.magnitudes[name])
        factor = np.expm1(min(700.0, 2 * self.score_error)) + self.terms * self.unit
        if self.backend == "triton":
            factor += THREE_ROUNDINGS[self.read_as]  # in which its products are taken, under autocast as well
        if self.rounds_operands:
            factor += 2 * UNIT_ROUNDOFF[self.read_as]  # of E, and of the queries times their rows' weights
        if self.in_parts:
            factor += 2 * (UNIT_ROUNDOFF[self.dtype] + UNIT_ROUNDOFF[self.read_as])  # of the two gradients
        factor += 4 * self.rounding  # of dS, of its products, and of a gradient before that of its norm
        flushed = (
            FLUSHED[self.computed] * max(1.0, abs(self.scale)) * max(1.0, self.largest, self.largest_product)
        )
        more = self._error_of_targets(name) if self.link == "sigmoid" else 0.0
        if name == "queries":
            more = more + abs(self.scale) * self._row_sums()[:, None] * self.mixed_error
        if name == "scale":
            more = more + self._row_sums().sum() * self.product_error
        if self.score_error > 0.5:  # a probability that should be 0 may then be 1
            size_of_term = {"scale": self.largest_product, "bias": 1.0, "row_scores": 1.0}.get(
                name, abs(self.scale) * self.largest
            )
            more = more + 2 * self._row_sums().sum() * size_of_term
        if name in ("scale", "bias"):
            shape = tuple(self.arguments[name].shape)
            wanted, size, more = (
                x if np.shape(x) in (shape, ()) else x.sum() for x in (wanted, size, np.asarray(more))
            )
            factor += self.targets.size * self.unit
            dtype = self.arguments[name].dtype
            flushed = max(flushed, FLUSHED[dtype])
            return wanted, factor * size + more + 2 * UNIT_ROUNDOFF[dtype] * np.abs(wanted) + flushed
        # The engine's gradients are those of copies at norm 1, in float16.
        in_copies = self.rounds_operands and self.read_as is torch.float16 and self.normalize
        too_large = (in_copies & (size > self.largest_gradient(name))).any(-1, keepdims=True)
        if in_copies:
            flushed = max(flushed, self.flushed_result())
        if self.normalize and name != "row_scores":
            wanted, size, more, flushed = self._through_norms(name, wanted, size, more, flushed)
            factor += (self.given[name].shape[1] + 8) * self.unit
        dtype = self.arguments[name].dtype
        flushed = flushed + FLUSHED[dtype]
        rounded = UNIT_ROUNDOFF[dtype] + UNIT_ROUNDOFF[self.read_as]  # or cut off, to the inputs' dtype
        bound = factor * size + more + 2 * rounded * np.abs(wanted) + flushed + self.flushed_result()
        # Parts that autograd adds up may exceed the dtype's largest number where their sum does not.
        too_large = too_large | (self.in_parts & (size > self.largest_gradient(name)))
        return wanted, np.where(too_large, np.inf, bound)

    def _row_sums(self) -> np.ndarray:
        """For each row the largest sum that its coefficients can have."""
        return np.abs(self.row_weights) * (self.targets.sum(1) + self.cells)

    def _error_of_targets(self, name: str) -> np.ndarray | float:
        """What rounded targets bring: a sigmoid's coefficient p - t has the error of t, also where p is t."""
        exact = (self.targets == 0) | (self.targets == 1) & ("smoothed" not in self.problem.makes)
        error = np.where(exact, 0.0, 4 * self.unit * self.targets) * np.abs(self.row_weights)[:, None]
        F, G = np.abs(self.scored["queries"]), np.abs(self.scored["candidates"])
        if name in ("queries", "candidates"):
            return abs(self.scale) * (error @ G if name == "queries" else error.T @ F)
        if name == "scale":
            return (error * (F @ G.T)).sum()
        return error.sum(0) if name == "bias" else 0.0

    def flushed_result(self) -> float:
        """What is lost below the smallest number of the dtypes that a gradient is rounded to.

        Gradients of a scalar loss are rounded before they are multiplied by the upstream gradient, those of a
        mean in float16 64 times as large.
        """
        lost = max(FLUSHED[self.dtype], FLUSHED[self.read_as])
        upstream = self.problem.upstream
        if upstream.dim():
            return lost
        in_float16_mean = self.dtype is torch.float16 and self.arguments["reduction"] == "mean"
        return lost * max(1.0, abs(upstream.item()) / (64 if in_float16_mean else 1))

    def largest_gradient(self, name: str) -> float:
        """The largest number that the gradient of an argument can hold on its way back."""
        dtypes = [self.arguments[name].dtype, self.read_as if name in EMBEDDINGS else self.computed]
        largest = min(torch.finfo(dtype).max for dtype in dtypes)
        in_float16_mean = self.read_as is torch.float16 and self.arguments["reduction"] == "mean"
        if self.rounds_operands and in_float16_mean:
            # They are kept 64 times as large until they are multiplied by the upstream gradient.
            return largest / 64 * min(1.0, abs(self.problem.upstream.item()))
        return largest

    def _through_norms(
        self, name: str, wanted: np.ndarray, size: np.ndarray, more: np.ndarray | float, flushed: float
    ) -> tuple[np.ndarray, ...]:
        """The gradient of embeddings from that of the same embeddings scaled to norm 1."""
        unit, norms = self.scored[name], self.norms[name][..., None]
        moves = norms > TINIEST_NORM
        along = (wanted * unit).sum(-1, keepdims=True) * unit * moves
        along_size = (size * np.abs(unit)).sum(-1, keepdims=True) * np.abs(unit)
        more_along = (more * np.abs(unit)).sum(-1, keepdims=True) * np.abs(unit)
        return (
            (wanted - along) / norms,
            (size + along_size) / norms,
            (more + more_along) / norms,
            flushed / norms,
        )


def _norms(x: np.ndarray) -> np.ndarray:
    return np.maximum(np.sqrt(np.square(x).sum(-1)), TINIEST_NORM)
