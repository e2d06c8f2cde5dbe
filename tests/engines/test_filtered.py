"""What a guide excludes, and what a loss with one computes, refuses and takes of the memory.

Its values and gradients are those of test_random_problems.py.
"""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fastqt
from fastqt.engines import filtered, ops, own_products
from fastqt.engines.cpu import contrastive as cpu_schedule
from fastqt.engines.guide_rows import InFloat32, InFloat64, guide_rows
from fastqt.engines.triton import contrastive as triton_schedule
from tests.shared import oracle
from tests.shared.ring_memory import Live
from tests.shared.tolerances import FLOAT32, FLOAT64, relative

N, M, D, E, K = 13, 17, 6, 5, 4


@pytest.fixture
def chunks(monkeypatch):
    """Chunks of 4 rows and tiles of 3 columns, so that these problems have several of each."""
    monkeypatch.setattr(filtered, "ROOM", {"cpu": (0, 0)})
    monkeypatch.setattr(filtered, "MIN_ROWS", 4)
    monkeypatch.setattr(filtered, "MIN_COLUMNS", 3)


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("width", [3, 64, 384, 1023])
def test_a_copy_of_the_positive_stays_in_whatever_order_its_score_is_summed(width, dtype):
    """Its score is the threshold and not above it. The loss of embeddings of zeros counts what stays."""
    positives, copies = drawn(N, width, seed=width).to(dtype), torch.arange(N).roll(5)
    columns = torch.cat([positives, positives[copies]])
    queries = drawn(N, width, seed=1).to(dtype)
    guide = fastqt.Guide(queries, columns, negatives=positives[copies])
    zeros = torch.zeros(2 * N, 1)
    staying = fastqt.log_sum_exp(zeros[:N], zeros, negatives=zeros[:N], exclude=guide).exp().round()
    scores = oracle.guide_scores(*(x.double().numpy() for x in (queries, columns)))
    wanted = ~oracle.guide_excludes(scores, oracle.guide_thresholds(scores, 0.0, "absolute"))
    assert wanted[:, N:].any(1).all()
    assert staying.tolist() == (wanted.sum(1) + wanted[:, N:].sum(1)).tolist()


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("diagonal", ["keep", "zero", "exclude"])
def test_a_guide_is_asked_once_where_the_engine_keeps_scores(backend, diagonal, monkeypatch):
    """Gradients have the same bits, in every backward pass, as where both are computed again."""
    queries, candidates, negatives = (drawn(n, D, seed=n).float().requires_grad_() for n in (N, M, K))
    guide = fastqt.Guide(drawn(N, E, seed=1), drawn(M, E, seed=2), negatives=drawn(K, E, seed=3))
    asked = []
    monkeypatch.setattr(filtered, "guide_rows", lambda *x, **how: asked.append(x) or guide_rows(*x, **how))

    def gradients():
        asked.clear()
        how = {"negatives": negatives, "exclude": guide, "diagonal": diagonal, "backend": backend}
        rows = fastqt.log_sum_exp(queries, candidates, **how)
        inputs, weights = (queries, candidates, negatives), torch.linspace(-1, 2, N)
        return [torch.autograd.grad(rows, inputs, weights, retain_graph=True) for _ in range(2)]

    first, again = gradients()
    assert len(asked) == 1
    for engine in (cpu_schedule, triton_schedule):
        monkeypatch.setattr(engine, "KEPT_BYTES", 0)
    computed_again, _ = gradients()
    assert len(asked) == 3
    for kept, twice, wanted in zip(first, again, computed_again, strict=True):
        assert torch.equal(kept, wanted)
        assert torch.equal(twice, wanted)


@pytest.mark.usefixtures("chunks")
def test_no_scores_are_kept_of_several_chunks(monkeypatch):
    heights = []
    genuine = filtered.Filtered.forward
    monkeypatch.setattr(filtered.Filtered, "forward", lambda self, p: heights.append(p) or genuine(self, p))
    x, y = (drawn(n, D, seed=n).requires_grad_() for n in (N, M))
    guide = fastqt.Guide(drawn(N, E, seed=1), drawn(M, E, seed=2))
    fastqt.log_sum_exp(x, y, exclude=guide).sum().backward()
    assert len(heights) == 1


def test_an_error_names_the_row_of_the_problem(chunks):
    x, mask = torch.randn(N, D), torch.zeros(N, N, dtype=torch.bool)
    mask[9, 10] = True
    guide = fastqt.Guide(x, x)
    with pytest.raises(ValueError, match="row 9's target column 10 is a cell that exclude takes out"):
        fastqt.contrastive_loss(x, x, fastqt.Window(offsets=[1]), exclude=[mask, guide])
    labels = torch.arange(N).where(torch.arange(N) != 11, N + 1)
    guide = fastqt.Guide(x, x, negatives=x)
    with pytest.raises(ValueError, match=f"row 11's target column {N + 1} is outside the M={N} candidates"):
        fastqt.contrastive_loss(x, x, labels, diagonal="keep", negatives=x, exclude=guide)
    with pytest.raises(ValueError, match="row 0's target column 0 is on the diagonal"):
        fastqt.contrastive_loss(x, x, torch.arange(N), diagonal="exclude", exclude=fastqt.Guide(x, x))


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_a_wrong_scale_is_named_before_a_wrong_target(backend):
    f = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    guide = fastqt.Guide(f, f, thresholds=torch.zeros(4))
    with pytest.raises(ValueError, match="scale: want a positive number where"):
        fastqt.contrastive_loss(
            f,
            f,
            torch.tensor([1, 2, 2, 0]),  # row 2's is on the diagonal
            diagonal="exclude",
            scale=torch.tensor(-1.0),
            exclude=[guide, fastqt.Margin(0.1)],
            backend=backend,
        )


@pytest.mark.usefixtures("chunks")
def test_a_scalar_loss_takes_the_guides_product_once_and_rows_twice():
    x, of_guide = torch.randn(N, D, requires_grad=True), drawn(N, E, seed=0)
    guide, counts = fastqt.Guide(of_guide, of_guide), []
    for reduction in ("mean", "sum", "none"):
        with FlopCounterMode(display=False) as products:
            fastqt.contrastive_loss(x, x, exclude=guide, reduction=reduction, backend="cpu").sum().backward()
        counts.append(products.get_total_flops())  # that engine's own products are not among them
    assert counts == [2 * E * N * N * times for times in (1, 1, 2)]


@pytest.mark.parametrize("loss", ["sigmoid_loss", "info_nce_loss"])
def test_no_part_of_the_memory_grows_with_both_sides(loss):
    """At 4,096 rows a mask alone would take 16 MiB, and the guide's scores 64."""
    rows, room = 4096, 2**24
    tensors = [torch.randn(rows, 8, requires_grad=True) for _ in range(2)]
    of_guide = [torch.randn(rows, 8, dtype=torch.bfloat16) for _ in range(2)]

    def step() -> None:
        guide = fastqt.Guide(*of_guide)
        torch.autograd.grad(getattr(fastqt, loss)(*tensors, exclude=guide, memory=room), tensors)

    step()
    with Live(*tensors, *of_guide) as live:
        step()
    columns = rows * (8 * 4 * 4 + 64)  # gradients and their sums, and what is found of each row
    assert live.most < room // 4 + columns


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("diagonal", ["zero", "exclude", "keep"])
@pytest.mark.parametrize("backend", ["cpu", "torch", "reference", "triton"])
def test_a_logsumexp(backend, diagonal):
    """Its guide excludes negatives too, and there may be fewer candidates than queries."""
    dtype, tolerance = (torch.float32, FLOAT32) if backend == "triton" else (torch.float64, FLOAT64)
    given = [drawn(n, D, seed=k).to(dtype).requires_grad_() for k, n in enumerate((N, 7, K))]
    of_guide = [drawn(n, E, seed=10 + k).float() for k, n in enumerate((N, 7, K))]
    thresholds, weights = drawn(N, seed=20) / 4 + 0.2, np.linspace(-1, 2, N)
    exact = [x.detach().double().numpy() for x in given]
    masks = [oracle.guide_scores(of_guide[0].double().numpy(), x.double().numpy()) for x in of_guide[1:]]
    masks = [oracle.guide_excludes(scores, thresholds.numpy()) for scores in masks]
    truth = oracle.contrastive(
        *(*exact[:2], np.zeros((N, 7))),
        **{"diagonal": diagonal, "link": "log_sum_exp", "row_weights": weights, "negatives": exact[2]},
        **dict(zip(("mask", "negatives_mask"), masks, strict=True)),
    )
    guide = fastqt.Guide(*of_guide[:2], thresholds=thresholds, negatives=of_guide[2])
    rows = fastqt.log_sum_exp(
        *given[:2], negatives=given[2], exclude=guide, diagonal=diagonal, backend=backend
    )
    assert relative(rows, truth.loss) < tolerance
    found = torch.autograd.grad(rows, given, torch.from_numpy(weights).to(rows.dtype))
    for gradient, name in zip(found, ("queries", "candidates", "negatives"), strict=True):
        assert relative(gradient, getattr(truth, name)) < tolerance, name


def test_a_guide_that_is_changed_before_a_recomputing_backward_is_torchs_error():
    x, of_guide = torch.randn(N, D, requires_grad=True), drawn(N, E, seed=2)
    rows = fastqt.log_sum_exp(x, x.detach(), exclude=fastqt.Guide(of_guide, drawn(N, E, seed=3)))
    of_guide.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rows.sum().backward()


def test_an_engine_that_takes_no_mask_is_refused_in_words():
    x = torch.randn(3, 2)
    with pytest.raises(ValueError, match="backend: 'cuda' is not available"):
        fastqt.contrastive_loss(x, x, exclude=fastqt.Guide(x, x), backend="cuda")


ROWS, COLUMNS = 60, 70
# The least and the largest decimal logarithm of norms.
NORMS = {"even": (0, 0), "spread": (-6, 6), "overflowing": (-25, 25), "underflowing": (-22, -20)}
OF_FLOAT16 = (-2, 2)


def embeddings(width: int, dtype: torch.dtype, norms: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(width)

    def of(rows: int) -> torch.Tensor:
        exponents = torch.rand(rows, 1, generator=generator, dtype=torch.float64)
        scale = 10 ** (norms[0] + (norms[1] - norms[0]) * exponents)
        return (scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)).to(dtype)

    queries, candidates = of(ROWS), of(COLUMNS)
    candidates[5] = 0
    return queries, candidates


def scores_of(queries: torch.Tensor, candidates: torch.Tensor, normalize: bool) -> np.ndarray:
    f, g = (x.double().numpy() for x in (queries, candidates))
    if normalize:
        f, g = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (f, g))
    with np.errstate(over="ignore"):
        return (f @ g.T).astype(np.float32)


@pytest.mark.parametrize("products", ["own", "torch"])
@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("width", [1, 16, 1023])
@pytest.mark.thinned(2)
def test_rows_are_compared_as_scores_in_float64(width, dtype, normalize, norms, products, monkeypatch):
    """Thresholds equal a score of their row, or are the numbers next to it."""
    if products == "torch":
        monkeypatch.setattr(own_products, "levels", lambda: (0, 0))
    queries, candidates = embeddings(width, dtype, OF_FLOAT16 if dtype is torch.float16 else NORMS[norms])
    scores = scores_of(queries, candidates, normalize)
    own = scores[np.arange(ROWS), np.arange(ROWS)]
    for thresholds in (own, np.nextafter(own, np.float32(-np.inf)), np.nextafter(own, np.float32(np.inf))):
        mask = torch.empty(ROWS, COLUMNS, dtype=torch.bool)
        guide_rows(queries, torch.from_numpy(thresholds), normalize=normalize).write_above(mask, candidates)
        assert torch.equal(mask, torch.from_numpy(scores > thresholds[:, None]))


@pytest.mark.skipif(ops.native_error is not None, reason="the C++ extension is not built")
def test_products_that_torch_rounds_are_not_taken(monkeypatch):
    monkeypatch.setattr(own_products, "levels", lambda: (0, 0))
    x, thresholds = torch.randn(3, 4), torch.zeros(3)
    assert isinstance(guide_rows(x, thresholds, normalize=True), InFloat32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert isinstance(guide_rows(x, thresholds, normalize=True), InFloat64)
    finally:
        torch.set_float32_matmul_precision(before)
    assert isinstance(guide_rows(x, thresholds, normalize=True), InFloat32)
