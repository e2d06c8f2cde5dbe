"""A synthetic corpus for trainings that need text and none in particular."""

from __future__ import annotations

import random
from pathlib import Path


def write_corpus(path: Path, sentences: int, seed: int) -> None:
    """Writes documents of eight sentences, whose words are rare and frequent as in a language.

    Args:
        path: the file to write.
        sentences: their number.
        seed: determines the text.
    """
    generator = random.Random(seed)
    words = [f"word{number}" for number in range(5000)]
    shares = [1 / rank for rank in range(1, len(words) + 1)]
    lines = []
    for number in range(sentences):
        if number and number % 8 == 0:
            lines.append("")
        # Each document has a word of its own, so that there is something to learn.
        lines.append(
            " ".join(
                [f"topic{number // 8 % 500}", *generator.choices(words, shares, k=generator.randint(4, 20))]
            )
        )
    path.write_text("\n".join(lines) + "\n")
