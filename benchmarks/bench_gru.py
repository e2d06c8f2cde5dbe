"""The GRU on ragged batches, beside torch.nn.GRU, the products it is made of, and itself in bfloat16."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from benchmarks.measure.timing import in_turns_with
from fastqt.machine.memory import growth_of_process
from fastqt.nn import GRU

W = 300
TRAINING = [  # (H, B, bidirectional, reset_after, rounds)
    (1000, 400, False, True, 7),  # the project's goal is stated for this size
    (300, 400, False, True, 15),
    (500, 400, True, True, 5),
    (1000, 400, False, False, 5),
    (1000, 64, False, True, 9),
]
INFERENCE = [(1000, 400, 7), (1000, 16, 20), (1000, 1, 50), (300, 400, 20)]  # (H, B, rounds)


def ragged_batch(B: int) -> PackedSequence:
    """B sentences, whose lengths are uniform from 3 to 40 words."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 41, (B,), generator=generator).sort(descending=True).values
    return pack_padded_sequence(torch.randn(int(lengths[0]), B, W, generator=generator), lengths)


def products(layer: GRU, batch: PackedSequence, *, backward: bool) -> Callable[[], None]:
    """The layer's matrix products on this batch, written to preallocated memory.

    Each direction has the projection of all words and one recurrent product for each step. The gradients need
    two products for each of these.
    """
    H, N = layer.hidden_size, len(batch.data)
    x, sizes = batch.data.detach(), batch.batch_sizes.tolist()
    w_ih, w_hh = torch.randn(3 * H, W), torch.randn(3 * H, H)
    gates, states, carry = torch.randn(N, 3 * H), torch.randn(N, H), torch.empty(sizes[0], H)
    recurrent, grad_x = torch.empty(sizes[0], 3 * H), torch.empty(N, W)
    grad_w_ih, grad_w_hh = torch.empty_like(w_ih), torch.empty_like(w_hh)

    def one_direction() -> None:
        torch.mm(x, w_ih.t(), out=gates)
        for b in sizes:
            torch.mm(states[:b], w_hh.t(), out=recurrent[:b])
        if backward:
            for b in sizes:
                torch.mm(gates[:b], w_hh, out=carry[:b])
            torch.mm(gates, w_ih, out=grad_x)
            torch.mm(gates.t(), x, out=grad_w_ih)
            torch.mm(gates.t(), states, out=grad_w_hh)

    def run() -> None:
        for _ in range(1 + layer.bidirectional):
            one_direction()

    return run


def forward_and_backward(
    layer: torch.nn.Module, batch: PackedSequence, upstream: Tensor
) -> Callable[[], None]:
    x = batch.data.clone().requires_grad_()

    def run() -> None:
        layer.zero_grad()
        x.grad = None
        output, _ = layer(batch._replace(data=x))
        output.data.backward(upstream.to(output.data.dtype))

    return run


def forward(layer: torch.nn.Module, batch: PackedSequence) -> Callable[[], None]:
    @torch.no_grad()
    def run() -> None:
        layer(batch)

    return run


def in_bfloat16(layer: GRU, batch: PackedSequence) -> tuple[GRU, PackedSequence]:
    return copy.deepcopy(layer).bfloat16(), batch._replace(data=batch.data.bfloat16())


def torch_layer(layer: GRU) -> torch.nn.GRU:
    theirs = torch.nn.GRU(W, layer.hidden_size, bidirectional=layer.bidirectional)
    if layer.reset_after:
        theirs.load_state_dict(layer.state_dict())
    return theirs


def record(
    benchmark, layer: GRU, batch: PackedSequence, times: tuple[float, dict[str, float]], **more: object
) -> None:
    ours, seconds = times
    benchmark.extra_info.update(
        H=layer.hidden_size,
        W=W,
        B=int(batch.batch_sizes[0]),
        words=len(batch.data),
        bidirectional=layer.bidirectional,
        reset_after=layer.reset_after,
        threads=torch.get_num_threads(),
        gemm_seconds=seconds["gemm"],
        torch_seconds=seconds["torch"],
        ratio_to_gemm=ours / seconds["gemm"],
        torch_ratio_to_gemm=seconds["torch"] / seconds["gemm"],
        speedup_over_torch=seconds["torch"] / ours,
        bfloat16_seconds=seconds["bfloat16"],
        bfloat16_speedup=ours / seconds["bfloat16"],
        **more,
    )


@pytest.mark.parametrize(("H", "B", "bidirectional", "reset_after", "rounds"), TRAINING)
def test_gru_forward_and_backward(benchmark, H, B, bidirectional, reset_after, rounds):
    """torch's layer has no cell with reset_after=False: there only its time is compared, not its values."""
    torch.manual_seed(0)
    batch, layer = ragged_batch(B), GRU(W, H, bidirectional=bidirectional, reset_after=reset_after)
    upstream = torch.randn(len(batch.data), (1 + bidirectional) * H)
    subject = forward_and_backward(layer, batch, upstream)
    theirs = forward_and_backward(torch_layer(layer), batch, upstream)
    peaks = {}
    for name, run in {"peak_bytes": subject, "torch_peak_bytes": theirs}.items():
        run()  # allocates the gradients, as they are in the midst of training
        _, peaks[name] = growth_of_process(run)
    others = {
        "gemm": products(layer, batch, backward=True),
        "torch": theirs,
        "bfloat16": forward_and_backward(*in_bfloat16(layer, batch), upstream),
    }
    record(benchmark, layer, batch, in_turns_with(benchmark, subject, others, rounds), **peaks)
