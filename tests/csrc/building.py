"""Builds C++ for the tests. A digest of what a file is made of names it in a cache, so that it is built once.

Needs the standard library alone, and pybind11 where Python is to import the result.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.metadata import PackageNotFoundError, version
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
MODULE = ("-shared", "-fPIC")  # flags of the linker for what Python imports


def compiler() -> str | None:
    return next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)


def why_no_modules() -> str | None:
    """Why no module for Python can be built here, if so."""
    if compiler() is None:
        return "no C++ compiler"
    try:
        version("pybind11")
    except PackageNotFoundError:
        return "no pybind11"
    return None


def binding_flags() -> list[str]:
    """The flags for sources that include pybind11, of which Python sees no other names."""
    import pybind11

    include = pybind11.get_include(), sysconfig.get_path("include")
    return ["-fvisibility=hidden", *(f"-isystem{path}" for path in include)]


def build(
    sources: Mapping[str, Sequence[str]],
    *,
    headers: Iterable[str],
    link: Sequence[str],
    versions: Iterable[str] = (),
    command: str | None = None,
) -> Path:
    """What the compiler links of `sources`: each a path below the root, with the flags to compile it.

    Args:
        headers: patterns of paths below the root. A change of any of these files builds all sources anew.
        versions: of the other packages that the sources include.
        command: of the compiler; by default what `compiler()` finds.
    """
    command = command or str(compiler())
    files = sorted(path for pattern in headers for path in ROOT.glob(pattern))
    common = [version_of(command), *versions, *(path.name for path in files)]
    base = _digest([*common, *(path.read_bytes() for path in files)])
    names = {
        source: _digest([base, *flags, (ROOT / source).read_bytes()]) for source, flags in sources.items()
    }

    def compiled(source: str) -> Path:
        flags = [*sources[source], "-c", source]
        return _from_cache(f"{names[source]}.o", command, flags)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    return _from_cache(_digest([*names.values(), *link]), command, [*link, *map(str, objects)])


def compiled(command: str, source: str, flags: Sequence[str], *, headers: Iterable[str], suffix: str) -> Path:
    """What a compiler makes of one file, whose path is below the root as those of `headers` are."""
    files = sorted(path for pattern in headers for path in ROOT.glob(pattern))
    contents = [path.read_bytes() for path in (*files, ROOT / source)]
    name = _digest([version_of(command), *flags, *(path.name for path in files), *contents])
    return _from_cache(f"{name}.{suffix}", command, [*flags, source])


@cache
def imported(name: str, path: Path) -> ModuleType:
    """The module that the library at `path` has under `name`; its types may be registered only once."""
    spec = spec_from_loader(name, ExtensionFileLoader(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _digest(parts: Iterable[str | bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        whole.update(len(data).to_bytes(8, "little") + data)
    return whole.hexdigest()[:24]


@cache
def version_of(command: str) -> str:
    """What a compiler says of itself."""
    found = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    return found.stdout + sys.version


def _from_cache(name: str, command: str, arguments: Sequence[str]) -> Path:
    """The output of the compiler for these arguments, from the cache if it is there under this name."""
    folder = Path(tempfile.gettempdir()) / f"fastqt-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / name
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # so that processes which need the same file do not all build it
        if path.exists():
            return path
        unfinished = path.with_name(f"{name}.{os.getpid()}")
        whole = [command, *arguments, "-o", str(unfinished)]
        done = subprocess.run(whole, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise RuntimeError(f"{' '.join(whole)}\n{done.stderr}")
        unfinished.rename(path)
    return path
