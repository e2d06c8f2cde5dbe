"""Settings that do not go with word vectors, or not without them, are refused in words."""

import json

import pytest

from fastqt.errors import InputError
from fastqt.sentences.cli.arguments import build_parser
from fastqt.sentences.runs.config import TrainConfig

FILE = "v.npz"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encoder": "mc-bow"}, "vectors: want a file of word vectors with encoder mc-bow, got None"),
        ({"freeze_vectors": True}, "vectors: want a file of word vectors with freeze_vectors, got None"),
        ({"vectors_scale": 2.0}, "vectors: want a file of word vectors with vectors_scale, got None"),
        ({"vectors": FILE, "model": "gloss-bow"}, "vectors: want none with model gloss-bow, got 'v.npz'"),
        (
            {"vectors": FILE, "encoder": "huggingface", "checkpoint": "c"},
            "vectors: want none with encoder huggingface, got 'v.npz'",
        ),
        (
            {"vectors": FILE, "vocabulary": "t.json"},
            "vectors: want none with a vocabulary of a file, got 'v.npz'",
        ),
        (
            {"vectors": FILE, "freeze_vectors": True},
            "freeze_vectors: want none with encoder bow, which has no other weights",
        ),
        (
            {"vectors": FILE, "freeze_vectors": True, "encoder": "mc-gru"},
            "freeze_vectors: want none with encoder mc-gru, which has a frozen and a trained table",
        ),
        ({"trained_dim": 8}, "trained_dim: want it with an mc- encoder alone, got 8"),
        ({"vectors": FILE, "vectors_scale": 0.0}, "vectors_scale: want at least 1e-06"),
        ({"vectors": FILE, "freeze_vectors": 1}, "freeze_vectors: want true or false, got 1"),
        ({"vectors": FILE, "encoder": "mc-bigru", "hidden_size": 7}, "hidden_size: want an even number"),
        ({"encoder": "combine", "hidden_size": 7}, "hidden_size: want an even number for combine, got 7"),
        ({"encoder": "combine", "model": "simcse"}, "encoder: want combine with model quickthoughts alone"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(InputError) as caught:
        TrainConfig(("x",), **settings)
    assert str(caught.value).startswith(message)


def test_the_width_is_that_of_the_file_which_a_stored_run_knows(tmp_path):
    assert TrainConfig(("x",)).word_dim == 300
    config = TrainConfig(("x",), vectors=FILE)
    assert config.word_dim is None
    (tmp_path / "config.json").write_text(config.to_json())
    with pytest.raises(InputError, match=r"config\.json: word_dim: want an integer, got None"):
        TrainConfig.load(tmp_path / "config.json")
    values = json.loads(config.to_json()) | {"word_dim": 50}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert TrainConfig.load(tmp_path / "config.json") == TrainConfig(("x",), vectors=FILE, word_dim=50)


def test_a_bag_of_two_channels_has_the_batches_of_a_bag():
    bag, channels = TrainConfig(("x",)), TrainConfig(("x",), encoder="mc-bow", vectors=FILE)
    assert (channels.batch_size, channels.context_size) == (bag.batch_size, bag.context_size) == (1500, 3)


def test_a_run_is_resumed_with_its_vectors_wherever_they_lie():
    stored = TrainConfig(("x",), encoder="gru", vectors=FILE, word_dim=50)
    TrainConfig(("x",), encoder="gru", vectors="elsewhere", word_dim=50).check_resumes(stored)
    without = TrainConfig(("x",), encoder="gru", word_dim=50)
    for one, other in ((stored, without), (without, stored)):
        with pytest.raises(InputError, match=f"cannot resume: vectors is {one.vectors!r}, but"):
            one.check_resumes(other)
    with pytest.raises(InputError, match="cannot resume: freeze_vectors is True"):
        TrainConfig(("x",), encoder="gru", vectors=FILE, word_dim=50, freeze_vectors=True).check_resumes(
            stored
        )


def test_the_options_of_the_command_line():
    parser = build_parser()
    given = parser.parse_args(["train", "x", "--out", "d", "--vectors", "v", "--freeze-vectors"])
    assert (given.vectors, given.freeze_vectors) == ("v", True)
    assert not hasattr(parser.parse_args(["train", "x", "--out", "d"]), "freeze_vectors")
