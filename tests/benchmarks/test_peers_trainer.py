"""A training with the library's trainer and ours in its place has the loss curve of one with its own."""

import pytest

st = pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
pytest.importorskip("accelerate", reason="the extra st is not installed")
pytest.importorskip("datasets", reason="the extra st is not installed")

from benchmarks import peers_trainer  # noqa: E402
from benchmarks.peers_trainer import (  # noqa: E402
    CACHED,
    DIRECTIONS,
    GUIDED,
    PLAIN,
    SIDES,
    Configuration,
    curve,
)
from tests.shared.tiny_bert import write_tiny_bert  # noqa: E402

EQUAL = 1e-5

CONFIGURATIONS = [
    Configuration(PLAIN, 3, {"hardness_mode": "all_negatives", "hardness_strength": 5.0}),
    Configuration(CACHED, 4, {"mini_batch_size": 3, "directions": DIRECTIONS}),
    Configuration(GUIDED, 3, dimensions=(8, 4), margin=0.01),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_tiny_bert(folder)
    model = st.SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    model.model_card_data.generate_widget_examples = False
    return model


def check(configuration, model, **how):
    """The losses agree, and dropout and the optimiser have made each step another."""
    wanted, found = (curve(side, configuration, model, **how) for side in SIDES)
    assert len(wanted) == len(set(wanted)) == how["steps"]
    assert peers_trainer.difference(found, wanted) < EQUAL


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=Configuration.words)
@pytest.mark.thinned(9)
def test_a_tiny_model(tiny, configuration):
    check(configuration, tiny, steps=3, batch=4, rate=1e-3)


def test_stored_curves_are_equal():
    runs = peers_trainer.stored()
    trained = {"equality": peers_trainer.configurations(), "recipes": peers_trainer.recipes()}
    assert "equality" in runs
    for kind, compared in ((kind, trained[kind]) for kind in trained if kind in runs):
        names = [row["configuration"] for row in runs[kind]["found"]]
        assert names == [configuration.words() for configuration in compared]
        assert (runs[kind]["steps"], runs[kind]["batch"]) == (peers_trainer.STEPS, peers_trainer.BATCH)
    assert max(row["largest_difference"] for row in peers_trainer.stored_curves()) < EQUAL
