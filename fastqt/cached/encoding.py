"""The two passes of the encoders over one batch.

The first pass encodes chunk by chunk and keeps the graph of one chunk alone, or of none if there are many.
When the gradients of all embeddings are known, the second pass encodes the other chunks again, each with the
random numbers and the autocast that it had, and sends its rows' gradients through its graph at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from fastqt.cached.inputs import (
    Encoder,
    Inputs,
    call,
    check_no_batch_norm,
    pair,
    row_count,
    spans,
    tensors_of,
)
from fastqt.cached.modules import modules_of
from fastqt.cached.reduction import agreed_counts, reducing_modules, without_reduction
from fastqt.cached.replay import Autocast, RandomStates, random_states, random_states_kept, set_random_states
from fastqt.checks import check_option, check_size
from fastqt.options import Recheck
from fastqt.torch_modes import tf32_allowed

CHECKS: tuple[str, ...] = get_args(Recheck)
# From so many chunks on, no graph is kept while the loss runs: its memory would be added to that of the loss.
# The chunk is encoded once more instead, which is less than 2 % of the work of so many chunks.
MANY_CHUNKS = 16


@dataclass
class Tower:
    """An encoder and its inputs."""

    name: str  # of the encoder, in errors
    encoder: Encoder
    input_name: str
    inputs: Inputs
    used: list[nn.Module]  # all that are known
    modules: list[nn.Module]  # that reduce gradients over ranks
    trainable: bool = True  # False once it is known that embeddings have no gradient
    changes_inputs: bool = False  # True once it was seen to do so in place


class Chunk(NamedTuple):
    """Rows of one encoder's inputs."""

    number: int  # among all chunks, of which several may be empty
    tower: int
    begin: int
    end: int


class Encoding:
    """One batch that is encoded in chunks, once without graph and once with it.

    Its arguments and errors are those of `fastqt.cached_backward`. `embeddings` has those of each encoder,
    (N, ...) without graph, once `first_pass` has run.
    """

    def __init__(
        self,
        encoders: Any,
        inputs: Any,
        *,
        chunk_size: int,
        ddp: Any,
        check: Recheck,
        modules: Sequence[nn.Module] | None,
    ) -> None:
        check_size("chunk_size", chunk_size)
        check_option("check", check, CHECKS)
        names, encoders, input_names, all_inputs = zip(*pair(encoders, inputs), strict=True)

        by_encoder: dict[int, list[nn.Module]] = {}
        for name, encoder in zip(names, encoders, strict=True):
            if id(encoder) not in by_encoder:
                by_encoder[id(encoder)] = modules_of(name, encoder, modules)
                check_no_batch_norm(name, by_encoder[id(encoder)])

        used = [by_encoder[id(encoder)] for encoder in encoders]
        reducing = reducing_modules(names, encoders, used, ddp)
        self.towers = [
            Tower(*parts)
            for parts in zip(names, encoders, input_names, all_inputs, used, reducing, strict=True)
        ]

        self.check = check
        rows = []
        for tower in self.towers:
            tensors = tensors_of(tower.input_name, tower.inputs)
            rows.append(row_count(tower.input_name, tensors))
            tower.trainable = _may_be_trainable(tower, tensors)

        counts = agreed_counts([len(spans(n, chunk_size)) for n in rows], reducing)
        cut = [
            (i, *span)
            for i, (n, count) in enumerate(zip(rows, counts, strict=True))
            for span in spans(n, chunk_size, count)
        ]
        self.chunks = [Chunk(number, *span) for number, span in enumerate(cut)]

        self._leaves: list[Tensor] | None = None
        self.embeddings: list[Tensor] = []
        self._kept: tuple[Chunk, Tensor | None] | None = None  # with the output that has the graph
        self._states: dict[Chunk, RandomStates] = {}
        self._compared: set[int] = set()  # towers
        self._sparse_rows: dict[Tensor, int] = {}  # of the gradients of tables, when they were last added up

    @property
    def trainable(self) -> list[bool]:
        """Which encoders' embeddings want a gradient, as far as that is known."""
        return [tower.trainable for tower in self.towers]

    def collect_gradients(self) -> list[Tensor]:
        """Lets the second pass return gradients, not add them to `.grad`; returns what they are of.

        These are parameters and leaf inputs. ValueError for an encoder that is a function, of which nobody
        knows all parameters, or that reduces gradients itself.
        """
        leaves: dict[Tensor, None] = {}
        for tower in self.towers:
            if not isinstance(tower.encoder, nn.Module) or tower.modules:
                raise ValueError(
                    f"{tower.name}: want a module without DistributedDataParallel, since all of this runs "
                    "within the forward pass of one"
                )
            tensors = *tensors_of(tower.input_name, tower.inputs).values(), *_parameters(tower)
            leaves |= dict.fromkeys(x for x in tensors if x.requires_grad)
        self._leaves = list(leaves)
        return self._leaves

    def first_pass(self, *, with_graph: bool = True) -> None:
        """Encodes all chunks, with the graph of one of them or of none."""
        self.autocast = Autocast()
        outputs: list[list[Tensor]] = [[] for _ in self.towers]

        for chunk in self.chunks:
            if with_graph:
                self._states[chunk] = random_states()

            # The kept chunk is the first and not the last: DDP talks to other ranks in the first forward pass
            # of a step, and also in the first one with gradients. These are one pass this way on every rank,
            # however many chunks it has.
            first = with_graph and self._kept is None and not outputs[chunk.tower]

            if first and self.towers[chunk.tower].trainable:
                output = self._keep(chunk)
            else:
                with torch.no_grad():
                    output = self._encode(chunk)
            outputs[chunk.tower].append(output)

        self.embeddings = [torch.cat(rows) if len(rows) > 1 else rows[0] for rows in outputs]

    def second_pass(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Adds the gradients of the encoders' parameters to theirs, or collects them.

        `gradients` are those of each encoder's embeddings, None where the loss does not depend on them.
        Returns, after `collect_gradients`, those of its tensors. RuntimeError for embeddings that differ from
        those of the first pass, and for a second call.
        """
        if self._kept is None and any(self.trainable):
            raise RuntimeError("backward: want one call for each forward pass, got a second one")

        self._sums: list[Tensor | None] = [None] * len(self._leaves or ())
        last = self._last_chunks()

        first, output = self._kept or (None, None)
        self._kept, chunks = None, [chunk for chunk in self.chunks if first not in (None, chunk)]
        if first is not None:
            # A graph that was kept comes first, so that it is gone when the next one is made. Without it the
            # same chunk comes last: the one that is compared has then been encoded without graph before.
            chunks.insert(len(chunks) if output is None else 0, first)

        with torch.enable_grad(), random_states_kept():
            for chunk in chunks:
                tower, gradient = self.towers[chunk.tower], gradients[chunk.tower]
                # Without a gradient there is nothing to do but to take part in the other ranks' reduction.
                if tower.trainable and (gradient is not None or tower.modules):
                    with without_reduction(self._held_back(chunk, last)):
                        if output is not None:
                            self._backward(chunk, output, gradient)
                        else:
                            set_random_states(self._states[chunk])
                            self._encode_again(chunk, gradient)
                output = None
        return self._sums

    def _keep(self, chunk: Chunk) -> Tensor:
        """Encodes a chunk with its graph, which shows whether the encoder has one."""
        with without_reduction(self._held_back(chunk, self._last_chunks())):
            output = self._encode(chunk)
        if output.requires_grad:
            # Where ranks reduce gradients, their forward and backward passes have to come in pairs.
            keeps = len(self.chunks) < MANY_CHUNKS or any(tower.modules for tower in self.towers)
            self._kept = chunk, output if keeps else None
        else:
            self.towers[chunk.tower].trainable = False
        return output.detach()

    def _encode_again(self, chunk: Chunk, gradient: Tensor | None) -> None:
        """Encodes a chunk with its graph and sends the gradients of its rows through it."""
        tower = self.towers[chunk.tower]
        with self.autocast.again():
            output = self._encode(chunk)
        if not output.requires_grad and not tower.modules and chunk.begin == 0:
            tower.trainable = False  # a function, of which nobody knew that it is frozen
            return
        if self.check == "always" or (self.check == "first" and chunk.tower not in self._compared):
            self._compare(chunk, output.detach())
            self._compared.add(chunk.tower)
        self._backward(chunk, output, gradient)

    def _backward(self, chunk: Chunk, output: Tensor, gradient: Tensor | None) -> None:
        if not output.requires_grad:
            raise RuntimeError(
                f"{self.towers[chunk.tower].name}: want embeddings that depend on parameters, got none for "
                f"rows {chunk.begin} to {chunk.end - 1}; for a frozen encoder, give ddp= without its module"
            )
        part = torch.zeros_like(output) if gradient is None else gradient[chunk.begin : chunk.end]
        with self.autocast.off():
            if self._leaves is None:
                torch.autograd.backward(output, part)
                if not self.towers[chunk.tower].modules:
                    self._sum_sparse_rows(self.towers[chunk.tower])
                return
            gradients = torch.autograd.grad(output, self._leaves, part, allow_unused=True)
        for i, g in enumerate(gradients):
            if g is not None:
                total = self._sums[i]
                self._sums[i] = g.clone() if total is None else total.add_(g)  # parameters may share a g

    def _sum_sparse_rows(self, tower: Tower) -> None:
        """Adds up the rows of sparse gradients that several chunks have.

        Autograd adds sparse tensors by appending their rows, so that a table's gradient would grow with the
        batch. It is added up whenever it has grown to twice what was left the last time.
        """
        for parameter in _parameters(tower):
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.sparse_coo or gradient.is_coalesced():
                continue
            if gradient._nnz() > 2 * self._sparse_rows.get(parameter, 0):
                parameter.grad = gradient.coalesce()
                self._sparse_rows[parameter] = parameter.grad._nnz()

    def _last_chunks(self) -> dict[nn.Module, Chunk]:
        """The chunk after which each module that reduces gradients is to do so."""
        trained = [chunk for chunk in self.chunks if self.towers[chunk.tower].trainable]
        return {module: chunk for chunk in trained for module in self.towers[chunk.tower].modules}

    def _held_back(self, chunk: Chunk, last: dict[nn.Module, Chunk]) -> list[nn.Module]:
        """The modules that are not to reduce gradients after this chunk, since they have a later one."""
        return [module for module in self.towers[chunk.tower].modules if last[module] != chunk]

    def _encode(self, chunk: Chunk) -> Tensor:
        tower = self.towers[chunk.tower]
        output, changed = call(tower.encoder, tower.inputs, chunk.begin, chunk.end)
        tower.changes_inputs |= changed

        if not isinstance(output, Tensor):
            raise TypeError(
                f"{tower.name}: want an encoder that returns a tensor, got {type(output).__name__}; "
                "wrap it in a function that returns the embeddings"
            )

        rows = chunk.end - chunk.begin
        if output.dim() == 0 or len(output) != rows or not output.is_floating_point():
            raise ValueError(
                f"{tower.name}: want a row of floating-point embeddings for each of {rows} rows of inputs, "
                f"got shape {tuple(output.shape)} of {output.dtype}"
            )
        return output

    def _compare(self, chunk: Chunk, again: Tensor) -> None:
        """Raises RuntimeError unless a chunk has the embeddings that it had in the first pass."""
        first = self.embeddings[chunk.tower][chunk.begin : chunk.end]
        if again.shape != first.shape or again.dtype != first.dtype:
            got = f"{tuple(first.shape)} of {first.dtype}, then {tuple(again.shape)} of {again.dtype}"
        elif (error := difference(first, again)) <= tolerance(first, self.autocast):
            return
        else:
            got = f"a difference of {error:.2g} of the largest value"

        tower = self.towers[chunk.tower]
        reason = (
            f"it changes its {tower.input_name} in place"
            if tower.changes_inputs
            else "does it draw from a generator that is not torch's own, or change its parameters or buffers?"
        )

        raise RuntimeError(
            f"{tower.name}: want the same embeddings of rows {chunk.begin} to {chunk.end - 1} in both "
            f"passes, got {got}; {reason}"
        )


def difference(first: Tensor, again: Tensor) -> float:
    """The largest difference of two tensors, relative to the largest finite value of the first."""
    if first.numel() == 0:
        return 0.0
    if first.dtype.itemsize < 4:
        first, again = first.float(), again.float()

    # What overflowed in both passes is for a gradient scaler to find.
    same = (first == again) | (first.isnan() & again.isnan())

    largest = first.masked_fill(~first.isfinite(), 0).abs().amax()
    differences = (again - first).abs().masked_fill(same, 0)
    return float((differences / largest.clamp_min(torch.finfo(first.dtype).tiny)).amax().nan_to_num(math.inf))


def tolerance(embeddings: Tensor, autocast: Autocast) -> float:
    """How far two passes may differ: by half of the digits of the coarsest dtype that they compute in.

    PyTorch may choose other kernels where autograd records, which sum in another order. A lost draw of
    dropout changes the first digit.
    """
    epsilon = torch.finfo(autocast.coarsest(embeddings.dtype)).eps
    if embeddings.is_cuda and embeddings.dtype is torch.float32 and tf32_allowed():
        epsilon = max(epsilon, 2.0**-10)
    return math.sqrt(epsilon)


def _may_be_trainable(tower: Tower, tensors: Mapping[str, Tensor]) -> bool:
    """Whether embeddings may have a gradient. Of a function that is not known before it has run."""
    if not isinstance(tower.encoder, nn.Module):
        return True
    return any(x.requires_grad for x in (*tensors.values(), *_parameters(tower)))


def _parameters(tower: Tower) -> Iterator[nn.Parameter]:
    return (p for module in tower.used for p in module.parameters())
