"""The losses and the memory for pytorch-metric-learning equal that library's, in value and gradients."""

import copy
import re
from pathlib import Path

import pytest
import torch

from tests.shared.ring_memory import Live
from tests.shared.tolerances import relative

pytest.importorskip("pytorch_metric_learning", reason="the extra metric is not installed")

from pytorch_metric_learning import distances, losses, miners, reducers, regularizers

import fastqt.integrations.metric_learning as ours
from fastqt.engines.cpu import contrastive

NAMES = ("NTXentLoss", "SupConLoss")
by_loss = pytest.mark.parametrize("name", NAMES)
# Sums in another order, and the smallest number that the library adds to probabilities.
SAME = 1e-11


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LABELS = torch.tensor([5, -1, 5, 2, 2, 2, 7, 5, 2, 5, 9, -1])
OTHER_LABELS = torch.tensor([2, 5, 5, 8, -1, 9, 2, 2, 5, 0, 2, 5, 9, 9, 2])
N, M, D = len(LABELS), len(OTHER_LABELS), 6


def check(name, x, labels, lists=None, others=None, other_labels=None, fallback=False, **options):
    """Compares a loss made with `options` with the library's, for the arguments of a call."""
    found = []
    for module in (ours, losses):
        extra = {"fallback": True} if fallback and module is ours else {}
        loss = getattr(module, name)(**copy.deepcopy(options), **extra)
        leaves = [y.clone().requires_grad_() for y in (x, others) if y is not None]
        ref = leaves[1] if others is not None else None
        value = loss(leaves[0], labels, lists, ref, other_labels)
        gradients = torch.autograd.grad(value, leaves, allow_unused=True)
        found.append([value.detach(), *gradients])
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and relative(a, b) < SAME), (a, b)


DISTANCES = {
    "cosine": distances.CosineSimilarity(),
    "dot": distances.DotProductSimilarity(normalize_embeddings=False),
    "dot of unit rows": distances.DotProductSimilarity(),
    "squared": distances.LpDistance(power=2),
}


@by_loss
@pytest.mark.parametrize("distance", DISTANCES)
def test_from_labels(name, distance):
    options = {"temperature": 0.3, "distance": DISTANCES[distance]}
    check(name, drawn(N, D), LABELS, **options)
    check(name, drawn(N, D), LABELS, None, drawn(M, D, seed=1), OTHER_LABELS, **options)
    check(name, drawn(N, D), LABELS.double(), None, drawn(M, D, seed=1), OTHER_LABELS.double(), **options)


REDUCERS = {
    "mean": reducers.MeanReducer(),
    "sum": reducers.SumReducer(),
    "mean with statistics": reducers.MeanReducer(collect_stats=True),
    "nonzero": reducers.AvgNonZeroReducer(),
    "threshold": reducers.ThresholdReducer(low=0.5, high=2.0),
    "anchors": reducers.PerAnchorReducer(reducers.AvgNonZeroReducer()),
    "classes": reducers.ClassWeightedReducer(torch.arange(1.0, 11.0)),
}


@by_loss
@pytest.mark.parametrize("reducer", REDUCERS)
def test_reducers(name, reducer):
    check(name, drawn(N, D), LABELS.abs(), temperature=0.5, reducer=REDUCERS[reducer])


@by_loss
def test_a_regularizer_stays_a_loss_of_its_own(name):
    options = {"embedding_regularizer": regularizers.LpRegularizer(), "embedding_reg_weight": 0.3}
    check(name, drawn(N, D), LABELS, **options)
    loss = getattr(ours, name)(**options)
    assert loss.sub_loss_names() == ["loss", "embedding_reg_loss"]
    assert isinstance(loss, getattr(losses, name))


@by_loss
def test_the_dictionary_that_a_reducer_is_given(name):
    found, wanted = (
        getattr(module, name)(reducer=reducers.DoNothingReducer())(drawn(N, D), LABELS)["loss"]
        for module in (ours, losses)
    )
    assert found["reduction_type"] == wanted["reduction_type"]
    assert relative(found["losses"], wanted["losses"]) < SAME
    indices = [x["indices"] if isinstance(x["indices"], tuple) else (x["indices"],) for x in (found, wanted)]
    assert all(torch.equal(a, b) for a, b in zip(*indices, strict=True))


def pairs() -> dict[str, tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(3)
    few = lambda x: x[torch.randperm(len(x), generator=generator)[: len(x) // 2]]  # noqa: E731
    negative = LABELS[:, None] != LABELS
    positive = ~negative & ~torch.eye(N, dtype=torch.bool)
    triplets = few((positive[:, :, None] & negative[:, None]).nonzero())
    (a1, p), (a2, n) = positive.nonzero().unbind(1), negative.nonzero().unbind(1)
    positive, negative = few(torch.stack([a1, p], 1)), few(torch.stack([a2, n], 1))
    return {
        "pairs": (*positive.unbind(1), *negative.unbind(1)),
        "pairs given twice": (*positive.repeat(2, 1).unbind(1), *negative.repeat(2, 1).unbind(1)),
        "triplets": tuple(triplets.unbind(1)),
        "no positives": (a1[:0], p[:0], a2, n),
        "no negatives": (a1, p, a2[:0], n[:0]),
    }


@by_loss
@pytest.mark.parametrize("which", pairs())
@pytest.mark.parametrize("distance", ["cosine", "dot", "squared"])
def test_from_lists(name, which, distance):
    lists = pairs()[which]
    options = {"temperature": 0.3, "distance": DISTANCES[distance]}
    check(name, drawn(N, D), LABELS, lists, **options)
    check(name, drawn(N, D), LABELS, lists, drawn(N, D, seed=4), LABELS.clone(), **options)
    check(name, drawn(N, D), None, lists, drawn(N, D, seed=4), **options)


def test_only_packages_that_each_version_of_the_library_has_are_imported():
    """Version 3 has no `utils`, of which version 2 says nothing in its documentation."""
    sources = [path.read_text() for path in Path(ours.__file__).parent.glob("*.py")]
    names = re.findall(r"from pytorch_metric_learning(\S*) import (.*)", "\n".join(sources))
    packages = {package for _, imported in names for package in imported.split(", ")}
    assert not any(place for place, _ in names)
    assert packages <= {"distances", "losses", "miners", "reducers", "regularizers"}


@by_loss
def test_from_a_miner(name):
    x = drawn(N, D)
    for miner in (miners.MultiSimilarityMiner(), miners.TripletMarginMiner(), miners.PairMarginMiner()):
        lists = miner(x, LABELS)
        check(name, x, LABELS, lists)


@by_loss
def test_no_pairs_are_a_loss_of_0(name):
    for labels in (torch.arange(4), torch.zeros(4).long(), torch.tensor([0])):
        check(name, drawn(len(labels), D), labels)
    # A single pair of each kind counts as none there.
    check(name, drawn(1, D), torch.tensor([0]), None, drawn(2, D, seed=1), torch.tensor([0, 1]))


@by_loss
def test_converged_rows_have_digits_where_the_librarys_have_none(name):
    x = (torch.eye(N)[LABELS.unique(return_inverse=True)[1]] + 1e-3 * drawn(N, N)).float()
    truth = getattr(losses, name)(temperature=0.05)(x.double(), LABELS)
    mine, theirs = (getattr(module, name)(temperature=0.05)(x, LABELS) for module in (ours, losses))
    assert mine.dtype == torch.float32
    assert relative(mine, truth) < 1e-5
    if name == "NTXentLoss":  # SupCon's positives compete with each other.
        assert relative(theirs, truth) > 1e-2


Lp, Cosine, Dot = distances.LpDistance, distances.CosineSimilarity, distances.DotProductSimilarity
WRONG = [
    (Lp(), "distance: want LpDistance.p=2, power=2. .* got p=2, power=1"),
    (Lp(p=1, power=2), "got p=1, power=2"),
    (Lp(power=2, normalize_embeddings=False), "normalize_embeddings=False"),
    (distances.SNRDistance(), "got SNRDistance; fallback=True takes the library's own"),
    (Cosine(power=3), "want CosineSimilarity.power=1.* got power=3"),
    (Dot(p=1), "want DotProductSimilarity.p=2"),
]


@by_loss
def test_refuses_other_distances_or_falls_back_to_the_library(name):
    for distance, message in WRONG:
        with pytest.raises(ValueError, match=message):
            getattr(ours, name)(distance=distance)
    check(name, drawn(N, D), LABELS, fallback=True, distance=Lp())


@by_loss
@pytest.mark.parametrize("with_candidates", [False, True])
def test_no_matrix_is_made(name, with_candidates, monkeypatch):
    """At N = 1,500 scores would take 18 MB in float64, and lists of all pairs 36 MB."""
    monkeypatch.setattr(contrastive, "KEPT_BYTES", 0)  # scores of the forward pass, for the backward pass
    rows = 1500
    x = drawn(rows, 8).requires_grad_()
    labels = torch.arange(rows) % 500
    ref = (None, drawn(rows, 8, seed=1), labels.clone()) if with_candidates else ()
    loss = getattr(ours, name)()
    loss(x, labels, *ref).backward()
    with Live(x) as live:
        loss(x, labels, *ref).backward()
    assert live.most < 6e6


def batches(memory, rows: int, count: int, *, mask: bool = False):
    """The value and the gradient of each of `count` batches."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        x = torch.randn(rows, D, generator=generator, dtype=torch.float64).requires_grad_()
        labels = torch.randint(5, (rows,), generator=generator)
        options = {"enqueue_mask": torch.rand(rows, generator=generator) < 0.5} if mask else {}
        value = memory(x, labels, **options)
        yield value.detach(), torch.autograd.grad(value, x)[0]


@by_loss
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(("size", "rows"), [(20, 7), (21, 7), (8, 8), (50, 2)])
@pytest.mark.parametrize("miner", [None, miners.MultiSimilarityMiner])
def test_equals_the_librarys(name, size, rows, mask, miner):
    made = [
        module.CrossBatchMemory(getattr(module, name)(), D, size, miner and miner())
        for module in (ours, losses)
    ]
    for found, wanted in zip(*(batches(memory, rows, 9, mask=mask) for memory in made), strict=True):
        for a, b in zip(found, wanted, strict=True):
            assert relative(a, b) < SAME
    assert torch.equal(made[0].embedding_memory, made[1].embedding_memory)
    assert made[0].queue_idx == made[1].queue_idx


@by_loss
def test_a_batch_of_one_row_is_not_compared_with_itself(name):
    """The library takes its row for a positive of itself."""
    memory = ours.CrossBatchMemory(getattr(ours, name)(), D, 10)
    first, second = torch.eye(D)[:1], torch.eye(D)[1:2]
    memory(first, torch.tensor([0]))
    assert memory(second, torch.tensor([1])) == 0


def test_other_losses_are_given_lists():
    memory = ours.CrossBatchMemory(losses.ContrastiveLoss(), D, 20)
    wanted = losses.CrossBatchMemory(losses.ContrastiveLoss(), D, 20)
    for a, b in zip(batches(memory, 6, 5), batches(wanted, 6, 5), strict=True):
        assert torch.equal(a[0], b[0])


@by_loss
def test_no_lists_of_all_pairs(name, monkeypatch):
    """128 rows against 20,000: their scores take 10 MB in float32, and lists of all pairs 40 MB."""
    monkeypatch.setattr(contrastive, "KEPT_BYTES", 0)  # scores of the forward pass, for the backward pass
    memory = ours.CrossBatchMemory(getattr(ours, name)(), 8, 20_000)
    memory.add_to_memory(torch.randn(20_000, 8), torch.arange(20_000) % 4000, 20_000)
    x, labels = torch.randn(128, 8, requires_grad=True), torch.arange(128)
    with Live(x) as live:
        memory(x, labels).backward()
    assert live.most < 6 * 2**20
