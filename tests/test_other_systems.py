"""What Windows and macOS lack is on the way of nothing that works there: of imports, losses and commands."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared.every_loss import EVERY_LOSS
from tests.shared.other_systems import MEMORY

ROOT = Path(__file__).parents[1]
BEGIN = """
import os, sys
import numpy, safetensors.torch, scipy.stats, sklearn.utils.extmath, tokenizers, torch, torch._dynamo, tqdm
from tests.shared.other_systems import become
become(sys.argv[1])
import fastqt, fastqt.engines, fastqt.nn
"""

LOSSES = """
from tests.shared.every_loss import EVERY_LOSS
from tests.losses.test_every_loss import copied, made, with_gradients

for backend in ("", "torch"):
    os.environ["FASTQT_BACKEND"] = backend
    for name in EVERY_LOSS:
        loss, inputs = made(name, torch.float64)
        value, *gradients = with_gradients(loss.function, inputs, **loss.options)
        exact = with_gradients(loss.eager, copied(inputs))
        exact[0] = exact[0] if value.dim() else exact[0].mean()
        for x, y in zip((value, *gradients), exact, strict=True):
            assert (x - y).norm() <= 1e-9 * y.norm().clamp(min=1e-3), name
    print(backend or "chosen", len(EVERY_LOSS))
os.environ["FASTQT_BACKEND"] = ""
"""

MODULES = """
import importlib, pkgutil
import fastqt.sentences
# Kernels and their schedules are Triton's, integrations and a module of exports need other libraries, and
# __main__ runs the command.
EXPORTED = "sentences.inference.sentence_transformers"
OTHERS = tuple(f"fastqt.{name}" for name in ("kernels", "engines.triton.", "integrations", "_", EXPORTED))
for module in pkgutil.walk_packages(fastqt.__path__, "fastqt."):
    if not module.name.startswith(OTHERS):
        importlib.import_module(module.name)
states, _ = fastqt.nn.GRU(4, 6)(torch.randn(5, 2, 4))
states.sum().backward()
"""

COMMANDS = """
import pathlib
from fastqt.sentences.cli import main
from tests.shared.command_lines import SMALL
folder = pathlib.Path(sys.argv[2])
run, corpus = folder / "run", folder / "corpus.txt"
corpus.write_text("".join(f"word{i % 7} stands by word{i % 5} and word{i % 3}\\n" for i in range(200)))

def command(*words):
    assert main([str(word) for word in words]) == 0, words

command("config")
command("train", corpus, "--out", run, *SMALL, "--encoder", "bow", "--epochs", 1)
command("train", corpus, "--out", run, "--resume")
command("embed", run, corpus, "--out", folder / "x.npy")
command("neighbors", run, corpus, "--query", "word1 stands by word2")
"""

LOCK = """
import pathlib
from fastqt.errors import InputError
from fastqt.sentences.runs.files import locked
folder = pathlib.Path(sys.argv[2])
with locked(folder):
    try:
        with locked(folder):
            raise AssertionError
    except InputError as error:
        print(error)
with locked(folder):
    pass
from fastqt.devices import machine_memory, usable_processors
print(machine_memory(), usable_processors() > 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_all_runs_without_what_the_system_lacks(system, tmp_path):
    """Every loss and its gradients, as chosen and on the engine "torch"; every module; a training.

    It is one process, because the imports take longer than the rest.
    """
    script = BEGIN + LOSSES + MODULES + COMMANDS + LOCK
    command = [sys.executable, "-c", script, system, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]

    lines = done.stdout.splitlines()
    assert lines[:2] == [f"chosen {len(EVERY_LOSS)}", f"torch {len(EVERY_LOSS)}"]
    assert any(line.startswith("device   cpu        computes with torch") for line in lines)
    assert any("is writing in it" in line for line in lines)
    memory, tells = lines[-1].split()
    assert tells == "True"
    assert int(memory) == MEMORY if system == "win32" else int(memory) > 0
