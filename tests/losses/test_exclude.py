"""What leaves the losses of pairs by ids, by parts of a batch and by a margin, beside whole scores.

The oracle has all scores of each direction at once in float64, and shares no code with fastqt. The general
losses are tested in tests/functional/test_exclude.py.
"""

import math
from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastqt
from tests.shared.loss_views import by_backend, check
from tests.shared.tolerances import FLOAT64

N, D, K = 9, 5, 2
SCALE = 7.0
# No score of a loss is as small, so that its exponential is 0 beside any other, and its gradient too.
LEAST = -1e4
Ids = tuple[Tensor, Tensor | None]


class Plain(NamedTuple):
    """What leaves a loss: ids of queries and, if these differ, of documents; and a margin."""

    same: tuple[Ids, ...] = ()
    within: tuple[Ids, ...] = ()
    margin: tuple[float, str] | None = None

    @property
    def exclude(self) -> list[object]:
        filters: list[object] = [fastqt.Same(*x) for x in self.same]
        filters += [fastqt.Within(*x) for x in self.within]
        return filters + ([] if self.margin is None else [fastqt.Margin(*self.margin)])

    def between(self, rows: str, columns: str) -> Tensor:
        """Which cells of two sides leave by their ids, (N, N)."""
        leave = torch.zeros(N, N, dtype=torch.bool)
        for ids in self.same:
            leave |= of_side(ids, rows)[:, None] == of_side(ids, columns)
        for ids in self.within:
            leave |= of_side(ids, rows)[:, None] != of_side(ids, columns)
        return leave

    def of_hard_negatives(self, rows: str) -> Tensor:
        """The same of hard negatives, which are in the parts of their queries and have no ids."""
        return Plain(within=tuple((of_side(x, rows), x[0]) for x in self.within)).between("query", "document")

    def above(self, similar: Tensor, positive: Tensor) -> Tensor:
        """Which cells are too similar for a pair's own similarity, (N, M)."""
        if self.margin is None:
            return torch.zeros_like(similar, dtype=torch.bool)
        margin, strategy = self.margin
        most = positive + margin * (positive.abs() if strategy == "relative" else 1)
        return similar > most[:, None]


def of_side(ids: Ids, side: str) -> Tensor:
    queries, documents = ids
    return queries if side == "query" or documents is None else documents


NOTHING = Plain()
PAIRS = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 5])  # one id a pair
OF_QUERIES, OF_DOCUMENTS = (
    torch.tensor([0, 0, 1, 1, 2, 3, 4, 5, 6]),
    torch.tensor([1, 2, 1, 3, 4, 4, 0, 6, 5]),
)
PARTS, OTHER_PARTS = torch.arange(N) // 5, torch.arange(N) % 2
OF_IDS = {
    "same of pairs": Plain(same=((PAIRS, None),)),
    "same of two ids": Plain(same=((OF_QUERIES, OF_DOCUMENTS),)),
    "same twice": Plain(same=((PAIRS, None), (OF_QUERIES, OF_DOCUMENTS))),
    "within": Plain(within=((PARTS, None),)),
    "within of two ids": Plain(within=((PARTS, OTHER_PARTS),)),
    "same and within": Plain(same=((OF_QUERIES, OF_DOCUMENTS),), within=((PARTS, None),)),
}
WITH_MARGINS = {
    "margin": Plain(margin=(-0.35, "absolute")),
    "same and margin": Plain(same=((OF_QUERIES, OF_DOCUMENTS),), margin=(-0.3, "relative")),
    "all": Plain(((PAIRS, None),), ((PARTS, None),), (-0.35, "absolute")),
}
ALL = {**OF_IDS, **WITH_MARGINS}
by_converged = pytest.mark.parametrize("converged", [False, True])
of_ids = pytest.mark.parametrize("plain", OF_IDS.values(), ids=OF_IDS)
of_all = pytest.mark.parametrize("plain", ALL.values(), ids=ALL)


def rows(converged: bool, sets: int = 0) -> list[Tensor]:
    """Two views of N sentences and some sets of hard negatives; once converged the views are nearly equal."""
    generator = torch.Generator().manual_seed(1)
    first, second, *hard = torch.randn(2 + sets, N, D, generator=generator, dtype=torch.float64)
    if converged:
        first = 3 * second + 0.01 * first
    return [x.requires_grad_() for x in (first, second, *hard)]


def cosines(a: Tensor, b: Tensor) -> Tensor:
    return F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T


def softmax(positive: Tensor, others: list[Tensor], copies: int = 1) -> Tensor:
    """The cross-entropy of a positive that is there several times, without what nearly cancels."""
    least = torch.full((N, 1), LEAST, dtype=torch.float64)
    lead = torch.cat([least, *others], 1).logsumexp(1) - positive - math.log(copies)
    return math.log(copies) - F.logsigmoid(-lead)


def left(scores: Tensor, *leave: Tensor) -> Tensor:
    for each in leave:
        scores = scores.masked_fill(each, -math.inf)
    return scores


EYE = torch.eye(N, dtype=torch.bool)


def one_direction(
    a: Tensor, b: Tensor, plain: Plain, rows: str, columns: str, hard: list[Tensor] = ()
) -> Tensor:
    """The loss of each row of a, whose positives are those of b."""
    C = cosines(a, b)
    pair = C.diagonal()
    others = [left(SCALE * C, EYE, plain.between(rows, columns), plain.above(C, pair))]
    for x in hard:
        C = cosines(a, x)
        others.append(left(SCALE * C, plain.of_hard_negatives(rows), plain.above(C, pair)))
    return softmax(SCALE * pair, others)


def both_directions(a: Tensor, b: Tensor, plain: Plain) -> Tensor:
    there = one_direction(a, b, plain, "query", "document")
    return (there + one_direction(b, a, plain, "document", "query")) / 2


@by_backend
@by_converged
@of_all
def test_clip(plain, converged, backend):
    a, b = rows(converged)
    wanted = both_directions(a, b, plain)
    assert (wanted < both_directions(a, b, NOTHING)).any()
    options = {"scale": SCALE, "reduction": "none", "backend": backend}
    check(fastqt.clip_loss(a, b, exclude=plain.exclude, **options), wanted, [a, b])


def test_clip_of_cells():
    """A bool tensor is of the first rows with the second, and turned the other way."""
    a, b = rows(False)
    cells = torch.rand(N, N, generator=torch.Generator().manual_seed(2)) < 0.3
    of_both = []
    for C, leave in ((cosines(a, b), cells), (cosines(b, a), cells.T)):
        of_both.append(softmax(SCALE * C.diagonal(), [left(SCALE * C, EYE, leave)]))
    found = fastqt.clip_loss(a, b, scale=SCALE, exclude=cells & ~EYE, reduction="none")
    check(found, sum(of_both) / 2, [a, b])


@by_backend
@by_converged
@of_all
@pytest.mark.thinned(5)
def test_siglip(plain, converged, backend):
    a, b = rows(converged)
    C, bias = cosines(a, b), -2.0
    leave = (plain.between("query", "document") | plain.above(C, C.diagonal())) & ~EYE
    assert leave.any()
    signs = 2.0 * EYE - 1
    wanted = -F.logsigmoid(signs * (SCALE * C + bias)).masked_fill(leave, 0).sum(1)
    options = {"scale": SCALE, "bias": bias, "reduction": "none", "backend": backend}
    check(fastqt.siglip_loss(a, b, exclude=plain.exclude, **options), wanted, [a, b])


@by_backend
@by_converged
@pytest.mark.parametrize("weight", [0.0, 1.5])
@pytest.mark.parametrize("sets", [0, 1, 3])
@of_all
@pytest.mark.pairwise
def test_simcse(plain, sets, weight, converged, backend):
    """Hard negatives are of their sentence's part; a margin compares them without their weight."""
    if not sets and weight:
        pytest.skip("a weight is of hard negatives")
    z1, z2, *hard = inputs = rows(converged, sets)
    C = cosines(z1, z2)
    pair = C.diagonal()
    others = [left(SCALE * C, EYE, plain.between("query", "document"), plain.above(C, pair))]
    for z in hard:
        C = cosines(z1, z)
        leave = (plain.of_hard_negatives("query"), plain.above(C, pair))
        others.append(left(SCALE * C + weight * EYE, *leave))
    z3 = {0: lambda: None, 1: lambda: hard[0], 3: lambda: torch.stack(hard, 1)}[sets]()
    found = fastqt.simcse_loss(
        *(z1, z2, z3),
        scale=SCALE,
        hard_negative_weight=weight,
        exclude=plain.exclude,
        reduction="none",
        backend=backend,
    )
    check(found, softmax(SCALE * pair, others), inputs)


DIRECTIONS = ("query_to_query", "doc_to_query", "doc_to_doc")
SETTINGS = [
    (("query_to_doc", *more), "joint")
    for more in (
        (x for x, is_in in zip(DIRECTIONS, bits, strict=True) if is_in) for bits in product((0, 1), repeat=3)
    )
] + [(("query_to_doc",), "per_direction"), (("query_to_doc", "doc_to_query"), "per_direction")]


def ranked(
    q: Tensor, d: Tensor, hard: list[Tensor], plain: Plain, directions: tuple, mode: str, raised: str | None
) -> Tensor:
    """Multiple negatives ranking; `raised` are the scores with documents that have twice their size."""
    similar = cosines(q, d)
    pair = similar.diagonal()

    def cells(a: Tensor, b: Tensor, stay: Tensor, *leave: Tensor, more: Tensor | bool = False) -> Tensor:
        C = cosines(a, b)
        scores = SCALE * C + torch.where(torch.as_tensor(more), SCALE * C.detach(), 0.0)
        return left(scores, ~stay, *leave, plain.above(C, pair))

    everything = torch.ones_like(EYE)
    in_batch = ~EYE & (raised in ("in_batch_negatives", "all_negatives"))
    of_own = EYE & (raised in ("hard_negatives", "all_negatives"))
    blocks = {"query_to_doc": [cells(q, d, ~EYE, plain.between("query", "document"), more=in_batch)]}
    for x in hard:
        leave = plain.of_hard_negatives("query")
        blocks["query_to_doc"].append(cells(q, x, everything, leave, more=in_batch | of_own))
    blocks["query_to_query"] = [cells(q, q, ~EYE, plain.between("query", "query"))]
    blocks["doc_to_query"] = [cells(d, q, ~EYE, plain.between("document", "query"))]
    blocks["doc_to_doc"] = [cells(d, d, ~EYE, plain.between("document", "document"))]
    blocks["doc_to_doc"] += [cells(d, x, ~EYE, plain.of_hard_negatives("document")) for x in hard]
    if mode == "per_direction":
        return torch.stack([softmax(SCALE * pair, blocks[name]) for name in directions]).mean(0)
    copies = 2 if "doc_to_query" in directions else 1
    return softmax(SCALE * pair, [x for name in directions for x in blocks[name]], copies)


@pytest.mark.parametrize(("directions", "mode"), SETTINGS, ids=[f"{len(x)}{x[1:]}-{y}" for x, y in SETTINGS])
@pytest.mark.parametrize("sets", [0, 1, 2])
@of_all
@pytest.mark.thinned(5)
def test_ranking(plain, sets, directions, mode):
    for number, converged in enumerate((False, True)):
        raised = (None, "in_batch_negatives", "hard_negatives", "all_negatives")[(2 * sets + number) % 4]
        queries, *documents = inputs = rows(converged, sets)
        wanted = ranked(queries, documents[0], documents[1:], plain, directions, mode, raised)
        found = fastqt.multiple_negatives_ranking_loss(
            *(queries, documents),
            scale=SCALE,
            directions=directions,
            partition_mode=mode,
            hardness_mode=raised,
            hardness_strength=0.0 if raised is None else SCALE,
            exclude=plain.exclude,
            reduction="none",
        )
        check(found, wanted, inputs)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@of_all
def test_ranking_of_other_engines(plain, backend):
    queries, *documents = inputs = rows(False, 1)
    directions = ("query_to_doc", *DIRECTIONS)
    wanted = ranked(queries, documents[0], documents[1:], plain, directions, "joint", None)
    options = {"scale": SCALE, "directions": directions, "reduction": "none", "backend": backend}
    found = fastqt.multiple_negatives_ranking_loss(queries, documents, exclude=plain.exclude, **options)
    check(found, wanted, inputs)


def of_two_views(z1: Tensor, z2: Tensor, plain: Plain) -> list[tuple[Tensor, Tensor]]:
    """Of either view the score of the pair (N,), and the negatives (N, 2 N), -inf where there is none."""
    found = []
    for own, other, sides in ((z1, z2, ("query", "document")), (z2, z1, ("document", "query"))):
        across = left(SCALE * cosines(own, other), EYE, plain.between(*sides))
        within = left(SCALE * cosines(own, own), EYE, plain.between(sides[0], sides[0]))
        found.append((SCALE * cosines(own, other).diagonal(), torch.cat([across, within], 1)))
    return found


@by_backend
@by_converged
@of_ids
@pytest.mark.thinned(5)
def test_dcl(plain, converged, backend):
    z1, z2 = rows(converged)
    wanted, without = (
        sum(others.logsumexp(1) - positive for positive, others in of_two_views(z1, z2, each)) / 2
        for each in (plain, NOTHING)
    )
    assert (wanted < without).any()
    options = {"scale": SCALE, "reduction": "none", "backend": backend}
    check(fastqt.dcl_loss(z1, z2, exclude=plain.exclude, **options), wanted, [z1, z2])


@by_backend
@by_converged
@pytest.mark.parametrize(("beta", "tau_plus"), [(1.0, 0.1), (0.0, 0.05), (0.7, 0.0)])
@of_ids
@pytest.mark.pairwise
@pytest.mark.thinned(5)
def test_hcl(plain, beta, tau_plus, converged, backend):
    """The number of negatives is that of those which are left."""
    z1, z2 = rows(converged)
    wanted = 0
    for positive, others in of_two_views(z1, z2, plain):
        count = others.isfinite().double().sum(1)
        assert count.min() > 0
        assert count.min() < 2 * N - 2
        weights = count[:, None] * torch.where(others.isfinite(), beta * others, -math.inf).softmax(1)
        R = (weights * others.exp()).sum(1)
        G = (R - tau_plus * count * positive.exp()) / (1 - tau_plus)
        G = torch.maximum(G, count * math.exp(-SCALE))
        wanted = wanted + torch.log1p(G / positive.exp()) / 2
    options = {"scale": SCALE, "beta": beta, "tau_plus": tau_plus, "reduction": "none", "backend": backend}
    check(fastqt.hcl_loss(z1, z2, exclude=plain.exclude, **options), wanted, [z1, z2])


def test_two_views_whose_sentences_are_all_the_same():
    """No negative is left: DCL's loss is minus infinity, HCL's is that of a softmax of the pair alone."""
    z1, z2 = rows(False)
    one = fastqt.Same(torch.zeros(N, dtype=torch.int64))
    assert (fastqt.dcl_loss(z1, z2, exclude=one, reduction="none") == -math.inf).all()
    loss = fastqt.hcl_loss(z1, z2, exclude=one, reduction="none")
    assert not loss.any()
    for gradient in torch.autograd.grad(loss.sum(), [z1, z2]):
        assert not gradient.any()


@by_backend
@by_converged
@of_all
def test_mixcse(plain, converged, backend):
    """The slides' form: a mixture has no id, and leaves by a margin."""
    z1, z2 = rows(converged)
    own = F.normalize(z2, dim=1).detach()
    mixtures = F.normalize(0.3 * own + 0.7 * own.roll(-1, 0), dim=1)
    C, of_mixture = cosines(z1, z2), (F.normalize(z1, dim=1) * mixtures).sum(1, keepdim=True)
    pair = C.diagonal()
    others = [
        left(SCALE * C, EYE, plain.between("query", "document"), plain.above(C, pair)),
        left(SCALE * of_mixture, plain.above(of_mixture, pair)),
    ]
    options = {"mix": 0.3, "scale": SCALE, "reduction": "none", "backend": backend}
    found = fastqt.mixcse_loss(z1, z2, exclude=plain.exclude, **options)
    check(found, softmax(SCALE * pair, others), [z1, z2])


@by_converged
@pytest.mark.parametrize("with_cells", [False, True])
@of_ids
def test_maxsim(plain, with_cells, converged):
    """Documents beyond those of the queries have ids of their own, if candidate_ids says so."""
    generator = torch.Generator().manual_seed(3)
    queries, documents = torch.randn(2, N, 3, D, generator=generator, dtype=torch.float64)
    if converged:
        queries = 3 * documents.flip(1) + 0.01 * queries
    inputs = [queries.requires_grad_(), documents.requires_grad_()]
    q, d = (F.normalize(x, dim=2) for x in inputs)
    scores = SCALE * torch.einsum("itd,jud->ijtu", q, d).amax(3).sum(2)
    cells = torch.rand(N, N, generator=generator) < (0.2 if with_cells else 0)
    others = [left(scores, EYE, plain.between("query", "document"), cells)]
    exclude = [*plain.exclude, *([cells] if with_cells else [])]
    found = fastqt.maxsim_loss(*inputs, scale=SCALE, exclude=exclude, reduction="none")
    check(found, softmax(scores.diagonal(), others), inputs)


def test_maxsim_of_more_documents_than_queries():
    generator = torch.Generator().manual_seed(4)
    queries = torch.randn(N, 3, D, generator=generator, dtype=torch.float64, requires_grad=True)
    documents = torch.randn(2 * N, 2, D, generator=generator, dtype=torch.float64, requires_grad=True)
    of_documents = torch.arange(2 * N) % 7
    q, d = F.normalize(queries, dim=2), F.normalize(documents, dim=2)
    scores = SCALE * torch.einsum("itd,jud->ijtu", q, d).amax(3).sum(2)
    eye = torch.eye(N, 2 * N, dtype=torch.bool)
    others = left(scores, eye, PAIRS[:, None] == of_documents)
    same = fastqt.Same(PAIRS, of_documents)
    found = fastqt.maxsim_loss(queries, documents, scale=SCALE, exclude=same, reduction="none")
    check(found, softmax(scores.diagonal(), [others]), [queries, documents])


@by_converged
@of_all
def test_info_nce_of_negatives(plain, converged):
    """Hard negatives leave by ids of their own, and by the margin."""
    queries, candidates, hard = inputs = rows(converged, 1)
    negatives = torch.arange(N) % 5
    C, of_hard = cosines(queries, candidates), cosines(queries, hard)
    pair = C.diagonal()
    leave = torch.zeros_like(EYE)
    for x, _ in plain.same:
        leave |= x[:, None] == negatives
    for x, _ in plain.within:
        leave |= x[:, None] != negatives
    others = [
        left(SCALE * C, EYE, plain.between("query", "document"), plain.above(C, pair)),
        left(SCALE * of_hard, leave, plain.above(of_hard, pair)),
    ]
    exclude = [fastqt.Same(*x, negative_ids=negatives) for x in with_both(plain.same)]
    exclude += [fastqt.Within(*x, negative_ids=negatives) for x in with_both(plain.within)]
    exclude += plain._replace(same=(), within=()).exclude
    found = fastqt.info_nce_loss(
        queries, candidates, negatives=hard, scale=SCALE, exclude=exclude, reduction="none"
    )
    check(found, softmax(SCALE * pair, others), inputs, 4 * FLOAT64)


def with_both(given: tuple[Ids, ...]) -> list[tuple[Tensor, Tensor]]:
    return [(x, of_side((x, y), "document")) for x, y in given]
