"""A trained model."""

import pytest
from command_lines import SMALL

from fastqt.cli import main


@pytest.fixture
def model(planted, tmp_path, capsys):
    """The directory of a trained model."""
    assert main(["train", planted[0], "--out", str(tmp_path / "model"), *SMALL]) == 0
    capsys.readouterr()
    return str(tmp_path / "model")
