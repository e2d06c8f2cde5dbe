"""The fuzz targets on their seeds and on every input that was a finding once, without the fuzzer."""

import warnings
from pathlib import Path

import pytest

from tests.fuzz import files
from tests.fuzz import inputs as inputs_of_targets
from tests.fuzz.inputs import inputs, keep, unpack, write
from tests.fuzz.refusals import UnhelpfulRefusalError, check_argument_refusal, check_file_refusal
from tests.fuzz.targets import TARGETS, load, memory_limited

REGRESSIONS = [(target, name) for target in TARGETS for name in inputs(target, "regressions")]


@pytest.fixture(scope="module", autouse=True)
def scratch():
    yield
    files.remove_folder()


def replay(target: str, data: bytes) -> bool:
    """Whether the target accepts an input; what the reader warns of is no finding."""
    with memory_limited(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load(target)(data)


@pytest.mark.parametrize("target", TARGETS)
def test_seeds(target):
    """No seed is a finding, and each target both accepts some and refuses some."""
    outcomes = {replay(target, data) for data in inputs(target, "seeds").values()}
    assert outcomes == {True, False}


@pytest.mark.parametrize(("target", "name"), REGRESSIONS)
def test_regressions(target, name):
    replay(target, inputs(target, name)[name])


def test_what_is_kept_of_a_target_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs_of_targets, "FOLDER", tmp_path / "inputs")
    write("corpus", {"seeds/00": b"\0one"})
    keep("corpus", b"\1bad")
    (regression,) = inputs("corpus", "regressions").items()
    assert inputs("corpus") == {"seeds/00": b"\0one", regression[0]: b"\1bad"}
    unpacked = unpack("corpus", tmp_path / "kept")
    assert {path.read_bytes() for path in unpacked.iterdir()} == {b"\0one", b"\1bad"}
    assert inputs("absent") == {}


@pytest.mark.parametrize("message", ["no name", "x.txt:\nof two lines", "x.txt: \x1b[2J"])
def test_a_refusal_that_does_not_help_is_a_finding(message):
    with pytest.raises(UnhelpfulRefusalError):
        check_file_refusal(ValueError(message), Path("/folder/x.txt"))
    with pytest.raises(UnhelpfulRefusalError):
        check_argument_refusal(ValueError(message), {"scale"})


def test_a_refusal_that_helps_is_none():
    check_file_refusal(ValueError("x.txt: line 3 is not UTF-8"), Path("/folder/x.txt"))
    check_argument_refusal(ValueError("scale: want a number, got None"), {"scale"})
