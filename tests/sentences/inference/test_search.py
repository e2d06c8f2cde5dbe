"""Streamed embedding and search, compared with the whole corpus in one matrix."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from fastqt.errors import InputError
from fastqt.sentences.inference.embed import write_vectors
from fastqt.sentences.inference.search import nearest
from fastqt.sentences.text import reader
from tests.shared.sentence_vectors import lines, normalized_halves, vectors


def test_neighbours_agree_with_a_search_of_the_whole_matrix(encoder, planted, monkeypatch):
    monkeypatch.setattr(reader, "READ_BYTES", 1000)
    queries = ["place3 topic4word1", lines(planted[1])[5][1]]
    pool = [(planted[file], number, sentence) for file in (0, 1) for number, sentence in lines(planted[file])]
    matrix = normalized_halves(np.concatenate([vectors(encoder, path) for path in planted]))
    for k in (1, 7, 1000):
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
    """Returns vectors without rounding errors, so that equal sentences have equal cosines in every block."""

    def encode(self, sentences, **_):
        return np.array(
            [[1, 0] if sentence == "twin" else [0, 1] for sentence in sentences], dtype=np.float32
        )


def test_among_equal_cosines_the_earlier_sentence_comes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "READ_BYTES", 30)
    (tmp_path / "twins.txt").write_text("twin\nother\n" * 9)
    (found,) = nearest(ExactEncoder(), ["twin"], [str(tmp_path / "twins.txt")], 3)
    assert [neighbor.line for neighbor in found] == [1, 3, 5]


def test_wrong_arguments_of_a_search_are_refused(encoder, planted, tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InputError, match="k: want at least 1, got 0"):
        nearest(encoder, ["a"], planted, 0)
    with pytest.raises(InputError, match="query: want a sentence, got blank text"):
        nearest(encoder, [" "], planted)
    with pytest.raises(InputError, match=r"query: want text in UTF-8, got 'gr\\udcfcn'"):
        nearest(encoder, ["a", "gr\udcfcn"], planted)  # the bytes of a command line that are not UTF-8
    with pytest.raises(InputError, match="query: want at least one sentence, got none"):
        nearest(encoder, [], planted)
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
        write_vectors(encoder, str(path), tmp_path / "x.npy")
        nearest(encoder, ["place1"], [str(path)])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 100_000 < (tmp_path / "x.npy").stat().st_size / 2
