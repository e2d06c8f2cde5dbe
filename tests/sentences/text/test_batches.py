"""Sentences against text read as a whole, batches against slices of lists, resuming, memory, rows."""

import gzip
import lzma
import random
import sys
import threading
import tracemalloc

import numpy as np
import pytest
import torch

from fastqt.errors import InputError
from fastqt.sentences.text import (
    Corpus,
    Position,
    Prompts,
    Span,
    TripletCorpus,
    Vocabulary,
    ahead,
    batches,
    read_blocks,
    read_triplets,
    reader,
)
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
    assert len(found) == len(sentences) // batch_size
    assert len(list(batches(files, vocabulary, batch_size, most=2))) == min(len(found), 2)


def test_a_corpus_that_is_too_small(corpus, vocabulary, tmp_path):
    shorter = r"shorter than a batch: 23 sentences in .*0\.txt, .*1\.txt, batch size 24"
    with pytest.raises(InputError, match=shorter):
        list(batches(corpus[0], vocabulary, 24))
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

    small, few = peak(4)
    large, size = peak(32)
    # A record of each block of 16 KiB. Eight bytes of each sentence would be more.
    assert large - small < (size - few) / 20
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
    for use in (
        lambda: list(span_batches(corpus[0], vocabulary, [24], [Span(Position(), 24)])),
        lambda: split(corpus[0], [Span(Position(), 60)], 2),
    ):
        with pytest.raises(InputError, match=r"the corpus has changed: .*1\.txt: fewer sentences than when"):
            use()


def test_a_corpus_in_memory_has_the_sentences_in_an_order_of_seed_and_epoch(corpus, vocabulary):
    files, sentences, _ = corpus
    whole = Corpus(files * 2, vocabulary)
    assert len(whole) == 46
    ordered = {}
    for sample in map(whole.sample, np.split(whole.order(seed=1, epoch=0), 2)):
        assert sample.tokens.shape == (len(sample.rows), sample.lengths.max())
        for row, tokens, length in zip(sample.rows.tolist(), sample.tokens, sample.lengths, strict=True):
            assert not tokens[length:].any()
            ordered[row] = tokens[:length].tolist()
    ids = [vocabulary.tokenizer.encode(sentence).ids for sentence in sentences]
    assert [ordered[row] for row in range(46)] == 2 * ids
    order = whole.order(seed=1, epoch=2).tolist()
    assert sorted(order) == list(range(46))
    assert order == Corpus(files * 2, vocabulary).order(seed=1, epoch=2).tolist()
    assert whole.order(seed=1, epoch=3).tolist() != order != whole.order(seed=2, epoch=2).tolist()


ROWS = [[f"anchor {n}", f"positive {n} of more", f"negative{n}"] for n in range(7)]
TEXT = (
    "\ufeff"
    + "\n".join("\t".join(row) for row in ROWS[:4])
    + "\n\n"
    + "\r\n".join("\t ".join(row) for row in ROWS[4:])
)


@pytest.mark.parametrize("together", [1, 3, 4096])
@pytest.mark.parametrize(
    ("ending", "opener"), [(".tsv", open), (".tsv.gz", gzip.open), (".tsv.xz", lzma.open)]
)
def test_rows_of_all_files_are_read_in_order(tmp_path, monkeypatch, ending, opener, together):
    monkeypatch.setattr("fastqt.sentences.text.rows.ROWS_TOGETHER", together)
    path = str(tmp_path / f"rows{ending}")
    with opener(path, "wb") as file:
        file.write(TEXT.encode())
    parts = list(read_triplets([path, path]))
    assert [row for part in parts for row in part] == 2 * ROWS
    assert max(map(len, parts)) == min(together, 14)


@pytest.mark.parametrize(
    ("text", "width", "message"),
    [
        ("a\tb\n\nc\td\te\n", None, r"line 3: want 2 columns as in line 1 of .*x.tsv, got 3"),
        ("a\tb\n", 3, "line 1: want 3 columns, got 2"),
        ("a\tb\nonly one\n", None, "line 2: want an anchor, a positive and any hard negatives with a tab"),
        ("a\tb\n\tb\n", None, "line 2: want text in each column, got none in column 1"),
        ("a\tb\t \n", None, "line 1: want text in each column, got none in column 3"),
        ("a\tb\n" + "c" * (1 << 20) + "\td\n", None, "line 2: want at most 1,048,576 bytes"),
        (b"a\tb\nc\t\xe9\n", None, "line 2 is not UTF-8"),
    ],
)
def test_a_wrong_row_is_refused_with_its_number(tmp_path, text, width, message):
    path = tmp_path / "x.tsv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=f"x.tsv: {message}"):
        list(read_triplets([str(path)], width))


def test_a_sample_has_all_anchors_before_all_positives(tmp_path):
    path = tmp_path / "x.tsv"
    path.write_text(TEXT)
    vocabulary = Vocabulary.build(text for row in ROWS for text in row)
    triplet_corpus = TripletCorpus([str(path)], vocabulary)
    assert (len(triplet_corpus), triplet_corpus.width) == (7, 3)
    assert sorted(triplet_corpus.order(0, 0)) == list(range(7))
    sample = triplet_corpus.sample(np.array([5, 0]))
    texts = [
        " ".join(vocabulary.tokenizer.id_to_token(int(token)) for token in tokens[:length])
        for tokens, length in zip(sample.tokens, sample.lengths, strict=True)
    ]
    assert texts == [ROWS[row][column] for column in range(3) for row in (5, 0)]
    assert sample.rows.tolist() == [5, 0]
    path.write_text("\n \n")
    with pytest.raises(InputError, match=r"the corpus is empty: no row in .*x\.tsv"):
        TripletCorpus([str(path)], Vocabulary.build(["a"]))


@pytest.fixture
def rows_of_words(tmp_path):
    """A file of 50 rows of three texts, and their vocabulary."""
    draw = random.Random(0)
    rows = [[" ".join(draw.choices("abcdefg", k=draw.randint(1, 9))) for _ in range(3)] for _ in range(50)]
    (tmp_path / "rows.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    return [str(tmp_path / "rows.tsv")], Vocabulary.build([*"abcdefg"], max_length=7)


class Recording:
    """A vocabulary that keeps what it was asked for, and may wait, or fail at a number of texts."""

    def __init__(self, vocabulary, may_encode=None, fails_after=1000):
        self.vocabulary, self.may_encode, self.fails_after = vocabulary, may_encode, fails_after
        self.texts = []

    def encode(self, texts):
        assert self.may_encode is None or self.may_encode.wait(60)
        self.texts += texts
        if len(self.texts) > self.fails_after:
            raise InputError("a text that no tokenizer takes")
        return self.vocabulary.encode(texts)


def same_samples(one, other, orders):
    for order in orders:
        for rows in np.array_split(order, 7):
            found, wanted = one.sample(rows), other.sample(rows)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_texts_that_are_encoded_ahead_are_the_same(rows_of_words, monkeypatch):
    """In the order in which rows are asked for, and in others, for two passes."""
    monkeypatch.setattr(ahead, "TEXTS_AT_ONCE", 8)
    files, vocabulary = rows_of_words
    prompts = Prompts("a b ", "c ")
    wanted = TripletCorpus(files, vocabulary, prompts=prompts)
    orders = [wanted.order(0, epoch) for epoch in range(2)]
    for order in (orders[0], np.arange(50)):
        begin, recording = threading.Event(), Recording(vocabulary)
        recording.may_encode = begin
        corpus = TripletCorpus(files, recording, prompts=prompts, waits=True)
        assert len(corpus) == 50
        assert np.array_equal(corpus.texts, wanted.texts)
        corpus.encode_ahead(order)
        assert recording.texts == []  # the one who reads the corpus has not waited
        begin.set()
        same_samples(corpus, wanted, orders)
        assert len(recording.texts) == 150
        first = [text for row in order[:10] for text in prompts.of_rows(rows_in(files))[row]]
        assert recording.texts[:30] == first


def rows_in(files):
    return [row for some in read_triplets(files) for row in some]


def test_many_texts_are_not_held_until_they_are_encoded(rows_of_words, monkeypatch):
    monkeypatch.setattr(sys.modules[TripletCorpus.__module__], "MOST_WAITING", 100)
    files, vocabulary = rows_of_words
    recording = Recording(vocabulary)
    corpus = TripletCorpus(files, recording, waits=True)
    assert len(recording.texts) == 150
    corpus.encode_ahead(corpus.order(0, 0))
    assert len(recording.texts) == 150
    same_samples(corpus, TripletCorpus(files, vocabulary), [np.arange(50)])


def test_an_error_of_a_tokenizer_is_raised_where_its_text_is_read(rows_of_words, monkeypatch):
    monkeypatch.setattr(ahead, "TEXTS_AT_ONCE", 30)
    files, vocabulary = rows_of_words
    corpus = TripletCorpus(files, Recording(vocabulary, fails_after=60), waits=True)
    corpus.encode_ahead(np.arange(50))
    for _ in range(2):
        with pytest.raises(InputError, match="a text that no tokenizer takes"):
            corpus.sample(np.array([0, 45]))


def test_nobody_encodes_for_a_corpus_that_is_gone(rows_of_words, monkeypatch):
    monkeypatch.setattr(ahead, "TEXTS_AT_ONCE", 30)
    files, vocabulary = rows_of_words
    others, begin = threading.enumerate(), threading.Event()
    recording = Recording(vocabulary, begin)
    corpus = TripletCorpus(files, recording, waits=True)
    corpus.encode_ahead(np.arange(50))
    (thread,) = set(threading.enumerate()) - {*others}
    del corpus
    begin.set()
    thread.join(60)
    assert not thread.is_alive()
    assert len(recording.texts) == 30
