"""SPLADE's pooling: a text's weight of each word of the vocabulary, without the logits of all tokens.

Logits are made in tiles, of some words with all tokens, and leave a tile as the maximum of each text and the
token that has it. As log(1 + relu(x)) never falls, it is taken of the maxima alone. The gradients are sums of
a few rows: for a word those of the tokens that have its maxima, and for a token those of the words whose
maxima it has. They are added up in a fixed order, so the same inputs give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.checks import FLOATING, check_tensor, once_differentiable_error
from fastqt.engines.own_products import product_read, read_in
from fastqt.losses.scored import slices
from fastqt.problem import loss_dtype
from fastqt.torch_modes import input_dtype

TITLE = "fastqt.splade_pool"
INT16_MAX = torch.iinfo(torch.int16).max


class Room(NamedTuple):
    """How many numbers there are at a time: on a CPU few, so that they stay near the caches."""

    tile: int  # logits
    maxima: int  # whose gradients are computed at once


ROOM, CPU_ROOM = Room(2**25, 2**24), Room(2**21, 2**18)


def splade_pool(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """SPLADE's vectors of texts: max over the tokens l of log(1 + relu(<hidden_l, weight_v> + bias_v)).

    `hidden` is what comes before the last linear layer of a masked language model, the decoder, and `weight`
    and `bias` are that layer's. Logits of a few words at a time are made and reduced at once: no array
    (B, L, V) is stored, neither here nor for the gradients. For these the token of each maximum is kept, in
    two bytes. There is one product of all tokens with all words, and the gradients take two sums of B V rows
    of D numbers; on a CPU, of those alone whose word has a weight and a gradient.

    Where several tokens have the maximum, the gradient flows to the first. It is 0 where the weight is 0.

    Args:
        hidden: (B, L, D) floating point, a vector for each token.
        weight: (V, D), a row for each word of the vocabulary, dtype and device as `hidden`.
        bias: (V,) floating point, or None.
        mask: (B, L) bool, as an attention mask: True where there is a token, False for padding, whose values
            do not count. By default all are tokens. A text without tokens has the weights 0.

    Returns:
        (B, V) numbers >= 0; float64 for float64 inputs, float32 otherwise, in which products of float16 and
        bfloat16 are added up. NaN of a token stays NaN. It is differentiable once, in `hidden`, `weight` and
        `bias`.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> hidden = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [9.0, 9.0]]])  # three tokens, the last of padding
        >>> mask = torch.tensor([[True, True, False]])
        >>> words = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
        >>> fastqt.splade_pool(hidden, words, mask=mask)  # log 2, log 3 and 0
        tensor([[0.6931, 1.0986, 0.0000]])

    Source: Formal et al., "SPLADE v2: Sparse lexical and expansion model for information retrieval" (2021),
    eq. 6; Nguyen et al., "Sparton: Fast and memory-efficient Triton kernel for learned sparse retrieval"
    (2026), on the maxima of tiles.
    """
    _check(hidden, weight, bias, mask)
    inputs = (hidden, weight, bias)
    wants_tokens = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    pooled, _ = _pooled(*inputs, mask, wants_tokens)
    return pooled


def _check(hidden: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None) -> None:
    check_tensor("hidden", hidden)
    if hidden.dim() != 3 or 0 in hidden.shape:
        raise ValueError(f"hidden: want shape (B, L, D) with numbers, got {tuple(hidden.shape)}")
    if hidden.dtype not in FLOATING:
        raise TypeError(f"hidden: want a floating-point dtype of 16 to 64 bits, got {hidden.dtype}")

    B, L, D = hidden.shape
    check_tensor("weight", weight)
    if weight.dim() != 2 or weight.shape[1] != D or not weight.shape[0]:
        raise ValueError(f"weight: want shape (V, D) = (V, {D}), got {tuple(weight.shape)}")
    for name, x in (("weight", weight), ("bias", bias), ("mask", mask)):
        if x is None:
            continue
        check_tensor(name, x)
        if x.device != hidden.device:
            raise ValueError(f"{name}: want device {hidden.device} as hidden, got {x.device}")
        if name != "mask" and (x.dtype not in FLOATING or input_dtype(x) != input_dtype(hidden)):
            raise TypeError(f"{name}: want dtype {hidden.dtype} as hidden, got {x.dtype}; convert it by to()")

    if bias is not None and tuple(bias.shape) != (len(weight),):
        raise ValueError(f"bias: want shape (V,) = ({len(weight)},), got {tuple(bias.shape)}")
    if mask is not None and mask.dtype is not torch.bool:
        raise TypeError(
            f"mask: want dtype torch.bool (True = a token), got {mask.dtype}; convert it by bool()"
        )
    if mask is not None and tuple(mask.shape) != (B, L):
        raise ValueError(f"mask: want shape (B, L) = ({B}, {L}), got {tuple(mask.shape)}")


def _pool(
    hidden: Tensor,  # (B, L, D)
    weight: Tensor,  # (V, D)
    bias: Tensor | None,  # (V,)
    mask: Tensor | None,  # (B, L)
    wants_tokens: bool,
) -> tuple[Tensor, Tensor]:
    """The pooled weights (B, V), and of each text the token that has the maximum of a word, (V, B).

    The tokens are int16 or int32; without them there is an empty tensor.
    """
    (B, L, _), V, dtype = hidden.shape, len(weight), loss_dtype(hidden)
    # Padding stands for the first token of its text: up to rounding, it is a maximum only where that is one.
    stand_ins = None if mask is None else _stand_ins(mask)
    rows = hidden.flatten(0, 1) if stand_ins is None else _rows_of(hidden, stand_ins)
    rows = rows.to(dtype)
    maxima = rows.new_empty(V, B)
    tokens = rows.new_empty((V, B) if wants_tokens else 0, dtype=_token_dtype(L))

    for tile in slices(V, max(_room(hidden).tile // (B * L), 1)):
        logits = product_read(weight[tile].to(dtype), rows.T, read_in(hidden)).view(-1, B, L)
        if not wants_tokens:
            maxima[tile] = logits.amax(2)
            continue
        maxima[tile], places = logits.max(2)
        tokens[tile] = places if stand_ins is None else stand_ins.T.gather(0, places)

    if bias is not None:
        maxima += bias.to(dtype)[:, None]
    pooled = maxima.T.relu().log1p_().contiguous()
    if mask is not None:
        pooled = pooled.masked_fill_(~mask.any(1, keepdim=True), 0)
    return pooled, tokens


def _stand_ins(mask: Tensor) -> Tensor:
    """Of each token itself, and of padding the first token of its text, (B, L) int64; 0 if it has none."""
    numbers = torch.arange(mask.shape[1], device=mask.device)
    first = mask.to(torch.uint8).argmax(1, keepdim=True)
    return torch.where(mask, numbers, first)


def _rows_of(hidden: Tensor, tokens: Tensor) -> Tensor:
    """The vectors of these tokens (B, L) of each text, (B L, D)."""
    return hidden.flatten(0, 1).index_select(0, _row_numbers(tokens, hidden.shape[1]).flatten())


def _row_numbers(tokens: Tensor, L: int) -> Tensor:
    """The numbers of tokens (B, n) among those of all texts."""
    return tokens + L * torch.arange(len(tokens), device=tokens.device)[:, None]


def _token_dtype(L: int) -> torch.dtype:
    return torch.int16 if L <= INT16_MAX else torch.int32


def _room(x: Tensor) -> Room:
    return CPU_ROOM if x.is_cpu else ROOM


def _gradients(
    upstream: Tensor,  # (B, V)
    hidden: Tensor,  # (B, L, D)
    weight: Tensor,  # (V, D)
    mask: Tensor | None,  # (B, L)
    pooled: Tensor,  # (B, V)
    tokens: Tensor,  # (V, B)
    needs: list[bool],  # of hidden, weight and bias
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of hidden, weight and bias, in their shapes; empty where none is wanted."""
    (B, L, D), V, dtype = hidden.shape, len(weight), pooled.dtype
    # The derivative of log(1 + x) is 1 / (1 + x). NaN is not 0.
    d_maxima = torch.where(pooled <= 0, 0.0, upstream * (-pooled).exp()).T
    d_bias = d_maxima.sum(1) if needs[2] else None
    d_rows = hidden.new_zeros((B * L, D), dtype=dtype) if needs[0] else None
    d_weight = torch.empty_like(weight) if needs[1] else None
    # A weight of 0 does not cancel NaN, which padding may hold.
    known = hidden if mask is None else hidden.masked_fill(~mask[:, :, None], 0)
    rows = known.flatten(0, 1).to(dtype)

    for block in slices(V, max(_room(hidden).maxima // B, 1)) if needs[0] or needs[1] else ():
        words, texts, weights = _entries(d_maxima[block])
        numbers = tokens[block][words, texts].long() + L * texts
        if d_weight is not None:
            d_weight[block] = _sums_of_rows(rows, words, numbers, weights, block.stop - block.start)
        if d_rows is not None:
            numbers, order = numbers.sort(stable=True)
            table = weight[block].to(dtype)
            d_rows += _sums_of_rows(table, numbers, words[order], weights[order], B * L)

    d_hidden = None if d_rows is None else d_rows.view(B, L, D).to(hidden.dtype)
    return _or_empty(hidden, d_hidden), _or_empty(hidden, d_weight), _or_empty(hidden, d_bias)


def _or_empty(like: Tensor, gradient: Tensor | None) -> Tensor:
    """A gradient as an operator returns it."""
    return like.new_empty(0) if gradient is None else gradient


def leaves_out_zeros(cells: Tensor) -> bool:
    """Whether sums are of those rows alone whose weights are not 0, whose number the host has to know."""
    return cells.is_cpu


def _entries(cells: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rows, columns and values of the cells of a matrix in their order."""
    if leaves_out_zeros(cells):
        rows, columns = cells.nonzero(as_tuple=True)
        return rows, columns, cells[rows, columns]
    n, m = cells.shape
    numbers = torch.arange(n * m, device=cells.device)
    return numbers.div(m, rounding_mode="floor"), numbers.remainder(m), cells.flatten()


def _sums_of_rows(
    table: Tensor,  # (n, D)
    bags: Tensor,  # (m,), ascending
    rows: Tensor,  # (m,), of the table
    weights: Tensor,  # (m,)
    count: int,
) -> Tensor:
    """For each of `count` bags the weighted sum of its rows, (count, D)."""
    starts = torch.searchsorted(bags, torch.arange(count, device=bags.device))
    return F.embedding_bag(rows, table, starts, per_sample_weights=weights, mode="sum")


def _fake_pool(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, wants_tokens: bool
) -> tuple[Tensor, Tensor]:
    B, L, V = hidden.shape[0], hidden.shape[1], weight.shape[0]
    tokens = hidden.new_empty((V, B) if wants_tokens else 0, dtype=_token_dtype(L))
    return hidden.new_empty((B, V), dtype=loss_dtype(hidden)), tokens


def _fake_gradients(
    upstream: Tensor,
    hidden: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    pooled: Tensor,
    tokens: Tensor,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    shapes = (hidden.new_empty(hidden.shape), torch.empty_like(weight), pooled.new_empty(weight.shape[0]))
    return tuple(x if need else hidden.new_empty(0) for x, need in zip(shapes, needs, strict=True))


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, wants_tokens: bool
    ) -> tuple[Tensor, Tensor]:
        pooled, tokens = torch.ops.fastqt.splade_pool(hidden, weight, bias, mask, wants_tokens)
        return pooled, tokens

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        hidden, weight, bias, mask, _ = inputs
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(hidden, weight, mask, *output)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        needs = list(ctx.needs_input_grad[:3])
        # Dynamo traces no autograd function within the backward pass of another.
        traced = torch.compiler.is_compiling()
        compute = torch.ops.fastqt.splade_pool_gradients if traced else _gradients_of
        gradients = compute(upstream[0], *ctx.saved_tensors, needs)
        d_hidden, d_weight, d_bias = (x if need else None for x, need in zip(gradients, needs, strict=True))
        return d_hidden, d_weight, None if d_bias is None else d_bias.to(ctx.bias_dtype), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        return _mapped(_pooled, info.batch_size, in_dims, arguments)


class _Gradients(torch.autograd.Function):
    """A function by itself, because torch.func transforms backward passes too."""

    @staticmethod
    def forward(upstream: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        d_hidden, d_weight, d_bias = torch.ops.fastqt.splade_pool_gradients(upstream, *arguments)
        return d_hidden, d_weight, d_bias

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """The gradients have none themselves."""

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> NoReturn:
        raise once_differentiable_error(TITLE)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        # Of several flags there is a list of dimensions, which are None.
        return _mapped(_gradients_of, info.batch_size, (*in_dims[:-1], None), arguments)


# torch gives `apply` no types.
_pooled: Callable[..., tuple[Tensor, Tensor]] = _Pool.apply
_gradients_of: Callable[..., tuple[Tensor, Tensor, Tensor]] = _Gradients.apply


def _mapped(
    function: Callable[..., tuple[Tensor, ...]], size: int, dims: tuple[Any, ...], arguments: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """A function under vmap: one call after the other."""
    each = [
        function(*(x if dim is None else x.select(dim, i) for x, dim in zip(arguments, dims, strict=True)))
        for i in range(size)
    ]
    stacked = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
    return stacked, (0,) * len(stacked)


def _define(name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Registers an operator, which no tracer looks into."""
    operator = f"fastqt::{name}"
    torch.library.define(operator, schema)
    torch.library.impl(operator, "CompositeExplicitAutograd", function)
    torch.library.register_fake(operator, fake)


_define(
    "splade_pool",
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor? mask, bool wants_tokens) -> (Tensor, Tensor)",
    _pool,
    _fake_pool,
)
_define(
    "splade_pool_gradients",
    "(Tensor upstream, Tensor hidden, Tensor weight, Tensor? mask, Tensor pooled, Tensor tokens, "
    "bool[] needs) -> (Tensor, Tensor, Tensor)",
    _gradients,
    _fake_gradients,
)
