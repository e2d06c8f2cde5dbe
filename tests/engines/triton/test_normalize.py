"""Scores by cosine on the Triton engine, interpreted: inverse norms in the epilogues, and no copies."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fastqt
from fastqt.engines.triton import operands, softmax, two_walks
from fastqt.kernels.norms import inverse_norms
from tests.shared import cosines, oracle
from tests.shared.cases import CASES, Case
from tests.shared.cosines import ALL
from tests.shared.tolerances import (
    CUT_OFF,
    EAGER_FACTOR,
    FLOAT32,
    HALF_ULP,
    THREE_ROUNDINGS,
    TWO_ROUNDINGS,
    relative,
)

by_memory = pytest.mark.parametrize("memory", ["fast", "low"])
by_case = pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
LARGE = ("all at once", "biases of classes", "sigmoid, all at once", "sums, all at once")
by_large = pytest.mark.parametrize("case", [c for c in ALL if c.name in LARGE], ids=lambda case: case.name)
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
WEIGHTS = torch.tensor([1.0, -2.0, 0.0, 1e-3, 0.5, 3.0, -1e-2, 1.0, 0.0, 2.0, -1.0, 1e-4, 1.0])


def assert_oracles(case: Case, inputs: dict[str, torch.Tensor], memory: str, *, each: bool = False) -> None:
    """The scalar loss and its gradients, or with `each` the losses of rows with an upstream gradient each."""
    each = each or case.link == "log_sum_exp"
    exact = cosines.expected(case, inputs, WEIGHTS.double().numpy() if each else None)
    options = {"reduction": "none"} if each and case.link != "log_sum_exp" else {}
    loss = case.loss(inputs, normalize=True, memory=memory, backend="triton", **options)
    assert relative(loss, exact["loss"] if each else exact["loss"].mean()) < FLOAT32
    found = torch.autograd.grad(loss, list(inputs.values()), WEIGHTS if each else None)
    tolerance = FLOAT32 + THREE_ROUNDINGS[inputs["queries"].dtype]
    for name, gradient in zip(inputs, found, strict=True):
        assert gradient.dtype is inputs[name].dtype
        assert cosines.error(name, inputs, gradient, exact[name]) < tolerance, name


@by_memory
@by_case
@pytest.mark.thinned(8)
def test_is_the_oracles(case, memory):
    assert_oracles(case, cosines.inputs_of(case, torch.float32), memory)


@by_memory
@by_large
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.thinned(5)
@pytest.mark.pairwise
def test_half_precision(case, memory, dtype):
    """float16, which has too little range for inverse norms of 1e12, is given copies."""
    inputs = cosines.inputs_of(case, dtype)
    if dtype is torch.float16:  # the gradient of a row of zeros is beyond its range
        with torch.no_grad():
            for name in set(cosines.EMBEDDINGS) & set(inputs):
                inputs[name][inputs[name].norm(dim=1) == 0] = 1.0
    assert_oracles(case, inputs, memory)


@by_memory
@by_large
@by_dtype
@pytest.mark.thinned(5)
@pytest.mark.pairwise
def test_rows_weighted_by_an_upstream_gradient(case, memory, dtype):
    assert_oracles(case, cosines.inputs_of(case, dtype), memory, each=True)


@by_memory
@by_large
@pytest.mark.thinned(4)
def test_chunks_do_not_change_the_result(case, memory, monkeypatch):
    """With no room at all, dF comes from chunks of rows and dG from chunks of columns."""
    for name, value in {"ROW_MULTIPLE": 5, "FAST_BYTES": 0, "LOW_BYTES": 0}.items():
        monkeypatch.setattr(operands, name, value)
    walks, genuine = [], two_walks.run
    monkeypatch.setattr(two_walks, "run", lambda given: walks.append(genuine(given)))
    # Of bfloat16 the sums over rows are kept beside the gradients, for which there is no room.
    dtype = torch.bfloat16 if case.link == "sigmoid" else torch.float32
    assert_oracles(case, cosines.inputs_of(case, dtype), memory)
    assert len(walks) == (memory == "low")


@by_memory
@by_large
@pytest.mark.thinned(8)
def test_shifts_from_a_sample(case, memory, monkeypatch):
    monkeypatch.setattr(softmax, "SAMPLE", 2)
    assert_oracles(case, cosines.inputs_of(case, torch.float32), memory)


@by_memory
@pytest.mark.thinned(2)
def test_shifts_that_are_too_low(memory):
    """A shift is that of a row's target, whose cosine is -1 where all others are 0, at a scale of 70.

    A row of zeros then has E = exp(70), which times its inverse norm of 1e12 is beyond float32. Where another
    cosine is 1, E itself is, among the candidates or the negatives.
    """
    queries, candidates = 3 * torch.eye(13, 16), torch.zeros(17, 16)
    candidates[:13] = -2 * queries
    candidates[13:16] = queries[:3]
    negatives = 7 * queries[4:8]
    inputs = {
        "queries": queries.requires_grad_(),
        "candidates": candidates.requires_grad_(),
        "negatives": negatives.requires_grad_(),
        "scale": torch.tensor(70.0, requires_grad=True),
    }
    own = {"targets": fastqt.Diagonal(), "diagonal": "keep"}
    case = Case("opposite", own, np.eye(13, 17), {"diagonal": "keep"}, ("negatives", "scale"), square=False)
    assert_oracles(case, inputs, memory)


@by_memory
@by_dtype
@pytest.mark.thinned(2)
def test_rows_wider_than_a_block(memory, dtype):
    """The gradients' kernels go through such rows twice."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "queries": (5, 1100),
        "candidates": (7, 1100),
        "negatives": (2, 1100),
        "row_negatives": (5, 1100),
    }
    inputs = {
        name: (3 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }
    inputs["scale"] = torch.tensor(5.0, requires_grad=True)
    T = oracle.window(5, 7, [1])
    case = Case("wide", {"targets": fastqt.Window(offsets=[1])}, T, {}, tuple(inputs)[2:], square=False)
    assert_oracles(case, inputs, memory)


@by_memory
@by_dtype
@pytest.mark.parametrize(("long", "short"), [("queries", "candidates"), ("candidates", "queries")])
@pytest.mark.thinned(3)
@pytest.mark.pairwise
def test_norms_near_the_ends_of_the_range(long, short, memory, dtype):
    """Rows of 1e-20 count as short ones, and the squares of 1e20 are beyond float32."""
    case = next(c for c in CASES if c.name == "diagonal targets")
    inputs = cosines.inputs_of(case, torch.float64)
    with torch.no_grad():
        for rows in (slice(3, 6), slice(-2, None)):
            inputs[long][rows] *= 1e18
        inputs[short][2] *= 1e-20
        inputs[long][7] *= 1e-20
        for x in (inputs[long][8], inputs[short][8]):  # of length 0.3 after the division by 1e-12
            x *= 3e-13 / x.norm()
    inputs = {name: x.detach().to(dtype).requires_grad_() for name, x in inputs.items()}
    assert_oracles(case, inputs, memory)


@pytest.mark.parametrize("layout", cosines.LAYOUTS)
@pytest.mark.parametrize("name", ["queries", "candidates", "negatives", "row_negatives"])
@pytest.mark.thinned(5)
def test_layouts(name, layout):
    case = next(c for c in CASES if c.name == "all at once")
    inputs = cosines.inputs_of(case, torch.float32)
    inputs[name] = cosines.LAYOUTS[layout](inputs[name].detach()).requires_grad_()
    assert_oracles(case, inputs, "fast")


@by_memory
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.thinned(3)
@pytest.mark.pairwise
def test_clip(dtype, memory, reduction):
    generator = torch.Generator().manual_seed(0)
    case = Case("pairs", {}, np.eye(18))
    lengths = torch.randn(2, 18, 1, generator=generator).exp()
    a, b = (lengths[k] * torch.randn(18, 5, generator=generator) for k in range(2))
    b[3] = a[5] = 0
    a, b = (x.to(dtype).requires_grad_() for x in (a, b))
    scale = torch.tensor(2.5, requires_grad=True)
    weights = torch.randn(18, generator=generator) if reduction == "none" else torch.full((18,), 1 / 18)
    loss = fastqt.clip_loss(a, b, scale=scale, memory=memory, reduction=reduction, backend="triton")
    case.options.update(diagonal="keep", scale=2.5)
    of_rows = cosines.expected(case, {"queries": a, "candidates": b}, weights.double().numpy())
    of_columns = cosines.expected(case, {"queries": b, "candidates": a}, weights.double().numpy())
    exact = (of_rows["loss"] + of_columns["loss"]) / 2
    assert relative(loss, exact if reduction == "none" else exact.mean()) < FLOAT32
    upstream = weights if reduction == "none" else None
    da, db, _ = torch.autograd.grad(loss, (a, b, scale), upstream)
    tolerance = FLOAT32 + TWO_ROUNDINGS[dtype]
    wanted = (of_rows["queries"] + of_columns["candidates"]) / 2
    assert cosines.error("queries", {"queries": a}, da, wanted) < tolerance
    wanted = (of_rows["candidates"] + of_columns["queries"]) / 2
    assert cosines.error("candidates", {"candidates": b}, db, wanted) < tolerance


@by_memory
def test_mixed_negatives(memory):
    """A mix is of candidates at norm 1, and no gradient flows through it."""
    generator = torch.Generator().manual_seed(0)
    queries, candidates = (
        (
            torch.randn(9, 1, generator=generator).exp() * torch.randn(9, 4, generator=generator)
        ).requires_grad_()
        for _ in range(2)
    )
    inputs = {"queries": queries, "candidates": candidates}
    g = candidates.detach().double().numpy()
    g /= cosines.norms_of(g)
    mixed = 0.3 * g + 0.7 * np.roll(g, -1, 0)
    mixed /= cosines.norms_of(mixed)
    options = {"diagonal": "keep", "scale": 5.0}
    case = Case("mixed", {}, np.eye(9), {**options, "row_negatives": mixed})
    exact = cosines.expected(case, inputs)
    loss = fastqt.contrastive_loss(
        *(queries, candidates, fastqt.Diagonal()),
        row_negatives=fastqt.Mixed(0.3),
        normalize=True,
        memory=memory,
        backend="triton",
        **options,
    )
    assert relative(loss, exact["loss"].mean()) < FLOAT32
    for name, gradient in zip(inputs, torch.autograd.grad(loss, list(inputs.values())), strict=True):
        assert cosines.error(name, inputs, gradient, exact[name]) < FLOAT32, name


@by_dtype
def test_inverse_norms(dtype):
    x = torch.randn(7, 1100, dtype=torch.float64)
    x[1], x[2], x[3] = 0, x[2] * 1e-20, x[3] * 1e20
    x[4, 5], x[5, 6] = float("nan"), 3e38
    given = x.to(dtype)
    norms = given.double().norm(dim=1).clamp(min=1e-12)
    found = inverse_norms(given)
    assert found[4].isnan()
    kept = [0, 1, 2, 3, 5, 6]
    assert torch.allclose(found[kept].double() * norms[kept], torch.ones(6).double(), rtol=1e-6, atol=0)


def test_which_problems_are_given_copies():
    """float16 has too little range, and scores that are written as a matrix make copies a trifle."""
    seen = {}
    for name, dtype, targets in (
        ("float32", torch.float32, None),
        ("bfloat16", torch.bfloat16, None),
        ("float16", torch.float16, None),
        ("dense", torch.float32, torch.eye(9).roll(1, 1)),
    ):
        queries, candidates = (torch.randn(9, 4).to(dtype) for _ in range(2))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(
                operands.Operands,
                "__init__",
                lambda self, p, *more, name=name: seen.update({name: p.normalize}) or 1 / 0,
            )
            with pytest.raises(ZeroDivisionError):
                fastqt.contrastive_loss(queries, candidates, targets, normalize=True, backend="triton")
    assert seen == {"float32": True, "bfloat16": True, "float16": False, "dense": False}


def test_autocast_to_float16_is_given_copies():
    """The dtype of the computation decides, not that of the tensors."""
    queries, candidates = (torch.randn(9, 4).requires_grad_() for _ in range(2))
    with torch.no_grad():
        candidates[4] = 0
    with torch.autocast("cpu", dtype=torch.float16):
        loss = fastqt.contrastive_loss(queries, candidates, normalize=True, backend="triton")
    loss.backward()
    assert loss.isfinite()
    assert queries.grad.isfinite().all()


def converged(generator: torch.Generator, N: int, D: int) -> list[torch.Tensor]:
    queries = torch.randn(N, D, generator=generator)
    return [queries, queries + 0.05 * torch.randn(N, D, generator=generator)]


@by_dtype
@by_memory
@pytest.mark.parametrize("kind", ["random", "converged"])
@pytest.mark.thinned(3)
@pytest.mark.pairwise
def test_error_is_at_most_eagers(kind, memory, dtype):
    """Eager PyTorch normalises in float32, rounds to the dtype, and multiplies and sums up in float32."""
    N, D, scale = 32, 32, 40.0
    case = Case("pairs", {}, np.eye(N), {"diagonal": "keep", "scale": scale})
    ours, eagers = [], []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        pair = (
            converged(generator, N, D) if kind == "converged" else torch.randn(2, N, D, generator=generator)
        )
        lengths = torch.randn(2, N, 1, generator=generator).exp()
        inputs = [(x * length).to(dtype).requires_grad_() for x, length in zip(pair, lengths, strict=True)]
        leaves = dict(zip(("queries", "candidates"), inputs, strict=True))
        exact = cosines.expected(case, leaves)
        if kind == "converged":
            assert np.exp(-exact["loss"]).min() > 0.999

        def errors(loss: torch.Tensor, leaves=leaves, exact=exact) -> list[float]:
            gradients = torch.autograd.grad(loss, list(leaves.values()))
            return [
                relative(loss, exact["loss"].mean()),
                *(cosines.error(k, leaves, g, exact[k]) for k, g in zip(leaves, gradients, strict=True)),
            ]

        options = {"diagonal": "keep", "scale": scale, "normalize": True, "memory": memory}
        ours.append(errors(fastqt.contrastive_loss(*inputs, fastqt.Diagonal(), backend="triton", **options)))
        f, g = (F.normalize(x.float(), dim=1).to(dtype) for x in inputs)
        eagers.append(errors(F.cross_entropy(scale * (f @ g.T).float(), torch.arange(N))))
    bound = EAGER_FACTOR * CUT_OFF[dtype] * np.mean(eagers, axis=0) + HALF_ULP[torch.float32]
    assert (np.mean(ours, axis=0) <= bound).all(), (np.mean(ours, axis=0), np.mean(eagers, axis=0))
