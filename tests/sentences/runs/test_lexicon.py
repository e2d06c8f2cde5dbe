"""The digest of a run's vocabulary tells any two apart."""

from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.lexicon import lexicon_digest


def test_the_digest_of_a_vocabulary_is_that_of_its_bytes(tmp_path):
    config = TrainConfig(("x",))
    found = set()
    for text in ("one", "two", "one"):
        (tmp_path / "vocabulary.json").write_text(text)
        found.add(lexicon_digest(config, tmp_path))
    assert len(found) == 2
    folder = TrainConfig(("x",), encoder="huggingface", checkpoint="y")
    (tmp_path / "huggingface" / "deep").mkdir(parents=True)
    found = set()
    for name, text in (("a", "one"), ("a", "two"), ("deep/b", "")):
        (tmp_path / "huggingface" / name).write_text(text)
        found.add(lexicon_digest(folder, tmp_path))
    assert len(found) == 3
