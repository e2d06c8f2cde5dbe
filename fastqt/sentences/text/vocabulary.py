"""A vocabulary: words that are counted in a corpus, or the tokens of a file of the `tokenizers` library."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Iterable, Iterator, Sequence
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
from fastqt.sentences.json_text import Digest, field, has_type, read_object
from fastqt.sentences.text.counting import COUNTED_WORDS, count_words

UNKNOWN = "<unk>"
LARGEST_FILE = 1 << 30  # bytes of a vocabulary.json
LONGEST_SENTENCE = 1 << 24  # tokens
MOST_TOKENS = 1 << 31
PROBES = ["a word", "", "\u2603 \U0010ffff"]  # texts that are encoded to see whether a file works
# A chunk is a piece of text between white space. These limits bound the memory of the encoder's cache.
CACHED_CHUNKS = 1 << 19
LONGEST_CACHED = 64  # characters; longer chunks seldom come again

Unknown = Literal["keep", "drop"]


class Lexicon(Protocol):
    """Whatever encodes sentences as token ids: a vocabulary, or the tokenizer of a checkpoint."""

    def __len__(self) -> int: ...

    def encode(self, sentences: Sequence[str]) -> Encoded: ...

    def special_ids(self) -> list[int]:
        """The ids that stand for no word of a text, such as those of [CLS] and of unknown words."""
        ...


class Vocabulary:
    """The tokens of a tokenizer and their ids.

    Several threads may encode at the same time. The ids of chunks between white space
    are cached for a tokenizer that looks words up, with which running text is encoded several times as fast.

    Args:
        tokenizer: a `tokenizers.Tokenizer`. Its own truncation is replaced, and its padding is not used.
        unknown: "keep" encodes what is unknown as the tokenizer does; "drop" leaves its unknown token out.
        max_length: the number of tokens that are kept of a sentence, after unknown ones
            were dropped.

    Attributes:
        filler: the token of a sentence that has none: the unknown one, or that of padding, or the first.
        counts: (V,) int64, how often each word occurs in the text that the vocabulary was built from, and for
            `<unk>` all other words together; None for a vocabulary that was not built.
    """

    counts: NDArray[np.int64] | None = None

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        unknown: Unknown = "keep",
        max_length: int = 50,
    ) -> None:
        self.tokenizer, self.unknown = tokenizer, unknown
        self.max_length = max_length
        self._padding = tokenizer.padding
        tokenizer.no_padding()

        state = json.loads(tokenizer.to_str())
        self._has_cache = _splits_at_spaces(state)
        if unknown == "keep" and not self._has_cache:
            tokenizer.enable_truncation(max_length)
        else:
            tokenizer.no_truncation()  # `encode` truncates

        self._size = max(tokenizer.get_vocab().values(), default=-1) + 1
        if not 1 <= self._size < MOST_TOKENS:
            raise InputError(f"model.vocab: want ids below {MOST_TOKENS:,}, got {self._size - 1:,}")
        self.unknown_id = _unknown_id(tokenizer, state["model"])
        padding_id = (self._padding or {}).get("pad_id", 0)
        if padding_id >= self._size:
            raise InputError(f"padding.pad_id: want less than {self._size:,}, got {padding_id:,}")
        self.filler: int = padding_id if self.unknown_id is None else self.unknown_id

        self._cache: dict[str, tuple[int, ...]] = {}  # the ids of chunks
        self.encode(PROBES)

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

        Case matters. The `tokenizers` library splits a sentence at white space and at punctuation, each mark
        of which is a word of its own (its BERT rule).

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
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        unknown: Unknown = "keep",
        max_length: int | None = None,
        digest: Digest | None = None,
    ) -> Vocabulary:
        """Reads a file that `save` of a tokenizer or of this class wrote, usually called tokenizer.json.

        `max_length` is by default that of the file's truncation. The bytes go into `digest` too.
        """
        try:
            state = read_object(path, most_bytes=LARGEST_FILE, digest=digest)
        except FileNotFoundError:
            raise InputError(f"no vocabulary: {os.fspath(path)} is missing") from None
        try:
            _check_state(state)
            length = _max_length(state) if max_length is None else max_length
            with _errors_in_words():
                # The library must not see another text than the one that was checked.
                tokenizer = Tokenizer.from_str(json.dumps(state))
            return cls(tokenizer, unknown=unknown, max_length=length)
        except InputError as error:
            raise InputError(f"{os.fspath(path)} is no usable tokenizer file: {one_line(error)}") from error

    def to_json(self) -> str:
        """The vocabulary as JSON of the `tokenizers` library, which has no place for `unknown`."""
        tokenizer = copy.deepcopy(self.tokenizer)  # other threads encode with this one
        tokenizer.enable_truncation(self.max_length)
        if self._padding is not None:
            tokenizer.enable_padding(**self._padding)
        text: str = tokenizer.to_str(pretty=True)
        return text

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_json()` to a file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.to_json())

    def __len__(self) -> int:
        """One more than the highest id, which some files have beyond their number of tokens."""
        return self._size

    def special_ids(self) -> list[int]:
        """The ids that stand for no part of a text: of special tokens, of what is unknown, and `filler`."""
        named = self.tokenizer.get_added_tokens_decoder().items()
        special = [number for number, token in named if token.special]
        with _errors_in_words():
            special += self.tokenizer.encode("", add_special_tokens=True).ids
        return sorted({self.filler, *special, *([] if self.unknown_id is None else [self.unknown_id])})

    def encode(self, sentences: Sequence[str]) -> Encoded:
        """Encodes sentences.

        Each sentence gets at most `max_length` ids. A sentence without any gets `filler`, so that none is
        empty.
        """
        sentences = list_of_texts("sentences", sentences)
        if self._has_cache:
            chunks = [sentence.split() for sentence in sentences]
            rows = self._ids_of_chunks([*chain.from_iterable(chunks)])
            counts = np.fromiter(map(len, chunks), dtype=np.int64, count=len(chunks))
        else:
            rows = self._ids_of(sentences)
            counts = np.ones(len(sentences), dtype=np.int64)

        sizes = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        ids = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(sizes.sum()))
        ends = np.concatenate([[0], np.cumsum(sizes)])[np.cumsum(counts)]
        lengths = np.diff(ends, prepend=0)
        ids = ids[_positions(lengths) < self.max_length]
        lengths = np.minimum(lengths, self.max_length)

        if not lengths.all():
            empty = np.flatnonzero(lengths == 0)
            ids = np.insert(ids, np.cumsum(lengths)[empty], self.filler)
            lengths[empty] = 1
        return Encoded(ids, lengths)

    def _ids_of(self, texts: list[str]) -> list[tuple[int, ...]]:
        """The ids of each text, without dropped ones."""
        with _errors_in_words():
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        kept = (encoding.ids for encoding in encodings)
        if self.unknown == "drop":
            kept = ([each for each in ids if each != self.unknown_id] for ids in kept)
        return [*map(tuple, kept)]

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
        fresh = dict(zip(new, self._ids_of(new), strict=True))
        if len(cache) > CACHED_CHUNKS:
            self._cache = cache = {}
        cache.update((chunk, ids) for chunk, ids in fresh.items() if len(chunk) <= LONGEST_CACHED)
        return [fresh[chunk] if ids is None else ids for chunk, ids in zip(chunks, rows, strict=True)]


def _splits_at_spaces(state: dict[str, Any]) -> bool:
    """Whether a tokenizer looks words up between white space, as `Vocabulary.build` makes them."""
    kinds = state["model"].get("type"), (state.get("pre_tokenizer") or {}).get("type")
    others = ("normalizer", "post_processor", "added_tokens")
    return kinds == ("WordLevel", "BertPreTokenizer") and not any(state.get(name) for name in others)


def _unknown_id(tokenizer: Tokenizer, model: dict[str, Any]) -> int | None:
    """The id of what a tokenizer does not know; None where it has no such token."""
    if "unk_id" in model:
        unknown_id: int | None = model["unk_id"]
        return unknown_id
    token = model.get("unk_token")
    number: int | None = None if token is None else tokenizer.token_to_id(token)
    return number


def _check_state(state: dict[str, Any]) -> None:
    """Checks what the library does not."""
    model = field(state, "model", dict, "tokenizer")
    if model.get("dropout") is not None:  # a resumed training would have other bits
        raise InputError(f"model.dropout: want null, got {model['dropout']!r:.100}")
    if model.get("type") == "Unigram" and not has_type(model.get("unk_id"), int):
        raise InputError(f"model.unk_id: want the id of the unknown token, got {model.get('unk_id')!r:.100}")
    padding = state.get("padding")
    if padding is not None and not has_type(field(state, "padding", dict, "tokenizer").get("pad_id"), int):
        raise InputError(f"padding.pad_id: want an id, got {padding.get('pad_id')!r:.100}")


def _max_length(state: dict[str, Any]) -> int:
    truncation = field(state, "truncation", dict, "tokenizer")
    max_length: int = field(truncation, "max_length", int, "truncation")
    if not 1 <= max_length <= LONGEST_SENTENCE:
        raise InputError(f"truncation.max_length: want 1 to {LONGEST_SENTENCE}, got {max_length}")
    return max_length


@contextlib.contextmanager
def _errors_in_words() -> Iterator[None]:
    """Makes an InputError of what the library raises: Exception itself, or a panic, which is none."""
    try:
        yield
    except MemoryError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(one_line(error)) from error


def _positions(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The position of each element in its segment: 0, ..., lengths[0] - 1, 0, ..., lengths[1] - 1, ..."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(starts, lengths)
