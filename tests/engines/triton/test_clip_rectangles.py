"""Rectangles of CLIP's scores by the Triton engine, interpreted, add up to the loss of the whole batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.engines.triton import clip, operands, scores, softmax
from fastqt.kernels.launch import Config
from fastqt.problem import ClipProblem, ClipSide, Needs
from tests.shared.clip_oracle import ALL, assembled
from tests.shared.clip_oracle import clip as oracle
from tests.shared.tolerances import EAGER_FACTOR, FLOAT32, HALF_ULP, TWO_ROUNDINGS, relative

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_blocks = pytest.mark.parametrize("blocks", [False, True], ids=["own first", "blocks"])


def batch(sizes: tuple[int, ...], D: int, dtype: torch.dtype, score: float | None = None) -> list[Tensor]:
    """Two similar matrices of rows and a scale; with a score, orthogonal rows whose pairs score as much."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(sum(sizes), D, generator=generator) for _ in range(2))
    b += a / 2
    if score is not None:
        b = torch.linalg.qr(a).Q[:, : sum(sizes)].T[: sum(sizes)]
        a = score * b
    return [a.to(dtype), b.to(dtype), torch.tensor(1.0 if score else 1.25)]


def errors(inputs: list[Tensor], sizes: tuple[int, ...], **options: Any) -> list[float]:
    """How far loss and gradients are from the oracle's, with weights as large as float16 wants them."""
    a, b, scale = inputs
    weights = np.linspace(-1, 4, len(a)) * (2.0**12 if a.dtype is torch.float16 else 1)
    exact = oracle(
        *(x.double().numpy() for x in (a, b)), float(scale), weights, options.get("normalize", False)
    )
    shards = list(zip(a.split(sizes), b.split(sizes), strict=True))
    found = assembled(clip, shards, scale, weights, **options)
    return [relative(x, y) for x, y in zip(found, exact, strict=True)]


@by_dtype
@by_blocks
@pytest.mark.parametrize("score", [None, 16.0], ids=["random", "p > 1 - 1e-5"])
@pytest.mark.thinned(4)
@pytest.mark.pairwise
def test_rectangles_add_up_to_the_loss_of_the_batch(score, blocks, dtype):
    """float16 has too little range for inverse norms, so that the engine never has to normalise it."""
    sizes = (5, 1, 8)
    found = errors(batch(sizes, 16, dtype, score), sizes, blocks=blocks, normalize=dtype is torch.bfloat16)
    assert found[0] < FLOAT32
    assert max(found[1:]) < FLOAT32 + TWO_ROUNDINGS[dtype]
    if dtype is torch.float32 and score is None:
        assert max(found) < 1e-6


@pytest.mark.parametrize(
    ("blocks", "memory"),
    [
        (False, "low"),
        (True, "fast"),
        pytest.param(False, "fast", marks=pytest.mark.slow),
        pytest.param(True, "low", marks=pytest.mark.slow),
    ],
)
@pytest.mark.thinned(2)
def test_chunks_and_tiles_do_not_change_the_result(blocks, memory, monkeypatch):
    """The rows and the columns of a rectangle are as many tiles as they need each."""
    launched, genuine = set(), clip.row_and_column_scores

    def row_and_column_scores(tile, *args, **options):
        launched.add((tile.rows, len(tile.candidates), tile.exclude_diagonal, "total" in options))
        genuine(tile, *args, **options)

    monkeypatch.setattr(clip, "row_and_column_scores", row_and_column_scores)
    monkeypatch.setattr(scores, "score_config", lambda *_: Config(16, 16, 16, group=2))
    monkeypatch.setattr(operands, "ROW_MULTIPLE", 16)
    monkeypatch.setattr(operands, "FAST_BYTES", 0)
    monkeypatch.setattr(operands, "LOW_BYTES", 0)
    monkeypatch.setattr(clip, "SUM_ROWS", 16)
    sizes, dtype = (18, 1), torch.bfloat16 if memory == "low" else torch.float32
    found = errors(batch(sizes, 5, dtype), sizes, blocks=blocks, memory=memory, normalize=True)
    assert max(found) < FLOAT32 + TWO_ROUNDINGS[dtype]
    widths = {18, 1} if blocks else {19}
    assert {tile[:2] for tile in launched if not tile[3]} == {(h, w) for h in (16, 2, 1) for w in widths}
    assert {tile[2] for tile in launched} == ({False, True} if blocks else {True})
    assert max(max(tile[:2]) for tile in launched if tile[3]) == 16


def test_sums_beside_pairs_that_are_certain():
    """A pair's score is 300 above the others of its row and column, which no shift of float32 spans."""
    inputs = batch((4, 2), 6, torch.float32, score=1.0)
    a, b = 300 * inputs[0], inputs[1]
    exact = a.double() @ b.double().T
    p = ClipProblem(a[:4], b, 1.0, pairs=4)
    found = clip.sums(p)
    others = exact.clone()
    others.diagonal().fill_(-math.inf)
    assert relative(found.positive, exact.diagonal()[:4]) < FLOAT32
    assert relative(found.row_others, others[:4].logsumexp(1)) < 1e-4  # of scores that are sums of roundings
    assert relative(found.column_others, others[:4].logsumexp(0)) < 1e-4


def test_rows_and_columns_whose_shift_overflowed_are_computed_again(monkeypatch):
    """Without pairs the shift of few candidates is 0, which scores of 130 overflow and of -130 underflow."""
    redone, genuine = [], softmax.row_stats

    def row_stats(sums, tiles, queries, scale, cells, state, *more):
        genuine(sums, tiles, queries, scale, cells, state, *more)
        redone.append(state.shift_overflowed.nonzero().flatten().tolist())

    monkeypatch.setattr(softmax, "row_stats", row_stats)
    a, b, scale = batch((9,), 5, torch.float32)
    a[:, 0], b[:, 0] = 0, 10
    a[2, 0], a[4, 0] = 13, -13
    a = a[:6]
    p = ClipProblem(a, b, scale, pairs=0)
    found = clip.sums(p)
    # The loud row is the largest of every column.
    assert redone == [[2, 4], list(range(9))]
    exact = float(scale) * a.double() @ b.double().T
    assert relative(found.row_others, exact.logsumexp(1)) < 1e-6
    assert relative(found.column_others, exact.logsumexp(0)) < 1e-6
    assert found.positive.shape == (0,)


def test_log_sum_exps_that_float32_rounds_leave_no_error():
    """To base 2 all scores are whole numbers about 4,096, where float32 has four digits of a log-sum-exp."""
    a = torch.randint(0, 2, (16, 7), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    b = -a
    a[:, 0] = b[:, 0] = 64
    found = errors([a, b, torch.tensor(math.log(2))], (9, 7), blocks=True)
    assert max(found[1:3]) < FLOAT32


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("score", [None, 24.0], ids=["random", "p > 1 - 1e-8"])
def test_error_is_at_most_eagers(score, dtype):
    """Rows of a gradient that one rectangle makes, beside eager PyTorch's for the whole batch."""
    sizes, N = (9, 7), 16
    a, b, scale = batch(sizes, N, dtype, score)
    weights = np.ones(N)
    exact = oracle(a.double().numpy(), b.double().numpy(), float(scale), weights, False)
    shards = list(zip(a.split(sizes), b.split(sizes), strict=True))
    found = assembled(clip, shards, scale, weights, blocks=False)
    leaf = a.clone().requires_grad_()
    products, own = scale.to(dtype) * leaf @ b.T, torch.arange(N)
    loss = F.cross_entropy(products, own, reduction="sum") + F.cross_entropy(products.T, own, reduction="sum")
    (eager,) = torch.autograd.grad(loss / 2, leaf)
    ours, theirs = (np.linalg.norm(x.double().numpy() - exact[1]) for x in (found[1], eager))
    assert ours <= EAGER_FACTOR * theirs + HALF_ULP[torch.float32] * np.linalg.norm(exact[1])


@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["queries", "candidates", "scale"])
def test_one_gradient_alone(wanted):
    sizes = (4, 5)
    found = errors(batch(sizes, 5, torch.float32), sizes, blocks=True, needs=Needs(**{wanted: True}))
    at = 3 if wanted == "scale" else 1 + ALL._fields.index(wanted)
    assert found[at] < FLOAT32
    assert sum(error == 1 for error in found) == 2  # the others, which stay 0


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(0, 9), (5, 0, 4)], ids=str)
@by_blocks
def test_shards_may_be_empty(sizes, blocks):
    assert max(errors(batch(sizes, 5, torch.float32), sizes, blocks=blocks)) < FLOAT32


def test_weights_may_all_be_zero():
    a, b, scale = batch((9,), 5, torch.float16)
    side = ClipSide(torch.zeros(9).double(), torch.zeros(9).double())
    found = clip.gradients_from(ClipProblem(a, b, scale, pairs=0), side, side, torch.empty(0).double(), ALL)
    assert not any(g.any() for g in (found.queries, found.candidates, found.scale))


@pytest.mark.slow
def test_non_finite_inputs_reach_the_sums():
    """Its row and, as every column has a cell in it, all columns."""
    a, b, scale = batch((9,), 5, torch.float32)
    a[4, 1] = float("nan")
    found = clip.sums(ClipProblem(a, b, scale, pairs=9))
    assert found.row_others.isnan().tolist() == found.positive.isnan().tolist() == [i == 4 for i in range(9)]
    assert found.column_others.isnan().tolist() == [i != 4 for i in range(9)]
