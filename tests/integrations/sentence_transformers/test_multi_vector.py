"""The library's ranking losses of multi-vector models beside those that take their place."""

import functools

import pytest

from tests.shared.small_encoders import distance
from tests.shared.tolerances import FLOAT32, relative

st = pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
pytest.importorskip("accelerate", reason="the extra st is not installed")

from sentence_transformers.multi_vector_encoder import losses, scoring  # noqa: E402

import fastqt.integrations.sentence_transformers as ours  # noqa: E402
from fastqt.integrations.sentence_transformers import multi_vector  # noqa: E402

# In a container, where `patch` does not find them.
THEIRS = {
    name: getattr(losses, name) for name, module in ours.REPLACEMENTS.items() if module == "multi_vector"
}
COLUMNS = (
    ["the cat sat on a mat .", "cats", "a cat .", "the mat"],
    ["the cat", "cats .", "a cat", "the mats"],
    ["on a mat", "the mat sat .", ". .", "a"],
    ["sat", "a mat on a mat", "the .", "cat cat"],
)


@pytest.fixture(scope="module")
def model(checkpoint):
    return st.MultiVectorEncoder(str(checkpoint), device="cpu", local_files_only=True).eval()


def results(loss, model, count):
    model.zero_grad()
    names = ["query"] + ["document"] * (count - 1)
    columns = [
        dict(model.preprocess(texts, task=task)) for texts, task in zip(COLUMNS[:count], names, strict=True)
    ]
    value = loss(columns)
    (2 * value).backward()
    return value.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def compare(model, name, count=3, **options):
    (wanted, theirs), (found, gradients) = (
        results(kind(model, **options), model, count) for kind in (THEIRS[name], getattr(ours, name))
    )
    assert wanted.dtype is found.dtype
    assert relative(found, wanted) <= FLOAT32
    assert distance(gradients, theirs) <= FLOAT32


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", THEIRS)
def test_values_and_gradients_are_the_librarys(model, name, count):
    compare(model, name, count, scale=0.7, mini_batch_size=3)


@pytest.mark.parametrize(
    "function",
    [
        scoring.mean_colbert_scores,
        functools.partial(scoring.colbert_scores, chunk_elements=1000, length_normalize=True),
        scoring.XTRScores(top_k=5),
    ],
    ids=["mean", "partial", "XTR"],
)
@pytest.mark.parametrize("name", THEIRS)
def test_so_they_are_of_other_scores(model, name, function):
    compare(model, name, similarity_fct=function, scale=5.0)


def test_which_scores_are_computed_here():
    known = multi_vector.divides_scores
    assert known(scoring.colbert_scores) is False
    assert known(scoring.mean_colbert_scores) is True
    assert known(functools.partial(scoring.mean_colbert_scores, length_normalize=False)) is False
    for other in (scoring.XTRScores(), scoring.xtr_scores, functools.partial(scoring.colbert_scores, None)):
        assert known(other) is None
