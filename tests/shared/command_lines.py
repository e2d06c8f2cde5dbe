"""What the tests of the command line share."""

from fastqt.cli import main

SMALL = [
    "--word-dim",
    "8",
    "--hidden-size",
    "6",
    "--batch-size",
    "40",
    "--context-size",
    "1",
]  # a quick training


def error_line(capsys, *arguments):
    """Runs a command that fails, and returns its one line on standard error."""
    try:
        status = main([str(argument) for argument in arguments])
    except SystemExit as exit:  # argparse ends in this way
        status = exit.code
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    assert err.startswith("fastqt: ")
    assert err.count("\n") == 1
    return err.removeprefix("fastqt: ").rstrip("\n")
