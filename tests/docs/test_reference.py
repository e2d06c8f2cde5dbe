"""Every public name is on one page of the reference, which shows its docstring; losses have sections."""

import importlib.util
import inspect
import re
import subprocess
import sys
from collections import Counter
from importlib import import_module

import pytest

import fastqt
from tests.shared.loss_lists import lists
from tests.shared.page_blocks import DOCS, ROOT

PAGES = sorted((DOCS / "api").glob("*.rst"))


@pytest.fixture(scope="module")
def api():
    spec = importlib.util.spec_from_file_location("api", DOCS / "_extensions" / "api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def packages() -> list[str]:
    integrations = sorted((ROOT / "fastqt" / "integrations").iterdir())
    named = [path.stem for path in integrations if path.stem[0] != "_"]
    return [
        *("fastqt", "fastqt.nn", "fastqt.optim", "fastqt.distributed"),
        *("fastqt.sentences.evaluation", "fastqt.promises"),
        *(f"fastqt.integrations.{name}" for name in named),
    ]


def public_names(package: str) -> set[str]:
    module = import_module(package)
    names = getattr(module, "__all__", None)
    if names is None:  # a module whose classes are its own
        names = [n for n, value in vars(module).items() if getattr(value, "__module__", "") == package]
        names = [name for name in names if name[0] != "_"]
    return {f"{package}.{name}" for name in names} - {"fastqt.nn", "fastqt.optim", "fastqt.distributed"}


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


# In a process that can import only what the package needs and the extra `docs`, as where the site is built.
IMPORT = """
import re, sys
from importlib import import_module
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import tomllib
from packaging.requirements import Requirement

sys.path[:0] = ["docs/_extensions"]
import absent
from api import summary

def needed(requirements, installed):
    for each in map(Requirement, requirements):
        name = re.sub("[-_.]+", "-", each.name).lower()
        if name not in installed and (each.marker is None or each.marker.evaluate({"extra": ""})):
            installed.add(name)
            needed(requires(name) or (), installed)
    return installed

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
wanted = [*project["dependencies"], *project["optional-dependencies"]["docs"]]
installed = needed(wanted, {"fastqt", "setuptools"})
others = {
    module
    for module, names in packages_distributions().items()
    if installed.isdisjoint(re.sub("[-_.]+", "-", name).lower() for name in names)
}

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in others:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

assert "pytest" in others and "torch" not in others
for name in [name for name in sys.modules if name.partition(".")[0] in others]:
    del sys.modules[name]
sys.meta_path[:0] = [absent.Absent(absent.LIBRARIES), Refusing()]  # also where they are installed
names = 0
for page in sorted(Path("docs/api").glob("*.rst")):
    blocks = re.findall(r"^\\.\\. api:: (\\S+)\\n((?:\\n|   \\S+\\n)+)", page.read_text(), re.MULTILINE)
    for package, listed in blocks:
        for name in listed.split():
            assert summary(getattr(import_module(package), name))
            names += 1
used = {name.partition(".")[0] for name, module in sys.modules.items() if isinstance(module, absent.Module)}
assert used == set(absent.LIBRARIES), used
print(names)
"""


@pytest.mark.slow
def test_the_names_of_the_reference_need_no_optional_library():
    pytest.importorskip("sphinx", reason="Sphinx is not installed")
    command = [sys.executable, "-c", IMPORT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


PUBLIC = [name for name in fastqt.__all__ if name.endswith("_loss") or name == "log_sum_exp"]
LOSS_FACTS = ("When", "Replaces", "Migration", "Arguments", "Products", "Cost", "Source", "Tested by")


def sections() -> dict[str, str]:
    by_heading = {}
    for page in sorted(DOCS.glob("losses/*.md")):
        for part in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]:
            heading, text = part.split("\n", 1)
            by_heading[heading] = text
    return by_heading


SECTIONS = sections()
OF_LOSSES = [heading for heading in SECTIONS if any(f"`{name}`" in heading for name in PUBLIC)]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_loss_has_a_heading(name):
    assert [heading for heading in SECTIONS if f"`{name}`" in heading], f"no heading has `{name}`"


def test_the_lists_of_all_losses_are_those_of_their_declarations():
    """Where a loss is new or its section has changed, `make lists` writes them anew."""
    assert [str(path) for path, text in lists().items() if path.read_text() != text] == []


@pytest.mark.parametrize("heading", OF_LOSSES)
def test_the_section_of_a_loss_is_whole(heading):
    """It has a formula, and each fact once, with links to the reference."""
    text = SECTIONS[heading]
    (name,) = (name for name in PUBLIC if f"`{name}`" in heading)

    assert "$$" in text
    assert [fact for fact in LOSS_FACTS if text.count(f"- **{fact}:**") != 1] == []
    assert f"../api/losses.rst#fastqt.{name})" in text
    assert re.search(r"\*\*Migration:\*\*[^*]*(\]\(\.\./|`)", text), "want a link or code for the migration"


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_tests_that_a_section_names_exist(heading):
    for path in re.findall(r"\btests/[\w/]+(?:\.py|/)?", SECTIONS[heading]):
        assert (ROOT / path).exists(), path
