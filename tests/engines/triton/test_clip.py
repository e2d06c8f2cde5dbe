"""CLIP's loss by the Triton engine, interpreted: a walk for rows' and columns' sums, one for gradients."""

import functools
import math
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fastqt
from fastqt.engines.triton import clip, operands, scores, softmax
from fastqt.kernels.launch import Config
from tests.shared import oracle
from tests.shared.tolerances import EAGER_FACTOR, FLOAT32, HALF_ULP, REORDERED, TWO_ROUNDINGS, relative

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_memory = pytest.mark.parametrize("memory", ["fast", "low"])
clip_loss = functools.partial(fastqt.clip_loss, normalize=False, backend="triton")


def random_inputs(N: int, D: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Two matrices of rows, and a scale."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(N, D, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    return [a, b, torch.tensor(2.5, requires_grad=True)]


def expected(inputs: list[torch.Tensor], weights: np.ndarray | None = None) -> list[np.ndarray]:
    """The losses of the pairs, and the gradients of their sum with weights, of the mean by default."""
    a, b, scale = (x.detach().double().numpy() for x in inputs)
    options = {"diagonal": "keep", "scale": float(scale), "row_weights": weights}
    rows = oracle.contrastive(a, b, np.eye(len(a)), **options)
    columns = oracle.contrastive(b, a, np.eye(len(a)), **options)
    sums = (
        rows.loss + columns.loss,
        rows.queries + columns.candidates,
        rows.candidates + columns.queries,
        rows.scale + columns.scale,
    )
    return [x / 2 for x in sums]


def assert_gradients(found, wanted, tolerance: float) -> None:
    for name, gradient, exact in zip(("a", "b", "scale"), found, wanted, strict=True):
        assert relative(gradient, exact) < tolerance, name


@by_memory
@by_dtype
def test_is_the_oracles(dtype, memory):
    """The rows are computed in two blocks."""
    inputs = random_inputs(18, 5, dtype)
    loss = clip_loss(*inputs[:2], scale=inputs[2], memory=memory)
    exact, *wanted = expected(inputs)
    assert loss.dtype is torch.float32
    assert relative(loss, exact.mean()) < FLOAT32
    assert_gradients(torch.autograd.grad(loss, inputs), wanted, FLOAT32 + TWO_ROUNDINGS[dtype])


@by_memory
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_pairs_weighted_by_an_upstream_gradient(dtype, memory, monkeypatch):
    """With reduction="none" any upstream gradient may come; backward reuses the sums of the forward pass."""
    found, genuine = [], clip._sums
    monkeypatch.setattr(clip, "_sums", lambda *given: found.append(genuine(*given)) or found[-1])
    inputs = random_inputs(9, 5, dtype)
    upstream = torch.tensor([1.0, -2.0, 0.0, 1e-3, 0.5, 3.0, -1e-2, 1.0, 0.0])
    loss = clip_loss(*inputs[:2], scale=inputs[2], reduction="none", memory=memory)
    exact, *wanted = expected(inputs, upstream.double().numpy())
    assert relative(loss, exact) < FLOAT32
    assert_gradients(torch.autograd.grad(loss, inputs, upstream), wanted, FLOAT32 + TWO_ROUNDINGS[dtype])
    assert len(found) == 1


@pytest.mark.parametrize(("memory", "N"), [("fast", 40), ("low", 24)])
def test_chunks_and_tiles_do_not_change_the_result(memory, N, monkeypatch):
    launched, genuine = [], clip.row_and_column_scores

    def row_and_column_scores(tile, *args, **options):
        launched.append((tile.rows, len(tile.candidates), "total" in options))
        genuine(tile, *args, **options)

    monkeypatch.setattr(clip, "row_and_column_scores", row_and_column_scores)
    monkeypatch.setattr(scores, "score_config", lambda *_: Config(16, 16, 16, group=2))
    monkeypatch.setattr(operands, "ROW_MULTIPLE", 16)
    monkeypatch.setattr(operands, "FAST_BYTES", 0)
    monkeypatch.setattr(operands, "LOW_BYTES", 0)
    monkeypatch.setattr(clip, "SUM_ROWS", 16)
    inputs = random_inputs(N, 5, torch.bfloat16 if memory == "low" else torch.float32)
    loss = clip_loss(*inputs[:2], scale=inputs[2], memory=memory)
    found = torch.autograd.grad(loss, inputs)
    summed = [tile[:2] for tile in launched if not tile[2]]
    stored = [tile[:2] for tile in launched if tile[2]]
    if memory == "fast":
        assert summed == [(16, 40), (16, 40), (8, 40)]
        assert stored == [(rows, columns) for rows in (16, 16, 8) for columns in (16, 16, 8)]
    else:  # rows for da, then columns for db
        assert summed == [(16, 24), (8, 24)]
        assert stored == [*product((16, 8), (16, 8)), (16, 16), (8, 16), (16, 8), (8, 8)]
    exact, *wanted = expected(inputs)
    assert relative(loss, exact.mean()) < FLOAT32
    assert_gradients(found, wanted, FLOAT32 + TWO_ROUNDINGS[inputs[0].dtype])


@by_dtype
def test_rows_and_columns_whose_shift_overflowed_are_computed_again(dtype, monkeypatch):
    """Loud rows score about 130 with two candidates, which beside a small score of the pair overflows."""
    redone, genuine = [], softmax.row_stats

    def row_stats(sums, tiles, queries, scale, cells, state, *more):
        genuine(sums, tiles, queries, scale, cells, state, *more)
        redone.append(state.shift_overflowed.nonzero().flatten().tolist())

    monkeypatch.setattr(softmax, "row_stats", row_stats)
    N = 20
    a, b, _ = (x.detach() for x in random_inputs(N, 5, torch.float32))
    a[:, 0], b[:, 0] = 0, 0
    a[::3, 0] = 12.0
    b[5, 0], b[9, 0] = 11.0, 10.9
    inputs = [*(x.to(dtype).requires_grad_() for x in (a, b)), torch.ones((), requires_grad=True)]
    loss = clip_loss(*inputs[:2], scale=inputs[2])
    # Row 9's own candidate is one of the two, so its reference and that of column 9 are near their scores.
    assert redone == [[i for i in range(0, N, 3) if i != 9], [5]]
    exact, *wanted = expected(inputs)
    assert relative(loss, exact.mean()) < FLOAT32
    assert_gradients(torch.autograd.grad(loss, inputs), wanted, 10 * FLOAT32 + 2 * TWO_ROUNDINGS[dtype])


def test_log_sum_exps_that_float32_rounds_leave_no_error():
    """To base 2 all scores are whole numbers about 4,096, where float32 has four digits of a log-sum-exp."""
    a = torch.randint(0, 2, (16, 7), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    b = -a  # so that next to nothing hangs on a pair's own score, which is natural
    a[:, 0] = b[:, 0] = 64
    inputs = [*(x.requires_grad_() for x in (a, b)), torch.tensor(math.log(2), requires_grad=True)]
    found = torch.autograd.grad(clip_loss(*inputs[:2], scale=inputs[2]), inputs[:2])
    _, *wanted = expected(inputs)
    for gradient, exact in zip(found, wanted[:2], strict=True):
        assert relative(gradient, exact) < FLOAT32


@by_dtype
@pytest.mark.parametrize("score", [None, 24.0], ids=["random", "p > 1 - 1e-8"])
@pytest.mark.thinned(3)
def test_error_is_at_most_eagers(score, dtype):
    """Eager PyTorch in the same dtype, which forms its scores, probabilities and p - t in it."""
    N, seeds = 16, 2
    ours, eagers = [], []
    for seed in range(seeds):
        inputs = random_inputs(N, N, dtype, seed)[:2]
        if score is not None:
            b = torch.linalg.qr(inputs[0].detach().float()).Q
            inputs = [(score * b).to(dtype).requires_grad_(), b.to(dtype).requires_grad_()]
        exact, *wanted = expected([*inputs, torch.ones(())])
        if score is not None:
            assert exact.max() < 1e-8
        found = torch.autograd.grad(clip_loss(*inputs, scale=1.0), inputs)
        ours.append([error(x, y) for x, y in zip(found, wanted[:2], strict=True)])
        scores, own = inputs[0] @ inputs[1].T, torch.arange(N)
        loss = (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2
        found = torch.autograd.grad(loss, inputs)
        eagers.append([error(x, y) for x, y in zip(found, wanted[:2], strict=True)])
    bound = EAGER_FACTOR * np.mean(eagers, axis=0) + HALF_ULP[torch.float32]
    assert (np.mean(ours, axis=0) <= bound).all(), (np.mean(ours, axis=0), np.mean(eagers, axis=0))


def error(a: torch.Tensor, exact: np.ndarray) -> float:
    return float(np.linalg.norm(a.double().numpy() - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("place", [0, 1, 2], ids=["a", "b", "scale"])
def test_one_gradient_alone(place):
    inputs = random_inputs(9, 5, torch.float32)
    alone = [x if k == place else x.detach() for k, x in enumerate(inputs)]
    (gradient,) = torch.autograd.grad(clip_loss(*alone[:2], scale=alone[2]), alone[place])
    assert relative(gradient, expected(inputs)[1 + place]) < FLOAT32


def test_backward_runs_twice_and_double_backward_is_refused():
    inputs = random_inputs(9, 5, torch.float32)
    loss = clip_loss(*inputs[:2], scale=inputs[2])
    first = torch.autograd.grad(loss, inputs, torch.tensor(2.0), retain_graph=True)
    for x, y in zip(first, torch.autograd.grad(loss, inputs), strict=True):
        assert relative(x, 2 * y) < REORDERED[torch.float32]
    with pytest.raises(RuntimeError, match="clip_loss is differentiable once"):
        torch.autograd.grad(clip_loss(*inputs[:2], scale=inputs[2]), inputs[0], create_graph=True)


def test_one_pair():
    inputs = random_inputs(1, 3, torch.float32)
    loss = clip_loss(*inputs[:2], scale=inputs[2])
    assert abs(loss.item()) < HALF_ULP[torch.float32]
    assert not any(g.any() for g in torch.autograd.grad(loss, inputs))


def test_non_finite_inputs_reach_the_loss():
    """It reaches the loss of its own row and, through the softmax of its column, those of all others."""
    a, b, scale = (x.detach() for x in random_inputs(9, 5, torch.float32))
    a[4, 1] = float("nan")
    assert clip_loss(a, b, scale=scale, reduction="none").isnan().all()
