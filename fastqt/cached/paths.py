"""The names and attributes that compiled Python code reads, from its instructions."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import NamedTuple


class Path(NamedTuple):
    """A name in code and the attributes that are read from it at once, as `trainer.encoder` has."""

    is_global: bool
    root: str
    attributes: tuple[str, ...]


@lru_cache(maxsize=4096)
def imports_of(code: CodeType) -> tuple[str, ...]:
    """The names of the modules that code imports, without those that functions within it do."""
    return tuple(x.argval for x in dis.get_instructions(code) if x.opname == "IMPORT_NAME")


@lru_cache(maxsize=4096)
def paths_of(code: CodeType) -> tuple[Path, ...]:
    """The paths that code reads, that of functions within it included."""
    return tuple(dict.fromkeys(_read(code, is_outer=True)))


def _read(code: CodeType, *, is_outer: bool) -> Iterator[Path]:
    """The paths in one code object and in those within it; the locals of the latter are their own."""
    path: Path | None = None
    shared = {*code.co_cellvars, *code.co_freevars}
    for instruction in dis.get_instructions(code):
        operation, names = instruction.opname, instruction.argval
        if operation in ("LOAD_ATTR", "LOAD_METHOD") and path is not None:
            path = path._replace(attributes=(*path.attributes, names))
            continue
        if operation in ("COPY", "DUP_TOP", "EXTENDED_ARG", "NOP"):  # COPY is before `self.calls += 1`
            continue

        if operation in ("STORE_ATTR", "LOAD_SUPER_ATTR"):  # which use no more of the object than its name
            path = None
        if path is not None:
            yield path
            path = None

        if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
            path = Path(True, names, ())
        elif operation in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"):
            path = Path(False, names, ())
        elif "LOAD_FAST" in operation and is_outer:
            # Since Python 3.13 a name that another function shares is loaded so when that function is made.
            *before, last = names if isinstance(names, tuple) else (names,)
            yield from (Path(False, name, ()) for name in before if name not in shared)
            path = Path(False, last, ()) if last not in shared else None

    if path is not None:
        yield path

    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _read(constant, is_outer=False)
