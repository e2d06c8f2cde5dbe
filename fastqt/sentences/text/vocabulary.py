"""A word-level vocabulary in the file format of the `tokenizers` library, with a fast encoder."""

from __future__ import annotations

import copy
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import BertPreTokenizer

from fastqt.checks import shown
from fastqt.errors import InputError, one_line
from fastqt.nn.tokens import Encoded, list_of_texts
from fastqt.sentences.json_text import field, has_type, read_object

UNKNOWN = "<unk>"
UNKNOWN_ID = 0
LARGEST_FILE = 1 << 30  # bytes of a vocabulary.json
LONGEST_SENTENCE = 1 << 24  # words
# Those that split by a fixed rule. Others hold patterns, which a file can choose so that they never end.
PRE_TOKENIZERS = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")
LONGEST_WORD = 100  # characters; longer words are <unk>, as in BERT's vocabulary
# A chunk is a piece of text between white space. These limits bound the memory of the encoder's cache and of
# counting words.
CACHED_CHUNKS = 1 << 19
LONGEST_CACHED = 64  # characters; longer chunks seldom come again
COUNTED_CHUNKS = 1 << 18
COUNTED_CHARACTERS = 1 << 28
COUNTED_WORDS = 1 << 20

Unknown = Literal["keep", "drop"]


class Lexicon(Protocol):
    """Whatever encodes sentences as token ids: words, sub-words, or the tokenizer of a checkpoint."""

    def __len__(self) -> int: ...

    def encode(self, sentences: Sequence[str]) -> Encoded: ...

    def special_ids(self) -> list[int]:
        """The ids that stand for no word of a text, such as those of [CLS] and of unknown words."""
        ...


class Vocabulary:
    """Words and their ids. Case matters, and every punctuation mark is a word of its own.

    The `tokenizers` library splits a sentence at white space and at punctuation (its BERT rule), and each
    word is looked up. The chunks between white space are encoded independently of one another, so their ids
    are cached. On running text this is several times as fast as the library alone, with the same result.
    Several threads may encode at the same time.

    Args:
        tokenizer: a `tokenizers.Tokenizer` with a WordLevel model and `<unk>` as word 0.
        unknown: "keep" encodes unknown words as `<unk>`; "drop" leaves them out.
        max_length: the number of words that are kept of a sentence, after unknown ones were dropped.

    Attributes:
        counts: (V,) int64, how often each word occurs in the text that the vocabulary was built from, and for
            `<unk>` all other words together; None for a vocabulary that was not built.
    """

    counts: NDArray[np.int64] | None = None

    def __init__(self, tokenizer: Tokenizer, *, unknown: Unknown = "keep", max_length: int = 50) -> None:
        if unknown not in ("keep", "drop"):
            raise InputError(f"unknown: want 'keep' or 'drop', got {unknown!r}")
        if max_length < 1:
            raise InputError(f"max_length: want at least 1, got {max_length}")
        if tokenizer.token_to_id(UNKNOWN) != UNKNOWN_ID:
            raise InputError(f"vocabulary: want {UNKNOWN} as word {UNKNOWN_ID}")
        tokenizer.no_truncation()  # `encode` truncates itself, because unknown words are dropped first
        self.tokenizer = tokenizer
        self.unknown = unknown
        self.max_length = max_length
        self._cache: dict[str, tuple[int, ...]] = {}  # the ids of chunks

    @classmethod
    def build(
        cls,
        sentences: Iterable[str],
        size: int = 50_000,
        *,
        unknown: Unknown = "keep",
        max_length: int = 50,
    ) -> Vocabulary:
        """Builds a vocabulary of `<unk>` and the `size` − 1 most frequent words.

        The sentences are iterated once. Words of equal frequency are ordered by their characters. Memory is
        bounded: if the corpus has more than 20 · `size` distinct words, and more than a million, the rarest
        are dropped during counting. In very large corpora, the counts of very rare words are therefore lower
        bounds.
        """
        if isinstance(sentences, str):
            raise TypeError(f"sentences: want texts, got one text, {shown(sentences)}")
        if size < 2:
            raise InputError(f"vocab_size: want at least 2 ({UNKNOWN} and a word), got {size}")
        words = count_words(sentences, limit=max(20 * size, COUNTED_WORDS))
        ranked = sorted(words.keys() - {UNKNOWN}, key=lambda word: (-words[word], word))[: size - 1]
        ids = {word: number for number, word in enumerate([UNKNOWN, *ranked])}
        tokenizer = Tokenizer(WordLevel(ids, unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = BertPreTokenizer()
        vocabulary = cls(tokenizer, unknown=unknown, max_length=max_length)
        counts = [words[word] for word in ranked]
        vocabulary.counts = np.array([sum(words.values()) - sum(counts), *counts], dtype=np.int64)
        return vocabulary

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, unknown: Unknown = "keep") -> Vocabulary:
        """Reads a file that `save` wrote: JSON of the `tokenizers` library, which includes max_length."""
        try:
            state = read_object(path, most_bytes=LARGEST_FILE)
        except FileNotFoundError:
            raise InputError(f"no vocabulary: {os.fspath(path)} is missing") from None
        try:
            max_length = _check_state(state)
            # The library must not see another text than the one that was checked.
            return cls(_parsed(json.dumps(state)), unknown=unknown, max_length=max_length)
        except (InputError, ValueError) as error:
            raise InputError(f"{os.fspath(path)} is not a vocabulary file: {one_line(error)}") from error

    def to_json(self) -> str:
        """The vocabulary as JSON of the `tokenizers` library, whose format has no place for `unknown`."""
        tokenizer = copy.deepcopy(self.tokenizer)  # other threads encode with this one
        tokenizer.enable_truncation(self.max_length)
        text: str = tokenizer.to_str(pretty=True)
        return text

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_json()` to a file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.to_json())

    def __len__(self) -> int:
        size: int = self.tokenizer.get_vocab_size()
        return size

    def special_ids(self) -> list[int]:
        """The id of `<unk>`, which stands for no word."""
        return [UNKNOWN_ID]

    def encode(self, sentences: Sequence[str]) -> Encoded:
        """Encodes sentences.

        Each sentence gets at most `max_length` ids. A sentence without any gets `<unk>`, so that none is
        empty.
        """
        sentences = list_of_texts("sentences", sentences)
        lines = [sentence.split() for sentence in sentences]
        rows = self._ids_of_chunks([*chain.from_iterable(lines)])
        counts = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        words = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(counts.sum()))

        chunk_counts = np.fromiter(map(len, lines), dtype=np.int64, count=len(lines))
        ends = np.concatenate([[0], np.cumsum(counts)])[np.cumsum(chunk_counts)]
        lengths = np.diff(ends, prepend=0)
        ids = words[_positions(lengths) < self.max_length]
        lengths = np.minimum(lengths, self.max_length)

        if not lengths.all():
            empty = np.flatnonzero(lengths == 0)
            ids = np.insert(ids, np.cumsum(lengths)[empty], UNKNOWN_ID)
            lengths[empty] = 1
        return Encoded(ids, lengths)

    def _ids_of_chunks(self, chunks: list[str]) -> list[tuple[int, ...]]:
        """The ids of each chunk.

        The cache needs no lock: nothing is ever taken out of a dictionary that is in use, and what another
        thread adds meanwhile is what this one would add.
        """
        cache = self._cache
        rows = [*map(cache.get, chunks)]
        if None not in rows:
            return cast("list[tuple[int, ...]]", rows)

        new = list({chunk for chunk, ids in zip(chunks, rows, strict=True) if ids is None})
        encodings = self.tokenizer.encode_batch_fast(new, add_special_tokens=False)
        kept = (encoding.ids for encoding in encodings)
        if self.unknown == "drop":
            kept = ([word for word in ids if word != UNKNOWN_ID] for ids in kept)
        fresh = dict(zip(new, map(tuple, kept), strict=True))

        if len(cache) > CACHED_CHUNKS:
            self._cache = cache = {}
        cache.update((chunk, ids) for chunk, ids in fresh.items() if len(chunk) <= LONGEST_CACHED)
        return [fresh[chunk] if ids is None else ids for chunk, ids in zip(chunks, rows, strict=True)]


def _parsed(text: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises Exception itself if it cannot parse the text
        raise InputError(str(error)) from error


def _check_state(state: dict[str, Any]) -> int:
    """Checks what `Tokenizer.from_str` does not, and returns max_length."""
    truncation, model = (field(state, name, dict, "vocabulary") for name in ("truncation", "model"))
    if (kind := field(model, "type", str, "model")) != "WordLevel":
        raise InputError(f"model.type: want 'WordLevel', got {kind!r:.100}")
    if (unknown := field(model, "unk_token", str, "model")) != UNKNOWN:
        raise InputError(f"model.unk_token: want {UNKNOWN!r}, got {unknown!r:.100}")

    for name in ("padding", "normalizer", "post_processor"):
        if state.get(name) is not None:
            raise InputError(f"{name}: want null, got {state[name]!r:.100}")
    if state.get("added_tokens", []):
        raise InputError("added_tokens: want none")

    splitter = state.get("pre_tokenizer")
    if not isinstance(splitter, dict) or splitter.get("type") not in PRE_TOKENIZERS:
        raise InputError(f"pre_tokenizer: want one of {', '.join(PRE_TOKENIZERS)}, got {splitter!r:.100}")
    ids = list(field(model, "vocab", dict, "model").values())
    if not all(has_type(number, int) for number in ids) or sorted(ids) != list(range(len(ids))):
        raise InputError(f"model.vocab: want each number from 0 to {len(ids) - 1} once")

    max_length: int = field(truncation, "max_length", int, "truncation")
    if not 1 <= max_length <= LONGEST_SENTENCE:
        raise InputError(f"truncation.max_length: want 1 to {LONGEST_SENTENCE}, got {max_length}")
    return max_length


def _positions(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The position of each element in its segment: 0, ..., lengths[0] - 1, 0, ..., lengths[1] - 1, ..."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(starts, lengths)


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
