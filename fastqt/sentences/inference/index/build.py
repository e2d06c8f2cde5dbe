"""Makes an index of a corpus, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastqt._version import __version__
from fastqt.errors import InputError
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.index.array_file import ArrayWriter
from fastqt.sentences.inference.index.faiss_format import (
    ID_BYTES,
    flat_header,
    import_faiss,
    lists_header,
)
from fastqt.sentences.inference.index.index import FORMAT, CorpusDigest, Index, Recall
from fastqt.sentences.inference.index.recall import measure, sample, sufficient_effort
from fastqt.sentences.inference.index.searchers import SEARCHERS
from fastqt.sentences.inference.index.spool import Spool
from fastqt.sentences.inference.search import normalized
from fastqt.sentences.options.inference import IndexOptions
from fastqt.sentences.runs.files import check_can_be_written, check_ending, write_atomically
from fastqt.sentences.runs.run_files import check_is_not_read
from fastqt.sentences.text import read_blocks

ENDING = ".index"
SENTENCES = 8192  # that are encoded together
ROWS = 16384  # of vectors, and
ELEMENTS = 1 << 20  # of other arrays, that are in memory together
FLAT_ROWS = 50_000  # below them, a comparison with each vector takes milliseconds too
LISTS_PER_ROOT = 4  # lists for each unit of the square root of the number of rows
TRAINED_ROWS = 64  # for each list, but
TRAINED_BYTES = 1 << 29  # at most
ITERATIONS = 10  # of k-means


def build_index(
    encoder: SentenceEncoder, corpus: Sequence[str], out: str | Path, options: IndexOptions | None = None
) -> Index:
    """Writes an index of a corpus to a file, whose name ends in .index, and opens it.

    The corpus, text files as of `fastqt.sentences.text.read_blocks`, is streamed, and its vectors wait on the
    disk beside `out`, which for a while needs twice the room of the index. "flat" takes little memory; "ivf"
    24 bytes a sentence, and a sample of the vectors that centroids are computed from (at most 512 MiB). The
    sentences are in the index too, and the encoder's `identity`, which is compared when the index is used.
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
        with _Sentences(partial.parent) as sentences, partial.open("r+b") as file:
            sentences.read(encoder, corpus)
            _write(partial, ArrayWriter(file), sentences, options, encoder.identity or "")

    try:
        write_atomically(out, write)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror or error}") from error
    return Index(out)


class _Sentences:
    """The sentences of a corpus on the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.vectors: Spool
        self.text, self.ends, self.lines = (Spool(folder, dtype) for dtype in ("uint8", "int64", "int64"))
        self.files: list[str] = []
        self.firsts: list[int] = []  # row of each file
        self.digest = CorpusDigest()

    def __enter__(self) -> _Sentences:
        return self

    def __exit__(self, *_: object) -> None:
        for each in vars(self).values():
            if isinstance(each, Spool):
                each.close()

    def read(self, encoder: SentenceEncoder, corpus: Sequence[str]) -> None:
        last = -1
        for block in read_blocks(corpus):
            self.digest.add(block)
            if block.file != last:
                self.files.append(corpus[block.file])
                self.firsts.append(self.lines.rows)
                last = block.file

            texts = [sentence.encode() for sentence in block.sentences]
            self.ends.append(np.cumsum([len(text) for text in texts]) + self.text.rows)
            self.text.append(np.frombuffer(b"".join(texts), np.uint8))

            for begin in range(0, len(texts), SENTENCES):
                part = block.sentences[begin : begin + SENTENCES]
                vectors = normalized(encoder, part, "document").numpy()
                if not np.isfinite(vectors).all():
                    line = block.lines[begin + int((~np.isfinite(vectors)).any(axis=1).argmax())]
                    raise InputError(
                        f"{corpus[block.file]}: line {line}: the model's vector is not finite: want a model "
                        "whose training did not diverge"
                    )

                if not hasattr(self, "vectors"):
                    self.vectors = Spool(self.folder, "float32", vectors.shape[1])
                self.vectors.append(vectors)
            self.lines.append(np.array(block.lines))

        if not self.files:
            raise InputError(f"nothing to index: no sentence in {', '.join(corpus)}")


def _write(
    partial: Path, writer: ArrayWriter, sentences: _Sentences, options: IndexOptions, identity: str
) -> None:
    """Writes the index, opens it as any reader does, measures it, and then writes what was found."""
    vectors = sentences.vectors
    kind = options.kind if options.kind != "auto" else "flat" if vectors.rows < FLAT_ROWS else "ivf"

    header: dict[str, Any] = {
        "format": FORMAT,
        "fastqt": __version__,
        "kind": kind,
        "rows": vectors.rows,
        "width": vectors.shape[1],
        "identity": identity,
        "corpus": sentences.digest.hexdigest(),
        "files": sentences.files,
        "firsts": sentences.firsts,
        "effort": SEARCHERS[kind].least_effort,
        "recall": Recall(1.0, 0, 0)._asdict(),
    }

    header |= WRITERS[kind](writer, vectors, options)
    for name in ("text", "ends", "lines"):
        spool: Spool = getattr(sentences, name)
        writer.add(name, "uint8" if name == "text" else "int64", spool.shape, spool.parts(ELEMENTS))
    writer.finish(header)

    if kind != "flat":
        index = Index(partial)
        questions = sample(vectors, options.seed)
        header["effort"] = sufficient_effort(index, questions, options.min_recall)
        header["recall"] = measure(index, questions, header["effort"])._asdict()
        writer.finish(header)


def _write_flat(writer: ArrayWriter, vectors: Spool, options: IndexOptions) -> dict[str, Any]:
    header = flat_header(*vectors.shape)
    _add_index(writer, header, 4 * math.prod(vectors.shape), vectors.parts(ROWS))
    return {}


def _write_lists(writer: ArrayWriter, vectors: Spool, options: IndexOptions) -> dict[str, Any]:
    count = options.lists or min(round(LISTS_PER_ROOT * math.sqrt(vectors.rows)), vectors.rows)
    if count > vectors.rows:
        raise InputError(f"lists: want at most {vectors.rows:,}, the number of sentences, got {count:,}")
    centroids = _centroids(vectors, count, options.seed)
    quantizer = import_faiss().IndexFlatIP(vectors.shape[1])
    quantizer.add(centroids)
    chosen = np.concatenate([quantizer.search(part, 1)[1][:, 0] for part in vectors.parts(ROWS)])
    sizes = np.bincount(chosen, minlength=count)
    order = np.argsort(chosen, kind="stable")
    row_bytes = 4 * vectors.shape[1] + ID_BYTES
    parts = _lists(vectors, order, sizes)
    _add_index(writer, lists_header(centroids, sizes), vectors.rows * row_bytes, parts)
    writer.add("sizes", "int64", (count,), [sizes])
    writer.add("centroids", "float32", centroids.shape, [centroids])
    return {}


def _add_index(writer: ArrayWriter, header: bytes, size: int, parts: Iterable[NDArray[Any]]) -> None:
    """Writes the header and then the parts, of `size` bytes together, as one array: what faiss reads."""
    whole = chain([np.frombuffer(header, np.uint8)], (part.reshape(-1).view(np.uint8) for part in parts))
    writer.add("index", "uint8", (len(header) + size,), whole)


def _lists(vectors: Spool, order: NDArray[np.int64], sizes: NDArray[np.int64]) -> Iterator[NDArray[Any]]:
    """The contents of each list: the vectors of its rows, and then the rows' numbers."""
    for rows in np.split(order, np.cumsum(sizes)[:-1]):
        for begin in range(0, len(rows), ROWS):
            yield vectors.take(rows[begin : begin + ROWS])
        yield rows.astype(np.int64)


def _centroids(vectors: Spool, count: int, seed: int) -> NDArray[np.float32]:
    """The centroids (count, D) of a sample of the vectors, by spherical k-means."""
    width = vectors.shape[1]
    wanted = max(count, min(TRAINED_ROWS * count, TRAINED_BYTES // (4 * width)))
    rows = np.random.default_rng(seed).choice(vectors.rows, min(wanted, vectors.rows), replace=False)
    means = import_faiss().Kmeans(
        width,
        count,
        niter=ITERATIONS,
        seed=seed,
        spherical=True,
        min_points_per_centroid=1,
        max_points_per_centroid=len(rows),
    )
    means.train(vectors.take(np.sort(rows)))
    centroids: NDArray[np.float32] = means.centroids
    return centroids


WRITERS = {"flat": _write_flat, "ivf": _write_lists}
