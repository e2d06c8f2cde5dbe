"""Initial values of the encoders' parameters: those of the QuickThoughts paper's code, or torch's."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fastqt.checks import FLOATING, check_option, check_size, check_tensor

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
    """An embedding table (V, D), whose initial values are a copy of `vectors` if these are given.

    Without vectors, `init` "paper" draws U[-0.1, 0.1] and "torch" N(0, 1). A table that is frozen is not
    trained, and a sparse one has a sparse gradient. Sizes and shapes are checked.
    """
    check_option("init", init, get_args(Init))
    for name, size in (("vocab_size", vocab_size), ("dim", dim)):
        check_size(name, size)
    table = nn.Embedding(vocab_size, dim, sparse=sparse)
    if vectors is not None:
        check_vectors(vectors)
        if vectors.shape != table.weight.shape:
            raise ValueError(f"vectors: want shape ({vocab_size}, {dim}), got {tuple(vectors.shape)}")
        with torch.no_grad():
            table.weight.copy_(vectors)
    elif init == "paper":
        nn.init.uniform_(table.weight, -0.1, 0.1)
    table.weight.requires_grad_(not freeze)
    return table


def check_vectors(vectors: Tensor) -> None:
    """Raises TypeError unless word vectors are a floating-point tensor."""
    check_tensor("vectors", vectors)
    if vectors.dtype not in FLOATING:
        raise TypeError(f"vectors: want a floating-point dtype of 16 to 64 bits, got {vectors.dtype}")


def init_gru(gru: nn.RNNBase) -> None:
    """Initialises a GRU as TensorFlow 1 does, with which the paper's code was written.

    TensorFlow concatenates input and state, so its Glorot-uniform initialiser sees two kernels: (W + H, 2H)
    of the gates r, z, and (W + H, H) of the candidate n. The biases are 1 (r, z) and 0 (n).
    """
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
    """Initialises an LSTM as TensorFlow 1 does: Glorot-uniform on the concatenated kernel (W + H, 4H).

    The bias of the forget gate is 1, the others are 0.
    """
    H = lstm.hidden_size
    for name, parameter in lstm.named_parameters():
        if name.startswith("weight"):
            _glorot(parameter, lstm.input_size + H)
        else:
            nn.init.zeros_(parameter)
            if name.startswith("bias_ih"):
                nn.init.ones_(parameter[H : 2 * H])


def _glorot(rows: Tensor, fan_in: int) -> None:
    """Glorot-uniform values for `rows` of a weight matrix; the number of rows is the fan-out."""
    bound = math.sqrt(6 / (fan_in + len(rows)))
    nn.init.uniform_(rows, -bound, bound)
