"""Processes of Python at the root of the repository in which Triton does not interpret."""

import os
import subprocess
import sys

from tests.csrc.building import ROOT


def printed(*words: str, given: str = "") -> str:
    """What one prints, by the words of its command after "python", where standard input is what is given."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *words]
    run = subprocess.run(
        command, cwd=ROOT, env=environment, input=given, stdout=subprocess.PIPE, check=True, text=True
    )
    return run.stdout
