"""Every public name is on exactly one page of the reference, which shows what its docstring says."""

import importlib.util
import inspect
import re
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

from tests.shared.page_blocks import DOCS, ROOT

PAGES = sorted((DOCS / "api").glob("*.rst"))


@pytest.fixture(scope="module")
def api():
    """The extension that makes these pages."""
    spec = importlib.util.spec_from_file_location("api", DOCS / "_extensions" / "api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def packages() -> list[str]:
    """Those that users import."""
    integrations = sorted((ROOT / "fastqt" / "integrations").iterdir())
    named = [path.stem for path in integrations if path.stem[0] != "_"]
    return [
        *("fastqt", "fastqt.nn", "fastqt.distributed", "fastqt.sentences.evaluation"),
        *(f"fastqt.integrations.{name}" for name in named),
    ]


def public_names(package: str) -> set[str]:
    module = import_module(package)
    names = getattr(module, "__all__", None)
    if names is None:  # a module whose classes are its own
        names = [n for n, value in vars(module).items() if getattr(value, "__module__", "") == package]
        names = [name for name in names if name[0] != "_"]
    return {f"{package}.{name}" for name in names} - {"fastqt.nn", "fastqt.distributed"}


def documented() -> Counter:
    found: Counter = Counter()
    for page in PAGES:
        for package, names in re.findall(
            r"^\.\. api:: (\S+)\n((?:\n|   .*\n)+)", page.read_text(), re.MULTILINE
        ):
            found.update(f"{package}.{name}" for name in names.split())
    return found


@pytest.mark.slow  # imports every integration
def test_each_public_name_is_on_one_page():
    found = documented()
    wanted = set().union(*map(public_names, packages()))
    assert set(found) == wanted
    assert [name for name, count in found.items() if count > 1] == []


def test_docstrings_may_link_to_all_packages(api):
    assert set(api.PACKAGES) == set(packages())


def test_docstrings_become_restructured_text(api):
    """Stars, bars and underscores stay, code stays code, and names of arguments stay together."""
    text = """What it does with a * b and |x|_2.

    It is called so:

        loss = a * b

    Args:
        first, second,
            third: an `array_` of x_i.

    Returns:
        output: the first
            of two.
        state: the second.
    """
    lines = inspect.cleandoc(text).splitlines()
    api.as_restructured_text(None, "function", "f", None, None, lines)
    assert lines[0] == r"What it does with a \* b and \|x\|_2."
    assert lines[2:7] == ["It is called so:", "", "::", "", "    loss = a * b"]
    assert "    first, second, third: an `array_` of x_i." in lines
    assert lines[-3:] == ["    - output – the first", "      of two.", "    - state – the second."]


def test_a_class_that_checks_its_arguments_shows_those_of_init(api):
    class Checked:
        def __new__(cls, *args: object, **options: object) -> object:
            return super().__new__(cls)

        def __init__(self, scale: float = 1.0, *, name: str) -> None:
            pass

    shown = api.signature_of_init(
        None, "class", "Checked", Checked, None, "(*args: object, **options: object)", None
    )
    assert shown == ("(scale: float = 1.0, *, name: str)", None)
    assert api.signature_of_init(None, "class", "Checked", Checked, None, "(scale=1.0)", None) is None


def test_pictures_are_drawn_by_their_script(monkeypatch):
    """The target matrices in them are those of the operators."""
    folder = DOCS / "pictures"
    monkeypatch.syspath_prepend(str(folder))
    draw = import_module("draw")
    try:
        stored = {path.stem: path.read_text() for path in folder.glob("*.svg")}
        assert {name: make() for name, make in draw.PICTURES.items()} == stored
    finally:
        for name in ("draw", "logo", "loss_targets", "svg"):
            sys.modules.pop(name, None)


def test_pictures_are_shown():
    pages = "".join(path.read_text() for path in Path(DOCS).rglob("*.md"))
    assert all(f"pictures/{path.name})" in pages for path in (DOCS / "pictures").glob("*.svg"))
