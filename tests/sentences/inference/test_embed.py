"""Every line of a text has its row of vectors, in order; a failure leaves the old file."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from fastqt.errors import InputError
from fastqt.sentences.inference import embed
from fastqt.sentences.inference.embed import write_vectors
from fastqt.sentences.text import reader
from tests.shared.sentence_vectors import normalized_halves, vectors


@pytest.mark.parametrize("normalize", [True, False])
def test_rows_are_the_lines_in_order(encoder, planted, tmp_path, normalize, monkeypatch):
    monkeypatch.setattr(reader, "READ_BYTES", 1000)  # several blocks
    monkeypatch.setattr(embed, "LINES", 7)
    shape = write_vectors(encoder, planted[1], tmp_path / "x.npy", normalize=normalize)
    matrix = np.load(tmp_path / "x.npy")
    wanted = vectors(encoder, planted[1])
    if normalize:
        wanted = normalized_halves(wanted)
    sentences = [bool(line) for line in Path(planted[1]).read_text().split("\n")]
    assert matrix.dtype == np.float32
    assert matrix.shape == shape == (len(sentences), wanted.shape[1])
    assert sum(sentences) < len(sentences)
    np.testing.assert_allclose(matrix[sentences], wanted, rtol=1e-5, atol=1e-6)
    assert not matrix[np.logical_not(sentences)].any()
    assert {path.name for path in tmp_path.iterdir()} == {"x.npy", "planted.txt", "held_out.txt"}


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\n \t\n"])
@pytest.mark.parametrize("begin", ["", "\n", "\ufeff", "\ufeff\n"])
@pytest.mark.parametrize("read_bytes", [3, 1000])
def test_there_are_as_many_rows_as_lines(encoder, tmp_path, begin, end, read_bytes, monkeypatch):
    """Blank lines count wherever they are, and so does a last line without a line feed."""
    monkeypatch.setattr(reader, "READ_BYTES", read_bytes)
    text = tmp_path / "text.txt"
    text.write_text(f"{begin}place1\r\n\n  \nplace2{end}", encoding="utf-8", newline="")
    with text.open(encoding="utf-8-sig", newline="\n") as file:
        lines = [line.strip() for line in file]
    write_vectors(encoder, str(text), tmp_path / "x.npy")
    matrix = np.load(tmp_path / "x.npy")
    assert matrix.any(axis=1).tolist() == [bool(line) for line in lines]
    place1, place2 = encoder.encode(["place1", "place2"])
    np.testing.assert_allclose(matrix[lines.index("place1")], place1, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(matrix[lines.index("place2")], place2, rtol=1e-5, atol=1e-6)


def test_the_file_can_be_mapped(encoder, planted, tmp_path):
    write_vectors(encoder, planted[1], tmp_path / "x.npy")
    assert isinstance(np.load(tmp_path / "x.npy", mmap_mode="r"), np.memmap)


def test_embedding_a_failing_text_leaves_what_was_there(encoder, tmp_path):
    (tmp_path / "x.npy").write_text("before")
    for text, message in ((b"fine\n\xff\n", "not UTF-8"), (b"\n\n", "nothing to embed: no sentence in ")):
        (tmp_path / "text.txt").write_bytes(text)
        with pytest.raises(InputError, match=message):
            write_vectors(encoder, str(tmp_path / "text.txt"), tmp_path / "x.npy")
        assert (tmp_path / "x.npy").read_text() == "before"
        assert {path.suffix for path in tmp_path.iterdir()} == {".npy", ".txt"}


def test_an_output_that_cannot_be_written(encoder, planted, tmp_path):
    with pytest.raises(InputError, match=r"cannot write .*absent/x\.npy: No such file or directory"):
        write_vectors(encoder, planted[1], tmp_path / "absent" / "x.npy")


@pytest.mark.parametrize(("name", "got"), [("x.csv", ".csv"), ("x.npz", ".npz"), ("x", "no ending")])
def test_other_formats_are_refused(encoder, planted, tmp_path, name, got):
    with pytest.raises(InputError, match=rf"{name}: want a name that ends in \.npy, got {got}$"):
        write_vectors(encoder, planted[1], tmp_path / name)
    assert not (tmp_path / name).exists()


def test_a_text_is_read_from_a_fifo_and_vectors_are_written_to_one(encoder, planted, tmp_path):
    write_vectors(encoder, planted[1], tmp_path / "x.npy")
    source, out = tmp_path / "source", tmp_path / "out"
    os.mkfifo(source)
    os.mkfifo(out)
    received = []
    threads = [
        threading.Thread(target=lambda: source.write_bytes(Path(planted[1]).read_bytes()), daemon=True),
        threading.Thread(target=lambda: received.append(out.read_bytes()), daemon=True),
    ]
    for thread in threads:
        thread.start()
    write_vectors(encoder, str(source), out)
    for thread in threads:
        thread.join(timeout=60)
    assert received == [(tmp_path / "x.npy").read_bytes()]
    assert out.is_fifo()
