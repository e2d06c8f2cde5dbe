"""The Triton engine, interpreted: the oracle's values and gradients of products and cosines, in any dtype."""

import numpy as np
import pytest
import torch

from tests.shared import cosines
from tests.shared.cases import CASES, Case
from tests.shared.tolerances import (
    FLOAT32,
    THREE_ROUNDINGS,
    relative,
)

by_memory = pytest.mark.parametrize("memory", ["fast", "low"])
by_normalize = pytest.mark.parametrize("normalize", [False, True], ids=["products", "cosines"])
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
by_two_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
LARGE = ("all at once", "smoothed window", "biases of classes", "sigmoid, all at once", "sums, all at once")
LARGE_CASES = [c for c in cosines.ALL if c.name in LARGE]
by_large = pytest.mark.parametrize("case", LARGE_CASES, ids=lambda case: case.name)
NO_ROOM = {"ROW_MULTIPLE": 5, "FAST_BYTES": 0, "LOW_BYTES": 0}
# Upstream gradients of both signs, zeros and very different sizes.
WEIGHTS = torch.tensor([1.0, -2.0, 0.0, 1e-3, 0.5, 3.0, -1e-2, 1.0, 0.0, 2.0, -1.0, 1e-4, 1.0])


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def value_and_gradients(case: Case, inputs: dict[str, torch.Tensor], **more) -> list[torch.Tensor]:
    loss = case.loss(inputs, backend="triton", **more)
    if case.link == "log_sum_exp":
        loss = loss.sum()
    return [loss.detach(), *torch.autograd.grad(loss, list(inputs.values()))]


def assert_oracles(case, inputs, memory="fast", *, each=False, normalize=False) -> None:
    """The scalar loss and its gradients, or with `each` the losses of rows with an upstream gradient each."""
    each = each or case.link == "log_sum_exp"
    weights = WEIGHTS.double().numpy() if each else None
    if normalize:
        exact = cosines.expected(case, inputs, weights)
    else:
        result = case.expected(inputs, row_weights=weights)
        exact = {name: np.asarray(getattr(result, name)) for name in ("loss", *inputs)}
    options = {"reduction": "none"} if each and case.link != "log_sum_exp" else {}
    loss = case.loss(inputs, normalize=normalize, memory=memory, backend="triton", **options)
    assert loss.dtype is torch.float32
    assert relative(loss, exact["loss"] if each else exact["loss"].mean()) < FLOAT32
    gradients = torch.autograd.grad(loss, list(inputs.values()), WEIGHTS if each else None)
    tolerance = FLOAT32 + THREE_ROUNDINGS[inputs["queries"].dtype]
    for name, gradient in zip(inputs, gradients, strict=True):
        assert gradient.dtype is inputs[name].dtype
        of_norms = cosines.error(name, inputs, gradient, exact[name]) if normalize else 0.0
        assert (of_norms or relative(gradient, exact[name])) < tolerance, name


def inputs_of(case: Case, dtype: torch.dtype, normalize: bool) -> dict[str, torch.Tensor]:
    """float16, which has too little range for inverse norms of 1e12, is given copies, and no row of zeros."""
    inputs = cosines.inputs_of(case, dtype) if normalize else case.inputs(dtype)
    if normalize and dtype is torch.float16:
        with torch.no_grad():
            for name in set(cosines.EMBEDDINGS) & set(inputs):
                inputs[name][inputs[name].norm(dim=1) == 0] = 1.0
    return inputs
