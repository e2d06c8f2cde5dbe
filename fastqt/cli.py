"""The command `fastqt`."""

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

# Before torch allocates anything: large tensors in large pages, so that a table's worth of fresh memory
# does not cost a page fault every 4 KiB. A user's own setting stands.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from fastqt import __version__, show_config
from fastqt.errors import InputError
from fastqt.runs.checkpoint import CONFIG
from fastqt.runs.config import TrainConfig

BAD_INPUT = 2  # exit status, as argparse's own


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns its exit status."""
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
    except InputError as error:
        print(f"fastqt: {error}", file=sys.stderr)
        return BAD_INPUT
    except OSError as error:
        print(f"fastqt: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("fastqt: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"fastqt: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fastqt",
        description="Sentence embeddings learnt from the order of sentences, with exact contrastive losses.",
    )
    parser.add_argument("--version", action="version", version=f"fastqt {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    demo = commands.add_parser("demo", help="train on Python's own documentation and show what is learnt")
    demo.set_defaults(command=_demo)

    train = commands.add_parser(
        "train",
        help="train a model on text",
        description="Text is UTF-8, .gz or .xz too, a sentence a line, a blank line between documents.",
    )
    train.add_argument(
        "corpus", nargs="*", metavar="CORPUS", help="text files, in order; - is standard input"
    )
    train.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="where model, metrics and checkpoints go"
    )
    train.add_argument("--resume", action="store_true", help="go on with the run in DIR, if there is one")
    for setting in fields(TrainConfig):
        if setting.name != "corpus":
            _add_setting(train, setting)
    train.set_defaults(command=_train)

    embed = commands.add_parser("embed", help="turn sentences into vectors")
    embed.add_argument("model", metavar="MODEL", help="a directory that train wrote")
    embed.add_argument("input", metavar="INPUT", help="text, a sentence a line; - is standard input")
    embed.add_argument("--out", required=True, metavar="X.npy", help="float32, a row a sentence")
    embed.add_argument(
        "--raw",
        action="store_true",
        help="do not scale a vector, or the two halves of QuickThoughts', to norm 1",
    )
    embed.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    embed.set_defaults(command=_embed)

    neighbors = commands.add_parser("neighbors", help="find the nearest sentences of a corpus")
    neighbors.add_argument("model", metavar="MODEL", help="a directory that train wrote")
    neighbors.add_argument("corpus", nargs="+", metavar="CORPUS", help="text files; - is standard input")
    neighbors.add_argument("--query", action="append", required=True, metavar="TEXT", help="may be repeated")
    neighbors.add_argument("-k", type=int, default=5, help="how many (default: 5)")
    neighbors.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    neighbors.set_defaults(command=_neighbors)

    evaluate = commands.add_parser(
        "evaluate",
        help="judge sentence vectors by the benchmarks of the literature",
        description="MODEL is a directory that train wrote, random:DIR for its model with fresh weights, "
        "word-vectors:FILE for the mean of word vectors, or sif:FILE[,COUNTS] for their weighted mean.",
    )
    evaluate.add_argument("model", metavar="MODEL", help="what to judge")
    evaluate.add_argument("--data", required=True, type=Path, metavar="DIR", help="holds a folder a task")
    evaluate.add_argument("--tasks", metavar="MR,CR,…", help="which (default: all that are there)")
    evaluate.add_argument("--json", type=Path, metavar="OUT", help="where all figures go")
    evaluate.add_argument(
        "--grid",
        default="paper",
        choices=("paper", "senteval"),
        help="C from 2^0 to 2^8, or from 2^-2 to 2^3",
    )
    evaluate.add_argument(
        "--sst", default="phrases", choices=("phrases", "sentences"), help="what SST2 is trained on"
    )
    evaluate.add_argument(
        "--tokenised", action="store_true", help="STS lower-cased and tokenised, as SentEval has it"
    )
    evaluate.add_argument("-t", type=float, default=2.0, help="of uniformity (default: 2)")
    evaluate.add_argument("--seed", type=int, default=0, help="of folds and fresh weights (default: 0)")
    evaluate.add_argument("--cache", type=Path, metavar="DIR", help="keep vectors there for the next time")
    evaluate.add_argument("--raw", action="store_true", help="do not scale the halves of a vector to norm 1")
    evaluate.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    evaluate.set_defaults(command=_evaluate)

    plot = commands.add_parser("plot", help="draw the training curves of runs, and what they came to")
    plot.add_argument("runs", nargs="+", metavar="DIR", help="directories that train wrote")
    plot.add_argument("--out", type=Path, metavar="DIR", help="where the figures go (default: the first DIR)")
    plot.set_defaults(command=_plot)

    expand = commands.add_parser("expand", help="teach a model the words of pre-trained vectors")
    expand.add_argument("model", metavar="MODEL", help="a directory that train wrote")
    expand.add_argument("vectors", metavar="VECTORS", help="words and vectors: .npz, or text, a word a line")
    expand.add_argument("--out", required=True, metavar="DIR", help="where the model goes that knows them")
    expand.set_defaults(command=_expand)

    interpolate = commands.add_parser(
        "interpolate", help="sentences between two, as a GLOSS model generates them"
    )
    interpolate.add_argument("model", metavar="MODEL", help="a directory that train --model gloss-... wrote")
    interpolate.add_argument(
        "--from", dest="source", required=True, metavar="TEXT", help="the first sentence"
    )
    interpolate.add_argument("--to", dest="target", required=True, metavar="TEXT", help="the last one")
    interpolate.add_argument("--steps", type=int, default=4, metavar="N", help="how many (default: 4)")
    interpolate.add_argument("--slerp", action="store_true", help="go along an arc, not a straight line")
    interpolate.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    interpolate.set_defaults(command=_interpolate)

    bench = commands.add_parser("bench", help="time the fused loss against eager PyTorch on this machine")
    bench.set_defaults(command=_bench)

    config = commands.add_parser("config", help="show versions and backends")
    config.set_defaults(command=_config)
    return parser


def _add_setting(parser: argparse.ArgumentParser, setting: Field[Any]) -> None:
    """An option for a field of TrainConfig; absent from the result unless given: --resume must know."""
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
    from fastqt.train.loop import train

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
            f"fastqt: stopped by {name} at step {outcome.step}; all is saved, go on with: "
            f"fastqt train --resume --out {out}",
            file=sys.stderr,
        )
        return 128 + outcome.stopped_by
    print(f"{out}: trained, {outcome.step} steps")
    return 0


def _embed(model: str, input: str, out: str, raw: bool, device: str) -> int:
    from fastqt.inference.embed import embed_file
    from fastqt.runs.model import SentenceEncoder

    rows, width = embed_file(SentenceEncoder.load(model, device), input, out, normalize=not raw)
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
    from fastqt.tools.plot import plot

    for path in plot(runs, out or runs[0]):
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
    from fastqt.inference.expand import expand_model
    from fastqt.text.vectors import read_vectors

    words, table, _ = read_vectors(vectors)
    print(f"{out}: {expand_model(model, words, table, out)} words more")
    return 0


def _interpolate(model: str, source: str, target: str, steps: int, slerp: bool, device: str) -> int:
    from fastqt.inference.interpolate import between
    from fastqt.runs.model import SentenceEncoder

    encoder = SentenceEncoder.load(model, device)
    for share, text in between(encoder, source, target, steps=steps, slerp=slerp):
        print(f"{share:.2f}  {text}")
    return 0


def _demo() -> int:
    from fastqt.tools.demo import demo

    demo()
    return 0


def _bench() -> int:
    from fastqt.tools.bench import table

    table()
    return 0


def _config() -> int:
    show_config()
    return 0


if __name__ == "__main__":
    sys.exit(main())
