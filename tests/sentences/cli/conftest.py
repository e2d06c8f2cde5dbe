"""A trained model, and data to evaluate it on."""

import pytest

from fastqt.sentences.cli import main
from tests.shared.command_lines import SMALL


@pytest.fixture
def model(planted, tmp_path, capsys):
    """The directory of a trained model."""
    assert main(["train", planted[0], "--out", str(tmp_path / "model"), *SMALL]) == 0
    capsys.readouterr()
    return str(tmp_path / "model")


@pytest.fixture
def reviews(tmp_path):
    """A data directory with two tasks: reviews, whose class is given by one word, and pairs of sentences."""
    rows = [f"{label}\tplace{label} topic{number}word1" for label in (0, 1) for number in range(20)]
    for task, file, lines in (
        ("MR", "all", rows),
        ("STS", "STS12", [f"one\t{n}\tplace1 topic{n}word0\tplace2 topic1word{n}" for n in range(3)]),
    ):
        (tmp_path / "data" / task).mkdir(parents=True)
        (tmp_path / "data" / task / f"{file}.tsv").write_text("\n".join(lines) + "\n")
    return str(tmp_path / "data")
