"""MatryoshkaLoss: values, gradients and draws of the library's, with all prefixes in one loss."""

import pickle
import random

import pytest
import torch

import fastqt
from tests.shared.small_encoders import distance
from tests.shared.tolerances import FLOAT32, relative

st = pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
pytest.importorskip("accelerate", reason="the extra st is not installed")

from sentence_transformers import util  # noqa: E402
from sentence_transformers.sentence_transformer import losses  # noqa: E402

import fastqt.integrations.sentence_transformers as ours  # noqa: E402
from fastqt.integrations.sentence_transformers import ranking  # noqa: E402

LIBRARY = losses.MatryoshkaLoss  # `patch` of another test may replace the name.
RANKING, CACHED = losses.MultipleNegativesRankingLoss, losses.CachedMultipleNegativesRankingLoss
COLUMNS = (
    ["the cat sat on a mat .", "cats", "a cat .", "the mat"],
    ["the cat", "cats .", "a cat", "the mats"],
    ["on a mat", "the mat sat .", ". .", "a"],
)
ALL = {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")}
LOSSES = {
    "ranking": (RANKING, ours.MultipleNegativesRankingLoss, {}),
    "inner products": (RANKING, ours.MultipleNegativesRankingLoss, {"similarity_fct": util.dot_score}),
    "directions": (RANKING, ours.MultipleNegativesRankingLoss, ALL),
    "cached": (CACHED, ours.CachedMultipleNegativesRankingLoss, {"mini_batch_size": 3}),
    "any": (RANKING, ours.SentenceTransformerLoss, {}),
    "any, cached": (RANKING, ours.CachedLoss, {}),
}
PREFIXES = {
    "default": {"matryoshka_dims": [8, 4, 2]},
    "weights in any order": {"matryoshka_dims": [2, 8, 5], "matryoshka_weights": [1, 0.5, 2]},
    "drawn": {"matryoshka_dims": [8, 5, 4, 2], "n_dims_per_step": 2},
    "not the whole": {"matryoshka_dims": [4, 3]},
}


@pytest.fixture(scope="module")
def model(checkpoint):
    return st.SentenceTransformer(str(checkpoint), device="cpu", local_files_only=True).eval()


def results(loss, model):
    """A step's loss and gradients, with the same draws each time."""
    model.zero_grad()
    torch.manual_seed(0)
    random.seed(0)
    value = loss([dict(model.preprocess(column)) for column in COLUMNS], torch.zeros(4))
    value.backward()
    return [value.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("prefixes", PREFIXES)
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradients_are_the_librarys(model, name, prefixes):
    theirs, own, options = LOSSES[name]
    wanted = results(LIBRARY(model, theirs(model, **options), **PREFIXES[prefixes]), model)
    found = results(ours.MatryoshkaLoss(model, own(model, **options), **PREFIXES[prefixes]), model)
    assert relative(found[0], wanted[0]) <= FLOAT32
    assert distance(found[1:], wanted[1:]) <= FLOAT32


@pytest.mark.parametrize("name", ["ranking", "cached"])
def test_all_prefixes_are_one_call(model, name, monkeypatch):
    calls, genuine = [], ranking.multiple_negatives_ranking_loss

    def counted(*args, **options):
        calls.append(options["matryoshka_dims"])
        return genuine(*args, **options)

    monkeypatch.setattr(ranking, "multiple_negatives_ranking_loss", counted)
    _, own, options = LOSSES[name]
    inner = own(model, **options)
    results(ours.MatryoshkaLoss(model, inner, [8, 4, 2]), model)
    assert calls == [(2, 4, 8)]
    results(inner, model)  # is itself again
    assert calls[1:] == [None]


def test_around_other_losses_it_is_the_librarys(model):
    for make in (RANKING, CACHED):
        found, wanted = (
            results(kind(model, make(model), [8, 4, 2]), model) for kind in (ours.MatryoshkaLoss, LIBRARY)
        )
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("loss", [fastqt.contrastive_loss, fastqt.clip_loss, fastqt.simcse_loss])
def test_around_any_loss_of_fastqt(model, loss):
    """A loss that does not normalise by itself is given prefixes at norm 1, as in the library."""
    options = {"targets": fastqt.Diagonal(), "diagonal": "keep"} if loss is fastqt.contrastive_loss else {}
    options |= {"scale": 5.0}
    inner = ours.SentenceTransformerLoss(model, loss, **options)
    columns = [dict(model.preprocess(column)) for column in COLUMNS[:2]]
    found = ours.MatryoshkaLoss(model, inner, [8, 4])(columns, torch.zeros(4))
    wanted = LIBRARY(model, inner, [8, 4])(columns, torch.zeros(4))
    assert relative(found, wanted) <= FLOAT32


def test_settings_card_and_pickle_are_the_librarys(model):
    inner = ours.MultipleNegativesRankingLoss(model)
    found, wanted = (kind(model, inner, [8, 4], [1, 2]) for kind in (ours.MatryoshkaLoss, LIBRARY))
    assert found.get_config_dict() == wanted.get_config_dict()
    assert found.citation == wanted.citation
    assert type(found).__module__ == LIBRARY.__module__
    again = pickle.loads(pickle.dumps(found))
    assert type(again) is ours.MatryoshkaLoss
    with pytest.raises(ValueError, match="matryoshka_weights must be the same length"):
        ours.MatryoshkaLoss(model, inner, [8, 4], [1])
