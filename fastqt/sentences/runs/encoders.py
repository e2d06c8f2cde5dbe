"""How the sentence encoders are made of the settings of a run, and exported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Generic, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastqt.nn import BagOfWords, Combine, Encoder, GRUEncoder, LSTMEncoder, Transformer
from fastqt.nn.combine import Channel, channels
from fastqt.nn.sparse_gradients import Mode
from fastqt.nn.transformer import TransformerLayer
from fastqt.sentences.options.encoders import ENCODERS, EncoderKind
from fastqt.sentences.runs.config import TrainConfig

# The blocks of ONNX's weights, each by its number among torch's. A GRU has z, r, n, and in torch r, z, n; an
# LSTM has the gates input, output, forget, cell, and in torch input, forget, cell, output.
BLOCKS = {"GRU": (1, 0, 2), "LSTM": (0, 3, 1, 2)}

E = TypeVar("E", bound=Encoder)


class EncoderForm(Generic[E]):
    """Of these methods every form has `build`, and either `vectors` or `graph`."""

    def build(self, config: TrainConfig, vocab_size: int, *, pretrained: bool) -> E:
        """A freshly initialised encoder, on the CPU; for the arguments see `build_model`."""
        raise NotImplementedError

    def graph(self, encoder: E) -> nn.Module:
        """The module of `vectors`, which an export to ONNX traces."""
        return Graph(self, encoder)

    def vectors(self, encoder: E, tokens: Tensor, valid: Tensor) -> Tensor:
        """The encoder's vectors (B, E), by operations that ONNX has.

        Tokens (B, L) are 0 as padding, and `valid` (B, L) says where words are.
        """
        raise NotImplementedError


class Graph(nn.Module):
    def __init__(self, form: EncoderForm[E], encoder: E) -> None:
        super().__init__()
        self.form, self.encoder = form, encoder

    def forward(self, tokens: Tensor, valid: Tensor) -> Tensor:
        return self.form.vectors(self.encoder, tokens, valid)


def load_form(kind: EncoderKind) -> EncoderForm[Any]:
    """Imports the form of an encoder, and torch with it."""
    module, name = kind.form.split(".")
    form: EncoderForm[Any] = getattr(import_module(f"{__package__}.{module}"), name)()
    return form


def form_of(encoder: Encoder) -> EncoderForm[Any]:
    """The form of an encoder's class."""
    name = type(encoder).__name__
    return load_form(next(kind for kind in ENCODERS.values() if kind.encoder == name))


class BagOfWordsForm(EncoderForm[BagOfWords]):
    def build(self, config: TrainConfig, vocab_size: int, *, pretrained: bool) -> BagOfWords:
        mode: Mode = "mean" if config.encoder_kind.is_mean else "sum"
        return BagOfWords(vocab_size, config.word_dim, mode=mode, sparse=True, init=config.init)

    def vectors(self, encoder: BagOfWords, tokens: Tensor, valid: Tensor) -> Tensor:
        counted = valid.unsqueeze(2).to(encoder.embedding.weight.dtype)
        sums = (F.embedding(tokens, encoder.embedding.weight) * counted).sum(1)
        return sums / counted.sum(1).clamp(min=1) if encoder.mode == "mean" else sums


class GRUForm(EncoderForm[GRUEncoder]):
    def build(self, config: TrainConfig, vocab_size: int, *, pretrained: bool) -> GRUEncoder:
        return GRUEncoder(vocab_size, reset_after=config.cell == "reset-after", **_shared(config))

    def graph(self, encoder: GRUEncoder) -> nn.Module:
        return RecurrentGraph("GRU", encoder, linear_before_reset=int(encoder.recurrent.reset_after))


class LSTMForm(EncoderForm[LSTMEncoder]):
    def build(self, config: TrainConfig, vocab_size: int, *, pretrained: bool) -> LSTMEncoder:
        return LSTMEncoder(vocab_size, **_shared(config))

    def graph(self, encoder: LSTMEncoder) -> nn.Module:
        return RecurrentGraph("LSTM", encoder)


def _shared(config: TrainConfig) -> dict[str, Any]:
    """The options of both encoders."""
    return {
        "word_dim": config.word_dim,
        "hidden_size": config.hidden_size,
        "bidirectional": config.encoder_kind.bidirectional,
        "init": config.init,
        "sparse": True,
    }


class RecurrentGraph(nn.Module):
    """ONNX's own GRU or LSTM, which ends at each sentence's length, and has both forms of the GRU's cell."""

    def __init__(
        self, kind: Literal["GRU", "LSTM"], encoder: GRUEncoder | LSTMEncoder, **attributes: Any
    ) -> None:
        super().__init__()
        layer = encoder.recurrent
        self.kind = kind
        self.table = encoder.embedding.weight
        self.units, self.directions = layer.hidden_size, 1 + layer.bidirectional
        self.attributes: dict[str, Any] = {
            "hidden_size": self.units,
            "direction": "bidirectional" if layer.bidirectional else "forward",
            **attributes,
        }

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
