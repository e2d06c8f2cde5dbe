"""The loss module for sentence-transformers, against that library's own loss."""

import pytest
import torch
from tolerances import FLOAT32, relative

import fastqt
from fastqt.integrations.sentence_transformers import SentenceTransformerLoss

COLUMNS = (
    ["the cat sat on a mat .", "cats", "a cat .", "the mat"],
    ["the cat", "cats .", "a cat", "the mats"],
    ["on a mat", "the mat sat .", ". .", "a"],
)


@pytest.fixture(scope="module")
def model(checkpoint):
    library = pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
    return library.SentenceTransformer(str(checkpoint), device="cpu", local_files_only=True).eval()


def features(model, columns):
    return [dict(model.preprocess(column)) for column in columns]


@pytest.mark.parametrize("columns", [2, 3])
def test_default_loss_equals_multiple_negatives_ranking_loss(model, columns):
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    results = []
    for loss in (SentenceTransformerLoss(model), MultipleNegativesRankingLoss(model)):
        model.zero_grad()
        value = loss(features(model, COLUMNS[:columns]), torch.zeros(4))
        value.backward()
        results.append([value, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    largest = max(gradient.abs().max() for gradient in results[1][1:])
    assert relative(results[0][0], results[1][0]) <= FLOAT32
    for ours, theirs in zip(results[0][1:], results[1][1:], strict=True):
        assert (ours - theirs).abs().max() <= FLOAT32 * largest


def test_other_loss_and_its_options(model):
    loss = SentenceTransformerLoss(model, fastqt.mixcse_loss, mix=0.3)
    found = loss(features(model, COLUMNS[:2]))
    embeddings = [model(f)["sentence_embedding"] for f in features(model, COLUMNS[:2])]
    assert relative(found, fastqt.mixcse_loss(*embeddings, mix=0.3)) <= FLOAT32
    assert loss.get_config_dict() == {"loss": "mixcse_loss", "mix": 0.3}


@pytest.mark.parametrize(
    ("loss", "options", "kind", "message"),
    [
        (fastqt.simcse_loss, {"temprature": 3}, TypeError, "temprature: no option of simcse_loss"),
        (fastqt.mixcse_loss, {"reduction": "avg"}, ValueError, "reduction: want one of .* got 'avg'"),
        (fastqt.contrastive_loss, {"scale": -1}, ValueError, "scale: want a positive number"),
        (torch.nn.functional.cosine_embedding_loss, {"marge": 1}, TypeError, "marge: no option of cosine"),
    ],
)
def test_a_wrong_option_is_refused_when_the_module_is_made(loss, options, kind, message):
    with pytest.raises(kind, match=message):
        SentenceTransformerLoss(torch.nn.Identity(), loss, **options)


def test_options_of_any_callable_are_taken():
    SentenceTransformerLoss(torch.nn.Identity(), fastqt.contrastive_loss, bias=torch.zeros(3), context_size=2)
    SentenceTransformerLoss(torch.nn.Identity(), lambda *z, **options: z[0].sum(), anything=1)
    SentenceTransformerLoss(torch.nn.Identity(), fastqt.nn.SimCSELoss())
