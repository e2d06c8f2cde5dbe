"""The lists of all losses and filters: exports, types of constructors, names of the reference, the table.

`make lists` writes them anew, and a test compares. What is exported follows from the functions that are
declared by `@loss` in the files of fastqt/losses, and from the classes of fastqt/exclusions; what the
documents say follows from the sections in docs/losses.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

LINE = 110  # columns
ROOT = Path(__file__).parent.parent.parent
PACKAGE, DOCS = ROOT / "fastqt", ROOT / "docs"
PAGES = ("pairs", "views", "labels", "graded", "text", "general")  # in the order of the table
# The headings of the two lists of docs/api/losses.rst, beside that of the general losses.
OF_PAGES = {
    "Losses of pairs, labels and hard negatives": PAGES[:4],
    "Losses of sentences and words": PAGES[4:5],
}


class Declared(NamedTuple):
    """A loss as its file declares it; `module` is None where `fastqt.nn` has none of it."""

    home: str
    name: str
    module: str | None


class Section(NamedTuple):
    """A section of docs/losses."""

    page: str
    title: str
    loss: str
    text: str

    @property
    def anchor(self) -> str:
        heading = self.text.partition("\n")[0].lower()
        return re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")

    def fact(self, name: str) -> str:
        match = re.search(rf"^- \*\*{name}:\*\* (.*(?:\n  .*)*)\.$", self.text, re.MULTILINE)
        if match is None:
            raise ValueError(f"docs/losses/{self.page}.md, {self.title}: want a fact {name}")
        return match[1].replace("\n  ", " ")


def declared(*folders: str) -> list[Declared]:
    """The public losses of these folders of the package, by their files."""
    found = []
    for path in sorted(path for folder in folders for path in (PACKAGE / folder).glob("*.py")):
        home = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                modules = list(_modules(node))
                found += [Declared(home, node.name, module) for module in modules]
    return found


def _modules(function: ast.FunctionDef) -> Iterator[str | None]:
    """The name of the module in the decorator `@loss`, if the function has that decorator."""
    for decorator in function.decorator_list:
        call = decorator if isinstance(decorator, ast.Call) else None
        named = decorator if call is None else call.func
        if isinstance(named, ast.Name) and named.id == "loss":
            first = call.args[0] if call is not None and call.args else ast.Constant(None)
            yield ast.literal_eval(first)


def filters() -> dict[str, str]:
    """The public filters, by the module that each is in."""
    homes, bases = {}, {}
    for path in sorted((PACKAGE / "exclusions").glob("[!_]*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name] = f"fastqt.exclusions.{path.stem}"
                bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
    of_filters = {"Filter"}
    while more := {name for name in bases if bases[name] & of_filters} - of_filters:
        of_filters |= more
    leaves = of_filters.difference(*bases.values())
    return {name: homes[name] for name in sorted(leaves - {"Mask"})}  # for which users give a tensor


def sections() -> list[Section]:
    """The sections of losses, in the order of the table."""
    found = []
    for page in PAGES:
        for part in re.split(r"^## ", (DOCS / "losses" / f"{page}.md").read_text(), flags=re.MULTILINE)[1:]:
            heading = re.match(r"(.*?): `(\w+)`", part)
            if heading is not None:
                found.append(Section(page, heading[1], heading[2], part))
    return found


def lists() -> dict[Path, str]:
    """The files with lists, as they should be, but for what is imported to be read."""
    losses, general = declared("losses"), declared("functional")
    names = {x.name for x in losses}
    modules = {x.module for x in [*general, *losses] if x.module is not None}
    top, nn = PACKAGE / "__init__.py", PACKAGE / "nn" / "__init__.py"
    of_filters, targets = PACKAGE / "exclusions" / "__init__.py", DOCS / "api" / "targets.rst"
    with_filters = _exported(top.read_text(), "fastqt.exclusions", set(filters()))
    return {
        PACKAGE / "losses" / "__init__.py": _losses(losses),
        top: _exported(with_filters, "fastqt.losses", names),
        nn: _exported(nn.read_text(), "fastqt.nn.losses", modules),
        of_filters: _filters(of_filters.read_text()),
        targets: _with_list(targets.read_text(), "What leaves a loss", sorted(filters())),
        DOCS / "losses.md": _table((DOCS / "losses.md").read_text()),
        DOCS / "api" / "losses.rst": _functions((DOCS / "api" / "losses.rst").read_text(), names),
        DOCS / "api" / "modules.rst": _modules_page(
            (DOCS / "api" / "modules.rst").read_text(), [*general, *losses]
        ),
    }


def _losses(losses: list[Declared]) -> str:
    """fastqt/losses/__init__.py: its docstring, and the losses of all files."""
    path = PACKAGE / "losses" / "__init__.py"
    head = path.read_text().partition("\nfrom ")[0]
    lines = []
    for home in dict.fromkeys(x.home for x in losses):
        lines.append(f"from {home} import {', '.join(sorted(x.name for x in losses if x.home == home))}\n")
    return f"{head}\n{''.join(lines)}\n{_all(x.name for x in losses)}"


def _exported(text: str, home: str, names: set[str]) -> str:
    """A package's file that imports these names from `home`, and has them in `__all__`."""
    block = re.search(
        rf"^( *)from {re.escape(home)} import (?:\((.*?)\)|(.*?))\n", text, re.MULTILINE | re.DOTALL
    )
    listed = re.search(r"^__all__ = \[(.*?)\]\n", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    assert listed is not None
    indent, before = block[1], set(re.findall(r"\w+", block[2] or block[3]))
    imported = sorted(names, key=lambda name: (_kind(name), name.lower()))
    text = text.replace(listed[0], _all(set(re.findall(r"\w+", listed[1])) - before | names))
    line = f"{indent}from {home} import {', '.join(imported)}\n"
    if len(line) > LINE:
        line = (
            f"{indent}from {home} import (\n"
            + "".join(f"{indent}    {x},\n" for x in imported)
            + f"{indent})\n"
        )
    return text.replace(block[0], line)


def _filters(text: str) -> str:
    """fastqt/exclusions/__init__.py with a line for each filter."""
    for name, home in filters().items():
        line = f"from {home} import {name} as {name}\n"
        if line not in text:
            at = text.index(f"from {home} import")
            text = text[:at] + line + text[at:]
    return text


def _all(names: Iterable[str]) -> str:
    lines = "".join(f'    "{name}",\n' for name in sorted(names, key=lambda name: (_kind(name), name)))
    return f"__all__ = [\n{lines}]\n"


def _kind(name: str) -> int:
    """Constants, classes, functions: the order that the linter wants."""
    return 0 if name.isupper() else 1 if name[0].isupper() else 2


def _table(text: str) -> str:
    """docs/losses.md with a row for each section."""
    before, head, rest = text.partition("|---|---|---|---:|\n")
    rows = [
        f"| [{x.title}](losses/{x.page}.md#{x.anchor}) | `{x.loss}` | {x.fact('Replaces')} | "
        f"{x.fact('Products')} |\n"
        for x in sections()
    ]
    return before + head + "".join(rows) + rest[re.match(r"(?:\|.*\n)*", rest).end() :]  # type: ignore[union-attr]


def _ordered(names: set[str], pages: Iterable[str]) -> list[str]:
    """These losses in the order of their sections on some pages."""
    return list(dict.fromkeys(x.loss for x in sections() if x.page in pages and x.loss in names))


def _functions(text: str, names: set[str]) -> str:
    for heading, pages in OF_PAGES.items():
        text = _with_list(text, heading, _ordered(names, pages))
    return text


def _modules_page(text: str, losses: list[Declared]) -> str:
    of_loss = {x.name: x.module for x in losses}
    order = _ordered(set(of_loss), ["general", *PAGES])
    general = [x.name for x in losses if x.home == "fastqt.functional"]
    order = [*general, *[name for name in order if name not in general]]
    return _with_list(text, "Loss modules", [module for name in order if (module := of_loss[name])])


def _with_list(text: str, heading: str, names: list[str]) -> str:
    """A page of the reference with these names in the first list after a heading."""
    lines = "".join(f"   {name}\n" for name in names)
    pattern = rf"(^{heading}\n(?:.*\n)*?\.\. api:: \S+\n\n)(?:   \w+\n)+"
    return re.sub(pattern, lambda match: match[1] + lines, text, count=1, flags=re.MULTILINE)


if __name__ == "__main__":
    for path, text in lists().items():
        path.write_text(text)
    # What the stub says is read from the classes, which a process has once it has these lists.
    subprocess.run([sys.executable, "-m", "tests.shared.loss_stub"], check=True, cwd=ROOT)
