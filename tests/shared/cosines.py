"""Contrastive problems by cosine: inputs of very different norms, and their loss and gradients in float64."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests.shared import oracle
from tests.shared.cases import CASES, Case
from tests.shared.tolerances import relative

EMBEDDINGS = ("queries", "candidates", "negatives", "row_negatives")
LEAST_NORM = 1e-12  # rows that are shorter are divided by this
NO_TARGETS = np.zeros((13, 17))
LOG_SUM_EXP = [
    Case("sums", {"diagonal": "keep"}, NO_TARGETS, {"diagonal": "keep"}, square=False, link="log_sum_exp"),
    Case(
        "sums, all at once",
        {"diagonal": "exclude"},
        NO_TARGETS,
        {"diagonal": "exclude"},
        ("negatives", "row_negatives", "scale", "bias"),
        square=False,
        link="log_sum_exp",
    ),
]
ALL = [*CASES, *LOG_SUM_EXP]
# Other strides for a matrix of embeddings, of which every case has at least five rows.
LAYOUTS = {
    "transposed": lambda x: x.T.contiguous().T,
    "one row": lambda x: x[4:5].expand_as(x),
    "sliced": lambda x: torch.stack([x, x], 2)[..., 0],
}


def inputs_of(case: Case, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """A case's leaf tensors: the norms of embeddings differ, and one row of each matrix is zero."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {name: x.detach().double() for name, x in case.inputs(torch.float64, seed).items()}
    for row, name in enumerate(EMBEDDINGS):
        if name in inputs:
            inputs[name] *= 2 * _factors(inputs[name], generator)
            inputs[name][row] = 0
    return {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}


def expected(
    case: Case, inputs: dict[str, Tensor], row_weights: oracle.Array | None = None
) -> dict[str, oracle.Array]:
    """The losses of rows, and the gradient of each input, by the oracle and the derivative of x / |x|."""
    given = {name: x.detach().double().numpy() for name, x in inputs.items()}
    norms = {name: norms_of(x) for name, x in given.items() if name in EMBEDDINGS}
    unit = {name: torch.from_numpy(x / norms[name]) if name in norms else x for name, x in given.items()}
    exact = case.expected({name: torch.as_tensor(x) for name, x in unit.items()}, row_weights)
    found = {"loss": exact.loss}
    for name in inputs:
        gradient = np.asarray(getattr(exact, name))
        found[name] = through_norms(given[name], gradient) if name in norms else gradient
    return found


def norms_of(x: oracle.Array) -> oracle.Array:
    """(..., 1); squares of numbers between 1e-150 and 1e150 are numbers of float64."""
    return np.maximum(np.sqrt(np.square(x).sum(-1, keepdims=True)), LEAST_NORM)


def _factors(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(*x.shape[:-1], 1, generator=generator).double().exp()


def through_norms(x: oracle.Array, gradient: oracle.Array) -> oracle.Array:
    """The gradient of the rows x from that of x / max(|x|, 1e-12)."""
    norms = norms_of(x)
    unit = x / norms
    along = (gradient * unit).sum(-1, keepdims=True) * unit * (norms > LEAST_NORM)
    return (gradient - along) / norms


def error(name: str, inputs: dict[str, Tensor], gradient: Tensor, exact: oracle.Array) -> float:
    """The relative error of a gradient. That of an embedding goes with 1 / norm, which is taken off first."""
    if name not in EMBEDDINGS:
        return relative(gradient, exact)
    norms = norms_of(inputs[name].detach().double().numpy())
    return relative(gradient.detach().double().numpy() * norms, exact * norms)
