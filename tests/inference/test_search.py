"""Embedding and searching, against the whole corpus at once."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from fastqt.errors import InputError
from fastqt.inference.embed import embed_file
from fastqt.inference.search import nearest
from fastqt.runs.config import TrainConfig
from fastqt.runs.model import SentenceEncoder, build_model
from fastqt.text import Vocabulary, reader


@pytest.fixture(params=["bow", "bigru"])
def encoder(request, planted):
    config = TrainConfig((planted[0],), encoder=request.param, word_dim=8, hidden_size=6)
    with open(planted[0]) as file:
        vocabulary = Vocabulary.build(file, 60)
    torch.manual_seed(0)
    return SentenceEncoder(build_model(config, len(vocabulary)).eval(), vocabulary, torch.device("cpu"))


def lines(path):
    with open(path) as file:
        return [(number, line.strip()) for number, line in enumerate(file, start=1) if line.strip()]


def vectors(encoder, path):
    """One sentence after the other, (N, 2D) float64, not normalised."""
    rows = []
    for _, sentence in lines(path):
        ids = torch.tensor([encoder.vocabulary.encode([sentence]).ids.tolist()])
        rows.append(
            torch.cat([half(ids, torch.tensor([ids.shape[1]])) for half in encoder.model.children()], 1)
        )
    return torch.cat(rows).double().detach().numpy()


def normalized_halves(matrix):
    return np.concatenate(
        [half / np.linalg.norm(half, axis=1, keepdims=True) for half in np.split(matrix, 2, axis=1)], 1
    )


@pytest.mark.parametrize("normalize", [True, False])
def test_rows_are_the_sentences_in_order(encoder, planted, tmp_path, normalize, monkeypatch):
    monkeypatch.setattr(reader, "READ_BYTES", 1000)  # several blocks
    shape = embed_file(encoder, planted[1], tmp_path / "x.npy", normalize=normalize)
    matrix = np.load(tmp_path / "x.npy")
    wanted = vectors(encoder, planted[1])
    if normalize:
        wanted = normalized_halves(wanted)
    assert matrix.dtype == np.float32
    assert matrix.shape == shape == wanted.shape
    np.testing.assert_allclose(matrix, wanted, rtol=1e-5, atol=1e-6)
    assert {path.name for path in tmp_path.iterdir()} == {"x.npy", "planted.txt", "held_out.txt"}


def test_the_file_can_be_mapped(encoder, planted, tmp_path):
    embed_file(encoder, planted[1], tmp_path / "x.npy")
    assert isinstance(np.load(tmp_path / "x.npy", mmap_mode="r"), np.memmap)


def test_embedding_a_failing_text_leaves_what_was_there(encoder, tmp_path):
    (tmp_path / "x.npy").write_text("before")
    for text, message in ((b"fine\n\xff\n", "not UTF-8"), (b"\n\n", "nothing to embed: no sentence in ")):
        (tmp_path / "text.txt").write_bytes(text)
        with pytest.raises(InputError, match=message):
            embed_file(encoder, str(tmp_path / "text.txt"), tmp_path / "x.npy")
        assert (tmp_path / "x.npy").read_text() == "before"
        assert {path.suffix for path in tmp_path.iterdir()} == {".npy", ".txt"}


def test_an_output_that_cannot_be_written(encoder, planted, tmp_path):
    with pytest.raises(InputError, match=r"cannot write .*absent/x\.npy: No such file or directory"):
        embed_file(encoder, planted[1], tmp_path / "absent" / "x.npy")


@pytest.mark.parametrize("k", [1, 7, 1000])
def test_neighbours_are_those_of_the_whole_matrix(encoder, planted, k, monkeypatch):
    monkeypatch.setattr(reader, "READ_BYTES", 1000)
    queries = ["place3 topic4word1", lines(planted[1])[5][1]]
    pool = [(planted[file], number, sentence) for file in (0, 1) for number, sentence in lines(planted[file])]
    matrix = normalized_halves(np.concatenate([vectors(encoder, path) for path in planted]))
    for query, found in zip(queries, nearest(encoder, queries, planted, k), strict=True):
        vector = encoder.encode([query])[0].astype(np.float64)
        cosines = matrix @ vector / np.linalg.norm(vector) / np.linalg.norm(matrix, axis=1)
        assert len(found) == min(k, len(pool))
        best = np.sort(cosines)[::-1][:k]
        np.testing.assert_allclose([neighbor.cosine for neighbor in found], best, atol=1e-5)
        for neighbor in found:
            index = pool.index((neighbor.file, neighbor.line, neighbor.sentence))
            assert abs(cosines[index] - neighbor.cosine) < 1e-5
        assert len({(neighbor.file, neighbor.line) for neighbor in found}) == len(found)


class ExactEncoder:
    """Vectors without rounding, so that equal sentences have equal cosines in every block."""

    def encode(self, sentences):
        return np.array(
            [[1, 0] if sentence == "twin" else [0, 1] for sentence in sentences], dtype=np.float32
        )


def test_of_equals_the_earlier_wins(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "READ_BYTES", 30)
    (tmp_path / "twins.txt").write_text("twin\nother\n" * 9)
    (found,) = nearest(ExactEncoder(), ["twin"], [str(tmp_path / "twins.txt")], 3)
    assert [neighbor.line for neighbor in found] == [1, 3, 5]


def test_bad_searches(encoder, planted, tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InputError, match="k: wanted at least 1, got 0"):
        nearest(encoder, ["a"], planted, 0)
    with pytest.raises(InputError, match="query: wanted a sentence, got blank text"):
        nearest(encoder, [" "], planted)
    with pytest.raises(InputError, match=r"nothing to search: no sentence in .*empty\.txt"):
        nearest(encoder, ["a"], [str(tmp_path / "empty.txt")])


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(encoder, planted, tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "READ_BYTES", 1 << 12)
    peaks = []
    for repeats in (3, 30):
        path = tmp_path / f"{repeats}.txt"
        path.write_text((Path(planted[0]).read_text() + "\n\n") * repeats)
        tracemalloc.start()
        embed_file(encoder, str(path), tmp_path / "x.npy")
        nearest(encoder, ["place1"], [str(path)])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 100_000 < (tmp_path / "x.npy").stat().st_size / 2
