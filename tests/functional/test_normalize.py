"""Scores by cosine: engines take rows as they are, and finish the gradient of their normalisation."""

import pytest
import torch
import torch.nn.functional as F

import fastqt
from fastqt.engines.cpu import contrastive
from fastqt.engines.reference import contrastive as reference
from tests.shared import cosines
from tests.shared.cases import CASES, Case
from tests.shared.cosines import ALL
from tests.shared.tolerances import (
    FLOAT32,
    FOR_DTYPE,
    REORDERED_FLOAT64,
    relative,
)

pytestmark = pytest.mark.usefixtures("low_memory_in_tiles")
by_case = pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
by_memory = pytest.mark.parametrize("memory", ["fast", "low"])
by_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
UPSTREAM = torch.tensor([1.0, -2.0, 0.0, 1e-3, 0.5, 3.0, -1e-2, 1.0, 0.0, 2.0, -1.0, 1e-4, 1.0])


def assert_oracles(case: Case, inputs: dict[str, torch.Tensor], dtype: torch.dtype, memory: str) -> None:
    """A scalar loss and its gradients, and the losses of rows with an upstream gradient each."""
    if case.link != "log_sum_exp":
        exact = cosines.expected(case, inputs)
        loss = case.loss(inputs, normalize=True, memory=memory, backend="cpu")
        assert relative(loss, exact["loss"].mean()) < FOR_DTYPE[dtype]
        for name, gradient in zip(inputs, torch.autograd.grad(loss, list(inputs.values())), strict=True):
            assert cosines.error(name, inputs, gradient, exact[name]) < FOR_DTYPE[dtype], name
    exact = cosines.expected(case, inputs, UPSTREAM.double().numpy())
    options = {} if case.link == "log_sum_exp" else {"reduction": "none"}
    rows = case.loss(inputs, normalize=True, memory=memory, backend="cpu", **options)
    assert relative(rows, exact["loss"]) < FOR_DTYPE[dtype]
    found = torch.autograd.grad(rows, list(inputs.values()), UPSTREAM.to(dtype))
    for name, gradient in zip(inputs, found, strict=True):
        assert cosines.error(name, inputs, gradient, exact[name]) < FOR_DTYPE[dtype], name


@by_dtype
@by_memory
@by_case
def test_is_the_oracles(case, memory, dtype):
    """The norms of rows differ by factors of some hundreds, and each matrix has a row of zeros."""
    assert_oracles(case, cosines.inputs_of(case, dtype), dtype, memory)


@by_dtype
@by_memory
@pytest.mark.parametrize("case", [ALL[0], *(c for c in ALL if "all at once" in c.name)], ids=lambda c: c.name)
def test_norms_near_the_ends_of_the_range(case, memory, dtype):
    """Rows of 1e-20 count as short ones, and products of rows of 1e20 are beyond float32."""
    inputs = cosines.inputs_of(case, torch.float64)
    with torch.no_grad():
        for name in set(cosines.EMBEDDINGS) & set(inputs):
            inputs[name][4] *= 1e-20
            inputs[name][-1] *= 1e20
            inputs[name][-2] *= 1e20
            row = inputs[name][6 if len(inputs[name]) > 6 else 0]
            row *= 3e-13 / row.norm()  # of length 0.3 after the division by 1e-12
    inputs = {name: x.detach().to(dtype).requires_grad_() for name, x in inputs.items()}
    assert_oracles(case, inputs, dtype, memory)


def test_other_engines_are_given_copies():
    """An engine that does not take rows as they are gets them at norm 1, and no longer sees the option."""
    queries, candidates = (3 * torch.randn(9, 4) for _ in range(2))
    seen = []

    def contrastive_loss(p, reduction):
        seen.append(p)
        return reference.row_losses(p).mean()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reference, "contrastive_loss", contrastive_loss)
        loss = fastqt.contrastive_loss(queries, candidates, normalize=True, backend="reference")
    (p,) = seen
    assert not p.normalize
    assert relative(p.queries, F.normalize(queries, dim=1)) < FLOAT32
    ours = fastqt.contrastive_loss(queries, candidates, normalize=True, backend="cpu")
    assert relative(ours, loss) < FLOAT32


def test_tiles_do_not_change_the_result(monkeypatch):
    case = next(c for c in CASES if c.name == "sigmoid, all at once")
    inputs = cosines.inputs_of(case, torch.float64)

    def found() -> list[torch.Tensor]:
        loss = case.loss(inputs, normalize=True, memory="low")
        return [loss.detach(), *torch.autograd.grad(loss, list(inputs.values()))]

    whole = found()
    monkeypatch.setattr(contrastive, "TILE_ROWS", 3)
    monkeypatch.setattr(contrastive, "TILE_COLUMNS", 5)
    for a, b in zip(found(), whole, strict=True):
        assert relative(a, b) < REORDERED_FLOAT64
