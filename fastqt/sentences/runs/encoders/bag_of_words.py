"""How bags of words are made and exported."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional as F

from fastqt.nn import BagOfWords
from fastqt.nn.init import Init
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.encoders.forms import EncoderForm


class BagOfWordsForm(EncoderForm[BagOfWords]):
    def build(self, config: TrainConfig, vocab_size: int, *, pretrained: bool) -> BagOfWords:
        return BagOfWords(vocab_size, config.word_dim, sparse=True, init=cast("Init", config.init))

    def graph(self, encoder: BagOfWords) -> nn.Module:
        return BagGraph(encoder)

    def description(self, encoder: BagOfWords) -> dict[str, Any]:
        return {"kind": "sum of word vectors"}


class BagGraph(nn.Module):
    def __init__(self, encoder: BagOfWords) -> None:
        super().__init__()
        self.table = encoder.embedding.weight

    def forward(self, tokens: Tensor, valid: Tensor) -> Tensor:
        return (F.embedding(tokens, self.table) * valid.unsqueeze(2)).sum(1)
