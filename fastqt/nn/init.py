"""Initial values of the encoders' parameters: the paper's, or torch's."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

Init = Literal["paper", "torch"]


def embedding_table(
    vocab_size: int,
    dim: int,
    *,
    vectors: Tensor | None = None,
    freeze: bool = False,
    sparse: bool = False,
    init: Init = "paper",
) -> nn.Embedding:
    """A (vocab_size, dim) table: a copy of `vectors` if given, else U[-0.1, 0.1] or torch's N(0, 1)."""
    if init not in ("paper", "torch"):
        raise ValueError(f"init: expected 'paper' or 'torch', got {init!r}")
    table = nn.Embedding(vocab_size, dim, sparse=sparse)
    if vectors is not None:
        if vectors.shape != table.weight.shape:
            raise ValueError(f"vectors: expected shape ({vocab_size}, {dim}), got {tuple(vectors.shape)}")
        with torch.no_grad():
            table.weight.copy_(vectors)
    elif init == "paper":
        nn.init.uniform_(table.weight, -0.1, 0.1)
    table.weight.requires_grad_(not freeze)
    return table


def init_gru(gru: nn.RNNBase) -> None:
    """Glorot-uniform on two concatenated kernels, (W + H, 2H) of r, z and (W + H, H) of n; biases 1, 1, 0."""
    H = gru.hidden_size
    for name, parameter in gru.named_parameters():
        if name.startswith("weight"):
            _glorot(parameter[: 2 * H], gru.input_size + H)
            _glorot(parameter[2 * H :], gru.input_size + H)
        else:
            nn.init.zeros_(parameter)
            if name.startswith("bias_ih"):
                nn.init.ones_(parameter[: 2 * H])


def init_lstm(lstm: nn.LSTM) -> None:
    """Glorot-uniform on the concatenated kernel (W + H, 4H); biases 1 for the forget gate, 0 else."""
    H = lstm.hidden_size
    for name, parameter in lstm.named_parameters():
        if name.startswith("weight"):
            _glorot(parameter, lstm.input_size + H)
        else:
            nn.init.zeros_(parameter)
            if name.startswith("bias_ih"):
                nn.init.ones_(parameter[H : 2 * H])


def _glorot(rows: Tensor, fan_in: int) -> None:
    bound = math.sqrt(6 / (fan_in + len(rows)))
    nn.init.uniform_(rows, -bound, bound)
