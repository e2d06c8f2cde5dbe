"""A shell completes commands, the options of each, and their choices."""

import shutil
import subprocess

import pytest

from fastqt.sentences.cli import main
from fastqt.sentences.options.option import options_of
from fastqt.sentences.runs.config import KINDS, TrainConfig


@pytest.fixture
def complete(capsys):
    """What bash completes the last of some words to."""
    if (bash := shutil.which("bash")) is None:
        pytest.skip("bash is not installed")
    with pytest.raises(SystemExit, match="0"):
        main(["--completion"])
    script = capsys.readouterr().out

    def answers(*words):
        quoted = " ".join(f"'{word}'" for word in words)
        ask = (
            f'COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _fastqt; printf "%s\\n" "${{COMPREPLY[@]}}"'
        )
        done = subprocess.run([bash, "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    return answers


def test_commands_options_and_choices_are_completed(complete):
    assert {"train", "embed", "mine"} <= complete("fastqt", "")
    assert complete("fastqt", "tra") == {"train"}
    options = {each.flag for name, each in options_of(TrainConfig).items() if name != "corpus"}
    assert options <= complete("fastqt", "train", "--")
    assert complete("fastqt", "train", "--model", "") == set(KINDS)
    assert complete("fastqt", "mine", "--samp") == {"--sampling"}
    assert complete("fastqt", "embed", "run", "file") == set()
