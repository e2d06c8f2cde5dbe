"""The elementwise half of a GRU step, in torch ops: twins of the native operators in csrc/cpu/gru.cpp.

Rows are the b active sentences of one time step, H the hidden size. All tensors are matrices and results
are written in place. `gates` holds blocks of H columns in torch's order r, z, n; `bias` (4, H) holds one
row for each of r, z, n and one for the n block of U h. A `recurrent` with fewer rows than b leaves the
others starting from a zero state. Where `hidden_n`, `output` or `grad_output` has no rows it is not wanted,
or zero. A new state goes to `next` while that has a row for it, and to `final` after. `carry` comes as the
gradient of the new state from later steps and leaves as what it gives to the old state directly.

The twins serve devices and installations without the extension, and check it in the tests.
"""

import torch
from torch import Tensor


def gru_reset_after_(
    gates: Tensor,  # (b, 3H) in: W x; out: r, z, n
    recurrent: Tensor,  # (<= b, 3H) U h
    bias: Tensor,
    state: Tensor,  # (b, H) h
    hidden_n: Tensor,  # (b, H) out: the n block of U h + bias
    next: Tensor,  # (_, H)
    final: Tensor,  # (>= b, H)
    output: Tensor,  # (b, H)
) -> None:
    H, live = state.shape[1], len(recurrent)
    r, z, n = gates.chunk(3, dim=1)
    gates[:live, : 2 * H].add_(recurrent[:, : 2 * H])
    r.add_(bias[0]).sigmoid_()
    z.add_(bias[1]).sigmoid_()
    of_state = bias[3].repeat(len(gates), 1)
    of_state[:live].add_(recurrent[:, 2 * H :])
    n.add_(bias[2]).addcmul_(r, of_state).tanh_()
    if len(hidden_n):
        hidden_n.copy_(of_state)
    _store(n + z * (state - n), next, final, output)


def gru_reset_after_backward_(
    gates: Tensor,  # (b, 3H)
    hidden_n: Tensor,  # (b, H)
    state: Tensor,  # (b, H)
    grad_output: Tensor,  # (b, H)
    carry: Tensor,  # (>= b, H)
    grad_gates: Tensor,  # (b, 4H) out: of n, r, z, hidden_n before their activations
) -> None:
    b = len(state)
    r, z, n = gates.chunk(3, dim=1)
    grad_n, grad_r, grad_z, grad_hidden_n = grad_gates.chunk(4, dim=1)
    grad = _total(carry[:b], grad_output)
    grad_n.copy_(grad * (1 - z) * (1 - n * n))
    grad_r.copy_(grad_n * hidden_n * r * (1 - r))
    grad_z.copy_(grad * (state - n) * z * (1 - z))
    grad_hidden_n.copy_(grad_n * r)
    carry[:b] = grad * z


def gru_reset_before_(
    gates: Tensor,  # (b, 3H) in: W x; out: r, z, and W x of n as it was
    recurrent: Tensor,  # (<= b, 2H) U h of r, z
    bias: Tensor,
    state: Tensor,  # (b, H)
    reset_state: Tensor,  # (b, H) out: r * h
) -> None:
    r, z, _ = gates.chunk(3, dim=1)
    gates[: len(recurrent), : recurrent.shape[1]].add_(recurrent)
    r.add_(bias[0]).sigmoid_()
    z.add_(bias[1]).sigmoid_()
    torch.mul(r, state, out=reset_state)


def gru_reset_before_candidate_(
    gates: Tensor,  # (b, 3H) in: r, z, and W x of n; out: r, z, n
    recurrent: Tensor,  # (<= b, H) U (r * h)
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
    grad_gates: Tensor,  # (b, 4H) out: of z, n in blocks 1, 2; and r * h in block 3
) -> None:
    b = len(state)
    r, z, n = gates.chunk(3, dim=1)
    _, grad_z, grad_n, reset_state = grad_gates.chunk(4, dim=1)
    grad = _total(carry[:b], grad_output)
    grad_z.copy_(grad * (state - n) * z * (1 - z))
    grad_n.copy_(grad * (1 - z) * (1 - n * n))
    torch.mul(r, state, out=reset_state)
    carry[:b] = grad * z


def gru_reset_before_backward_reset_(
    gates: Tensor,  # (b, 3H)
    state: Tensor,  # (b, H)
    grad_reset_state: Tensor,  # (<= b, H): the others have a zero state
    carry: Tensor,  # (>= b, H) out: r * grad_reset_state is added
    grad_gates: Tensor,  # (b, 4H) out: of r in block 0
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


def _total(carry: Tensor, grad_output: Tensor) -> Tensor:
    return carry + grad_output if len(grad_output) else carry.clone()
