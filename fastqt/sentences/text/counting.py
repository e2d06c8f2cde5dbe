"""Counts the words of a corpus in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from tokenizers.pre_tokenizers import BertPreTokenizer

LONGEST_WORD = 100  # characters; longer words are <unk>, as in BERT's vocabulary
# A chunk is a piece of text between white space. These limits bound the memory of counting.
COUNTED_CHUNKS = 1 << 18
COUNTED_CHARACTERS = 1 << 28
COUNTED_WORDS = 1 << 20


def count_words(sentences: Iterable[str], limit: int) -> Counter[str]:
    """Counts words; if there are more than `limit`, drops the rarest so that at most half as many stay.

    Whole chunks are counted first and are split into words from time to time, because a chunk that occurs
    often is then split once.
    """
    words: Counter[str] = Counter()
    chunks: Counter[str] = Counter()
    split = BertPreTokenizer().pre_tokenize_str

    def count_words_of_chunks() -> None:
        for chunk, count in chunks.items():
            for word, _ in split(chunk):
                if len(word) <= LONGEST_WORD:
                    words[word] += count
        chunks.clear()
        if len(words) > limit:
            # All words up to a threshold count are dropped, including all that tie at it. Dropping only some
            # of the ties would make the vocabulary depend on the order of the text.
            counts = np.fromiter(words.values(), dtype=np.int64, count=len(words))
            threshold = int(np.partition(counts, -(limit // 2))[-(limit // 2)])
            for word in [word for word, count in words.items() if count <= threshold]:
                del words[word]

    characters = 0
    for sentence in sentences:
        chunks.update(sentence.split())
        characters += len(sentence)
        if len(chunks) > COUNTED_CHUNKS or characters > COUNTED_CHARACTERS:
            count_words_of_chunks()
            characters = 0
    count_words_of_chunks()
    return words
