"""How Transformers are made, compiled and exported."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastqt.nn import Transformer
from fastqt.nn.transformer import TransformerLayer
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.encoders.forms import EncoderForm


class TransformerForm(EncoderForm[Transformer]):
    def build(self, config: TrainConfig, vocab_size: int, *, pretrained: bool) -> Transformer:
        predicts_words = config.masked_words > 0
        return Transformer(
            vocab_size + predicts_words,  # the last one is the mask token's, which no vocabulary has
            config.word_dim,
            layers=config.layers,
            heads=config.heads,
            feedforward=config.feedforward,
            dropout=config.dropout,
            max_length=config.max_length,
            sparse=not predicts_words,  # a softmax over all words gives all of them a gradient
        )

    def compiled(self, encoder: Transformer) -> Iterator[nn.Module]:
        """The layers, which have nearly all of its operations.

        What is around them has shapes that depend on the lengths of sentences, and a table with a sparse
        gradient, which torch's compiler does not take.
        """
        yield from encoder.layers

    def vectors(self, encoder: Transformer, tokens: Tensor, valid: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        words = encoder.embedding(tokens) + encoder.positions(places)
        words = math.sqrt(encoder.embedding_dim) * words

        # A softmax over no key is NaN, so a sentence without words attends to its padding.
        attended = (valid | ~valid.any(1, keepdim=True))[:, None, None]
        for layer in encoder.layers:
            words = _layer(cast("TransformerLayer", layer), words, attended)

        counted = valid.unsqueeze(2).to(words.dtype)
        result: Tensor = (encoder.norm(words) * counted).sum(1) / counted.sum(1).clamp(min=1)
        return result


def _layer(layer: TransformerLayer, words: Tensor, attended: Tensor) -> Tensor:
    """A layer on the padded batch."""
    B, L, D = words.shape
    projected = layer.query_key_value(layer.attention_norm(words))
    queries, keys, values = projected.view(B, L, 3, layer.heads, -1).permute(2, 0, 3, 1, 4)
    heads = F.scaled_dot_product_attention(queries, keys, values, attn_mask=attended)

    words = words + layer.output(heads.transpose(1, 2).reshape(B, L, D))
    result: Tensor = words + layer.contract(F.relu(layer.expand(layer.feedforward_norm(words))))
    return result
