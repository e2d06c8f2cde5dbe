"""Vocabularies of sub-words: the tokens of a file of the `tokenizers` library."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from fastqt.errors import InputError, one_line
from fastqt.nn.tokens import Encoded, list_of_texts
from fastqt.sentences.json_text import field, has_type, read_object
from fastqt.sentences.text.patterns import ends_soon
from fastqt.sentences.text.vocabulary import LARGEST_FILE, Unknown

SpecialTokens = Literal["none", "add"]
MODELS = ("BPE", "WordPiece", "Unigram", "WordLevel")
MOST_TOKENS = 1 << 31
MOST_GROWTH = 64  # by how much the normalizers may lengthen a text
# What works by a fixed rule. Others hold patterns, which a file can choose so that they never end: see
# `ends_soon`.
NORMALIZERS = (
    "BertNormalizer",
    "ByteLevel",
    "Lowercase",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Nmt",
    "Precompiled",
    "Prepend",
    "Strip",
    "StripAccents",
)
PRE_TOKENIZERS = (
    "BertPreTokenizer",
    "ByteLevel",
    "CharDelimiterSplit",
    "Digits",
    "Metaspace",
    "Punctuation",
    "UnicodeScripts",
    "Whitespace",
    "WhitespaceSplit",
)
PROBES = ["a word", "", "\u2603 \U0010ffff"]  # texts that are encoded to see whether a file works


class TokenizerVocabulary:
    """The tokens of a tokenizer and their ids.

    Args:
        tokenizer: a `tokenizers.Tokenizer`. Its own truncation is replaced, and its padding is not used.
        unknown: "keep" encodes what is unknown as the tokenizer does; "drop" leaves its unknown token out.
        special_tokens: "add" those that its post-processor adds, such as [CLS] and [SEP], or "none".
        max_length: the number of tokens that are kept of a sentence, special ones included.

    Attributes:
        filler: the token of a sentence that has none: the unknown one, or that of padding, or the first.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        unknown: Unknown = "keep",
        special_tokens: SpecialTokens = "none",
        max_length: int = 50,
    ) -> None:
        for name, value, choices in (
            ("unknown", unknown, ("keep", "drop")),
            ("special_tokens", special_tokens, ("none", "add")),
        ):
            if value not in choices:
                raise InputError(f"{name}: want {choices[0]!r} or {choices[1]!r}, got {value!r}")
        if unknown == "drop" and special_tokens == "add":
            raise InputError("unknown: want 'keep' where special_tokens is 'add', got 'drop'")

        self.tokenizer, self.unknown, self.special_tokens = tokenizer, unknown, special_tokens
        self.max_length = max_length
        self._padding = tokenizer.padding
        tokenizer.no_padding()
        special = tokenizer.num_special_tokens_to_add(False) if special_tokens == "add" else 0
        if max_length < special + 1:
            raise InputError(f"max_length: want at least {special + 1}, got {max_length}")

        if unknown == "keep":
            tokenizer.enable_truncation(max_length)
        else:
            tokenizer.no_truncation()  # `encode` truncates, because unknown tokens are dropped first

        ids = tokenizer.get_vocab().values()
        self._size = max(ids, default=-1) + 1
        if not 1 <= self._size < MOST_TOKENS:
            raise InputError(f"model.vocab: want ids below {MOST_TOKENS:,}, got {self._size - 1:,}")

        self.unknown_id = _unknown_id(tokenizer)
        padding_id = (self._padding or {}).get("pad_id", 0)
        if padding_id >= self._size:
            raise InputError(f"padding.pad_id: want less than {self._size:,}, got {padding_id:,}")
        self.filler: int = padding_id if self.unknown_id is None else self.unknown_id
        self.encode(PROBES)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        unknown: Unknown = "keep",
        special_tokens: SpecialTokens = "none",
        max_length: int = 50,
    ) -> TokenizerVocabulary:
        """Reads a file that `save` of a tokenizer or of this class wrote, usually called tokenizer.json.

        A part that cannot be used, such as a regular expression that may take for ever, is refused.
        """
        try:
            state = read_object(path, most_bytes=LARGEST_FILE)
        except FileNotFoundError:
            raise InputError(f"no vocabulary: {os.fspath(path)} is missing") from None
        try:
            _check_state(state)
            with _errors_in_words():
                # The library must not see another text than the one that was checked.
                tokenizer = Tokenizer.from_str(json.dumps(state))
            return cls(tokenizer, unknown=unknown, special_tokens=special_tokens, max_length=max_length)
        except InputError as error:
            raise InputError(f"{os.fspath(path)} is no usable tokenizer file: {one_line(error)}") from error

    def to_json(self) -> str:
        """The tokenizer as JSON of its library, which has no place for the other arguments of the class."""
        tokenizer = self.tokenizer
        if self._padding is not None:
            tokenizer = copy.deepcopy(tokenizer)  # other threads encode with the first
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
        with _errors_in_words():
            encodings = self.tokenizer.encode_batch_fast(
                sentences, add_special_tokens=self.special_tokens == "add"
            )
        rows: list[list[int]] = [encoding.ids for encoding in encodings]
        if self.unknown == "drop":
            rows = [[each for each in ids if each != self.unknown_id][: self.max_length] for ids in rows]
        rows = [ids or [self.filler] for ids in rows]
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        ids = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(lengths.sum()))
        return Encoded(ids, lengths)


def _unknown_id(tokenizer: Tokenizer) -> int | None:
    """The id of what a tokenizer does not know; None where it has no such token."""
    model = json.loads(tokenizer.to_str())["model"]
    if "unk_id" in model:
        unknown_id: int | None = model["unk_id"]
        return unknown_id
    token = model.get("unk_token")
    number: int | None = None if token is None else tokenizer.token_to_id(token)
    return number


def _check_state(state: dict[str, Any]) -> None:
    """Checks what the library does not."""
    model = field(state, "model", dict, "tokenizer")
    if (kind := field(model, "type", str, "model")) not in MODELS:
        raise InputError(f"model.type: want one of {', '.join(MODELS)}, got {kind!r:.100}")
    if model.get("dropout") is not None:
        raise InputError(f"model.dropout: want null, got {model['dropout']!r:.100}")
    if kind == "Unigram" and not has_type(model.get("unk_id"), int):
        raise InputError(f"model.unk_id: want the id of the unknown token, got {model.get('unk_id')!r:.100}")
    growth = 1
    for part in _parts(state, "normalizer", "normalizers", NORMALIZERS, "Replace"):
        if part["type"] in ("Replace", "Prepend"):
            growth *= max(1, len(str(part.get("content", part.get("prepend", "")))))
    if growth > MOST_GROWTH:
        raise InputError(f"normalizer: want at most {MOST_GROWTH} characters for one, got {growth:,}")
    for _ in _parts(state, "pre_tokenizer", "pretokenizers", PRE_TOKENIZERS, "Split"):
        pass
    padding = state.get("padding")
    if padding is not None and not has_type(field(state, "padding", dict, "tokenizer").get("pad_id"), int):
        raise InputError(f"padding.pad_id: want an id, got {padding.get('pad_id')!r:.100}")


def _parts(
    holder: dict[str, Any], name: str, list_name: str, allowed: tuple[str, ...], with_pattern: str
) -> Iterator[dict[str, Any]]:
    """The parts of which a normalizer or pre-tokenizer consists, after they were checked."""
    part = holder.get(name)
    if part is None:
        return
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "Sequence":
        for number, each in enumerate(field(part, list_name, list, name)):
            yield from _parts(
                {f"{name}[{number}]": each}, f"{name}[{number}]", list_name, allowed, with_pattern
            )
        return
    if kind == with_pattern:
        _check_pattern(part.get("pattern"), name)
    elif kind not in allowed:
        choices = ", ".join((*allowed, with_pattern, "Sequence"))
        raise InputError(f"{name}: want one of {choices}, got {part!r:.100}")
    yield part


def _check_pattern(pattern: Any, name: str) -> None:
    match pattern:
        case {"String": str(text)} if text and len(pattern) == 1:
            return
        case {"Regex": str(text)} if len(pattern) == 1 and ends_soon(text):
            return
    raise InputError(
        f"{name}.pattern: want a text, or a regular expression without repetitions in groups and with few of "
        f"them one after the other, got {pattern!r:.100}"
    )


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
