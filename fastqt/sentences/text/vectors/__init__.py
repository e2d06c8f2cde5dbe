"""Pre-trained word vectors and word counts, read from the files in which they are published."""

from fastqt.sentences.text.vectors.files import FORMATS, parts, read_vectors, width_of
from fastqt.sentences.text.vectors.lookup import Found, WordRows, vectors_of
from fastqt.sentences.text.vectors.tables import read_counts

__all__ = [
    "FORMATS",
    "Found",
    "WordRows",
    "parts",
    "read_counts",
    "read_vectors",
    "vectors_of",
    "width_of",
]
