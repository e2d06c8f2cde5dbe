"""The library's losses of ranked pairs and those that take their place: values, gradients, model cards."""

import functools
import inspect
import pickle

import pytest
import torch

from tests.shared.small_encoders import distance
from tests.shared.tolerances import FLOAT32, relative

st = pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
pytest.importorskip("accelerate", reason="the extra st is not installed")

from sentence_transformers import util  # noqa: E402
from sentence_transformers.sentence_transformer import losses  # noqa: E402

import fastqt.integrations.sentence_transformers as ours  # noqa: E402

# In a container, where `patch` does not find them.
THEIRS = {name: getattr(losses, name) for name, module in ours.REPLACEMENTS.items() if module == "cosent"}
COLUMNS = (
    ["the cat sat on a mat .", "cats", "a cat .", "the mat"],
    ["the cat", "cats .", "a cat", "the mats"],
    ["on a mat", "the mat sat .", ". .", "a"],
    ["sat", "a mat on a mat", "the .", "cat cat"],
)
LABELS = {
    "scores": torch.tensor([0.3, 0.9, 0.3, 0.0]),
    "a column": torch.tensor([[3], [1], [4], [1]]),
    "bools": torch.tensor([True, False, False, True]),
}


@pytest.fixture(scope="module")
def model(checkpoint):
    return st.SentenceTransformer(str(checkpoint), device="cpu", local_files_only=True).eval()


def both(name, *args, **options):
    return THEIRS[name](*args, **options), getattr(ours, name)(*args, **options)


def results(loss, model, columns, labels):
    model.zero_grad()
    value = loss([dict(model.preprocess(column)) for column in columns], labels)
    (2 * value).backward()
    return value.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def compare(pair, model, columns, labels):
    (wanted, theirs), (found, gradients) = (results(loss, model, columns, labels) for loss in pair)
    assert wanted.dtype is found.dtype
    assert relative(found, wanted) <= FLOAT32
    assert distance(gradients, theirs) <= FLOAT32


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("name", THEIRS)
def test_values_and_gradients_are_the_librarys(model, name, labels):
    compare(both(name, model, scale=7.0), model, COLUMNS[:2], LABELS[labels])


@pytest.mark.parametrize("function", ["pairwise_dot_score", "pairwise_euclidean_sim"])
def test_so_they_are_of_any_similarity(model, function):
    pair = both("CoSENTLoss", model, similarity_fct=getattr(util, function), scale=0.5)
    compare(pair, model, COLUMNS[:2], LABELS["scores"])


@pytest.mark.parametrize("columns", [3, 4])
def test_angle_takes_negatives_without_labels(model, columns):
    compare(both("AnglELoss", model), model, COLUMNS[:columns], None)


def test_so_are_those_of_matryoshka(model):
    pair = [losses.MatryoshkaLoss(model, loss, [8, 4, 2]) for loss in both("CoSENTLoss", model)]
    compare(pair, model, COLUMNS[:2], LABELS["scores"])


@pytest.mark.parametrize("name", THEIRS)
def test_no_pairs(model, name):
    pair, nothing = both(name, model), torch.zeros(0, 8)
    theirs, found = (loss.compute_loss_from_embeddings([nothing, nothing], torch.zeros(0)) for loss in pair)
    assert theirs == found == 0


@pytest.mark.parametrize("name", THEIRS)
def test_a_learnt_batch_keeps_its_digits(model, name):
    """The library adds 1 before the logarithm, and is 0 where the loss is below 1e-7."""
    a = torch.eye(4, 8)
    b = torch.tensor([1.0, 1.0, -1.0, -1.0])[:, None] * a
    if name == "AnglELoss":  # an absolute value, of pairs without one and of equal pairs
        b = torch.cat([a[:2], a[:2] @ torch.zeros(8, 8)])
    theirs, found = (
        loss.compute_loss_from_embeddings([a, b], torch.tensor([1, 1, 0, 0])) for loss in both(name, model)
    )
    apart = 20.0 if name == "AnglELoss" else 40.0
    wanted = torch.tensor(4.0, dtype=torch.float64) * torch.tensor(-apart, dtype=torch.float64).exp()
    assert theirs == 0
    assert relative(found, wanted) < FLOAT32


@pytest.mark.parametrize("name", THEIRS)
def test_signature_settings_and_citation_are_the_librarys(model, name):
    theirs, own = both(name, model, scale=11.0)
    assert isinstance(own, THEIRS[name])
    assert inspect.signature(type(own)) == inspect.signature(THEIRS[name])
    assert own.get_config_dict() == theirs.get_config_dict()
    assert own.citation == theirs.citation
    assert util.fullname(own) == util.fullname(theirs)  # what a model card names
    loaded = pickle.loads(pickle.dumps(own))
    assert type(loaded) is type(own)
    assert loaded.scale == 11.0


def test_what_is_refused(model):
    embeddings = [torch.randn(4, 8), torch.randn(4, 8)]
    with pytest.raises(ValueError, match="labels: want shape"):
        ours.CoSENTLoss(model).compute_loss_from_embeddings(embeddings, torch.ones(3))
    matrix = ours.CoSENTLoss(model, similarity_fct=util.cos_sim)
    with pytest.raises(ValueError, match="scores: want shape"):
        matrix.compute_loss_from_embeddings(embeddings, torch.ones(4))
    with pytest.raises(TypeError, match="scale: want a number"):
        ours.AnglELoss(model, scale="large")
    partial = ours.CoSENTLoss(model, similarity_fct=functools.partial(util.pairwise_dot_score))
    assert partial.compute_loss_from_embeddings(embeddings, torch.ones(4)) == 0
