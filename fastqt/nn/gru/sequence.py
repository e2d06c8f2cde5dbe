"""A GRU over a batch of sequences of different lengths: two operators, and their autograd Function.

Sequences are packed as in torch's PackedSequence: the longest sequence comes first, and the tokens are
ordered by time step, so that at step t the first batch_sizes[t] sequences are active. Steps are grouped into
chunks of about CHUNK_TOKENS tokens, which are small enough to stay in the CPU's cache between two uses. One
GEMM per chunk projects the inputs, so that the time loop does only the recurrent products and one fused pass
over the gates. In the backward pass, one GEMM per chunk gives the gradient of each weight matrix.

N is the number of tokens, B the number of sequences, W the input size, H the hidden size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastqt.engines.own_products import multiply
from fastqt.nn.gru.cells import Cell, ResetAfter, ResetBefore, combined_bias
from fastqt.nn.gru.native import in_large_pages

CHUNK_TOKENS = 1024

# The cell for each value of `reset_after`.
CELLS: dict[bool, Callable[..., Cell]] = {True: ResetAfter, False: ResetBefore}


def gru_sequence(
    input: Tensor,  # (N, W)
    batch_sizes: Tensor,  # (T,) int64, on the CPU, non-increasing
    batch: int,  # B, at least batch_sizes[0]; sequences beyond batch_sizes[0] are empty
    h0: Tensor | None,  # (B, H); None means zero
    w_ih: Tensor,  # (3H, W)
    w_hh: Tensor,  # (3H, H)
    b_ih: Tensor | None,  # (3H,)
    b_hh: Tensor | None,  # (3H,)
    *,
    reverse: bool = False,  # each sequence from its own last token to its first
    reset_after: bool = True,  # the form of the cell
    want_output: bool = True,
    bfloat16: bool = False,  # whether the products round their factors to it, where the processor has such
) -> tuple[Tensor, Tensor]:
    """Runs one direction of a GRU. It is differentiable once, with respect to all tensors.

    Returns:
        output: (N, H), the states after every token; (0, H) if they are not wanted.
        h_n: (B, H), the final states.
    """
    tensors = (input, h0, w_ih, w_hh, b_ih, b_hh)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        apply: Callable[..., tuple[Tensor, Tensor]] = _Sequence.apply  # torch gives `apply` no types
        return apply(*tensors, batch_sizes, batch, reverse, reset_after, want_output, bfloat16)
    weights = (w_ih, w_hh, b_ih, b_hh)
    options = (reverse, reset_after, want_output, bfloat16)
    output, h_n, *_ = gru_fwd(input, batch_sizes, batch, h0, *weights, *options, False)
    return output, h_n


class _Sequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        h0: Tensor | None,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
        batch_sizes: Tensor,
        batch: int,
        reverse: bool,
        reset_after: bool,
        want_output: bool,
        bfloat16: bool,
    ) -> tuple[Tensor, Tensor]:
        weights = (w_ih, w_hh, b_ih, b_hh)
        options = (reverse, reset_after, want_output, bfloat16)
        output, h_n, gates, hidden_n, states = gru_fwd(
            input, batch_sizes, batch, h0, *weights, *options, True
        )
        ctx.save_for_backward(input, batch_sizes, w_ih, w_hh, gates, hidden_n, states)
        ctx.set_materialize_grads(False)
        ctx.batch, ctx.options = batch, (h0 is not None, reverse, reset_after, bfloat16)
        return output, h_n

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_h_n: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "fastqt.nn.GRU has no second derivative: differentiate it without create_graph=True"
            )
        needs = ctx.needs_input_grad[:6]
        grads = gru_bwd(
            grad_output, grad_h_n, ctx.batch, *ctx.saved_tensors, *ctx.options, needs[0], any(needs[2:])
        )
        return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), *[None] * 6


class Step(NamedTuple):
    """One time step of the packed batch."""

    begin: int  # index of the step's first token
    rows: int  # number of active sequences; their tokens are begin to begin + rows - 1
    live: int  # number of active sequences that have a state from an earlier step


def _chunks(batch_sizes: Tensor, reverse: bool) -> list[list[Step]]:
    """The steps in the order of the recurrence, in chunks of at most CHUNK_TOKENS tokens or one step each."""
    sizes: list[int] = batch_sizes.tolist()
    begins = [0]
    for rows in sizes:
        begins.append(begins[-1] + rows)
    chunks: list[list[Step]] = []
    tokens, live = CHUNK_TOKENS, 0
    for t in reversed(range(len(sizes))) if reverse else range(len(sizes)):
        if tokens + sizes[t] > CHUNK_TOKENS:
            chunks.append([])
            tokens = 0
        chunks[-1].append(Step(begins[t], sizes[t], min(live, sizes[t])))
        tokens, live = tokens + sizes[t], sizes[t]
    return chunks


def _first_token(chunk: list[Step]) -> int:
    return min(step.begin for step in chunk)


def _token_count(chunk: list[Step]) -> int:
    return sum(step.rows for step in chunk)


@torch.library.custom_op("fastqt::gru_fwd", mutates_args=())
def gru_fwd(
    input: Tensor,  # (N, W)
    batch_sizes: Tensor,  # (T,)
    batch: int,
    h0: Tensor | None,  # (B, H)
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    reverse: bool,
    reset_after: bool,
    want_output: bool,
    bfloat16: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The forward pass of `gru_sequence`.

    Returns:
        output: (N, H), or (0, H) if not `want_output`.
        h_n: (B, H).
        gates: (N, 3H), the activated gates r, z, n of every token, for `gru_bwd`.
        hidden_n: (N, H), or (0, H) if the cell does not keep it, for `gru_bwd`.
        states: (N, H), the state before every token, for `gru_bwd`.
        The last three have no elements if not `save`.
    """
    N, H = len(input), w_hh.shape[1]
    chunks = _chunks(batch_sizes, reverse)
    steps = [step for chunk in chunks for step in chunk]
    input, w_ih, w_hh = input.contiguous(), w_ih.contiguous(), w_hh.contiguous()
    cell = CELLS[reset_after](w_hh, batch, bfloat16=bfloat16)
    bias = combined_bias(w_hh, b_ih, b_hh, reset_after)
    # `cell.forward` reads the states of step k from step_states[k] and writes the new ones of the sequences
    # that go on to step_states[k + 1]. It writes the new states of the sequences that end to `final`.
    initial = h0.contiguous() if h0 is not None else input.new_zeros(batch, H)
    output = in_large_pages(input.new_empty(N if want_output else 0, H))
    hidden_n = input.new_empty(0, H)
    final = initial.clone()
    if save:
        gates, states = in_large_pages(input.new_empty(N, 3 * H)), in_large_pages(input.new_empty(N, H))
        hidden_n = in_large_pages(input.new_empty(N if cell.keeps_hidden_n else 0, H))
        for begin, rows, live in steps:
            states[begin + live : begin + rows] = initial[live:rows]
        step_states = [states[begin : begin + rows] for begin, rows, _ in steps]
    else:
        # Nothing is saved: all chunks share one buffer for the gates, and all steps share one for the states.
        gates, states = input.new_empty(max(map(_token_count, chunks), default=0), 3 * H), initial.clone()
        step_states = [states[:rows] for _, rows, _ in steps]
    step_states.append(states[:0])

    index = 0
    for chunk in chunks:
        start, tokens = _first_token(chunk), _token_count(chunk)
        projected = gates[start : start + tokens] if save else gates[:tokens]
        multiply(projected, input[start : start + tokens], w_ih.t(), bfloat16=bfloat16)
        for begin, rows, live in chunk:
            end = begin + rows
            cell.forward(
                projected[begin - start : end - start],
                bias,
                step_states[index],
                live if h0 is None else rows,
                hidden_n[begin:end],
                step_states[index + 1],
                final,
                output[begin:end],
            )
            index += 1
    if not save:
        gates, hidden_n, states = (input.new_empty(0) for _ in range(3))
    return output, final, gates, hidden_n, states


@gru_fwd.register_fake
def _(
    input: Tensor,
    batch_sizes: Tensor,
    batch: int,
    h0: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    reverse: bool,
    reset_after: bool,
    want_output: bool,
    bfloat16: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    N, H = input.shape[0], w_hh.shape[1]
    output, final = input.new_empty(N if want_output else 0, H), input.new_empty(batch, H)
    if not save:
        return output, final, input.new_empty(0), input.new_empty(0), input.new_empty(0)
    hidden_n = input.new_empty(N if reset_after else 0, H)
    return output, final, input.new_empty(N, 3 * H), hidden_n, input.new_empty(N, H)


@torch.library.custom_op("fastqt::gru_bwd", mutates_args=())
def gru_bwd(
    grad_output: Tensor | None,  # (N, H)
    grad_h_n: Tensor | None,  # (B, H)
    batch: int,
    input: Tensor,
    batch_sizes: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    gates: Tensor,
    hidden_n: Tensor,
    states: Tensor,
    has_h0: bool,
    reverse: bool,
    reset_after: bool,
    bfloat16: bool,
    need_input: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The backward pass of `gru_sequence`, from what `gru_fwd` returned with `save`.

    Returns the gradients of input, h0, w_ih, w_hh, b_ih and b_hh. Those of an absent h0, and of `input` if it
    is not needed, have no elements. Those of weights and biases are zero if not `need_weights`.
    """
    H = states.shape[1]
    chunks = _chunks(batch_sizes, reverse)
    input, w_ih, w_hh = input.contiguous(), w_ih.contiguous(), w_hh.contiguous()
    cell = CELLS[reset_after](w_hh, batch, backward=True, bfloat16=bfloat16)
    grad_output = grad_output.contiguous() if grad_output is not None else input.new_empty(0, H)
    carry = (
        grad_h_n.clone(memory_format=torch.contiguous_format)
        if grad_h_n is not None
        else input.new_zeros(batch, H)
    )
    # The blocks of grad_gates are in the cell's own order. w_ih and its gradient are put in that order too.
    w_ih_reordered = torch.cat([w_ih[block * H : (block + 1) * H] for block in cell.block_order])
    grad_w_ih_reordered = torch.zeros_like(w_ih)
    grad_input = input.new_empty(input.shape if need_input else 0)
    grad_w_hh, grad_bias = torch.zeros_like(w_hh), input.new_zeros(4 * H)
    workspace = in_large_pages(input.new_empty(max(map(_token_count, chunks), default=0), 4 * H))

    for chunk in reversed(chunks):
        start, tokens = _first_token(chunk), _token_count(chunk)
        grad_gates = workspace[:tokens]
        for begin, rows, live in reversed(chunk):
            end = begin + rows
            cell.backward(
                gates[begin:end],
                states[begin:end],
                rows if has_h0 else live,
                hidden_n[begin:end],
                grad_output[begin:end],
                carry,
                grad_gates[begin - start : end - start],
            )
        grad_projected, span = grad_gates[:, : 3 * H], slice(start, start + tokens)
        if need_input:
            multiply(grad_input[span], grad_projected, w_ih_reordered, bfloat16=bfloat16)
        if need_weights:
            multiply(grad_w_ih_reordered, grad_projected.t(), input[span], add=True, bfloat16=bfloat16)
            cell.add_weight_gradient(grad_gates, states[span], grad_w_hh)
            grad_bias += grad_gates.sum(0)

    grad_w_ih = torch.empty_like(w_ih)
    for k, block in enumerate(cell.block_order):
        grad_w_ih[block * H : (block + 1) * H] = grad_w_ih_reordered[k * H : (k + 1) * H]
    grad_h0 = carry if has_h0 else input.new_empty(0)
    return grad_input, grad_h0, grad_w_ih, grad_w_hh, *cell.bias_gradients(grad_bias)


@gru_bwd.register_fake
def _(
    grad_output: Tensor | None,
    grad_h_n: Tensor | None,
    batch: int,
    input: Tensor,
    batch_sizes: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    gates: Tensor,
    hidden_n: Tensor,
    states: Tensor,
    has_h0: bool,
    reverse: bool,
    reset_after: bool,
    bfloat16: bool,
    need_input: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    H = w_hh.shape[1]
    return (
        input.new_empty(input.shape if need_input else (0,)),
        input.new_empty((batch, H) if has_h0 else (0,)),
        input.new_empty(w_ih.shape),
        input.new_empty(w_hh.shape),
        input.new_empty(3 * H),
        input.new_empty(3 * H),
    )
