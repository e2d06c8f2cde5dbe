"""The commands: the name of each, what adds its options, and the function that they are the arguments of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastqt.sentences.cli import (
    analogy,
    check,
    compilation,
    config,
    demo,
    embed,
    evaluate,
    expand,
    export,
    index,
    interpolate,
    mine,
    neighbors,
    plot,
    retrieve,
    train,
)

# In the order in which `fastqt --help` shows them.
COMMANDS: dict[str, tuple[Callable[[Any], None], Callable[..., int]]] = {
    "demo": (demo.add_parser, demo.run),
    "train": (train.add_parser, train.run),
    "embed": (embed.add_parser, embed.run),
    "index": (index.add_parser, index.run),
    "neighbors": (neighbors.add_parser, neighbors.run),
    "evaluate": (evaluate.add_parser, evaluate.run),
    "plot": (plot.add_parser, plot.run),
    "expand": (expand.add_parser, expand.run),
    "interpolate": (interpolate.add_parser, interpolate.run),
    "analogy": (analogy.add_parser, analogy.run),
    "retrieve": (retrieve.add_parser, retrieve.run),
    "mine": (mine.add_parser, mine.run),
    "export": (export.add_parser, export.run),
    "compile": (compilation.add_parser, compilation.run),
    "check": (check.add_parser, check.run),
    "config": (config.add_parser, config.run),
}
