"""Public names: they alone are shown, torch is imported when one is used, and each has examples that run."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import fastqt
from fastqt.sentences import evaluation
from fastqt.sentences.cli import main
from tests.shared.doctests import examples_of, own, run_examples


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_names_are_those_that_a_type_checker_sees():
    tree = ast.parse(Path(fastqt.__file__).read_text())
    imported = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("fastqt")
        for alias in node.names
    ]
    assert sorted(imported) == dir(fastqt)
    assert set(dir(fastqt)) - set(fastqt.__all__) == {"integrations", "options", "sentences"}
    assert all(getattr(fastqt, name) is getattr(fastqt, name) for name in fastqt.__all__)


def test_other_names_are_errors():
    with pytest.raises(AttributeError, match="module 'fastqt' has no attribute 'contrastive_los'"):
        _ = fastqt.contrastive_los
    with pytest.raises(ImportError, match="cannot import name 'import_model' from 'fastqt'"):
        from fastqt import import_model  # noqa: F401


def test_names_are_imported_when_they_are_used_and_all_of_them_by_a_star():
    """In a new process; whatever is imported, the public names alone are shown."""
    printed = run(
        "import sys, fastqt\n"
        "print(fastqt.__version__, 'torch' in sys.modules)\n"
        "fastqt.nn.GRU\n"
        "print('torch' in sys.modules, 'contrastive_loss' in vars(fastqt))\n"
        "fastqt.contrastive_loss\n"
        "print('contrastive_loss' in vars(fastqt))\n"
        "from fastqt import *\n"
        "print(set(fastqt.__all__) <= set(dir()))\n"
        "import fastqt.losses, fastqt.sentences.runs.config\n"
        "modules = {'integrations', 'options', 'sentences'}\n"
        "assert dir(fastqt) == sorted({*fastqt.__all__, *modules})\n"
        "assert dir(fastqt.nn) == sorted(fastqt.nn.__all__)\n"
        "assert all(getattr(fastqt, name).__name__ == f'fastqt.{name}' for name in modules)"
    )
    assert printed.split() == [fastqt.__version__, "False", "True", "False", "True", "True"]


@pytest.mark.slow
@pytest.mark.parametrize("use", ["fastqt.contrastive_loss(f, g)", "fastqt.nn.ContrastiveLoss()(f, g)"])
def test_a_compiled_function_may_be_the_first_use(use):
    program = (
        "import torch, fastqt\n"
        "torch.manual_seed(0)\n"
        "f, g = (torch.randn(6, 4, requires_grad=True) for _ in range(2))\n"
        f"def loss(f, g): return {use}\n"
        "assert 'contrastive_loss' not in vars(fastqt)\n"
        "compiled = torch.compile(loss, fullgraph=True, backend='aot_eager')\n"
        "gradients = torch.autograd.grad(compiled(f, g), (f, g))\n"
        "eager = torch.autograd.grad(loss(f, g), (f, g))\n"
        "assert all(torch.allclose(a, b) for a, b in zip(gradients, eager))"
    )
    run(program)


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
