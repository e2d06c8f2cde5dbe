"""The library's spread-out regulariser and the one that takes its place: values, gradients, model cards."""

import inspect
import pickle

import pytest

from tests.shared.small_encoders import distance
from tests.shared.tolerances import FLOAT32, relative

st = pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
pytest.importorskip("accelerate", reason="the extra st is not installed")

from sentence_transformers import util  # noqa: E402
from sentence_transformers.sentence_transformer import losses  # noqa: E402

from fastqt.integrations.sentence_transformers import GlobalOrthogonalRegularizationLoss  # noqa: E402

THEIRS = losses.GlobalOrthogonalRegularizationLoss
COLUMNS = (
    ["the cat sat on a mat .", "cats", "a cat .", "the mat"] * 3,
    ["the cat", "cats .", "a cat", "the mats"] * 3,
    ["on a mat", "the mat sat .", ". .", "a"] * 3,
)
OPTIONS = {
    "default": {},
    "sum": {"aggregation": "sum", "mean_weight": 0.3},
    "no mean": {"mean_weight": None, "second_moment_weight": 2.0},
    "no second moment": {"second_moment_weight": 0.0},
    "inner products": {"similarity_fct": util.dot_score},
}


@pytest.fixture(scope="module")
def model(checkpoint):
    return st.SentenceTransformer(str(checkpoint), device="cpu", local_files_only=True).eval()


def results(loss, model, columns):
    model.zero_grad()
    terms = loss([dict(model.preprocess(column)) for column in columns])
    sum(terms.values()).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return {name: term.detach() for name, term in terms.items()}, gradients


@pytest.mark.parametrize(("columns", "rows"), [(1, 12), (3, 12), (2, 5), (2, 1)])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients_are_the_librarys(model, name, columns, rows):
    taken = [column[:rows] for column in COLUMNS[:columns]]
    wanted, theirs = results(THEIRS(model, **OPTIONS[name]), model, taken)
    found, gradients = results(GlobalOrthogonalRegularizationLoss(model, **OPTIONS[name]), model, taken)
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        assert value.dtype is found[key].dtype
        assert relative(found[key], value) <= FLOAT32
    if rows == 1:
        assert all((g == 0).all() for g in gradients)
    else:
        assert distance(gradients, theirs) <= FLOAT32


def test_signature_settings_and_citation_are_the_librarys(model):
    theirs, own = (kind(model, mean_weight=0.5) for kind in (THEIRS, GlobalOrthogonalRegularizationLoss))
    assert isinstance(own, THEIRS)
    assert inspect.signature(GlobalOrthogonalRegularizationLoss) == inspect.signature(THEIRS)
    assert own.get_config_dict() == theirs.get_config_dict()
    assert own.citation == theirs.citation
    assert util.fullname(own) == util.fullname(theirs)  # what a model card names
    assert pickle.loads(pickle.dumps(own)).mean_weight == 0.5


def test_what_is_refused(model):
    with pytest.raises(ValueError, match="similarity_fct: want cos_sim or dot_score"):
        GlobalOrthogonalRegularizationLoss(model, similarity_fct=util.euclidean_sim)
    with pytest.raises(ValueError, match="At least one of mean_weight or second_moment_weight"):
        GlobalOrthogonalRegularizationLoss(model, mean_weight=None, second_moment_weight=0)
