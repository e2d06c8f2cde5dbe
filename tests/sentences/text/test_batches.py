"""Batches against slices of lists, resuming a pass, and memory that does not grow with the corpus."""

import random
import tracemalloc

import pytest
import torch

from fastqt.errors import InputError
from fastqt.sentences.text import Position, Span, Vocabulary, batches, read_blocks, reader
from fastqt.sentences.text.batches import equal_shares, span_batches, split


@pytest.fixture
def corpus(tmp_path):
    """Two files with 23 sentences of 1 to 4 words in six documents."""
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


def test_interrupted_pass_resumes_at_the_same_sentence(corpus, vocabulary):
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
def test_last_batch_is_dropped_if_it_is_too_small(corpus, vocabulary, smallest, kept):
    sizes = [len(batch.lengths) for batch in batches(corpus[0], vocabulary, 10, smallest=smallest)]
    assert sizes == [10, 10] + [3] * kept


def test_corpus_shorter_than_a_batch_raises(corpus, vocabulary):
    with pytest.raises(
        InputError, match=r"shorter than a batch: 23 sentences in .*0\.txt, .*1\.txt, batch size 24"
    ):
        list(batches(corpus[0], vocabulary, 24))


def test_empty_corpus_raises(tmp_path, vocabulary):
    (tmp_path / "blank.txt").write_text("\n \n\n")
    with pytest.raises(InputError, match=r"the corpus is empty: no sentence in .*blank\.txt"):
        list(batches([str(tmp_path / "blank.txt")], vocabulary, 2))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "READ_BYTES", 1 << 14)  # so that even a small corpus has many blocks
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


@pytest.mark.parametrize("read_bytes", [3, 20, 1 << 18])
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 30])
def test_parts_of_a_corpus_hold_every_sentence_once(corpus, vocabulary, parts, read_bytes, monkeypatch):
    monkeypatch.setattr(reader, "READ_BYTES", read_bytes)
    files, sentences, documents = corpus
    shares = split(files, [Span(Position(), 23)], parts)
    sizes = [sum(span.sentences for span in share) for share in shares]
    assert sizes == equal_shares(23, parts)
    ids = [vocabulary.tokenizer.encode(sentence).ids for sentence in sentences]
    found = []
    for size, share in zip(sizes, shares, strict=True):
        for batch, rest in span_batches(files, vocabulary, [size] if size else [], share):
            assert rest == ()
            assert batch.pieces is None
            for tokens, length, document in zip(*batch[:3], strict=True):
                found.append((tokens[:length].tolist(), int(document)))
    assert found == list(zip(ids, documents, strict=True))


def test_what_remains_of_parts_is_divided_again(corpus, vocabulary):
    """Sentences of two spans are never in one document, and each batch says what remains after it."""
    files, sentences, _ = corpus
    ids = [vocabulary.tokenizer.encode(sentence).ids for sentence in sentences]
    # Of 8, 8 and 7 sentences, the first 5 of each are taken. Two parts share the other 3 + 3 + 2.
    left = []
    for share in split(files, [Span(Position(), 23)], 3):
        ((batch, rest),) = span_batches(files, vocabulary, [5], share)
        left += rest
    assert [span.sentences for span in left] == [3, 3, 2]
    one, other = split(files, left, 2)
    assert [span.sentences for span in one + other] == [3, 1, 2, 2]
    (batch, rest), (last, nothing) = span_batches(files, vocabulary, [2, 2], one)
    assert [span.sentences for span in rest] == [1, 1]
    assert nothing == ()
    assert batch.pieces is None
    assert last.pieces.tolist() == [0, 1]
    assert last.document_ids.tolist() == [0, 1]
    rows = [tokens[:length].tolist() for tokens, length in zip(last.tokens, last.lengths, strict=True)]
    assert rows == [ids[7], ids[13]]
    ((again, _),) = span_batches(files, vocabulary, [2], rest)
    assert torch.equal(again.tokens, last.tokens)


def test_parts_of_a_corpus_that_has_shrunk_are_refused(corpus, vocabulary):
    with pytest.raises(InputError, match=r"the corpus has changed: .*1\.txt: fewer sentences than when"):
        list(span_batches(corpus[0], vocabulary, [24], [Span(Position(), 24)]))
    with pytest.raises(InputError, match=r"the corpus has changed: .*1\.txt: fewer sentences than when"):
        split(corpus[0], [Span(Position(), 60)], 2)
