"""A compiled kernel is taken from the cache only where nothing that it depends on has changed."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.offline.cache import KEPT, CompileCache, python_files

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


def test_writers_at_once_leave_whole_results(kernels, tmp_path):
    """Each of eight writes and reads the same entry, large enough for a write to be seen half done."""
    result = {"sass": "x" * 2**20}

    def write_and_read(_: int) -> bool:
        cache = CompileCache(python_files(kernels), [], tmp_path / "cache")
        return cache.get("a kernel", lambda: result) == result

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(write_and_read, range(64)))


def test_only_the_newest_versions_are_kept(kernels, tmp_path):
    for version in range(KEPT + 3):
        cache = CompileCache(python_files(kernels), [str(version)], tmp_path / "cache")
        cache.get("a kernel", Compiler())
        os.utime(cache.folder, (version, version))
    assert len(list((tmp_path / "cache").iterdir())) == KEPT
    assert cache.folder.exists()


COMPILE = """
from pathlib import Path
from benchmarks.offline import compile as offline
from benchmarks.offline.cases import CASES
with offline.compiler():
    import fastqt
    assert Path(fastqt.__file__).is_relative_to(Path.cwd())
    wanted = "row_stats_kernel"
    found = offline.attempt(offline.noted(CASES[0], offline.GPUS[1]), wanted, offline.GPUS[1])
    print(found.get("error", "compiled"))
"""


@pytest.mark.slow
def test_a_kernel_that_breaks_is_not_hidden_by_its_compiled_past(kernels, tmp_path):
    """The whole way: a copy of the project compiles a kernel, the kernel breaks, the copy compiles again."""
    copy = kernels.parent
    shutil.copytree(ROOT / "fastqt", copy / "fastqt", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("benchmarks", "tests/shared"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "tests" / "__init__.py", copy / "tests")
    shutil.rmtree(copy / "kernels" / "deeper")
    shutil.move(copy / "kernels", copy / "fastqt" / "kernels")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(copy)}

    def compiled() -> str:
        command = [sys.executable, "-c", COMPILE]
        run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return run.stdout.strip()

    def entries() -> int:
        return len(list((tmp_path / "cache").rglob("*.json")))

    assert compiled() == compiled() == "compiled"
    assert entries() == 1
    source = copy / "fastqt" / "kernels" / "row_stats.py"
    before, body = source.read_text().split("def row_stats_kernel(")
    signature, body = body.split("):\n", 1)
    source.write_text(f"{before}def row_stats_kernel({signature}):\n    no_such_function()\n{body}")
    assert "no_such_function" in compiled()
    assert entries() == 1
