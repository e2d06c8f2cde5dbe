"""What the tests of the command line share."""

import re

from fastqt.sentences.cli import main

# A quick training.
SMALL = ["--word-dim", "8", "--hidden-size", "6", "--batch-size", "40", "--context-size", "1"]


def error_line(capsys, *arguments):
    """Runs a command that fails, and returns its one line on standard error, after lines of progress."""
    try:
        status = main([str(argument) for argument in arguments])
    except SystemExit as exit:  # argparse ends in this way
        status = exit.code
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    *progress, last = err.splitlines()
    assert all(re.match(r"encode: |\w+: [\d.]+ s, ", line) for line in progress)
    assert last.startswith("fastqt: ")
    return last.removeprefix("fastqt: ")
