"""The commands by their names, in the order in which `fastqt --help` shows them."""

from __future__ import annotations

from fastqt.sentences.cli.analogy import Analogy
from fastqt.sentences.cli.check import Check
from fastqt.sentences.cli.command import Command
from fastqt.sentences.cli.compilation import Compile
from fastqt.sentences.cli.config import Config
from fastqt.sentences.cli.embed import Embed
from fastqt.sentences.cli.evaluate import Evaluate
from fastqt.sentences.cli.expand import Expand
from fastqt.sentences.cli.export import Export
from fastqt.sentences.cli.index import MakeIndex
from fastqt.sentences.cli.interpolate import Interpolate
from fastqt.sentences.cli.mine import Mine
from fastqt.sentences.cli.neighbors import Neighbors
from fastqt.sentences.cli.retrieve import Retrieve
from fastqt.sentences.cli.train import Train

COMMANDS: dict[str, type[Command]] = {
    "train": Train,
    "embed": Embed,
    "index": MakeIndex,
    "neighbors": Neighbors,
    "evaluate": Evaluate,
    "expand": Expand,
    "interpolate": Interpolate,
    "analogy": Analogy,
    "retrieve": Retrieve,
    "mine": Mine,
    "export": Export,
    "compile": Compile,
    "check": Check,
    "config": Config,
}
