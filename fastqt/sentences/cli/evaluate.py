"""The command that evaluates sentence vectors on the benchmarks of the literature."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastqt.errors import InputError
from fastqt.options import Device
from fastqt.sentences.cli.declared import add_options
from fastqt.sentences.cli.inference import add_inference
from fastqt.sentences.cli.kinds import add_device, path
from fastqt.sentences.errors import only_a_report
from fastqt.sentences.options.evaluation import GRIDS, EvaluationOptions

if TYPE_CHECKING:
    from fastqt.nn.gloss_inference import Inference
    from fastqt.sentences.evaluation.encoders import NamedEncoder
    from fastqt.sentences.inference.encoder import SentenceEncoder


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the command to those of the command line."""
    parser = commands.add_parser(
        "evaluate",
        help="evaluate sentence vectors on the benchmarks of the literature, and on retrieval sets",
        description="MODEL is a directory that train wrote, random:DIR for that model with random weights, "
        "word-vectors:FILE for the mean of word vectors, or sif:FILE,COUNTS for their SIF-weighted mean.",
    )
    parser.add_argument("model", type=path, metavar="MODEL", help="the encoder to evaluate")
    parser.add_argument(
        "--data",
        required=True,
        type=path,
        metavar="DIR",
        help="directory with one folder per task, or a set in BEIR's format",
    )

    parser.add_argument("--tasks", metavar="MR,CR,…", help="tasks (default: all in DIR)")
    parser.add_argument(
        "--baseline",
        action="store_true",
        help="evaluate the same model with random weights too, and show both",
    )
    parser.add_argument("--json", type=path, metavar="OUT", help="file for all results")

    parser.add_argument(
        "--grid", default="paper", choices=tuple(GRIDS), help="values of C: 2^0 to 2^8, or 2^-2 to 2^3"
    )
    add_options(parser, EvaluationOptions, without=("grid",))

    parser.add_argument(
        "--cache", type=path, metavar="DIR", help="directory in which vectors are kept for the next time"
    )
    parser.add_argument("--raw", action="store_true", help="do not scale vectors, or their halves, to norm 1")
    add_inference(parser)

    add_device(parser)


def run(
    model: str,
    data: str,
    tasks: str | None,
    baseline: bool,
    json: str | None,
    grid: str,
    cache: str | None,
    raw: bool,
    device: Device,
    inference: Inference | None,
    **options: Any,
) -> int:
    """Runs the command; its arguments are the options of the command line.

    Returns the exit status: 1 if a task has failed, whose reason is in the output and in the file of results.
    """
    try:
        from fastqt.sentences import evaluation
        from fastqt.sentences.evaluation import evaluate, load_encoder  # what needs the extra
        from fastqt.sentences.evaluation.vectors import say
    except ImportError as error:
        raise InputError(f"evaluate: {error}") from error
    from fastqt.sentences.runs.files import check_can_be_written, check_ending

    EvaluationOptions(**options)  # which checks them before anything is read
    if json is not None:
        check_ending(json, ".json")
        check_can_be_written(json)
    if cache is not None and Path(cache).exists() and not Path(cache).is_dir():
        raise InputError(f"cache: want a directory, got the file {cache}")
    if baseline and not Path(model).is_dir():
        raise InputError(f"baseline: want a directory that train wrote as MODEL, got {model}")

    about: dict[str, Any] = {"command": shlex.join(["fastqt", *sys.argv[1:]]), "model": model}
    # A pipe is given the results once, at the end; a file after each task.
    kept_on_the_way = json is not None and (Path(json).is_file() or not Path(json).exists())

    def load(name: str) -> NamedEncoder:
        return load_encoder(name, device=device, raw=raw, seed=options["seed"], inference=inference)

    def results_of(
        encoder: NamedEncoder, keep: Callable[[str, evaluation.Results], object]
    ) -> evaluation.Results:
        return evaluate(
            encoder.encode,
            data,
            None if tasks is None else tasks.split(","),
            grid=GRIDS[grid],
            cache=None if cache is None else evaluation.Cache(Path(cache), encoder.identity),
            after_task=lambda results: keep(encoder.identity, results),
            **options,
        )

    def keep(identity: str, results: evaluation.Results) -> None:
        about["identity"] = identity
        save_on_the_way(results)

    def keep_baseline(identity: str, results: evaluation.Results) -> None:
        about["baseline"] = {"model": f"random:{model}", "identity": identity, **asdict(results)}
        save_on_the_way(of_model)

    def save_on_the_way(results: evaluation.Results) -> None:
        if json is not None and kept_on_the_way:
            with contextlib.suppress(InputError):  # the disk may have room again at the end
                results.save(Path(json), **about)

    encoder = load(model)
    of_model, beside = results_of(encoder, keep), None
    if baseline:
        say("the same with random weights")
        beside = results_of(load(f"random:{model}"), keep_baseline)
    try:
        if json is not None:
            of_model.save(Path(json), **about)
    finally:  # what was computed is shown, even if it cannot be written
        print(of_model.table(beside), flush=True)
    if json is not None and encoder.of_run is not None:
        # Results of another inference than the model's own are not those that its card shows.
        identity = encoder.of_run.identity if inference is None else None
        _renew_card(Path(model), encoder.of_run, identity, Path(json))
    return 1 if of_model.failed or (beside is not None and beside.failed) else 0


def _renew_card(run: Path, encoder: SentenceEncoder, identity: str | None, results: Path) -> None:
    """Has the model card of a run show the results that were stored beside it."""
    from fastqt.sentences.runs.card import progress_of, save_card
    from fastqt.sentences.runs.checkpoint import EVALUATION
    from fastqt.sentences.runs.lock import locked

    if run.is_dir() and results.resolve() == (run / EVALUATION).resolve():
        with only_a_report(f"the model card of {run}"), locked(run):
            save_card(run, encoder.config, encoder.model, progress_of(run), identity)
