"""What leaves the losses of pairs by ids and by a margin, beside whole scores: every kind of filter by ids.

The general losses are tested in tests/functional/test_exclude.py.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastqt
from tests.shared.filters import OF_IDS as KINDS
from tests.shared.loss_views import by_backend, check
from tests.shared.pair_oracle import (
    DIRECTIONS,
    HARDNESS,
    Ids,
    Plain,
    cosines,
    left,
    ranked,
    settings,
    softmax,
)
from tests.shared.tolerances import FLOAT64

N, D = 9, 5
SCALE = 7.0
NOTHING = Plain()
PAIRS = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 5])  # one id a pair
OF_QUERIES, OF_DOCUMENTS = (
    torch.tensor([0, 0, 1, 1, 2, 3, 4, 5, 6]),
    torch.tensor([1, 2, 1, 3, 4, 4, 0, 6, 5]),
)
PARTS = torch.arange(N) // 5
SAME, WITHIN = Ids(fastqt.Same, OF_QUERIES, OF_DOCUMENTS), Ids(fastqt.Within, PARTS)
OF_IDS = {
    **{f"{kind.__name__} of pairs": Plain((Ids(kind, PARTS * 2 + torch.arange(N) % 2),)) for kind in KINDS},
    **{f"{kind.__name__} of two ids": Plain((Ids(kind, PARTS, torch.arange(N) % 2),)) for kind in KINDS},
    "same twice": Plain((Ids(fastqt.Same, PAIRS), SAME)),
    "same and within": Plain((SAME, WITHIN)),
}
SPARING = fastqt.Margin(-0.35, spare_own_negatives=True)
WITH_MARGINS = {
    "margin": Plain(margin=fastqt.Margin(-0.35)),
    "margin that spares": Plain(margin=SPARING),
    "same and margin": Plain((SAME,), fastqt.Margin(-0.3, "relative")),
    "all": Plain((Ids(fastqt.Same, PAIRS), WITHIN), SPARING),
}
ALL = {**OF_IDS, **WITH_MARGINS}
by_converged = pytest.mark.parametrize("converged", [False, True])
of_ids = pytest.mark.parametrize("plain", OF_IDS.values(), ids=OF_IDS)
of_all = pytest.mark.parametrize("plain", ALL.values(), ids=ALL)
EYE = torch.eye(N, dtype=torch.bool)


def rows(converged: bool, sets: int = 0) -> list[Tensor]:
    """Two views of N sentences and some sets of hard negatives; once converged the views are nearly equal."""
    generator = torch.Generator().manual_seed(1)
    first, second, *hard = torch.randn(2 + sets, N, D, generator=generator, dtype=torch.float64)
    if converged:
        first = 3 * second + 0.01 * first
    return [x.requires_grad_() for x in (first, second, *hard)]


def both_directions(a: Tensor, b: Tensor, plain: Plain) -> Tensor:
    return ranked(a, b, (), plain, DIRECTIONS[::2], "per_direction", scale=SCALE)


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
    wanted = ranked(z1, z2, hard, plain, scale=SCALE, weight=weight)
    z3 = {0: lambda: None, 1: lambda: hard[0], 3: lambda: torch.stack(hard, 1)}[sets]()
    found = fastqt.simcse_loss(
        *(z1, z2, z3),
        scale=SCALE,
        hard_negative_weight=weight,
        exclude=plain.exclude,
        reduction="none",
        backend=backend,
    )
    check(found, wanted, inputs)


@pytest.mark.parametrize(("directions", "mode"), settings(), ids=str)
@pytest.mark.parametrize("sets", [0, 1, 2])
@of_all
@pytest.mark.thinned(5)
def test_ranking(plain, sets, directions, mode):
    for number, converged in enumerate((False, True)):
        raised = HARDNESS[(2 * sets + number) % 4]
        queries, *documents = inputs = rows(converged, sets)
        pairs = documents[0], documents[1:]
        wanted = ranked(queries, *pairs, plain, directions, mode, raised, scale=SCALE, strength=SCALE)
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
    wanted = ranked(queries, documents[0], documents[1:], plain, DIRECTIONS, scale=SCALE)
    options = {"scale": SCALE, "directions": DIRECTIONS, "reduction": "none", "backend": backend}
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
        left(SCALE * of_mixture, plain.above(of_mixture, pair) & ~torch.tensor(plain.spares)),
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
    pair, leave = C.diagonal(), torch.zeros_like(EYE)
    for x in plain.ids:
        leave |= KINDS[x.kind](x.queries[:, None], negatives)
    others = [
        left(SCALE * C, EYE, plain.between("query", "document"), plain.above(C, pair)),
        left(SCALE * of_hard, leave, plain.above(of_hard, pair)),
    ]
    exclude = [x.kind(x.queries, x.of("document"), negatives) for x in plain.ids]
    exclude += plain._replace(ids=()).exclude
    options = {"negatives": hard, "scale": SCALE, "exclude": exclude, "reduction": "none"}
    found = fastqt.info_nce_loss(queries, candidates, **options)
    check(found, softmax(SCALE * pair, others), inputs, 4 * FLOAT64)
