"""What type checkers read of the loss modules: fastqt/nn/losses/__init__.pyi, written from their signatures.

`make lists` writes the file, and a test compares the two.
"""

import collections.abc
import inspect
import re
import sys
import textwrap
from pathlib import Path

import torch

from fastqt import exclusions, matryoshka, nn, options
from fastqt.distributed import group
from fastqt.nn import losses
from fastqt.nn.losses import base

MODULES = [value for value in vars(nn).values() if isinstance(value, type) and issubclass(value, base.Loss)]
STUB = Path(losses.__file__).with_suffix(".pyi")
HEAD = '''"""The constructors of the loss modules: `make lists` writes this file from the signatures."""

from typing import TypedDict

from fastqt.nn.losses.base import BiasedLoss, Loss as Loss, ScaledLoss as ScaledLoss
'''
# The types of the options that a model passes on to its loss.
OF_MODELS = {"SimCSEOptions": nn.SimCSELoss, "MixCSEOptions": nn.MixCSELoss}


def stub() -> str:
    parts = [*map(_class, MODULES), *(_options(name, module) for name, module in OF_MODELS.items())]
    return HEAD + _imports() + "\n" + "\n".join(parts)


def _class(module: type) -> str:
    listed = [_text(option).replace(" ", "\0") for option in base.keyword_only(module.__init__)]
    constructor = f"def __init__(self, *, {', '.join(listed)}) -> None: ..."
    lines = textwrap.fill(constructor, 110, initial_indent=" " * 4, subsequent_indent=" " * 8)
    return f"class {module.__name__}({module.__base__.__name__}):\n{lines}\n".replace("\0", " ")


def _text(option: inspect.Parameter) -> str:
    default = repr(option.default).replace("'", '"')
    return f"{option.name}: {option.annotation} = {default}"


def _options(name: str, module: type) -> str:
    fields = [f"    {option.name}: {option.annotation}\n" for option in base.keyword_only(module.__init__)]
    return f"class {name}(TypedDict, total=False):\n" + "".join(fields)


def _imports() -> str:
    """The lines that import the types of options, each from where it is defined."""
    lines = set()
    for module in MODULES:
        places = [
            collections.abc,
            torch,
            group,
            options,
            exclusions,
            matryoshka,
            sys.modules[module.function.__module__],
        ]
        for option in base.keyword_only(module.__init__):
            for name in re.findall(r"\b(?!None\b)[A-Z]\w+", option.annotation):
                place = next(place.__name__ for place in places if name in vars(place))
                lines.add(f"from {place} import {name}\n")
    return "".join(sorted(lines))


if __name__ == "__main__":
    STUB.write_text(stub())
