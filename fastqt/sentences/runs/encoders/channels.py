"""How encoders of two channels are made and exported."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from fastqt.nn import Combine, Encoder
from fastqt.nn.combine import Channel, channels
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.encoders.forms import EncoderForm, form_of


class ChannelsForm(EncoderForm[Combine]):
    def build(self, config: TrainConfig, vocab_size: int, *, pretrained: bool) -> Combine:
        """The frozen table is drawn too: it keeps what was drawn for words without a pre-trained vector."""
        both = channels(
            cast("Channel", config.encoder_kind.channel),
            vocab_size,
            config.word_dim,
            vectors=None,
            word_dim=config.trained_dim or config.word_dim,
            hidden_size=config.hidden_size,
            reset_after=config.cell == "reset-after",
            init=config.init,
            sparse=True,
        )
        return Combine(*both)

    def graph(self, encoder: Combine) -> nn.Module:
        return CombineGraph(encoder)


class CombineGraph(nn.Module):
    def __init__(self, encoder: Combine) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(form_of(each).graph(each) for each in _channels(encoder))

    def forward(self, tokens: Tensor, valid: Tensor) -> Tensor:
        return torch.cat([encoder(tokens, valid) for encoder in self.encoders], dim=1)


def _channels(encoder: Combine) -> list[Encoder]:
    return [cast("Encoder", each) for each in encoder.encoders]
