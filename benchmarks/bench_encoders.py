"""Sentence encoders in float32, forward and backward, beside the same encoders in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from benchmarks.measure.timing import in_turns_with
from benchmarks.measure.workloads import sentences
from fastqt.nn import BagOfWords, Encoder, GRUEncoder, LSTMEncoder, MultiChannel

V, W, H = 50_000, 300, 1000
ENCODERS: dict[str, tuple[Callable[[], Encoder], int, int]] = {  # with B and rounds
    "bow": (lambda: BagOfWords(V, W), 1500, 20),
    "gru": (lambda: GRUEncoder(V, W, H), 400, 7),
    "bigru": (lambda: GRUEncoder(V, W, H, bidirectional=True), 400, 7),
    "lstm": (lambda: LSTMEncoder(V, W, H), 400, 3),
    "multichannel": (lambda: MultiChannel(torch.randn(V, W), hidden_size=H), 400, 5),
}


class PlainRecurrent(nn.Module):
    """The usual code: embedding, packing, torch's layer, last states."""

    def __init__(
        self, kind: type[nn.RNNBase], hidden_size: int, bidirectional: bool, frozen: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, W)
        self.embedding.weight.requires_grad_(not frozen)
        self.layer = kind(W, hidden_size, batch_first=True, bidirectional=bidirectional)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        words = pack_padded_sequence(self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False)
        states = self.layer(words)[1]
        h_n = states[0] if isinstance(states, tuple) else states
        return h_n.transpose(0, 1).flatten(1)


class PlainBag(nn.Module):
    """The sum of padded word vectors; those beyond the length are multiplied by 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, W)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(tokens.shape[1]) < lengths.unsqueeze(1)
        return (self.embedding(tokens) * mask.unsqueeze(2)).sum(1)


class PlainChannels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = PlainRecurrent(nn.GRU, H // 2, bidirectional=True, frozen=True)
        self.trained = PlainRecurrent(nn.GRU, H // 2, bidirectional=True)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        return torch.cat([self.frozen(tokens, lengths), self.trained(tokens, lengths)], dim=1)


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "bow": PlainBag,
    "gru": lambda: PlainRecurrent(nn.GRU, H, bidirectional=False),
    "bigru": lambda: PlainRecurrent(nn.GRU, H // 2, bidirectional=True),
    "lstm": lambda: PlainRecurrent(nn.LSTM, H, bidirectional=False),
    "multichannel": PlainChannels,
}


@pytest.mark.parametrize("train", [True, False], ids=["train", "embed"])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder(benchmark, name, train):
    torch.manual_seed(0)
    make, B, rounds = ENCODERS[name]
    tokens, lengths = sentences(B, V)
    upstream = None

    def run(encoder: nn.Module) -> Callable[[], None]:
        def step() -> None:
            nonlocal upstream
            encoder.zero_grad()
            with torch.set_grad_enabled(train):
                vectors = encoder(tokens, lengths)
            if train:
                upstream = torch.randn_like(vectors) if upstream is None else upstream
                vectors.backward(upstream)

        return step

    ours, seconds = in_turns_with(benchmark, run(make()), {"plain": run(PLAIN[name]())}, rounds)
    benchmark.extra_info.update(
        encoder=name,
        B=B,
        V=V,
        W=W,
        H=H,
        words=int(lengths.sum()),
        threads=torch.get_num_threads(),
        sentences_per_second=B / ours,
        plain_seconds=seconds["plain"],
        speedup_over_torch=seconds["plain"] / ours,
    )
