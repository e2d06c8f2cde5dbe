"""The two forms of the GRU cell: the matrix products of one time step, forward and backward.

    reset-after    n = tanh(W x + b + r ∘ (U h + c))      torch, cuDNN
    reset-before   n = tanh(W x + b + U (r ∘ h))          Cho et al. 2014, TensorFlow 1
    both           r, z = sigmoid(W x + U h + b),  h' = n + z ∘ (h − n)

The elementwise operations are those of the native extension, or of `fastqt.nn.gru.gates` without it.
In all shapes, b is the number of sequences that are active in the step, and H is the hidden size.
"""

from typing import Protocol

import torch
from torch import Tensor

from fastqt.engines.own_products import multiply
from fastqt.nn.gru import gates as torch_gates
from fastqt.nn.gru.native import PackedProduct, supports_native


class Cell(Protocol):
    """One time step on matrices of b rows.

    Only the first `live` rows have a state that may differ from zero, because sequences may start at this
    step. The recurrent products skip the other rows.
    """

    # Which of the gates r, z, n (0, 1, 2) each of the first three column blocks of grad_gates holds.
    block_order: tuple[int, int, int]
    keeps_hidden_n: bool  # whether the backward step needs `hidden_n`, the n block of U h + c

    def forward(
        self,
        gates: Tensor,  # (b, 3H) in: W x; out: r, z, n
        bias: Tensor,  # (4, H) from combined_bias
        state: Tensor,  # (b, H)
        live: int,
        hidden_n: Tensor,  # (b, H) out; (0, H) if it is not kept
        next: Tensor,  # (rows of the next step, H) out: new states of the sequences that go on
        final: Tensor,  # (>= b, H) out: new states of the sequences that end, in rows len(next) to b
        output: Tensor,  # (b, H) out: all new states; (0, H) if they are not wanted
    ) -> None: ...

    def backward(
        self,
        gates: Tensor,  # (b, 3H)
        state: Tensor,  # (b, H)
        live: int,  # the first `live` rows of `state` need a gradient
        hidden_n: Tensor,  # (b, H) or (0, H)
        grad_output: Tensor,  # (b, H); (0, H) means zero
        carry: Tensor,  # (>= b, H) in: gradient of the new states; out: of the first `live` old states
        grad_gates: Tensor,  # (b, 4H) out
    ) -> None: ...

    def add_weight_gradient(self, grad_gates: Tensor, states: Tensor, grad_w_hh: Tensor) -> None:
        """Adds the gradient of w_hh, (3H, H), from grad_gates (rows, 4H) and old states (rows, H)."""
        ...

    def bias_gradients(self, grad_bias: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of b_ih and b_hh, (3H,) each, from the column sums of grad_gates, (4H,)."""
        ...


def combined_bias(w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None, reset_after: bool) -> Tensor:
    """The biases per gate, (4, H), as the elementwise operators read them.

    They are those of r, z and n, and c, which reset-after adds to the n block of U h.
    """
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
    """The reset-after cell.

    grad_gates holds the blocks n, r, z and hidden_n in this order. Its first three blocks then make the
    gradient of W x, and its last three that of U h, so that each is one matrix product. `w_hh` (3H, H) is
    contiguous, a step has `rows` rows at most, and `backward` prepares for backward steps in place of forward
    ones. With `bfloat16`, the factors of all products are rounded to it where the processor multiplies such.
    """

    block_order = (2, 0, 1)
    keeps_hidden_n = True

    def __init__(self, w_hh: Tensor, rows: int, *, backward: bool = False, bfloat16: bool = False) -> None:
        self.bfloat16 = bfloat16
        self.kernels = torch.ops.fastqt if supports_native(w_hh) else torch_gates
        self.product = PackedProduct(w_hh if backward else w_hh.t(), rows, bfloat16=bfloat16)
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
        left = grad_gates[:, states.shape[1] :].t()
        multiply(grad_w_hh, left, states, add=True, bfloat16=self.bfloat16)

    def bias_gradients(self, grad_bias: Tensor) -> tuple[Tensor, Tensor]:
        n, r, z, hidden_n = grad_bias.chunk(4)
        return torch.cat([r, z, n]), torch.cat([r, z, hidden_n])


class ResetBefore:
    """The reset-before cell, with the arguments of `ResetAfter`.

    It takes two products a step, because the product of the n block multiplies r ∘ h. grad_gates holds the
    blocks r, z and n, and then r ∘ h, which the gradient of w_hh needs.
    """

    block_order = (0, 1, 2)
    keeps_hidden_n = False

    def __init__(self, w_hh: Tensor, rows: int, *, backward: bool = False, bfloat16: bool = False) -> None:
        H = w_hh.shape[1]
        self.bfloat16 = bfloat16
        w_rz, w_n = w_hh[: 2 * H], w_hh[2 * H :]
        self.kernels = torch.ops.fastqt if supports_native(w_hh) else torch_gates
        self.product_rz = PackedProduct(w_rz if backward else w_rz.t(), rows, bfloat16=bfloat16)
        self.product_n = PackedProduct(w_n if backward else w_n.t(), rows, bfloat16=bfloat16)
        self.recurrent_rz = w_hh.new_empty(0 if backward else rows, 2 * H)
        self.recurrent_n = w_hh.new_empty(0 if backward else rows, H)
        self.reset_state = w_hh.new_empty(rows, H)  # forward: r ∘ h; backward: its gradient

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
        rz, n, reset_state = grad_gates[:, : 2 * H], grad_gates[:, 2 * H : 3 * H], grad_gates[:, 3 * H :]
        multiply(grad_w_hh[: 2 * H], rz.t(), states, add=True, bfloat16=self.bfloat16)
        multiply(grad_w_hh[2 * H :], n.t(), reset_state, add=True, bfloat16=self.bfloat16)

    def bias_gradients(self, grad_bias: Tensor) -> tuple[Tensor, Tensor]:
        grad_rzn = grad_bias[: 3 * len(grad_bias) // 4]
        return grad_rzn.clone(), grad_rzn.clone()
