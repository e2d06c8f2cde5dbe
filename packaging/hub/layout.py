"""Writes the losses as a kernel repository of the Hugging Face hub: what its package `kernels` loads.

    python packaging/hub/layout.py build/hub

writes build/hub with build.toml, README.md, and build/torch-cpu, build/torch-cuda and so on, a folder for
each backend of build.toml. Each holds the package without its modules, its wing of sentences and its
integrations, and without the compiled extension: on a GPU the losses are Triton's kernels, and elsewhere
torch's operations.

`kernels` imports a folder under a name of its own, beside a fastqt that may be installed too. So imports
become relative in the copy, and torch's operators get the name of the copy.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

from fastqt._version import __version__

ROOT = Path(__file__).parents[2]
HUB = Path(__file__).parent
LEFT_OUT = ("__main__.py", "integrations", "kernels.py", "nn", "optim", "sentences")  # of fastqt/
IMPORT = re.compile(r"^(\s*)from fastqt(\.[\w.]+)? import ", re.MULTILINE)
LOADS_BY_NAME = re.compile(
    r"^\s*import fastqt\b|(import_module|find_spec|files)\(\s*f?\"fastqt", re.MULTILINE
)
# The folder with the kernel's name: older versions of `kernels` import it in place of the package above it.
OLDER = '''"""The package above this folder, for older versions of `kernels`, which import this folder."""

import importlib.util
import sys
from pathlib import Path

if "{identifier}" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("{identifier}", Path(__file__).parents[1] / "__init__.py")
    sys.modules["{identifier}"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["{identifier}"])

_package = sys.modules["{identifier}"]
__all__ = _package.__all__


def __getattr__(name):
    return getattr(_package, name)
'''
FIELD = re.compile(r"^(\w+) = (.+)$", re.MULTILINE)


def main(arguments: list[str] | None = None) -> int:
    """Writes the repository to the folder that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python packaging/hub/layout.py", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("out", type=Path, metavar="DIR", help="folder to write, which must not exist")
    out = parser.parse_args(arguments).out
    if out.exists():
        parser.error(f"{out}: want a folder that does not exist")
    for folder in write(out):
        print(folder)
    return 0


def write(out: Path) -> list[Path]:
    """Writes the repository, whole or not at all, and returns the folders of its backends."""
    fields = dict(FIELD.findall((HUB / "build.toml").read_text(encoding="utf-8")))
    general = {name: json.loads(value) for name, value in fields.items()}
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)

    for backend in general["backends"]:
        write_backend(partial / "build" / f"torch-{backend}", backend, general)
    for name in ("build.toml", "README.md"):
        shutil.copyfile(HUB / name, partial / name)
    shutil.copyfile(ROOT / "LICENSE", partial / "LICENSE")
    partial.rename(out)
    return [out / "build" / f"torch-{backend}" for backend in general["backends"]]


def write_backend(folder: Path, backend: str, general: dict[str, object]) -> None:
    """Writes the folder of one backend."""
    identifier = f"_fastqt_{backend}_{re.sub(r'[^0-9a-z]', '_', __version__)}"
    for path in sorted((ROOT / "fastqt").rglob("*.py")):
        name = path.relative_to(ROOT / "fastqt")
        if name.parts[0] not in LEFT_OUT:
            copy(path, folder, name, identifier)

    # Here the kernels are an ordinary package: only in a checkout is a folder of this name in the way.
    for path in sorted((ROOT / "kernels").rglob("*")):
        name = Path("kernels") / path.relative_to(ROOT / "kernels")
        if path.suffix == ".py":
            copy(path, folder, name, identifier)
        elif path.suffix == ".json":
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)
    (folder / "kernels" / "__init__.py").touch()
    (folder / str(general["name"])).mkdir()
    (folder / str(general["name"]) / "__init__.py").write_text(
        OLDER.replace("{identifier}", identifier), encoding="utf-8"
    )

    files = sorted(path for path in folder.rglob("*") if path.is_file())
    digests = {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()) for path in files}
    metadata = {
        "id": identifier,
        "name": general["name"],
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {
            "algorithm": "sha256",
            "files": {name: base64.b64encode(of.digest()).decode() for name, of in digests.items()},
        },
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")


def copy(path: Path, folder: Path, name: Path, identifier: str) -> None:
    """Copies a module to `folder / name`, as one of a package of another name."""
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    text = relative(path.read_text(encoding="utf-8"), depth=len(name.parts))
    if name == Path("__init__.py"):  # of the package, whose names are those that the copy has
        for of_left_out in ("nn", "optim", "load", "sentences.inference.encoder"):
            text = text.replace(f'    "{of_left_out}",\n', "")
    text = text.replace("torch.ops.fastqt", f"torch.ops.{identifier}").replace("fastqt::", f"{identifier}::")
    if (absolute := LOADS_BY_NAME.search(text)) is not None:
        raise SystemExit(f"{path}: want imports that can become relative, got {absolute[0].strip()!r}")
    target.write_text(text, encoding="utf-8")


def relative(text: str, depth: int) -> str:
    """The source of a module `depth` folders deep, with relative imports of the package's modules."""
    dots = "." * depth
    return IMPORT.sub(lambda found: f"{found[1]}from {dots}{(found[2] or '')[1:]} import ", text)


if __name__ == "__main__":
    sys.exit(main())
