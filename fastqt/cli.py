"""The command line of fastqt."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any, NoReturn

# torch reads this variable when it allocates its first tensor. With it, large tensors lie in huge pages, and
# the new tables of an optimiser do not cost a page fault every 4 KiB. A value that the user has set is kept.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from fastqt import __version__, show_config
from fastqt.errors import InputError
from fastqt.runs.checkpoint import CONFIG
from fastqt.runs.config import TrainConfig

BAD_INPUT = 2  # exit status; argparse uses the same


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line.

    Args:
        arguments: the words after `fastqt`; those of this process if not given.

    Returns:
        The exit status: 0, 2 after wrong input, or 128 plus the number of the signal that stopped the
            command.
    """
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    command = options.pop("command", None)
    if command is None:
        parser.print_help()
        return 0
    try:
        status: int = command(**options)
        sys.stdout.flush()
        return status
    except (InputError, OSError) as error:
        print(f"fastqt: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("fastqt: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


class _Parser(argparse.ArgumentParser):
    """A parser whose errors take one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"fastqt: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fastqt",
        description="Sentence embeddings learnt from the order of sentences, with exact contrastive losses.",
    )
    parser.add_argument("--version", action="version", version=f"fastqt {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    demo = commands.add_parser(
        "demo", help="train a small model on Python's own documentation and show what it learns"
    )
    demo.set_defaults(command=_demo)

    train = commands.add_parser(
        "train",
        help="train a model on text",
        description="Text files are UTF-8, also as .gz or .xz, with one sentence per line and a blank line "
        "between documents.",
    )
    train.add_argument(
        "corpus", nargs="*", metavar="CORPUS", help="text files, in this order; - is standard input"
    )
    train.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="DIR",
        help="directory for the model, the metrics and the checkpoints",
    )
    train.add_argument("--resume", action="store_true", help="continue the run in DIR, if there is one")
    for setting in fields(TrainConfig):
        if setting.name != "corpus":
            _add_option(train, setting)
    train.set_defaults(command=_train)

    embed = commands.add_parser("embed", help="turn sentences into vectors")
    embed.add_argument("model", metavar="MODEL", help="a directory that train wrote")
    embed.add_argument("input", metavar="INPUT", help="text, one sentence per line; - is standard input")
    embed.add_argument(
        "--out", required=True, metavar="X.npy", help="file to write: float32, one row per sentence"
    )
    embed.add_argument(
        "--raw",
        action="store_true",
        help="do not scale vectors, or the two halves of QuickThoughts vectors, to norm 1",
    )
    embed.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    embed.set_defaults(command=_embed)

    neighbors = commands.add_parser("neighbors", help="find the nearest sentences of a corpus")
    neighbors.add_argument("model", metavar="MODEL", help="a directory that train wrote")
    neighbors.add_argument("corpus", nargs="+", metavar="CORPUS", help="text files; - is standard input")
    neighbors.add_argument(
        "--query", action="append", required=True, metavar="TEXT", help="a sentence; may be repeated"
    )
    neighbors.add_argument("-k", type=int, default=5, help="number of sentences per query (default: 5)")
    neighbors.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    neighbors.set_defaults(command=_neighbors)

    evaluate = commands.add_parser(
        "evaluate",
        help="evaluate sentence vectors on the benchmarks of the literature",
        description="MODEL is a directory that train wrote, random:DIR for that model with random weights, "
        "word-vectors:FILE for the mean of word vectors, or sif:FILE[,COUNTS] for their SIF-weighted mean.",
    )
    evaluate.add_argument("model", metavar="MODEL", help="the encoder to evaluate")
    evaluate.add_argument(
        "--data", required=True, type=Path, metavar="DIR", help="directory with one folder per task"
    )
    evaluate.add_argument("--tasks", metavar="MR,CR,…", help="tasks (default: all in DIR)")
    evaluate.add_argument("--json", type=Path, metavar="OUT", help="file for all results")
    evaluate.add_argument(
        "--grid",
        default="paper",
        choices=("paper", "senteval"),
        help="values of C: 2^0 to 2^8, or 2^-2 to 2^3",
    )
    evaluate.add_argument(
        "--sst", default="phrases", choices=("phrases", "sentences"), help="training set of SST2"
    )
    evaluate.add_argument(
        "--tokenised",
        action="store_true",
        help="read the STS texts lower-cased and tokenised, as in SentEval",
    )
    evaluate.add_argument("-t", type=float, default=2.0, help="t of the uniformity (default: 2)")
    evaluate.add_argument("--seed", type=int, default=0, help="seed of folds and random weights (default: 0)")
    evaluate.add_argument(
        "--cache", type=Path, metavar="DIR", help="directory in which vectors are kept for the next time"
    )
    evaluate.add_argument(
        "--raw", action="store_true", help="do not scale vectors, or their halves, to norm 1"
    )
    evaluate.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    evaluate.set_defaults(command=_evaluate)

    plot = commands.add_parser("plot", help="draw the training curves and the results of runs")
    plot.add_argument("runs", nargs="+", metavar="DIR", help="directories that train wrote")
    plot.add_argument(
        "--out", type=Path, metavar="DIR", help="directory for the figures (default: the first run)"
    )
    plot.set_defaults(command=_plot)

    expand = commands.add_parser("expand", help="add the words of pre-trained vectors to a model")
    expand.add_argument("model", metavar="MODEL", help="a directory that train wrote")
    expand.add_argument(
        "vectors", metavar="VECTORS", help="word vectors: .npz, or text with one word per line"
    )
    expand.add_argument("--out", required=True, metavar="DIR", help="directory for the new model")
    expand.set_defaults(command=_expand)

    interpolate = commands.add_parser(
        "interpolate", help="generate sentences between two sentences, with a GLOSS model"
    )
    interpolate.add_argument("model", metavar="MODEL", help="a directory that train --model gloss-... wrote")
    interpolate.add_argument(
        "--from", dest="source", required=True, metavar="TEXT", help="the first sentence"
    )
    interpolate.add_argument("--to", dest="target", required=True, metavar="TEXT", help="the last sentence")
    interpolate.add_argument(
        "--steps", type=int, default=4, metavar="N", help="number of sentences between them (default: 4)"
    )
    interpolate.add_argument(
        "--slerp", action="store_true", help="interpolate along an arc, not along a straight line"
    )
    interpolate.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    interpolate.set_defaults(command=_interpolate)

    bench = commands.add_parser("bench", help="compare the loss with eager PyTorch on this machine")
    bench.set_defaults(command=_bench)

    config = commands.add_parser("config", help="show versions and backends")
    config.set_defaults(command=_config)
    return parser


def _add_option(parser: argparse.ArgumentParser, setting: Field[Any]) -> None:
    """Adds the option for a field of TrainConfig.

    The parsed result contains it only if it was given, because --resume keeps the stored value of all others.
    """
    name, default, metadata = setting.name, setting.default, setting.metadata
    help = metadata["help"]
    if default is not None and "default" not in help:
        help = f"{help} (default: {default})"
    kind = {"int": int, "float": float, "str": str}[str(setting.type).removesuffix(" | None")]
    choices = metadata["choices"] or None
    parser.add_argument(
        f"--{name.replace('_', '-')}",
        type=kind,
        choices=choices,
        default=argparse.SUPPRESS,
        help=help,
        metavar=None if choices else {"valid": "FILE", "dev": "FILE"}.get(name, "N" if kind is int else "X"),
    )


def _train(corpus: list[str], out: Path, resume: bool, **settings: Any) -> int:
    from fastqt.train import train

    if corpus:
        settings["corpus"] = tuple(corpus)
    if resume and (out / CONFIG).exists():
        config = replace(TrainConfig.load(out / CONFIG), **settings)
    elif corpus:
        config = TrainConfig(**settings)
    else:
        raise InputError(f"no CORPUS given{f', and no run to resume in {out}' if resume else ''}")
    outcome = train(config, out, resume=resume)
    if outcome.stopped_by is not None:
        name = signal.Signals(outcome.stopped_by).name
        print(
            f"fastqt: stopped by {name} at step {outcome.step} and saved a checkpoint; continue with: "
            f"fastqt train --resume --out {out}",
            file=sys.stderr,
        )
        return 128 + outcome.stopped_by
    print(f"{out}: trained, {outcome.step} steps")
    return 0


def _embed(model: str, input: str, out: str, raw: bool, device: str) -> int:
    from fastqt.inference.embed import write_vectors
    from fastqt.runs.model import SentenceEncoder

    rows, width = write_vectors(SentenceEncoder.load(model, device), input, out, normalize=not raw)
    print(f"{out}: {rows} x {width} float32")
    return 0


def _neighbors(model: str, corpus: list[str], query: list[str], k: int, device: str) -> int:
    from fastqt.inference.search import nearest
    from fastqt.runs.model import SentenceEncoder

    encoder = SentenceEncoder.load(model, device)
    for text, found in zip(query, nearest(encoder, query, corpus, k), strict=True):
        print(text)
        for neighbor in found:
            print(f"  {neighbor.cosine:.3f}  {neighbor.sentence}  ({neighbor.file}:{neighbor.line})")
    return 0


def _plot(runs: list[str], out: Path | None) -> int:
    from fastqt.tools.plot import draw_figures

    for path in draw_figures(runs, out or runs[0]):
        print(path)
    return 0


def _evaluate(
    model: str,
    data: Path,
    tasks: str | None,
    json: Path | None,
    grid: str,
    cache: Path | None,
    raw: bool,
    device: str,
    **options: Any,
) -> int:
    try:
        from fastqt import evaluation
    except ModuleNotFoundError as error:
        raise InputError(f"evaluate needs {error.name}: pip install 'fastqt[eval]'") from error
    if json is not None and not json.parent.is_dir():
        raise InputError(f"cannot write {json}: {json.parent} is not a directory")
    encoder = evaluation.load_encoder(model, device=device, raw=raw, seed=options["seed"])
    results = evaluation.evaluate(
        encoder.encode,
        data,
        None if tasks is None else tasks.split(","),
        grid=evaluation.PAPER_GRID if grid == "paper" else evaluation.SENTEVAL_GRID,
        cache=None if cache is None else evaluation.Cache(cache, encoder.key),
        **options,
    )
    print(results.table())
    if json is not None:
        results.save(json, command=shlex.join(["fastqt", *sys.argv[1:]]), model=model, sha256=encoder.key)
    return 0


def _expand(model: str, vectors: str, out: str) -> int:
    from fastqt.inference.expand import add_words
    from fastqt.text.vectors import read_vectors

    words, table, _ = read_vectors(vectors)
    print(f"{out}: {add_words(model, words, table, out)} words added")
    return 0


def _interpolate(model: str, source: str, target: str, steps: int, slerp: bool, device: str) -> int:
    from fastqt.inference.interpolate import sentences_between
    from fastqt.runs.model import SentenceEncoder

    encoder = SentenceEncoder.load(model, device)
    for share, text in sentences_between(encoder, source, target, steps=steps, slerp=slerp):
        print(f"{share:.2f}  {text}")
    return 0


def _demo() -> int:
    from fastqt.tools import demo

    demo.run()
    return 0


def _bench() -> int:
    from fastqt.tools.bench import print_comparisons

    print_comparisons()
    return 0


def _config() -> int:
    show_config()
    return 0
