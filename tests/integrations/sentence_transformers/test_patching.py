"""`patch` puts the classes here in the place of the library's own in all modules, and undoes it."""

import sys
import types
import warnings

import pytest

st = pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
pytest.importorskip("accelerate", reason="the extra st is not installed")

from sentence_transformers.multi_vector_encoder import losses as multi_vector  # noqa: E402
from sentence_transformers.sentence_transformer import losses  # noqa: E402

import fastqt.integrations.sentence_transformers as ours  # noqa: E402

# In a container, where `patch` does not find them.
THEIRS = {
    name: getattr(multi_vector if module == "multi_vector" else losses, name)
    for name, module in ours.REPLACEMENTS.items()
}
OURS = {name: getattr(ours, name) for name in ours.REPLACEMENTS}
SUBMODULE = "sentence_transformers.sentence_transformer.losses.multiple_negatives_ranking"


@pytest.fixture
def script():
    """A module that has imported a loss under its name and under another."""
    module = types.ModuleType("a_script")
    module.MultipleNegativesRankingLoss = module.MNRL = THEIRS["MultipleNegativesRankingLoss"]
    sys.modules["a_script"] = module
    yield module
    del sys.modules["a_script"]


def held():
    return {name: (vars(losses) | vars(multi_vector))[name] for name in THEIRS}


def test_names_are_replaced_and_restored(script):
    patch = ours.patch()
    try:
        assert held() == OURS
        assert sys.modules[SUBMODULE].MultipleNegativesRankingLoss is OURS["MultipleNegativesRankingLoss"]
        assert script.MultipleNegativesRankingLoss is script.MNRL is OURS["MultipleNegativesRankingLoss"]
        assert {"a_script.MNRL", f"{SUBMODULE}.MultipleNegativesRankingLoss"} <= set(patch.replaced)
        names = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the older path
            exec("from sentence_transformers.losses import MultipleNegativesRankingLoss as loss", names)
        assert names["loss"] is OURS["MultipleNegativesRankingLoss"]
    finally:
        patch.undo()
    assert held() == THEIRS
    assert script.MultipleNegativesRankingLoss is script.MNRL is THEIRS["MultipleNegativesRankingLoss"]
    patch.undo()  # again does nothing
    assert held() == THEIRS


def test_as_a_context_also_within_another_and_after_an_error():
    with ours.patch():
        with ours.patch() as inner:
            assert inner.replaced == []
        assert held() == OURS
    assert held() == THEIRS
    with pytest.raises(KeyError), ours.patch():
        raise KeyError
    assert held() == THEIRS


def test_what_has_been_set_in_between_stays(script):
    with ours.patch():
        script.MNRL = "another"
    assert script.MNRL == "another"


def test_the_classes_here_stay_derived_from_the_librarys():
    with ours.patch():
        for name, kind in OURS.items():
            assert THEIRS[name] in kind.__mro__
            assert getattr(ours, name) is kind
        loss = losses.MultipleNegativesRankingLoss(None, scale=4.0)
        assert type(loss) is OURS["MultipleNegativesRankingLoss"]
        assert isinstance(loss, THEIRS["MultipleNegativesRankingLoss"])


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="has no attribute 'RankingLoss'"):
        ours.RankingLoss  # noqa: B018
