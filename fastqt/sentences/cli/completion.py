"""What completes the words of a command line: a script for a shell, and the words that the script asks for.

The script calls the command with what has been typed, so that it is right for every version and environment.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from fastqt.errors import one_line

SHELL_WORDS = "--shell-words"  # after which a script writes what has been typed

BASH = """\
_fastqt() {
  local IFS=$'\\n'
  COMPREPLY=($("${1/#\\~/$HOME}" --shell-words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null | cut -f 1))
}
complete -o default -F _fastqt fastqt
"""
ZSH = """\
#compdef fastqt
_fastqt() {
  local -a lines
  lines=("${(@f)$("${words[1]/#\\~/$HOME}" --shell-words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  if [[ -n $lines[1] ]]; then
    lines=("${(@)lines//:/\\\\:}")
    lines=("${(@)lines/$'\\t'/:}")
    _describe word lines
  else
    _files
  fi
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _fastqt fastqt
"""
FISH = """\
function __fastqt
    set -l typed (commandline -opc) (commandline -ct)
    set -l lines ($typed[1] --shell-words $typed[2..] 2>/dev/null)
    if set -q lines[1]
        printf '%s\\n' $lines
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c fastqt -f -a '(__fastqt)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


class Completion(argparse.Action):
    """The option --completion: prints the script and ends."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, shell: Any, *__: Any) -> NoReturn:
        print(SCRIPTS[shell], end="")
        parser.exit()


def print_words(parser: argparse.ArgumentParser, typed: Sequence[str]) -> int:
    """Prints `words_for` for a script; returns the exit status."""
    for word, about in words_for(parser, typed):
        print(f"{word}\t{about}".rstrip())
    return 0


def words_for(parser: argparse.ArgumentParser, typed: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What may stand for the last word, and what it is; nothing where it is a file or a number.

    Args:
        parser: that of all commands.
        typed: the words after the program's name, up to the one that is completed, which may be "".
    """
    # bash makes three words of --model=pairs, and completes the last of them.
    words = [word for word in typed if word != "="] + ([""] if typed[-1:] == ["="] else [])
    *before, last = words or [""]
    commands = next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    command = next((word for word in before if word in commands.choices), None)
    if command is not None:
        parser = commands.choices[command]

    flag, equals, value = last.partition("=")
    if equals:
        before, last = [*before, flag], value
    fitting = ((word, about) for word, about in _words(parser, before, last) if word.startswith(last))
    return ((f"{flag}=" * bool(equals) + word, about.replace("%%", "%")) for word, about in fitting)


def _words(parser: Any, before: Sequence[str], last: str) -> Iterator[tuple[str, str]]:
    """All words of the kind that stands after some others, where the last one begins with "-" or does not."""
    option = parser._option_string_actions.get(before[-1]) if before else None
    if option is not None and option.nargs != 0:  # its value comes next
        yield from _choices(option)
    elif last.startswith("-"):
        if parser.narrow is not None:  # to what the model kind has that the words before name
            parser.narrow(parser, before)
        shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
        yield from ((flag, one_line(each.help or "")) for each in shown for flag in each.option_strings)
    else:
        for action in parser._actions:
            yield from _choices(action) if not action.option_strings else ()


def _choices(action: argparse.Action) -> Iterator[tuple[str, str]]:
    if isinstance(action, argparse._SubParsersAction):  # its choices are the commands
        yield from ((each.dest, one_line(each.help or "")) for each in action._choices_actions)
    else:
        yield from ((str(choice), "") for choice in action.choices or ())
