"""Cells that a row alone has: scores that are given, and several row negatives.

tests/shared/cases.py has more of them, which run on every engine.
"""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

import fastqt
from fastqt.functional import row_cells as lowering
from tests.shared.ring_memory import Live
from tests.shared.tolerances import (
    FLOAT64,
    HALF_ULP,
    REORDERED,
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


@by_link
def test_transforms_and_compilers(link):
    torch.compiler.reset()  # Dynamo counts the cases of one function.
    inputs = inputs_of(("stacked", "several"))
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


REFUSED = {
    "another number of rows": (
        {"row_scores": torch.zeros(N - 1)},
        ValueError,
        r"row_scores: want shape \(13,\)",
    ),
    "three dimensions": ({"row_scores": torch.zeros(N, 1, 1)}, ValueError, r"row_scores: .* got \(13, 1"),
    "no columns": ({"row_scores": torch.zeros(N, 0)}, ValueError, r"row_scores: .* K >= 1, got \(13, 0\)"),
    "stacked rows of another D": (
        {"row_negatives": torch.zeros(N, 2, D + 1)},
        ValueError,
        r"row_negatives: want D=6 columns as queries has, got 7",
    ),
    "stacked rows of four dimensions": (
        {"row_negatives": torch.zeros(N, 2, 1, D)},
        ValueError,
        r"row_negatives: want shape \(N, D\) or \(N, K, D\), got \(13, 2, 1, 6\)",
    ),
    "the small kernel": ({"row_scores": torch.zeros(N), "backend": "cuda"}, ValueError, "backend: 'cuda'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_argument(case):
    changes, error, message = REFUSED[case]
    inputs = {name: x.detach().float() for name, x in inputs_of(()).items()}
    with pytest.raises(error, match=message):
        loss_of("softmax", inputs, **changes)


@pytest.mark.parametrize("similarity", ["dot", "euclidean"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_as_large_as_the_row_negatives_is_allocated(dtype, normalize, similarity, monkeypatch):
    """But their gradient. They are read, normalised and subtracted from a chunk at a time."""
    monkeypatch.setattr(lowering, "CPU_CHUNK_BYTES", 4 * 4 * 16 * 64)
    queries, candidates = (torch.randn(256, 64, dtype=dtype) for _ in range(2))
    rows = torch.randn(256, 64, 64, dtype=dtype, requires_grad=True)
    options = {"diagonal": "keep", "row_negatives": rows, "normalize": normalize, "similarity": similarity}
    with Live(queries, candidates, rows) as live:
        fastqt.contrastive_loss(queries, candidates, fastqt.Diagonal(), **options).backward()
    assert rows.nbytes <= live.most < 1.7 * rows.nbytes
