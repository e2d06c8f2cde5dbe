"""Random calls of the losses of recipes: regularisers, teachers, rankings, weights and margins of rows.

tests/losses/test_random_losses.py compares them with the formulas of every_loss.py in float64. Rows are of
any sizes and strides, and options of any values; learnt batches are tested for each loss by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import fastqt
from tests.shared import every_loss
from tests.shared.draws import Draws, Source
from tests.shared.every_loss import cosines, dcl, hcl, ranking, with_target
from tests.shared.tolerances import UNIT_ROUNDOFF

# On some CPUs the engine `cpu` multiplies bfloat16 in bfloat16; the losses of `OF_ALL` do not call it.
OF_ENGINES = (torch.float64, torch.float32, torch.float16)
OF_ALL = (*OF_ENGINES, torch.bfloat16)
MAGNITUDES = (1.0, 0.01, 30.0)
SCALES = (20.0, 3.0, 0.5)
Formula = Callable[..., Tensor]


@dataclass
class Call:
    """A call of a loss.

    Attributes:
        function: the public loss.
        inputs: its tensors; those with a gradient are leaves.
        options: its other arguments.
        formula: the loss of the same inputs in float64: rows, or their mean.
        rounds_rows: whether rows at norm 1 are rounded to the inputs' dtype, as eager PyTorch's are.
        makes: what is particular to the call.
    """

    function: Formula
    inputs: dict[str, Tensor]
    options: dict[str, Any]
    formula: Formula
    rounds_rows: bool = False
    makes: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Compares value and gradients within what rounding does.

        A score is the product of rows at norm 1, wrong by some D roundings, and its exponential by the scale
        times as much. Coefficients are at most about 1 for a row, by which the gradient of an embedding is at
        most the scale over its norm. Each result is rounded once more to its dtype.
        """
        leaves = [x for x in self.inputs.values() if x.requires_grad]
        loss = self.function(**self.inputs, **self.options)
        gradients = torch.autograd.grad(loss.sum(), leaves)
        exact = {
            name: x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
            for name, x in self.inputs.items()
        }
        wanted = self.formula(**exact)
        reduction = self.options.get("reduction", "mean")
        wanted = wanted.mean() if reduction == "mean" else wanted.sum() if reduction == "sum" else wanted
        of_formula = torch.autograd.grad(wanted.sum(), [x for x in exact.values() if x.requires_grad])

        computed = torch.promote_types(leaves[0].dtype, torch.float32)
        assert loss.dtype is computed
        scale = 1 + abs(float(self.inputs["scale"].detach() if "scale" in self.inputs else 1.0))
        embeddings = [x for x in leaves if x.dim() >= 2]
        of_a_score = 4 * UNIT_ROUNDOFF[computed] * (embeddings[0].shape[-1] + 16) * scale
        if embeddings[0].dim() == 3:  # the score of a text is the sum over its tokens
            of_a_score *= embeddings[0].shape[1]
        if self.rounds_rows:
            of_a_score += 3 * UNIT_ROUNDOFF[embeddings[0].dtype] * scale
        rows = len(embeddings[0])
        bound = of_a_score * (rows if reduction == "sum" else 1)
        bound = bound + 16 * UNIT_ROUNDOFF[computed] * wanted.abs()
        assert ((loss.double() - wanted).abs() <= bound).all(), (loss, wanted)
        for x, found, gradient in zip(leaves, gradients, of_formula, strict=True):
            assert (found.dtype, found.shape) == (x.dtype, x.shape)
            bound = of_a_score * (1 if reduction == "mean" else rows)
            if x.dim():
                bound = bound * scale / x.detach().double().norm(dim=-1, keepdim=True)
            else:  # the parts of a scale's gradient are added up in its dtype
                bound = bound + 8 * UNIT_ROUNDOFF[x.dtype] * rows
            bound = bound + 2 * UNIT_ROUNDOFF[x.dtype] * gradient.abs() + torch.finfo(x.dtype).tiny
            assert ((found.double() - gradient).abs() <= bound).all(), (found, gradient)


def random_call(source: Source) -> Call:
    maker = Maker(source)
    name = maker.choice(tuple(KINDS))
    call: Call = KINDS[name](maker)
    call.makes = [name, *maker.makes]
    return call


class Maker(Draws):
    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.N, self.D = source.integer(2, 12), source.integer(2, 12)
        self.rng = np.random.default_rng(source.integer(0, 65535))

    def rows(self, *dtypes: torch.dtype, N: int | None = None, D: int | None = None) -> Tensor:
        """Embeddings (N, D) of any strides, one column of which is never spread over all."""
        x = self.rng.normal(size=(N or self.N, D or self.D)) * self.choice(MAGNITUDES)
        laid_out = torch.from_numpy(x).to(self.choice(dtypes))
        match self.choice(("plain", "transposed", "spread", "one row expanded")):
            case "transposed":
                laid_out = laid_out.T.contiguous().T
            case "spread":
                laid_out = laid_out.repeat_interleave(3, 1)[:, ::3]
            case "one row expanded":
                self.noted("one row expanded")
                laid_out = laid_out[:1].expand(len(x), -1)
        return laid_out.detach().requires_grad_()

    def of_one_dtype(self, count: int, dtypes: Sequence[torch.dtype], **shape: int) -> list[Tensor]:
        dtype = self.choice(dtypes)
        self.noted(str(dtype).removeprefix("torch."))
        return [self.rows(dtype, **shape) for _ in range(count)]

    def scale(self, *scales: float) -> Tensor:
        return torch.tensor(self.choice(scales or SCALES), dtype=torch.float32).requires_grad_()

    def reduction(self) -> dict[str, Any]:
        return {"reduction": self.choice(("mean", "sum", "none"))}

    def engine(self) -> dict[str, Any]:
        """Options of losses that an engine computes."""
        chosen = {"memory": self.choice(("fast", "low")), "backend": self.choice(("cpu", "torch", None))}
        return {**self.reduction(), **chosen}


def ranked(function: Formula, maker: Maker) -> Call:
    """CoSENT and AnglE, with labels of which some are equal."""
    a, b = maker.of_one_dtype(2, OF_ALL)
    labels = torch.from_numpy(maker.rng.integers(0, 4, maker.N))
    labels = labels / 4 if maker.flag() else labels

    def formula(a: Tensor, b: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        if function is fastqt.cosent_loss:
            return ranking(scale * F.cosine_similarity(a, b), labels)
        # Of an odd number of columns the last one has no partner: it counts as a real part.
        padded = (F.pad(F.normalize(x, dim=1), (0, x.shape[1] % 2)) for x in (a, b))
        (p, q), (r, t) = (x.chunk(2, 1) for x in padded)
        return ranking(scale * (p * r + q * t + q * r - p * t).sum(1).abs(), labels)

    return Call(function, {"a": a, "b": b, "labels": labels, "scale": maker.scale()}, {}, formula)


def spread_out(maker: Maker) -> Call:
    (x,) = maker.of_one_dtype(1, OF_ALL)
    options = {
        "mean_weight": maker.choice((0.0, 1.0, 0.3)),
        "second_moment_weight": maker.choice((1.0, 2.0)),
        "hinge": maker.flag(),
    }

    return Call(fastqt.spread_out_loss, {"embeddings": x}, options, partial(every_loss.spread_out, **options))


def similarities_of_a_teacher(maker: Maker) -> Call:
    dtype = maker.choice(OF_ALL)
    maker.noted(str(dtype).removeprefix("torch."))
    inputs = {"embeddings": maker.rows(dtype)}
    width, of_teacher = maker.source.integer(1, 12), maker.choice(OF_ALL)
    inputs["teacher_embeddings"] = maker.rows(of_teacher, D=width).detach()
    if maker.flag():
        M = maker.source.integer(1, 12)
        maker.noted("candidates")
        inputs["candidates"] = maker.rows(dtype, N=M)
        inputs["teacher_candidates"] = maker.rows(of_teacher, N=M, D=width).detach()

    return Call(fastqt.similarity_distillation_loss, inputs, {}, every_loss.distilled)


def softmaxes_of_a_teacher(maker: Maker) -> Call:
    queries, candidates = maker.of_one_dtype(2, OF_ALL)
    width = maker.source.integer(1, 12)
    teacher = [maker.rows(queries.dtype, D=width).detach() for _ in range(2)]
    inputs = {"queries": queries, "candidates": candidates}
    inputs |= {"teacher_queries": teacher[0], "teacher_candidates": teacher[1], "scale": maker.scale()}
    teacher_scale, crossed = maker.choice(SCALES), maker.flag()
    options = {**maker.reduction(), "teacher_scale": teacher_scale, "cross_entropy": crossed}

    def formula(
        queries: Tensor,
        candidates: Tensor,
        teacher_queries: Tensor,
        teacher_candidates: Tensor,
        scale: Tensor,
    ) -> Tensor:
        log_P = (scale * cosines(queries, candidates)).log_softmax(1)
        log_T = (teacher_scale * cosines(teacher_queries, teacher_candidates)).log_softmax(1)
        return (log_T.exp() * ((0 if crossed else log_T) - log_P)).sum(1)

    return Call(fastqt.distillation_loss, inputs, options, formula)


def scores_of_a_teacher(function: Formula, maker: Maker) -> Call:
    """Of each row's own candidates, some of which are not there; the first one is."""
    K = maker.source.integer(2, 9)
    (scores,) = maker.of_one_dtype(1, OF_ALL, D=K)
    teacher = maker.rows(maker.choice(OF_ALL), D=K).detach()
    there = torch.from_numpy(maker.rng.random((maker.N, K)) < maker.choice((0.3, 0.8, 1.0)))
    there[:, 0] = True
    inputs = {"scores": scores, "teacher_scores": teacher, "mask": there, "scale": maker.scale()}
    options = maker.reduction()
    if function is fastqt.margin_mse_loss:
        return Call(function, inputs, options, every_loss.margin_mse)
    options |= {"teacher_scale": maker.choice(SCALES), "cross_entropy": maker.flag()}

    def formula(scores: Tensor, teacher_scores: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
        scaled = scale * scores, options["teacher_scale"] * teacher_scores
        log_P, log_T = (x.masked_fill(~mask, -1e30).log_softmax(1).masked_fill(~mask, 0) for x in scaled)
        return (mask * log_T.exp() * ((0 if options["cross_entropy"] else log_T) - log_P)).sum(1)

    return Call(function, inputs, options, formula)


def decoupled(maker: Maker) -> Call:
    z1, z2 = maker.of_one_dtype(2, OF_ENGINES)
    inputs = {"z1": z1, "z2": z2, "scale": maker.scale()}
    return Call(fastqt.dcl_loss, inputs, maker.engine(), dcl, rounds_rows=True)


def hard(maker: Maker) -> Call:
    z1, z2 = maker.of_one_dtype(2, OF_ENGINES)
    shape = {"beta": maker.choice((0.0, 0.5, 2.0)), "tau_plus": maker.choice((0.0, 0.02, 0.1))}
    inputs = {"z1": z1, "z2": z2, "scale": maker.scale(0.5, 2.0, 6.0)}
    return Call(fastqt.hcl_loss, inputs, {**maker.engine(), **shape}, partial(hcl, **shape), rounds_rows=True)


def classes_with_a_margin(function: Formula, maker: Maker) -> Call:
    dtype, V = maker.choice(OF_ENGINES), maker.source.integer(1, 14)
    maker.noted(str(dtype).removeprefix("torch."))
    inputs = {"embeddings": maker.rows(dtype), "weight": maker.rows(dtype, N=V)}
    inputs |= {"labels": torch.from_numpy(maker.rng.integers(0, V, maker.N)), "scale": maker.scale()}
    margin = maker.choice((0.0, 0.2, 0.5))

    def formula(embeddings: Tensor, weight: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        def turned(cosine: Tensor) -> Tensor:
            angle = cosine.clamp(-1 + 1e-15, 1 - 1e-15).acos()
            beyond = cosine - margin * np.sin(margin)
            return torch.where(angle < np.pi - margin, (angle + margin).cos(), beyond)

        change = turned if function is fastqt.arcface_loss else lambda cosine: cosine - margin
        return with_target(embeddings, weight, labels, scale, change)

    return Call(function, inputs, {**maker.engine(), "margin": margin}, formula, rounds_rows=True)


def maxsim_of_tokens(maker: Maker) -> Call:
    """Tokens of queries and of at least as many documents, some of them padding."""
    dtype = maker.choice(OF_ENGINES[:2])
    maker.noted(str(dtype).removeprefix("torch."))
    M, Tq, Td = (maker.source.integer(first, first + 3) for first in (maker.N, 1, 1))

    def tokens(texts: int, count: int) -> Tensor:
        x = maker.rng.normal(size=(texts, count, maker.D)) * maker.choice(MAGNITUDES)
        return torch.from_numpy(x).to(dtype).requires_grad_()

    def is_token(texts: int, count: int) -> Tensor:
        return torch.from_numpy(maker.rng.random((texts, count)) < 0.7)

    inputs = {"queries": tokens(maker.N, Tq), "documents": tokens(M, Td), "scale": maker.scale()}
    inputs |= {"query_mask": is_token(maker.N, Tq), "document_mask": is_token(M, Td)}
    inputs["document_mask"][: maker.N, 0] = True  # those of queries need a token

    def formula(
        queries: Tensor, documents: Tensor, scale: Tensor, query_mask: Tensor, document_mask: Tensor
    ) -> Tensor:
        a, b = (F.normalize(x, dim=-1) for x in (queries, documents))
        cells = torch.einsum("ntd,mud->nmtu", a, b).masked_fill(~document_mask[None, :, None], -torch.inf)
        best = cells.amax(3).masked_fill(~query_mask[:, None], 0).sum(2)
        empty = ~document_mask.any(1)
        scores = (scale * best.masked_fill(empty, 0)).masked_fill(empty, -torch.inf)
        return F.cross_entropy(scores, torch.arange(len(a)), reduction="none")

    return Call(fastqt.maxsim_loss, inputs, maker.reduction(), formula)


KINDS: dict[str, Callable[[Maker], Call]] = {
    "cosent": partial(ranked, fastqt.cosent_loss),
    "angle": partial(ranked, fastqt.angle_loss),
    "spread out": spread_out,
    "similarity distillation": similarities_of_a_teacher,
    "distillation": softmaxes_of_a_teacher,
    "score distillation": partial(scores_of_a_teacher, fastqt.score_distillation_loss),
    "margin MSE": partial(scores_of_a_teacher, fastqt.margin_mse_loss),
    "dcl": decoupled,
    "hcl": hard,
    "cosface": partial(classes_with_a_margin, fastqt.cosface_loss),
    "arcface": partial(classes_with_a_margin, fastqt.arcface_loss),
    "maxsim": maxsim_of_tokens,
}
