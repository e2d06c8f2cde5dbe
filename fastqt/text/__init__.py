"""Text input: corpora, streamed from files or held in memory, a word-level vocabulary, and batches."""

from fastqt.text.batches import Batch, Span, batches, pad
from fastqt.text.corpus import Corpus, Sample
from fastqt.text.reader import Block, Position, read_blocks
from fastqt.text.tables import Columns
from fastqt.text.vocabulary import Encoded, Lexicon, Vocabulary

__all__ = [
    "Batch",
    "Block",
    "Columns",
    "Corpus",
    "Encoded",
    "Lexicon",
    "Position",
    "Sample",
    "Span",
    "Vocabulary",
    "batches",
    "pad",
    "read_blocks",
]
