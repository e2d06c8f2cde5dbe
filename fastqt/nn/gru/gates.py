"""The elementwise operations of a GRU step in torch.

Each function has the name, arguments and result of a native operator in csrc/cpu/gru.cpp. It is used where
the native one does not exist or does not support the device or dtype, and as its reference in the tests.

All arguments are matrices, and results are written in place. b is the number of sequences that are active in
the step, and H is the hidden size.

    gates        blocks of H columns in torch's order r, z, n
    bias         (4, H): one row for each of r, z, n, and one for the n block of U h
    recurrent    the recurrent product. Rows that it lacks are those of sequences with a zero state, for which
                 the product is zero.
    hidden_n, output, grad_output
                 may have no rows. A result without rows is not wanted; a gradient without rows is zero.
    next, final  new states are written to `next` as far as it has rows, and the others to `final`
    carry        in: the gradient of the new state from later steps. out: the part of the old state's gradient
                 that does not pass through the recurrent product.
"""

import torch
from torch import Tensor


def gru_reset_after_(
    gates: Tensor,  # (b, 3H) in: W x; out: r, z, n
    recurrent: Tensor,  # (<= b, 3H) U h
    bias: Tensor,
    state: Tensor,  # (b, H) h
    hidden_n: Tensor,  # (b, H) or (0, H) out: the n block of U h, plus its bias
    next: Tensor,  # (_, H)
    final: Tensor,  # (>= b, H)
    output: Tensor,  # (b, H)
) -> None:
    H, live = state.shape[1], len(recurrent)
    r, z, n = gates.chunk(3, dim=1)
    gates[:live, : 2 * H].add_(recurrent[:, : 2 * H])
    r.add_(bias[0]).sigmoid_()
    z.add_(bias[1]).sigmoid_()
    recurrent_n = bias[3].repeat(len(gates), 1)
    recurrent_n[:live].add_(recurrent[:, 2 * H :])
    n.add_(bias[2]).addcmul_(r, recurrent_n).tanh_()
    if len(hidden_n):
        hidden_n.copy_(recurrent_n)
    _store(n + z * (state - n), next, final, output)


def gru_reset_after_backward_(
    gates: Tensor,  # (b, 3H)
    hidden_n: Tensor,  # (b, H)
    state: Tensor,  # (b, H)
    grad_output: Tensor,  # (b, H)
    carry: Tensor,  # (>= b, H)
    grad_gates: Tensor,  # (b, 4H) out: gradients of n, r, z before their activations, and of hidden_n
) -> None:
    b = len(state)
    r, z, n = gates.chunk(3, dim=1)
    grad_n, grad_r, grad_z, grad_hidden_n = grad_gates.chunk(4, dim=1)
    grad = _state_gradient(carry[:b], grad_output)
    grad_n.copy_(grad * (1 - z) * (1 - n * n))
    grad_r.copy_(grad_n * hidden_n * r * (1 - r))
    grad_z.copy_(grad * (state - n) * z * (1 - z))
    grad_hidden_n.copy_(grad_n * r)
    carry[:b] = grad * z


def gru_reset_before_(
    gates: Tensor,  # (b, 3H) in: W x; out: r, z, and the n block unchanged
    recurrent: Tensor,  # (<= b, 2H) the r and z blocks of U h
    bias: Tensor,
    state: Tensor,  # (b, H)
    reset_state: Tensor,  # (b, H) out: r ∘ h
) -> None:
    r, z, _ = gates.chunk(3, dim=1)
    gates[: len(recurrent), : recurrent.shape[1]].add_(recurrent)
    r.add_(bias[0]).sigmoid_()
    z.add_(bias[1]).sigmoid_()
    torch.mul(r, state, out=reset_state)


def gru_reset_before_candidate_(
    gates: Tensor,  # (b, 3H) in: r, z, and the n block of W x; out: r, z, n
    recurrent: Tensor,  # (<= b, H) U (r ∘ h)
    bias: Tensor,
    state: Tensor,  # (b, H)
    next: Tensor,  # (_, H)
    final: Tensor,  # (>= b, H)
    output: Tensor,  # (b, H)
) -> None:
    _, z, n = gates.chunk(3, dim=1)
    n[: len(recurrent)].add_(recurrent)
    n.add_(bias[2]).tanh_()
    _store(n + z * (state - n), next, final, output)


def gru_reset_before_backward_(
    gates: Tensor,  # (b, 3H)
    state: Tensor,  # (b, H)
    grad_output: Tensor,  # (b, H)
    carry: Tensor,  # (>= b, H)
    grad_gates: Tensor,  # (b, 4H) out: gradients of z, n before activation in blocks 1, 2; r ∘ h in block 3
) -> None:
    b = len(state)
    r, z, n = gates.chunk(3, dim=1)
    _, grad_z, grad_n, reset_state = grad_gates.chunk(4, dim=1)
    grad = _state_gradient(carry[:b], grad_output)
    grad_z.copy_(grad * (state - n) * z * (1 - z))
    grad_n.copy_(grad * (1 - z) * (1 - n * n))
    torch.mul(r, state, out=reset_state)
    carry[:b] = grad * z


def gru_reset_before_backward_reset_(
    gates: Tensor,  # (b, 3H)
    state: Tensor,  # (b, H)
    grad_reset_state: Tensor,  # (<= b, H); the state of the rows that it lacks is zero
    carry: Tensor,  # (>= b, H) in and out: r ∘ grad_reset_state is added
    grad_gates: Tensor,  # (b, 4H) out: gradient of r before its activation in block 0
) -> None:
    H, live = state.shape[1], len(grad_reset_state)
    r = gates[:live, :H]
    grad_r = grad_gates[:, :H]
    grad_r[:live] = grad_reset_state * state[:live] * r * (1 - r)
    grad_r[live:] = 0
    carry[:live].addcmul_(grad_reset_state, r)


def _store(new: Tensor, next: Tensor, final: Tensor, output: Tensor) -> None:
    b, kept = len(new), min(len(new), len(next))
    next[:kept] = new[:kept]
    final[kept:b] = new[kept:]
    if len(output):
        output.copy_(new)


def _state_gradient(carry: Tensor, grad_output: Tensor) -> Tensor:
    return carry + grad_output if len(grad_output) else carry.clone()
