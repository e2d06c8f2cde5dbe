"""The options of the command line. This module imports no torch, so that `fastqt --help` answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from fastqt._version import __version__
from fastqt.sentences.cli import analogy, check, compilation, evaluate, export, mine, retrieve
from fastqt.sentences.cli.inference import add_inference
from fastqt.sentences.cli.kinds import add_device, add_value
from fastqt.sentences.cli.kinds import integer as _integer
from fastqt.sentences.cli.kinds import number as _number
from fastqt.sentences.cli.kinds import path as _path
from fastqt.sentences.cli.training import add_training, narrow

BAD_INPUT = 2  # exit status; argparse uses the same


class _Parser(argparse.ArgumentParser):
    """A parser whose errors take one line, without the usage text, and name the option that was meant."""

    _words: Sequence[str] = ()  # the arguments of the command that this parser reads
    # Has its help depend on these arguments.
    narrow: Callable[[argparse.ArgumentParser, Sequence[str]], None] | None = None

    def error(self, message: str) -> NoReturn:
        hint = meant(self._words, self._option_string_actions)
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

    def _command(self, name: str | None) -> argparse.ArgumentParser:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and name in action.choices:
                command: argparse.ArgumentParser = action.choices[name]
                return command
        return self

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

    The parsed result has the command's name as `command`, None if none was given, and otherwise the arguments
    of the function that runs it.
    """
    parser = _Parser(
        prog="fastqt",
        description="Sentence embeddings learnt from the order of sentences, with exact contrastive losses.",
    )
    parser.add_argument("--version", action="version", version=f"fastqt {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")

    demo = commands.add_parser(
        "demo",
        help="compare the loss with eager PyTorch, and show what a small model learns from docstrings",
    )
    add_value(demo, "--seed", _integer, 0, "seed of the model's weights")

    train = commands.add_parser(
        "train",
        help="train a model on text",
        usage="fastqt train [options] --out DIR [CORPUS ...]",
        description="Text files are UTF-8, also as .gz or .xz, with one sentence per line and a blank line "
        "between documents. Each row of a .parquet or .arrow file, or of a folder that the datasets library "
        "wrote, is a sentence. With --model pairs each line is a query, its positive and any hard negatives, "
        "with tabs between them. With --model simcse or mixcse so is each line of a .tsv file, also as "
        ".tsv.gz or .tsv.xz, but mixcse has no hard negatives.",
    )
    train.add_argument(
        "corpus",
        nargs="*",
        type=_path,
        metavar="CORPUS",
        help="text files, tables or folders, in this order; - is standard input",
    )
    train.add_argument(
        "--out",
        required=True,
        type=_path,
        metavar="DIR",
        help="directory for the model, the metrics and the checkpoints",
    )
    train.add_argument("--resume", action="store_true", help="continue the run in DIR, if there is one")
    train.add_argument(
        "--profile",
        type=_path,
        metavar="X.json",
        help="write a trace of some steps to this file, for ui.perfetto.dev or chrome://tracing",
    )
    add_training(train)
    train.narrow = narrow

    embed = commands.add_parser(
        "embed",
        help="turn sentences into vectors",
        description="Every line of INPUT gets a row, so that rows and lines agree; a blank line gets zeros.",
    )
    embed.add_argument("model", type=_path, metavar="MODEL", help="a directory that train wrote")
    embed.add_argument(
        "input", type=_path, metavar="INPUT", help="text, one sentence per line; - is standard input"
    )
    embed.add_argument(
        "--out",
        required=True,
        type=_path,
        metavar="X.npy",
        help="file to write: float32, one row per line of INPUT",
    )
    embed.add_argument(
        "--raw",
        action="store_true",
        help="do not scale vectors, or the two halves of QuickThoughts vectors, to norm 1",
    )
    embed.add_argument(
        "--side",
        default="query",
        choices=("query", "document"),
        help="which prompt of a run of pairs the lines get (default: query)",
    )
    add_inference(embed)
    add_device(embed)

    index = commands.add_parser(
        "index",
        help="make an index of a corpus, for searches in milliseconds",
        description="The index holds the sentences too. Its recall is measured against an exact search.",
    )
    index.add_argument("model", type=_path, metavar="MODEL", help="a directory that train wrote")
    index.add_argument(
        "corpus", nargs="+", type=_path, metavar="CORPUS", help="text files; - is standard input"
    )
    index.add_argument("--out", required=True, type=_path, metavar="X.index", help="file to write")
    index.add_argument(
        "--kind",
        default="auto",
        choices=("auto", "flat", "ivf"),
        help="compare with all vectors (flat), or with those of near lists (ivf) "
        "(default: flat below 50,000 sentences, and ivf)",
    )
    index.add_argument(
        "--lists",
        type=_integer,
        metavar="N",
        help="lists of ivf (default: 4 times the root of the sentences)",
    )
    add_value(
        index, "--min-recall", _number, 0.95, "share of the 10 nearest neighbours that a search finds", "X"
    )
    add_value(index, "--seed", _integer, 0, "seed of samples of sentences")
    add_inference(index)
    add_device(index)

    neighbors = commands.add_parser(
        "neighbors",
        help="find the nearest sentences of a corpus",
        description="With --index, CORPUS may be left out. If it is given, it is compared with the index's.",
    )
    neighbors.add_argument("model", type=_path, metavar="MODEL", help="a directory that train wrote")
    neighbors.add_argument(
        "corpus", nargs="*", type=_path, metavar="CORPUS", help="text files; - is standard input"
    )
    neighbors.add_argument("--index", type=_path, metavar="X.index", help="a file that index wrote")
    neighbors.add_argument(
        "--query", action="append", required=True, metavar="TEXT", help="a sentence; may be repeated"
    )
    add_value(neighbors, "-k", _integer, 5, "number of sentences per query")
    add_inference(neighbors)
    add_device(neighbors)

    evaluate.add_parser(commands)

    plot = commands.add_parser("plot", help="draw the training curves and the results of runs")
    plot.add_argument("runs", nargs="+", type=_path, metavar="DIR", help="directories that train wrote")
    plot.add_argument(
        "--out", type=_path, metavar="DIR", help="directory for the figures (default: the first run)"
    )

    expand = commands.add_parser("expand", help="add the words of pre-trained vectors to a model")
    expand.add_argument("model", type=_path, metavar="MODEL", help="a directory that train wrote")
    expand.add_argument(
        "vectors",
        type=_path,
        metavar="VECTORS",
        help="a text file of word vectors, see --vectors of train",
    )
    expand.add_argument("--out", required=True, type=_path, metavar="DIR", help="directory for the new model")

    interpolate = commands.add_parser(
        "interpolate", help="generate sentences between two sentences, with a GLOSS model"
    )
    interpolate.add_argument(
        "model", type=_path, metavar="MODEL", help="a directory that train --model gloss-... wrote"
    )
    interpolate.add_argument(
        "--from", dest="source", required=True, metavar="TEXT", help="the first sentence"
    )
    interpolate.add_argument("--to", dest="target", required=True, metavar="TEXT", help="the last sentence")
    add_value(interpolate, "--steps", _integer, 4, "number of sentences between them", "N")
    interpolate.add_argument(
        "--slerp", action="store_true", help="interpolate along an arc, not along a straight line"
    )
    add_inference(interpolate)
    add_device(interpolate)

    analogy.add_parser(commands)
    retrieve.add_parser(commands)
    mine.add_parser(commands)
    export.add_parser(commands)

    compilation.add_parser(commands)
    check.add_parser(commands)

    commands.add_parser("config", help="show versions and backends")
    return parser
