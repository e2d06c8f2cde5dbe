"""The command line of fastqt."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any

from fastqt._version import __version__
from fastqt.errors import InputError
from fastqt.machine.memory import keep_freed_memory
from fastqt.sentences.cli.arguments import build_parser
from fastqt.sentences.cli.completion import SHELL_WORDS, print_words
from fastqt.sentences.cli.streams import (
    BAD_INPUT,
    discard_what_cannot_be_written,
    fail,
    in_words,
    prepare_streams,
)
from fastqt.sentences.cli.table import COMMANDS
from fastqt.sentences.errors import OtherRankError

# torch reads this variable when it allocates its first tensor. With it, large tensors lie in huge pages, and
# the new tables of an optimiser do not cost a page fault every 4 KiB. A value that the user has set is kept.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

ALLOCATION = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")  # in a RuntimeError of torch


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, by default that of this process, and returns the exit status.

    It is 0, or 1 where `fastqt check` finds something wrong or a task of `fastqt evaluate` fails, or 2 after
    wrong input or where something could not be read or written, or 128 plus the number of the signal that
    stopped the command.
    """
    prepare_streams()
    if sys.stdout is None:
        return fail("cannot write to standard output: it is closed")

    try:
        try:
            return _run(arguments)
        finally:  # also where argparse exits, after --help for example
            sys.stdout.flush()
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return fail(
            f"fastqt {__version__} needs torch >= 2.11, and there is none: install torch first, then fastqt"
        )
    except OtherRankError as error:
        return BAD_INPUT if error.is_told else fail(str(error))
    except InputError as error:
        return fail(str(error))
    except OSError as error:
        return fail(in_words(error))
    except MemoryError as error:
        # Python's own errors of this kind mostly have no text.
        return fail(f"not enough memory: {error}" if str(error) else "not enough memory")
    except RuntimeError as error:
        if (tried := ALLOCATION.search(str(error))) is None:
            raise
        return fail(f"not enough memory for {tried[1]}")
    except KeyboardInterrupt:
        return fail("interrupted", 128 + signal.SIGINT)
    finally:
        discard_what_cannot_be_written()


def _run(arguments: Sequence[str] | None) -> int:
    parser = build_parser()
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == [SHELL_WORDS]:  # argparse would take away a word that is "--"
        return print_words(parser, words[1:])
    options = vars(parser.parse_args(arguments))
    name = options.pop("command")
    if name is None:
        parser.print_help()
        return 0
    if name == "train" and arguments is None:  # This process trains, and does nothing else.
        keep_freed_memory()
    options = {key: tuple(each) if isinstance(each, list) else each for key, each in options.items()}
    _check_outputs(options)
    return COMMANDS[name].of(options).run()


def _check_outputs(options: dict[str, Any]) -> None:
    """Checks that the file of --json is none that another option names; each command checks its --out."""
    if not os.path.isfile(path := options.get("json") or ""):
        return

    from fastqt.sentences.runs.lexicon import check_is_not_read

    words: list[str] = []
    for name, value in options.items():
        if name != "json" and isinstance(value, (str, tuple)):
            words += [value] if isinstance(value, str) else map(str, value)
    # A model may be written as word-vectors:FILE or sif:FILE,COUNTS.
    check_is_not_read(path, [part for word in words for part in (word, *re.split("[:,]", word)) if part])
