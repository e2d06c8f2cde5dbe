"""What the runner makes of exceptions: a file for each place, the smallest input, and libFuzzer's numbers."""

import re

import pytest

from tests.fuzz.findings import Findings, signature
from tests.fuzz.minimise import minimised


def run(data: bytes) -> bool:
    if b"bad" in data:
        raise KeyError("bad")
    if len(data) > 20:
        raise KeyError("long")
    return True


def raised(data: bytes) -> Exception:
    with pytest.raises(KeyError) as caught:
        run(data)
    return caught.value


def test_the_smallest_input_has_the_same_finding():
    assert minimised(run, b"0123456789bad0123456789") == b"bad"
    assert minimised(run, b"x" * 50) == bytes(21)
    assert minimised(run, b"fine") == b"fine"


def test_a_place_is_stored_once(tmp_path):
    findings = Findings(tmp_path / "new")
    for data in (b"bad 1", b"bad 2", b"x" * 30):
        findings.add(data, raised(data))
    kept = {path.read_bytes() for path in (tmp_path / "new").iterdir() if not path.suffix}
    assert kept == {b"bad 1", b"x" * 30}
    assert sorted(findings.counts.values()) == [1, 2]
    text = "".join(path.read_text() for path in (tmp_path / "new").glob("*.txt"))
    assert text.count("Traceback") == 2


def test_a_signature_names_the_cause():
    try:
        try:
            run(b"bad")
        except KeyError as error:
            raise ValueError("more") from error
    except ValueError as error:
        found = signature(error)
    here = r"tests/fuzz/test_findings\.py:\d+"
    assert re.fullmatch(f"ValueError at {here} from KeyError at {here}", found)


def test_the_last_line_of_libfuzzer_is_read():
    from tests.fuzz.campaign import STATUS

    line = "#289424\tDONE   cov: 39 ft: 86 corp: 25/973b lim: 2512 exec/s: 18089 rss: 262Mb\n"
    assert STATUS.match(line).groups() == ("289424", "39", "86", "25")
    assert STATUS.match("Done 289424 runs in 16 second(s)\n") is None
