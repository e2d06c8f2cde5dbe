"""An index of a corpus: search over millions of sentences that reads a small part of them."""

from fastqt.sentences.inference.index.build import build_index
from fastqt.sentences.inference.index.index import Index, Recall
from fastqt.sentences.options.inference import IndexOptions

__all__ = ["Index", "IndexOptions", "Recall", "build_index"]
