"""An index of a corpus: search over millions of sentences that reads a small part of them."""

from fastqt.inference.index.build import IndexOptions, build_index
from fastqt.inference.index.index import Index, Recall

__all__ = ["Index", "IndexOptions", "Recall", "build_index"]
