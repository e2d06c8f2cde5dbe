"""fastqt train: a training of a model on text."""

from __future__ import annotations

import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastqt.errors import InputError
from fastqt.sentences.cli.kinds import path
from fastqt.sentences.cli.streams import discard_what_cannot_be_written, fail
from fastqt.sentences.cli.training import add_training, narrow
from fastqt.sentences.errors import only_a_report
from fastqt.sentences.runs.config import TrainConfig

if TYPE_CHECKING:
    from fastqt.sentences.train.loop import Outcome


def add_parser(commands: Any) -> None:
    """Adds the command's options to the subparsers of `fastqt`."""
    parser = commands.add_parser(
        "train",
        help="train a model on text",
        usage="fastqt train [options] --out DIR [CORPUS ...]",
        description="Text files are UTF-8, also as .gz or .xz, with one sentence per line and a blank line "
        "between documents. Each row of a .parquet or .arrow file, or of a folder that the datasets library "
        "wrote, is a sentence. With --model pairs each line is a query, its positive and any hard negatives, "
        "with tabs between them. With --model simcse or mixcse so is each line of a .tsv file, also as "
        ".tsv.gz or .tsv.xz, but mixcse has no hard negatives.",
    )

    parser.add_argument(
        "corpus",
        nargs="*",
        type=path,
        metavar="CORPUS",
        help="text files, tables or folders, in this order; - is standard input",
    )
    parser.add_argument(
        "--out",
        required=True,
        type=path,
        metavar="DIR",
        help="directory for the model, the metrics and the checkpoints",
    )

    parser.add_argument("--resume", action="store_true", help="continue the run in DIR, if there is one")
    parser.add_argument(
        "--profile",
        type=path,
        metavar="X.json",
        help="write a trace of some steps to this file, for ui.perfetto.dev or chrome://tracing",
    )
    add_training(parser)
    parser.narrow = narrow


def run(corpus: list[str], out: str, resume: bool, profile: str | None, **settings: Any) -> int:
    """Runs the command. For the arguments see `add_parser`; returns the exit status."""
    from fastqt.sentences.runs.checkpoint import CONFIG
    from fastqt.sentences.train import train

    if corpus:
        settings["corpus"] = tuple(corpus)
    stored = TrainConfig.load(Path(out, CONFIG)) if resume and Path(out, CONFIG).exists() else None
    if stored is not None:
        config = replace(stored, **settings)
    elif corpus:
        config = TrainConfig(**settings)
    else:
        raise InputError(f"no CORPUS given{f', and no run to resume in {out}' if resume else ''}")
    outcome = train(config, out, resume=resume, stored=stored, profile=profile)
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


def _tell_end(config: TrainConfig, out: str, outcome: Outcome) -> None:
    from fastqt.sentences.runs.checkpoint import CHECKPOINT
    from fastqt.sentences.train.summary import closing_table, diagnoses, next_commands, speed

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
    print("\nNext, for example:")
    for command in next_commands(config, out):
        print(f"  {command}")
