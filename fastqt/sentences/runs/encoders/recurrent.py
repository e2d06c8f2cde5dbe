"""How the recurrent encoders are made and exported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastqt.nn import GRUEncoder, LSTMEncoder
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.encoders.forms import EncoderForm

# The blocks of ONNX's weights, each by its number among torch's. A GRU has z, r, n, and in torch r, z, n; an
# LSTM has the gates input, output, forget, cell, and in torch input, forget, cell, output.
BLOCKS = {"GRU": (1, 0, 2), "LSTM": (0, 3, 1, 2)}


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
