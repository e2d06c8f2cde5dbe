"""Sentences of files, whatever their line ends, their compression and where reading begins."""

import gzip
import io
import lzma
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastqt.errors import InputError
from fastqt.sentences.text import (
    Position,
    read_blocks,
    reader,
)
from fastqt.sentences.text.reader import check_rereadable

LINES = st.lists(
    st.sampled_from(["", "  ", "One.", "Zwei — drei…", "四 五\r", "\tsix  ", "\u2028seven"]), max_size=12
)


def expected(texts):
    """(sentence, document, file, line) of every sentence of whole texts."""
    found, document, new = [], -1, True
    for file, text in enumerate(texts):
        new = True
        for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
            if not line.strip():
                new = True
                continue
            document += new
            new = False
            found.append((line.strip(), document, file, number))
    return found


def read(files, start=None):
    return [
        (sentence, block.documents[i], block.file, block.lines[i])
        for block in read_blocks(files, start)
        for i, sentence in enumerate(block.sentences)
    ]


def write_texts(folder: Path, texts, suffixes=("txt", "gz", "xz")):
    openers = {"txt": open, "gz": gzip.open, "xz": lzma.open}
    paths = []
    for number, text in enumerate(texts):
        suffix = suffixes[number % len(suffixes)]
        paths.append(str(folder / f"{number}.{suffix}"))
        with openers[suffix](paths[-1], "wb") as file:
            file.write(text.encode())
    return paths


@given(
    st.lists(st.tuples(st.booleans(), LINES, st.booleans()), min_size=1, max_size=4),
    st.integers(1, 40),
)
def test_sentences_and_documents_equal_those_of_the_whole_text(tmp_path_factory, contents, read_bytes):
    texts = ["\ufeff" * mark + "\n".join(lines) + "\n" * end for mark, lines, end in contents]
    files = write_texts(tmp_path_factory.mktemp("corpus"), texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "READ_BYTES", max(read_bytes, 3))
        assert read(files) == expected(texts)


def test_reading_continues_after_any_sentence(tmp_path, monkeypatch):
    texts = ["a b\nc\n\nd é ü\n", "\n\ne\n", "\ufefff\n\ng"]
    files = write_texts(tmp_path, texts)
    everything = expected(texts)
    for read_bytes in (4, 1000):
        monkeypatch.setattr(reader, "READ_BYTES", read_bytes)
        positions = [block.position(i) for block in read_blocks(files) for i in range(len(block.sentences))]
        for done, position in enumerate(positions, start=1):
            assert read(files, position) == everything[done:]
    assert read(files, Position()) == everything


def test_standard_input_and_one_that_is_closed(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n\nthree")))
    assert read(["-"]) == expected(["one\ntwo\n\nthree"])
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InputError, match="cannot read standard input: it is closed"):
        read(["-"])


def test_files_that_can_be_read_once_are_refused(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    check_rereadable("corpus", [str(tmp_path), str(tmp_path / "absent"), __file__])
    with pytest.raises(InputError, match=r"vectors: want files that can be read .* got standard input;"):
        check_rereadable("vectors", ["-"])
    with pytest.raises(InputError, match=r"corpus: want files that can be read .* got a pipe .*, .*/fifo;"):
        check_rereadable("corpus", [__file__, str(fifo)])


def test_what_is_no_text_is_refused(tmp_path):
    path = tmp_path / "x.txt"
    for data, message in (
        (b"fine\ngr" + "ün\n".encode("latin1"), r"x\.txt: line 2 is not UTF-8 \(byte 0xfc at byte offset 7 "),
        (b"\xef\xbb\xbfab\n\xff", "line 2 .* byte offset 6 "),  # after a byte order mark
        (b"short\n" + b"x" * (reader.LONGEST_LINE + reader.READ_BYTES), "line 2 is longer than 1 MiB"),
    ):
        path.write_bytes(data)
        with pytest.raises(InputError, match=message):
            read([str(path)])
    with pytest.raises(InputError, match=r"want a file, or a folder that .* wrote; state\.json is missing"):
        read([str(tmp_path)])


@pytest.mark.parametrize("suffix", ["gz", "xz"])
@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"text" + data])
def test_damaged_compressed_file_raises(tmp_path, suffix, damage):
    (path,) = write_texts(tmp_path, ["word\n" * 1000], [suffix])
    Path(path).write_bytes(damage(Path(path).read_bytes()))
    with pytest.raises(InputError, match=rf"0\.{suffix}: damaged or not what its name says"):
        read([path])


@pytest.mark.parametrize(
    ("name", "there"), [("a.tsv", "a.tsv.xz"), ("a.tsv.xz", "a.tsv"), ("a.tsv.gz", "a.tsv.xz"), ("a.tsv", "")]
)
def test_a_missing_file_that_is_there_in_another_form_is_named(tmp_path, name, there):
    if there:
        (tmp_path / there).touch()
    with pytest.raises(InputError) as error:
        list(read_blocks([str(tmp_path / name)]))
    hint = f"; there is {tmp_path / there}" if there else ""
    assert str(error.value) == f"no such file: {tmp_path / name}{hint}"
