"""Initial values of the encoders' parameters: those of the QuickThoughts paper's code, or torch's."""

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from typing_extensions import Self

from fastqt.checks import FLOATING, check_option, check_size, check_tensor
from fastqt.nn.gru import GRU
from fastqt.nn.lag import up_to_date

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
    table = WordTable(vocab_size, dim, sparse=sparse)
    if vectors is not None:
        check_vectors(vectors)
        if vectors.shape != table.weight.shape:
            raise ValueError(f"vectors: want shape ({vocab_size}, {dim}), got {tuple(vectors.shape)}")
    table.initialise(init, vectors)
    table.weight.requires_grad_(not freeze)
    return table


class WordTable(nn.Embedding):
    """A table whose `reset_parameters` gives it the values that `embedding_table` gave it at first.

    Its rows may be behind (`fastqt.nn.lag`): they are brought up to date before this class reads them.
    """

    init: Init = "torch"
    from_vectors = False
    vectors: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.sparse:
            up_to_date(self.weight, input)
        return super().forward(input)

    def train(self, mode: bool = True) -> Self:
        if not mode:
            up_to_date(self.weight)
        return super().train(mode)

    def _save_to_state_dict(self, *arguments: Any) -> None:
        up_to_date(self.weight)
        super()._save_to_state_dict(*arguments)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        up_to_date(self.weight)  # so that no row that is loaded is moved by what it has missed before
        super()._load_from_state_dict(*arguments)

    def initialise(self, init: Init, vectors: Tensor | None) -> None:
        """Sets its values, (V, D) `vectors` if these are given."""
        self.init, self.from_vectors = init, vectors is not None
        if vectors is not None and not self.weight.is_meta:
            with torch.no_grad():
                self.weight.copy_(vectors)
            return
        self.vectors = vectors  # Kept where they cannot be copied yet.
        if init == "paper":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the initial values.

        RuntimeError if these were vectors, which are kept for a table that was made on the meta device alone.
        """
        if self.vectors is not None:
            with torch.no_grad():
                self.weight.copy_(self.vectors)
        elif self.from_vectors:
            raise RuntimeError(
                "reset_parameters: want a table that was drawn, got one of vectors, which it does not keep; "
                "make the encoder again"
            )
        elif self.init == "paper":
            nn.init.uniform_(self.weight, -0.1, 0.1)
        else:
            super().reset_parameters()


class Redrawn(nn.Module):
    """A layer of torch whose initial values `redraw` replaces.

    Its constructor draws torch's values first, so that a seed gives what follows the values it always gave.
    """

    replaces = False

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.replaces = True
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the initial values."""
        if self.replaces:
            self.redraw()
        else:
            super().reset_parameters()  # type: ignore[misc]

    def redraw(self) -> None:
        """Sets those that this class has in place of torch's."""
        raise NotImplementedError


class PaperGRU(Redrawn, GRU):
    """A GRU that is initialised as TensorFlow 1 does it, with which the paper's code was written.

    TensorFlow concatenates input and state, so its Glorot-uniform initialiser sees two kernels: (W + H, 2H)
    of the gates r, z, and (W + H, H) of the candidate n. The biases are 1 (r, z) and 0 (n).
    """

    def redraw(self) -> None:
        H = self.hidden_size
        for name, values in (*self.named_parameters(), *self.named_buffers()):
            if name.startswith("weight"):
                _glorot(values[: 2 * H], self.input_size + H)
                _glorot(values[2 * H :], self.input_size + H)
            else:
                nn.init.zeros_(values)
                if name.startswith("bias_ih"):
                    nn.init.ones_(values[: 2 * H])


class PaperLSTM(Redrawn, nn.LSTM):
    """An LSTM that is initialised as TensorFlow 1 does it: Glorot-uniform on the whole kernel (W + H, 4H).

    The bias of the forget gate is 1, the others are 0.
    """

    def redraw(self) -> None:
        H = self.hidden_size
        for name, values in self.named_parameters():
            if name.startswith("weight"):
                _glorot(values, self.input_size + H)
            else:
                nn.init.zeros_(values)
                if name.startswith("bias_ih"):
                    nn.init.ones_(values[H : 2 * H])


class GlorotLinear(Redrawn, nn.Linear):
    """A linear layer of several blocks of outputs, each drawn Glorot-uniformly, and of biases of 0.

    Whoever makes it calls `reset_parameters`.
    """

    def __init__(self, in_features: int, out_features: int, blocks: int = 1) -> None:
        nn.Linear.__init__(self, in_features, out_features)  # which draws torch's values alone
        self.blocks, self.replaces = blocks, True

    def redraw(self) -> None:
        for kernel in self.weight.chunk(self.blocks):
            nn.init.xavier_uniform_(kernel)
        nn.init.zeros_(self.bias)


def reset_children(module: nn.Module) -> None:
    """Gives the parameters and buffers of all submodules their initial values.

    TypeError for a module that has some and no method `reset_parameters`: after `to_empty` their values would
    be what was in the memory.
    """
    for child in module.children():
        reset = getattr(child, "reset_parameters", None)
        if callable(reset):
            reset()
        elif any(True for _ in (*child.parameters(recurse=False), *child.buffers(recurse=False))):
            raise TypeError(f"{type(child).__name__}: want a method reset_parameters, got none")
        else:
            reset_children(child)


def check_vectors(vectors: Tensor) -> None:
    """Raises TypeError unless word vectors are a floating-point tensor."""
    check_tensor("vectors", vectors)
    if vectors.dtype not in FLOATING:
        raise TypeError(f"vectors: want a floating-point dtype of 16 to 64 bits, got {vectors.dtype}")


def _glorot(rows: Tensor, fan_in: int) -> None:
    """Glorot-uniform values for `rows` of a weight matrix; the number of rows is the fan-out."""
    bound = math.sqrt(6 / (fan_in + len(rows)))
    nn.init.uniform_(rows, -bound, bound)
