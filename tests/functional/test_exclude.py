"""What leaves by each filter, and by several at once: values and gradients are those of whole scores.

The oracle has all scores and all cells at once, in float64 and plain PyTorch, and shares no code with fastqt.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize, pad

import fastqt
from fastqt.engines import filtered
from tests.shared.filters import OF_IDS
from tests.shared.ring_memory import Live
from tests.shared.tolerances import FOR_DTYPE, relative

N, K, D, E = 13, 5, 6, 4
BACKENDS = ("cpu", "torch", "reference")
DTYPES = (torch.float64, torch.float32)
by_backend = pytest.mark.parametrize("backend", BACKENDS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def chunks(monkeypatch):
    """Chunks of 4 rows, so that these problems have several."""
    monkeypatch.setattr(filtered, "ROOM", {"cpu": (0, 0)})
    monkeypatch.setattr(filtered, "MIN_ROWS", 4)
    monkeypatch.setattr(filtered, "MIN_COLUMNS", 3)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def softplus(x: Tensor) -> Tensor:
    """torch's own is linear above 20."""
    return torch.logaddexp(x, torch.zeros((), dtype=x.dtype))


def integers(n: int, seed: int) -> Tensor:
    return torch.randint(3, (n,), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Problem:
    """A loss of embeddings. Of each row `indices` has the target's column, not on the diagonal, or -100.

    Attributes:
        link: which of `LOSSES`.
        diagonal: what becomes of cells (i, i).
    """

    link: str
    diagonal: str
    queries: Tensor
    candidates: Tensor
    negatives: Tensor
    indices: Tensor
    scale: Tensor

    @property
    def M(self) -> int:  # noqa: N802
        return len(self.candidates)

    @property
    def targets(self) -> Tensor:
        """(N, M)"""
        if self.link == "log_sum_exp":
            return torch.zeros(N, self.M, dtype=torch.float64)
        return (self.indices[:, None] == torch.arange(self.M)).double()

    def leaves(self, dtype: torch.dtype) -> dict[str, Tensor]:
        names = ("queries", "candidates", "negatives", "scale")
        return {name: getattr(self, name).to(dtype, copy=True).requires_grad_() for name in names}


def problem(M: int, link: str, diagonal: str, *, converged: bool = False) -> Problem:
    """Of M candidates; where it has converged each query has nearly all of its probability at its target."""
    queries, candidates, negatives = drawn(N, D, seed=1), drawn(M, D, seed=2), drawn(K, D, seed=3)
    indices = (torch.arange(N) + 3) % M
    indices = indices.where(indices != torch.arange(N), (indices + 1) % M)
    indices[4] = -100
    if converged:
        candidates = normalize(candidates, dim=1)
        queries = 20 * candidates[indices.clamp(0)] + 0.1 * queries
        queries[4] /= 20
    scale = torch.tensor(0.7, dtype=torch.float64)
    return Problem(link, diagonal, queries, candidates, negatives, indices, scale)


class Made(NamedTuple):
    """Filters, and whether cells of the candidates (N, M) and of the negatives (N, K) leave by them."""

    filters: list[Any]
    cells: Tensor
    of_negatives: Tensor

    def __or__(self, other: "Made") -> "Made":
        filters = [*self.filters, *other.filters]
        return Made(filters, self.cells | other.cells, self.of_negatives | other.of_negatives)


NOTHING = torch.zeros(N, K, dtype=torch.bool)


def of_ids(p: Problem, kind: type = fastqt.Same, seed: int = 10, *, of_negatives: bool = False) -> Made:
    own, columns = integers(N, seed), integers(p.M, seed + 1)
    others, beside, leave = None, NOTHING, OF_IDS[kind]
    if of_negatives:
        others = integers(K, seed + 2)
        beside = leave(own[:, None], others)
    return Made([kind(own, columns, others)], leave(own[:, None], columns), beside)


def within(p: Problem) -> Made:
    return of_ids(p, fastqt.Within, 20, of_negatives=True)


def mask(p: Problem) -> Made:
    cells = (drawn(N, p.M, seed=30) > 1) & (p.targets == 0)
    return Made([cells], cells, NOTHING)


def guide(p: Problem) -> Made:
    """Its thresholds are given, since not every problem has as many candidates as queries."""
    given = {"queries": N, "candidates": p.M, "negatives": K}
    x = {name: drawn(n, E, seed=40 + n) for name, n in given.items()}
    thresholds = drawn(N, seed=43) / 4 + 0.5
    queries, *columns = (normalize(each, dim=1) for each in x.values())
    cells = [queries @ c.T > thresholds[:, None] for c in columns]
    return Made([fastqt.Guide(**x, thresholds=thresholds)], *cells)


def similar(p: Problem) -> Made:
    """A margin above each row's target, or thresholds where there are none; what is replaced stays."""
    S = p.queries @ torch.cat([p.candidates, p.negatives]).T
    if p.link == "log_sum_exp":
        thresholds = S.median(1).values + 0.01
        filter_: Any = fastqt.Above(thresholds)
    else:
        own = S.gather(1, p.indices.clamp(0)[:, None]).squeeze(1)
        thresholds = own.where(p.indices >= 0, torch.inf) + 0.25
        filter_ = fastqt.Margin(0.25)
    above = thresholds[:, None] < S
    if p.diagonal == "zero":
        above[:, : p.M].fill_diagonal_(False)
    return Made([filter_], above[:, : p.M], above[:, p.M :])


FILTERS: dict[str, Callable[[Problem], Made]] = {
    **{kind.__name__: partial(of_ids, kind=kind) for kind in OF_IDS},
    **{f"{kind.__name__} of negatives": partial(of_ids, kind=kind, of_negatives=True) for kind in OF_IDS},
    "same twice": lambda p: of_ids(p) | of_ids(p, seed=13),
    "same twice, once of negatives": lambda p: of_ids(p, of_negatives=True) | of_ids(p, seed=13),
    "same within": lambda p: of_ids(p, of_negatives=True) | within(p),
    "mask": mask,
    "guide": guide,
    "similar": similar,
    "guide and similar": lambda p: guide(p) | similar(p),
    "all": lambda p: of_ids(p, of_negatives=True) | within(p) | mask(p) | similar(p) | guide(p),
}
LOSSES = {
    "softmax": fastqt.contrastive_loss,
    "sigmoid": fastqt.sigmoid_loss,
    "log_sum_exp": fastqt.log_sum_exp,
}


def oracle(x: dict[str, Tensor], T: Tensor, made: Made, link: str, diagonal: str) -> Tensor:
    """The loss of each row from all scores; no target leaves."""
    S = x["scale"] * (x["queries"] @ torch.cat([x["candidates"], x["negatives"]]).T)
    M = T.shape[1]
    own = torch.eye(*S.shape, dtype=torch.bool)
    own[:, M:] = False
    T = pad(T, (0, S.shape[1] - M))
    out = torch.cat([made.cells, made.of_negatives], 1) & (T == 0)
    if diagonal == "zero":
        S = S.masked_fill(own, 0)
    if diagonal == "exclude":
        out = out | own
    if link == "sigmoid":
        return (T * softplus(-S) + (1 - T) * softplus(S)).masked_fill(out, 0).sum(1)
    S = S.masked_fill(out, -torch.inf)
    if link == "log_sum_exp":
        return S.logsumexp(1)
    # Minus the logarithm of each probability, without the cancellation of a logsumexp and its largest score.
    others = S[:, None].masked_fill(torch.eye(S.shape[1], dtype=torch.bool), -torch.inf).logsumexp(2)
    surprise = softplus((others - S).masked_fill(T == 0, 0))
    return (torch.special.xlogy(T, T) + T * surprise).sum(1)


def check(
    p: Problem,
    made: Made,
    dtype: torch.dtype,
    *,
    targets: Any = None,
    T: Tensor | None = None,
    dims: tuple[int, ...] = (D,),
    **how: Any,
) -> None:
    """The loss of each row under any upstream gradient, and the mean, which takes its gradients at once."""
    leaves, exact = p.leaves(dtype), p.leaves(torch.float64)
    T = p.targets if T is None else T

    def truth() -> Tensor:
        parts = [{name: x[..., :dim] if x.dim() else x for name, x in exact.items()} for dim in dims]
        return sum(oracle(part, T, made, p.link, p.diagonal) for part in parts)

    def loss(reduction: str) -> Tensor:
        options: dict[str, Any] = {"exclude": made.filters, "diagonal": p.diagonal, **how}
        if p.link != "log_sum_exp":
            options |= {"targets": p.indices if targets is None else targets, "reduction": reduction}
        return LOSSES[p.link](**leaves, **options)

    def compare(found: Tensor, wanted: Tensor, weights: Tensor) -> None:
        assert found.dtype is dtype
        assert torch.equal(found.isneginf(), wanted.isneginf())
        finite = wanted.isfinite()
        assert relative(found[finite], wanted[finite]) < FOR_DTYPE[dtype]
        gradients = torch.autograd.grad(found, list(leaves.values()), weights.to(dtype))
        weights = weights[finite]
        truths = torch.autograd.grad(wanted[finite], list(exact.values()), weights, retain_graph=True)
        # That of the scale is one number, to which rows of either sign add.
        (size,) = torch.autograd.grad(wanted[finite], exact["scale"], weights.abs())
        for name, gradient, of_truth in zip(leaves, gradients, truths, strict=True):
            least = size.abs().item() if name == "scale" else 0.0
            error, largest = (gradient - of_truth).abs().max(), of_truth.abs().max()
            assert error < FOR_DTYPE[dtype] * max(largest, least), name

    assert made.cells.any()
    compare(loss("none"), truth(), torch.linspace(-1, 2, N, dtype=torch.float64))
    if p.link != "log_sum_exp":
        compare(loss("mean"), truth().mean(), torch.ones((), dtype=torch.float64))


@by_dtype
@by_backend
@pytest.mark.parametrize("diagonal", ["zero", "exclude", "keep"])
@pytest.mark.parametrize("link", LOSSES)
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("M", [N, 17, 9])
@pytest.mark.thinned(7)
def test_values_and_gradients_are_those_of_whole_scores(M, name, link, diagonal, backend, dtype):
    p = problem(M, link, diagonal)
    check(p, FILTERS[name](p), dtype, backend=backend)


# Plain PyTorch has no digits left in float32, where a logsumexp cancels against its largest score.
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(name, dtype) for name in BACKENDS for dtype in DTYPES if (name, dtype) != ("reference", torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize("name", ["same twice", "Within of negatives", "all"])
def test_of_embeddings_that_have_converged(name, link, backend, dtype):
    p = problem(17, link, "keep", converged=True)
    check(p, FILTERS[name](p), dtype, backend=backend)


@by_backend
@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize("name", [name for name in FILTERS if "similar" not in name and name != "all"])
def test_each_prefix_leaves_the_same_cells(name, link, backend):
    p = problem(N, link, "zero")
    check(p, FILTERS[name](p), torch.float64, dims=(2, 5, D), matryoshka=(2, 5, D), backend=backend)


def window(M: int, reach: int, is_normalized: bool) -> Tensor:
    distances = (torch.arange(N)[:, None] - torch.arange(M)).abs()
    T = ((distances > 0) & (distances <= reach)).double()
    return T / T.sum(1, keepdim=True) if is_normalized else T


@by_dtype
@by_backend
@pytest.mark.parametrize("diagonal", ["zero", "exclude", "keep"])
@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    "name", [*(kind.__name__ for kind in OF_IDS), "same twice", "Same of negatives", "guide"]
)
@pytest.mark.thinned(5)
def test_the_targets_of_a_window_stay(name, link, diagonal, backend, dtype):
    p = problem(N, link, diagonal)
    made, T = FILTERS[name](p), window(N, 2, link == "softmax")
    assert (made.cells & (T > 0)).any()
    targets = fastqt.Window(2, normalize=link == "softmax")
    check(p, made, dtype, targets=targets, T=T, backend=backend)


@by_backend
@pytest.mark.parametrize("matrix", ["dense", "sparse"])
def test_the_targets_of_a_matrix_stay(matrix, backend):
    p = problem(17, "softmax", "keep")
    T = drawn(N, 17, seed=50).clamp(min=0)
    T[4] = 0
    targets = T if matrix == "dense" else T.to_sparse_csr()
    for made in (of_ids(p) | within(p), of_ids(p, of_negatives=True) | guide(p)):
        check(p, made, torch.float64, targets=targets, T=T, backend=backend)


ALONE = torch.arange(N)  # as parts, of which each has one query


@by_backend
@pytest.mark.parametrize(
    "exclude",
    [
        fastqt.Within(ALONE, negative_ids=torch.full((K,), -1)),
        [fastqt.Same(ALONE * 0), fastqt.Same(ALONE * 0, negative_ids=torch.zeros(K, dtype=torch.int64))],
    ],
    ids=["parts of one query", "one id"],
)
def test_a_row_of_which_all_others_leave(exclude, backend):
    """Its target alone has all of the probability. Without a target there is nothing."""
    leaves = problem(N, "softmax", "keep").leaves(torch.float64)
    targets = ALONE.clone()
    targets[3] = -100
    how = {"diagonal": "keep", "exclude": exclude, "backend": backend}
    loss = fastqt.contrastive_loss(**leaves, targets=targets, reduction="none", **how)
    assert not loss.any()
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss.sum(), list(leaves.values())))
    none = fastqt.sigmoid_loss(**leaves, targets=targets, reduction="none", **how)
    # A part of one query has its own candidate, whether it is a target or not.
    alone = leaves["scale"] * (leaves["queries"][3] @ leaves["candidates"][3])
    assert (
        relative(none[3], softplus(alone) if isinstance(exclude, fastqt.Within) else 0)
        < FOR_DTYPE[none.dtype]
    )


@by_backend
def test_a_logsumexp_of_nothing_is_minus_infinity_without_a_gradient(backend):
    leaves = problem(N, "log_sum_exp", "keep").leaves(torch.float64)
    exclude = fastqt.Within(ALONE % 3, ALONE % 2, torch.full((K,), 9))
    rows = fastqt.log_sum_exp(**leaves, exclude=exclude, backend=backend)
    assert rows.isneginf().tolist() == (ALONE % 3 == 2).tolist()
    gradients = torch.autograd.grad(rows[2::3].sum(), list(leaves.values()))
    assert not any(gradient.any() for gradient in gradients)


@by_dtype
@by_backend
@pytest.mark.parametrize("M", [N, 17])
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.thinned(5)
def test_info_nce_of_cosines(name, M, backend, dtype):
    """Whose targets are the pairs."""
    p = problem(M, "softmax", "keep")
    unit = {what: normalize(getattr(p, what), dim=1) for what in ("queries", "candidates", "negatives")}
    made = FILTERS[name](replace(p, **unit, indices=ALONE))
    leaves, exact = p.leaves(dtype), p.leaves(torch.float64)
    rows = [normalize(exact[what], dim=1) for what in unit]
    S = exact["scale"] * (rows[0] @ torch.cat(rows[1:]).T)
    out = torch.cat([made.cells, made.of_negatives], 1).fill_diagonal_(False)
    wanted = cross_entropy(S.masked_fill(out, -torch.inf), ALONE)
    found = fastqt.info_nce_loss(**leaves, exclude=made.filters, backend=backend)
    assert relative(found, wanted) < FOR_DTYPE[dtype]
    gradients = torch.autograd.grad(found, list(leaves.values()))
    truths = torch.autograd.grad(wanted, list(exact.values()))
    for what, gradient, truth in zip(leaves, gradients, truths, strict=True):
        assert relative(gradient, truth) < FOR_DTYPE[dtype], what


@pytest.mark.parametrize("kind", OF_IDS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_candidates_have_the_ids_of_their_queries(kind, dtype):
    x, y = drawn(2, N, D, seed=0)
    ids = integers(N, 1).to(dtype)
    alone, both = (
        fastqt.info_nce_loss(x, y, exclude=each) for each in (kind(ids), kind(ids.long(), ids.int()))
    )
    assert torch.equal(alone, both)
    assert alone < fastqt.info_nce_loss(x, y)


def test_parts_are_losses_of_their_own():
    x, y = drawn(2, N, D, seed=0)
    parts = integers(N, 1)
    loss = fastqt.info_nce_loss(x, y, exclude=fastqt.Within(parts), reduction="sum")
    apart = [fastqt.info_nce_loss(x[parts == k], y[parts == k], reduction="sum") for k in range(3)]
    assert relative(loss, sum(apart)) < FOR_DTYPE[torch.float64]


def test_the_order_of_filters_is_no_matter():
    p = problem(N, "softmax", "zero")
    made, inputs = FILTERS["all"](p), p.leaves(torch.float64)
    found = {
        fastqt.contrastive_loss(**inputs, targets=p.indices, exclude=filters).item()
        for filters in (made.filters, made.filters[::-1], tuple(made.filters))
    }
    assert len(found) == 1


def test_nothing_is_excluded_by_nothing():
    x, y = drawn(2, N, D, seed=0)
    assert torch.equal(fastqt.contrastive_loss(x, y, exclude=[]), fastqt.contrastive_loss(x, y))
    none = torch.zeros(N, N, dtype=torch.bool)
    assert relative(fastqt.contrastive_loss(x, y, exclude=none), fastqt.contrastive_loss(x, y)) < 1e-13


@pytest.mark.parametrize("name", ["Same", "mask", "similar"])
@pytest.mark.thinned(3)
def test_what_engines_know_is_one_graph(name):
    torch._dynamo.reset()
    p = problem(N, "softmax", "zero")
    leaves, filters = p.leaves(torch.float64), FILTERS[name](p).filters

    def loss(queries: Tensor) -> Tensor:
        return fastqt.contrastive_loss(**leaves | {"queries": queries}, targets=p.indices, exclude=filters)

    found = torch.compile(loss, fullgraph=True, backend="aot_eager")(leaves["queries"])
    assert relative(found, loss(leaves["queries"])) < FOR_DTYPE[torch.float64]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by dynamo
@pytest.mark.parametrize("name", ["same twice", "Within of negatives", "all"])
@pytest.mark.thinned(3)
def test_what_they_do_not_know_breaks_the_graph_and_not_the_loss(name):
    torch._dynamo.reset()
    p = problem(N, "softmax", "zero")
    leaves, filters = p.leaves(torch.float64), FILTERS[name](p).filters

    def loss(queries: Tensor) -> Tensor:
        return fastqt.contrastive_loss(**leaves | {"queries": queries}, targets=p.indices, exclude=filters)

    x = leaves["queries"]
    found, wanted = torch.compile(loss, backend="aot_eager")(x), loss(x)
    assert relative(found, wanted) < FOR_DTYPE[torch.float64]
    assert relative(*(torch.autograd.grad(each, x)[0] for each in (found, wanted))) < FOR_DTYPE[torch.float64]


@pytest.mark.parametrize("name", ["same twice", "Within", "all"])
def test_under_the_transforms_of_torch_func(name):
    p = problem(N, "softmax", "zero")
    x, filters = (
        {key: leaf.detach() for key, leaf in p.leaves(torch.float64).items()},
        FILTERS[name](p).filters,
    )

    def loss(queries: Tensor) -> Tensor:
        return fastqt.contrastive_loss(**x | {"queries": queries}, targets=p.indices, exclude=filters)

    stacked = torch.stack([x["queries"], -x["queries"]])
    found = torch.vmap(torch.func.grad(loss))(stacked)
    for gradient, queries in zip(found, stacked, strict=True):
        queries = queries.clone().requires_grad_()
        assert relative(gradient, torch.autograd.grad(loss(queries), queries)[0]) < FOR_DTYPE[torch.float64]


def test_ids_of_a_filter_do_not_change_with_the_users_tensor_after_the_loss():
    """As of all arguments: they are noticed, or do not matter."""
    x = drawn(N, D, seed=0).requires_grad_()
    for kind in OF_IDS:
        ids = integers(N, 1)
        wanted = torch.autograd.grad(fastqt.log_sum_exp(x, x, exclude=kind(ids.clone())).sum(), x)[0]
        loss = fastqt.log_sum_exp(x, x, exclude=kind(ids)).sum()
        ids.add_(torch.arange(N))
        with contextlib.suppress(RuntimeError):  # torch's "modified by an inplace operation"
            assert torch.equal(torch.autograd.grad(loss, x)[0], wanted)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("loss", [fastqt.sigmoid_loss, fastqt.info_nce_loss, fastqt.log_sum_exp])
@pytest.mark.parametrize("name", ["same", "same twice", "within", "of negatives"])
@pytest.mark.thinned(4)
def test_no_part_of_the_memory_grows_with_both_sides(name, loss, backend, monkeypatch):
    """At 4,096 rows a mask alone would take 16 MiB, of three filters 48, and comparisons of scores 64."""
    monkeypatch.undo()
    rows, room = 4096, 2**24
    tensors = [torch.randn(rows, 8, requires_grad=True) for _ in range(3)]
    ids = [torch.arange(rows) % k for k in (7, 8, 9)]
    exclude = {
        "same": fastqt.Same(ids[0]),
        "same twice": [fastqt.Same(x) for x in ids],
        "within": fastqt.Within(ids[1]),
        "of negatives": [
            fastqt.Within(ids[0], negative_ids=ids[0]),
            fastqt.Same(ids[2], negative_ids=ids[1]),
        ],
    }[name]

    def step() -> None:
        negatives = tensors[2] if name == "of negatives" else None
        found = loss(*tensors[:2], negatives=negatives, exclude=exclude, memory=room, backend=backend)
        torch.autograd.grad(found.sum(), tensors[: 2 if negatives is None else 3])

    step()
    with Live(*tensors, *ids) as live:
        step()
    # Gradients and their sums, candidates with the negatives, ids of each filter, what is found of each row.
    columns = rows * (3 * 8 * 4 * 5 + 4 * 3 * 8 + 64)
    assert live.most < room + columns
