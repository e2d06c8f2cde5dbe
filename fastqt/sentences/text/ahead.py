"""Texts that a thread encodes while they are read already, in the order in which they are read."""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastqt.sentences.text.vocabulary import Lexicon

TEXTS_AT_ONCE = 4096  # that the thread encodes before it looks whether anybody still wants them


class Texts(NamedTuple):
    """The ids of n texts, of which some may be missing."""

    ids: NDArray[np.int32]  # (T,), those of all texts, one text after the other
    starts: NDArray[np.int64]  # (n,), where the ids of each text begin
    lengths: NDArray[np.int64]  # (n,), how many each text has
    complete: bool


class EncodedAhead:
    """The ids of texts, which a thread encodes: whoever reads a text waits for it.

    A text's ids are those of `vocabulary.encode`, whatever the order. The thread ends with the last text, or
    when nobody holds this object any more, or with the program. An error of the vocabulary is raised where a
    text is waited for. The list of texts is emptied on the way: they are not needed twice.

    Args:
        vocabulary: one that several threads may use at the same time.
        texts: n texts.
        order: (n,) int64, their indices in the order in which they are encoded.
    """

    def __init__(self, vocabulary: Lexicon, texts: list[str], order: NDArray[np.int64]) -> None:
        self._ids = np.empty(len(texts), np.int32)
        self._starts = np.zeros(len(texts), np.int64)
        self._lengths = np.full(len(texts), -1, np.int64)  # -1 while a text is not encoded
        self._used = 0  # of the ids
        self._condition = threading.Condition()
        self._error: BaseException | None = None
        self._left = len(texts)  # texts that are not encoded
        arguments = weakref.ref(self), vocabulary, texts, order
        threading.Thread(target=_encode_all, args=arguments).start()

    def wait(self, texts: NDArray[np.int64]) -> Texts:
        """What has the texts with these indices, once they are encoded; raises what the thread failed at."""
        with self._condition:
            self._condition.wait_for(lambda: self._error is not None or (self._lengths[texts] >= 0).all())
            if self._error is not None:
                raise self._error
            return Texts(self._ids, self._starts, self._lengths, complete=not self._left)

    def take(self, texts: NDArray[np.int64], ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Keeps the ids of these texts, concatenated."""
        with self._condition:
            end = self._used + len(ids)
            if end > len(self._ids):  # a copy: the former array may be in use
                self._ids = np.concatenate(
                    [self._ids[: self._used], np.empty(2 * end - self._used, np.int32)]
                )
            self._ids[self._used : end] = ids
            self._starts[texts] = self._used + lengths.cumsum() - lengths
            self._lengths[texts] = lengths
            self._used = end
            self._left -= len(texts)
            if not self._left:
                self._ids = self._ids[:end].copy()
            self._condition.notify_all()

    def fail(self, error: BaseException) -> None:
        """Gives who waits an error in place of a text."""
        with self._condition:
            self._error = error
            self._condition.notify_all()


def _encode_all(
    reference: weakref.ref[EncodedAhead],
    vocabulary: Lexicon,
    texts: list[str],
    order: NDArray[np.int64],
) -> None:
    for begin in range(0, len(order), TEXTS_AT_ONCE):
        some = order[begin : begin + TEXTS_AT_ONCE]
        try:
            encoded = vocabulary.encode([texts[i] for i in some.tolist()])
        except BaseException as error:  # for the one who waits
            if (ahead := reference()) is not None:
                ahead.fail(error)
            return
        for i in some.tolist():
            texts[i] = ""
        ahead = reference()
        if ahead is None or not threading.main_thread().is_alive():
            return
        ahead.take(some, encoded.ids, encoded.lengths)
        del ahead
