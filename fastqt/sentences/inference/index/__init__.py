"""An index of a corpus: search over millions of sentences that reads a small part of them."""

from fastqt.sentences.inference.index.build import IndexOptions, build_index
from fastqt.sentences.inference.index.index import Index, Recall

__all__ = ["Index", "IndexOptions", "Recall", "build_index"]
