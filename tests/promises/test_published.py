"""Losses of libraries, executed unchanged in the block: their values, gradients, and which make no matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastqt
from fastqt.engines.cpu import contrastive
from fastqt.promises import walk
from tests.promises.test_fused import LargestTensor

st = pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
pytest.importorskip("pytorch_metric_learning", reason="the extra metric is not installed")

# The libraries can be imported after the skips alone.
from pytorch_metric_learning import losses as metric  # noqa: E402
from sentence_transformers import util  # noqa: E402
from sentence_transformers.sentence_transformer import losses  # noqa: E402
from transformers import PreTrainedTokenizerBase  # noqa: E402

N, D = 64, 8
LABELS = torch.arange(N) // 4
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


class Tokenizer(PreTrainedTokenizerBase):
    def __init__(self) -> None:
        pass

    def get_vocab(self) -> dict[str, int]:
        return {}


class Embeddings(torch.nn.Module):
    """A model of sentence-transformers whose inputs are vectors."""

    tokenizer, max_seq_length = Tokenizer(), 1

    def __init__(self, seed: int) -> None:
        super().__init__()
        start = torch.randn(D, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.weight = torch.nn.Parameter(torch.eye(D, dtype=torch.float64) + 0.3 * start)

    def __getitem__(self, place: int) -> Embeddings:
        return self

    def get_embedding_dimension(self) -> int:
        return D

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["input_ids"] @ self.weight}


def columns(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(N, D, generator=generator, dtype=torch.float64)
    others = [
        first + (i + 1) * torch.randn(N, D, generator=generator, dtype=torch.float64)
        for i in range(count - 1)
    ]
    return [first, *others]


Results = tuple[Tensor, list[Tensor], Any]
GRADES = torch.linspace(0, 1, N, dtype=torch.float64)


def of_library(
    make: Callable[[Any], Any], count: int = 2, labels: Tensor = LABELS
) -> Callable[[Callable[..., Any]], Results]:
    """The loss and the gradients of a model, with a loss of sentence-transformers."""

    def results(block: Callable[..., Any]) -> Results:
        model = Embeddings(1)
        loss = make(model)
        features = [{"input_ids": x} for x in columns(count)]
        with block() as report:
            value = loss(features, labels)
            if isinstance(value, dict):
                value = sum(value.values())
            value.backward()
        return value.detach() + 0, [x.grad for x in loss.parameters() if x.grad is not None], report

    return results


def of_embeddings(make: Callable[[], Any]) -> Callable[[Callable[..., Any]], Results]:
    """The same with a loss of pytorch-metric-learning."""

    def results(block: Callable[..., Any]) -> Results:
        torch.manual_seed(0)
        loss, x = make(), columns(1)[0].requires_grad_()
        loss = loss.double() if isinstance(loss, torch.nn.Module) else loss
        with block() as report:
            value = loss(x, LABELS)
            value.backward()
        learnt = [p.grad for p in loss.parameters() if p.grad is not None]
        return value.detach() + 0, [x.grad, *learnt], report

    return results


def ranking(**options: Any) -> Callable[[Any], Any]:
    return lambda model: losses.MultipleNegativesRankingLoss(model, **options)


def cached(**options: Any) -> Callable[[Any], Any]:
    return lambda model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=16, **options)


def guided(kind: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda model: kind(model, Embeddings(2).requires_grad_(False), **options)


SENTENCES: dict[str, Callable[..., Results]] = {
    "ranking": of_library(ranking()),
    "ranking with negatives": of_library(ranking(), 4),
    "ranking by inner products": of_library(ranking(similarity_fct=util.dot_score, scale=0.5), 3),
    "ranking in both directions": of_library(
        ranking(directions=DIRECTIONS[::2], partition_mode="per_direction")
    ),
    "ranking in all directions": of_library(ranking(directions=DIRECTIONS), 3),
    "symmetric ranking": of_library(losses.MultipleNegativesSymmetricRankingLoss),
    "cached ranking": of_library(cached(), 3),
    "cached ranking in all directions": of_library(cached(directions=DIRECTIONS)),
    "cached symmetric ranking": of_library(
        lambda model: losses.CachedMultipleNegativesSymmetricRankingLoss(model, mini_batch_size=16)
    ),
    "GIST": of_library(guided(losses.GISTEmbedLoss)),
    "GIST with negatives": of_library(guided(losses.GISTEmbedLoss), 3),
    "GIST with a margin": of_library(
        guided(losses.GISTEmbedLoss, margin_strategy="relative", margin=0.05), 3
    ),
    "GIST of pairs alone": of_library(
        guided(losses.GISTEmbedLoss, contrast_anchors=False, contrast_positives=False)
    ),
    "cached GIST": of_library(guided(losses.CachedGISTEmbedLoss, mini_batch_size=16), 3),
    "CoSENT": of_library(losses.CoSENTLoss, labels=GRADES),
    "AnglE": of_library(losses.AnglELoss, labels=GRADES),
    "cosines": of_library(losses.CosineSimilarityLoss, labels=GRADES),
    "mega-batch": of_library(lambda model: losses.MegaBatchMarginLoss(model, use_mini_batched_version=False)),
    "mega-batch in parts": of_library(lambda model: losses.MegaBatchMarginLoss(model, mini_batch_size=16)),
    "hard triplets": of_library(losses.BatchHardTripletLoss, 1),
    "hard triplets by cosine": of_library(
        lambda model: losses.BatchHardTripletLoss(
            model, losses.BatchHardTripletLossDistanceFunction.cosine_distance, 0.5
        ),
        1,
    ),
    "soft hard triplets": of_library(losses.BatchHardSoftMarginTripletLoss, 1),
    "semi-hard triplets": of_library(losses.BatchSemiHardTripletLoss, 1),
    "all triplets": of_library(losses.BatchAllTripletLoss, 1),
    "orthogonality": of_library(losses.GlobalOrthogonalRegularizationLoss),
    "contrastive tension": of_library(losses.ContrastiveTensionLossInBatchNegatives, 1),
    "contrastive pairs": of_library(losses.ContrastiveLoss, labels=LABELS % 2),
    "hardest pairs": of_library(losses.OnlineContrastiveLoss, labels=LABELS % 2),
    "triplets": of_library(losses.TripletLoss, 3),
    "prefixes": of_library(lambda model: losses.MatryoshkaLoss(model, ranking()(model), [8, 4])),
}
METRIC: dict[str, Callable[..., Results]] = {
    name: of_embeddings(make)
    for name, make in {
        "SupConLoss": metric.SupConLoss,
        "NTXentLoss": metric.NTXentLoss,
        "MultiSimilarityLoss": metric.MultiSimilarityLoss,
        "CircleLoss": metric.CircleLoss,
        "ContrastiveLoss": metric.ContrastiveLoss,
        "GeneralizedLiftedStructureLoss": metric.GeneralizedLiftedStructureLoss,
        "NCALoss": metric.NCALoss,
        "FastAPLoss": metric.FastAPLoss,
        "SignalToNoiseRatioContrastiveLoss": metric.SignalToNoiseRatioContrastiveLoss,
        "PNPLoss": metric.PNPLoss,
        "RankedListLoss": lambda: metric.RankedListLoss(margin=0.5, Tn=1),
        "TripletMarginLoss": metric.TripletMarginLoss,
        "ArcFaceLoss": lambda: metric.ArcFaceLoss(N // 4, D),
        "CosFaceLoss": lambda: metric.CosFaceLoss(N // 4, D),
        "NormalizedSoftmaxLoss": lambda: metric.NormalizedSoftmaxLoss(N // 4, D),
        "ProxyAnchorLoss": lambda: metric.ProxyAnchorLoss(N // 4, D),
        "ProxyNCALoss": lambda: metric.ProxyNCALoss(N // 4, D),
        "SoftTripleLoss": lambda: metric.SoftTripleLoss(N // 4, D),
    }.items()
}
PUBLISHED = SENTENCES | METRIC
# Matrices of the programs' own masks, in floating point.
WITH_MASKS = {"ranking in all directions", "SupConLoss", "MultiSimilarityLoss"}
# Sorting, lists of index pairs and triplets, and the library's `cdist`, want scores.
WITH_SCORES = {
    *("semi-hard triplets", "all triplets", "NTXentLoss", "CircleLoss", "ContrastiveLoss"),
    *("GeneralizedLiftedStructureLoss", "NCALoss", "FastAPLoss", "SignalToNoiseRatioContrastiveLoss"),
    *("PNPLoss", "RankedListLoss", "TripletMarginLoss"),
}


@pytest.mark.filterwarnings("ignore:The .*Symmetric:DeprecationWarning")
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_loss_of_a_library_is_right_in_the_block(name, monkeypatch):
    monkeypatch.setattr(walk, "CELLS_AT_ONCE", N * N // 16)
    monkeypatch.setattr(contrastive, "KEPT_BYTES", 0)
    wanted, gradients, _ = PUBLISHED[name](torch.enable_grad)
    with LargestTensor() as tensors:
        value, in_block, report = PUBLISHED[name](lambda: fastqt.fused(least_cells=N))

    torch.testing.assert_close(value, wanted, rtol=1e-9, atol=0)
    largest = max(float(x.abs().max()) for x in gradients)
    assert len(in_block) == len(gradients) > 0
    for a, b in zip(in_block, gradients, strict=True):
        assert (a - b).abs().max() <= 1e-9 * largest
    assert (tensors.most >= N * N) is (name in WITH_MASKS | WITH_SCORES)
    assert not report.computed or name in WITH_SCORES


class Numbers(TorchDispatchMode):
    """How many numbers the largest tensor has that a plain program makes, of each kind; views make none."""

    floats, integers = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, Tensor):
                count = min(x.numel(), x.untyped_storage().nbytes() // x.element_size())
                if x.is_floating_point():
                    self.floats = max(self.floats, count)
                elif x.dtype == torch.int64:
                    self.integers = max(self.integers, count)
        return made


@pytest.mark.filterwarnings("ignore:The .*Symmetric:DeprecationWarning")
def test_four_of_five_losses_that_can_be_are_without_a_matrix():
    """Of those that make one, and no order and no list of all of its cells, which no promise stands for."""
    can_be = []
    for name, results in PUBLISHED.items():
        with Numbers() as numbers:
            results(torch.enable_grad)
        if numbers.floats >= N * N > numbers.integers:
            can_be.append(name)

    with_a_matrix = (WITH_MASKS | WITH_SCORES).intersection(can_be)  # as the test above sees
    assert len(can_be) > 20
    assert len(with_a_matrix) <= 0.2 * len(can_be)
