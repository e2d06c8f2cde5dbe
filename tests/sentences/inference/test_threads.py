"""Encoders, indexes and exported modules in several threads: the vectors are those of one thread."""

from functools import partial

import numpy as np
import pytest

from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.index import Index, IndexOptions, build_index
from fastqt.sentences.options.encoders import ENCODERS
from fastqt.sentences.text import Vocabulary
from tests.shared.clustered import Clustered, write_corpus
from tests.shared.stored_runs import write_run
from tests.shared.threads import Switching, in_threads
from tests.shared.tiny_bert import write_tiny_bert
from tests.shared.tokenizer_files import TOKENIZERS

RUNS = {
    name: {"encoder": name, **{setting: f"{setting}.txt" for setting in kind.needs}}
    for name, kind in ENCODERS.items()
}
RUNS["huggingface"] |= {"model": "simcse", "pooling": "mean"}
RUNS["sub-words"] = {"encoder": "gru", "max_length": 40}
RUNS["gloss"] = {"model": "gloss-bow"}


def texts(count):
    """Calls' texts: most have words that no call before had, so that every call adds to a cache."""
    return [[f"the cat{n}-{i} sat on{n}, a mat." for i in range(5)] for n in range(count)]


def new_run(folder, name):
    settings = dict(RUNS[name])
    if "vocabulary" in settings or name == "sub-words":
        settings["vocabulary"] = str(folder / "tokenizer.json")
        TOKENIZERS["bpe"]().save(settings["vocabulary"])
    if name == "huggingface":
        settings["checkpoint"] = str(folder / "checkpoint")
        write_tiny_bert(folder / "checkpoint")
    return write_run(folder / "run", **settings)


@pytest.mark.parametrize(
    "name", ["bow", *(pytest.param(x, marks=pytest.mark.slow) for x in RUNS if x != "bow")]
)
def test_an_encoder_and_a_module_of_sentence_transformers(tmp_path, name):
    """The latter for what it does itself: of words, of sub-words, and of a checkpoint."""
    run = new_run(tmp_path, name)
    calls = texts(8 if name == "gloss" else 64)
    one = SentenceEncoder.load(run, "cpu")
    wanted = [one.encode(call) for call in calls]
    encoder = SentenceEncoder.load(run, "cpu")
    for _ in range(2):  # the second time with a cache that is full of them
        vectors = in_threads([partial(encoder.encode, call) for call in calls])
        np.testing.assert_allclose(vectors, wanted, atol=1e-5, rtol=0)
    np.testing.assert_allclose([encoder.encode(call) for call in calls[:50]], wanted[:50], atol=1e-5, rtol=0)
    if name in ("bow", "sub-words", "huggingface"):
        library = pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
        from fastqt.sentences.inference.sentence_transformers import FastqtEncoder

        model = library.SentenceTransformer(modules=[FastqtEncoder.of_run(run)], device="cpu")
        vectors = in_threads([partial(model.encode, call, show_progress_bar=False) for call in calls])
        np.testing.assert_allclose(vectors, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["flat", "ivf"])
def test_an_index(tmp_path, kind):
    """Calls of several efforts, which must not have those of each other."""
    rows, efforts = 600, (1, 3, 16, 40)
    encoder = Clustered(rows)
    corpus = write_corpus(tmp_path / "a.txt", range(rows))
    build_index(encoder, corpus, tmp_path / "x.index", IndexOptions(kind=kind))
    queries = encoder.matrix / np.linalg.norm(encoder.matrix, axis=1, keepdims=True)
    blocks = [(queries[n : n + 4], 5, efforts[n % 4]) for n in range(200)]
    one = Index(tmp_path / "x.index")
    wanted = [one.searcher.search(*block) for block in blocks]
    index = Index(tmp_path / "x.index")
    found = in_threads([partial(index.searcher.search, *block) for block in blocks])
    np.testing.assert_array_equal([rows for _, rows in found], [rows for _, rows in wanted])
    np.testing.assert_allclose([each for each, _ in found], [each for each, _ in wanted], atol=1e-6)


@pytest.mark.parametrize("unknown", ["keep", "drop"])
def test_a_thread_encodes_while_another_one_is_about_to_keep_new_words(unknown):
    vocabulary = Vocabulary.build(["a b c d e, f."], 9, unknown=unknown)
    calls = first, second, _ = ["a b x", "e, e, f."], ["c d b a", "f. y"], ["f, e. b"]
    alone = [Vocabulary(vocabulary.tokenizer, unknown=unknown).encode(call) for call in calls]
    results = []
    vocabulary.tokenizer = Switching(
        vocabulary.tokenizer, "encode_batch_fast", lambda: results.append(vocabulary.encode(second))
    )
    results.append(vocabulary.encode(first))
    results += map(vocabulary.encode, calls)
    for each, wanted in zip(results, [alone[1], alone[1], alone[0], *alone], strict=True):
        assert [part.tolist() for part in each] == [part.tolist() for part in wanted]


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (lambda: Vocabulary.build(["a-b-c-d-e"], 9, max_length=2, unknown="drop"), ["~-~-e"]),
        (lambda: Vocabulary(TOKENIZERS["bpe"]()), ["topic", "a longer one"]),
    ],
    ids=["words", "sub-words"],
)
def test_a_thread_encodes_while_another_one_writes_the_vocabulary(make, texts):
    lexicon, results = make(), []
    lexicon.tokenizer = Switching(lexicon.tokenizer, "to_str", lambda: results.append(lexicon.encode(texts)))
    assert lexicon.to_json() == make().to_json()
    for result in results:
        assert [part.tolist() for part in result] == [part.tolist() for part in make().encode(texts)]
    assert len(results) == 2
