"""Text in: corpora streamed from files, a word-level vocabulary, and batches of consecutive sentences."""

from fastqt.text.batches import Batch, batches, pad
from fastqt.text.reader import Block, Position, read_blocks
from fastqt.text.vocabulary import Encoded, Vocabulary

__all__ = ["Batch", "Block", "Encoded", "Position", "Vocabulary", "batches", "pad", "read_blocks"]
