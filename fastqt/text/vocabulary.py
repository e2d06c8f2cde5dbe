"""A word-level vocabulary: a file of the `tokenizers` library, and a quick way to encode with it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import BertPreTokenizer

from fastqt.errors import InputError

UNKNOWN = "<unk>"
UNKNOWN_ID = 0
LONGEST_WORD = 100  # characters; longer ones are <unk>, as in BERT's vocabulary
CACHED_CHUNKS = 1 << 19
CACHED_CHARACTERS = 1 << 25
COUNTED_CHUNKS = 1 << 18
COUNTED_CHARACTERS = 1 << 28
COUNTED_WORDS = 1 << 20

Unknown = Literal["keep", "drop"]


class Encoded(NamedTuple):
    """Sentences as word numbers."""

    ids: NDArray[np.int64]  # one sentence's after the other's
    lengths: NDArray[np.int64]  # how many each sentence has


class Lexicon(Protocol):
    """What turns sentences into token ids: a `Vocabulary`, or the tokenizer of a checkpoint."""

    def __len__(self) -> int: ...

    def encode(self, sentences: Sequence[str]) -> Encoded: ...


class Vocabulary:
    """Words and their numbers. Case is kept; every punctuation mark is a word of its own.

    A sentence is cut at white space and at punctuation by the `tokenizers` library (its BERT rule), and
    each word looked up. Pieces between white space do not influence one another, so that their ids are
    cached: several times the library's own rate on running text, with its results.

    Args:
        tokenizer: a `tokenizers.Tokenizer` with a WordLevel model and `<unk>` as word 0.
        unknown: "keep" encodes other words as `<unk>`; "drop" leaves them out.
        max_length: a sentence's first so many words are kept (of those that `unknown` leaves).
    """

    def __init__(self, tokenizer: Tokenizer, *, unknown: Unknown = "keep", max_length: int = 50) -> None:
        if unknown not in ("keep", "drop"):
            raise InputError(f"unknown: wanted 'keep' or 'drop', got {unknown!r}")
        if max_length < 1:
            raise InputError(f"max_length: wanted at least 1, got {max_length}")
        if tokenizer.token_to_id(UNKNOWN) != UNKNOWN_ID:
            raise InputError(f"vocabulary: wanted {UNKNOWN} as word {UNKNOWN_ID}")
        tokenizer.no_truncation()  # `encode` truncates, after it has dropped what it is to drop
        self.tokenizer = tokenizer
        self.unknown = unknown
        self.max_length = max_length
        self._chunks = _Chunks()

    @classmethod
    def build(
        cls,
        sentences: Iterable[str],
        size: int = 50_000,
        *,
        unknown: Unknown = "keep",
        max_length: int = 50,
    ) -> Vocabulary:
        """Takes the `size` − 1 most frequent words, and `<unk>`; equal counts go in the words' own order.

        Memory is bounded: where there are more than 20 x `size` types (and a million), the rarest are
        forgotten, so that counts of very rare words in very large corpora are lower bounds.

        Args:
            sentences: text, a sentence an item; consumed once.
            size: number of types, `<unk>` among them.
            unknown, max_length: see the class.
        """
        if size < 2:
            raise InputError(f"vocab_size: wanted at least 2 ({UNKNOWN} and a word), got {size}")
        words = _count_words(sentences, limit=max(20 * size, COUNTED_WORDS))
        words.pop(UNKNOWN, None)
        ranked = sorted(words, key=lambda word: (-words[word], word))[: size - 1]
        ids = {word: number for number, word in enumerate([UNKNOWN, *ranked])}
        tokenizer = Tokenizer(WordLevel(ids, unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = BertPreTokenizer()
        return cls(tokenizer, unknown=unknown, max_length=max_length)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, unknown: Unknown = "keep") -> Vocabulary:
        """Reads what `save` wrote: a JSON file of the `tokenizers` library, truncation in it."""
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
            truncation = json.loads(text)["truncation"]
            tokenizer = Tokenizer.from_str(text)
        except FileNotFoundError:
            raise InputError(f"no vocabulary: {os.fspath(path)} is missing") from None
        except Exception as error:  # the library raises bare Exception for what it cannot parse
            raise InputError(f"{os.fspath(path)} is not a vocabulary file: {error}") from error
        return cls(tokenizer, unknown=unknown, max_length=truncation["max_length"])

    def to_json(self) -> str:
        """The vocabulary as the text of a `tokenizers` file; `unknown` is not part of that format."""
        self.tokenizer.enable_truncation(self.max_length)
        text: str = self.tokenizer.to_str(pretty=True)
        self.tokenizer.no_truncation()
        return text

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_json` to a file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.to_json())

    def __len__(self) -> int:
        size: int = self.tokenizer.get_vocab_size()
        return size

    def encode(self, sentences: Sequence[str]) -> Encoded:
        """Ids of the sentences' words: at most `max_length` each, at least one (else `<unk>`)."""
        lines = [sentence.split() for sentence in sentences]
        chunk_counts = np.fromiter(map(len, lines), dtype=np.int64, count=len(lines))
        self._chunks.forget_if_full()
        rows = np.fromiter(
            map(self._chunks.__getitem__, chain.from_iterable(lines)),
            dtype=np.int64,
            count=int(chunk_counts.sum()),
        )
        words, counts = self._chunks.ids(rows, self._encode_chunks)
        ends = np.concatenate([[0], np.cumsum(counts)])[np.cumsum(chunk_counts)]
        lengths = np.diff(ends, prepend=0)
        within = _ramp(lengths)
        ids = words[within < self.max_length]
        lengths = np.minimum(lengths, self.max_length)
        if not lengths.all():
            empty = np.flatnonzero(lengths == 0)
            ids = np.insert(ids, np.cumsum(lengths)[empty], UNKNOWN_ID)
            lengths[empty] = 1
        return Encoded(ids, lengths)

    def _encode_chunks(self, chunks: list[str]) -> list[list[int]]:
        ids: list[list[int]] = [
            encoding.ids for encoding in self.tokenizer.encode_batch_fast(chunks, add_special_tokens=False)
        ]
        if self.unknown == "drop":
            return [[word for word in words if word != UNKNOWN_ID] for words in ids]
        return ids


class _Chunks(dict[str, int]):
    """Numbers for pieces of text, given at first sight, and the ids of the words in each of them."""

    def __init__(self) -> None:
        self.forget()

    def __missing__(self, chunk: str) -> int:
        self[chunk] = number = len(self)
        self.new.append(chunk)
        return number

    def forget(self) -> None:
        self.clear()
        self.new: list[str] = []
        self.characters = 0
        self.words = np.zeros(0, dtype=np.int64)
        self.counts = np.zeros(0, dtype=np.int64)

    def forget_if_full(self) -> None:
        if len(self) > CACHED_CHUNKS or self.characters > CACHED_CHARACTERS:
            self.forget()

    def ids(
        self, rows: NDArray[np.int64], encode: Callable[[list[str]], list[list[int]]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The words of the pieces `rows`, one after the other, and how many each has."""
        if self.new:
            ids = encode(self.new)
            counts = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
            words = np.fromiter(chain.from_iterable(ids), dtype=np.int64, count=int(counts.sum()))
            self.counts = np.concatenate([self.counts, counts])
            self.words = np.concatenate([self.words, words])
            self.characters += sum(map(len, self.new))
            self.new = []
        counts = self.counts[rows]
        starts = (np.cumsum(self.counts) - self.counts)[rows]
        return self.words[np.repeat(starts, counts) + _ramp(counts)], counts


def _ramp(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, ... lengths[0]-1, 0, 1, ... lengths[1]-1, and so on."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(starts, lengths)


def _count_words(sentences: Iterable[str], limit: int) -> Counter[str]:
    words: Counter[str] = Counter()
    chunks: Counter[str] = Counter()
    split = BertPreTokenizer().pre_tokenize_str

    def fold() -> None:
        for chunk, count in chunks.items():
            for word, _ in split(chunk):
                if len(word) <= LONGEST_WORD:
                    words[word] += count
        chunks.clear()
        if len(words) > limit:
            # All counts up to the one that leaves half the room, not some of them: the order of the
            # text decides nothing.
            counts = np.fromiter(words.values(), dtype=np.int64, count=len(words))
            floor = int(np.partition(counts, -(limit // 2))[-(limit // 2)])
            for word in [word for word, count in words.items() if count <= floor]:
                del words[word]

    characters = 0
    for sentence in sentences:
        chunks.update(sentence.split())
        characters += len(sentence)
        if len(chunks) > COUNTED_CHUNKS or characters > COUNTED_CHARACTERS:
            fold()
            characters = 0
    fold()
    return words
