"""Says of each wheel that is named which code for GPUs it holds: `make wheel` ends with it."""

import sys
import zipfile
from pathlib import Path

from fastqt.engines.report import architectures


def code_of(wheel: Path) -> str:
    """In words, the architectures for which the extension in a wheel is compiled."""
    with zipfile.ZipFile(wheel) as files:
        names = [name for name in files.namelist() if Path(name).name.startswith("_C.")]
        if not names:
            return "without the extension: its losses are computed in torch's own operations"
        found = [each for name in names for each in architectures(files.read(name))]
    if not found:
        return "without CUDA code: the build found no nvcc, or was to use none (FASTQT_CUDA_HOME)"
    return f"with CUDA code for {', '.join(found)}"


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(f"{argument}: {code_of(Path(argument))}")
