"""Losses of a batch of which each rank has its own rows, or all of some, beside those of one process.

The functions here run on every rank (see ranks.py). All draw the batch from one seed and take their own rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import fastqt
from fastqt.distributed import Group
from fastqt.loss import DECLARED, Declaration
from fastqt.losses import binary_window, positives
from tests.shared.every_loss import EVERY_LOSS, Inputs


@dataclass
class Call:
    """A loss of the whole batch.

    Attributes:
        loss: a public function.
        tensors: its arguments, the first of which has the rows that losses are of.
        counts: how many rows of a tensor each rank has, in each of its blocks if it has several times as many
            rows; of a tensor that is not named all have the whole.
        constant: the tensors of floating point that no gradient flows to.
        options: the other arguments.
        lengths: of a tensor, how many columns of it each rank has.
        unnamed: tensors that only the one process is given.
    """

    loss: Callable[..., Tensor]
    tensors: Inputs
    counts: dict[str, Sequence[int]]
    constant: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, Sequence[int]] = field(default_factory=dict)
    unnamed: tuple[str, ...] = ()


def compare(call: Call, **options: Any) -> tuple[Tensor, dict[str, float]]:
    """The value, and how far it and this rank's gradients are from those of one process, relatively.

    Args:
        call: the loss.
        options: of the group.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = [*call.counts.values(), *call.lengths.values()]
    shards = "equal" if all(len(set(counts)) == 1 for counts in sizes) else "uneven"
    group = Group(shards=shards, **options)

    def part(name: str, x: Tensor) -> Tensor:
        counts, columns = list(call.counts.get(name, ())), call.lengths.get(name)
        own = torch.cat([block.split(counts)[rank] for block in x.split(sum(counts))]) if counts else x
        own = own if columns is None else own[:, : columns[rank]]
        return own - own[:1] if name == "offsets" else own  # which count from a rank's first token

    def computed(of_rank: bool) -> tuple[Tensor, dict[str, Tensor]]:
        given = {name: (part(name, x) if of_rank else x).clone() for name, x in call.tensors.items()}
        given = {name: x for name, x in given.items() if not of_rank or name not in call.unnamed}
        leaves = {
            name: x.requires_grad_()
            for name, x in given.items()
            if x.is_floating_point() and name not in call.constant
        }
        loss = call.loss(**given, **call.options, **({"group": group} if of_rank else {}))
        gradients = torch.autograd.grad(2 * loss.sum(), list(leaves.values()), materialize_grads=True)
        return loss.detach(), dict(zip(leaves, gradients, strict=True))

    (whole, of_whole), (found, own) = computed(False), computed(True)
    wanted = part(next(iter(call.tensors)), whole) if whole.dim() else whole
    factor = size if group.gradients == "average" else 1
    errors = {"value": relative(found, wanted, whole)}
    for name, gradient in own.items():
        if name not in call.counts:  # as the group's own reduction makes it
            dist.all_reduce(gradient)
        errors[name] = relative(gradient / factor, part(name, of_whole[name]), of_whole[name])
    return found, errors


def relative(found: Tensor, wanted: Tensor, whole: Tensor) -> float:
    """How far a part of a tensor is off, beside the greatest number of the whole."""
    if found.shape != wanted.shape or found.dtype is not wanted.dtype:
        return float("inf")
    largest = whole.double().abs().max() if whole.numel() else torch.tensor(1.0)
    difference = (found.double() - wanted.double()).abs()
    return float(difference.max() / largest.clamp(min=1e-300)) if found.numel() else 0.0


ON_RANKS = [name for name, loss in EVERY_LOSS.items() if loss.function in DECLARED]


def of_table(
    name: str,
    counts: tuple[int, ...],
    dtype: torch.dtype = torch.float64,
    converged: bool = False,
    **group: Any,
) -> tuple[Tensor, dict[str, float]]:
    """A loss of the table, of which each rank has so many rows, and its part of what goes with rows."""
    loss, rows = EVERY_LOSS[name], sum(counts)
    declared = DECLARED[loss.function]
    drawn = loss.inputs(rows, torch.Generator().manual_seed(0), converged)
    numbers = torch.promote_types(dtype, torch.float32)
    tensors = {
        key: x.to(dtype if x.dim() else numbers) if x.is_floating_point() else x for key, x in drawn.items()
    }
    if "scale" in declared.names and "scale" not in {**tensors, **loss.options}:
        tensors["scale"] = torch.tensor(1.7, dtype=numbers)
    sizes = {
        key: shares(len(x), counts) for key, x in tensors.items() if x.dim() and not is_shared(declared, key)
    }
    call = Call(loss.function, tensors, sizes, loss.constant, dict(loss.options))
    return compare(of_tokens(call, counts) if name == "maxsim_loss" else call, **group)


def of_tokens(call: Call, counts: Sequence[int], *, masked: bool = True) -> Call:
    """The same of documents that uneven shards pad to other lengths; hard negatives are a second block."""
    rows, tokens = sum(counts), call.tensors["documents"].shape[1]
    lengths = [tokens - (rank % 3 if len(set(counts)) > 1 else 0) for rank in range(len(counts))]
    of_rows = torch.tensor(lengths).repeat_interleave(torch.tensor(counts)).repeat(2)[:, None]
    is_there, mask = torch.arange(tokens) < of_rows, call.tensors["document_mask"]
    mask = mask & is_there if masked else is_there
    mask[:rows, 0] = True  # a query's document needs a token
    tensors = {**call.tensors, "document_mask": mask}
    if not masked:
        tensors["query_mask"] = torch.ones_like(tensors["query_mask"])
    sizes = {**call.counts, "documents": counts, "document_mask": counts}
    of_documents = dict.fromkeys(("documents", "document_mask"), lengths)
    unnamed = () if masked else ("document_mask", "query_mask")
    return replace(call, tensors=tensors, counts=sizes, lengths=of_documents, unnamed=unnamed)


def unmasked(counts: tuple[int, ...], **options: Any) -> tuple[Tensor, dict[str, float]]:
    """MaxSim without masks, of documents that ranks pad to other lengths."""
    tensors = EVERY_LOSS["maxsim_loss"].inputs(sum(counts), torch.Generator().manual_seed(0), False)
    tensors = {key: x.double() if x.is_floating_point() else x for key, x in tensors.items()}
    sizes = dict.fromkeys(("queries", "query_mask", "documents", "document_mask"), counts)
    return compare(of_tokens(Call(fastqt.maxsim_loss, tensors, sizes, options=options), counts, masked=False))


def lengths(tokens: int) -> list[float]:
    """Two losses with equal shards; the documents of the second have so many tokens, of the first two."""
    group = Group()
    return [
        fastqt.maxsim_loss(torch.ones(2, 1, 2), torch.ones(2, length, 2), group=group).item()
        for length in (2, tokens)
    ]


def shares(size: int, counts: Sequence[int]) -> list[int]:
    """How many rows of another tensor ranks have beside so many of the first."""
    ends = [size * end // sum(counts) for end in itertools.accumulate(counts)]
    return [end - start for start, end in itertools.pairwise([0, *ends])]


def is_shared(declared: Declaration, name: str) -> bool:
    """Whether all ranks have an argument alike, as the parameters of a decoder."""
    argument = declared.others.get(name)
    return argument is not None and argument.is_leaf and argument.of_each_call


def of_labels(
    loss: str, counts: list[int], others: bool, listed: bool, **options: Any
) -> tuple[Tensor, dict[str, float]]:
    """Of labels; `others`: two candidates a row; `listed`: pairs may be listed, else they are in blocks."""
    generator, N = torch.Generator().manual_seed(0), sum(counts)
    tensors = {"embeddings": torch.randn(N, 6, generator=generator, dtype=torch.float64)}
    tensors["labels"] = torch.randint(-2, 3, (N,), generator=generator)
    sizes: dict[str, Sequence[int]] = {"embeddings": counts, "labels": counts}
    if others:
        tensors["candidates"] = torch.randn(2 * N, 6, generator=generator, dtype=torch.float64)
        tensors["candidate_labels"] = torch.randint(-2, 3, (2 * N,), generator=generator)
        sizes |= {key: [2 * n for n in counts] for key in ("candidates", "candidate_labels")}
    tensors["scale"] = torch.tensor(3.0, dtype=torch.float64)
    with mock.patch.object(positives, "PAIR_BYTES", positives.PAIR_BYTES if listed else 2**60):
        return compare(Call(getattr(fastqt, loss), tensors, sizes, options=options))


def pairs(counts: tuple[int, ...], reduction: str) -> tuple[Tensor, dict[str, float]]:
    """Negative sampling; each rank has the whole table, and the gradient of its part."""
    generator, (N, M) = torch.Generator().manual_seed(0), (sum(counts), 13)
    f, g = (torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (N, M))
    tensors = {"queries": f, "candidates": g, "positives": torch.randint(M, (N,), generator=generator)}
    tensors["negatives"] = torch.randint(M, (N, 3), generator=generator)
    tensors["scale"] = torch.tensor(1.3, dtype=torch.float64)
    sizes = dict.fromkeys(("queries", "positives", "negatives"), counts)
    call = Call(fastqt.negative_sampling_loss, tensors, sizes, options={"reduction": reduction})
    return compare(call, gradients="sum")


def windows(counts: tuple[int, ...], reduction: str) -> tuple[Tensor, dict[str, float]]:
    """Windows with samples, which here are the contexts that come next."""
    generator, N = torch.Generator().manual_seed(1), sum(counts)
    f, g = (torch.randn(N, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    tensors = {"queries": f, "candidates": g, "document_ids": torch.arange(N) // 4}
    options = {"samples": 3, "reduction": reduction}
    call = Call(fastqt.binary_window_loss, tensors, dict.fromkeys(tensors, counts), options=options)
    following = lambda own, count, samples, _: (own[:, None] + 1 + torch.arange(samples)) % count  # noqa: E731
    with mock.patch.object(binary_window, "_others", following):
        return compare(call, gradients="sum")
