"""Cells leave the softmax by a margin above the similarity of their row's target, as in the oracle."""

import inspect

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fastqt
from fastqt.engines import cpu as schedule
from fastqt.engines.chunked import cells
from fastqt.functional import false_negatives, guided
from tests.shared import oracle
from tests.shared.ring_memory import Live
from tests.shared.tolerances import (
    EAGER_FACTOR,
    FLOAT32,
    FLOAT64,
    HALF_ULP,
    UNIT_ROUNDOFF,
    relative,
)

N, M, D, K = 13, 17, 6, 4
ENGINES = [
    ("cpu", torch.float64, FLOAT64),
    ("cpu", torch.float32, FLOAT32),
    ("torch", torch.float64, FLOAT64),
    ("torch", torch.float32, FLOAT32),
    ("reference", torch.float64, FLOAT64),
    # Inputs are read and gradients are written in 16 bits, once each.
    ("cpu", torch.float16, 2 * UNIT_ROUNDOFF[torch.float16]),
    ("torch", torch.bfloat16, 2 * UNIT_ROUNDOFF[torch.bfloat16]),
]
by_engine = pytest.mark.parametrize(("backend", "dtype", "tolerance"), ENGINES, ids=str)
STRATEGIES = ["absolute", "relative"]
# How far similarities are from a threshold: more than float32 rounds them, or bfloat16 cosines.
GAP, WIDE_GAP = 1e-5, 2.0**-8


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sparse_targets(rows: int, columns: int, diagonal: str) -> np.ndarray:
    """One, two or three targets a row, of different weights; rows 3 and 8 have none."""
    T = np.zeros((rows, columns))
    for i in range(rows):
        for k in range(1 + i % 3):
            T[i, (5 * i + 3 * k + 1) % columns] = 1 / (k + 1)
    T[[3, 8]] = 0
    if diagonal != "keep":
        np.fill_diagonal(T, 0)
    return T


def lowest_of_targets(similar: np.ndarray, T: np.ndarray) -> np.ndarray:
    return np.array([min(s[t > 0], default=np.inf) for s, t in zip(similar, T, strict=True)])


class Problem:
    """A loss with a margin, to whose thresholds no similarity is nearer than a gap."""

    def __init__(self, dtype, *, diagonal="keep", strategy="absolute", near=0.1, normalize=False, gap=GAP):
        self.diagonal, self.strategy, self.normalize = diagonal, strategy, normalize
        shapes = {
            "queries": (N, D),
            "candidates": (M, D),
            "negatives": (K, D),
            "row_negatives": (N, D),
            "scale": (),
            "bias": (M,),
        }
        drawn_of = {name: drawn(*shape, seed=k) for k, (name, shape) in enumerate(shapes.items())}
        drawn_of["scale"] = drawn_of["scale"].abs() + 0.5
        self.leaves = {name: x.to(dtype).requires_grad_() for name, x in drawn_of.items()}
        self.T = sparse_targets(N, M, diagonal)
        rng = np.random.default_rng(0)
        self.mask = (rng.random((N, M)) < 0.1) & (self.T == 0)
        self.groups = rng.integers(0, 9, N), rng.integers(0, 9, M)
        self.weights = np.linspace(-1, 2, N)

        given = self.scored()
        similar = given["queries"] @ given["candidates"].T
        private = (given["queries"] * given["row_negatives"]).sum(1, keepdims=True)
        every = np.concatenate([similar, given["queries"] @ given["negatives"].T, private], 1)
        own = lowest_of_targets(similar, self.T)
        self.margin = oracle.clear_margin(every, own, strategy, near, gap)
        assert self.margin is not None
        assert abs(self.margin - near) < 0.3
        size = 1 if strategy == "absolute" else np.abs(own)
        with np.errstate(invalid="ignore"):
            self.leaving = (every > (own + self.margin * size)[:, None]).mean()

    def scored(self):
        """The leaves in float64, at norm 1 where scores are cosines."""
        exact = {name: x.detach().double() for name, x in self.leaves.items()}
        if self.normalize:
            exact |= {name: F.normalize(x, dim=1) for name, x in exact.items() if x.dim() == 2}
        return {name: x.numpy() for name, x in exact.items()}

    def truth(self):
        given = self.scored()
        result = oracle.contrastive(
            given.pop("queries"),
            given.pop("candidates"),
            self.T,
            diagonal=self.diagonal,
            mask=self.mask,
            query_groups=self.groups[0],
            candidate_groups=self.groups[1],
            row_weights=self.weights,
            margin=self.margin,
            margin_strategy=self.strategy,
            **given,
        )
        gradients = {name: torch.as_tensor(getattr(result, name)) for name in self.leaves}
        for name, x in self.leaves.items():
            if self.normalize and x.dim() == 2:  # through the norms
                exact = x.detach().double().requires_grad_()
                (gradients[name],) = torch.autograd.grad(F.normalize(exact, dim=1), exact, gradients[name])
        return result.loss, gradients

    def loss(self, **options):
        return fastqt.contrastive_loss(
            **self.leaves,
            targets=torch.from_numpy(self.T).to_sparse_csr(),
            diagonal=self.diagonal,
            mask=torch.from_numpy(self.mask),
            query_groups=torch.from_numpy(self.groups[0]),
            candidate_groups=torch.from_numpy(self.groups[1]),
            normalize=self.normalize,
            false_negative_margin=self.margin,
            false_negative_margin_strategy=self.strategy,
            **options,
        )


def compare(problem, tolerance, **options):
    loss, gradients = problem.truth()
    rows = problem.loss(reduction="none", **options)
    assert relative(rows, loss) < tolerance
    upstream = torch.from_numpy(problem.weights).to(rows.dtype)
    found = torch.autograd.grad(rows, list(problem.leaves.values()), upstream)
    for name, gradient in zip(problem.leaves, found, strict=True):
        assert relative(gradient, gradients[name]) < tolerance, name


@by_engine
@pytest.mark.parametrize("diagonal", ["zero", "exclude", "keep"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.pairwise
def test_is_the_oracles(memory, strategy, normalize, diagonal, backend, dtype, tolerance):
    near = -0.3 if strategy == "relative" and not normalize else 0.1
    problem = Problem(dtype, diagonal=diagonal, strategy=strategy, normalize=normalize, near=near)
    assert 0.1 < problem.leaving < 0.9
    compare(problem, tolerance, backend=backend, memory=memory)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("memory", ["fast", "low"])
def test_a_scalar_loss_has_the_gradients_of_its_rows(memory, backend):
    """They are taken in the forward pass."""
    problem = Problem(torch.float64, diagonal="zero", normalize=True)
    problem.weights = np.full(N, 1 / N)
    loss, gradients = problem.truth()
    total = problem.loss(backend=backend, memory=memory)
    assert relative(total, loss.mean()) < FLOAT64
    leaves = list(problem.leaves.values())
    for name, gradient in zip(problem.leaves, torch.autograd.grad(3 * total, leaves), strict=True):
        assert relative(gradient / 3, gradients[name]) < FLOAT64, name


@pytest.mark.parametrize("diagonal", ["zero", "exclude", "keep"])
def test_targets_that_are_too_many_to_be_listed_stay(diagonal, monkeypatch):
    """The engine torch has them as a tile then."""
    monkeypatch.setattr(cells, "SMALL", 0)
    monkeypatch.setattr(cells, "FEW", 0)
    compare(Problem(torch.float64, diagonal=diagonal), FLOAT64, backend="torch")


def test_where_a_cpu_multiplies_bfloat16_the_rounded_similarities_are_compared(monkeypatch):
    """The gap is wider than their rounding, which scores and dS have as well."""
    monkeypatch.setattr(schedule, "has_bfloat16_products", lambda: True)
    monkeypatch.setattr(schedule, "CELLS_PER_TARGET", 0)
    problem = Problem(torch.bfloat16, near=-0.3, normalize=True, gap=WIDE_GAP)
    assert 0.1 < problem.leaving < 0.9
    compare(problem, 8 * UNIT_ROUNDOFF[torch.bfloat16], backend="cpu")


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_several_row_negatives_leave_one_by_one(backend):
    queries, candidates, rows = drawn(N, D, seed=0), drawn(N, D, seed=1), drawn(N, 3, D, seed=2)
    leaves = [x.requires_grad_() for x in (queries, candidates, rows)]
    scores = drawn(N, 2, seed=3) * 3
    exact = [x.detach().numpy() for x in leaves]
    truth = oracle.contrastive(
        *exact[:2],
        np.eye(N),
        diagonal="keep",
        scale=0.7,
        row_negatives=exact[2],
        row_scores=scores.numpy(),
        margin=0.25,
    )
    loss = fastqt.contrastive_loss(
        *leaves[:2],
        fastqt.Diagonal(),
        diagonal="keep",
        scale=0.7,
        row_negatives=rows,
        row_scores=scores,
        false_negative_margin=0.25,
        backend=backend,
    )
    assert relative(loss, truth.loss.mean()) < FLOAT64
    wanted = truth.queries, truth.candidates, truth.row_negatives
    for gradient, exact_gradient in zip(torch.autograd.grad(loss, leaves), wanted, strict=True):
        assert relative(gradient, exact_gradient) < FLOAT64


@by_engine
def test_thresholds_of_a_logsumexp(backend, dtype, tolerance):
    queries, candidates, negatives = (drawn(n, D, seed=k).to(dtype) for k, n in enumerate((N, M, K)))
    leaves = [x.requires_grad_() for x in (queries, candidates, negatives)]
    exact = [x.detach().double().numpy() for x in leaves]
    similar = exact[0] @ np.concatenate(exact[1:]).T
    # In the middle of a row's widest gap among its middle cells: none is within rounding.
    middle = np.sort(similar, 1)[:, 6:15]
    at = np.diff(middle, axis=1).argmax(1)
    thresholds = np.take_along_axis(middle, np.stack([at, at + 1], 1), 1).mean(1)
    thresholds[:4] = np.inf, np.nan, -np.inf, 0
    cells_left = np.where(np.isnan(thresholds), np.inf, thresholds)
    truth = oracle.contrastive(
        *exact[:2],
        np.zeros((N, M)),
        diagonal="keep",
        negatives=exact[2],
        link="log_sum_exp",
        row_weights=np.linspace(-1, 2, N),
        thresholds=cells_left,
    )
    rows = fastqt.log_sum_exp(
        *leaves[:2], negatives=negatives, thresholds=torch.from_numpy(thresholds), backend=backend
    )
    assert rows[2] == -torch.inf
    finite = torch.arange(N) != 2
    assert relative(rows[finite], truth.loss[finite]) < tolerance
    upstream = torch.linspace(-1, 2, N, dtype=torch.float64).to(rows.dtype)
    found = torch.autograd.grad(rows, leaves, upstream)
    for gradient, name in zip(found, ("queries", "candidates", "negatives"), strict=True):
        assert relative(gradient, getattr(truth, name)) < tolerance, name


# Similarities, the positive's first: numbers that each dtype has exactly.
TIES = [2.0, 2.0, 2.25, 1.75, 2.0, 3.0, -2.0, 2.5]


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("strategy", "margin", "limit"),
    [("absolute", 0.0, 2.0), ("absolute", 0.25, 2.25), ("relative", 0.125, 2.25), ("relative", -0.125, 1.75)],
)
def test_a_similarity_that_equals_the_threshold_stays(strategy, margin, limit, dtype, backend):
    """The loss of one query whose scores are powers of two of its similarities."""
    queries = torch.tensor([[1.0, 0.0]], dtype=dtype, requires_grad=True)
    candidates = torch.tensor([[x, 1.0] for x in TIES], dtype=dtype)
    negatives = torch.tensor([[x, -1.0] for x in TIES], dtype=dtype)
    loss = fastqt.contrastive_loss(
        queries,
        candidates,
        fastqt.Diagonal(),
        diagonal="keep",
        scale=4.0,
        negatives=negatives,
        false_negative_margin=margin,
        false_negative_margin_strategy=strategy,
        backend=backend,
    )
    staying = [TIES[0], *(x for x in (*TIES[1:], *TIES) if x <= limit)]
    assert len(staying) < 2 * len(TIES)
    wanted = np.logaddexp.reduce(4 * np.array(staying)) - 4 * TIES[0]
    assert loss.item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_cosine_that_equals_the_threshold_stays(dtype, backend):
    """A copy of a positive with one element other than 0, of any length, has its cosine exactly."""
    queries = torch.tensor([[0.0, 4.0]], dtype=dtype)
    candidates = torch.tensor([[0.0, 8.0], [0.0, 2.0], [1.0, 0.0]], dtype=dtype)
    loss = fastqt.info_nce_loss(queries, candidates, scale=2.0, false_negative_margin=0.0, backend=backend)
    assert loss.item() == pytest.approx(np.log(2 * np.exp(2) + 1) - 2, rel=1e-6)


ROWS = 33  # and copies


def with_copies(place: str, width: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], dict, int]:
    """Queries and candidates, a copy of each row's target at a place, and how many copies a row has there."""
    queries = drawn(ROWS, width, seed=0)
    candidates = (0.7 * queries + drawn(ROWS, width, seed=1)).to(dtype)
    match place:
        case "candidates":
            return [queries.to(dtype), torch.cat([candidates, candidates])], {}, 1
        case "negatives":
            return [queries.to(dtype), candidates], {"negatives": candidates}, 1
        case "row_negatives":
            return [queries.to(dtype), candidates], {"row_negatives": candidates}, 1
    rows = candidates[:, None].expand(-1, 3, -1)
    return [queries.to(dtype), candidates], {"row_negatives": rows}, 3


def copies_that_leave(rows: list[torch.Tensor], more: dict, copies: int, **options) -> int:
    """In how many rows the target's probability is that of less than all copies; no other cell counts."""
    is_copy = torch.arange(ROWS)[:, None] == torch.arange(len(rows[1])) % ROWS
    others = {"mask": ~is_copy}
    if "negatives" in more:  # which no mask excludes: they are so few that each is a problem of its own
        found = [
            fastqt.info_nce_loss(q, c, negatives=c, scale=1e-3, reduction="none", **options)
            for q, c in zip(*(x.split(1) for x in rows), strict=True)
        ]
        losses = torch.cat(found)
    else:
        losses = fastqt.contrastive_loss(
            *rows,
            fastqt.Diagonal(),
            diagonal="keep",
            scale=1e-3,
            reduction="none",
            **others,
            **more,
            **options,
        )
    return int((losses < np.log(1 + copies) - 1e-2).sum())


@pytest.mark.thinned(7)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("width", [7, 700])
@pytest.mark.parametrize("place", ["candidates", "negatives", "row_negatives", "several cells a row"])
def test_copies_of_a_target_stay(place, width, strategy, normalize, backend, dtype):
    """Also where the products of a target and of its copy are added up in other orders."""
    options = {"false_negative_margin": 0.0, "false_negative_margin_strategy": strategy}
    options |= {"backend": backend, "normalize": normalize}
    assert copies_that_leave(*with_copies(place, width, dtype), **options) == 0
    options["false_negative_margin"] = -0.5
    assert copies_that_leave(*with_copies(place, width, dtype), **options) == ROWS


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("width", [7, 64, 700])
def test_copies_stay_where_a_cpu_multiplies_bfloat16(width, normalize, monkeypatch):
    monkeypatch.setattr(schedule, "has_bfloat16_products", lambda: True)
    monkeypatch.setattr(schedule, "CELLS_PER_TARGET", 0)
    for place in ("candidates", "row_negatives"):
        given = with_copies(place, width, torch.bfloat16)
        options = {"false_negative_margin": 0.0, "normalize": normalize, "backend": "cpu"}
        assert copies_that_leave(*given, **options) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_what_is_above_by_more_than_rounding_leaves(backend, dtype):
    """For products at most 2 (D + 8) roundings of the product of the norms, as the docstring has it."""
    (queries, candidates), width = (drawn(2, ROWS, 50, seed=0)), 50
    queries, candidates = (F.normalize(x, dim=1) for x in (queries, candidates + queries))
    similar = (queries * candidates).sum(1, keepdim=True)
    above = candidates * (1 + 2 * (width + 8) * UNIT_ROUNDOFF[dtype] / similar)
    leaves = copies_that_leave(
        [x.to(dtype) for x in (queries, torch.cat([candidates, above]))],
        {},
        1,
        false_negative_margin=0.0,
        backend=backend,
    )
    assert leaves == ROWS


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_copies_stay_in_the_losses_that_take_a_margin(strategy, dtype, backend):
    """Of documents that are all alike none leaves, in any direction."""
    queries = drawn(ROWS, 96, seed=0).to(dtype)
    documents = drawn(1, 96, seed=1).to(dtype).expand(ROWS, -1)
    options = {"false_negative_margin": 0.0, "false_negative_margin_strategy": strategy, "backend": backend}
    wanted = np.log(2 * ROWS)
    for found in (
        fastqt.info_nce_loss(queries, documents, negatives=documents, **options),
        fastqt.simcse_loss(queries, documents, documents, **options),
        fastqt.simcse_loss(queries, documents, documents, hard_negative_weight=1e-9, **options),
        fastqt.multiple_negatives_ranking_loss(queries, [documents, documents], **options),
    ):
        assert found.item() == pytest.approx(wanted, rel=1e-3)
    # Of queries that are alike too, none leaves the direction to them.
    ranked = fastqt.multiple_negatives_ranking_loss(
        queries[:1].expand(ROWS, -1),
        documents,
        directions=("query_to_doc", "doc_to_query"),
        partition_mode="joint",
        **options,
    )
    assert ranked.item() == pytest.approx(wanted, rel=1e-3)


def test_of_several_targets_the_least_similar_counts():
    """By hand: similarities 3 and 1 of targets, 2 and 0 of others, of which 2 is above 1."""
    queries, candidates = torch.ones(1, 1), torch.tensor([[3.0], [2.0], [1.0], [0.0]])
    targets = torch.tensor([[0.5, 0.0, 0.5, 0.0]]).to_sparse_csr()
    loss = fastqt.contrastive_loss(
        queries, candidates, targets, diagonal="keep", false_negative_margin=0.0, reduction="sum"
    )
    lse = np.logaddexp.reduce([3.0, 1.0, 0.0])
    assert loss.item() == pytest.approx(lse - 2 + np.log(0.5), rel=1e-6)


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_a_row_without_target_loses_nothing_and_nothing_leaves(backend):
    queries, candidates = (drawn(N, D, seed=k).requires_grad_() for k in range(2))
    labels = torch.full((N,), -100)
    options = {"diagonal": "keep", "reduction": "none", "backend": backend}
    rows = fastqt.contrastive_loss(queries, candidates, labels, false_negative_margin=0.0, **options)
    assert rows.tolist() == [0.0] * N
    labels[0] = 2
    with_one = fastqt.contrastive_loss(queries, candidates, labels, false_negative_margin=-9.0, **options)
    assert with_one.tolist() == [0.0] * N  # of its target alone
    gradients = torch.autograd.grad(with_one.sum(), (queries, candidates))
    assert not any(x.any() for x in gradients)


@pytest.mark.parametrize("margin", [-0.3, 0.05])
def test_learnt_positives_keep_their_digits(margin):
    """Where the probability of positives is above 0.999."""
    errors = {"ours": [], "chunked": [], "eager": []}
    for seed in range(10):
        candidates = F.normalize(drawn(32, 64, seed=seed), dim=1).float()
        queries = F.normalize(candidates + 0.02 * drawn(32, 64, seed=100 + seed).float(), dim=1)
        exact = queries.double().numpy(), candidates.double().numpy()
        clear = oracle.clear_margin(
            exact[0] @ exact[1].T, (exact[0] * exact[1]).sum(1), "absolute", -0.9, 1e-4
        )
        near = margin if margin > 0 else clear
        truth = oracle.contrastive(*exact, np.eye(32), diagonal="keep", scale=20.0, margin=near)
        assert truth.loss.mean() < 1e-3
        leaves = [x.clone().requires_grad_() for x in (queries, candidates)]
        options = {"normalize": False, "false_negative_margin": near}
        products = leaves[0] @ leaves[1].T
        others = ~torch.eye(32, dtype=torch.bool)
        above = (products > products.diagonal()[:, None] + near) & others
        assert (margin > 0) == (not above.any())
        losses = {
            "ours": fastqt.info_nce_loss(*leaves, **options, backend="cpu"),
            "chunked": fastqt.info_nce_loss(*leaves, **options, backend="torch"),
            "eager": F.cross_entropy((20 * products).masked_fill(above, -torch.inf), torch.arange(32)),
        }
        for name, loss in losses.items():
            found = zip(torch.autograd.grad(loss, leaves), (truth.queries, truth.candidates), strict=True)
            errors[name].append([np.linalg.norm(a.numpy() - b) / np.linalg.norm(b) for a, b in found])
    ours, chunked, eager = (np.mean(errors[name], 0) for name in ("ours", "chunked", "eager"))
    assert (ours <= EAGER_FACTOR * eager + HALF_ULP[torch.float32]).all()
    assert (chunked <= EAGER_FACTOR * eager + HALF_ULP[torch.float32]).all()


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("diagonal", ["zero", "keep"])
def test_beside_a_guide(diagonal, backend, monkeypatch):
    monkeypatch.setattr(guided, "ROOM", {"cpu": (0, 0)})
    monkeypatch.setattr(guided, "MIN_ROWS", 4)
    queries, candidates, negatives = (drawn(n, D, seed=k).requires_grad_() for k, n in enumerate((N, N, K)))
    of_guide = [drawn(n, 5, seed=10 + k) for k, n in enumerate((N, N, K))]
    guide = fastqt.Guide(*of_guide[:2], thresholds=torch.full((N,), 0.3), negatives=of_guide[2])
    T = oracle.window(N, N, [-1, 1])
    scores = [oracle.guide_scores(of_guide[0].numpy(), x.numpy()) for x in of_guide[1:]]
    leaves = queries, candidates, negatives
    exact = [x.detach().numpy() for x in leaves]
    truth = oracle.contrastive(
        *exact[:2],
        T,
        diagonal=diagonal,
        negatives=exact[2],
        mask=oracle.guide_excludes(scores[0], np.full(N, 0.3), T),
        negatives_mask=oracle.guide_excludes(scores[1], np.full(N, 0.3)),
        margin=0.5,
    )
    loss = fastqt.contrastive_loss(
        *leaves[:2],
        diagonal=diagonal,
        negatives=negatives,
        guide=guide,
        false_negative_margin=0.5,
        backend=backend,
    )
    assert relative(loss, truth.loss.mean()) < FLOAT64
    for gradient, name in zip(
        torch.autograd.grad(loss, leaves), ("queries", "candidates", "negatives"), strict=True
    ):
        assert relative(gradient, getattr(truth, name)) < FLOAT64


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("backend", "gap"), [("cpu", WIDE_GAP), ("reference", 1e-6)])
def test_under_autocast_rounded_embeddings_are_compared(backend, gap, normalize):
    """The reference engine has products of them in float32: similarities may be near to thresholds."""
    queries, candidates = (drawn(40, D, seed=k).float().requires_grad_() for k in range(2))
    exact = [x.detach().bfloat16().double() for x in (queries, candidates)]
    exact = [(F.normalize(x, dim=1) if normalize else x).numpy() for x in exact]
    similar = exact[0] @ exact[1].T
    margin = oracle.clear_margin(similar, similar.diagonal(), "absolute", 0.1, gap)
    truth = oracle.contrastive(*exact, np.eye(40), diagonal="keep", scale=2.0, margin=margin)
    with torch.autocast("cpu", torch.bfloat16):
        rows = fastqt.info_nce_loss(
            queries,
            candidates,
            scale=2.0,
            normalize=normalize,
            false_negative_margin=margin,
            reduction="none",
            backend=backend,
        )
    assert rows.dtype is torch.float32
    tolerance = FLOAT32 if backend == "reference" else 8 * UNIT_ROUNDOFF[torch.bfloat16]
    assert relative(rows, truth.loss) < tolerance


def margin_losses(queries, candidates, negatives):
    options = {"false_negative_margin": -0.1, "negatives": negatives}
    return (
        fastqt.info_nce_loss(queries, candidates, **options)
        + fastqt.contrastive_loss(queries, candidates, scale=0.5, normalize=True, **options)
        + fastqt.log_sum_exp(queries, candidates, thresholds=queries[:, 0])[1]
    )


def tensors() -> list[torch.Tensor]:
    return [drawn(n, D, seed=k) for k, n in enumerate((N, N, K))]


@pytest.mark.parametrize("backend", [None, "torch"])
def test_compiles_as_one_graph(backend, monkeypatch):
    if backend:
        monkeypatch.setenv("FASTQT_BACKEND", backend)
    torch._dynamo.reset()
    leaves = [x.requires_grad_() for x in tensors()]
    compiled = torch.compile(margin_losses, fullgraph=True, backend="aot_eager")
    found, wanted = compiled(*leaves), margin_losses(*leaves)
    assert relative(found, wanted) < FLOAT64
    for a, b in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, leaves), strict=True):
        assert relative(a, b) < FLOAT64


def test_transforms_of_torch_func():
    given = tensors()
    leaves = [x.clone().requires_grad_() for x in given]
    wanted = torch.autograd.grad(margin_losses(*leaves), leaves)
    for a, b in zip(torch.func.grad(margin_losses, (0, 1, 2))(*given), wanted, strict=True):
        assert relative(a, b) < FLOAT64
    several = torch.stack([given[1], given[1].flip(0)])
    each = torch.func.vmap(margin_losses, (None, 0, None))(given[0], several, given[2])
    for one, candidates in zip(each, several, strict=True):
        assert relative(one, margin_losses(given[0], candidates, given[2])) < FLOAT64


def test_gradcheck_of_the_reference_twice():
    """The choice of cells is a constant."""
    leaves = [drawn(n, 3, seed=k).requires_grad_() for k, n in enumerate((4, 5))]

    def loss(queries, candidates):
        return fastqt.info_nce_loss(queries, candidates, false_negative_margin=0.1, backend="reference")

    assert torch.autograd.gradcheck(loss, leaves)
    assert torch.autograd.gradgradcheck(loss, leaves)


def test_targets_are_scored_in_blocks_as_at_once(monkeypatch):
    leaves = tensors()
    whole = margin_losses(*leaves)
    monkeypatch.setattr(false_negatives, "BLOCK_BYTES", {"cpu": 100})
    assert torch.equal(margin_losses(*leaves), whole)


def test_nan_reaches_the_loss():
    for backend in ("cpu", "torch", "reference"):
        queries, candidates = (drawn(N, D, seed=k) for k in range(2))
        queries[2, 1] = torch.nan
        rows = fastqt.info_nce_loss(
            queries, candidates, false_negative_margin=0.0, reduction="none", backend=backend
        )
        assert rows.isnan().nonzero().flatten().tolist() == [2]


class Products(TorchDispatchMode):
    """Counts the cells of products that are as wide as the candidates."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if "mm" in func.__name__:
            self.cells += found.numel()
        return found


def test_no_further_product_is_taken():
    x, y = (torch.randn(N, D, requires_grad=True) for _ in range(2))
    counts = []
    for margin in (None, 0.1):
        with Products() as products:
            loss = fastqt.info_nce_loss(x, y, false_negative_margin=margin, backend="torch")
            torch.autograd.grad(loss, (x, y))
        counts.append(products.cells)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_no_part_of_the_memory_grows_with_both_sides(backend):
    """At 3,072 rows a mask would take 9 MiB more than the loss without a margin, and similarities 36."""
    rows, most = 3072, {}
    leaves = [torch.randn(rows, 8, requires_grad=True) for _ in range(2)]
    for margin in (None, 0.1):

        def step(margin: float | None = margin) -> None:
            loss = fastqt.info_nce_loss(*leaves, false_negative_margin=margin, memory="low", backend=backend)
            torch.autograd.grad(loss, leaves)

        step()
        with Live(*leaves) as live:
            step()
        most[margin] = live.most
    # The positives' rows, their products and thresholds; in the engine torch which cells of a chunk leave.
    of_chunk = 0 if backend == "cpu" else 12 * 2**20 // 4
    assert most[0.1] < most[None] + rows * (8 * 4 * 4 + 64) + of_chunk


X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
REFUSALS = {
    "a text": ({"false_negative_margin": "0.1"}, TypeError, "false_negative_margin: want a number, got str"),
    "infinite": ({"false_negative_margin": float("inf")}, ValueError, "false_negative_margin: want a finite"),
    "too large": ({"false_negative_margin": 1e39}, ValueError, "false_negative_margin: want a number that"),
    "a tensor": (
        {"false_negative_margin": torch.tensor(0.1)},
        ValueError,
        "false_negative_margin: want a number",
    ),
    "another strategy": (
        {"false_negative_margin_strategy": "both"},
        ValueError,
        "false_negative_margin_strategy: want one of 'absolute', 'relative', got 'both'",
    ),
    "distances": (
        {"false_negative_margin": 0.1, "similarity": "euclidean"},
        ValueError,
        "false_negative_margin: want None with similarity='euclidean'",
    ),
    "a matrix of targets": (
        {"false_negative_margin": 0.1, "targets": torch.eye(4)},
        ValueError,
        "false_negative_margin: want None with smoothed targets or a matrix of them",
    ),
    "smoothed targets": (
        {"false_negative_margin": 0.1, "targets": fastqt.smoothed(fastqt.Diagonal(), 0.1)},
        ValueError,
        "false_negative_margin: want None with smoothed targets or a matrix of them",
    ),
    "a scale that is not positive": (
        {"false_negative_margin": 0.1, "scale": torch.tensor(-1.0)},
        ValueError,
        "scale: want a positive number where false negatives are filtered",
    ),
    "an engine that does not know it": (
        {"false_negative_margin": 0.1, "backend": "triton"},
        ValueError,
        "backend: 'triton' is not available",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_misuse_is_an_error(name):
    options, error, message = REFUSALS[name]
    options = {"targets": fastqt.Diagonal(), "diagonal": "keep", **options}
    for backend in [options.pop("backend")] if "backend" in options else ["cpu", "torch", "reference"]:
        with pytest.raises(error, match=message):
            fastqt.contrastive_loss(X, X + 1, backend=backend, **options)


@pytest.mark.parametrize(
    ("thresholds", "error", "message"),
    [
        ([0.1] * 4, TypeError, "thresholds: want a tensor"),
        (torch.zeros(3), ValueError, r"thresholds: want shape \(4,\), got \(3,\)"),
        (torch.zeros(4, dtype=torch.long), TypeError, "thresholds: want a floating-point dtype"),
        (torch.zeros(4, device="meta"), ValueError, "thresholds: want a tensor with values"),
    ],
)
def test_misuse_of_thresholds_is_an_error(thresholds, error, message):
    with pytest.raises(error, match=message):
        fastqt.log_sum_exp(X, X, thresholds=thresholds)


def test_a_target_that_there_is_not_is_the_engines_error():
    labels = torch.tensor([0, 1, 2, 9])
    with pytest.raises(ValueError, match="row 3's target column 9 is outside the M=4 candidates"):
        fastqt.contrastive_loss(X, X, labels, diagonal="keep", false_negative_margin=0.1)


def test_with_label_smoothing_it_is_refused():
    with pytest.raises(ValueError, match="false_negative_margin: want None with label_smoothing"):
        fastqt.info_nce_loss(X, X, label_smoothing=0.1, false_negative_margin=0.1)


def test_the_modules_take_it():
    for module in (fastqt.nn.ContrastiveLoss, fastqt.nn.InfoNCELoss, fastqt.nn.SimCSELoss):
        assert "false_negative_margin_strategy" in inspect.signature(module).parameters
    criterion = fastqt.nn.InfoNCELoss(false_negative_margin=-0.1)
    wanted = fastqt.info_nce_loss(X, X + 1, false_negative_margin=-0.1)
    assert torch.equal(criterion(X, X + 1), wanted)
    assert wanted < fastqt.info_nce_loss(X, X + 1)
