"""SupCon's and NT-Xent's losses equal their definitions, in value and gradients, whatever the labels."""

import contextlib
import math
from unittest import mock

import pytest
import torch

import fastqt
from fastqt.losses import positives
from tests.shared.loss_views import by_backend
from tests.shared.tolerances import FLOAT32, FLOAT64, relative

LOSSES = {"supcon": fastqt.supcon_loss, "ntxent": fastqt.ntxent_loss}
# Odds of converged rows are exponentials of differences of scores near 50, whose last digits they inherit.
CONVERGED = 1e-10
by_loss = pytest.mark.parametrize("loss", LOSSES)

N = 24
LABELS = {
    "pairs": [i // 2 for i in range(N)],
    "shuffled": [(7 * i) % 5 - 2 for i in range(N)],
    "one each": list(range(N)),
    "all equal": [3] * N,
    "two halves": [i % 2 for i in range(N)],
    "of all sizes": [0] * 12 + [1] * 6 + [2] * 3 + [3] * 2 + [4],
    "some alone": [i if i % 3 else -1 for i in range(N)],
}


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def converged(labels: torch.Tensor, noise: float, D: int = 40) -> torch.Tensor:
    """Rows that are nearly equal where their labels are, and nearly orthogonal otherwise."""
    _, classes = labels.unique(return_inverse=True)
    return torch.eye(D, dtype=torch.float64)[classes] + noise * drawn(len(labels), D, seed=1)


def by_definition(loss, scores, same, candidates):
    """The losses of rows from all cells, and what the mean divides their sum by.

    Each positive competes with its rivals, but not with itself, which would hide small odds.
    """
    leads = scores[:, None] - scores[:, :, None]  # of a rival, the last index, over a positive
    rivals = (candidates if loss == "supcon" else candidates & ~same)[:, None].expand_as(leads)
    if loss == "supcon":
        rivals = rivals & ~torch.eye(len(scores.T), dtype=torch.bool)
    lead = leads.masked_fill(~rivals, -1e300).logsumexp(2)  # not -inf, which has no derivative
    positives = same & candidates
    rows = torch.logaddexp(torch.zeros_like(lead), lead).masked_fill(~positives, 0).sum(1)
    if loss == "supcon":
        return rows / positives.sum(1).clamp(min=1), positives.any(1).sum().clamp(min=1)
    return rows, positives.sum().clamp(min=1)


def check(
    loss, x, labels, y=None, candidate_labels=None, *, tolerance=FLOAT64, scale=7.0, least=1e-11, **options
):
    """Compares a loss, its rows and all gradients with those of the definition in float64.

    Gradients of at most `least` are 0 but for rounding, as of all rows of one column at norm 1.
    """
    inputs = [x.clone().requires_grad_(), torch.tensor(scale, dtype=torch.float64, requires_grad=True)]
    given, candidates = {}, ~torch.eye(len(x), dtype=torch.bool)
    if y is not None:
        inputs.append(y.clone().requires_grad_())
        given = {"candidates": inputs[2], "candidate_labels": candidate_labels}
        candidates = torch.ones(len(x), len(y), dtype=torch.bool)
    exact = [z.detach().double().requires_grad_() for z in inputs]
    sides = exact[0], exact[-1] if y is not None else exact[0]
    if options.get("normalize", True):
        sides = [z / z.norm(dim=1, keepdim=True) for z in sides]
    same = labels[:, None] == (labels if y is None else candidate_labels)
    of_rows, terms = by_definition(loss, exact[1] * sides[0] @ sides[1].T, same, candidates)
    upstream = torch.linspace(0.5, 1.5, len(x), dtype=torch.float64)
    for reduction, truth in (("mean", of_rows.sum() / terms), ("sum", of_rows.sum()), ("none", of_rows)):
        value = LOSSES[loss](inputs[0], labels, scale=inputs[1], reduction=reduction, **given, **options)
        assert relative(value, truth) < tolerance
        weights = upstream if reduction == "none" else torch.ones(()).double()
        found = torch.autograd.grad(value, inputs, weights.to(value.dtype))
        wanted = torch.autograd.grad(truth, exact, weights, retain_graph=True)
        for a, b in zip(found, wanted, strict=True):
            close = relative(a, b) < tolerance or max(a.abs().max(), b.abs().max()) < least
            assert close, (reduction, a, b)


@by_backend
@by_loss
@pytest.mark.parametrize("labels", LABELS)
def test_is_the_definition(loss, labels, backend):
    check(loss, drawn(N, 6), torch.tensor(LABELS[labels]), backend=backend)
    check(loss, drawn(N, 6) / 3, torch.tensor(LABELS[labels]), backend=backend, normalize=False)


@by_loss
@pytest.mark.parametrize("pair_bytes", [64, 2**60])
def test_rows_given_as_candidates_are_their_own_positives(loss, pair_bytes):
    x, labels = drawn(N, 6), torch.tensor(LABELS["of all sizes"])
    with mock.patch.object(positives, "PAIR_BYTES", pair_bytes):
        same = LOSSES[loss](x, labels, candidates=x, candidate_labels=labels)
        assert same == LOSSES[loss](x, labels, candidates=x.clone(), candidate_labels=labels)
        assert same != LOSSES[loss](x, labels)


# How the positives are found: by the list of pairs where that is short, or in blocks of this size.
WAYS = {
    "as usual": {},
    "blocks": {"PAIR_BYTES": 2**60},
    "blocks of 3 rows and 4 columns": {"PAIR_BYTES": 2**60, "CELL_BYTES": 2**21 // 3, "LEAST_ROWS": 3},
    "blocks of a row": {"PAIR_BYTES": 2**60, "LEAST_ROWS": 1, "ROWS_SHARE": 2**30, "CELL_BYTES": 2**20},
}
by_way = pytest.mark.parametrize(
    "way", ["as usual", pytest.param("blocks", marks=pytest.mark.slow), *list(WAYS)[2:]]
)


def found_by(way: str):
    return mock.patch.multiple(positives, **WAYS[way]) if WAYS[way] else contextlib.nullcontext()


def test_the_ways_are_what_they_are_called():
    labels = torch.tensor(LABELS["two halves"])
    sizes = {}
    for way in WAYS:
        with found_by(way):
            found = positives.find_positives(labels, labels, torch.arange(N), False, 2**24)
            blocks, listed = positives.blocks_of(found, 6, 8), found.may_be_listed(False)
        tiles = [(b - a, d - c) for (a, b), columns in blocks for c, d in columns]
        sizes[way] = listed, max(tiles)
    assert [listed for listed, _ in sizes.values()] == [True, False, False, False]
    assert [size for _, size in sizes.values()] == [(N, N), (N, N), (3, 4), (1, 8)]


TINY = [
    *(("ntxent", labels, noise) for labels in ("pairs", "of all sizes") for noise in (0.003, 0.05)),
    # Several positives compete with each other, however well they are learnt.
    *(("supcon", "pairs", 0.003), ("supcon", "of all sizes", 0.05), ("supcon", "some alone", 0.05)),
]


@by_way
@pytest.mark.parametrize(("loss", "labels", "noise"), TINY)
def test_converged_rows_keep_their_digits(loss, labels, noise, way):
    """Positives have a probability of 0.9998."""
    given = torch.tensor(LABELS[labels])
    with found_by(way):
        check(loss, converged(given, noise), given, scale=12.0, memory=2**24, tolerance=CONVERGED, least=0)


@pytest.mark.parametrize("way", list(WAYS)[1:])
@pytest.mark.parametrize(("loss", "labels", "noise"), TINY)
def test_blocks_keep_them_where_a_probability_rounds_to_1(loss, labels, noise, way):
    given = torch.tensor(LABELS[labels])
    with found_by(way):
        check(loss, converged(given, noise), given, scale=50.0, memory=2**24, tolerance=CONVERGED, least=0)


@by_loss
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint64])
def test_labels_of_any_integer_dtype(loss, dtype):
    labels = torch.tensor(LABELS["of all sizes"])
    x = drawn(N, 6)
    assert torch.equal(LOSSES[loss](x, labels.to(dtype)), LOSSES[loss](x, labels))


@by_loss
@pytest.mark.parametrize("way", ["as usual", "blocks"])
def test_nan_reaches_the_rows_that_see_it(loss, way):
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    x = drawn(6, 4)
    x[4, 0] = math.nan
    with found_by(way):
        assert LOSSES[loss](x, labels, reduction="none").isnan().all()
        alone = LOSSES[loss](x, torch.tensor([0, 0, 0, 0, 0, 0]), reduction="none").isnan()
        assert alone.tolist() == [True] * 6


@by_loss
@pytest.mark.parametrize("way", WAYS)
def test_random_problems(loss, way):
    generator = torch.Generator().manual_seed(list(WAYS).index(way))
    number = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
    for seed in range(8):
        rows, D, classes = number(1, 40), number(1, 9), number(1, 20)
        x = drawn(rows, D, seed=seed) * number(1, 4)
        labels = torch.randint(-classes, classes, (rows,), generator=generator)
        options = {"normalize": bool(number(0, 2)), "scale": float(number(1, 9))}
        memory = ("fast", "low", 2**24)[number(0, 3)]
        others, M = {}, number(1, 60)
        if number(0, 2):
            of_others = torch.randint(-classes, classes, (M,), generator=generator)
            others = {"y": drawn(M, D, seed=99), "candidate_labels": of_others}
        with found_by(way):
            check(loss, x, labels, **others, **options, memory=memory, tolerance=1e-11)


def test_autocast_leaves_the_products_of_blocks_in_float32():
    x, labels = drawn(N, 16).bfloat16().float(), torch.zeros(N).long()
    with found_by("blocks"):
        wanted = fastqt.supcon_loss(x, labels, normalize=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = fastqt.supcon_loss(x, labels, normalize=False)
    assert relative(found, wanted) < FLOAT32


X, Y = torch.randn(6, 4), torch.zeros(6).long()
REFUSED = {
    "count": ((X, Y[:5]), {}, ValueError, "labels: want one for each of the 6 embeddings, got 5"),
    "floats": ((X, Y.float()), {}, TypeError, "labels: want an integer dtype, got torch.float32"),
    "matrix": ((X, Y[:, None]), {}, ValueError, "labels: want a 1-D tensor of integers"),
    "unlabelled": ((X, Y), {"candidates": X}, ValueError, "candidate_labels: want it together with the"),
    "no candidates": ((X, Y), {"candidate_labels": Y}, ValueError, "candidates: want it together"),
    "few": ((X, Y), {"candidates": X, "candidate_labels": Y[1:]}, ValueError, "candidate_labels: want one"),
    "width": ((X, Y), {"candidates": X[:, 1:], "candidate_labels": Y}, ValueError, "candidates: want D=4"),
}


@by_loss
@pytest.mark.parametrize("name", REFUSED)
def test_refuses(loss, name):
    inputs, options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        LOSSES[loss](*inputs, **options)
