"""What leaves a logsumexp by each filter and by several at once, beside all scores in float64 and torch.

Those of softmaxes and sigmoids are among the problems of test_random_problems.py.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import fastqt
from fastqt.engines import filtered
from tests.shared.filters import OF_IDS
from tests.shared.ring_memory import Live
from tests.shared.tolerances import FOR_DTYPE, relative

N, K, D, E = 13, 5, 6, 4
BACKENDS = ("cpu", "torch", "reference")
by_backend = pytest.mark.parametrize("backend", BACKENDS)


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


def leaves_of(M: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    rows = {
        "queries": drawn(N, D, seed=1),
        "candidates": drawn(M, D, seed=2),
        "negatives": drawn(K, D, seed=3),
    }
    rows["scale"] = torch.tensor(0.7, dtype=torch.float64)
    return {name: x.to(dtype).requires_grad_() for name, x in rows.items()}


class Made(NamedTuple):
    """Filters, and whether cells of the M candidates (N, M) and of the negatives (N, K) leave by them."""

    filters: list[Any]
    cells: Tensor
    of_negatives: Tensor

    def __or__(self, other: "Made") -> "Made":
        filters = [*self.filters, *other.filters]
        return Made(filters, self.cells | other.cells, self.of_negatives | other.of_negatives)


NOTHING = torch.zeros(N, K, dtype=torch.bool)


def of_ids(M: int, kind: type = fastqt.Same, seed: int = 10, *, of_negatives: bool = False) -> Made:
    own, columns = integers(N, seed), integers(M, seed + 1)
    others, beside, leave = None, NOTHING, OF_IDS[kind]
    if of_negatives:
        others = integers(K, seed + 2)
        beside = leave(own[:, None], others)
    return Made([kind(own, columns, others)], leave(own[:, None], columns), beside)


def within(M: int) -> Made:
    return of_ids(M, fastqt.Within, 20, of_negatives=True)


def mask(M: int) -> Made:
    cells = drawn(N, M, seed=30) > 1
    return Made([cells], cells, NOTHING)


def guide(M: int) -> Made:
    """Its thresholds are given, since there are not always as many candidates as queries."""
    given = {"queries": N, "candidates": M, "negatives": K}
    x = {name: drawn(n, E, seed=40 + n) for name, n in given.items()}
    thresholds = drawn(N, seed=43) / 4 + 0.5
    queries, *columns = (normalize(each, dim=1) for each in x.values())
    cells = [queries @ c.T > thresholds[:, None] for c in columns]
    return Made([fastqt.Guide(**x, thresholds=thresholds)], *cells)


def above(M: int) -> Made:
    x = leaves_of(M)
    S = (x["queries"] @ torch.cat([x["candidates"], x["negatives"]]).T).detach()
    thresholds = S.median(1).values + 0.01
    leave = thresholds[:, None] < S
    return Made([fastqt.Above(thresholds)], leave[:, :M], leave[:, M:])


def without_above(name: str, M: int) -> Tensor:
    """Which cells leave by what is there beside thresholds, (N, M + K)."""
    others = {"above": [], "guide and above": [guide(M)], "all": [of_ids(M), within(M), mask(M), guide(M)]}
    found = torch.zeros(N, M + K, dtype=torch.bool)
    for made in others.get(name, [FILTERS[name](M)]):
        found[:, :M] |= made.cells
    return found


FILTERS: dict[str, Callable[[int], Made]] = {
    **{kind.__name__: partial(of_ids, kind=kind) for kind in OF_IDS},
    **{f"{kind.__name__} of negatives": partial(of_ids, kind=kind, of_negatives=True) for kind in OF_IDS},
    "same twice": lambda M: of_ids(M) | of_ids(M, seed=13),
    "same twice, once of negatives": lambda M: of_ids(M, of_negatives=True) | of_ids(M, seed=13),
    "same within": lambda M: of_ids(M, of_negatives=True) | within(M),
    "mask": mask,
    "guide": guide,
    "above": above,
    "guide and above": lambda M: guide(M) | above(M),
    "all": lambda M: of_ids(M, of_negatives=True) | within(M) | mask(M) | above(M) | guide(M),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@by_backend
@pytest.mark.parametrize("diagonal", ["zero", "exclude", "keep"])
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("M", [N, 17, 9])
@pytest.mark.thinned(7)
def test_values_and_gradients_are_those_of_whole_scores(M, name, diagonal, backend, dtype):
    made, leaves, exact = FILTERS[name](M), leaves_of(M, dtype), leaves_of(M)
    S = exact["scale"] * (exact["queries"] @ torch.cat([exact["candidates"], exact["negatives"]]).T)
    own = torch.eye(*S.shape, dtype=torch.bool) & (torch.arange(M + K) < M)
    out = torch.cat([made.cells, made.of_negatives], 1)
    assert out.any()
    if diagonal == "zero":  # which no similarity takes out
        S = S.masked_fill(own, 0)
        out = out & ~(own & ~without_above(name, M))
    if diagonal == "exclude":
        out = out | own
    wanted = S.masked_fill(out, -torch.inf).logsumexp(1)
    found = fastqt.log_sum_exp(**leaves, exclude=made.filters, diagonal=diagonal, backend=backend)
    assert found.dtype is dtype
    assert torch.equal(found.isneginf(), wanted.isneginf())

    finite, weights = wanted.isfinite(), torch.linspace(-1, 2, N, dtype=torch.float64)
    assert relative(found[finite], wanted[finite]) < FOR_DTYPE[dtype]
    gradients = torch.autograd.grad(found, list(leaves.values()), weights.to(dtype))
    truths = torch.autograd.grad(wanted[finite], list(exact.values()), weights[finite], retain_graph=True)
    # That of the scale is one number, to which rows of either sign add.
    (size,) = torch.autograd.grad(wanted[finite], exact["scale"], weights[finite].abs())
    for what, gradient, truth in zip(leaves, gradients, truths, strict=True):
        least = size.abs().item() if what == "scale" else 0.0
        assert (gradient - truth).abs().max() < FOR_DTYPE[dtype] * max(truth.abs().max(), least), what


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
    leaves = leaves_of(N)
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
    leaves = leaves_of(N)
    exclude = fastqt.Within(ALONE % 3, ALONE % 2, torch.full((K,), 9))
    rows = fastqt.log_sum_exp(**leaves, exclude=exclude, backend=backend)
    assert rows.isneginf().tolist() == (ALONE % 3 == 2).tolist()
    gradients = torch.autograd.grad(rows[2::3].sum(), list(leaves.values()))
    assert not any(gradient.any() for gradient in gradients)


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


INDICES = (torch.arange(N) + 1) % N
NEXT = INDICES[:, None] == torch.arange(N)


def test_the_order_of_filters_is_no_matter():
    made, inputs = FILTERS["all"](N), leaves_of(N)
    made.filters[2] = made.filters[2] & ~NEXT
    found = {
        fastqt.contrastive_loss(**inputs, targets=INDICES, exclude=filters).item()
        for filters in (made.filters, made.filters[::-1], tuple(made.filters))
    }
    assert len(found) == 1


def test_nothing_is_excluded_by_nothing():
    x, y = drawn(2, N, D, seed=0)
    assert torch.equal(fastqt.contrastive_loss(x, y, exclude=[]), fastqt.contrastive_loss(x, y))
    none = torch.zeros(N, N, dtype=torch.bool)
    assert relative(fastqt.contrastive_loss(x, y, exclude=none), fastqt.contrastive_loss(x, y)) < 1e-13


@pytest.mark.parametrize("name", ["Same", "mask", "above"])
@pytest.mark.thinned(3)
def test_what_engines_know_is_one_graph(name):
    torch._dynamo.reset()
    leaves, filters = leaves_of(N), FILTERS[name](N).filters

    def loss(queries: Tensor) -> Tensor:
        return fastqt.log_sum_exp(**leaves | {"queries": queries}, exclude=filters).exp().sum()

    found = torch.compile(loss, fullgraph=True, backend="aot_eager")(leaves["queries"])
    assert relative(found, loss(leaves["queries"])) < FOR_DTYPE[torch.float64]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by dynamo
@pytest.mark.parametrize("name", ["same twice", "Within of negatives", "all"])
@pytest.mark.thinned(3)
def test_what_they_do_not_know_breaks_the_graph_and_not_the_loss(name):
    torch._dynamo.reset()
    leaves, filters = leaves_of(N), FILTERS[name](N).filters

    def loss(queries: Tensor) -> Tensor:
        return fastqt.log_sum_exp(**leaves | {"queries": queries}, exclude=filters).exp().sum()

    x = leaves["queries"]
    found, wanted = torch.compile(loss, backend="aot_eager")(x), loss(x)
    assert relative(found, wanted) < FOR_DTYPE[torch.float64]
    assert relative(*(torch.autograd.grad(each, x)[0] for each in (found, wanted))) < FOR_DTYPE[torch.float64]


@pytest.mark.parametrize("name", ["same twice", "Within", "all"])
def test_under_the_transforms_of_torch_func(name):
    x, filters = {key: leaf.detach() for key, leaf in leaves_of(N).items()}, FILTERS[name](N).filters

    def loss(queries: Tensor) -> Tensor:
        return fastqt.log_sum_exp(**x | {"queries": queries}, exclude=filters).exp().sum()

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
