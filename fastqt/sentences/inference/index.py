"""An index of a corpus: one file that faiss reads, with the sentences behind the vectors.

The file begins with an index of faiss. Behind it there are the sentences, as safetensors, and 20 bytes: the
length of faiss's index, the CRC-32 of everything before, and MAGIC.
"""

from __future__ import annotations

import bisect
import math
import mmap
import os
import struct
import tempfile
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from fastqt._version import __version__
from fastqt.errors import InputError
from fastqt.integrations._libraries import load_library
from fastqt.sentences.inference.encoder import TextEncoder
from fastqt.sentences.inference.search import Flat, Hits, Neighbor, blocks, encode_queries, normalized
from fastqt.sentences.json_text import field, parse_object, to_json
from fastqt.sentences.options.commands import IndexOptions
from fastqt.sentences.runs.files import check_can_be_written, check_ending, write_atomically
from fastqt.sentences.runs.lexicon import check_is_not_read
from fastqt.sentences.text import read_blocks
from fastqt.sentences.text.reader import check_bytes

ENDING = ".index"
END = struct.Struct("<QI8s")
MAGIC = b"fastqt\x00\x02"
# The head of faiss's IndexFlatIP: its kind, width and rows, two unused numbers, whether it is trained, the
# metric (an inner product), and the size of the vectors in units of four bytes.
FLAT = struct.Struct("<4siqqq?iQ")
UNUSED, INNER_PRODUCT = 1 << 20, 0
FLAT_ROWS = 50_000  # below them, a comparison with each vector takes milliseconds too
LISTS_PER_ROOT = 4  # lists for each unit of the square root of the number of rows
TRAINED_ROWS = 64  # for each list, but
TRAINED_BYTES = 1 << 29  # at most
ITERATIONS = 10  # of k-means
RECALL_AT = 10  # neighbours of which recall is measured
QUESTIONS = 1000  # sentences of the corpus that look for others
TIE = 1e-5  # cosines that differ by less are equal: each search rounds in an order of its own


class Recall(NamedTuple):
    """What share of the exact nearest neighbours a search finds."""

    value: float
    at: int  # of how many nearest neighbours
    queries: int  # sentences of the corpus, each of which looked for others


class Lists:
    """Compares a query with the vectors of so many lists of faiss's IndexIVFFlat as effort says: 1 to all.

    `search` is as of `Flat`; the more effort, the longer it takes and the less it misses.
    """

    def __init__(self, index: Any) -> None:
        self.index, self.most_effort = index, int(index.nlist)

    def search(self, queries: NDArray[np.float32], k: int, effort: int) -> Hits:
        effort_of_call = import_faiss().SearchParametersIVF(nprobe=effort)  # other threads have their own
        scores, rows = self.index.search(queries, k, params=effort_of_call)
        # The lists that were read may hold less than k rows.
        if effort < self.most_effort and (short := (rows < 0).any(axis=1)).any():
            scores[short], rows[short] = self.search(queries[short], k, min(2 * effort, self.most_effort))
        return scores, rows


def build_index(
    encoder: TextEncoder, corpus: Sequence[str], out: str | Path, options: IndexOptions | None = None
) -> Index:
    """Writes an index of a corpus to a file, whose name ends in .index, and opens it.

    The corpus, text files as of `fastqt.sentences.text.read_blocks`, is streamed, and its vectors wait on the
    disk beside `out`. "flat" takes little memory; "ivf" that of all vectors. The sentences are in the index
    too, and the encoder's `identity`, which is compared when the index is used.
    """
    options = options or IndexOptions()
    check_ending(out, ENDING)
    if Path(out).exists() and not Path(out).is_file():
        raise InputError(f"{out}: want a regular file, since an index is read in place, got another kind")
    check_can_be_written(out)
    check_is_not_read(out, corpus)
    if options.kind == "ivf":
        import_faiss()

    def write(partial: Path) -> None:
        with tempfile.TemporaryFile(dir=partial.parent) as file:
            sentences = _Sentences(encoder, corpus, file)
            vectors = np.memmap(file, np.float32, "r").reshape(len(sentences.lines), -1)
            about = _write_vectors(partial, vectors, options)
        with partial.open("r+b") as whole:
            length = whole.seek(0, os.SEEK_END)
            whole.write(save(sentences.arrays({**about, "identity": encoder.identity or ""})))
            whole.flush()
            checksum = zlib.crc32(mmap.mmap(whole.fileno(), 0, access=mmap.ACCESS_READ))
            whole.write(END.pack(length, checksum, MAGIC))

    try:
        write_atomically(out, write)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror or error}") from error
    return Index(out)


class _Sentences:
    """The sentences of a corpus, whose vectors are written to a file."""

    def __init__(self, encoder: TextEncoder, corpus: Sequence[str], file: IO[bytes]) -> None:
        self.files: list[str] = []
        self.firsts: list[int] = []  # row of each file
        self.text, self.ends, self.lines = bytearray(), array("q"), array("q")
        last = -1
        for block in read_blocks(corpus):
            if block.file != last:
                self.files.append(corpus[block.file])
                self.firsts.append(len(self.lines))
                last = block.file
            self.lines.extend(block.lines)
            for sentence in block.sentences:
                self.text += sentence.encode()
                self.ends.append(len(self.text))
            for part in blocks(len(block.sentences)):
                file.write(normalized(encoder, block.sentences[part], "document").numpy().data)
        if not self.files:
            raise InputError(f"nothing to index: no sentence in {', '.join(corpus)}")
        file.flush()

    def arrays(self, about: dict[str, Any]) -> dict[str, NDArray[Any]]:
        """What stands behind the vectors."""
        files = {"files": self.files, "firsts": self.firsts}
        header = to_json({"fastqt": __version__, **about, **files}).encode()
        return {
            "header": np.frombuffer(header, np.uint8),
            "text": np.frombuffer(self.text, np.uint8),
            "ends": np.array(self.ends),
            "lines": np.array(self.lines),
        }


def _write_vectors(path: Path, vectors: NDArray[np.float32], options: IndexOptions) -> dict[str, Any]:
    """Writes the index of faiss, and says how it is searched."""
    rows, width = vectors.shape
    if options.kind == "flat" or (options.kind == "auto" and rows < FLAT_ROWS):
        with path.open("wb") as file:
            file.write(FLAT.pack(b"IxFI", width, rows, UNUSED, UNUSED, True, INNER_PRODUCT, rows * width))
            for part in blocks(rows):
                file.write(vectors[part].tobytes())
        return {"kind": "flat", "effort": 1, "recall": Recall(1.0, 0, 0)._asdict()}

    index = _lists(vectors, options)
    effort, recall = _least_effort(Lists(index), vectors, options)
    try:
        import_faiss().write_index(index, str(path))
    except RuntimeError as error:  # as faiss tells of a full disk
        raise OSError(f"faiss could not write it: {error}") from error
    return {"kind": "ivf", "effort": effort, "recall": recall._asdict()}


def _lists(vectors: NDArray[np.float32], options: IndexOptions) -> Any:
    """An IndexIVFFlat of the vectors, whose centroids are those of a sample, by spherical k-means."""
    faiss, (rows, width) = import_faiss(), vectors.shape
    check_bytes(vectors.nbytes, "index: the vectors, which kind ivf holds in memory")
    count = options.lists or min(round(LISTS_PER_ROOT * math.sqrt(rows)), rows)
    if count > rows:
        raise InputError(f"lists: want at most {rows:,}, the number of sentences, got {count:,}")

    wanted = min(max(count, min(TRAINED_ROWS * count, TRAINED_BYTES // (4 * width))), rows)
    sample = np.sort(np.random.default_rng(options.seed).choice(rows, wanted, replace=False))
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, count, faiss.METRIC_INNER_PRODUCT)
    index.cp.niter, index.cp.seed, index.cp.spherical = ITERATIONS, options.seed, True
    index.cp.min_points_per_centroid, index.cp.max_points_per_centroid = 1, wanted
    index.train(vectors[sample])
    for part in blocks(rows):
        index.add(np.array(vectors[part]))
    return index


def _least_effort(
    searcher: Flat | Lists, vectors: NDArray[np.float32], options: IndexOptions
) -> tuple[int, Recall]:
    """The least effort, as far as recall grows with it, that reaches the recall wanted, or else all."""
    total = len(vectors)
    rows = np.random.default_rng([options.seed, 1]).choice(total, min(QUESTIONS, total), replace=False)
    rows.sort()
    at, questions = min(RECALL_AT, total - 1), np.array(vectors[rows])
    if not at:
        return 1, Recall(1.0, at, len(rows))

    def cosines_of_others(searcher: Flat | Lists, effort: int) -> NDArray[np.float32]:
        cosines, others = searcher.search(questions, at + 1, effort)
        cosines[others == rows[:, None]] = -np.inf
        return cosines

    exact = np.sort(cosines_of_others(Flat(vectors), 1), axis=1)[:, 1:2]  # of each row's last neighbour

    def recall(effort: int) -> float:
        hits = (cosines_of_others(searcher, effort) >= exact - TIE).sum(axis=1)
        return float(np.minimum(hits, at).mean() / at)

    below, effort, most = 0, 1, searcher.most_effort
    while effort < most and recall(effort) < options.min_recall:
        below, effort = effort, min(2 * effort, most)
    effort = bisect.bisect_left(range(effort), options.min_recall, below + 1, key=recall)
    return effort, Recall(recall(effort), at, len(rows))


class Index:
    """The sentences of a corpus and what finds the nearest of them, in a file that `fastqt index` wrote.

    The file is verified by its checksum and mapped, so that it must stay as it is while it is in use. It is
    refused where faiss is not installed and the kind needs it.

    Attributes:
        kind: "flat" or "ivf".
        files: the names of the corpus's files when the index was made.
        effort: of a search: the lists that "ivf" reads.
        recall: with that effort, as it was measured when the index was made.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        data, length = _verified(self.path)
        stored = load(data[length : -END.size].tobytes())
        header = parse_object(stored["header"].tobytes(), path)
        self._text, self._ends, self._lines = stored["text"], stored["ends"], stored["lines"]
        self._identity: str = field(header, "identity", str, path)
        self.files: list[str] = field(header, "files", list, path)
        self._firsts: list[int] = field(header, "firsts", list, path)
        self.kind: str = field(header, "kind", str, path)
        self.effort: int = field(header, "effort", int, path)
        self.recall = Recall(**field(header, "recall", dict, path))

        self.searcher: Flat | Lists
        if self.kind == "flat":
            vectors = data[FLAT.size : length].view(np.float32).reshape(len(self), -1)
            self.searcher, self.width = Flat(vectors), vectors.shape[1]
        else:
            faiss = import_faiss()
            index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP)
            self.searcher, self.width = Lists(index), int(index.d)

    def __len__(self) -> int:
        return len(self._lines)

    def __str__(self) -> str:
        """What it holds, and how good its searches are."""
        parts = [f"{len(self):,} sentences x {self.width}, {self.kind}"]
        if self.kind == "ivf":
            value, at, queries = self.recall
            parts.append(f"a search reads {self.effort:,} of {self.searcher.most_effort:,} lists")
            parts.append(f"recall@{at} {value:.4f} of {queries:,} sentences of the corpus")
        return "; ".join(parts)

    def search(self, encoder: TextEncoder, queries: Sequence[str], k: int = 5) -> list[list[Neighbor]]:
        """The k sentences with the highest cosines to each query, best first, or all if there are fewer.

        An index of kind "flat" finds those that `nearest` does; the others miss as many as `recall` says. The
        encoder is the model that made the index.
        """
        if (encoder.identity or "") != self._identity:
            raise InputError(
                f"{self.path} was made by another model, whose vectors mean something else; make it again "
                "with fastqt index"
            )
        scores, rows = self.search_vectors(encode_queries(encoder, queries, k).numpy(), k)
        return [
            [self._neighbor(row, score) for row, score in zip(*nearest, strict=True)]
            for nearest in zip(rows.tolist(), scores.tolist(), strict=True)
        ]

    def search_vectors(self, queries: NDArray[np.float32], k: int) -> Hits:
        """The m = min(k, all rows) highest cosines to each query and their rows, (Q, m) float32 and int64.

        The best are first; among equal ones, the first rows. Queries are (Q, D) float32 at norm 1.
        """
        if queries.ndim != 2 or queries.shape[1] != self.width:
            raise InputError(f"queries: want vectors of width {self.width}, got shape {queries.shape}")
        if not np.isfinite(queries).all():
            raise InputError("queries: want finite vectors, got NaN or infinity")
        queries = np.ascontiguousarray(queries, np.float32)
        scores, rows = self.searcher.search(queries, min(k, len(self)), self.effort)
        order = np.lexsort((rows, -scores), axis=1)
        return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)

    def _neighbor(self, row: int, cosine: float) -> Neighbor:
        begin, end = int(self._ends[row - 1]) if row else 0, int(self._ends[row])
        file = self.files[bisect.bisect_right(self._firsts, row) - 1]
        return Neighbor(cosine, self._text[begin:end].tobytes().decode(), file, int(self._lines[row]))


def _verified(path: Path) -> tuple[NDArray[np.uint8], int]:
    """The bytes of a file, mapped, and how many of them are faiss's index."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise InputError(f"no such file: {path}") from None
    except (OSError, ValueError) as error:  # the latter for a file of no bytes
        raise InputError(f"cannot read {path}: {error}") from error
    data = np.frombuffer(mapped, np.uint8)
    if len(data) < END.size or data[-len(MAGIC) :].tobytes() != MAGIC:
        raise InputError(f"{path}: want a file that fastqt index wrote, got another kind or a part of one")
    length, checksum, _ = END.unpack(data[-END.size :].tobytes())
    if zlib.crc32(data[: -END.size].data) != checksum:
        raise InputError(f"{path} is damaged: its checksum is another one")
    return data, length


def import_faiss() -> Any:
    """The faiss library, or InputError where it is not installed or too old."""
    try:
        return load_library("faiss")
    except ImportError as error:
        raise InputError(f"index: for ivf {error}") from error
