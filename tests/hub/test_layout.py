"""The repository of kernels for the Hugging Face hub is imported as the package `kernels` imports it."""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hub import layout

ROOT = Path(__file__).parents[2]

# What `kernels` does: it imports a package from a file, under the name that its metadata say.
LOAD = """
import importlib.util, json, pkgutil, sys
from pathlib import Path

folder = Path(sys.argv[1])
name = json.loads((folder / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
module = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""

USE = """
import torch

inputs = [torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2)]
losses = [package.info_nce_loss(*x, scale=9.0) for package, x in zip((module, fastqt), inputs)]
gradients = [torch.autograd.grad(loss, x)[0] for loss, x in zip(losses, inputs)]
torch.testing.assert_close(*losses)
torch.testing.assert_close(*gradients)
window = torch.compile(module.contrastive_loss, backend="aot_eager")(*inputs[0])
torch.testing.assert_close(window, fastqt.contrastive_loss(*inputs[1]))
print(module.__name__, module.engines.ENGINES is fastqt.engines.ENGINES)
"""


def run(*command: object, **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("hub") / "repository"
    assert layout.main([str(out)]) == 0
    with pytest.raises(SystemExit, match="2"):  # A folder that exists is left alone.
        layout.main([str(out)])
    return out


def test_each_backend_has_a_folder_with_metadata(repository):
    backends = ("cpu", "cuda", "rocm", "xpu", "metal")
    assert {path.name for path in repository.iterdir()} == {"LICENSE", "README.md", "build", "build.toml"}
    assert {path.name for path in (repository / "build").iterdir()} == {f"torch-{name}" for name in backends}
    for backend in backends:
        folder = repository / "build" / f"torch-{backend}"
        metadata = json.loads((folder / "metadata.json").read_text())
        assert metadata["backend"] == {"type": backend}
        assert metadata["name"] == "fastqt"
        assert metadata["id"].isidentifier()
        assert metadata["version"] == 0
        digests = metadata["digest"]["files"]
        files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        assert digests.keys() == files - {"metadata.json"}
        for name, digest in digests.items():
            assert base64.b64decode(digest) == hashlib.sha256((folder / name).read_bytes()).digest()
        tables = ({path.name for path in (x / "kernels/tuned").glob("*.json")} for x in (folder, ROOT))
        assert len(set(map(frozenset, tables))) == 1
        assert not list(folder.rglob("*.so"))


@pytest.mark.slow
def test_the_copy_imports_no_other_fastqt(repository):
    """Each module of it is imported, Triton's kernels too, and none is of the installed package."""
    walk = """
for found in pkgutil.walk_packages(module.__path__, f"{name}."):
    importlib.import_module(found.name)
assert all(hasattr(module, n) for n in module.__all__)
spec = importlib.util.spec_from_file_location("older", folder / "fastqt" / "__init__.py")
older = importlib.util.module_from_spec(spec)  # as older versions of `kernels` import it
spec.loader.exec_module(older)
assert all(getattr(older, n) is getattr(module, n) for n in older.__all__) and older.__all__
print([n for n in sys.modules if n.partition(".")[0] == "fastqt"], sum(name in n for n in sys.modules))
"""
    folder = repository / "build" / "torch-cpu"
    others, modules = run(sys.executable, "-c", LOAD + "import importlib\n" + walk, folder).rsplit(None, 1)
    assert others == "[]"
    assert int(modules) > 100


@pytest.mark.slow
def test_the_copy_computes_beside_an_installed_fastqt(repository):
    for first, second in ((LOAD, "import fastqt\n"), ("import fastqt\n", LOAD)):
        folder = repository / "build" / "torch-cpu"
        printed = run(sys.executable, "-c", first + second + "import fastqt.engines\n" + USE, folder)
        assert re.fullmatch(r"_fastqt_cpu_\w+ False\n", printed)


def test_an_import_that_cannot_become_relative_is_refused(tmp_path):
    module = tmp_path / "module.py"
    module.write_text('from importlib import import_module\n\nx = import_module("fastqt.losses")\n')
    with pytest.raises(SystemExit, match="want imports that can become relative"):
        layout.copy(module, tmp_path / "out", Path("module.py"), "_copy")
    assert not (tmp_path / "out" / "module.py").exists()


@pytest.mark.parametrize(
    ("line", "depth", "expected"),
    [
        ("from fastqt.a.b import c", 1, "from .a.b import c"),
        ("    from fastqt import a", 2, "    from .. import a"),
        ("from fastqt.a import (", 3, "from ...a import ("),
        ("from fastqtish import a", 1, "from fastqtish import a"),
    ],
)
def test_imports_become_relative(line, depth, expected):
    assert layout.relative(line, depth) == expected
