"""The command line of fastqt."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fastqt.errors import InputError
from fastqt.machine.memory import keep_freed_memory
from fastqt.sentences.cli import analogy, check, compilation, evaluate, export, mine, retrieve
from fastqt.sentences.cli.arguments import BAD_INPUT, build_parser
from fastqt.sentences.cli.inference import INFERENCE, take_inference
from fastqt.sentences.errors import OtherRankError, only_a_report
from fastqt.sentences.runs.config import TrainConfig

if TYPE_CHECKING:
    from fastqt.nn.gloss_inference import Inference
    from fastqt.sentences.inference.encoder import SentenceEncoder, Side
    from fastqt.sentences.train.loop import Outcome

# torch reads this variable when it allocates its first tensor. With it, large tensors lie in huge pages, and
# the new tables of an optimiser do not cost a page fault every 4 KiB. A value that the user has set is kept.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

OUTPUTS = ("json", "profile")  # options that name a file to write, beside --out, which each command checks
ALLOCATION = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")  # in a RuntimeError of torch


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, by default that of this process, and returns the exit status.

    It is 0, or 1 where `fastqt check` finds something wrong or a task of `fastqt evaluate` fails, or 2 after
    wrong input or where something could not be read or written, or 128 plus the number of the signal that
    stopped the command.
    """
    _prepare_streams()
    if sys.stdout is None:
        return _fail("cannot write to standard output: it is closed")

    try:
        try:
            return _run(arguments)
        finally:  # also where argparse exits, after --help for example
            sys.stdout.flush()
    except OtherRankError as error:
        return BAD_INPUT if error.is_told else _fail(str(error))
    except InputError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(_in_words(error))
    except MemoryError as error:
        # Python's own errors of this kind mostly have no text.
        return _fail(f"not enough memory: {error}" if str(error) else "not enough memory")
    except RuntimeError as error:
        if (tried := ALLOCATION.search(str(error))) is None:
            raise
        return _fail(f"not enough memory for {tried[1]}")
    except KeyboardInterrupt:
        return _fail("interrupted", 128 + signal.SIGINT)
    finally:
        _discard_what_cannot_be_written()


def _run(arguments: Sequence[str] | None) -> int:
    parser = build_parser()
    options = vars(parser.parse_args(arguments))
    command = options.pop("command")
    if command is None:
        parser.print_help()
        return 0
    if command == "train" and arguments is None:  # This process trains, and does nothing else.
        keep_freed_memory()
    _check_outputs(options)
    if options.keys() >= set(INFERENCE):
        options["inference"] = take_inference(options)
    return COMMANDS[command](**options)


def _check_outputs(options: dict[str, Any]) -> None:
    """Checks that no file which a command writes is one that another of its options names."""
    outputs = {name: options[name] for name in OUTPUTS if os.path.isfile(options.get(name) or "")}
    if not outputs:
        return

    from fastqt.sentences.runs.run_files import check_is_not_read

    for output, path in outputs.items():
        words: list[str] = []
        for name, value in options.items():
            if name != output and isinstance(value, (str, list, tuple)):
                words += [value] if isinstance(value, str) else map(str, value)
        # A model may be written as word-vectors:FILE or sif:FILE,COUNTS.
        check_is_not_read(path, [part for word in words for part in (word, *re.split("[:,]", word)) if part])


def _fail(message: str, status: int = BAD_INPUT) -> int:
    with contextlib.suppress(OSError):  # there is nowhere else to say it
        print("fastqt:", message.replace("\n", " "), file=sys.stderr, flush=True)
    return status


def _prepare_streams() -> None:
    """Makes the standard streams safe to use, whichever of them are closed and whatever their encoding is."""
    if None in (sys.stdin, sys.stdout, sys.stderr):
        # The next file to be opened would get the number of a closed stream, and what libraries print there.
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # it stays open until the process ends
    for stream in (sys.stdout, sys.stderr):
        # With LC_ALL=C, standard output has "surrogateescape", which refuses what the encoding does not have.
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")


def _is_stuck(stream: TextIO) -> bool:
    """Whether what was printed to a stream cannot be written."""
    try:
        stream.flush()
    except OSError:
        return True
    return False


def _discard_what_cannot_be_written() -> None:
    """Keeps Python from trying to write it again at its exit, which would give a traceback and status 120."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and _is_stuck(stream):
            with contextlib.suppress(OSError), open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), stream.fileno())


def _in_words(error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.filename is not None:
        return f"{error.filename}: {reason}"
    to_stdout = isinstance(error, BrokenPipeError) or _is_stuck(sys.stdout)
    return f"cannot write{' to standard output' if to_stdout else ''}: {reason}"


def _train(corpus: list[str], out: str, resume: bool, profile: str | None, **settings: Any) -> int:
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
        return _fail(f"{told}fastqt train --resume --out {shlex.quote(out)}", 128 + outcome.stopped_by)
    with only_a_report("the summary of the training"):
        _tell_end(config, out, outcome)
        sys.stdout.flush()
    _discard_what_cannot_be_written()
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


def _load(
    model: str, device: str, inference: Inference | None, *, with_identity: bool = False
) -> SentenceEncoder:
    """A trained model, which infers as the command line says if it is a GLOSS model."""
    from fastqt.sentences.inference.encoder import SentenceEncoder
    from fastqt.sentences.inference.latents import set_inference

    return set_inference(SentenceEncoder.load(model, device, with_identity=with_identity), inference)


def _embed(
    model: str, input: str, out: str, raw: bool, side: Side, device: str, inference: Inference | None
) -> int:
    from fastqt.sentences.inference.embed import write_vectors

    encoder = _load(model, device, inference)
    rows, width = write_vectors(encoder, input, out, normalize=not raw, side=side)
    print(f"{out}: {rows} x {width} float32")
    return 0


def _index(
    model: str, corpus: list[str], out: str, device: str, inference: Inference | None, **options: Any
) -> int:
    from fastqt.sentences.inference.index import IndexOptions, build_index

    chosen = IndexOptions(**options)
    index = build_index(_load(model, device, inference, with_identity=True), corpus, out, chosen)
    print(f"{out}: {index}")
    return 0


def _neighbors(
    model: str,
    corpus: list[str],
    index: str | None,
    query: list[str],
    k: int,
    device: str,
    inference: Inference | None,
) -> int:
    from fastqt.sentences.inference.index import Index
    from fastqt.sentences.inference.search import nearest

    if not corpus and index is None:
        raise InputError("no CORPUS given, and no --index")
    encoder = _load(model, device, inference, with_identity=index is not None)
    if index is None:
        neighbors = nearest(encoder, query, corpus, k)
    else:
        opened = Index(index)
        if corpus:
            opened.check_corpus(corpus)
        neighbors = opened.search(encoder, query, k)
    for text, answers in zip(query, neighbors, strict=True):
        print(text)
        for neighbor in answers:
            print(f"  {neighbor}")
    return 0


def _plot(runs: list[str], out: str | None) -> int:
    from fastqt.sentences.tools.plot import draw_figures

    for path in draw_figures(runs, out or runs[0]):
        print(path)
    return 0


def _expand(model: str, vectors: str, out: str) -> int:
    from fastqt.sentences.inference.expand import add_words, check_holds_no_model
    from fastqt.sentences.text.vectors import read_vectors

    check_holds_no_model(Path(out))  # before the vectors are read
    words, table = read_vectors(vectors)
    print(f"{out}: {add_words(model, words, table, out)} words added")
    return 0


def _interpolate(
    model: str,
    source: str,
    target: str,
    steps: int,
    slerp: bool,
    device: str,
    inference: Inference | None,
) -> int:
    from fastqt.sentences.inference.interpolate import sentences_between

    encoder = _load(model, device, inference)
    for share, text in sentences_between(encoder, source, target, steps=steps, slerp=slerp):
        print(f"{share:.2f}  {text}")
    return 0


def _demo(seed: int) -> int:
    from fastqt.sentences.tools import demo

    demo.run(seed)
    return 0


def _config() -> int:
    from fastqt.engines import show_config

    show_config()
    return 0


COMMANDS: dict[str, Callable[..., int]] = {
    "demo": _demo,
    "train": _train,
    "embed": _embed,
    "index": _index,
    "neighbors": _neighbors,
    "evaluate": evaluate.run,
    "plot": _plot,
    "expand": _expand,
    "interpolate": _interpolate,
    "analogy": analogy.run,
    "retrieve": retrieve.run,
    "mine": mine.run,
    "export": export.run,
    "compile": compilation.run,
    "check": check.run,
    "config": _config,
}
