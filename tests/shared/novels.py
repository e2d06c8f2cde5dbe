"""A few hundred sentences of the novels, for tests of commands on real text."""

import lzma
from itertools import islice
from pathlib import Path

import pytest

DATA = Path(__file__).parents[3] / "shared" / "data"


def novel(path: Path, lines: int, *, first: int = 0) -> str:
    """Writes lines of the held-out novels to a file, and returns its path; skips the test without them."""
    corpus = DATA / "corpus" / "valid.txt.xz"
    if not corpus.exists():
        pytest.skip("shared/data/corpus/valid.txt.xz, the held-out novels, is absent")
    with lzma.open(corpus, "rt", encoding="utf-8") as file:
        path.write_text("".join(islice(file, first, first + lines)), encoding="utf-8")
    return str(path)
