"""SupCon's and NT-Xent's losses equal their definitions, in value and gradients, whatever the labels."""

import contextlib
import math
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import fastqt
from fastqt.losses import positives
from tests.shared.label_oracle import answer, mean_weights
from tests.shared.loss_views import by_backend
from tests.shared.tolerances import EAGER_FACTOR, FLOAT32, FLOAT64, HALF_ULP, UNIT_ROUNDOFF, relative

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


def check(
    loss, x, labels, y=None, candidate_labels=None, *, tolerance=FLOAT64, scale=7.0, least=1e-13, **options
):
    """Compares a loss, its rows and all gradients with the oracle's.

    Gradients of at most `least` are 0 but for rounding, as of all rows of one column at norm 1.
    """
    itself = y is None
    inputs = [x.clone().requires_grad_(), torch.tensor(scale, dtype=torch.float64, requires_grad=True)]
    given = {}
    if not itself:
        inputs.append(y.clone().requires_grad_())
        given = {"candidates": inputs[2], "candidate_labels": candidate_labels}
    y, candidate_labels = (x, labels) if itself else (y, candidate_labels)
    arrays = [
        t.double().numpy() if t.is_floating_point() else t.numpy() for t in (x, labels, y, candidate_labels)
    ]
    normalize = options.get("normalize", True)
    means = mean_weights(loss, arrays[1], arrays[3], itself)
    drawn_weights = np.linspace(0.5, 1.5, len(x))
    for reduction, weights in (("mean", means), ("sum", np.ones(len(x))), ("none", drawn_weights)):
        wanted = answer(loss, *arrays, itself, scale, normalize, weights)
        value = LOSSES[loss](inputs[0], labels, scale=inputs[1], reduction=reduction, **given, **options)
        expected = wanted.rows if reduction == "none" else (weights * wanted.rows).sum()
        assert relative(value, expected) < tolerance
        upstream = torch.from_numpy(weights).to(value.dtype) if reduction == "none" else None
        found = torch.autograd.grad(value, inputs, upstream)
        of_rows = wanted.embeddings + wanted.candidates if itself else wanted.embeddings
        for a, b in zip(found, (of_rows, np.float64(wanted.scale), wanted.candidates), strict=False):
            close = relative(a, b) < tolerance or max(a.abs().max(), np.abs(b).max()) < least
            assert close, (reduction, a, b)


@by_backend
@by_loss
@pytest.mark.parametrize("labels", LABELS)
def test_is_the_definition(loss, labels, backend):
    check(loss, drawn(N, 6), torch.tensor(LABELS[labels]), backend=backend)
    check(loss, drawn(N, 6) / 3, torch.tensor(LABELS[labels]), backend=backend, normalize=False)


@by_backend
@by_loss
@pytest.mark.parametrize("labels", LABELS)
def test_against_other_candidates_no_row_is_left_out(loss, labels, backend):
    given, others = torch.tensor(LABELS[labels]), torch.tensor(LABELS[labels] + [1, 0, -2, 99]).flip(0)
    check(loss, drawn(N, 6), given, drawn(N + 4, 6, seed=2), others, backend=backend)
    check(loss, drawn(3, 6), given[:3], drawn(N + 4, 6, seed=2), others, backend=backend)


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


@by_way
@by_loss
@pytest.mark.parametrize("labels", ["two halves", "of all sizes", "some alone"])
def test_positives_in_lists_and_in_blocks_of_any_size(loss, labels, way):
    given, others = torch.tensor(LABELS[labels]), torch.tensor(LABELS[labels] * 2)[3:]
    with found_by(way):
        check(loss, drawn(N, 6), given, memory=2**24)
        check(loss, drawn(N, 6), given, drawn(2 * N - 3, 6, seed=2), others, memory=2**24)


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


@pytest.mark.parametrize("way", ["as usual", "blocks"])
@by_loss
@pytest.mark.parametrize("noise", [0.003, 1.0])
def test_float32_is_at_least_as_accurate_as_eager(loss, noise, way):
    labels = torch.tensor(LABELS["of all sizes"])
    same = (labels[:, None] == labels) & ~torch.eye(N).bool()

    def eager(x):
        scores = 30 * F.normalize(x) @ F.normalize(x).T
        if loss == "supcon":
            shares = scores - scores.masked_fill(torch.eye(N).bool(), -math.inf).logsumexp(1, keepdim=True)
            return -((shares * same).sum(1) / same.sum(1).clamp(min=1)).sum() / same.any(1).sum()
        negatives = scores.masked_fill(labels[:, None] == labels, -math.inf).logsumexp(1, keepdim=True)
        return F.softplus(negatives - scores)[same].mean()

    errors = {"ours": [], "eager": []}
    for seed in range(20):
        x = (converged(labels, 0.0) + noise * drawn(N, 40, seed=seed)).float()
        exact = x.double().requires_grad_()
        truth = eager(exact)
        wanted = [truth.detach(), *torch.autograd.grad(truth, exact)]
        for name, function in (("ours", lambda z: LOSSES[loss](z, labels, scale=30.0)), ("eager", eager)):
            z = x.clone().requires_grad_()
            with found_by(way):
                value = function(z)
                results = [value.detach(), *torch.autograd.grad(value, z)]
            errors[name].append(
                [float((a - b).norm() / b.norm()) for a, b in zip(results, wanted, strict=True)]
            )
    a, b = (torch.tensor(x).mean(0) for x in errors.values())
    assert (a <= EAGER_FACTOR * b + HALF_ULP[torch.float32]).all(), (a, b)


@by_loss
@pytest.mark.parametrize("way", ["as usual", "blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_embeddings_are_scored_as_they_were_rounded(loss, dtype, way):
    labels = torch.tensor(LABELS["of all sizes"])
    x = drawn(N, 16).to(dtype)
    with found_by(way):
        check(loss, x, labels, tolerance={torch.float32: FLOAT32}.get(dtype, 4 * UNIT_ROUNDOFF[dtype]))
        assert LOSSES[loss](x, labels).dtype == torch.float32


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
def test_no_pair_is_a_loss_of_0_with_gradients_of_0(loss):
    x = drawn(5, 4).requires_grad_()
    value = LOSSES[loss](x, torch.arange(5))
    value.backward()
    assert value == 0
    assert not x.grad.any()


def test_all_labels_equal():
    """Without negatives SupCon is the cross-entropy among positives, and NT-Xent's pairs have no rivals."""
    x = drawn(6, 4)
    labels = torch.zeros(6).long()
    assert fastqt.ntxent_loss(x, labels) == 0
    scores = 10 * F.normalize(x) @ F.normalize(x).T
    of_others = scores[~torch.eye(6).bool()].view(6, 5)
    wanted = (of_others.logsumexp(1) - of_others.mean(1)).mean()
    assert relative(fastqt.supcon_loss(x, labels), wanted) < FLOAT64


def test_two_views_with_a_label_of_their_own_have_the_same_loss_in_both():
    x, labels = drawn(N, 6), torch.tensor(LABELS["pairs"])
    assert relative(fastqt.supcon_loss(x, labels), fastqt.ntxent_loss(x, labels)) < FLOAT64


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


@by_loss
def test_a_double_backward_needs_the_reference(loss):
    x, labels = drawn(N, 6).requires_grad_(), torch.tensor(LABELS["of all sizes"])
    for memory in ("fast", 2**24):
        with mock.patch.object(positives, "PAIR_BYTES", 2**60 if memory == "fast" else 64):
            value = LOSSES[loss](x, labels, memory=memory)
            with pytest.raises(RuntimeError, match="differentiable once"):
                torch.autograd.grad(value, x, create_graph=True)
    few, ids = drawn(5, 3).requires_grad_(), torch.tensor([0, 1, 0, 0, 2])
    assert torch.autograd.gradgradcheck(lambda x: LOSSES[loss](x, ids, backend="reference"), few)


@by_loss
@pytest.mark.parametrize("way", ["as usual", "blocks"])
def test_under_autocast_rows_are_rounded_once(loss, way):
    x, labels = drawn(N, 16).float(), torch.tensor(LABELS["of all sizes"])
    with found_by(way), torch.autocast("cpu", dtype=torch.bfloat16):
        found = LOSSES[loss](x, labels, scale=3.0)
    wanted = LOSSES[loss](x, labels, scale=3.0)
    assert found.dtype == torch.float32
    assert relative(found, wanted) < 4 * UNIT_ROUNDOFF[torch.bfloat16]


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
    "unlabelled": (
        (X, Y),
        {"candidates": X},
        ValueError,
        "candidate_labels: want it together with the other",
    ),
    "no candidates": ((X, Y), {"candidate_labels": Y}, ValueError, "candidates: want it together"),
    "few": (
        (X, Y),
        {"candidates": X, "candidate_labels": Y[1:]},
        ValueError,
        "candidate_labels: want one for",
    ),
    "width": ((X, Y), {"candidates": X[:, 1:], "candidate_labels": Y}, ValueError, "candidates: want D=4"),
    "scale": ((X, Y), {"scale": 0.0}, ValueError, "scale: want a positive number"),
    "reduction": ((X, Y), {"reduction": "mean_of_targets"}, ValueError, "reduction: want one of"),
    "memory": ((X, Y), {"memory": "lots"}, ValueError, "memory: want one of 'fast', 'low'"),
    "normalize": ((X, Y), {"normalize": "no"}, TypeError, "normalize: want True or False"),
    "backend": ((X, Y), {"backend": "cudnn"}, ValueError, "backend: want one of"),
}


@by_loss
@pytest.mark.parametrize("name", REFUSED)
def test_refuses(loss, name):
    inputs, options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        LOSSES[loss](*inputs, **options)


MEMORY = """
import resource, torch, fastqt
def loss(N, classes):
    x = torch.randn(N, 16, requires_grad=True)
    labels = torch.arange(N) % classes
    for loss in (fastqt.supcon_loss, fastqt.ntxent_loss):
        loss(x, labels, memory={memory!r}).backward()
loss(64, 2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for classes in (2, 4096):
    loss(6144, classes)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["fast", "low"])
def test_no_matrix_and_no_list_of_all_pairs(memory):
    """At N = 6,144 scores take 144 MiB; with two classes there are 19 million pairs, 288 MiB of indices."""
    run = subprocess.run(
        [sys.executable, "-c", MEMORY.format(memory=memory)], capture_output=True, text=True, check=True
    )
    assert int(run.stdout) < {"fast": 96, "low": 48}[memory]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch reads it
@pytest.mark.slow
@by_loss
def test_torch_compile_leaves_the_loss_out_of_its_graphs(loss):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, labels: LOSSES[loss](2 * x, labels).sin(), backend=counter)
    x = drawn(N, 6).requires_grad_()
    for labels in map(torch.tensor, LABELS.values()):
        found, wanted = compiled(x, labels), LOSSES[loss](2 * x, labels).sin()
        pairs = zip(torch.autograd.grad(found, x), torch.autograd.grad(wanted, x), strict=True)
        assert relative(found, wanted) < FLOAT64
        assert all(relative(a, b) < FLOAT64 for a, b in pairs)
    assert counter.frame_count <= 3  # for batches of any labels: the graphs around the loss
