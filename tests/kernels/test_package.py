"""The folder of the kernels is imported as fastqt.kernels, and is no obstacle to others from the checkout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_transformers_passes_over_the_folder():
    """It looks for a package named kernels, and from the root of the checkout it finds this folder."""
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    # The models are imported when they are first asked for, and with them the package that is looked for.
    code = "import transformers; transformers.BertModel; import fastqt.kernels.scores"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code]  # with -c the working directory is the first place to look
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_only_one_place_holds_the_kernels():
    """A folder fastqt/kernels in the checkout, left over from a build, would hide the one at the root."""
    import fastqt.kernels

    assert list(fastqt.kernels.__path__) == [str(ROOT / "kernels")]
