"""Optional libraries: which versions are wanted, and examples in docstrings that run where they are."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fastqt.integrations._libraries import LIBRARIES, load_library
from tests.shared.doctests import examples_of, own, run_examples

ROOT = Path(__file__).parents[2]
# What a user imports or calls, by the library that it needs.
USES = {
    "sentence_transformers": (
        "from fastqt.integrations.sentence_transformers import MultipleNegativesRankingLoss",
        "from fastqt.integrations.sentence_transformers import MultiVectorMultipleNegativesRankingLoss",
        "from fastqt.integrations.sentence_transformers import patch; patch()",
        "import fastqt.sentences.inference.sentence_transformers",
    ),
    "transformers": (
        "from fastqt.integrations.huggingface import ContrastiveModel",
        "from fastqt.integrations.huggingface import HuggingFaceEncoder; HuggingFaceEncoder('.')",
    ),
    "lightning": ("from fastqt.integrations.lightning import ContrastiveModule",),
    "pytorch_metric_learning": ("from fastqt.integrations.metric_learning import NTXentLoss",),
    "pyarrow": ("from fastqt.sentences.text.tables import *; list(read_rows('a.parquet', None))",),
    "faiss": ("from fastqt.sentences.inference.index import import_faiss; import_faiss()",),
}
PROGRAM = """
import json, sys, types
module, uses = sys.argv[1], json.loads(sys.argv[2])
old = types.ModuleType(module)
old.__version__ = "0.9.1"
said = []
for stand_in in (None, old):
    sys.modules[module] = stand_in
    for use in uses:
        try:
            exec(use, {})
        except (ImportError, ValueError) as error:  # an InputError of the command line is a ValueError
            said.append(str(error))
print(json.dumps(said))
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", USES)
def test_each_use_says_what_it_wants_and_what_it_got(module):
    name, oldest, extra = LIBRARIES[module]
    command = [sys.executable, "-c", PROGRAM, module, json.dumps(USES[module])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    for sentence, version in zip(said, [v for v in ("none", "0.9.1") for _ in USES[module]], strict=True):
        assert f"want {name} >= {oldest}, got {version}: pip install 'fastqt[{extra}]'" in sentence


def test_the_oldest_versions_are_those_of_the_extras():
    tomllib = pytest.importorskip("tomllib", reason="Python has it since 3.11")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, oldest, extra in LIBRARIES.values():
        (line,) = (line for line in extras[extra] if line.startswith(name))
        assert line.removeprefix(name).removeprefix("[train]") == f">={oldest}"


@pytest.mark.parametrize(
    ("version", "fits"),
    [("5.3.0", False), ("5.99", False), ("6.0.dev1", True), ("6", True), ("6.2.0+x", True), ("10.1", True)],
)
def test_versions_are_compared_by_their_numbers(monkeypatch, version, fits):
    library = type(sys)("sentence_transformers")
    library.__version__ = version
    monkeypatch.setitem(sys.modules, "sentence_transformers", library)
    if fits:
        assert load_library("sentence_transformers") is library
    else:
        with pytest.raises(ImportError, match=rf"^want sentence-transformers >= 6, got {version}: "):
            load_library("sentence_transformers")


# The library that each wants.
WANTED = {
    "huggingface": "transformers",
    "lightning": "lightning",
    "metric_learning": "pytorch_metric_learning",
    "open_clip": None,
    "pylate": None,
    "sentence_transformers": "sentence_transformers",
}


@pytest.mark.slow
@pytest.mark.parametrize("integration", WANTED)
def test_each_public_class_has_an_example_that_runs(integration, checkpoint, tmp_path, monkeypatch):
    (tmp_path / "bert").symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    if WANTED[integration] is not None:
        pytest.importorskip(WANTED[integration], reason=f"{WANTED[integration]} is not installed")
    module = importlib.import_module(f"fastqt.integrations.{integration}")
    names = own(module)
    assert names
    assert [name for name in names if not examples_of(module, name)] == []
    assert "".join(run_examples(module, name) for name in names) == ""
