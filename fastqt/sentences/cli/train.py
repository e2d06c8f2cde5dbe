"""fastqt train: a training of a model on text."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fastqt.errors import InputError
from fastqt.sentences.cli.command import Command
from fastqt.sentences.cli.declared import about, add_group, add_options, help_of, in_words
from fastqt.sentences.cli.streams import discard_what_cannot_be_written, fail
from fastqt.sentences.errors import only_a_report
from fastqt.sentences.options.option import Option, option, options_of
from fastqt.sentences.runs.config import KINDS, TrainConfig, settings_of_file

if TYPE_CHECKING:
    from fastqt.sentences.train.loop import Outcome


@dataclass(frozen=True, kw_only=True)
class Train(Command):
    """Text files are UTF-8, with one sentence per line and a blank line between documents.

    They may be compressed as .gz or .xz. Each row of a .parquet or .arrow file, or of a folder that the
    datasets library wrote, is a sentence. With --model pairs each line is a query, its positive and any hard
    negatives, with tabs between them, or the columns of these names of a .csv, .jsonl, .parquet or .arrow
    file. With --model simcse or mixcse so is each line of a .tsv, .csv or .jsonl file, but mixcse has no hard
    negatives.
    """

    title: ClassVar[str] = "train a model on text"

    corpus: tuple[str, ...] = option(
        (), "text files, tables or folders, in this order", file="CORPUS", positional=True
    )
    out: str = option(help="directory for the model, the metrics and the checkpoints", file="DIR")
    resume: bool = option(False, "continue the run in DIR, if there is one")
    config: str | None = option(
        None,
        "options as JSON, such as the config.json of a run; those of the command line stand above them",
        file="FILE",
    )
    settings: Mapping[str, Any] = field(default_factory=dict)  # those that are on the command line

    @classmethod
    def add_arguments(cls, parser: Any) -> None:
        add_options(parser, cls)
        options = options_of(TrainConfig)
        groups = {
            vars(record)["title"]: [options[name] for name in record.__annotations__ if name in options]
            for record in (TrainConfig, *reversed(TrainConfig.__mro__[1:]))
            if "title" in vars(record)
        }
        for title, declared in groups.items():
            add_group(parser, title, [each for each in declared if each.name != "corpus"])
        for action in parser._actions:
            if action.dest in options and options[action.dest].varies:
                action.help = _with_defaults(options[action.dest])
        parser.narrow = _narrow
        parser.add_argument("--help-all", action=_HelpOfAll, nargs=0, help="show the options of all models")

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> Train:
        declared = {name: arguments.pop(name) for name in options_of(cls)}
        return cls(**declared, settings=arguments)

    def run(self) -> int:
        from fastqt.sentences.runs.checkpoint import CONFIG
        from fastqt.sentences.train import train
        from fastqt.sentences.train.earlier_run import settings_like

        settings = {**self.settings, **({"corpus": self.corpus} if self.corpus else {})}
        if self.config is not None:
            settings = {**settings_of_file(self.config), **settings}
        out, path = self.out, Path(self.out, CONFIG)
        stored = TrainConfig.load(path) if self.resume and path.exists() else None
        if stored is not None:
            config = replace(stored, **settings)
        elif settings.get("corpus"):
            if (run := settings.get("init_from")) is not None:
                settings = settings_like(run, settings)
            config = TrainConfig(**settings)
        else:
            raise InputError(f"no CORPUS given{f', and no run to resume in {out}' if self.resume else ''}")

        outcome = train(config, out, resume=self.resume, stored=stored)
        if outcome.rank:
            return 0 if outcome.stopped_by is None else 128 + outcome.stopped_by
        if outcome.stopped_by is not None:
            name = signal.Signals(outcome.stopped_by).name
            told = f"stopped by {name} at step {outcome.step} and saved a checkpoint; continue with: "
            return fail(f"{told}fastqt train --resume --out {shlex.quote(out)}", 128 + outcome.stopped_by)
        with only_a_report("the summary of the training"):
            _tell_end(config, out, outcome)
            sys.stdout.flush()
        discard_what_cannot_be_written()
        return 0


class _HelpOfAll(argparse.Action):
    """The option --help-all: prints the help of all model kinds and ends."""

    def __init__(self, **options: Any) -> None:
        super().__init__(default=argparse.SUPPRESS, **options)

    def __call__(self, parser: Any, *_: Any) -> None:
        parser.narrow = parser.epilog = None
        parser.print_help()
        parser.exit()


def _tell_end(config: TrainConfig, out: str, outcome: Outcome) -> None:
    from fastqt.sentences.runs.checkpoint import CHECKPOINT
    from fastqt.sentences.train.summary import closing_table, diagnoses, speed

    if not outcome.taken:
        options = "--early-stop" if outcome.stalled else "--epochs or --steps"
        kept = f"; with a higher {options} it goes on" if Path(out, CHECKPOINT).exists() else ""
        print(f"{out}: finished already, after {outcome.step} steps{kept}")
        return
    measure = config.measure_of_best
    print(f"{out}: trained, {outcome.step} steps")
    if outcome.stalled:
        print(f"It has stopped early: {measure} was no better in its last {config.early_stop} validations.")
    if table := closing_table(Path(out), measure):
        print(f"\n{table}")
    figures = "\n".join(filter(None, (speed(Path(out)), outcome.memory)))
    for text in (figures, *diagnoses(Path(out))):
        if text:
            print(f"\n{text}")
    if config.valid is None and config.dev is None:
        print("\nThese are figures of text that was trained on. Held-out text is given with --valid.")


def _with_defaults(each: Option) -> str:
    """The help of an option whose default depends on the model kind: the declared default, and the others."""
    names = defaultdict(list)
    for kind in KINDS.values():
        if not kind.has(each.name):
            continue
        if (default := kind.default(each.name)) != each.default:
            names[default].append(kind.name)
        for encoder in kind.of_encoder:
            if (changed := kind.default(each.name, encoder)) != default:
                names[changed].append(f"{kind.name} with {encoder}")
    if "default" in each.help or not names:
        return help_of(each, each.default)
    others = "; ".join(f"{_listed(whose)} {in_words(value)}" for value, whose in names.items())
    return f"{about(each)} (default: {in_words(each.default)}; {others})"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _narrow(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Leaves in the help of a training what its model kind has; the words of its command line may name it."""
    named = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    named.add_argument("--model", nargs="?", default=TrainConfig.model)
    named.add_argument("--encoder", nargs="?", default="")
    chosen, _ = named.parse_known_args([word for word in words if word not in ("--help", "-h")])
    if (kind := KINDS.get(chosen.model)) is None:
        return
    options = options_of(TrainConfig)
    parser.epilog = f"These are the options of {kind.name}; for those of another say --model NAME --help."
    for action in parser._actions:
        if action.dest not in options or action.dest == "model":
            continue
        if not kind.has(action.dest):
            action.help = argparse.SUPPRESS
        elif options[action.dest].varies:
            default = kind.default(action.dest, chosen.encoder)
            action.help = help_of(options[action.dest], default)
