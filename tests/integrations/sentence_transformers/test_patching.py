"""`patch` puts the losses of fastqt in the place of the library's, and takes them out again."""

import sys
import types
import warnings

import pytest

pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
pytest.importorskip("accelerate", reason="the extra st is not installed")

# The library can be imported after the skips alone.
from sentence_transformers.multi_vector_encoder import losses as multi_vector
from sentence_transformers.sentence_transformer import losses

import fastqt.integrations.sentence_transformers as ours

# In a container, where `patch` does not find them.
THEIRS = {
    name: getattr(multi_vector if module == "multi_vector" else losses, name)
    for name, module in ours.REPLACEMENTS.items()
}
OURS = {name: getattr(ours, name) for name in ours.REPLACEMENTS}
PLAIN = "MultipleNegativesRankingLoss"
SUBMODULE = "sentence_transformers.sentence_transformer.losses.multiple_negatives_ranking"


@pytest.fixture
def script():
    """A module that has imported a loss under its name and under another."""
    module = types.ModuleType("a_script")
    module.MultipleNegativesRankingLoss = module.MNRL = THEIRS[PLAIN]
    sys.modules["a_script"] = module
    yield module
    del sys.modules["a_script"]


def held():
    return {name: (vars(losses) | vars(multi_vector))[name] for name in THEIRS}


def test_names_are_replaced_in_all_modules_and_restored(script):
    mine = OURS[PLAIN]
    patch = ours.patch()
    try:
        assert held() == OURS
        assert sys.modules[SUBMODULE].MultipleNegativesRankingLoss is mine
        assert script.MultipleNegativesRankingLoss is script.MNRL is mine
        assert {"a_script.MNRL", f"{SUBMODULE}.MultipleNegativesRankingLoss"} <= set(patch.replaced)
        names = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the older path
            exec("from sentence_transformers.losses import MultipleNegativesRankingLoss as loss", names)
        assert names["loss"] is mine
        for name, kind in OURS.items():  # which stay derived from the library's
            assert THEIRS[name] in kind.__mro__
            assert getattr(ours, name) is kind
        loss = losses.MultipleNegativesRankingLoss(None, scale=4.0)
        assert type(loss) is mine
        assert isinstance(loss, THEIRS[PLAIN])
        assert "computed by fastqt" in repr(loss)
        assert "computed by fastqt" not in repr(THEIRS[PLAIN](None))
        assert "a_script.MNRL is fastqt's" in repr(patch).splitlines()
    finally:
        patch.undo()
    assert repr(patch) == "nothing is replaced"
    assert script.MultipleNegativesRankingLoss is script.MNRL is THEIRS[PLAIN]
    assert held() == THEIRS
    patch.undo()  # again does nothing
    assert held() == THEIRS


def test_as_a_context_also_within_another_and_after_an_error(script):
    with ours.patch():
        with ours.patch() as inner:
            assert inner.replaced == []
        assert held() == OURS
        script.MNRL = "another"
    assert held() == THEIRS
    assert script.MNRL == "another"  # What has been set in between stays.
    with pytest.raises(KeyError), ours.patch():
        raise KeyError
    assert held() == THEIRS
