"""Text input: corpora, streamed from files or held in memory, vocabularies of (sub-)words, and batches."""

from fastqt.nn.tokens import Encoded, pad
from fastqt.sentences.text.batches import (
    Batch,
    Corpus,
    Prompts,
    Sample,
    Span,
    TripletCorpus,
    batches,
)
from fastqt.sentences.text.reader import Block, Position, read_blocks
from fastqt.sentences.text.rows import read_triplets
from fastqt.sentences.text.vocabulary import Lexicon, Vocabulary

__all__ = [
    "Batch",
    "Block",
    "Corpus",
    "Encoded",
    "Lexicon",
    "Position",
    "Prompts",
    "Sample",
    "Span",
    "TripletCorpus",
    "Vocabulary",
    "batches",
    "pad",
    "read_blocks",
    "read_triplets",
]
