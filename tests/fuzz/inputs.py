"""The inputs that are kept of each target, in one archive: its seeds, and what was a finding once."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent / "inputs"


def archive(target: str) -> Path:
    return FOLDER / f"{target}.zip"


def inputs(target: str, kind: str = "") -> dict[str, bytes]:
    """A target's inputs by name: its "seeds", its "regressions", or both; none if it has no file."""
    path = archive(target)
    if not path.exists():
        return {}
    with zipfile.ZipFile(path) as kept:
        return {name: kept.read(name) for name in kept.namelist() if name.startswith(kind)}


def keep(target: str, data: bytes) -> None:
    """Adds what was a finding to the regressions of a target."""
    name = f"regressions/{hashlib.sha256(data).hexdigest()[:12]}"
    write(target, {**inputs(target), name: data})


def write(target: str, files: Mapping[str, bytes]) -> None:
    """Replaces the archive of a target. The same inputs give the same bytes."""
    FOLDER.mkdir(exist_ok=True)
    with zipfile.ZipFile(archive(target), "w") as kept:
        for name in sorted(files):
            kept.writestr(zipfile.ZipInfo(name), files[name], zipfile.ZIP_DEFLATED)


def unpack(target: str, folder: Path) -> Path:
    """Writes the inputs of a target to a folder, for libFuzzer, which reads no archives."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in inputs(target).items():
        (folder / name.replace("/", "-")).write_bytes(data)
    return folder
