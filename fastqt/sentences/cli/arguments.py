"""The options of the command line. This module imports no torch, so that `fastqt --help` answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from fastqt._version import __version__
from fastqt.sentences.cli.completion import SCRIPTS, Completion
from fastqt.sentences.cli.streams import BAD_INPUT
from fastqt.sentences.cli.table import COMMANDS


class _Parser(argparse.ArgumentParser):
    """A parser whose errors take one line, without the usage text, and name the option that was meant."""

    _words: Sequence[str] = ()  # the arguments of the command that this parser reads
    # Has its help depend on these arguments.
    narrow: Callable[[argparse.ArgumentParser, Sequence[str]], None] | None = None

    def error(self, message: str) -> NoReturn:
        if hint := self._meant_command():
            message = message.partition(" (choose from")[0]  # it is one of fourteen
        hint = hint or meant(self._words, self._option_string_actions)
        self.exit(BAD_INPUT, f"fastqt: {message}{hint} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses what it knows, and remembers all for the message of an error."""
        self._words = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses all; a command itself refuses what it does not know, so that the message names its help."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._command(parsed.command).error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed

    def _commands(self) -> dict[str, argparse.ArgumentParser]:
        """The parsers of all commands, by their names; none where this is the parser of a command."""
        made = (each for each in self._actions if isinstance(each, argparse._SubParsersAction))
        return next((dict(each.choices) for each in made), {})

    def _command(self, name: str | None) -> argparse.ArgumentParser:
        return self._commands().get(name or "", self)

    def _meant_command(self) -> str:
        """For a message: the command that is nearest to the first word, if that is none; or ""."""
        commands, word = self._commands(), next((each for each in self._words if each[:1] != "-"), "")
        if word in commands:
            return ""
        return "".join(f"; did you mean {name}?" for name in get_close_matches(word, commands, n=1))

    def print_help(self, file: Any = None) -> None:
        """Writes the help text. argparse would ignore an error once the text is longer than a buffer."""
        if self.narrow is not None:
            self.narrow(self, self._words)
        (file or sys.stdout).write(self.format_help())


def meant(words: Sequence[str], options: Collection[str]) -> str:
    """For a message: the options that are nearest to words which are none, such as --batchsize; or "".

    argparse takes the beginning of an option for the option itself.
    """
    written = [word.split("=")[0] for word in words if word.startswith("--") and word != "--"]
    wrong = [word for word in written if not any(option.startswith(word) for option in options)]
    nearest = {word: get_close_matches(word, options, n=1) for word in wrong}
    return "".join(f"; {word}: did you mean {match[0]}?" for word, match in nearest.items() if match)


def build_parser() -> argparse.ArgumentParser:
    """The parser of a command line.

    The parsed result has the command's name as `command`, None if none was given, and otherwise the values
    that its record is made of.
    """
    parser = _Parser(
        prog="fastqt",
        description="Sentence embeddings learnt from the order of sentences, with exact contrastive losses.",
    )
    parser.add_argument("--version", action="version", version=f"fastqt {__version__}")
    parser.add_argument(
        "--completion",
        action=Completion,
        nargs="?",
        const="bash",
        choices=SCRIPTS,
        default=argparse.SUPPRESS,
        help="print what completes commands, options and their values in a shell: for eval "
        '"$(fastqt --completion bash)" in ~/.bashrc, the same with zsh in ~/.zshrc, or '
        "fastqt --completion fish | source in config.fish",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")

    for name, command in COMMANDS.items():
        usage = "fastqt train [options] --out DIR [CORPUS ...]" if name == "train" else None
        made = commands.add_parser(name, help=command.title, description=command.__doc__, usage=usage)
        command.add_arguments(made)
    return parser
