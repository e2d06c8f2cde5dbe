"""A library that is damaged is told of in words, and the losses run without it, and without Triton."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastqt.engines import ops

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(ops.native_error is not None, reason=str(ops.native_error)),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="an ELF library"),
]

# The damaged library is in a folder that `fastqt.__path__` names before the package's own.
USE = """
import importlib.util, sys
spec = importlib.util.find_spec("fastqt")
spec.submodule_search_locations.insert(0, sys.argv[1])
fastqt = importlib.util.module_from_spec(spec)
sys.modules["fastqt"] = fastqt
spec.loader.exec_module(fastqt)
import torch
fastqt.show_config()
x = torch.randn(6, 4, requires_grad=True)
fastqt.contrastive_loss(x, torch.randn(6, 4)).backward()
assert x.grad.isfinite().all()
states, _ = fastqt.nn.GRU(4, 6)(torch.randn(5, 2, 4))
assert states.isfinite().all()
"""

DAMAGED = {
    "empty": (lambda whole: b"", "file too short"),
    "no library": (lambda whole: b"not a library at all" * 100, "invalid ELF header"),
    "half": (lambda whole: whole[: len(whole) // 2], "cut short"),
}


@pytest.fixture(scope="module")
def whole() -> bytes:
    return Path(sys.modules["fastqt._C"].__file__).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_library_falls_back_in_words(kind, whole, tmp_path):
    damage, reason = DAMAGED[kind]
    (tmp_path / "_C.abi3.so").write_bytes(damage(whole))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", USE, tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("backend  cpu")]
    assert "the extension fastqt._C" in line
    assert reason in line
    assert str(tmp_path / "_C.abi3.so") in line


@pytest.mark.parametrize("without", [1, 64, 4096, "half", "segments", "header", "magic"])
def test_a_library_that_is_cut_short_is_found_before_it_is_loaded(without, whole, tmp_path):
    lengths = {"half": len(whole) // 2, "segments": 100, "header": 40, "magic": 4}
    library = tmp_path / "_C.abi3.so"
    library.write_bytes(whole[: lengths.get(without) or len(whole) - without])
    with pytest.raises(ImportError, match=r"_C\.abi3\.so is cut short: its headers? wants? \d+ bytes, got"):
        ops.check_whole(str(library))


def test_the_segments_are_read_where_there_are_no_sections(whole, tmp_path):
    """Tools that strip a library may leave out the table of sections, or move it to the front."""
    library = tmp_path / "_C.abi3.so"
    no_sections = whole[:40] + bytes(8) + whole[48:60] + bytes(2) + whole[62:]
    library.write_bytes(no_sections)
    ops.check_whole(str(library))
    library.write_bytes(no_sections[: len(whole) // 2])
    with pytest.raises(ImportError, match="is cut short"):
        ops.check_whole(str(library))


def test_other_files_are_left_to_the_loader(tmp_path):
    library = tmp_path / "_C.abi3.so"
    for content in (b"", b"MZ", b"not a library" * 100):
        library.write_bytes(content)
        ops.check_whole(str(library))


WITHOUT_TRITON = """
import sys
from importlib import util

genuine = util.find_spec
util.find_spec = lambda name, *more: None if name == "triton" else genuine(name, *more)
sys.modules["triton"] = None  # whoever imports it gets an ImportError
sys.modules["fastqt._C"] = None  # as on a system without a C++ compiler

import torch
import fastqt

x = torch.randn(4, 8)
released = fastqt.mixcse_loss(x, x, form="released")
print((fastqt.contrastive_loss(x, x) + released).isfinite().item())
try:
    fastqt.contrastive_loss(x, x, backend="triton")
except ValueError as error:
    print("triton is not installed" in str(error))
"""


def test_losses_work_without_triton():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["True", "True"]
