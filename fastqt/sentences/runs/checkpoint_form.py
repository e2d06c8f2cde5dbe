"""How Hugging Face checkpoints become encoders, and are exported."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fastqt.integrations.huggingface import HuggingFaceEncoder, untrained
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.encoders import EncoderForm


class CheckpointForm(EncoderForm[HuggingFaceEncoder]):
    def build(self, config: TrainConfig, vocab_size: int, *, pretrained: bool) -> HuggingFaceEncoder:
        directory = cast("str", config.checkpoint)
        source = (directory,) if pretrained else untrained(directory)
        return HuggingFaceEncoder(*source, pooling=config.pooling, max_length=config.max_length)

    def vectors(self, encoder: HuggingFaceEncoder, tokens: Tensor, valid: Tensor) -> Tensor:
        # Some models derive the positions of words from which ids are padding ids.
        padding = encoder.tokenizer.pad_token_id or 0
        blank = ~valid.any(1, keepdim=True)
        output = encoder.model(
            input_ids=torch.where(valid, tokens, padding), attention_mask=(valid | blank).long()
        )
        return torch.where(blank, 0.0, encoder.pooled(output, valid))
