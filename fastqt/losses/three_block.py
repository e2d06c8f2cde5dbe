"""MixCSE's 3 N columns as one problem: the scores of all three blocks come from one matrix product.

With rows u and v of norm 1, a mixture m_j of v_j and v_j+1 is own_j v_j + next_j v_j+1, and a_i the same
of u. So the scores of the mixed blocks are sums of two neighbouring cosines, and their gradients fold back
onto those: 6 N² D operations in all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastqt.norms import LEAST_NORM
from fastqt.options import Memory
from fastqt.problem import ThreeBlockProblem, unit_rows
from fastqt.torch_modes import input_dtype


def three_block_problem(
    z1: Tensor,  # (N, D)
    z2: Tensor,
    mix: float,
    scale: float | Tensor,
    *,
    third_block: bool,
    masks_excluded: bool,
    own_mixture_weight: float,
    stop_gradient: bool,
    memory: Memory,
) -> ThreeBlockProblem:
    """The problem of two views of sentences whose partners are the next ones; see `ThreeBlockProblem`."""
    u, v = (unit_rows(z).to(input_dtype(z)) for z in (z1, z2))
    dtype = torch.promote_types(u.dtype, torch.float32)

    def shares(z: Tensor) -> tuple[Tensor, Tensor]:
        z = z.detach().to(dtype) if stop_gradient else z.to(dtype)
        # What u and v were divided by, so that a share times one of their rows is a part of the mixture.
        norms = torch.linalg.vector_norm(z, dim=1).clamp(min=LEAST_NORM)
        mixture = torch.linalg.vector_norm(mix * z + (1 - mix) * z.roll(-1, 0), dim=1).clamp(min=LEAST_NORM)
        return mix * norms / mixture, (1 - mix) * norms.roll(-1) / mixture

    if not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=dtype, device=u.device)
    return ThreeBlockProblem(
        u,
        v,
        *shares(z2),
        *shares(z1),
        scale,
        third_block=third_block,
        masks_excluded=masks_excluded,
        own_mixture_weight=own_mixture_weight,
        stop_gradient=stop_gradient,
        memory=memory,
    )
