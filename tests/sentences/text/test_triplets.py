"""Rows of texts are read as they were written, and a wrong row is refused with its number."""

import gzip
import lzma

import numpy as np
import pytest

from fastqt.errors import InputError
from fastqt.sentences.text import TripletCorpus, Vocabulary, read_triplets, triplets

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
    monkeypatch.setattr(triplets, "ROWS_TOGETHER", together)
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
        ("a\tb\n" + "c" * (1 << 20) + "\td\n", None, "line 2 is longer than 1 MiB"),
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
    corpus = TripletCorpus([str(path)], vocabulary)
    assert (len(corpus), corpus.width) == (7, 3)
    assert sorted(corpus.order(0, 0)) == list(range(7))
    sample = corpus.sample(np.array([5, 0]))
    texts = [
        " ".join(vocabulary.tokenizer.id_to_token(int(token)) for token in tokens[:length])
        for tokens, length in zip(sample.tokens, sample.lengths, strict=True)
    ]
    assert texts == [ROWS[row][column] for column in range(3) for row in (5, 0)]
    assert sample.rows.tolist() == [5, 0]


def test_a_corpus_without_rows_is_refused(tmp_path):
    path = tmp_path / "x.tsv"
    path.write_text("\n \n")
    with pytest.raises(InputError, match=r"the corpus is empty: no row in .*x\.tsv"):
        TripletCorpus([str(path)], Vocabulary.build(["a"]))
