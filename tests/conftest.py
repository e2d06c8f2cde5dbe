"""What several test modules share."""

import os
import random
from pathlib import Path

import pytest

# Before anything imports fastqt.kernels: here Triton interprets them.
os.environ["TRITON_INTERPRET"] = "1"


def planted_text(documents: int, seed: int = 0) -> str:
    """Documents of six sentences. Each has words of its document's topic and a word of its place there."""
    generator = random.Random(seed)
    return "\n\n".join(
        "\n".join(
            " ".join(
                [
                    f"place{place}",
                    *(f"topic{topic}word{generator.randrange(3)}" for _ in range(generator.randint(2, 4))),
                ]
            )
            for place in range(6)
        )
        for topic in (generator.randrange(30) for _ in range(documents))
    )


@pytest.fixture
def low_memory_in_tiles(monkeypatch) -> None:
    """With memory="low" the CPU engine takes tiles, as it does where 64 whole rows of scores do not fit."""
    monkeypatch.setattr("fastqt.engines.cpu.contrastive.LOW_BYTES", 0)


@pytest.fixture(scope="module")
def two_ranks():
    """A group of two processes, which a file's tests share."""
    from tests.shared.ranks import Ranks

    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture
def planted(tmp_path) -> tuple[str, str]:
    """Paths of a training text and a held-out text by `planted_text`, of 480 and 120 sentences."""
    paths = tmp_path / "planted.txt", tmp_path / "held_out.txt"
    for seed, (path, documents) in enumerate(zip(paths, (80, 20), strict=True)):
        Path(path).write_text(planted_text(documents, seed))
    return str(paths[0]), str(paths[1])
