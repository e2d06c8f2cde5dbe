"""What is built installs elsewhere: with the extension, from the sdist, editable, and without a compiler."""

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from shutil import which

import pytest

ROOT = Path(__file__).parents[1]

TABLE = '{"device": "no GPU", "scores": {}}'  # of tiles, as benchmarks.tune writes them

USE = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch, fastqt, fastqt.kernels.scores
from fastqt.kernels import tuning
assert tuning.tables() == {"no GPU": {}}
del os.environ["TRITON_INTERPRET"]  # which would have Triton compute on a CPU without the extension
loss = fastqt.contrastive_loss(*(torch.randn(9, 4, requires_grad=True) for _ in range(2)))
loss.backward()
states, last = fastqt.nn.GRU(4, 6)(torch.randn(5, 2, 4))
assert states.isfinite().all() and loss.isfinite()
print(fastqt.__file__)
fastqt.show_config()
"""


def run(*command: object, cwd: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_sources(folder: Path) -> Path:
    """The files under version control, no others that happen to lie about, and a table of tiles."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if not (ROOT / name).is_file():
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    (folder / "kernels" / "tuned" / "no_gpu.json").write_text(TABLE)
    return folder


def build_wheel(source: Path, folder: Path, environment: dict[str, str]) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    run(*pip, "--wheel-dir", folder, source, cwd=folder, environment=environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install_and_use(wheel: Path, folder: Path, environment: dict[str, str]) -> tuple[Path, str]:
    """The site-packages of a fresh environment that borrows this one's torch, and what USE prints."""
    place = folder / "fresh"
    run(sys.executable, "-m", "venv", "--without-pip", place, cwd=folder, environment=environment)
    python = place / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, wheel, cwd=folder, environment=environment)
    (packages,) = place.glob("lib/python*/site-packages")
    # A path file that another one's folder holds is not read: an editable install there is not seen.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return packages, run(python, "-c", USE, cwd=folder, environment=environment)


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    inner = ("FASTQT_PURE", "FASTQT_REQUIRE_EXTENSION", "PYTHONPATH")
    outer = {name: x for name, x in os.environ.items() if name not in inner}
    # Where there is an nvcc, kernels for one architecture show as much as for three, and sooner.
    return {"TORCH_CUDA_ARCH_LIST": "9.0a", **outer}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory, environment) -> Path:
    """The unpacked source distribution."""
    folder = tmp_path_factory.mktemp("sdist")
    source = copy_sources(folder / "source")
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, folder, cwd=source, environment={**environment, "FASTQT_PURE": "1"})
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory, environment) -> Path:
    """The one wheel, built from the source distribution."""
    strict = {**environment, "FASTQT_REQUIRE_EXTENSION": "1"}
    return build_wheel(sdist, tmp_path_factory.mktemp("wheel"), strict)


def test_the_sdist_holds_the_repository(sdist):
    """All that is built, and all that tests it."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    kept = [name for name in listed.splitlines() if (ROOT / name).is_file() and name != ".gitignore"]
    assert "csrc/exports.map" in kept
    assert [name for name in kept if not (sdist / name).exists()] == []


def test_the_description_of_the_package_has_no_relative_links(sdist):
    """A package index has none of the files that they lead to."""
    description = (sdist / "PKG-INFO").read_text().partition("\n\n")[2]
    assert "fastqt.contrastive_loss" in description
    assert [link for link in re.findall(r"\]\(([^)]*)\)", description) if not link.startswith("http")] == []
    assert "<!--" not in description


@pytest.mark.slow
def test_one_wheel_for_every_python(wheel, tmp_path, environment):
    packages, printed = install_and_use(wheel, tmp_path, environment)
    assert printed.startswith(str(packages))
    assert "-cp310-abi3-" in wheel.name
    assert "not built" not in printed
    assert wheel.stat().st_size < 2 * 2**20
    folders = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {folder.partition("-")[0] for folder in folders} == {"fastqt"}  # it, and its .dist-info
    assert len(folders) == 2
    assert (packages / "fastqt" / "py.typed").exists()


@pytest.mark.slow
def test_an_editable_install_uses_the_checkout(tmp_path, environment):
    """Its kernels too, which lie outside of the folder fastqt/ there."""
    source = copy_sources(tmp_path / "source")
    settings = {"editable_mode": "compat"}  # that of the Makefile
    build = (
        f"import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1], {settings})"
    )
    run(sys.executable, "-c", build, tmp_path, cwd=source, environment={**environment, "FASTQT_PURE": "1"})
    (wheel,) = tmp_path.glob("*.whl")
    _, printed = install_and_use(wheel, tmp_path, environment)
    assert printed.startswith(str(source))
    assert "editable_mode=compat" in (source / "Makefile").read_text()

    # A type checker finds it, which follows paths and no import hooks.
    mypy = [sys.executable, "-m", "mypy", "--python-executable", tmp_path / "fresh" / "bin" / "python"]
    program = "import fastqt\nreveal_type(fastqt.show_config)\n"
    shown = run(*mypy, "-c", program, cwd=tmp_path, environment=environment)
    assert 'Revealed type is "def ()' in shown


@pytest.mark.slow
def test_the_wheel_keeps_to_the_limited_api(wheel, tmp_path, environment):
    run(sys.executable, "-m", "abi3audit", "--strict", wheel, cwd=tmp_path, environment=environment)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads ELF symbols")
def test_the_wheel_loads_where_there_is_no_cuda(wheel, tmp_path, environment):
    """No symbol of CUDA has to be resolved when the extension is loaded."""
    if which("nm") is None:
        pytest.skip("wants nm")
    packages, _ = install_and_use(wheel, tmp_path, environment)
    extension = packages / "fastqt" / "_C.abi3.so"
    symbols = run("nm", "-D", "--undefined-only", extension, cwd=tmp_path, environment=environment)
    wanted = [line.split()[-2:] for line in symbols.splitlines()]
    assert any(name.startswith("aoti_torch_") for _, name in wanted)
    strong = [name for kind, name in wanted if kind not in ("w", "v") and "cuda" in name.lower()]
    # Of these every torch has one, with a number for CUDA or without a device to give it.
    assert [name for name in strong if name != "aoti_torch_device_type_cuda"] == []


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a manylinux tag")
def test_the_wheel_runs_with_an_old_glibc(wheel, tmp_path, environment):
    """With 2.28 and later, as torch itself, whichever glibc this machine has, also with CUDA's runtime."""
    shown = run(sys.executable, "-m", "auditwheel", "show", wheel, cwd=tmp_path, environment=environment)
    tag = re.search(r'"manylinux_2_(\d+)_', " ".join(shown.split()))
    assert tag is not None, shown
    assert int(tag[1]) <= 28


def check_library(extension: Path, source: Path) -> None:
    """A library built in `source` is hardened, exports one function, and does not tell where it was built."""
    from elftools.elf.elffile import ELFFile

    with extension.open("rb") as file:
        elf = ELFFile(file)
        symbols = list(elf.get_section_by_name(".dynsym").iter_symbols())
        dynamic = {
            tag.entry.d_tag: tag.entry.d_val for tag in elf.get_section_by_name(".dynamic").iter_tags()
        }
        segments = {segment["p_type"]: segment["p_flags"] for segment in elf.iter_segments()}
        sections = {section.name for section in elf.iter_sections()}
    undefined = {symbol.name for symbol in symbols if symbol["st_shndx"] == "SHN_UNDEF"}
    assert {symbol.name for symbol in symbols} - undefined == {"PyInit__C"}
    assert "__stack_chk_fail" in undefined
    # What the loader writes is read-only afterwards, and it resolves every function while it loads.
    assert "PT_GNU_RELRO" in segments
    assert dynamic["DT_FLAGS"] & 0x8 or dynamic["DT_FLAGS_1"] & 0x1
    executable = 1
    assert not segments["PT_GNU_STACK"] & executable
    assert not {"DT_RPATH", "DT_RUNPATH", "DT_TEXTREL"} & set(dynamic)
    assert [name for name in sections if name.startswith((".debug", ".symtab"))] == []
    content = extension.read_bytes()
    assert [
        folder for folder in (str(source), "site-packages", "/lib/python") if folder.encode() in content
    ] == []
    assert b"csrc/cpu/checks.cpp" in content


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="an ELF library")
def test_the_installed_library_is_hardened():
    spec = importlib.util.find_spec("fastqt._C")
    if spec is None or spec.origin is None:
        pytest.skip("the extension is not built")
    check_library(Path(spec.origin), ROOT)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="an ELF library")
def test_the_library_of_the_wheel_is_hardened(sdist, wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        check_library(Path(archive.extract("fastqt/_C.abi3.so", tmp_path)), sdist)
    # The library does not tell, as it calls no function that _FORTIFY_SOURCE replaces. The last flag holds.
    (build,) = sdist.glob("build/temp*/**/build.ninja")
    flags = [line for line in build.read_text().splitlines() if "FORTIFY_SOURCE" in line]
    assert flags
    for line in flags:
        assert re.findall(r"-[DU]_FORTIFY_SOURCE\S*", line)[-1] == "-D_FORTIFY_SOURCE=3"


NO_COMPILER = {"CXX": "no-such-compiler", "PATH": str(Path(sys.executable).parent)}


def failing_compiler(folder: Path) -> dict[str, str]:
    """A compiler that answers which one it is, as g++ does, and compiles nothing."""
    path = folder / "compilers" / "g++"
    path.parent.mkdir()
    genuine = which("g++")
    path.write_text(f"""#!/bin/sh
case "$*" in *-c*|*-o*) echo "cannot compile" >&2; exit 1;; *) exec {genuine} "$@";; esac
""")
    path.chmod(0o755)
    return {"CXX": str(path)}


WITHOUT = {
    "absent": (lambda folder: NO_COMPILER, "there is no C++ compiler"),
    "false": (lambda folder: {"CXX": "false"}, "its compilation failed"),
    "failing": (failing_compiler, "its compilation failed"),
    "pure": (lambda folder: {"FASTQT_PURE": "1"}, "FASTQT_PURE=1 asks for none"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITHOUT)
def test_without_a_compiler_that_works(kind, tmp_path, environment):
    """A build says why there is no extension, and fails where one is required; else the package works."""
    changes, reason = WITHOUT[kind]
    source, bare = copy_sources(tmp_path / "source"), {**environment, **changes(tmp_path)}
    command = [sys.executable, "setup.py", "bdist_wheel"]
    for required, status in (("1", 1), ("0", 0)):
        whole = {**bare, "FASTQT_REQUIRE_EXTENSION": required}
        done = subprocess.run(command, cwd=source, env=whole, capture_output=True, text=True)
        assert done.returncode == status, done.stderr[-2000:]
        assert done.stderr.count(reason) == 1, done.stderr[-2000:]
        assert ("To get the extension" in done.stderr) == (status == 0)
        assert ("asks for the extension, but" in done.stderr) == (status == 1)

    (wheel,) = (source / "dist").glob("*-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    if kind == "absent":
        _, config = install_and_use(wheel, tmp_path, bare)
        (cpu,) = [line for line in config.splitlines() if line.startswith("device   cpu")]
        assert "computes with torch" in cpu
        assert "fastqt._C is not built" in cpu
