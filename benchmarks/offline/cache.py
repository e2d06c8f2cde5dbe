"""Keeps what the compiler said of a kernel until the kernels' sources or the compiler change.

All specialisations that tests/benchmarks/offline/test_compile.py looks at take minutes to compile. What the
compiler said of them is stored beside the results of benchmarks, and holds as long as the sources and the
compiler are those that it was said of. What was compiled since is kept in ~/.cache/fastqt/compiled (or under
XDG_CACHE_HOME), a folder that may be deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

KEPT = 8  # versions of the sources: who edits a kernel makes a new one with every run


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastqt" / "compiled"


def python_files(*places: Path) -> list[Path]:
    """The Python files among `places` and, at any depth, in the folders among them."""
    by_place = (sorted(place.rglob("*.py")) if place.is_dir() else [place] for place in places)
    return [path for paths in by_place for path in paths]


class CompileCache:
    """Results of compilations by a digest of all that they depend on.

    Two processes may use one folder at once: a result is written to a file of another name and then renamed,
    so that nobody reads half of it, and both would write the same.

    Args:
        sources: the files that any kernel is made of. All of them count for every kernel, because kernels
            call functions of other files.
        versions: whatever else a result depends on: the compiler, its options, Python.
        folder: where results are kept.
        stored: a file that `store` wrote, whose results are taken if they are of the same digest.

    Attributes:
        asked: the results that were asked for.
    """

    def __init__(
        self,
        sources: Iterable[Path],
        versions: Iterable[str],
        folder: Path | None = None,
        stored: Path | None = None,
    ) -> None:
        digest = hashlib.sha256(repr(list(versions)).encode())
        sources = list(sources)
        top = os.path.commonpath(sources)
        for path in sources:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{os.path.relpath(path, top)} {content}\n".encode())
        root = default_folder() if folder is None else folder
        self.digest = digest.hexdigest()
        self.asked: dict[str, dict[str, Any]] = {}
        self._stored = {} if stored is None else json.loads(stored.read_text()).get(self.digest, {})
        self.folder = root / self.digest
        if not self.folder.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            _remove_oldest(root)

    def get(self, key: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `compute` returned for `key`, or returns now. What it raises is not kept."""
        name = hashlib.sha256(key.encode()).hexdigest()
        self.asked[name] = self._stored.get(name) or self._kept(name, key, compute)
        return self.asked[name]

    def _kept(self, name: str, key: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        path = self.folder / f"{name}.json"
        try:
            stored = json.loads(path.read_text())
        except FileNotFoundError:
            stored = None
        if stored is not None and stored["key"] == key:
            return stored["result"]
        result = compute()
        self.folder.mkdir(parents=True, exist_ok=True)  # another process may have removed it as too old
        with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False) as file:
            json.dump({"key": key, "result": result}, file)
        os.replace(file.name, path)
        return result


def store(caches: Iterable[CompileCache], path: Path) -> None:
    """Writes what was asked of caches to a file, by their digests."""
    results = {cache.digest: dict(sorted(cache.asked.items())) for cache in caches}
    path.write_text(json.dumps(results, indent=1) + "\n")


def _remove_oldest(root: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # where another process removes the same folders
        by_age = sorted(root.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True)
        for folder in by_age[KEPT:]:
            shutil.rmtree(folder, ignore_errors=True)
