"""Texts that a batch has twice: a copy of a positive, or of the query itself, is no negative."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

# So many rows for each row of a batch are looked at, before it is filled with what there is: the time is
# that of so many passes at most, whatever the corpus.
MOST_LOOKS = 32


def fingerprints(texts: Iterable[str]) -> NDArray[np.uint64]:
    """A number for each text, (n,), which is the same for equal texts, in every process."""
    digests = (blake2b(text.strip().encode("utf-8", "replace"), digest_size=8).digest() for text in texts)
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def apart(order: NDArray[np.int64], texts: NDArray[np.uint64], size: int) -> NDArray[np.int64]:
    """The same rows, reordered so that no batch of `size` consecutive ones has a text twice, if that can be.

    A row that repeats a text of its batch waits for the next one. An order without such rows stays as it is.
    Batches that cannot be filled otherwise, such as the last ones, keep their repetitions.

    Args:
        order: (n,), the indices of rows.
        texts: (rows, columns), the fingerprints of each row's texts.
        size: how many rows a batch has.
    """
    of_row = [frozenset(row) for row in texts.tolist()]
    coming: deque[int] = deque(order.tolist())
    arranged: list[int] = []
    while coming:
        batch, waiting, seen = [], [], set[int]()
        for _ in range(min(len(coming), MOST_LOOKS * size)):
            row = coming.popleft()
            if seen.isdisjoint(of_row[row]):
                batch.append(row)
                seen |= of_row[row]
            else:
                waiting.append(row)
            if len(batch) == size:
                break
        coming.extendleft(reversed(waiting))
        missing = min(size - len(batch), len(coming))
        batch += [coming.popleft() for _ in range(missing)]
        arranged += batch
    return np.array(arranged, dtype=np.int64)


def repeating_rows(batches: Iterable[NDArray[np.int64]], texts: NDArray[np.uint64]) -> tuple[int, int]:
    """How many rows of batches have a text of another row of their batch, and how many rows there are."""
    repeating = total = 0
    for batch in batches:
        of_row = [set(row) for row in texts[batch].tolist()]
        counts = Counter(itertools.chain.from_iterable(of_row))
        repeating += sum(any(counts[text] > 1 for text in row) for row in of_row)
        total += len(of_row)
    return repeating, total
