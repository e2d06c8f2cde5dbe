"""A text's vectors in a file are those of its sentences, in order; a failure leaves the old file."""

import numpy as np
import pytest
from sentence_vectors import normalized_halves, vectors

from fastqt.errors import InputError
from fastqt.inference.embed import write_vectors
from fastqt.text import reader


@pytest.mark.parametrize("normalize", [True, False])
def test_rows_are_the_sentences_in_order(encoder, planted, tmp_path, normalize, monkeypatch):
    monkeypatch.setattr(reader, "READ_BYTES", 1000)  # several blocks
    shape = write_vectors(encoder, planted[1], tmp_path / "x.npy", normalize=normalize)
    matrix = np.load(tmp_path / "x.npy")
    wanted = vectors(encoder, planted[1])
    if normalize:
        wanted = normalized_halves(wanted)
    assert matrix.dtype == np.float32
    assert matrix.shape == shape == wanted.shape
    np.testing.assert_allclose(matrix, wanted, rtol=1e-5, atol=1e-6)
    assert {path.name for path in tmp_path.iterdir()} == {"x.npy", "planted.txt", "held_out.txt"}


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
