"""The two kinds of index: how each searches what an index file holds."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fastqt.errors import InputError
from fastqt.sentences.inference.best import best_products, blocks
from fastqt.sentences.inference.index.array_file import ArrayFile
from fastqt.sentences.inference.index.faiss_format import ID_BYTES, flat_header, import_faiss

Hits = tuple[NDArray[np.float32], NDArray[np.int64]]  # cosines and rows, (Q, k)


class Searcher(Protocol):
    """Finds the rows with the highest cosines to queries."""

    least_effort: int
    most_effort: int

    def search(self, queries: NDArray[np.float32], k: int, effort: int) -> Hits:
        """The k best rows of each query, in any order; queries are (Q, D) float32 at norm 1.

        `effort` is in `least_effort` to `most_effort`. More of it takes longer and misses less.
        """


class Flat:
    """Compares a query with each vector."""

    least_effort = most_effort = 1

    def __init__(self, file: ArrayFile, rows: int, width: int) -> None:
        header = flat_header(rows, width)
        self._rows, self._row = rows, 4 * width
        self._begin = len(header)
        self._data = file.array("index", "uint8", (len(header) + rows * self._row,))
        if self._data.read(0, len(header)).tobytes() != header:
            raise InputError(f"{file.path} is damaged: index: want {rows:,} rows of width {width:,}")

    def _vectors(self, begin: int, end: int) -> torch.Tensor:
        """The vectors of the rows begin <= i < end, copied from the file, where they are not aligned."""
        first = self._begin + begin * self._row
        data = self._data.read(first, first + (end - begin) * self._row).copy()
        return torch.from_numpy(data.view(np.float32).reshape(end - begin, -1))

    def search(self, queries: NDArray[np.float32], k: int, effort: int) -> Hits:
        parts = (self._vectors(part.start, min(part.stop, self._rows)) for part in blocks(self._rows))
        return best_products(torch.from_numpy(queries), parts, k).results()


class Lists:
    """Compares a query with the vectors of some lists: those whose centroids are nearest to it."""

    least_effort = 1  # lists

    def __init__(self, file: ArrayFile, rows: int, width: int) -> None:
        faiss = import_faiss()
        self.most_effort = lists = (*file.shape("sizes"), 0)[0]
        if not 1 <= lists <= rows:
            raise InputError(f"{file.path} is damaged: lists: want 1 to {rows:,}, got {lists:,}")
        sizes = file.array("sizes", "int64", (lists,)).read()
        centroids = file.array("centroids", "float32", (lists, width)).read()

        if sizes.min() < 0 or sizes.max() > rows or sizes.sum() != rows:
            raise InputError(f"{file.path} is damaged: sizes: want lists of {rows:,} rows together")
        row_bytes = 4 * width + ID_BYTES
        # In front of the lists is what another version of faiss may have written otherwise.
        size = (*file.shape("index"), 0)[0]
        self._data = file.array("index", "uint8", (size,))
        if file.offset("index") or size < rows * row_bytes:
            raise InputError(f"{file.path} is damaged: index: want lists at the beginning of the file")
        self._ends = size - rows * row_bytes + np.cumsum(sizes) * row_bytes

        self._begins = self._ends - sizes * row_bytes
        self._path = file.path

        # faiss maps the lists itself. Their places follow from their sizes, which were checked above.
        self._lists = faiss.OnDiskInvertedLists()
        self._lists.nlist, self._lists.code_size = lists, 4 * width
        self._lists.filename, self._lists.read_only = str(file.path), True
        for count, begin in zip(sizes.tolist(), self._begins.tolist(), strict=True):
            entry = faiss.OnDiskOneList()
            entry.size = entry.capacity = count
            entry.offset = begin
            self._lists.lists.push_back(entry)
        self._lists.totsize = int(self._ends[-1])
        self._lists.prefetch_nthread = 0
        self._lists.do_mmap()

        self._quantizer = faiss.IndexFlatIP(width)
        self._quantizer.add(np.ascontiguousarray(centroids))
        self._index = faiss.IndexIVFFlat(self._quantizer, width, lists, faiss.METRIC_INNER_PRODUCT)
        self._index.replace_invlists(self._lists, False)
        self._index.ntotal, self._index.is_trained = rows, True

    def search(self, queries: NDArray[np.float32], k: int, effort: int) -> Hits:
        cosines, lists = self._quantizer.search(queries, effort)
        for each in np.unique(lists[lists >= 0]).tolist():
            self._data.read(self._begins[each], self._ends[each])

        # faiss's own wrapper takes the effort from the index alone, where another thread may change it.
        faiss = import_faiss()
        scores, rows = np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
        data, *arrays = (faiss.swig_ptr(each) for each in (queries, lists, cosines, scores, rows))
        options = faiss.SearchParametersIVF(nprobe=effort)
        self._index.search_preassigned_c(len(queries), data, k, *arrays, False, options)

        # The lists that were read may hold less than k rows.
        if effort < self.most_effort and (short := (rows < 0).any(axis=1)).any():
            scores[short], rows[short] = self.search(queries[short], k, min(2 * effort, self.most_effort))
        return scores, rows


SEARCHERS: dict[str, type[Flat] | type[Lists]] = {"flat": Flat, "ivf": Lists}
