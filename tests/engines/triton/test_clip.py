"""CLIP's loss by the Triton engine, interpreted: a walk for sums, one for gradients; rectangles of scores."""

import functools
import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import fastqt
from fastqt.engines.triton import clip, contrastive, operands, scores, softmax
from fastqt.exclusions import Exclusions
from fastqt.kernels.launch import Config
from fastqt.losses.leaving import leaving_pairs
from fastqt.problem import ClipProblem, ClipSide
from tests.shared import oracle
from tests.shared.clip_oracle import ALL, assembled
from tests.shared.clip_oracle import clip as oracle_of_sums
from tests.shared.tolerances import FLOAT32, HALF_ULP, TWO_ROUNDINGS, relative

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


@pytest.fixture
def launched(monkeypatch) -> list[tuple[tuple[int, int], bool, bool]]:
    """Of each tile of scores, where tiles are small, its shape, whether it has no diagonal, and a total."""
    tiles, genuine = [], clip.row_and_column_scores

    def row_and_column_scores(tile, *args, **options):
        tiles.append(((tile.rows, len(tile.candidates)), tile.exclude_diagonal, "total" in options))
        genuine(tile, *args, **options)

    monkeypatch.setattr(clip, "row_and_column_scores", row_and_column_scores)
    monkeypatch.setattr(scores, "score_config", lambda *_: Config(16, 16, 16, group=2))
    for module, name, value in (
        *((operands, "ROW_MULTIPLE", 16), (operands, "FAST_BYTES", 0)),
        *((operands, "LOW_BYTES", 0), (clip, "SUM_ROWS", 16)),
    ):
        monkeypatch.setattr(module, name, value)
    return tiles


@pytest.fixture
def redone(monkeypatch) -> list[list[int]]:
    """The rows of each direction whose shift has overflowed."""
    rows, genuine = [], softmax.row_stats

    def row_stats(sums, tiles, queries, scale, cells, state, *more):
        genuine(sums, tiles, queries, scale, cells, state, *more)
        rows.append(state.shift_overflowed.nonzero().flatten().tolist())

    monkeypatch.setattr(softmax, "row_stats", row_stats)
    return rows


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
def test_chunks_and_tiles_do_not_change_the_result(memory, N, launched):
    inputs = random_inputs(N, 5, torch.bfloat16 if memory == "low" else torch.float32)
    loss = clip_loss(*inputs[:2], scale=inputs[2], memory=memory)
    found = torch.autograd.grad(loss, inputs)
    summed = [shape for shape, _, total in launched if not total]
    stored = [shape for shape, _, total in launched if total]
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
def test_rows_and_columns_whose_shift_overflowed_are_computed_again(dtype, redone):
    """Loud rows score about 130 with two candidates, which beside a small score of the pair overflows."""
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


def test_one_pair():
    inputs = random_inputs(1, 3, torch.float32)
    loss = clip_loss(*inputs[:2], scale=inputs[2])
    assert abs(loss.item()) < HALF_ULP[torch.float32]
    assert not any(g.any() for g in torch.autograd.grad(loss, inputs))


def batch(
    sizes: tuple[int, ...], D: int, dtype: torch.dtype, score: float | None = None
) -> list[torch.Tensor]:
    """Two similar matrices of rows and a scale; with a score, orthogonal rows whose pairs score as much."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(sum(sizes), D, generator=generator) for _ in range(2))
    b += a / 2
    if score is not None:
        b = torch.linalg.qr(a).Q[:, : sum(sizes)].T[: sum(sizes)]
        a = score * b
    return [a.to(dtype), b.to(dtype), torch.tensor(1.0 if score else 1.25)]


def errors(inputs: list[torch.Tensor], sizes: tuple[int, ...], **options: Any) -> list[float]:
    """How far loss and gradients are from the oracle's, with weights as large as float16 wants them."""
    a, b, scale = inputs
    weights = np.linspace(-1, 4, len(a)) * (2.0**12 if a.dtype is torch.float16 else 1)
    exact = oracle_of_sums(
        *(x.double().numpy() for x in (a, b)), float(scale), weights, options.get("normalize", False)
    )
    shards = list(zip(a.split(sizes), b.split(sizes), strict=True))
    found = assembled(clip, shards, scale, weights, **options)
    return [relative(x, y) for x, y in zip(found, exact, strict=True)]


@by_dtype
@pytest.mark.parametrize("blocks", [False, True], ids=["own first", "blocks"])
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
def test_chunks_and_tiles_of_rectangles_do_not_change_the_result(blocks, memory, launched):
    """The rows and the columns of a rectangle are as many tiles as they need each."""
    sizes, dtype = (18, 1), torch.bfloat16 if memory == "low" else torch.float32
    found = errors(batch(sizes, 5, dtype), sizes, blocks=blocks, memory=memory, normalize=True)
    assert max(found) < FLOAT32 + TWO_ROUNDINGS[dtype]
    widths = {18, 1} if blocks else {19}
    assert {shape for shape, _, total in launched if not total} == {
        (h, w) for h in (16, 2, 1) for w in widths
    }
    assert {exclude_diagonal for _, exclude_diagonal, _ in launched} == ({False, True} if blocks else {True})
    assert max(max(shape) for shape, _, total in launched if total) == 16


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


def test_rows_and_columns_of_rectangles_are_computed_again(redone):
    """Without pairs the shift of few candidates is 0, which scores of 130 overflow and of -130 underflow."""
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


def test_weights_may_all_be_zero():
    a, b, scale = batch((9,), 5, torch.float16)
    side = ClipSide(torch.zeros(9).double(), torch.zeros(9).double())
    found = clip.gradients_from(ClipProblem(a, b, scale, pairs=0), side, side, torch.empty(0).double(), ALL)
    assert not any(g.any() for g in (found.queries, found.candidates, found.scale))


def test_non_finite_inputs_reach_the_loss():
    """It reaches the loss of its own row and, through the softmax of its column, those of all others."""
    a, b, scale = (x.detach() for x in random_inputs(9, 5, torch.float32))
    a[4, 1] = float("nan")
    assert clip_loss(a, b, scale=scale, reduction="none").isnan().all()


KEEPING = {"computed again": 0, "kept": 2**27}


@pytest.fixture
def keep(monkeypatch):
    """Sets how many bytes of scores are kept, of embeddings however narrow."""
    monkeypatch.setattr(clip, "LEAST_WIDTH", dict.fromkeys(clip.LEAST_WIDTH, 1))
    return functools.partial(monkeypatch.setattr, contrastive, "KEPT_BYTES")


@by_dtype
@pytest.mark.parametrize("normalize", [False, True], ids=["products", "cosines"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("spread", [1.0, 6.0], ids=["", "overflow"])
@pytest.mark.thinned(6)
@pytest.mark.pairwise
def test_scores_that_are_kept_change_no_bit(dtype, normalize, reduction, spread, keep, launched, monkeypatch):
    """Also where shifts were too far off. The gradients are made from several tiles, which are the same."""
    a, b, scale = random_inputs(24, 5, dtype)
    a = (spread * a.detach()).requires_grad_()
    monkeypatch.setattr(clip, "fast_bytes", lambda _: 2**30)
    found = {}
    for name, size in KEEPING.items():
        keep(size)
        monkeypatch.setattr(operands, "FAST_BYTES", 4 * 24 * 64 * (size > 0))
        launched.clear()
        loss = clip_loss(a, b, scale=scale, normalize=normalize, reduction=reduction)
        gradients = torch.autograd.grad(loss.sum(), (a, b, scale), retain_graph=reduction == "none")
        again = torch.autograd.grad(loss.sum(), (a, b, scale)) if reduction == "none" else ()
        found[name] = [loss, *gradients, *again]
        assert any(total for _, _, total in launched) == (name != "kept")
    for kept, computed in zip(found["kept"], found["computed again"], strict=True):
        assert torch.equal(kept, computed)


@pytest.mark.parametrize("memory", ["low", 2**25])
def test_scores_are_kept_with_the_fast_memory_alone(memory, keep, launched, monkeypatch):
    monkeypatch.setattr(clip, "fast_bytes", lambda _: 2**30)
    inputs = random_inputs(18, 5, torch.float32)
    torch.autograd.grad(clip_loss(*inputs[:2], scale=inputs[2], memory=memory), inputs)
    assert any(total for _, _, total in launched)


@by_dtype
@pytest.mark.parametrize("keeping", KEEPING)
@pytest.mark.parametrize("pairs", [9, 0])
@pytest.mark.parametrize("normalize", [False, True], ids=["products", "cosines"])
@pytest.mark.thinned(4)
@pytest.mark.pairwise
def test_several_multiples_of_the_scores(dtype, keeping, pairs, normalize, keep):
    """Sums and gradients are those of the scores' matrix in float64, where float16 is normalised before."""
    keep(KEEPING[keeping])
    generator = torch.Generator().manual_seed(0)
    normalize = normalize and dtype is not torch.float16
    a, b = (torch.randn(n, 6, generator=generator).to(dtype) for n in (9, 21))
    multiples, scale = (1.7, 0.7), 1.5
    weights = [torch.randn(2, n, generator=generator).double() for n in (9, 21)]
    of_pairs = torch.randn(pairs, generator=generator).double()

    # The oracle: autograd of the sums, in which a pair is a cell of its own.
    x, y = (t.double().requires_grad_() for t in (a, b))
    factor = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
    rows, columns = (torch.nn.functional.normalize(t) if normalize else t for t in (x, y))
    S = factor * rows @ columns.T
    others = S.clone()
    others.diagonal()[:pairs] = -math.inf
    wanted = [torch.stack([(m * others).logsumexp(dim) for m in multiples]) for dim in (1, 0)]
    value = sum((w * sums).sum() for w, sums in zip(weights, wanted, strict=True))
    value = value + (of_pairs * S.diagonal()[:pairs]).sum()
    exact = torch.autograd.grad(value, (x, y, factor))

    p = ClipProblem(a, b, scale, normalize=normalize, pairs=pairs, multiples=multiples, keeps=True)
    positive, *sums = clip.sums(p)
    assert (p.kept is not None) == (keeping == "kept")
    assert relative(positive, S.diagonal()[:pairs]) < FLOAT32 if pairs else len(positive) == 0
    for side, of_side in zip(sums, wanted, strict=True):
        assert relative(side, of_side) < FLOAT32
    sides = (ClipSide(*x) for x in zip(sums, weights, strict=True))
    gradients = clip.gradients_from(p, *sides, of_pairs, ALL)
    found = gradients.queries, gradients.candidates, gradients.scale
    assert_gradients(found, exact, FLOAT32 + 2 * TWO_ROUNDINGS[dtype])


FILTERS = {
    "Same": lambda mask: fastqt.Same(torch.arange(11) % 4, torch.arange(11) % 3),
    "Within": lambda mask: fastqt.Within(torch.arange(11) % 3),
    "mask": lambda mask: mask,
    "several": lambda mask: [fastqt.Same(torch.arange(11) % 4), fastqt.Within(torch.arange(11) % 2), mask],
}


def cells_that_leave(name: str, mask: torch.Tensor) -> torch.Tensor:
    """Which of the cells (11, 11) leave, one by one."""
    i, j = torch.arange(11)[:, None], torch.arange(11)
    cells = {
        "Same": i % 4 == j % 3,
        "Within": i % 3 != j % 3,
        "mask": mask,
        "several": (i % 4 == j % 4) | (i % 2 != j % 2) | mask,
    }
    return cells[name] & (i != j)


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("keeping", KEEPING)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("spread", [1.0, 10.0], ids=["", "overflow"])
@pytest.mark.pairwise
def test_cells_that_leave_both_directions(name, keeping, reduction, spread, keep, launched, monkeypatch):
    """The two walks serve both directions, also where shifts were too far off."""
    keep(KEEPING[keeping])
    monkeypatch.setattr(clip, "fast_bytes", lambda _: 2**30)
    monkeypatch.setattr(operands, "FAST_BYTES", 2**20)
    a, b, scale = random_inputs(11, 5, torch.float32)
    a = (spread * a.detach()).requires_grad_()
    mask = torch.rand(11, 11, generator=torch.Generator().manual_seed(1)) < 0.3
    mask.fill_diagonal_(False)
    loss = clip_loss(a, b, scale=scale, exclude=FILTERS[name](mask), reduction=reduction)
    found = torch.autograd.grad(loss.sum(), (a, b, scale))
    assert len(launched) > 0
    assert any(total for _, _, total in launched) == (keeping != "kept")

    x, y, s = (t.detach().double().requires_grad_() for t in (a, b, scale))
    S = (s * x @ y.T).masked_fill(cells_that_leave(name, mask), -math.inf)
    rows, columns = (side.logsumexp(1) - side.diagonal() for side in (S, S.T))
    exact = (rows + columns) / 2
    exact = exact.mean() if reduction == "mean" else exact
    assert relative(loss, exact) < FLOAT32
    assert_gradients(found, torch.autograd.grad(exact.sum(), (x, y, s)), 10 * FLOAT32)


def test_a_mask_has_to_leave_the_pairs_in():
    a, b, scale = (x.detach() for x in random_inputs(9, 5, torch.float32))
    mask = torch.zeros(9, 9, dtype=torch.bool)
    mask[4, 4] = True
    with pytest.raises(ValueError, match="targets: row 4's target column 4 is a cell that exclude takes out"):
        clip_loss(a, b, scale=scale, exclude=mask)


def test_with_little_memory_directions_are_computed_one_after_the_other(launched):
    a, b, scale = random_inputs(9, 5, torch.float32)
    clip_loss(a, b, scale=scale, exclude=fastqt.Within(torch.arange(9) % 2), memory="low")
    assert launched == []


OF_THRESHOLDS = {
    "Margin": lambda guide, mask: fastqt.Margin(-0.2),
    "Margin, Same": lambda guide, mask: [fastqt.Margin(0.1), fastqt.Same(torch.arange(11) % 4)],
    "Guide": lambda guide, mask: fastqt.Guide(*guide, margin=0.3),
    "all": lambda guide, mask: [
        fastqt.Guide(*guide),
        fastqt.Margin(0.0),
        fastqt.Within(torch.arange(11) % 2),
        mask,
    ],
}
MARGINS = {"Margin": (-0.2, None), "Margin, Same": (0.1, None), "Guide": (None, -0.3), "all": (0.0, 0.0)}


def cells_above(name: str, S: torch.Tensor, G: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """The cells (11, 11) that leave rows, and those that leave columns, by similarities and a guide's."""
    i, j = torch.arange(11)[:, None], torch.arange(11)
    of_both = {"Margin, Same": i % 4 == j % 4, "all": mask | (i % 2 != j % 2)}.get(
        name, torch.zeros_like(mask)
    )
    cells = []
    for side in (1, 0):
        above = of_both.clone()
        for similar, margin in zip((S, G), MARGINS[name], strict=True):
            if margin is not None:
                above |= similar > similar.diagonal().unsqueeze(side) + margin
        cells.append(above & (i != j))
    return cells


@pytest.mark.parametrize("name", OF_THRESHOLDS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("normalize", [True, False], ids=["cosines", "products"])
@pytest.mark.parametrize(
    ("spread", "dtype"), [(1.0, torch.float32), (1.0, torch.bfloat16), (20.0, torch.float32)], ids=str
)
@pytest.mark.thinned(3)
def test_thresholds_that_differ_by_direction(
    name, reduction, normalize, spread, dtype, launched, monkeypatch
):
    """One product serves sums, thresholds and gradients, also where shifts were too far off."""
    monkeypatch.setattr(operands, "FAST_BYTES", 2**20)
    a, b, scale = random_inputs(11, 5, dtype)
    a = (spread * a.detach()).requires_grad_()
    generator = torch.Generator().manual_seed(0)
    guide = [torch.randn(11, 4, generator=generator) for _ in range(2)]
    mask = (torch.rand(11, 11, generator=generator) < 0.2).fill_diagonal_(False)

    exclude = OF_THRESHOLDS[name](guide, mask)
    loss = clip_loss(a, b, scale=scale, exclude=exclude, reduction=reduction, normalize=normalize)
    found = torch.autograd.grad(loss.sum(), (a, b, scale))
    assert launched == [((11, 11), True, False)]

    x, y, s = (t.detach().double().requires_grad_() for t in (a, b, scale))
    rows, columns = (torch.nn.functional.normalize(t) if normalize else t for t in (x, y))
    of_guide = [torch.nn.functional.normalize(t.double()) for t in guide]
    S = rows @ columns.T
    leave = cells_above(name, S.detach(), of_guide[0] @ of_guide[1].T, mask)
    assert not torch.equal(*leave)
    of_rows, of_columns = ((s * S).masked_fill(cells, -math.inf) for cells in leave)
    exact = (of_rows.logsumexp(1) + of_columns.logsumexp(0)) / 2 - (s * S).diagonal()
    exact = exact.mean() if reduction == "mean" else exact
    assert relative(loss, exact) < FLOAT32
    wanted = torch.autograd.grad(exact.sum(), (x, y, s))
    assert_gradients(found, wanted, 10 * FLOAT32 + 2 * TWO_ROUNDINGS[dtype])


def test_no_filter_but_a_mask_takes_out_a_pair():
    """A kernel asserts it on a GPU, where these cells are written one by one."""
    a, b, _ = random_inputs(11, 5, torch.float32)
    guide = [torch.randn(11, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    filters = fastqt.Guide(*guide, margin=0.5), fastqt.Same(torch.arange(11)), fastqt.Margin(-0.5)
    leaving = leaving_pairs(Exclusions(filters), a, b, of_cosines=True)
    for mask in (leaving.mask, leaving.column_mask):
        assert mask.any()
        assert not mask.diagonal().any()


def test_thresholds_want_a_positive_scale():
    a, b, _ = random_inputs(9, 5, torch.float32)
    with pytest.raises(ValueError, match="scale: want a positive number where false negatives are filtered"):
        clip_loss(a, b, scale=torch.tensor(-1.0), exclude=fastqt.Margin(0.1))


@pytest.mark.parametrize("name", ["hcl_loss", "dcl_loss"])
@pytest.mark.parametrize("filters", ["Same", "Within"])
def test_filtered_losses_of_pairs_share_scores(name, filters, launched):
    """Three matrices of scores, and three of nothing where HCL counts the negatives."""
    loss, exclude = getattr(fastqt, name), FILTERS[filters](None)
    a, b, scale = random_inputs(11, 5, torch.float32)
    found, exact = [], []
    for of, dtype, backend in ((found, torch.float32, "triton"), (exact, torch.float64, "reference")):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (a, b, scale)]
        value = loss(*leaves[:2], scale=leaves[2], exclude=exclude, backend=backend)
        of += [value.detach(), *torch.autograd.grad(value, leaves)]
    assert len(launched) > 0
    assert_gradients(found[1:], exact[1:], FLOAT32)
    assert relative(found[0], exact[0]) < FLOAT32
