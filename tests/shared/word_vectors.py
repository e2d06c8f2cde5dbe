"""Files of word vectors as they are published."""

from pathlib import Path
from typing import Any


def write_vectors(path: Path, words: Any, vectors: Any) -> Path:
    """Writes a text file with a word and its numbers on each line, as of GloVe; returns its path."""
    rows = zip(words, vectors.tolist(), strict=True)
    path.write_text("".join(f"{word} {' '.join(map(repr, row))}\n" for word, row in rows), encoding="utf-8")
    return path
