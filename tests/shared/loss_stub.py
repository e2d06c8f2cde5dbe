"""What type checkers read of the loss modules: fastqt/nn/losses/modules.pyi, written from their signatures.

`make stub` writes the file, and a test compares the two.
"""

import collections.abc
import inspect
import re
import sys
import textwrap
import typing
from pathlib import Path

from fastqt import nn, options
from fastqt.distributed import group
from fastqt.nn.losses import MODULES, base, modules

STUB = Path(modules.__file__).with_suffix(".pyi")
HEAD = '"""The constructors of the loss modules: `make stub` writes this file from the signatures."""\n\n'
# The types of the options that a model passes on to its loss.
OF_MODELS = {"SimCSEOptions": nn.SimCSELoss, "MixCSEOptions": nn.MixCSELoss}
PLACES = (
    collections.abc,
    typing,
    group,
    base,
    options,
    *(sys.modules[m.function.__module__] for m in MODULES),
)


def stub() -> str:
    """The text of the file."""
    parts = [*map(_class, MODULES), *(_options(name, module) for name, module in OF_MODELS.items())]
    return HEAD + _imports("".join(parts)) + "\n" + "\n".join(parts)


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


def _imports(text: str) -> str:
    """The lines that import what a text names."""
    names = set(re.findall(r"\b[A-Z]\w+", text)) - {"None", "True", "False", *OF_MODELS}
    by_place: dict[str, list[str]] = {}
    for name in sorted(names - {module.__name__ for module in MODULES}):
        place = next(place.__name__ for place in PLACES if name in vars(place))
        by_place.setdefault(place, []).append(name)

    lines = {place: f"from {place} import {', '.join(found)}\n" for place, found in sorted(by_place.items())}
    for place, line in lines.items():
        if len(line) > 110:
            lines[place] = (
                f"from {place} import (\n" + "".join(f"    {n},\n" for n in by_place[place]) + ")\n"
            )
    first = [line for place, line in lines.items() if place.startswith("fastqt")]
    return "".join([line for line in lines.values() if line not in first]) + "\n" + "".join(first)


if __name__ == "__main__":
    STUB.write_text(stub())
