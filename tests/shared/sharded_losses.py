"""Losses of a batch that the ranks of a group hold, beside those of one process with the whole batch.

The functions here run on every rank (see ranks.py). Everything of the batch is drawn from one seed, so that
each rank makes all of it and takes its own part.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fastqt
from fastqt.distributed import Group, agreement
from tests.shared.filters import BY_NAME

WIDTH = 12
HOSTNAME = socket.gethostname
OF_IDS = {"query_ids": "queries", "candidate_ids": "candidates", "negative_ids": "negatives"}


@dataclass
class Case:
    """A loss of a batch.

    Attributes:
        loss: the name of a public function.
        counts: the number of queries of each rank.
        candidates: of each rank; by default as of queries.
        options: of the loss, those that all ranks give alike.
        given: the names of further arguments, which are drawn; see `Batch`.
        group: the options of the group.
        dtype: of embeddings, scale and bias.
        converged: whether each query is near its own candidate.
        cut: whether the one process cuts windows at the edges of shards.
        machines: how many machines the ranks are said to be on; 0: as it is.
        layout: of the ranks' embeddings and of the upstream gradients of their rows; see `laid_out`.
        seed: what is drawn from.
    """

    loss: str
    counts: tuple[int, ...] = ()
    candidates: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    given: tuple[str, ...] = ()
    group: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    converged: bool = False
    cut: bool = False
    machines: int = 0
    layout: str = "dense"
    seed: int = 0


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values in another layout; "one row" repeats the first row at a stride of 0."""
    if layout == "one row":
        return x[:1].expand_as(x)
    if layout == "transposed" and x.dim() > 1:
        return x.mT.contiguous().mT
    if layout == "strided":
        room = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)
        room[..., ::2] = x
        return room[..., ::2]
    if layout == "every third":
        room = x.new_full((3 * len(x), *x.shape[1:]), torch.nan)
        room[::3] = x
        return room[::3]
    return x


def part(x: Tensor, counts: Sequence[int], rank: int) -> Tensor:
    """A rank's rows."""
    first = sum(counts[:rank])
    return x[first : first + counts[rank]]


class Batch:
    """The tensors of a case, the whole and each rank's part of them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.candidate_counts = case.candidates or case.counts
        generator = torch.Generator().manual_seed(case.seed)
        N, M = sum(case.counts), sum(self.candidate_counts)
        draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
        # Of exp(score - logsumexp) float32 keeps as many digits less as the score has before its point.
        self.leaves = {"queries": draw(N, WIDTH) / 2, "candidates": draw(M, WIDTH)}
        if case.converged:
            rows = torch.arange(N) % M
            self.leaves["queries"] = 4 * (self.leaves["candidates"][rows] + 0.01 * draw(N, WIDTH))
        self.counts = {"queries": case.counts, "candidates": self.candidate_counts}
        self.fixed: dict[str, Any] = {}
        self.guide: dict[str, Tensor] = {}
        self.ids: list[tuple[type, dict[str, Tensor]]] = []  # of filters
        for name in case.given:
            self._add(name, draw, generator, N, M)
        self.leaves = {name: x.to(case.dtype) for name, x in self.leaves.items()}

    def _add(self, name: str, draw: Any, generator: torch.Generator, N: int, M: int) -> None:
        case = self.case
        integers = lambda high, *shape: torch.randint(high, shape, generator=generator)  # noqa: E731
        if name == "negatives":
            counts = tuple((rank * 3 + 2) % 5 for rank in range(len(case.counts)))
            if case.group.get("shards", "equal") == "equal":
                counts = (3,) * len(case.counts)
            elif case.group.get("exchange") == "ring":
                counts = tuple(k if m else 0 for k, m in zip(counts, self.candidate_counts, strict=True))
            self.leaves["negatives"], self.counts["negatives"] = draw(sum(counts), WIDTH), counts
        elif name in ("row_negatives", "z3", "hard"):
            self.leaves[name], self.counts[name] = draw(N, WIDTH), case.counts
        elif name == "curl_negatives":
            self.leaves["negatives"], self.counts["negatives"] = draw(N, WIDTH), case.counts
        elif name == "stacked_z3":
            self.leaves["z3"], self.counts["z3"] = draw(N, 2, WIDTH), case.counts
        elif name == "stacked":
            self.leaves["row_negatives"] = draw(N, 3, WIDTH)
            self.counts["row_negatives"] = case.counts
        elif name == "padding":
            self.fixed["padding"] = torch.arange(3) < integers(4, N, 1)
            self.counts["padding"] = case.counts
        elif name == "tau_plus":
            self.fixed[name] = torch.rand(N, generator=generator, dtype=torch.float64) / 50
            self.counts[name] = case.counts
        elif name in ("row_scores", "several_row_scores"):
            self.leaves["row_scores"] = draw(N) if name == "row_scores" else draw(N, 2)
            self.counts["row_scores"] = case.counts
        elif name in ("scale", "bias"):
            self.leaves[name] = torch.tensor(1.7 if name == "scale" else -0.8, dtype=torch.float64)
        elif name == "biases":
            self.leaves["bias"], self.counts["bias"] = draw(M), self.candidate_counts
        elif (kind := BY_NAME.get(name.partition("_")[0])) is not None:
            high = 2 if kind is fastqt.Within else 5
            ids = {"query_ids": integers(high, N)}
            if not name.endswith("pairs"):
                ids["candidate_ids"] = integers(high, M)
            if name.endswith("negatives"):
                ids["negative_ids"] = integers(high, len(self.leaves["negatives"]))
            self.ids.append((kind, ids))
        elif name == "mask":
            mask = torch.rand(N, M, generator=generator) < 0.2
            near = (torch.arange(N)[:, None] - torch.arange(M)).abs() <= 2
            self.fixed["mask"], self.counts["mask"] = mask & ~near, case.counts
        elif name == "document_ids":
            ids = torch.arange(N) // 4
            ids[-1] = N  # alone in its document
            self.fixed["document_ids"], self.counts["document_ids"] = ids, case.counts
        elif name == "classes":
            self.fixed["targets"] = integers(M, N).where(torch.arange(N) % 5 > 0, -100)
            self.counts["targets"] = case.counts
        elif name in ("dense", "sparse"):
            dense = torch.rand(N, M, generator=generator, dtype=torch.float64)
            dense = dense * (dense > 0.7) * (1 - torch.eye(N, M))
            self.fixed["targets"], self.counts["targets"] = dense.to(case.dtype), case.counts
        elif name == "guide":
            sizes = {"queries": N, "candidates": M}
            if "negatives" in self.leaves:
                sizes["negatives"] = len(self.leaves["negatives"])
            # In whole numbers, so that ties are frequent.
            self.guide = {key: integers(5, rows, 3).double() - 1.6 for key, rows in sizes.items()}
        elif name == "gist_guides":
            for key in ("guide_anchors", "guide_positives"):
                self.fixed[key], self.counts[key] = draw(N, 5).float(), case.counts
            self.leaves["negatives"] = draw(2 * N, WIDTH)
            self.fixed["guide_negatives"] = draw(2 * N, 5).float()
            counts = tuple(2 * n for n in case.counts)
            self.counts |= {"negatives": counts, "guide_negatives": counts}
        elif name == "labels":
            self.fixed["labels"], self.counts["labels"] = integers(M, N), case.counts
        elif name == "teacher":
            for side, rows in (("queries", N), ("candidates", M)):
                self.fixed[f"teacher_{side}"] = draw(rows, 5).to(case.dtype)
                self.counts[f"teacher_{side}"] = self.counts[side]
        elif name == "generator":
            pass  # made anew for each call
        elif name == "partners":
            self.fixed["partners"], self.counts["partners"] = integers(M, N), case.counts
        else:
            raise KeyError(name)

    def arguments(self, rank: int | None) -> tuple[list[Any], dict[str, Any], dict[str, Tensor]]:
        """Positional and keyword arguments of the loss, and its leaves: a rank's, or with None all."""
        own = lambda name, x: x if rank is None or not x.dim() else part(x, self.counts[name], rank)  # noqa: E731
        layout = "dense" if rank is None else self.case.layout
        leaves = {}
        for name, x in self.leaves.items():
            rows = laid_out(x, self.case.layout) if self.case.layout == "one row" and x.dim() > 1 else x
            rows = own(name, rows).clone()
            leaves[name] = (laid_out(rows, layout) if x.dim() > 1 else rows).detach().requires_grad_()
        options = dict(self.case.options)
        fixed = {name: own(name, x) for name, x in self.fixed.items()}
        if "generator" in self.case.given:
            options["generator"] = torch.Generator().manual_seed(self.case.seed)
        if "sparse" in self.case.given:
            fixed["targets"] = fixed["targets"].to_sparse_csr()
        if "mixed" in options:
            options["row_negatives"] = fastqt.Mixed(options.pop("mixed"), fixed.pop("partners", None))
        if "window" in options:
            ids = fixed.pop("document_ids", None)
            if self.case.cut and rank is None:
                ids = torch.repeat_interleave(torch.tensor(self.case.counts))
            options["targets"] = fastqt.Window(**options.pop("window"), document_ids=ids)
        if "smoothing" in options:
            options["targets"] = fastqt.smoothed(
                options.get("targets", fastqt.Window()), options.pop("smoothing")
            )
        exclude = [kind(**{name: own(OF_IDS[name], x) for name, x in ids.items()}) for kind, ids in self.ids]
        exclude += [fixed.pop("mask")] if "mask" in fixed else []
        exclude += [fastqt.Padding(fixed.pop("padding"))] if "padding" in fixed else []
        exclude += [options.pop("exclude")] if "exclude" in options else []
        if self.guide:
            rows = {name: own(name, x) for name, x in self.guide.items()}
            exclude.append(fastqt.Guide(**rows, **options.pop("guided")))
        options |= fixed | ({"exclude": exclude} if exclude else {})
        keywords = {name: x for name, x in leaves.items() if name not in ("queries", "candidates")}
        second = leaves["candidates"]
        if "hard" in keywords:  # multiple negatives ranking takes a sequence
            second = [second, keywords.pop("hard")]
        return [leaves["queries"], second], {**keywords, **options}, leaves


@dataclass
class Found:
    """What a rank found, and how far it is from one process with the whole batch."""

    value: Any
    errors: dict[str, float]  # of the value and of each leaf's gradient, relative to the greatest number


def compare(case: Case, process_group: dist.ProcessGroup | None = None) -> Found:
    """A rank's loss and gradients beside its part of those of one process."""
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    batch, loss = Batch(case), getattr(fastqt, case.loss)
    upstream = torch.linspace(0.5, 1.5, sum(case.counts), dtype=torch.float64)
    upstream = laid_out(upstream, case.layout) if case.layout == "one row" else upstream
    none = case.options.get("reduction") == "none" or case.loss == "log_sum_exp"

    (a, b), keywords, leaves = batch.arguments(None)
    whole = loss(a, b, **keywords)
    (whole @ upstream.to(whole.dtype) if none else whole).backward()

    group = Group(process_group, **case.group)
    machine = f"machine {rank * case.machines // size}"
    agreement.socket.gethostname = (lambda: machine) if case.machines else HOSTNAME
    (a, b), keywords, own = batch.arguments(rank)
    found = loss(a, b, **keywords, group=group)
    if none:
        found.backward(laid_out(part(upstream, case.counts, rank).to(found.dtype), case.layout))
    else:
        found.backward()
    wanted = part(whole, case.counts, rank) if none else whole
    errors = {"value": _relative(found.detach(), wanted.detach(), whole.detach())}
    factor = size if group.gradients == "average" else 1
    for name, leaf in own.items():
        expected = leaves[name].grad
        if leaf.dim():
            gradient, wanted = leaf.grad / factor, part(expected, batch.counts[name], rank)
        else:
            gradient = leaf.grad.clone()  # as the group's own reduction makes it
            dist.all_reduce(gradient, group=process_group)
            gradient, wanted = gradient / factor, expected
        errors[name] = _relative(gradient, wanted, expected)
    return Found(found.detach(), errors)


def compare_all(cases: list[Case]) -> list[Found]:
    return [compare(case) for case in cases]


def _relative(found: Tensor, wanted: Tensor, whole: Tensor) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    if not found.numel():
        return 0.0
    difference = (found.double() - wanted.double()).abs()
    difference = difference.where(found.isfinite() | wanted.isfinite(), 0)  # -inf where both have it
    finite = whole.double().where(whole.isfinite(), 0)
    # What is nearly 0 has been rounded beside numbers of about 1; a scalar is the sum of many of these.
    least = 1.0 if not whole.dim() else 1e-2
    return float(difference.max() / finite.abs().max().clamp(min=least))


def run(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
