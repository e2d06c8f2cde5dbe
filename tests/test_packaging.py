"""What is built installs elsewhere: with the extension, and without a compiler."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

USE = """
import sys
# The finder of an editable install would fill in what the wheel lacks.
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
import torch, fastqt
loss = fastqt.contrastive_loss(*(torch.randn(9, 4, requires_grad=True) for _ in range(2)))
loss.backward()
states, last = fastqt.nn.GRU(4, 6)(torch.randn(5, 2, 4))
assert states.isfinite().all() and loss.isfinite()
print(fastqt.__file__)
fastqt.show_config()
"""


def build_and_use(folder: Path, environment: dict[str, str]) -> tuple[Path, str]:
    """Builds a wheel from a copy of the sources, and runs USE against what it unpacks to."""
    source, unpacked = folder / "source", folder / "unpacked"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        folders, files = (
            ("fastqt/", "csrc/", "kernels/"),
            ("setup.py", "pyproject.toml", "README.md", "LICENSE"),
        )
        if name.startswith(folders + files):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", folder, source], env=environment, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(unpacked)
    run = subprocess.run(
        [sys.executable, "-c", USE],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.startswith(str(unpacked))
    return wheel, run.stdout


@pytest.fixture
def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "FASTQT_PURE"}


def test_one_wheel_for_every_python(tmp_path, environment):
    wheel, config = build_and_use(tmp_path, environment)
    assert "-cp310-abi3-" in wheel.name
    assert "not built" not in config
    assert wheel.stat().st_size < 2 * 2**20
    assert (tmp_path / "unpacked" / "fastqt" / "py.typed").exists()


def test_without_a_compiler(tmp_path, environment):
    environment["CXX"] = "no-such-compiler"
    environment["PATH"] = str(Path(sys.executable).parent)
    wheel, config = build_and_use(tmp_path, environment)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "fastqt._C is not built" in config
