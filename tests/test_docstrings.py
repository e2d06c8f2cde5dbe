"""Each public function and class has an example in its docstring, which runs and prints what it shows."""

import inspect
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

import fastqt
from fastqt.sentences import evaluation
from fastqt.sentences.cli import main
from tests.shared.doctests import examples_of, own, run_examples

MODULES = (fastqt, fastqt.nn, fastqt.distributed, evaluation)
NAMES = [(module, name) for module in MODULES for name in own(module)]
each = pytest.mark.parametrize(
    ("module", "name"), NAMES, ids=[f"{module.__name__}.{name}" for module, name in NAMES]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with the files that examples name: a trained run, a corpus, word vectors, a task."""
    folder = tmp_path_factory.mktemp("examples")
    lines = ["She closed the door.", *(f"Line {i} of a novel that is read aloud." for i in range(80))]
    (folder / "novels.txt").write_text("\n".join(lines))
    small = ["--word-dim", "8", "--batch-size", "40", "--epochs", "1"]
    assert main(["train", str(folder / "novels.txt"), "--out", str(folder / "run"), *small]) == 0
    (folder / "vectors.txt").write_text("she 1 0\ndoor 0 1\nclosed 1 2\n")
    (folder / "eval" / "STSB").mkdir(parents=True)
    for part in ("dev", "test"):
        rows = ("x\t5\tshe\tshe\n", "x\t1\tshe\tdoor\n", "x\t3\tshe\tclosed\n")
        (folder / "eval" / "STSB" / f"{part}.tsv").write_text("".join(rows))
    return folder


@each
def test_a_public_name_has_an_example(module, name):
    assert examples_of(module, name)


@each
def test_the_example_runs_and_prints_what_it_shows(module, name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert run_examples(module, name) == ""


def test_an_example_that_is_wrong_is_found():
    class Wrong:
        """Adds.

        >>> 1 + 1
        3
        """

    module = SimpleNamespace(Wrong=Wrong, __name__="module")
    assert "Expected:\n    3\nGot:\n    2" in run_examples(module, "Wrong")


@each
def test_all_arguments_are_explained(module, name):
    """Each argument is named in the docstring, or in that of a public name which the docstring points to.

    Arguments that the constructor takes may be named by the class.
    """
    value = getattr(module, name)
    function = value.__init__ if inspect.isclass(value) else value
    text = inspect.getdoc(value) or ""
    for pointed in re.findall(r"`(?:fastqt\.)?(?:nn\.)?(\w+)`", text):
        text += inspect.getdoc(getattr(fastqt, pointed, getattr(fastqt.nn, pointed, None))) or ""
    parameters = [p for p in inspect.signature(function).parameters if p not in ("self", "args", "kwargs")]
    missing = [p for p in parameters if not re.search(rf"(?<![\w`]){re.escape(p)}\b", text)]
    assert missing == []


def test_scale_is_explained_by_the_temperature_wherever_there_is_one():
    """Other libraries have a temperature in its place."""
    for module, name in NAMES:
        value = getattr(module, name)
        function = value.__init__ if inspect.isclass(value) else value
        if "scale" in inspect.signature(function).parameters:
            text = re.sub(r"\s+", " ", inspect.getdoc(value))
            assert re.search(r"scale\b[^.;]*1 / temperature", text), name


@pytest.mark.slow
def test_dir_shows_the_public_names_alone():
    """In a new process, before and after names have been used."""
    program = (
        "import fastqt\n"
        "before = dir(fastqt)\n"
        "import fastqt.nn, fastqt.losses, fastqt.sentences.runs.config\n"
        "assert dir(fastqt) == before\n"
        "print(*before)\n"
        "print(*dir(fastqt.nn))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    of_package, of_nn = (line.split() for line in done.stdout.splitlines())
    modules = {"integrations", "options", "sentences"}
    assert of_package == sorted({*fastqt.__all__, *modules})
    assert of_nn == sorted(fastqt.nn.__all__)
    assert all(getattr(fastqt, name).__name__ == f"fastqt.{name}" for name in modules)
