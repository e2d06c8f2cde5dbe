"""Text input: corpora, streamed from files or held in memory, vocabularies of (sub-)words, and batches."""

from fastqt.text.batches import Batch, Span, batches, pad
from fastqt.text.corpus import Corpus, Sample
from fastqt.text.reader import Block, Position, read_blocks
from fastqt.text.subwords import TokenizerVocabulary
from fastqt.text.tables import Columns
from fastqt.text.triplets import TripletCorpus, read_triplets
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
    "TokenizerVocabulary",
    "TripletCorpus",
    "Vocabulary",
    "batches",
    "pad",
    "read_blocks",
    "read_triplets",
]
