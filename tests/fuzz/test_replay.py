"""The fuzz targets on their seeds and on every input that was a finding once, without the fuzzer."""

import errno
import mmap
import warnings
from pathlib import Path

import pytest

from fuzz import files
from fuzz.limits import memory_limited
from fuzz.refusals import UnhelpfulRefusalError, check_argument_refusal, check_file_refusal
from fuzz.source import Bytes
from fuzz.targets import TARGETS, load

FUZZ = Path(__file__).parents[2] / "fuzz"
REGRESSIONS = sorted(path for path in (FUZZ / "regressions").rglob("*") if path.is_file())


@pytest.fixture(scope="module", autouse=True)
def scratch():
    yield
    files.remove_folder()


def replay(target: str, path: Path) -> bool:
    """Whether the target accepts an input; what the reader warns of is no finding."""
    with memory_limited(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load(target)(path.read_bytes())


@pytest.mark.parametrize("target", TARGETS)
def test_seeds(target):
    """No seed is a finding, and each target both accepts some and refuses some."""
    outcomes = {replay(target, path) for path in sorted((FUZZ / "corpus" / target).iterdir())}
    assert outcomes == {True, False}


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_regressions(path):
    replay(path.parent.name, path)


def test_decisions_are_made_from_the_front_of_the_bytes():
    source = Bytes(bytes([7, 1, 0xFF, 0x01]))
    assert source.integer(0, 4) == 2
    assert source.flag()
    assert source.integer(-5, 300) == 0x1FF % 306 - 5
    assert source.integer(3, 9) == 3  # nothing is left
    assert source.choice("abc") == "a"


@pytest.mark.parametrize("message", ["no name", "x.txt:\nof two lines", "x.txt: \x1b[2J"])
def test_a_refusal_that_does_not_help_is_a_finding(message):
    with pytest.raises(UnhelpfulRefusalError):
        check_file_refusal(ValueError(message), Path("/folder/x.txt"))
    with pytest.raises(UnhelpfulRefusalError):
        check_argument_refusal(ValueError(message), {"scale"})


def test_a_refusal_that_helps_is_none():
    check_file_refusal(ValueError("x.txt: line 3 is not UTF-8"), Path("/folder/x.txt"))
    check_argument_refusal(ValueError("scale: want a number, got None"), {"scale"})


def test_memory_beyond_the_limit_is_refused():
    # A mapping is always new memory, where malloc may have enough left over from other tests of the process.
    with memory_limited(1 << 24):
        mmap.mmap(-1, 1 << 20).close()
        with pytest.raises(OSError, match=rf"^\[Errno {errno.ENOMEM}\]"):
            mmap.mmap(-1, 1 << 28)
    mmap.mmap(-1, 1 << 28).close()
