"""No two files import each other, directly or by way of others: neither in functions nor for type checkers.

The contract in pyproject.toml says which way layers import, and this holds between the files of a layer.
"""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent


def modules_in(folder: Path, package: str) -> dict[str, Path]:
    """The files of a package by their names as modules."""
    found = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


def imports(path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    """The modules among these that a file imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules else node.module


def circle(modules: Mapping[str, Path]) -> list[str]:
    """The names along a circle of imports, of which there is none if this is empty."""
    graph = {name: set(imports(path, modules)) - {name} for name, path in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_files_import_each_other():
    modules = modules_in(ROOT / "fastqt", "fastqt") | modules_in(ROOT / "kernels", "fastqt.kernels")
    assert len(modules) > 200
    assert circle(modules) == []


def test_circles_in_functions_and_for_type_checkers_are_found(tmp_path):
    (tmp_path / "one.py").write_text("def f():\n    from made import two\n")
    (tmp_path / "two.py").write_text("if TYPE_CHECKING:\n    from made.three import Name\n")
    (tmp_path / "three.py").write_text("import os\n")
    modules = modules_in(tmp_path, "made")
    assert circle(modules) == []
    (tmp_path / "three.py").write_text("import made.one\n")
    assert set(circle(modules)) == {"made.one", "made.two", "made.three"}
