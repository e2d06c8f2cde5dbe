"""How bags of words are made and exported."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from fastqt.nn import BagOfWords
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.encoders.forms import EncoderForm


class BagOfWordsForm(EncoderForm[BagOfWords]):
    def build(self, config: TrainConfig, vocab_size: int, *, pretrained: bool) -> BagOfWords:
        return BagOfWords(vocab_size, config.word_dim, sparse=True, init=config.init)

    def vectors(self, encoder: BagOfWords, tokens: Tensor, valid: Tensor) -> Tensor:
        return (F.embedding(tokens, encoder.embedding.weight) * valid.unsqueeze(2)).sum(1)
