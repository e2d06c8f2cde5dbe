"""fastqt mine: what it writes, which fastqt train reads, and what it refuses."""

import pytest

from fastqt.sentences.cli import main
from tests.shared.command_lines import SMALL, error_line


@pytest.fixture
def pairs(planted, tmp_path):
    """Pairs of neighbouring lines of the planted text."""
    with open(planted[0]) as file:
        lines = list(dict.fromkeys(line.strip() for line in file if line.strip()))[:80]
    path = tmp_path / "pairs.tsv"
    rows = zip(lines[::2], lines[1::2], strict=True)
    path.write_text("".join(f"{query}\t{positive}\n" for query, positive in rows))
    return path


def test_what_it_writes_is_trained_on(model, pairs, planted, tmp_path, capsys):
    out = tmp_path / "mined.tsv"
    words = ["mine", model, str(pairs), "--out", str(out), "--corpus", planted[1], "--format", "tuples"]
    assert main([*words, "--negatives", "2", "--range-min", "1", "--sampling", "random", "--seed", "4"]) == 0
    printed = capsys.readouterr().out
    rows = [line.split("\t") for line in out.read_text().splitlines()]
    assert printed.startswith(f"{out}: {len(rows)} rows of 40 pairs, with negatives among ")
    assert len(rows) == 40
    assert all(len(set(row)) == 4 for row in rows)
    assert ["\t".join(row[:2]) for row in rows] == pairs.read_text().splitlines()
    assert main(["train", str(out), "--model", "simcse", "--out", str(tmp_path / "run"), *SMALL[:6]]) == 0


def test_errors(model, pairs, tmp_path, capsys):
    (tmp_path / "three.tsv").write_text("a\tb\tc\n")
    (tmp_path / "none.tsv").write_text("\n")
    (tmp_path / "tab.txt").write_text("a\tb\n")
    base = ["mine", model, pairs, "--out", tmp_path / "out.tsv"]
    for words, message in (
        ([*base, "--negatives", "0"], "negatives: want at least 1, got 0"),
        ([*base, "--range-max", "2"], "range_max: want at least range_min + negatives = 3, got 2"),
        ([*base, "--max-score", "-2"], "no negative found: want weaker margins or scores"),
        ([*base, "--corpus", tmp_path / "tab.txt"], "corpus: want sentences without a tab"),
        ([*base, "--corpus", "absent.txt"], "no such file: absent.txt"),
        (["mine", model, tmp_path / "three.tsv", "--out", "o.tsv"], "line 1: want 2 columns, got 3"),
        (["mine", model, tmp_path / "none.tsv", "--out", "o.tsv"], "pairs: want a query and its positive"),
        (["mine", model, pairs, "--out", "o.txt"], "o.txt: want a name that ends in .tsv, got .txt"),
        (["mine", tmp_path, pairs, "--out", tmp_path / "out.tsv"], "config.json is missing"),
        (["mine", model, pairs], "the following arguments are required: --out"),
    ):
        capsys.readouterr()
        assert message in error_line(capsys, *words), words
    assert not (tmp_path / "out.tsv").exists()
