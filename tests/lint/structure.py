"""Counts habits that make the source hard to read or to change, and fails where a count is above its limit.

python -m tests.lint.structure            # prints each figure with its limit and its goal
python -m tests.lint.structure packs      # prints the places, too, that the figure of this name counts
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

# The limit and the goal of each figure. A limit above its goal is the count of today, so that it only falls:
# who lowers a count lowers its limit in the same commit.
LIMITS = {
    "fields": (5, 14),
    "option_dictionaries": (2, 2),
    "option_keys": (0, 0),
    "second_losses": (0, 0),
    "group_or_none": (2, 5),
    "packs": (0, 5),
    "unbroken_bodies": (2, 39),
    "row_scores": (11, 10),
    "vague_names": (244, 0),
    "forwarded": (38, 44),
    "option_records": (2, 1),
    "checks_in_bodies": (0, 0),
}

WINDOW_LINES, WINDOW_FIELDS = 24, 12  # a place that names so many fields of Problem within so many lines
LONG_BODY = 20  # lines, without the docstring

ALL = ("fastqt", "kernels", "csrc", "benchmarks")
PYTHON = ("fastqt", "kernels", "benchmarks")
FRONT = ("fastqt/functional", "fastqt/losses", "fastqt/distributed", "fastqt/autograd")
LOSSES = ("fastqt/functional", "fastqt/losses")
WITH_GROUPS = ("fastqt/functional", "fastqt/losses", "fastqt/nn", "fastqt/distributed")
SUFFIXES = {".py", ".pyi", ".cpp", ".h", ".cu", ".cuh"}


class Source:
    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text))) if self.path.endswith(".py") else []

    @cached_property
    def blank_lines(self) -> list[int]:
        """The numbers of its blank lines, without those inside a string."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return [token.start[0] for token in tokens if token.type == tokenize.NL and not token.line.strip()]

    def is_in(self, folders: tuple[str, ...]) -> bool:
        return any(self.path.startswith(f"{folder}/") for folder in folders)


# A figure yields the places that it counts, as a file and a line.
Places = Iterator[tuple[str, int]]


def field_names(sources: list[Source], name: str = "Problem") -> set[str]:
    for source in sources:
        for node in source.nodes if source.path == "fastqt/problem.py" else ():
            if isinstance(node, ast.ClassDef) and node.name == name:
                fields = [x for x in node.body if isinstance(x, ast.AnnAssign)]
                constants = [x for x in fields if "ClassVar" in ast.unparse(x.annotation)]
                return {ast.unparse(x.target) for x in fields if x not in constants}
    raise SystemExit(f"fastqt/problem.py: want a class {name}, got none")


def fields(sources: list[Source]) -> Places:
    """Places of 24 lines that name 12 or more fields of `Problem`, which each new field has to find."""
    names = field_names(sources)
    for source in sources:
        if not source.is_in(("fastqt", "kernels", "csrc")):
            continue

        lines = [names.intersection(re.findall(r"\w+", line)) for line in source.text.splitlines()]
        first = 0
        while first < len(lines):
            if len(set().union(*lines[first : first + WINDOW_LINES])) >= WINDOW_FIELDS:
                yield source.path, first + 1
                first += WINDOW_LINES
            else:
                first += 1


def nodes_in(sources: list[Source], folders: tuple[str, ...], *kinds: type) -> Iterator[tuple[Source, Any]]:
    for source in (x for x in sources if x.is_in(folders)):
        yield from ((source, node) for node in source.nodes if isinstance(node, kinds))


def option_dictionaries(sources: list[Source]) -> Places:
    """`dict[str, Any]` as a type, in which a type checker sees no misspelt option."""
    for source, node in nodes_in(sources, FRONT, ast.Subscript):
        if ast.unparse(node) == "dict[str, Any]":
            yield source.path, node.lineno


def dictionary_names(source: Source) -> Iterator[str]:
    """The names of a file that are annotated as `dict[str, Any]`, and those of its `**options: Any`."""
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef) and node.args.kwarg is not None:
            yield node.args.kwarg.arg
        elif isinstance(node, ast.arg | ast.AnnAssign):
            annotation = "" if node.annotation is None else ast.unparse(node.annotation)
            if annotation.startswith("dict[str, Any]"):
                yield node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)


def option_keys(sources: list[Source]) -> Places:
    """Subscripts of such a dictionary by a constant name: `options["scale"]`."""
    for source, node in nodes_in(sources, FRONT, ast.Subscript):
        by_name = isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
        if by_name and ast.unparse(node.value) in dictionary_names(source):
            yield source.path, node.lineno


def second_losses(sources: list[Source]) -> Places:
    """Functions called `_over_group`: a loss that is written a second time for ranks."""
    for source, node in nodes_in(sources, ("fastqt",), ast.FunctionDef):
        if node.name == "_over_group":
            yield source.path, node.lineno


def group_or_none(sources: list[Source]) -> Places:
    """`if group is None` and `if group is not None`, which a group of one process makes unnecessary."""
    for source, node in nodes_in(sources, WITH_GROUPS, ast.If, ast.IfExp):
        if ast.unparse(node.test).startswith(("group is None", "group is not None")):
            yield source.path, node.lineno


def packs(sources: list[Source]) -> Places:
    """`*(a, b, c)` in a call or a list, which is there to make a line fit."""
    for source, node in nodes_in(sources, PYTHON, ast.Starred):
        if isinstance(node.value, ast.Tuple):
            yield source.path, node.lineno


def unbroken_bodies(sources: list[Source]) -> Places:
    """Bodies of functions of 20 lines and more, without the docstring, that have no blank line."""
    for source, node in nodes_in(sources, PYTHON, ast.FunctionDef, ast.AsyncFunctionDef):
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        if body:
            first, last = body[0].lineno, body[-1].end_lineno or 0
            is_broken = any(first <= line <= last for line in source.blank_lines)
            if last - first + 1 >= LONG_BODY and not is_broken:
                yield source.path, node.lineno


def row_scores(sources: list[Source]) -> Places:
    """Files that know `row_scores`: as many as a further field of this kind would change."""
    for source in (x for x in sources if x.is_in(("fastqt", "csrc")) and "row_scores" in x.text):
        yield source.path, source.text[: source.text.index("row_scores")].count("\n") + 1


def vague_names(sources: list[Source]) -> Places:
    """Values called `found`, `given` or `own`, which say that there is something, and not what."""
    for source, node in nodes_in(sources, PYTHON, ast.Name, ast.arg):
        if (node.id if isinstance(node, ast.Name) else node.arg) in ("found", "given", "own"):
            yield source.path, node.lineno


def declared(source: Source) -> Iterator[ast.FunctionDef]:
    """The bodies of losses, which the decorator `loss` declares."""
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef):
            names = [ast.unparse(x.func) for x in node.decorator_list if isinstance(x, ast.Call)]
            if "loss" in names:
                yield node


def forwarded(sources: list[Source]) -> Places:
    """Options of losses that are passed on by hand, `scale=scale`."""
    bodies = [body for source in sources if source.is_in(LOSSES) for body in declared(source)]
    options = {x.arg for body in bodies for x in body.args.kwonlyargs}
    for source, node in nodes_in(sources, LOSSES, ast.keyword):
        if node.arg in options and isinstance(node.value, ast.Name) and node.value.id == node.arg:
            yield source.path, node.value.lineno


def option_records(sources: list[Source]) -> Places:
    """Classes that have a scale, a memory and a backend: further records of a loss's options."""
    for source, node in nodes_in(sources, LOSSES, ast.ClassDef):
        names = {ast.unparse(x.target) for x in node.body if isinstance(x, ast.AnnAssign)}
        if names >= {"scale", "memory", "backend"}:
            yield source.path, node.lineno


def checks_in_bodies(sources: list[Source]) -> Places:
    """Checks of options in the body of a loss, where one rank may raise and another wait."""
    checks = ("check_flag", "check_memory", "check_number", "check_option", "check_scale", "check_size")
    for source in (x for x in sources if x.is_in(LOSSES)):
        for body in declared(source):
            for node in ast.walk(body):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in checks:
                    yield source.path, node.lineno


FIGURES: dict[str, Callable[[list[Source]], Places]] = {name: globals()[name] for name in LIMITS}


def read(root: Path) -> list[Source]:
    paths = sorted(path for folder in ALL for path in (root / folder).rglob("*") if path.suffix in SUFFIXES)
    return [Source(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


def report(sources: list[Source], limits: dict[str, tuple[int, int]], shown: list[str]) -> list[str]:
    """Prints all figures, and returns the names of those that are above their limit."""
    too_many = []
    for name, figure in FIGURES.items():
        places = list(figure(sources))
        limit, goal = limits[name]
        verdict = "ok"
        if len(places) > limit:
            too_many.append(name)
            verdict = "above its limit"
        elif len(places) < limit:
            verdict = "below its limit, which can be lowered"
        print(f"{name:20} {len(places):4}   limit {limit:4}   goal {goal:4}   {verdict}")

        if name in shown:
            for path, line in places:
                print(f"  {path}:{line}")
    return too_many


def main(arguments: list[str]) -> int:
    unknown = [name for name in arguments if name not in FIGURES]
    if unknown:
        print(f"figures: want some of {', '.join(FIGURES)}, got {', '.join(unknown)}")
        return 2

    too_many = report(read(ROOT), LIMITS, arguments)
    for name in too_many:
        print(f"{name}: {FIGURES[name].__doc__} `python -m tests.lint.structure {name}` prints the places.")
    return 1 if too_many else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
