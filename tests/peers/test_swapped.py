"""What runs other libraries' tests with names replaced says how each of them ends."""

import sys
from pathlib import Path

import pytest

# A script beside it has the name of a library, which processes that start later must not find in its place.
sys.path.insert(0, str(Path(__file__).parent))
import swapped

sys.path.pop(0)

TESTS = """
import pytest
from library import double, other

def test_doubles(): assert double(2) == 4
def test_of_zero(): assert double(0) == 0
def test_other(): assert other() == 1
def test_is_skipped(): pytest.skip("no device")
def test_fails_as_it_is(): assert double(1) == 3
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "library.py").write_text(
        "def double(x): return 2 * x\ndef other(): return 1\nraised = None\n"
    )
    (tmp_path / "test_library.py").write_text(TESTS)
    (tmp_path / "ours.py").write_text(
        "def doubled(x):\n    if not x: raise ValueError('x: want more')\n    return x + x\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_tests_are_run_as_they_are_and_with_a_name_replaced(checkout):
    before = swapped.run(checkout, ["test_library.py"], sources="src")
    assert {test.split("::")[1]: how["outcome"] for test, how in before.items()} == {
        "test_doubles": "passed",
        "test_of_zero": "passed",
        "test_other": "passed",
        "test_is_skipped": "skipped",
        "test_fails_as_it_is": "failed",
    }
    swaps = {"library:double": "ours:doubled"}
    after = swapped.run(checkout, ["test_library.py"], sources="src", swaps=swaps, reached=["ours:doubled"])
    found = swapped.compared(before, after, {})
    (broken,) = found["broken"].items()
    assert broken[0].endswith("test_of_zero")
    assert "x: want more" in broken[1]
    assert found["before"] == {"passed": 3, "skipped": 1, "failed": 1}
    assert (found["passed before and after"], found["reached"]) == (2, 1)
    excused = swapped.compared(before, after, {broken[0]: "of zero"})
    assert (excused["broken"], excused["not expressible"]) == ({}, {broken[0]: "of zero"})


def test_pytest_that_cannot_start_is_an_error(checkout):
    with pytest.raises(RuntimeError, match="pytest ended with"):
        swapped.run(checkout, ["test_library.py"], sources="src", swaps={"library:double": "nobody:double"})
