"""Reading block by block gives the sentences of the whole text. Files that cannot be read are named."""

import gzip
import io
import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastqt.errors import InputError
from fastqt.text import Position, read_blocks, reader

LINES = st.lists(
    st.sampled_from(["", "  ", "One.", "Zwei — drei…", "四 五\r", "\tsix  ", "\u2028seven"]), max_size=12
)


def expected(texts):
    """(sentence, document, file, line) of every sentence, from texts that are read whole."""
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


def write(folder: Path, texts, suffixes=("txt", "gz", "xz")):
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
def test_sentences_and_documents_are_those_of_the_whole_text(tmp_path_factory, contents, read_bytes):
    texts = ["\ufeff" * mark + "\n".join(lines) + "\n" * end for mark, lines, end in contents]
    files = write(tmp_path_factory.mktemp("corpus"), texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "READ_BYTES", max(read_bytes, 3))
        assert read(files) == expected(texts)


def test_reading_continues_after_any_sentence(tmp_path, monkeypatch):
    texts = ["a b\nc\n\nd é ü\n", "\n\ne\n", "\ufefff\n\ng"]
    files = write(tmp_path, texts)
    everything = expected(texts)
    for read_bytes in (4, 1000):
        monkeypatch.setattr(reader, "READ_BYTES", read_bytes)
        positions = [block.position(i) for block in read_blocks(files) for i in range(len(block.sentences))]
        for done, position in enumerate(positions, start=1):
            assert read(files, position) == everything[done:]
    assert read(files, Position()) == everything


def test_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n\nthree")))
    assert read(["-"]) == expected(["one\ntwo\n\nthree"])


def test_what_is_not_utf8_is_found(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"fine\ngr" + "ün\n".encode("latin1"))
    with pytest.raises(InputError, match=r"latin\.txt: line 2 is not UTF-8 \(byte 0xfc at byte offset 7 "):
        read([str(path)])


def test_the_offset_counts_the_byte_order_mark(tmp_path):
    path = tmp_path / "marked.txt"
    path.write_bytes(b"\xef\xbb\xbfab\n\xff")
    with pytest.raises(InputError, match=r"line 2 .* byte offset 6 "):
        read([str(path)])


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(InputError, match=r"no such file: .*nothing\.txt"):
        read([str(tmp_path / "nothing.txt")])


def test_a_directory(tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*: Is a directory"):
        read([str(tmp_path)])


@pytest.mark.parametrize("suffix", ["gz", "xz"])
@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"text" + data])
def test_damaged_compression(tmp_path, suffix, damage):
    (path,) = write(tmp_path, ["word\n" * 1000], [suffix])
    Path(path).write_bytes(damage(Path(path).read_bytes()))
    with pytest.raises(InputError, match=rf"0\.{suffix}: damaged or not what its name says"):
        read([path])


def test_a_line_without_end(tmp_path):
    path = tmp_path / "long.txt"
    path.write_bytes(b"short\n" + b"x" * (reader.LONGEST_LINE + reader.READ_BYTES))
    with pytest.raises(InputError, match=r"line 2 is longer than 1 MiB"):
        read([str(path)])
