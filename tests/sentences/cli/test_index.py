"""The commands that make an index and search it, compared with the search of the corpus itself."""

import sys
from pathlib import Path

import pytest

from fastqt.sentences.cli import main
from tests.shared.command_lines import SMALL, error_line

pytest.importorskip("faiss", reason="the extra faiss is not installed")


@pytest.mark.parametrize("kind", ["flat", "ivf", "hnsw"])
def test_neighbors_are_those_of_a_search_without_index(model, planted, tmp_path, capsys, kind):
    out, queries = str(tmp_path / "x.index"), ["place3 topic4word1", "place1 topic2word0"]
    words = [word for query in queries for word in ("--query", query)]
    assert main(["index", model, *planted, "--out", out, "--kind", kind, "--min-recall", "1"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{out}: 600 sentences x 16, {kind}")
    assert ("recall@10 1.0000 of 600 sentences" in said) == (kind != "flat")
    assert main(["neighbors", model, *planted, *words, "-k", "3"]) == 0
    wanted = capsys.readouterr().out
    for corpus in (planted, ()):
        assert main(["neighbors", model, *corpus, "--index", out, *words, "-k", "3"]) == 0
        found = capsys.readouterr().out
        # Sentences of equal cosines may be found in another order.
        assert [line[:8] for line in found.splitlines()] == [line[:8] for line in wanted.splitlines()]
        if kind == "flat":
            assert found == wanted
    for path in planted:
        Path(path).unlink()
    assert main(["neighbors", model, "--index", out, *words, "-k", "3"]) == 0
    assert capsys.readouterr().out == found


def test_errors_of_index_and_of_its_search(model, planted, tmp_path, capsys, monkeypatch):
    out, other = str(tmp_path / "x.index"), str(tmp_path / "other")
    assert main(["index", model, planted[0], "--out", out]) == 0
    assert main(["train", planted[0], "--out", other, *SMALL, "--seed", "1"]) == 0
    (tmp_path / "garbage.index").write_bytes(b"x" * 999)
    capsys.readouterr()
    for arguments, message in (
        (["neighbors", model, "--query", "a"], "no CORPUS given, and no --index"),
        (["neighbors", other, "--index", out, "--query", "a"], f"{out} was made by another model"),
        (
            ["neighbors", model, planted[1], "--index", out, "--query", "a"],
            f"{out} was made from another corpus than {planted[1]}",
        ),
        (
            ["neighbors", model, "--index", tmp_path / "garbage.index", "--query", "a"],
            f"{tmp_path}/garbage.index: want a file that fastqt index wrote",
        ),
        (["neighbors", model, "--index", "none.index", "--query", "a"], "no such file: none.index"),
        (["neighbors", model, "--index", out, "--query", " "], "query: want a sentence, got blank text"),
        (["index", model, "none.txt", "--out", out], "no such file: none.txt"),
        (["index", model, planted[0], "--out", "x.faiss"], "x.faiss: want a name that ends in .index"),
        (["index", model, planted[0], "--out", out, "--min-recall", "2"], "min_recall: want more than 0"),
        (["index", model, planted[0], "--out", out, "--kind", "tree"], "argument --kind: invalid choice"),
        (["index", model, planted[0]], "the following arguments are required: --out"),
    ):
        assert message in error_line(capsys, *arguments)
    monkeypatch.setitem(sys.modules, "faiss", None)
    said = error_line(capsys, "index", model, planted[0], "--out", out, "--kind", "ivf")
    assert said.endswith("want faiss-cpu >= 1.10, got none: pip install 'fastqt[faiss]'")
    assert (
        main(["neighbors", model, "--index", out, "--query", "place1"]) == 0
    )  # a flat index does not need it
