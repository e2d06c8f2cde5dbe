"""Batches equal lists cut by hand, can be resumed, and need no more memory for a larger corpus."""

import random
import tracemalloc

import pytest
import torch

from fastqt.errors import InputError
from fastqt.text import Vocabulary, batches, read_blocks, reader


@pytest.fixture
def corpus(tmp_path):
    """Two files of 23 sentences in all, 1 to 4 words each, in six documents."""
    generator = random.Random(0)
    files, sentences, documents = [], [], []
    for number, sizes in enumerate([(5, 1, 7), (2, 4, 4)]):
        texts = []
        for size in sizes:
            document = [
                " ".join(generator.choices("abcdefg", k=generator.randint(1, 4))) for _ in range(size)
            ]
            documents += [(documents[-1] if documents else -1) + 1] * size
            sentences += document
            texts.append("\n".join(document))
        files.append(str(tmp_path / f"{number}.txt"))
        (tmp_path / f"{number}.txt").write_text("\n\n".join(texts))
    return files, sentences, documents


@pytest.fixture
def vocabulary(corpus):
    return Vocabulary.build(corpus[1], 10)


@pytest.mark.parametrize("read_bytes", [3, 20, 1 << 18])
@pytest.mark.parametrize("batch_size", [1, 4, 7, 23])
def test_batches_are_consecutive_sentences(corpus, vocabulary, batch_size, read_bytes, monkeypatch):
    monkeypatch.setattr(reader, "READ_BYTES", read_bytes)
    files, sentences, documents = corpus
    ids = [vocabulary.tokenizer.encode(sentence).ids for sentence in sentences]
    found = list(batches(files, vocabulary, batch_size))
    for number, batch in enumerate(found):
        part = ids[number * batch_size : (number + 1) * batch_size]
        longest = max(map(len, part))
        assert batch.tokens.tolist() == [line + [0] * (longest - len(line)) for line in part]
        assert batch.lengths.tolist() == [len(line) for line in part]
        assert batch.document_ids.tolist() == documents[number * batch_size : (number + 1) * batch_size]
        assert {tensor.dtype for tensor in batch[:3]} == {torch.int64}
    assert sum(len(batch.lengths) for batch in found) == len(sentences)


def test_a_broken_pass_goes_on_where_it_was(corpus, vocabulary):
    files = corpus[0]
    found = list(batches(files, vocabulary, 4))
    for done, batch in enumerate(found, start=1):
        rest = list(batches(files, vocabulary, 4, start=batch.position))
        assert len(rest) == len(found) - done
        for one, other in zip(rest, found[done:], strict=True):
            assert torch.equal(one.tokens, other.tokens)
            assert torch.equal(one.document_ids, other.document_ids)
            assert one.position == other.position


@pytest.mark.parametrize(("smallest", "kept"), [(3, True), (4, False)])
def test_a_small_last_batch(corpus, vocabulary, smallest, kept):
    sizes = [len(batch.lengths) for batch in batches(corpus[0], vocabulary, 10, smallest=smallest)]
    assert sizes == [10, 10] + [3] * kept


def test_a_corpus_shorter_than_a_batch(corpus, vocabulary):
    with pytest.raises(
        InputError, match=r"shorter than a batch: 23 sentences in .*0\.txt, .*1\.txt, batch size 24"
    ):
        list(batches(corpus[0], vocabulary, 24))


def test_an_empty_corpus(tmp_path, vocabulary):
    (tmp_path / "blank.txt").write_text("\n \n\n")
    with pytest.raises(InputError, match=r"the corpus is empty: no sentence in .*blank\.txt"):
        list(batches([str(tmp_path / "blank.txt")], vocabulary, 2))


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "READ_BYTES", 1 << 14)  # so that a small corpus is many blocks
    generator = random.Random(0)
    words = [f"w{number}" for number in range(500)]
    sentences = [" ".join(generator.choices(words, k=20)) for _ in range(1000)]

    def peak(repeats):
        path = tmp_path / f"{repeats}.txt"
        with path.open("w") as file:
            for _ in range(repeats):
                file.write("\n".join(sentences) + "\n\n")
        tracemalloc.start()
        vocabulary = Vocabulary.build((s for block in read_blocks([str(path)]) for s in block.sentences), 400)
        for _ in batches([str(path)], vocabulary, 300):
            pass
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most, path.stat().st_size

    small, _ = peak(4)
    large, size = peak(32)
    assert large < 1.1 * small
    assert large < size / 2
