"""The site is built without optional libraries: all names of the reference can be imported."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

IMPORT = """
import re, sys
from importlib import import_module
from pathlib import Path

sys.path[:0] = ["docs/_extensions"]
import absent
from api import summary

sys.meta_path.insert(0, absent.Absent(absent.LIBRARIES))  # also where they are installed
names = 0
for page in sorted(Path("docs/api").glob("*.rst")):
    blocks = re.findall(r"^\\.\\. api:: (\\S+)\\n((?:\\n|   \\S+\\n)+)", page.read_text(), re.MULTILINE)
    for package, listed in blocks:
        for name in listed.split():
            assert summary(getattr(import_module(package), name))
            names += 1
used = {name.partition(".")[0] for name, module in sys.modules.items() if isinstance(module, absent.Module)}
assert used == set(absent.LIBRARIES), used
print(names)
"""


@pytest.mark.slow
def test_the_names_of_the_reference_need_no_optional_library():
    pytest.importorskip("sphinx", reason="Sphinx is not installed")
    command = [sys.executable, "-c", IMPORT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100
