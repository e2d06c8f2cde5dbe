"""The two GRU cells: which products a time step takes, forwards and backwards.

    reset-after    n = tanh(W x + b + r ∘ (U h + c))      torch, cuDNN
    reset-before   n = tanh(W x + b + U (r ∘ h))          Cho et al. 2014, TensorFlow 1
    both           r, z = sigmoid(W x + U h + b),  h' = n + z ∘ (h − n)

The elementwise work is done by the native operators or by their twins in `fastqt.nn.gru.gates`.
In all shapes b is the number of active rows, H the hidden size.
"""

from typing import Protocol

import torch
from torch import Tensor

from fastqt.nn.gru import gates as torch_gates
from fastqt.nn.gru.native import Product, serves


class Cell(Protocol):
    """One time step on matrices of b rows; `live` of them come with a state that is not zero."""

    # Which of r, z, n (0, 1, 2) each of the first three column blocks of grad_gates holds.
    order: tuple[int, int, int]
    # Whether the step's backward needs `hidden_n`.
    keeps_hidden_n: bool

    def forward(
        self,
        gates: Tensor,  # (b, 3H) in: W x; out: r, z, n
        bias: Tensor,  # from combined_bias
        state: Tensor,  # (b, H)
        live: int,
        hidden_n: Tensor,  # (b, H) or (0, H)
        next: Tensor,  # (_, H) out
        final: Tensor,  # (>= b, H) out: rows that `next` has no place for
        output: Tensor,  # (b, H) out, or (0, H)
    ) -> None: ...

    def backward(
        self,
        gates: Tensor,  # (b, 3H)
        state: Tensor,  # (b, H)
        live: int,  # rows whose state takes a gradient
        hidden_n: Tensor,  # (b, H) or (0, H)
        grad_output: Tensor,  # (b, H) or (0, H)
        carry: Tensor,  # (>= b, H) in: gradient of the new states; out: of the first `live` old ones
        grad_gates: Tensor,  # (b, 4H) out
    ) -> None: ...

    def add_weight_gradient(self, grad_gates: Tensor, states: Tensor, grad_w_hh: Tensor) -> None:
        """grad_w_hh += what the rows of `grad_gates` and `states` give."""
        ...

    def bias_gradients(self, grad_bias: Tensor) -> tuple[Tensor, Tensor]:
        """From the column sums of grad_gates, (4H,): the gradients of b_ih and b_hh, (3H,) each."""
        ...


def combined_bias(w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None, reset_after: bool) -> Tensor:
    """The biases as the kernels want them: (4, H) of r, z, n and of the n block of U h."""
    H = w_hh.shape[1]
    bias = w_hh.new_zeros(4, H)
    if b_ih is not None:
        bias[:3] += b_ih.view(3, H)
    if b_hh is not None and reset_after:
        bias[[0, 1, 3]] += b_hh.view(3, H)
    elif b_hh is not None:
        bias[:3] += b_hh.view(3, H)
    return bias


class ResetAfter:
    order = (2, 0, 1)
    keeps_hidden_n = True

    def __init__(self, w_hh: Tensor, rows: int, *, backward: bool = False) -> None:
        self.kernels = torch.ops.fastqt if serves(w_hh) else torch_gates
        self.product = Product(w_hh if backward else w_hh.t(), rows)
        self.recurrent = w_hh.new_empty(0 if backward else rows, len(w_hh))

    def forward(
        self,
        gates: Tensor,
        bias: Tensor,
        state: Tensor,
        live: int,
        hidden_n: Tensor,
        next: Tensor,
        final: Tensor,
        output: Tensor,
    ) -> None:
        recurrent = self.recurrent[:live]
        self.product(state[:live], recurrent)
        self.kernels.gru_reset_after_(gates, recurrent, bias, state, hidden_n, next, final, output)

    def backward(
        self,
        gates: Tensor,
        state: Tensor,
        live: int,
        hidden_n: Tensor,
        grad_output: Tensor,
        carry: Tensor,
        grad_gates: Tensor,
    ) -> None:
        H = state.shape[1]
        self.kernels.gru_reset_after_backward_(gates, hidden_n, state, grad_output, carry, grad_gates)
        self.product(grad_gates[:live, H:], carry[:live], accumulate=True)

    def add_weight_gradient(self, grad_gates: Tensor, states: Tensor, grad_w_hh: Tensor) -> None:
        grad_w_hh.addmm_(grad_gates[:, states.shape[1] :].t(), states)

    def bias_gradients(self, grad_bias: Tensor) -> tuple[Tensor, Tensor]:
        n, r, z, hidden_n = grad_bias.chunk(4)
        return torch.cat([r, z, n]), torch.cat([r, z, hidden_n])


class ResetBefore:
    order = (0, 1, 2)
    keeps_hidden_n = False

    def __init__(self, w_hh: Tensor, rows: int, *, backward: bool = False) -> None:
        H = w_hh.shape[1]
        w_rz, w_n = w_hh[: 2 * H], w_hh[2 * H :]
        self.kernels = torch.ops.fastqt if serves(w_hh) else torch_gates
        self.product_rz = Product(w_rz if backward else w_rz.t(), rows)
        self.product_n = Product(w_n if backward else w_n.t(), rows)
        self.recurrent_rz = w_hh.new_empty(0 if backward else rows, 2 * H)
        self.recurrent_n = w_hh.new_empty(0 if backward else rows, H)
        self.reset_state = w_hh.new_empty(rows, H)  # backwards: its gradient

    def forward(
        self,
        gates: Tensor,
        bias: Tensor,
        state: Tensor,
        live: int,
        hidden_n: Tensor,
        next: Tensor,
        final: Tensor,
        output: Tensor,
    ) -> None:
        recurrent_rz, recurrent_n = self.recurrent_rz[:live], self.recurrent_n[:live]
        reset_state = self.reset_state[: len(state)]
        self.product_rz(state[:live], recurrent_rz)
        self.kernels.gru_reset_before_(gates, recurrent_rz, bias, state, reset_state)
        self.product_n(reset_state[:live], recurrent_n)
        self.kernels.gru_reset_before_candidate_(gates, recurrent_n, bias, state, next, final, output)

    def backward(
        self,
        gates: Tensor,
        state: Tensor,
        live: int,
        hidden_n: Tensor,
        grad_output: Tensor,
        carry: Tensor,
        grad_gates: Tensor,
    ) -> None:
        H = state.shape[1]
        self.kernels.gru_reset_before_backward_(gates, state, grad_output, carry, grad_gates)
        grad_reset_state = self.reset_state[:live]
        self.product_n(grad_gates[:live, 2 * H : 3 * H], grad_reset_state)
        self.kernels.gru_reset_before_backward_reset_(gates, state, grad_reset_state, carry, grad_gates)
        self.product_rz(grad_gates[:live, : 2 * H], carry[:live], accumulate=True)

    def add_weight_gradient(self, grad_gates: Tensor, states: Tensor, grad_w_hh: Tensor) -> None:
        H = states.shape[1]
        grad_w_hh[: 2 * H].addmm_(grad_gates[:, : 2 * H].t(), states)
        grad_w_hh[2 * H :].addmm_(grad_gates[:, 2 * H : 3 * H].t(), grad_gates[:, 3 * H :])

    def bias_gradients(self, grad_bias: Tensor) -> tuple[Tensor, Tensor]:
        of_gates = grad_bias[: 3 * len(grad_bias) // 4]
        return of_gates.clone(), of_gates.clone()
