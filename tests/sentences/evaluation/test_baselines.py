"""Averages of word vectors, checked by hand, and models with random weights."""

import lzma

import numpy as np
import pytest
import torch

from fastqt.errors import InputError
from fastqt.sentences.cli import main
from fastqt.sentences.evaluation.encoders import WordVectors, load_encoder, random_encoder, tokens
from fastqt.sentences.inference.encoder import SentenceEncoder
from tests.shared.tolerances import FLOAT32

WORDS = ["the", "cat", "don't", "2", "!"]
VECTORS = np.array([[1.0, 0], [0, 2], [3, 3], [-1, 1], [0.5, 0]], dtype=np.float32)
COUNTS = np.array([900, 60, 30, 10, 0])


def test_tokens_are_words_numbers_and_marks():
    assert tokens("The CAT's well-known 20 mice: “don’t!”_") == [
        *["the", "cat's", "well-known", "20", "mice", ":", "“", "don't", "!", "”", "_"]
    ]


def test_a_mean_of_word_vectors_by_hand():
    found = WordVectors(WORDS, VECTORS)(["The cat, the dog!", "Don’t", "nothing known", ""])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [[2.5 / 4, 0.5], [3, 3], [0, 0], [0, 0]], rtol=FLOAT32)


def test_sif_by_hand(files):
    """The file of counts has 1,000 further occurrences, of words without a vector."""
    texts = ["the cat", "cat 2 !", "don't the the cat", "! ! 2"]
    rows = VECTORS * (1e-3 / (1e-3 + COUNTS / 2000))[:, None]
    means = np.array([rows[[WORDS.index(word) for word in text.split()]].mean(axis=0) for text in texts])
    sif = load_encoder(f"sif:{files}/w.txt,{files}/counts.txt").encode
    np.testing.assert_allclose(sif(texts), means, rtol=FLOAT32)
    _, _, directions = np.linalg.svd(means)
    wanted = means - means @ np.outer(directions[0], directions[0])
    np.testing.assert_allclose(sif.per_task(sif(texts)), wanted, atol=FLOAT32)


@pytest.fixture
def files(tmp_path):
    """The same vectors plain and compressed, and counts that include two words without a vector."""
    lines = [f"{word} {' '.join(map(str, row))}\n" for word, row in zip(WORDS, VECTORS.tolist(), strict=True)]
    (tmp_path / "w.txt").write_text("".join(lines))
    with lzma.open(tmp_path / "w.txt.xz", "wt") as file:
        file.writelines(lines)
    counts = dict(zip(WORDS, COUNTS.tolist(), strict=True)) | {"dog": 500, "of": 500}
    del counts["!"]
    (tmp_path / "counts.txt").write_text("".join(f"{word} {count}\n" for word, count in counts.items()))
    return tmp_path


def test_word_vectors_are_read_from_their_files(files):
    texts = ["the cat don't", "2 !"]
    wanted = WordVectors(WORDS, VECTORS)(texts)
    keys = set()
    for name in ("w.txt", "w.txt.xz"):
        named = load_encoder(f"word-vectors:{files}/{name}")
        np.testing.assert_array_equal(named.encode(texts), wanted)
        keys.add(named.identity)
    other = load_encoder(f"sif:{files}/w.txt,{files}/counts.txt")
    assert len({*keys, other.identity}) == 3


def test_files_without_word_vectors_are_refused(files):
    (files / "ragged.txt").write_text("a 1 2\nb 1\n")
    for name, message in (
        ("word-vectors:-", "model: want files that can be read more than once, got standard input"),
        ("word-vectors:none.txt", "no such file: none.txt"),
        (f"word-vectors:{files}/ragged.txt", "ragged.txt: want a word and equally many numbers a line"),
        (f"sif:{files}/w.txt", "model: want sif:FILE,COUNTS, got "),
        (f"sif:{files}/w.txt,{files}/ragged.txt", "ragged.txt: want a word and a whole number a line"),
        (f"sif:{files}/w.txt,a,b", "model: want sif:FILE,COUNTS, got "),
    ):
        with pytest.raises(InputError, match=message):
            load_encoder(name)
    with pytest.raises(InputError, match="raw: want a trained model, got word-vectors:"):
        load_encoder(f"word-vectors:{files}/w.txt", raw=True)


@pytest.mark.parametrize("kind", ["bow", "gru"])
def test_a_random_encoder_is_the_model_before_training(kind, planted, tmp_path):
    run = tmp_path / "run"
    small = ["--encoder", kind, "--word-dim", "8", "--hidden-size", "6", "--batch-size", "40"]
    assert main(["train", planted[0], "--out", str(run), *small, "--context-size", "1"]) == 0
    texts = ["place1 topic2word1", "place0 unheard"]
    before = torch.get_rng_state()
    fresh, again, other = (random_encoder(run, seed=seed).encode(texts) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    assert fresh.shape == SentenceEncoder.load(run).encode(texts).shape
    assert (fresh == again).all()
    for different in (other, SentenceEncoder.load(run).encode(texts)):
        assert np.abs(fresh - different).max() > 0.01
    named = [load_encoder(f"random:{run}", seed=seed) for seed in (5, 6)]
    assert (named[0].encode(texts) == fresh).all()
    trained = [load_encoder(str(run), raw=raw) for raw in (False, True)]
    assert np.linalg.norm(trained[0].encode(texts), axis=1) == pytest.approx([2**0.5] * 2)
    assert np.abs(trained[0].encode(texts) - trained[1].encode(texts)).max() > 0.01
    assert len({encoder.identity for encoder in (*named, *trained)}) == 4
    (run / "model.safetensors").unlink()
    assert (load_encoder(f"random:{run}", seed=5).encode(texts) == fresh).all()
    with pytest.raises(InputError, match="no trained model: none is not a directory"):
        load_encoder("random:none")
