"""A compiled kernel is taken from the cache only where nothing that it depends on has changed."""

import shutil
from pathlib import Path

import pytest

from benchmarks.offline.cache import CompileCache, python_files

ROOT = Path(__file__).parents[3]


@pytest.fixture
def kernels(tmp_path) -> Path:
    """A copy of the kernels, which a test may break."""
    copy = tmp_path / "sources" / "kernels"
    shutil.copytree(ROOT / "kernels", copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "deeper").mkdir()
    (copy / "deeper" / "kernel.py").write_text("x = 1\n")
    return copy


class Compiler:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict:
        self.calls += 1
        return {"registers": 100 + self.calls}


def test_unchanged_sources_are_compiled_once(kernels, tmp_path):
    compiler = Compiler()
    for _ in range(2):  # a cache of its own each time, as two processes have
        cache = CompileCache(python_files(kernels), ["triton 1"], tmp_path / "cache")
        assert cache.get("a kernel", compiler) == {"registers": 101}
    assert compiler.calls == 1
    assert cache.get("another kernel", compiler) == {"registers": 102}


def test_a_change_to_any_source_is_compiled_anew(kernels, tmp_path):
    compiler = Compiler()
    paths = python_files(kernels)
    assert {path.name for path in paths} > {"kernel.py"}

    def compiled() -> int:
        before = compiler.calls
        CompileCache(python_files(kernels), ["triton 1"], tmp_path / "cache").get("a kernel", compiler)
        return compiler.calls - before

    assert compiled() == 1
    for path in paths:
        path.write_text(path.read_text() + "\n")
        assert compiled() == 1, path
        assert compiled() == 0, path
    (kernels / "deeper" / "new.py").write_text("")
    assert compiled() == 1
    (kernels / "deeper" / "new.py").rename(kernels / "new.py")
    assert compiled() == 1


def test_another_compiler_compiles_anew(kernels, tmp_path):
    compiler = Compiler()
    for versions in (["triton 1", "ptxas 1"], ["triton 2", "ptxas 1"], ["triton 1", "ptxas 2"]):
        CompileCache(python_files(kernels), versions, tmp_path / "cache").get("a kernel", compiler)
    assert compiler.calls == 3


def test_a_failure_is_not_kept(kernels, tmp_path):
    cache = CompileCache(python_files(kernels), [], tmp_path / "cache")
    with pytest.raises(ZeroDivisionError):
        cache.get("a kernel", lambda: {"registers": 1 // 0})
    assert cache.get("a kernel", Compiler()) == {"registers": 101}
