"""The logsumexp of rows of scores, and the losses that are joined from it without cancellation."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fastqt
from tests.shared import oracle
from tests.shared.excluding import excluding
from tests.shared.tolerances import (
    EAGER_FACTOR,
    FLOAT32,
    FLOAT64,
    HALF_ULP,
    THREE_ROUNDINGS,
    relative,
)

pytestmark = pytest.mark.usefixtures("low_memory_in_tiles")
N, M, D, K = 13, 17, 6, 5
rng = np.random.default_rng(0)
GROUPS = rng.integers(0, 4, N), rng.integers(0, 4, M)
MASK = rng.random((N, M)) < 0.3
MASK[4] = True
EXCLUDED_ROW = 4
# Arguments, and the further inputs that want a gradient.
CASES = {
    "plain": ({}, ()),
    "zero": ({"diagonal": "zero"}, ()),
    "exclude": ({"diagonal": "exclude"}, ("scale",)),
    "biases": ({}, ("scale", "bias")),
    "negatives": ({"diagonal": "exclude"}, ("negatives", "row_negatives", "scale")),
    "row scores": ({"diagonal": "exclude"}, ("row_scores", "scale")),
    "several row cells": ({}, ("stacked", "several", "scale")),
    "groups": (
        {"query_groups": torch.from_numpy(GROUPS[0]), "candidate_groups": torch.from_numpy(GROUPS[1])},
        (),
    ),
    "mask": ({"mask": torch.from_numpy(MASK), "diagonal": "exclude"}, ("bias",)),
}
SHAPES = {
    "queries": (N, D),
    "candidates": (M, D),
    "negatives": (K, D),
    "row_negatives": (N, D),
    "scale": (),
    "bias": (M,),
    "row_scores": (N,),
    "stacked": (N, 3, D),
    "several": (N, 2),
}
# The tests run Triton's interpreter, whose float16 rounds as a GPU does.
ENGINES = [
    ("cpu", torch.float64, FLOAT64),
    ("cpu", torch.float32, FLOAT32),
    ("torch", torch.float64, FLOAT64),
    ("reference", torch.float64, FLOAT64),
]
ENGINES += [("triton", torch.float32, FLOAT32), ("triton", torch.float16, THREE_ROUNDINGS[torch.float16])]


def inputs_of(names: tuple[str, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    arguments = {"stacked": "row_negatives", "several": "row_scores"}
    return {
        arguments.get(name, name): torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for name in ("queries", "candidates", *names)
    }


@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize(("backend", "dtype", "tolerance"), ENGINES, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(3)
def test_is_the_definition(name, backend, dtype, tolerance, memory):
    arguments, more = CASES[name]
    inputs = inputs_of(more, dtype)
    given = {name: x.detach().double().numpy() for name, x in inputs.items()}
    options = {key: x.numpy() if isinstance(x, torch.Tensor) else x for key, x in arguments.items()}
    weights = np.linspace(-1, 2, N)
    truth = oracle.contrastive(
        T=np.zeros((N, M)),
        F=given.pop("queries"),
        G=given.pop("candidates"),
        **{"diagonal": "keep", **options, **given},
        link="log_sum_exp",
        row_weights=weights,
    )
    found = fastqt.log_sum_exp(**inputs, **excluding(arguments), backend=backend, memory=memory)
    expected = torch.from_numpy(truth.loss)
    assert torch.equal(found.isneginf(), expected.isneginf())
    assert bool(found[EXCLUDED_ROW].isneginf()) == (name == "mask")
    finite = expected.isfinite()
    assert relative(found[finite], expected[finite]) < tolerance
    upstream = torch.from_numpy(weights).to(found.dtype)
    gradients = torch.autograd.grad(found, list(inputs.values()), upstream)
    for key, gradient in zip(inputs, gradients, strict=True):
        assert relative(gradient, getattr(truth, key)) < tolerance, key


def test_it_is_refused_where_an_engine_lacks_it():
    x = torch.randn(3, 2)
    with pytest.raises(ValueError, match="backend: 'cuda' is not available"):
        fastqt.log_sum_exp(x, x, backend="cuda")


def joined(queries: torch.Tensor, candidates: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """The loss of the docstring: positives on the diagonal, two sets of candidates."""
    positive = (queries * candidates).sum(1)
    a = fastqt.log_sum_exp(queries, candidates, diagonal="exclude")
    b = fastqt.log_sum_exp(queries, more)
    return F.softplus(torch.logaddexp(a, b) - positive).mean()


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("score", [1.0, 8.0, 20.0, 40.0])
def test_a_joined_loss_is_as_accurate_as_a_direct_one_once_positives_are_learnt(score):
    generator = torch.Generator().manual_seed(0)
    errors = {"joined": [], "direct": []}
    for _ in range(20):
        candidates = F.normalize(torch.randn(32, 64, generator=generator), dim=1)
        more = F.normalize(torch.randn(32, 64, generator=generator), dim=1)
        leaves = [(score * candidates).requires_grad_(), candidates.requires_grad_(), more.requires_grad_()]
        exact = [x.detach().double().requires_grad_() for x in leaves]
        scores = exact[0] @ torch.cat(exact[1:]).T
        others = scores.masked_fill(torch.eye(32, 64, dtype=torch.bool), -torch.inf).logsumexp(1)
        truth = torch.log1p((others - scores.diagonal()).exp()).mean()
        wanted = torch.autograd.grad(truth, exact)
        for name, loss in (
            ("joined", joined(*leaves)),
            (
                "direct",
                fastqt.contrastive_loss(*leaves[:2], fastqt.Diagonal(), diagonal="keep", negatives=leaves[2]),
            ),
        ):
            gradients = torch.autograd.grad(loss, leaves)
            pairs = [(loss, truth), *zip(gradients, wanted, strict=True)]
            errors[name].append([error(a.detach(), b.detach()) for a, b in pairs])
    of_joined, of_direct = (np.mean(errors[name], 0) for name in ("joined", "direct"))
    assert (of_joined <= EAGER_FACTOR * of_direct + HALF_ULP[torch.float32]).all()
