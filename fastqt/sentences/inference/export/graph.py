"""Encoders as computations that ONNX has operators for: of padded token ids, without lengths on the host.

Encoders compute with the words of a batch alone, which ONNX cannot express. These modules compute the same
vectors from the padded batch. Padding may be any ids: it is replaced by 0 before tables are read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastqt.errors import InputError
from fastqt.nn import BagOfWords, Combine, Encoder, GRUEncoder, LSTMEncoder, Transformer
from fastqt.nn.transformer import TransformerLayer

if TYPE_CHECKING:
    from fastqt.integrations.huggingface import HuggingFaceEncoder

# The blocks of ONNX's weights, each by its number among torch's. A GRU has z, r, n, and in torch r, z, n; an
# LSTM has the gates input, output, forget, cell, and in torch input, forget, cell, output.
BLOCKS = {"GRU": (1, 0, 2), "LSTM": (0, 3, 1, 2)}


class Graph(nn.Module):
    """The vectors of a model with these encoders, as `fastqt embed` computes them.

    `normalize` scales each encoder's vectors to norm 1.
    """

    def __init__(self, halves: Sequence[Encoder], *, normalize: bool) -> None:
        super().__init__()
        self.halves = nn.ModuleList(map(graph_of, halves))
        self.normalize = normalize

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, E) of token ids (B, L) and a mask (B, L), both int64: 1 at words, which come first, and 0."""
        valid = attention_mask > 0
        tokens = torch.where(valid, input_ids, 0)
        vectors = [half(tokens, valid) for half in self.halves]
        return torch.cat([F.normalize(half, dim=1) if self.normalize else half for half in vectors], dim=1)


def graph_of(encoder: Encoder) -> nn.Module:
    """A module of tokens (B, L), whose padding is 0, and of where words are, with the encoder's vectors."""
    if isinstance(encoder, BagOfWords):
        return BagGraph(encoder)
    if isinstance(encoder, GRUEncoder | LSTMEncoder):
        return RecurrentGraph(encoder)
    if isinstance(encoder, Transformer):
        return TransformerGraph(encoder)
    if isinstance(encoder, Combine):
        return CombineGraph(encoder)
    if hasattr(encoder, "pooled"):
        return CheckpointGraph(cast("HuggingFaceEncoder", encoder))
    raise InputError(f"format: want one that a {type(encoder).__name__} can be exported to, got onnx")


class BagGraph(nn.Module):
    def __init__(self, encoder: BagOfWords) -> None:
        super().__init__()
        self.table = encoder.embedding.weight

    def forward(self, tokens: Tensor, valid: Tensor) -> Tensor:
        return (F.embedding(tokens, self.table) * valid.unsqueeze(2)).sum(1)


class RecurrentGraph(nn.Module):
    """ONNX's own GRU or LSTM, which ends at each sentence's length, and has both forms of the GRU's cell."""

    def __init__(self, encoder: GRUEncoder | LSTMEncoder) -> None:
        super().__init__()
        layer = encoder.recurrent
        self.kind: Literal["GRU", "LSTM"] = "GRU" if isinstance(encoder, GRUEncoder) else "LSTM"
        self.table = encoder.embedding.weight
        self.units, self.directions = layer.hidden_size, 1 + layer.bidirectional
        self.attributes: dict[str, Any] = {
            "hidden_size": self.units,
            "direction": "bidirectional" if layer.bidirectional else "forward",
        }
        if isinstance(encoder, GRUEncoder):
            self.attributes["linear_before_reset"] = int(encoder.recurrent.reset_after)

        names = [f"l0{'_reverse' if direction else ''}" for direction in range(self.directions)]
        self.input_weights = self._stacked("weight_ih", names, layer)  # (directions, blocks · units, W)
        self.state_weights = self._stacked("weight_hh", names, layer)

        if layer.bias:
            biases = [self._stacked(name, names, layer) for name in ("bias_ih", "bias_hh")]
            self.biases = torch.cat(biases, dim=1)
        else:
            numbers = 2 * self.input_weights.shape[1]
            self.biases = torch.zeros(self.directions, numbers, device=self.input_weights.device)

    def _stacked(self, kind: str, names: Sequence[str], layer: nn.Module) -> Tensor:
        """The weights of a kind of all directions, with their blocks in ONNX's order."""
        blocks = BLOCKS[self.kind]
        each = [getattr(layer, f"{kind}_{name}").detach().chunk(len(blocks)) for name in names]
        return torch.stack([torch.cat([parts[block] for block in blocks]) for parts in each])

    def forward(self, tokens: Tensor, valid: Tensor) -> Tensor:
        L, B, H = tokens.shape[1], tokens.shape[0], self.units
        words = F.embedding(tokens.t(), self.table)  # (L, B, W)
        lengths = valid.sum(1).to(torch.int32)

        inputs = words, self.input_weights, self.state_weights, self.biases, lengths
        shapes = [(L, self.directions, B, H), (self.directions, B, H), (self.directions, B, H)]
        outputs = 2 if self.kind == "GRU" else 3  # of which an LSTM has the state of its cell too
        results = torch.onnx.ops.symbolic_multi_out(
            self.kind,
            inputs,
            self.attributes,
            dtypes=[words.dtype] * outputs,
            shapes=shapes[:outputs],
        )

        vectors = results[1].transpose(0, 1).reshape(B, self.directions * H)
        return torch.where(valid.any(1, keepdim=True), vectors, 0.0)


class TransformerGraph(nn.Module):
    """The Transformer on the padded batch; `Transformer` says what it computes."""

    def __init__(self, encoder: Transformer) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, tokens: Tensor, valid: Tensor) -> Tensor:
        encoder = self.encoder
        places = torch.arange(tokens.shape[1], device=tokens.device)
        words = encoder.embedding(tokens) + encoder.positions(places)
        words = math.sqrt(encoder.embedding_dim) * words

        # A softmax over no key is NaN, so a sentence without words attends to its padding.
        attended = (valid | ~valid.any(1, keepdim=True))[:, None, None]
        for layer in encoder.layers:
            words = self._layer(cast("TransformerLayer", layer), words, attended)

        counted = valid.unsqueeze(2).to(words.dtype)
        result: Tensor = (encoder.norm(words) * counted).sum(1) / counted.sum(1).clamp(min=1)
        return result

    def _layer(self, layer: TransformerLayer, words: Tensor, attended: Tensor) -> Tensor:
        B, L, D = words.shape
        projected = layer.query_key_value(layer.attention_norm(words))
        queries, keys, values = projected.view(B, L, 3, layer.heads, -1).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(queries, keys, values, attn_mask=attended)

        words = words + layer.output(heads.transpose(1, 2).reshape(B, L, D))
        result: Tensor = words + layer.contract(F.relu(layer.expand(layer.feedforward_norm(words))))
        return result


class CombineGraph(nn.Module):
    def __init__(self, encoder: Combine) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(graph_of(cast("Encoder", each)) for each in encoder.encoders)

    def forward(self, tokens: Tensor, valid: Tensor) -> Tensor:
        return torch.cat([encoder(tokens, valid) for encoder in self.encoders], dim=1)


class CheckpointGraph(nn.Module):
    """A Hugging Face checkpoint with its pooling."""

    def __init__(self, encoder: HuggingFaceEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, tokens: Tensor, valid: Tensor) -> Tensor:
        # Some models derive the positions of words from which ids are padding ids.
        padding = self.encoder.tokenizer.pad_token_id or 0
        blank = ~valid.any(1, keepdim=True)
        output = self.encoder.model(
            input_ids=torch.where(valid, tokens, padding), attention_mask=(valid | blank).long()
        )
        return torch.where(blank, 0.0, self.encoder.pooled(output, valid))
