"""Averages of word vectors, checked by hand, and models with random weights."""

import json
import lzma

import numpy as np
import pytest
import torch

from fastqt.errors import InputError
from fastqt.sentences.cli import main
from fastqt.sentences.evaluation import SIF, WordVectors, load_encoder, random_encoder
from fastqt.sentences.evaluation.baselines import tokens
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
    with pytest.raises(ValueError, match=r"vectors: want \(5, d\) for 5 words, got \(4, 2\)"):
        WordVectors(WORDS, VECTORS[:4])


def test_sif_by_hand():
    texts = ["the cat", "cat 2 !", "don't the the cat", "! ! 2"]
    rows = VECTORS * (1e-3 / (1e-3 + COUNTS / COUNTS.sum()))[:, None]
    means = np.array([rows[[WORDS.index(word) for word in text.split()]].mean(axis=0) for text in texts])
    sif = SIF(WORDS, VECTORS, COUNTS)
    np.testing.assert_allclose(sif(texts), means, rtol=FLOAT32)
    _, _, directions = np.linalg.svd(means)
    wanted = means - means @ np.outer(directions[0], directions[0])
    np.testing.assert_allclose(sif.encode(texts), wanted, atol=FLOAT32)
    np.testing.assert_allclose(sif.per_task(sif(texts)), wanted, atol=FLOAT32)


@pytest.fixture
def files(tmp_path):
    """The same vectors as .npz and as text, and counts that include two words without a vector."""
    np.savez(tmp_path / "w.npz", words=np.array(WORDS), vectors=VECTORS.astype(np.float16), counts=COUNTS)
    lines = [f"{word} {' '.join(map(str, row))}\n" for word, row in zip(WORDS, VECTORS.tolist(), strict=True)]
    (tmp_path / "w.txt").write_text("".join(lines))
    with lzma.open(tmp_path / "w.txt.xz", "wt") as file:
        file.writelines(lines)
    rows = {word: [*row, 0.5, 1] for word, row in zip(WORDS, VECTORS.tolist(), strict=True)}
    (tmp_path / "w.json").write_text(json.dumps({"dimensions": VECTORS.shape[1], "vectors": rows}))
    counts = dict(zip(WORDS, COUNTS.tolist(), strict=True)) | {"dog": 500, "of": 500}
    del counts["!"]
    (tmp_path / "counts.txt").write_text("".join(f"{word} {count}\n" for word, count in counts.items()))
    return tmp_path


def test_word_vectors_are_read_from_all_formats(files):
    texts = ["the cat don't", "2 !"]
    wanted = WordVectors(WORDS, VECTORS)(texts)
    keys = set()
    for name in ("w.npz", "w.txt", "w.txt.xz", "w.json"):
        named = load_encoder(f"word-vectors:{files}/{name}")
        np.testing.assert_array_equal(named.encode(texts), wanted)
        keys.add(named.key)
    own, other = load_encoder(f"sif:{files}/w.npz"), load_encoder(f"sif:{files}/w.txt,{files}/counts.txt")
    np.testing.assert_allclose(own.encode(texts), SIF(WORDS, VECTORS, COUNTS)(texts), rtol=FLOAT32)
    # The file of counts has 1,000 further occurrences, so that each share is halved.
    halved = SIF(WORDS, VECTORS, COUNTS, total=2000)
    np.testing.assert_allclose(other.encode(texts), halved(texts), rtol=FLOAT32)
    assert len({*keys, own.key, other.key}) == 6


def test_files_without_word_vectors_are_refused(files):
    (files / "ragged.txt").write_text("a 1 2\nb 1\n")
    np.savez(files / "empty.npz", other=VECTORS)
    for name, message in (
        ("word-vectors:-", "model: want files that can be read more than once, got standard input"),
        ("word-vectors:none.npz", "no such file: none.npz"),
        (f"word-vectors:{files}/ragged.txt", "ragged.txt: want a word and equally many numbers a line"),
        (f"word-vectors:{files}/empty.npz", "empty.npz is not an .npz with `words` and `vectors`"),
        (f"sif:{files}/w.txt", "w.txt holds no `counts`: name a file of word counts too"),
        (f"sif:{files}/w.txt,{files}/ragged.txt", "ragged.txt: want a word and a whole number a line"),
        (f"sif:{files}/w.txt,a,b", "model: want sif:FILE or sif:FILE,COUNTS, got "),
    ):
        with pytest.raises(InputError, match=message):
            load_encoder(name)
    with pytest.raises(InputError, match="raw: want a trained model, got word-vectors:"):
        load_encoder(f"word-vectors:{files}/w.npz", raw=True)


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
    assert len({encoder.key for encoder in (*named, *trained)}) == 4
    (run / "model.safetensors").unlink()
    assert (load_encoder(f"random:{run}", seed=5).encode(texts) == fresh).all()
    with pytest.raises(InputError, match="no trained model: none is not a directory"):
        load_encoder("random:none")
