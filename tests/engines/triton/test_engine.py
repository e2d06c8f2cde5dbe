"""The Triton engine, interpreted: the oracle's values and gradients, in every dtype and memory mode."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fastqt
from fastqt import problem
from fastqt.engines.triton import loop, operands, softmax, two_walks
from tests.shared import oracle
from tests.shared.cases import CASES, Case
from tests.shared.tolerances import (
    CUT_OFF,
    EAGER_FACTOR,
    FLOAT32,
    FLUSHED,
    HALF_ULP,
    REORDERED,
    THREE_ROUNDINGS,
    relative,
)

by_memory = pytest.mark.parametrize("memory", ["fast", "low"])
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
LARGE = ("all at once", "smoothed window", "biases of classes", "sigmoid, all at once")
by_large = pytest.mark.parametrize("case", [c for c in CASES if c.name in LARGE], ids=lambda case: case.name)


def value_and_gradients(case: Case, inputs: dict[str, torch.Tensor], **more) -> list[torch.Tensor]:
    loss = case.loss(inputs, backend="triton", **more)
    return [loss.detach(), *torch.autograd.grad(loss, list(inputs.values()))]


def assert_oracles(case: Case, inputs: dict[str, torch.Tensor], found: list[torch.Tensor]) -> None:
    exact = case.expected(inputs)
    loss, *gradients = found
    assert loss.dtype is torch.float32
    dtype = inputs["queries"].dtype
    tolerance = FLOAT32 + THREE_ROUNDINGS[dtype]
    assert relative(loss, exact.loss.mean()) < FLOAT32
    for name, gradient in zip(inputs, gradients, strict=True):
        assert gradient.dtype is inputs[name].dtype
        assert relative(gradient, getattr(exact, name)) < tolerance, name


@by_memory
@by_case
@pytest.mark.thinned(8)
def test_is_the_oracles(case, memory):
    inputs = case.inputs(torch.float32)
    assert_oracles(case, inputs, value_and_gradients(case, inputs, memory=memory))


@by_half
@by_memory
@by_large
@pytest.mark.thinned(5)
@pytest.mark.pairwise
def test_half_precision(case, memory, dtype):
    inputs = case.inputs(dtype)
    assert_oracles(case, inputs, value_and_gradients(case, inputs, memory=memory))


@by_large
@pytest.mark.thinned(3)
def test_bytes_choose_between_one_walk_and_two(case, monkeypatch):
    """One where the float32 sums and enough rows fit; the results are the same."""
    inputs = case.inputs(torch.bfloat16)
    monkeypatch.setattr(problem, "LEAST_MEMORY", 0)
    walks, genuine = [], two_walks.run
    monkeypatch.setattr(two_walks, "run", lambda walk: walks.append(walk) or genuine(walk))
    fast, low, enough, few = (
        value_and_gradients(case, inputs, memory=m) for m in ("fast", "low", 2**20, 999)
    )
    # A target of every cell takes whole rows in any memory, and the sums of 13 rows fit 40 MiB.
    assert len(walks) == {"smoothed window": 0, "sigmoid, all at once": 1}.get(case.name, 2)
    for found, same in ((enough, fast), (few, low)):
        for a, b in zip(found, same, strict=True):
            assert relative(a, b) < REORDERED[torch.float32] + THREE_ROUNDINGS[torch.bfloat16]


@by_large
@pytest.mark.thinned(3)
def test_chunks_do_not_change_the_result(case, monkeypatch):
    inputs = case.inputs(torch.float32)
    whole = value_and_gradients(case, inputs)
    for name, value in {"ROW_MULTIPLE": 5, "FAST_BYTES": 0, "LOW_BYTES": 0}.items():
        monkeypatch.setattr(operands, name, value)
    monkeypatch.setattr(loop, "SUM_ROWS", 4)
    for memory in ("fast", "low"):
        for a, b in zip(value_and_gradients(case, inputs, memory=memory), whole, strict=True):
            assert relative(a, b) < REORDERED[torch.float32]
    with torch.no_grad():
        assert relative(case.loss(inputs, backend="triton"), whole[0]) < REORDERED[torch.float32]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles_in_the_memory_of_a_gradient(dtype, monkeypatch):
    """Where memory is short, E lies in the buffer that later takes the candidates' gradient."""
    N, D = 70, 40
    for name, value in {"ROW_MULTIPLE": 5, "LOW_BYTES": 0}.items():
        monkeypatch.setattr(operands, name, value)
    kept, genuine = [], two_walks._matrix

    def matrix(o, height, length, lent):
        E = genuine(o, height, length, lent)
        gradient = o.blocks[0].gradient
        begins = (E.data_ptr() - gradient.data_ptr()) / (gradient.element_size() * D)
        kept.append((begins if 0 <= begins < N else None, E.shape))
        return E

    monkeypatch.setattr(two_walks, "_matrix", matrix)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(N, D, generator=generator).to(dtype).requires_grad_() for _ in range(2)]
    T = oracle.window(N, N, [-1, 1])
    exact = oracle.contrastive(*(x.detach().double().numpy() for x in inputs), T)
    loss = fastqt.contrastive_loss(*inputs, backend="triton", memory="low")
    found = torch.autograd.grad(loss, inputs)
    # First rows against all columns, then columns: 38 rows of the gradient are free after the first 32, 6
    # are after the next, which are too few.
    assert kept == [(0, (5, 96)), (32, (20, 64)), (None, (5, 64)), (None, (5, 64))]
    for gradient, wanted in zip(found, (exact.queries, exact.candidates), strict=True):
        assert relative(gradient, wanted) < FLOAT32 + THREE_ROUNDINGS[dtype]


@by_memory
@by_large
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.thinned(5)
@pytest.mark.pairwise
def test_rows_weighted_by_an_upstream_gradient(case, memory, dtype):
    """With reduction="none" the upstream gradient has both signs, zeros and very different sizes."""
    inputs = case.inputs(dtype)
    upstream = torch.tensor([1.0, -2.0, 0.0, 1e-3, 0.5, 3.0, -1e-2, 1.0, 0.0, 2.0, -1.0, 1e-4, 1.0])
    loss = case.loss(inputs, backend="triton", reduction="none", memory=memory)
    exact = case.expected(inputs, row_weights=upstream.double().numpy())
    assert relative(loss, exact.loss) < FLOAT32
    gradients = torch.autograd.grad(loss, list(inputs.values()), upstream)
    for name, gradient in zip(inputs, gradients, strict=True):
        assert relative(gradient, getattr(exact, name)) < FLOAT32 + THREE_ROUNDINGS[dtype], name


@by_memory
@pytest.mark.parametrize("wanted", ["queries", "candidates", "negatives", "row_negatives", "scale"])
@pytest.mark.thinned(3)
def test_one_gradient_alone(wanted, memory):
    case = next(c for c in CASES if c.name == "all at once")
    inputs = case.inputs(torch.float32)
    alone = {name: x if name == wanted else x.detach() for name, x in inputs.items()}
    (gradient,) = torch.autograd.grad(case.loss(alone, backend="triton", memory=memory), alone[wanted])
    assert relative(gradient, getattr(case.expected(inputs), wanted)) < FLOAT32


def test_strides_do_not_change_the_result():
    case = next(c for c in CASES if c.name == "all at once")
    inputs = case.inputs(torch.float32)
    expected = value_and_gradients(case, inputs)
    laid_out = {
        name: x.detach() if x.dim() == 0 else x.detach().T.repeat_interleave(2, 0)[::2].T
        for name, x in inputs.items()
    }
    laid_out = {name: x.requires_grad_() for name, x in laid_out.items()}
    arguments = {**case.arguments, "mask": case.arguments["mask"].T.contiguous().T}
    loss = fastqt.contrastive_loss(**laid_out, **arguments, backend="triton")
    found = [loss.detach(), *torch.autograd.grad(loss, list(laid_out.values()))]
    # In the interpreter numpy multiplies the tiles: how it rounds depends on their layout.
    for a, b in zip(found, expected, strict=True):
        assert relative(a, b) < REORDERED[torch.float32]


def test_runs_repeat_bit_for_bit():
    case = next(c for c in CASES if c.name == "all at once")
    inputs = case.inputs(torch.bfloat16)
    first, second = (value_and_gradients(case, inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def far_apart(N: int, D: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose targets score 0, far below others: no reference from the targets can do."""
    generator = torch.Generator().manual_seed(0)
    queries, candidates = (torch.randn(N, D, generator=generator) for _ in range(2))
    queries[:, 0], candidates[:, 0] = 0, 0
    queries[::3, 0] = 12.0  # some rows only
    candidates[5, 0], candidates[9, 0] = 11.0, 10.9  # scores about 130: exp overflows float32
    return queries, candidates


@by_memory
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.thinned(3)
def test_rows_whose_shift_overflowed_are_computed_again(dtype, memory, monkeypatch):
    N, D = 20, 5
    queries, candidates = (x.to(dtype).requires_grad_() for x in far_apart(N, D))
    T = oracle.window(N, N, [-1, 1])
    exact = oracle.contrastive(*(x.detach().double().numpy() for x in (queries, candidates)), T)
    raised = []

    def row_stats(sums, tiles, queries, scale, cells, state, *more):
        genuine(sums, tiles, queries, scale, cells, state, *more)
        first = tiles[0].first_row
        raised.extend(state.shift_overflowed[first : first + tiles[0].rows].tolist())

    genuine = softmax.row_stats
    monkeypatch.setattr(softmax, "row_stats", row_stats)
    loss = fastqt.contrastive_loss(queries, candidates, backend="triton", memory=memory)
    found = torch.autograd.grad(loss, (queries, candidates))
    # All that point at candidates 5 and 9, but row 6, whose target is candidate 5.
    assert raised[:N] == [int(row % 3 == 0 and row != 6) for row in range(N)]
    assert relative(loss, exact.loss.mean()) < FLOAT32
    for gradient, wanted in zip(found, (exact.queries, exact.candidates), strict=True):
        assert relative(gradient, wanted) < 10 * FLOAT32 + 2 * THREE_ROUNDINGS[dtype]


OVERFLOWING = {
    "none": [],
    "the first chunk's": list(range(5)),
    "one of a middle chunk": [7],
    "the last row": [19],
    "all": list(range(20)),
}


@pytest.mark.parametrize("loud", OVERFLOWING.values(), ids=OVERFLOWING)
@pytest.mark.parametrize("memory", ["fast", pytest.param("low", marks=pytest.mark.slow)])
@pytest.mark.thinned(2)
def test_rows_of_any_chunk_overflow_against_candidates_or_negatives(loud, memory, monkeypatch):
    """With all that the repair has to leave out or to add: groups, a mask, a bias, row negatives."""
    for name, value in {"ROW_MULTIPLE": 5, "FAST_BYTES": 0, "LOW_BYTES": 0}.items():
        monkeypatch.setattr(operands, name, value)
    flagged, genuine = set(), softmax.row_stats

    def row_stats(sums, tiles, queries, scale, cells, state, *more):
        genuine(sums, tiles, queries, scale, cells, state, *more)
        first = tiles[0].first_row
        found = state.shift_overflowed[first : first + tiles[0].rows].nonzero().flatten() + first
        flagged.update(found.tolist())

    monkeypatch.setattr(softmax, "row_stats", row_stats)
    N, K, D = 20, 9, 5
    generator = torch.Generator().manual_seed(0)
    queries, candidates, row_negatives = (torch.randn(N, D, generator=generator) for _ in range(3))
    negatives = torch.randn(K, D, generator=generator)
    for x in (queries, candidates, negatives, row_negatives):
        x[:, :2] = 0
    queries[loud[::2], 0], queries[loud[1::2], 1] = 12.0, 12.0
    candidates[3, 0], negatives[6, 1] = 11.0, 10.9  # scores about 130
    groups = torch.arange(N) % 7, (torch.arange(N) + 3) % 7
    mask = torch.zeros(N, N, dtype=torch.bool)
    mask[torch.arange(N), (torch.arange(N) + 5) % N] = True
    mask[:, 3] = False
    groups[1][3] = 9  # the loud candidate is of no query's group
    inputs = {"queries": queries, "candidates": candidates, "negatives": negatives}
    inputs |= {"row_negatives": row_negatives, "bias": torch.linspace(-1, 1, N)}
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    T = oracle.window(N, N, [6])
    options = {"query_groups": groups[0], "candidate_groups": groups[1], "mask": mask}
    exact = oracle.contrastive(
        *(x.detach().double().numpy() for x in (queries, candidates)),
        T,
        **{name: inputs[name].detach().double().numpy() for name in ("negatives", "row_negatives", "bias")},
        **{name: x.numpy() for name, x in options.items()},
    )
    targets = fastqt.Window(offsets=[6])
    loss = fastqt.contrastive_loss(**inputs, targets=targets, **options, memory=memory, backend="triton")
    found = torch.autograd.grad(loss, list(inputs.values()))
    # Row 17 has no target, and the shift of row 3 does not see the diagonal's score, which is 0.
    assert flagged == {i for i in loud if T[i].any() and not (i == 3 and i in loud[::2])}
    assert relative(loss, exact.loss.mean()) < FLOAT32
    for name, gradient in zip(inputs, found, strict=True):
        wanted = getattr(exact, name)
        difference = np.abs(gradient.double().numpy() - wanted).max()
        assert difference < 10 * FLOAT32 * np.abs(wanted).max() + FLUSHED[torch.float32], name


def test_row_shifts_from_a_sample_of_candidates(monkeypatch):
    """They spare most rows the second try, and change nothing else."""
    monkeypatch.setattr(softmax, "SAMPLE", 4)
    queries, candidates = (x.requires_grad_() for x in far_apart(20, 5))
    T = oracle.window(20, 20, [-1, 1])
    exact = oracle.contrastive(*(x.detach().double().numpy() for x in (queries, candidates)), T)
    loss = fastqt.contrastive_loss(queries, candidates, backend="triton")
    found = torch.autograd.grad(loss, (queries, candidates))
    assert relative(loss, exact.loss.mean()) < FLOAT32
    for gradient, wanted in zip(found, (exact.queries, exact.candidates), strict=True):
        assert relative(gradient, wanted) < 10 * FLOAT32


def converged(N: int, score: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose own candidate scores `score`, and all others about 0."""
    generator = torch.Generator().manual_seed(seed)
    candidates = torch.linalg.qr(torch.randn(N, N, generator=generator)).Q
    candidates = F.normalize(candidates + 0.02 * torch.randn(N, N, generator=generator), dim=1)
    return score * candidates, candidates


def random_inputs(N: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, N, generator=generator), torch.randn(N, N, generator=generator)


def error(a: torch.Tensor, exact: np.ndarray) -> float:
    return float(np.linalg.norm(a.double().numpy() - exact) / np.linalg.norm(exact))


@by_memory
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("score", [None, 12.0, 24.0], ids=["random", "p > 0.999", "p > 1 - 1e-9"])
@pytest.mark.thinned(5)
@pytest.mark.pairwise
def test_error_is_at_most_eagers(score, dtype, memory):
    """Eager PyTorch in the same dtype, which forms its scores, probabilities and p - t in it."""
    N, seeds = 24, 2
    ours, eagers = [], []
    for seed in range(seeds):
        made = random_inputs(N, seed) if score is None else converged(N, score, seed)
        inputs = [x.to(dtype).requires_grad_() for x in made]
        exact = oracle.contrastive(*(x.detach().double().numpy() for x in inputs), np.eye(N), diagonal="keep")
        if score is not None:
            assert np.exp(-exact.loss).min() > {12.0: 0.999, 24.0: 1 - 1e-8}[score]
        wanted = exact.queries, exact.candidates
        loss = fastqt.contrastive_loss(
            *inputs, fastqt.Diagonal(), diagonal="keep", backend="triton", memory=memory
        )
        ours.append([error(a, b) for a, b in zip(torch.autograd.grad(loss, inputs), wanted, strict=True)])
        loss = F.cross_entropy(inputs[0] @ inputs[1].T, torch.arange(N))
        eagers.append([error(a, b) for a, b in zip(torch.autograd.grad(loss, inputs), wanted, strict=True)])
    bound = EAGER_FACTOR * np.mean(eagers, axis=0) + HALF_ULP[torch.float32]
    assert (np.mean(ours, axis=0) <= bound).all(), (np.mean(ours, axis=0), np.mean(eagers, axis=0))


@by_memory
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("score", [None, 12.0, 40.0], ids=["random", "p > 0.99", "p > 1 - 1e-8"])
@pytest.mark.thinned(5)
@pytest.mark.pairwise
def test_sigmoids_error_is_at_most_eagers(score, dtype, memory):
    """The bias is -score / 2, so that pairs and all others are equally certain."""
    N, seeds = 24, 2
    bias = 0.0 if score is None else -score / 2
    ours, eagers = [], []
    for seed in range(seeds):
        made = random_inputs(N, seed) if score is None else converged(N, score, seed)
        inputs = [x.to(dtype).requires_grad_() for x in made]
        exact = oracle.contrastive(
            *(x.detach().double().numpy() for x in inputs),
            np.eye(N),
            diagonal="keep",
            link="sigmoid",
            bias=bias,
        )
        wanted = exact.loss.mean(), exact.queries, exact.candidates
        options = {"bias": bias, "backend": "triton", "memory": memory}
        loss = fastqt.sigmoid_loss(*inputs, fastqt.Diagonal(), **options)
        found = loss.detach(), *torch.autograd.grad(loss, inputs)
        ours.append([error(a, b) for a, b in zip(found, wanted, strict=True)])
        scores, labels = inputs[0] @ inputs[1].T + bias, torch.eye(N, dtype=dtype)
        loss = F.binary_cross_entropy_with_logits(scores, labels, reduction="sum") / N
        found = loss.detach(), *torch.autograd.grad(loss, inputs)
        eagers.append([error(a, b) for a, b in zip(found, wanted, strict=True)])
    bound = CUT_OFF[dtype] * EAGER_FACTOR * np.mean(eagers, axis=0) + HALF_ULP[torch.float32]
    # Eager PyTorch's loss has no digit left where all is learnt.
    assert max(loss for loss, *_ in ours) < FLOAT32
    assert (np.mean(ours, axis=0) <= bound).all(), (np.mean(ours, axis=0), np.mean(eagers, axis=0))


@by_memory
@pytest.mark.thinned(2)
def test_biases_gradient_in_half_precision(memory):
    """A softmax sums it in a matrix product, a sigmoid in the kernel of the scores."""
    for name in ("biases of classes", "sigmoid, all at once"):
        case = next(c for c in CASES if c.name == name)
        inputs = case.inputs(torch.bfloat16) | {"bias": case.inputs(torch.float32)["bias"]}
        gradient = torch.autograd.grad(case.loss(inputs, backend="triton", memory=memory), inputs["bias"])[0]
        assert gradient.dtype is torch.float32
        assert relative(gradient, case.expected(inputs).bias) < 2 * THREE_ROUNDINGS[torch.bfloat16]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_non_finite_inputs_reach_the_loss(poison):
    queries, candidates = torch.randn(9, 4), torch.randn(9, 4)
    queries[4, 1] = poison
    loss = fastqt.contrastive_loss(queries, candidates, backend="triton", reduction="none")
    assert not loss[4].isfinite()
    assert loss[torch.arange(9) != 4].isfinite().all()


def test_refuses_float64():
    queries = torch.randn(4, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="'triton' is not available: it has no float64"):
        fastqt.contrastive_loss(queries, queries, backend="triton")


@pytest.mark.parametrize(
    "loss",
    [
        fastqt.contrastive_loss,
        partial(fastqt.sigmoid_loss, targets=fastqt.Diagonal(), diagonal="keep"),
        partial(fastqt.clip_loss, normalize=False),
        partial(fastqt.mixcse_loss, form="released"),
    ],
    ids=["rows", "sigmoid", "rows and columns", "released"],
)
def test_a_gradient_scaler_saves_digits_that_float16_has_not(loss):
    """The gradients are about 5e-6, where float16 has few digits unless they are scaled up."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(20, 8, generator=generator).half().requires_grad_() for _ in range(2)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    upstream = torch.tensor(2.0**16)
    found = torch.autograd.grad(loss(*inputs, scale=1e-4, backend="triton"), inputs, upstream)
    value = loss(*exact, scale=1e-4, backend="reference")
    for a, b in zip(found, torch.autograd.grad(value, exact, upstream.double()), strict=True):
        assert relative(a, b) < THREE_ROUNDINGS[torch.float16]
