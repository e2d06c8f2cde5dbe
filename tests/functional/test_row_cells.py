"""Cells that a row alone has: scores that are given, and several row negatives.

tests/shared/cases.py has more of them, which run on every engine.
"""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastqt
from fastqt.functional import row_cells as lowering
from tests.shared import oracle
from tests.shared.tolerances import (
    EAGER_FACTOR,
    FLOAT32,
    FLOAT64,
    HALF_ULP,
    REORDERED,
    THREE_ROUNDINGS,
    relative,
)

pytestmark = pytest.mark.usefixtures("low_memory_in_tiles")
N, M, D, K, L = 13, 17, 6, 3, 2
INF = float("inf")
PAIRS = {"targets": fastqt.Diagonal(), "diagonal": "keep"}
FUNCTIONS = {
    "softmax": (fastqt.contrastive_loss, PAIRS),
    "sigmoid": (fastqt.sigmoid_loss, PAIRS),
    "log_sum_exp": (fastqt.log_sum_exp, {}),
}
SHAPES = {
    "queries": (N, D),
    "candidates": (M, D),
    "row_negatives": (N, D),
    "stacked": (N, K, D),
    "row_scores": (N,),
    "several": (N, L),
}
CELLS = [
    ("row_scores",),
    ("several",),
    ("stacked",),
    ("row_negatives", "row_scores"),
    ("stacked", "several"),
]
by_link = pytest.mark.parametrize("link", FUNCTIONS)
by_cells = pytest.mark.parametrize("cells", CELLS, ids="+".join)


def inputs_of(cells: tuple[str, ...], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    arguments = {"stacked": "row_negatives", "several": "row_scores"}
    return {
        arguments.get(name, name): torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for name in ("queries", "candidates", *cells)
    }


def loss_of(link: str, inputs: dict[str, Tensor], **options: object) -> Tensor:
    function, fixed = FUNCTIONS[link]
    return function(**inputs, **fixed, **options)


def cosines(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: x if name == "row_scores" else x / x.norm(dim=-1, keepdim=True) for name, x in inputs.items()
    }


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("cpu", torch.float64),
        ("cpu", torch.bfloat16),
        ("triton", torch.float16),
        ("torch", torch.float64),
        ("reference", torch.float64),
    ],
    ids=str,
)
@by_cells
@by_link
@pytest.mark.thinned(3)
@pytest.mark.pairwise
def test_cosines_and_16_bits(link, cells, backend, dtype):
    """Row scores are never normalised; what is read in 16 bits is scored in float32."""
    inputs = inputs_of(cells, dtype)
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    scale, mean = 3.0, {} if link == "log_sum_exp" else {"reduction": "sum"}
    found = loss_of(link, inputs, normalize=True, scale=scale, backend=backend, **mean).sum()
    unit = cosines(exact)
    truth = oracle.contrastive(
        *(unit.pop(name).detach().numpy() for name in ("queries", "candidates")),
        np.zeros((N, M)) if link == "log_sum_exp" else np.eye(N, M),
        **{name: x.detach().numpy() for name, x in unit.items()},
        **{"diagonal": "keep", "scale": scale, "link": link, "row_weights": np.ones(N)},
    )
    of_unit = [torch.from_numpy(getattr(truth, name)) for name in inputs]
    wanted = torch.autograd.grad(list(cosines(exact).values()), list(exact.values()), of_unit)
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: THREE_ROUNDINGS[torch.float16]}.get(dtype, 0.0)
    assert relative(found, truth.loss.sum()) < 4 * rounding + FLOAT64
    gradients = torch.autograd.grad(found, list(inputs.values()))
    for name, a, b in zip(inputs, gradients, wanted, strict=True):
        assert relative(a, b) < 4 * rounding + FLOAT64, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "triton", "torch", "reference"])
@by_link
def test_a_score_keeps_its_digits(link, backend, dtype):
    """In bfloat16 100.3 would be 100.5; it is most of its row's sum."""
    queries, candidates = (torch.zeros(N, D, dtype=dtype) for _ in range(2))
    scores = torch.linspace(99.8, 100.3, N, requires_grad=True)
    loss = loss_of(
        link, {"queries": queries, "candidates": candidates, "row_scores": scores}, backend=backend
    )
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    wanted = {
        "softmax": scores.double().mean(),
        "sigmoid": scores.double().mean() + N * np.log(2),
        "log_sum_exp": scores.double(),
    }[link]
    assert relative(loss, wanted.detach()) < 2 * HALF_ULP[torch.float32]
    assert relative(gradient, torch.ones(N) / (1 if link == "log_sum_exp" else N)) < 1e-6


@pytest.mark.parametrize("backend", ["cpu", "triton", "torch", "reference"])
@pytest.mark.parametrize("several", [False, True])
@by_link
@pytest.mark.thinned(3)
def test_scores_that_are_no_numbers(link, several, backend):
    """-inf is no cell: no gradient. What is +inf or NaN reaches the loss of its row."""
    inputs = inputs_of(("row_scores",), torch.float32)
    scores = inputs["row_scores"].detach().clone()
    scores[0], scores[1], scores[2] = -INF, INF, float("nan")
    inputs["row_scores"] = (torch.stack([scores, scores], 1) if several else scores).requires_grad_()
    mask = torch.zeros(N, M, dtype=torch.bool)
    mask[0] = link == "log_sum_exp"  # nothing is left of this row
    none = {} if link == "log_sum_exp" else {"reduction": "none"}
    loss = loss_of(link, inputs, mask=mask, backend=backend, **none)
    assert not loss[1:3].isfinite().any()
    assert loss[3:].isfinite().all()
    kept = torch.tensor([0, *range(3, N)])
    without = {name: x.detach()[kept] for name, x in inputs.items() if name == "queries"}
    without["candidates"] = inputs["candidates"].detach()
    options = {} if link == "log_sum_exp" else {**PAIRS, "targets": kept, "reduction": "none"}
    alone = FUNCTIONS[link][0](**without, mask=mask[kept], backend=backend, **options)[0]
    assert torch.equal(loss[0].isneginf(), alone.isneginf())
    assert link == "log_sum_exp" or relative(loss[0], alone) < FLOAT32
    (gradient,) = torch.autograd.grad(loss[kept].sum(), inputs["row_scores"])
    assert not gradient[0].any()
    assert gradient[3:].isfinite().all()


@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize("score", [20.0, 40.0])
@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=pytest.mark.slow)])
def test_error_of_converged_rows_is_at_most_eagers(backend, score, memory):
    """The positive's probability is over 0.999, and half of what is left is that of the row's own cells."""
    generator = torch.Generator().manual_seed(0)
    errors = {"ours": [], "eager": []}
    for _ in range(3):
        candidates = F.normalize(torch.randn(32, 64, generator=generator), dim=1)
        stacked = F.normalize(torch.randn(32, K, 64, generator=generator), dim=2)
        scores = torch.randn(32, L, generator=generator)
        leaves = [x.requires_grad_() for x in (score * candidates, candidates, stacked, scores)]
        exact = [x.detach().double().requires_grad_() for x in leaves]
        found = fastqt.contrastive_loss(
            *leaves[:2],
            row_negatives=leaves[2],
            row_scores=leaves[3],
            **PAIRS,
            backend=backend,
            memory=memory,
        )
        diagonal = torch.eye(32, dtype=torch.bool)
        own, *others = eager_scores(*exact)
        rest = torch.cat([own.masked_fill(diagonal, -INF), *others], 1).logsumexp(1)
        truth = torch.log1p((rest - own.diagonal()).exp()).mean()
        plain = F.cross_entropy(torch.cat(eager_scores(*leaves), 1), torch.arange(32))
        wanted = [truth, *torch.autograd.grad(truth, exact)]
        for name, loss in (("ours", found), ("eager", plain)):
            values = [loss, *torch.autograd.grad(loss, leaves)]
            errors[name].append(
                [
                    float((a.detach().double() - b.detach()).norm() / b.detach().norm())
                    for a, b in zip(values, wanted, strict=True)
                ]
            )
    ours, eager = (np.mean(errors[name], 0) for name in ("ours", "eager"))
    assert (ours <= EAGER_FACTOR * eager + HALF_ULP[torch.float32]).all(), (ours, eager)


def eager_scores(queries: Tensor, candidates: Tensor, stacked: Tensor, scores: Tensor) -> list[Tensor]:
    return [queries @ candidates.T, torch.einsum("nd,nkd->nk", queries, stacked), scores]


@pytest.mark.parametrize("normalize", [False, True])
@by_cells
@by_link
def test_gradcheck(link, cells, normalize, monkeypatch):
    """Also of row negatives that are scored in several chunks."""
    monkeypatch.setattr(lowering, "CHUNK_BYTES", 8 * 4 * K * D)
    inputs = inputs_of(cells)
    for backend in ("cpu", "torch", "reference"):
        assert torch.autograd.gradcheck(
            lambda *given, backend=backend: loss_of(
                link, dict(zip(inputs, given, strict=True)), normalize=normalize, scale=2.0, backend=backend
            ).sum(),
            tuple(inputs.values()),
            fast_mode=True,
            nondet_tol=1e-12,
        )


@pytest.mark.slow
@by_cells
def test_second_derivatives_are_the_references(cells):
    inputs = inputs_of(cells)

    def loss(*given: Tensor) -> Tensor:
        return loss_of("softmax", dict(zip(inputs, given, strict=True)), normalize=True, backend="reference")

    assert torch.autograd.gradgradcheck(loss, tuple(inputs.values()), fast_mode=True)


def transformed():
    for link, cells in itertools.product(FUNCTIONS, CELLS):
        quick = link == "softmax" and cells == CELLS[-1]
        yield pytest.param(link, cells, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("link", "cells"), list(transformed()))
def test_transforms_and_compilers(link, cells):
    torch.compiler.reset()  # Dynamo counts the cases of one function.
    inputs = inputs_of(cells)
    names = list(inputs)

    def loss(*given: Tensor) -> Tensor:
        return loss_of(link, dict(zip(names, given, strict=True)), scale=1.5).sum()

    wanted = torch.autograd.grad(loss(*inputs.values()), list(inputs.values()))
    given = [x.detach() for x in inputs.values()]
    everything = tuple(range(len(names)))
    batched = vmap(grad(loss, argnums=everything))(*(torch.stack([x, 2 * x]) for x in given))
    for a, b in zip(batched, wanted, strict=True):
        assert relative(a[0], b) < FLOAT64
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*inputs.values()), list(inputs.values()))
    for a, b in zip(found, wanted, strict=True):
        assert relative(a, b) < REORDERED[torch.float64]


def test_one_row_negative_of_several_is_the_engines(monkeypatch):
    """(N, 1, D) is (N, D): nothing is scored outside of the engine."""
    inputs = inputs_of(("row_negatives",))
    wanted = loss_of("softmax", inputs)
    monkeypatch.setattr(lowering, "scores_of_row_negatives", None)
    assert torch.equal(
        loss_of("softmax", {**inputs, "row_negatives": inputs["row_negatives"][:, None]}), wanted
    )


@by_link
def test_mixtures_beside_row_scores(link):
    inputs = inputs_of(("row_scores",))
    partners = torch.arange(N).roll(-1)
    for normalize in (False, True):
        found = loss_of(link, {**inputs, "row_negatives": fastqt.Mixed(0.3)}, normalize=normalize)
        g = F.normalize(inputs["candidates"], dim=1) if normalize else inputs["candidates"]
        mixtures = F.normalize(0.3 * g[:N] + 0.7 * g[partners], dim=1).detach()
        wanted = loss_of(link, {**inputs, "row_negatives": mixtures}, normalize=normalize)
        assert relative(found, wanted) < FLOAT64


def test_autocast_reads_row_negatives_as_a_product_would():
    inputs = inputs_of(("stacked", "several"), torch.float32)
    rounded = {name: x if name == "row_scores" else x.bfloat16() for name, x in inputs.items()}
    with torch.autocast("cpu", torch.bfloat16):
        found = loss_of("softmax", inputs)
    assert relative(found, loss_of("softmax", rounded)) < REORDERED[torch.float32]


REFUSED = {
    "another number of rows": (
        {"row_scores": torch.zeros(N - 1)},
        ValueError,
        r"row_scores: want shape \(13,\)",
    ),
    "three dimensions": (
        {"row_scores": torch.zeros(N, 1, 1)},
        ValueError,
        r"row_scores: .* got \(13, 1, 1\)",
    ),
    "no columns": ({"row_scores": torch.zeros(N, 0)}, ValueError, r"row_scores: .* K >= 1, got \(13, 0\)"),
    "integers": (
        {"row_scores": torch.zeros(N).long()},
        TypeError,
        r"row_scores: want a floating-point dtype",
    ),
    "a list": ({"row_scores": [0.0] * N}, TypeError, r"row_scores: want a tensor, got list"),
    "stacked rows of another D": (
        {"row_negatives": torch.zeros(N, 2, D + 1)},
        ValueError,
        r"row_negatives: want D=6 columns as queries has, got 7",
    ),
    "fewer stacked rows": (
        {"row_negatives": torch.zeros(N - 1, 2, D)},
        ValueError,
        r"row_negatives: want a row for each of N=13 queries, got 12",
    ),
    "stacked rows of four dimensions": (
        {"row_negatives": torch.zeros(N, 2, 1, D)},
        ValueError,
        r"row_negatives: want shape \(N, D\) or \(N, K, D\), got \(13, 2, 1, 6\)",
    ),
    "the small kernel": ({"row_scores": torch.zeros(N), "backend": "cuda"}, ValueError, "backend: 'cuda'"),
}


@pytest.mark.parametrize("case", REFUSED)
@by_link
def test_refusals_name_the_argument(link, case):
    changes, error, message = REFUSED[case]
    inputs = {name: x.detach().float() for name, x in inputs_of(()).items()}
    with pytest.raises(error, match=message):
        loss_of(link, inputs, **changes)


class Allocations(TorchDispatchMode):
    """The sizes in bytes of the memory that operations allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        found = function(*args, **(kwargs or {}))
        storages = [x.untyped_storage() for x in tree_leaves(found) if isinstance(x, Tensor)]
        self.sizes += [x.nbytes() for x in storages if x.data_ptr() not in known]
        return found


@pytest.mark.parametrize("similarity", ["dot", "euclidean"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_as_large_as_the_row_negatives_is_allocated(dtype, normalize, similarity, monkeypatch):
    """But their gradient. They are read, normalised and subtracted from a chunk at a time."""
    monkeypatch.setattr(lowering, "CHUNK_BYTES", 4 * 4 * 16 * 64)
    queries, candidates = (torch.randn(64, 64, dtype=dtype) for _ in range(2))
    rows = torch.randn(64, 16, 64, dtype=dtype, requires_grad=True)
    with Allocations() as allocations:
        loss = fastqt.contrastive_loss(
            *(queries, candidates, fastqt.Diagonal()),
            **{"diagonal": "keep", "row_negatives": rows, "normalize": normalize, "similarity": similarity},
        )
        loss.backward()
    of_queries = 8 * queries.numel()  # float64, as norms are computed
    large = [size for size in allocations.sizes if size > max(of_queries, rows.nbytes // 4)]
    assert large == [rows.nbytes]
