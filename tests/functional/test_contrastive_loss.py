"""contrastive_loss and sigmoid_loss equal the oracle: every option and reduction, value and gradients.

Ranks compare each argument of a loss, also a new one, and each kind of filter.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fastqt
from fastqt.exclusions import as_exclusions
from fastqt.loss import DECLARED
from tests.shared.cases import CASES, D, N
from tests.shared.filters import OF_IDS
from tests.shared.tolerances import FLOAT64, FOR_DTYPE, relative

pytestmark = pytest.mark.usefixtures("low_memory_in_tiles")
BACKENDS = ("cpu", "torch", "reference")
DTYPES = (torch.float32, torch.float64)
by_name = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
by_backend = pytest.mark.parametrize("backend", BACKENDS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def check_gradients(case, inputs, loss_weighted, expected, tolerance):
    gradients = torch.autograd.grad(loss_weighted, list(inputs.values()))
    for name, gradient in zip(inputs, gradients, strict=True):
        assert gradient.dtype == inputs[name].dtype
        assert relative(gradient, getattr(expected, name)) < tolerance, name


@by_name
@by_backend
@by_dtype
@pytest.mark.parametrize("memory", ["fast", "low"])
def test_mean_equals_oracle(case, backend, dtype, memory):
    inputs = case.inputs(dtype)
    expected = case.expected(inputs)
    loss = case.loss(inputs, backend=backend, memory=memory)
    assert loss.dtype == dtype
    assert relative(loss, expected.loss.mean()) < FOR_DTYPE[dtype]
    check_gradients(case, inputs, loss, expected, FOR_DTYPE[dtype])


@by_name
@by_backend
def test_rows_equal_oracle_under_any_upstream(case, backend):
    inputs = case.inputs(torch.float64)
    row_weights = np.random.default_rng(1).normal(size=N)
    expected = case.expected(inputs, row_weights)
    loss = case.loss(inputs, backend=backend, reduction="none")
    assert relative(loss, expected.loss) < FLOAT64
    check_gradients(case, inputs, loss @ torch.from_numpy(row_weights), expected, FLOAT64)


@by_name
def test_mean_of_targets_is_the_sum_over_the_rows_that_have_some(case):
    inputs = case.inputs(torch.float64)
    if case.link == "sigmoid":
        with pytest.raises(ValueError, match="reduction"):
            case.loss(inputs, reduction="mean_of_targets")
        return
    rows = (case.targets != 0).any(1).sum()
    expected = case.expected(inputs, np.full(N, 1 / rows))
    loss = case.loss(inputs, reduction="mean_of_targets")
    assert relative(loss, expected.loss.sum() / rows) < FLOAT64
    check_gradients(case, inputs, loss, expected, FLOAT64)


@by_backend
def test_the_mean_of_no_targets_is_0(backend):
    x, none = torch.randn(N, D), torch.full((N,), -100)
    options = {"reduction": "mean_of_targets", "diagonal": "keep", "backend": backend}
    assert fastqt.contrastive_loss(x, x, none, **options) == 0


REFUSED = {
    "bias nan": ({"bias": float("nan")}, ValueError, "bias: want a finite number, got nan"),
    "bias text": ({"bias": "0"}, TypeError, r"bias: want a number or a tensor of shape \(\) or \(6,\)"),
    "bias for others": ({"bias": torch.zeros(5)}, ValueError, r"bias: .* shape \(\) or \(6,\), .* \(5,\)"),
    "bias of integers": ({"bias": torch.zeros(6).long()}, ValueError, r"bias: .* floating point .* \(6,\)"),
    "bias without values": ({"bias": torch.zeros(6, device="meta")}, ValueError, "bias: .* with values"),
    "target on the diagonal": (
        {"targets": fastqt.Diagonal(), "diagonal": "exclude"},
        ValueError,
        "use diagonal='keep'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    arguments, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        fastqt.sigmoid_loss(torch.randn(6, 4), torch.randn(6, 4), **arguments)


# What ranks may have otherwise: how a loss is computed, and who they are.
OF_EACH_RANK = {"memory", "backend", "group"}


@pytest.mark.parametrize("name", ["contrastive_loss", "sigmoid_loss", "log_sum_exp"])
def test_ranks_compare_each_argument(name):
    declaration = DECLARED[getattr(fastqt, name)]
    queries, candidates = torch.randn(2, 4, 3)
    values = dict(declaration.defaults, queries=queries, candidates=candidates)
    if "targets" in values:
        values["targets"] = fastqt.Diagonal()
    facts = declaration.facts_of(values, SimpleNamespace(check="first"))
    compared = {fact.removesuffix(" given") for fact in facts}
    of_embeddings = {"queries", "candidates"}  # by their width, dtype and device
    # The default window, of which ranks compare what it is lowered to.
    of_targets = {"context_size", "document_ids"}
    assert set(declaration.names) - OF_EACH_RANK - of_embeddings - of_targets <= compared


IDS = torch.arange(4)
FILTERS = {
    "none": None,
    "margin": fastqt.Margin(0.1),
    "another margin": fastqt.Margin(0.2),
    "relative": fastqt.Margin(0.1, "relative"),
    "sparing": fastqt.Margin(0.1, spare_own_negatives=True),
    **{kind.__name__: kind(IDS) for kind in OF_IDS},
    **{f"{kind.__name__} of negatives": kind(IDS, negative_ids=IDS) for kind in OF_IDS},
    "two": [kind(IDS) for kind in OF_IDS],
    "guide": fastqt.Guide(*torch.ones(2, 4, 3)),
    "wider guide": fastqt.Guide(*torch.ones(2, 4, 5)),
    "above": fastqt.Above(torch.zeros(4)),
    "tensor": torch.zeros(4, 4, dtype=torch.bool),
}


def test_ranks_tell_filters_from_each_other_and_not_their_values():
    argument = DECLARED[fastqt.log_sum_exp].others["exclude"]
    facts = [argument.fact(x if x is None else as_exclusions("exclude", x)) for x in FILTERS.values()]
    assert len(set(facts)) == len(facts)
    others = {kind.__name__: kind(IDS.flip(0)) for kind in OF_IDS}
    for name, x in (others | {"tensor": torch.ones(4, 9, dtype=torch.bool)}).items():
        assert argument.fact(as_exclusions("exclude", x)) == facts[list(FILTERS).index(name)]
