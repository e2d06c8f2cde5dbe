"""Indexes of made-up sentences in clusters: time to build, time of a query beside exact search, and recall.

pytest --benchmark --benchmark-json benchmarks/results/index.json benchmarks/bench_index.py

It builds indexes of up to 10^6 vectors of width 128 and needs 2 GB of disk for a while. Its run is stored
on its own, so `make bench` leaves it out. Sentences are numbers, and an encoder that looks up a vector for
each takes next to no time: what is measured is the index. The exact search is a product with the matrix in
memory, which is the least that a search of all vectors costs. It has torch's threads, and the index has
faiss's. Queries are near to rows of the corpus and are none of them; recall is that of these queries, and
beside it stands the one that the index measured of its own sentences when it was made.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fastqt.sentences.inference.index import Index, IndexOptions, build_index
from fastqt.sentences.inference.index.searchers import import_faiss

WIDTH = 128
K = 10
QUERIES = 200
NOISE = 2.0  # the norm of a row's distance to its cluster's centre, whose norm is 1
SIZES = [10_000, 100_000, 1_000_000]
KINDS = ["flat", "ivf", "hnsw"]


class Rows:
    """Encodes the number of a row as that row of a matrix."""

    digest = "rows"

    def __init__(self, rows: int) -> None:
        generator = np.random.default_rng(0)
        centers = _unit(generator.standard_normal((rows // 100, WIDTH), np.float32))
        self.matrix = generator.standard_normal((rows, WIDTH), np.float32) * np.float32(NOISE / WIDTH**0.5)
        self.matrix += centers[generator.integers(len(centers), size=rows)]
        near = self.matrix[generator.integers(rows, size=QUERIES)]
        noise = generator.standard_normal((QUERIES, WIDTH), np.float32) * np.float32(NOISE / 2 / WIDTH**0.5)
        self.matrix, self.queries = _unit(self.matrix), _unit(near + noise)

    def encode(self, sentences: list[str], **_: object) -> NDArray[np.float32]:
        return self.matrix[list(map(int, sentences))]


def _unit(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    return matrix / np.linalg.norm(matrix, axis=1, keepdims=True)


def exact(matrix: torch.Tensor, query: NDArray[np.float32]) -> NDArray[np.int64]:
    return (matrix @ torch.from_numpy(query)).topk(K).indices.numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", SIZES)
def test_index(benchmark, rows, kind, tmp_path):
    rows = 3_000 if benchmark.disabled else rows
    encoder, corpus, out = Rows(rows), tmp_path / "corpus.txt", tmp_path / "x.index"
    corpus.write_text("\n".join(map(str, range(rows))))
    begin = time.perf_counter()
    build_index(encoder, [str(corpus)], out, IndexOptions(kind=kind))
    built = time.perf_counter() - begin
    begin = time.perf_counter()
    index = Index(out)
    index.search_vectors(encoder.queries[:1], K)
    opened = time.perf_counter() - begin
    matrix, remaining = torch.from_numpy(encoder.matrix), iter(encoder.queries)
    seconds: list[float] = []
    hits: list[int] = []
    wanted: list[set[int]] = []

    def search_exactly() -> None:
        query = next(remaining)
        begin = time.perf_counter()
        wanted.append(set(exact(matrix, query).tolist()))
        seconds.append(time.perf_counter() - begin)

    def search() -> None:
        _, places = index.search_vectors(encoder.queries[len(wanted) - 1][None], K)
        hits.append(len(wanted[-1] & set(places[0].tolist())))

    benchmark.pedantic(search, setup=search_exactly, rounds=QUERIES)
    benchmark.extra_info.update(
        rows=rows,
        width=WIDTH,
        kind=kind,
        k=K,
        lists_or_rows_in_sight=index.effort,
        lists=index.searcher.most_effort if kind == "ivf" else None,
        build_seconds=built,
        open_and_first_query_seconds=opened,
        exact_seconds=median(seconds),
        recall=sum(hits) / len(hits) / K,
        recall_of_own_sentences=index.recall.value,
        index_bytes=out.stat().st_size,
        corpus_bytes=corpus.stat().st_size,
        threads=torch.get_num_threads(),
        faiss_threads=import_faiss().omp_get_max_threads(),
        faiss_version=import_faiss().__version__,
    )
    assert sum(hits) / len(hits) / K > (0.999 if kind == "flat" else 0.8)
