"""contrastive_loss equals the oracle: every option, both backends, every reduction, value and gradients."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

import fastqt
from tests.shared import oracle
from tests.shared.cases import CASES, D, N
from tests.shared.tolerances import FLOAT32, FLOAT64, FOR_DTYPE, HALF_ULP, REORDERED, relative

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
def test_sum_is_n_times_mean(case):
    inputs = case.inputs(torch.float64)
    mean, total = case.loss(inputs), case.loss(inputs, reduction="sum")
    assert relative(total, N * mean) < REORDERED[torch.float64]
    means = torch.autograd.grad(mean * N, list(inputs.values()))
    totals = torch.autograd.grad(total, list(inputs.values()))
    for a, b in zip(means, totals, strict=True):
        assert relative(a, b) < REORDERED[torch.float64]


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
def test_mean_of_targets_is_the_mean_of_cross_entropy(backend):
    queries, candidates = (torch.randn(n, D, dtype=torch.float64) for n in (N, 20))
    classes = torch.tensor([-100, *range(N - 2), -100])
    options = {"diagonal": "keep", "backend": backend}
    loss = fastqt.contrastive_loss(queries, candidates, classes, reduction="mean_of_targets", **options)
    assert relative(loss, cross_entropy(queries @ candidates.T, classes)) < FLOAT64
    none = torch.full_like(classes, -100)
    assert fastqt.contrastive_loss(queries, candidates, none, reduction="mean_of_targets", **options) == 0


@by_name
@pytest.mark.thinned(4)
def test_gradcheck(case):
    inputs = case.inputs(torch.float64)
    # A first backward hands over the forward's gradients, a second one recomputes them: equal to rounding.
    for options in ({}, {"reduction": "none"}, {"normalize": True}, {"memory": "low"}):
        assert torch.autograd.gradcheck(
            lambda *x, options=options: case.loss(dict(zip(inputs, x, strict=True)), **options),
            tuple(inputs.values()),
            nondet_tol=FLOAT64,
        )


@by_backend
def test_normalize_is_cosine(backend):
    inputs = CASES[0].inputs(torch.float64)
    queries, candidates = inputs.values()
    cosine = fastqt.contrastive_loss(queries, candidates, normalize=True, scale=20.0, backend=backend)
    expected = oracle.contrastive(
        normalize(queries).detach().numpy(),
        normalize(candidates).detach().numpy(),
        CASES[0].targets,
        scale=20.0,
    )
    assert relative(cosine, expected.loss.mean()) < FLOAT64
    # a cosine does not change along a row, so neither may the loss
    for gradient, x in zip(
        torch.autograd.grad(cosine, (queries, candidates)), (queries, candidates), strict=True
    ):
        assert relative((gradient * x).sum(1), np.zeros(len(x))) < FLOAT64


@by_backend
def test_class_indices_are_cross_entropy(backend):
    queries, weight = torch.randn(30, 8, dtype=torch.float64), torch.randn(11, 8, dtype=torch.float64)
    indices = torch.randint(0, 11, (30,))
    loss = fastqt.contrastive_loss(queries, weight, indices, diagonal="keep", backend=backend)
    assert relative(loss, cross_entropy(queries @ weight.T, indices)) < FLOAT64


@by_backend
@by_dtype
def test_rows_without_targets_are_zero_even_if_nothing_is_left(backend, dtype):
    """The logsumexp over no candidates is -inf, and -inf - -inf would be NaN."""
    queries = torch.randn(4, 3, dtype=dtype, requires_grad=True)
    candidates = torch.randn(4, 3, dtype=dtype, requires_grad=True)
    targets = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0]], dtype=dtype)
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[1] = True
    for memory in ("fast", "low"):
        loss = fastqt.contrastive_loss(
            queries, candidates, targets, mask=mask, reduction="none", backend=backend, memory=memory
        )
        dF, dG = torch.autograd.grad(loss.sum(), (queries, candidates))
        assert (loss[1:3] == 0).all()
        assert (dF[1:3] == 0).all()
        assert loss.isfinite().all()
        assert dF.isfinite().all()
        assert dG.isfinite().all()


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)
@by_backend
def test_half_precision_is_computed_in_float32(low, backend):
    inputs = CASES[0].inputs(low)
    loss = CASES[0].loss(inputs, backend=backend)
    assert loss.dtype == torch.float32
    expected = CASES[0].expected(inputs)
    assert relative(loss, expected.loss.mean()) < FLOAT32
    # only the gradient's own rounding to 16 bits is added
    check_gradients(CASES[0], inputs, loss, expected, torch.finfo(low).eps)


@by_backend
def test_autocast_rounds_inputs_and_returns_float32(backend):
    inputs = CASES[0].inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = CASES[0].loss(inputs, backend=backend)
        mixed = fastqt.contrastive_loss(inputs["queries"].bfloat16(), inputs["candidates"], backend=backend)
    rounded = {name: x.detach().bfloat16().requires_grad_() for name, x in inputs.items()}
    expected = CASES[0].loss(rounded, backend=backend)
    assert loss.dtype == torch.float32
    assert loss.item() == expected.item() == mixed.item()
    gradients = torch.autograd.grad(loss, list(inputs.values()))
    assert all(g.dtype == torch.float32 for g in gradients)


@by_backend
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_reach_the_loss(backend, bad):
    queries, candidates = torch.randn(40, D), torch.randn(40, D)
    queries[7, 2] = bad
    rows = fastqt.contrastive_loss(queries, candidates, reduction="none", backend=backend)
    assert not rows[7].isfinite()
    assert rows[:7].isfinite().all()
    candidates[20, 1] = float("nan")
    assert fastqt.contrastive_loss(queries, candidates, backend=backend).isnan()


def test_scores_of_any_size_neither_overflow_nor_stall():
    queries, candidates = 1e4 * torch.randn(50, D), torch.randn(50, D)
    expected = oracle.contrastive(
        queries.double().numpy(), candidates.double().numpy(), oracle.window(50, 50, [-1, 1])
    )
    queries.requires_grad_()
    loss = fastqt.contrastive_loss(queries, candidates)
    assert relative(loss, expected.loss.mean()) < FLOAT32
    (gradient,) = torch.autograd.grad(loss, queries)
    assert relative(gradient, expected.queries) < 1e-2  # scores of 1e5 in float32: 0.01 in the exponent


@pytest.mark.parametrize("scale", [1e-300, 2.0, torch.tensor(0.0), torch.tensor(3.0, dtype=torch.float64)])
def test_any_scale(scale):
    inputs = CASES[0].inputs(torch.float64)
    queries, candidates = (x.detach().numpy() for x in inputs.values())
    expected = oracle.contrastive(queries, candidates, CASES[0].targets, scale=float(scale))
    if isinstance(scale, torch.Tensor):
        scale = scale.clone().requires_grad_()
        inputs["scale"] = scale
        loss = CASES[0].loss(inputs)
    else:
        loss = CASES[0].loss(inputs, scale=scale)
    assert relative(loss, expected.loss.mean()) < FLOAT64
    check_gradients(CASES[0], inputs, loss, expected, max(FLOAT64, HALF_ULP[torch.float32]))
