"""fastqt --completion: what completes its commands, options and choices in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

SCRIPT = """\
_fastqt() {{
  local words="" word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  case "${{COMP_WORDS[1]}} $before" in
{choices}
    *) case "${{COMP_WORDS[1]}}" in
{options}
    esac;;
  esac
  [ "$COMP_CWORD" -eq 1 ] && words="{commands}"
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _fastqt fastqt
"""


class Completion(argparse.Action):
    """The option --completion: prints the script and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(script_of(parser), end="")
        parser.exit()


def script_of(parser: argparse.ArgumentParser) -> str:
    """The script for a parser of commands."""
    parsers = next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    options: list[str] = []
    choices: list[str] = []
    for name, command in parsers.choices.items():
        flags = [flag for action in command._actions for flag in action.option_strings]
        options.append(f'    {name}) words="{" ".join(flags)}";;')
        choices += _choices(name, command)

    commands = " ".join(parsers.choices)
    return SCRIPT.format(choices="\n".join(choices), options="\n".join(options), commands=commands)


def _choices(command: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        for flag in action.option_strings if action.choices else ():
            yield f'    "{command} {flag}") words="{" ".join(map(str, action.choices or ()))}";;'
