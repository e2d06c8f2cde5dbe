"""Rows of a query, its positive and negatives are the same from every kind of file."""

from __future__ import annotations

import csv
import gzip
import json
import lzma

import pytest

from fastqt.errors import InputError
from fastqt.sentences.cli import main
from fastqt.sentences.text import read_triplets

ROWS = [
    ["who wrote it?", "she did", "the letter, written"],
    ['a "quoted" word', "two\nlines", "tab\tand , comma"],
    ["ünï", "  padded ", "x"],
]
WANTED = [[text.replace("\n", " ").strip() for text in row] for row in ROWS]
NAMES = ["anchor", "positive", "negative_1"]


def read(path):
    return [row for part in read_triplets([str(path)]) for row in part]


def records(names=NAMES):
    return [{"id": 7, **dict(zip(names, row, strict=True)), "label": "good"} for row in ROWS]


def write(path, names=NAMES):
    """A file of the kind that its name says, with columns that are not of the row."""
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    if ".csv" in path.suffixes:
        with opener(path, "wt", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, ["label", *reversed(names), "id"])
            table.writeheader()
            table.writerows(records(names))
    elif ".jsonl" in path.suffixes:
        with opener(path, "wt", encoding="utf-8") as file:
            file.write("\n".join(json.dumps(each) for each in records(names)) + "\n\n")
    else:
        pyarrow = pytest.importorskip("pyarrow", reason="the extra datasets is not installed")
        table = pyarrow.Table.from_pylist(records(names))
        if path.suffix == ".parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, path)
        else:
            with pyarrow.ipc.new_file(str(path), table.schema) as file:
                file.write_table(table)


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.jsonl", "a.jsonl.xz", "a.parquet", "a.arrow"])
@pytest.mark.parametrize(
    "names", [NAMES, ["query", "document", "neg"], ["question", "answer", "hard_negatives"]]
)
def test_columns_go_by_their_names(name, names, tmp_path):
    write(tmp_path / name, names)
    assert read(tmp_path / name) == WANTED


def test_negatives_may_be_a_list(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"query": "q", "positive": "p", "neg": ["m", "n"]}\n')
    assert read(path) == [["q", "p", "m", "n"]]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.csv",
            "query,text\na,b\n",
            r"want a column of the positive, called positive or .*, got query, text",
        ),
        ("a.csv", "", "want a column of the query, called query or .*, got no columns"),
        ("a.csv", "query,positive\na\n", "line 2: want 2 columns as in line 1, got 1"),
        ("a.csv", 'query,positive\n"a,b\n', "line 2: unexpected end of data"),
        ("a.csv", "query,positive\na, \n", "line 2: want text in each column, got none in column 2"),
        ("a.jsonl", '["a", "b"]\n', r"line 1: want an object of JSON, got"),
        ("a.jsonl", "{\n", r"line 1: want an object of JSON, got '{'"),
        (
            "a.jsonl",
            '{"query": "a", "positive": ["b"]}\n',
            r"line 1: want texts of query, positive, got \['b'\]",
        ),
        (
            "a.jsonl",
            '{"query": "a", "positive": "b", "negative": "c"}\n{"query": "a", "positive": "b"}\n',
            "line 2: want texts of query, positive, negative, got None",
        ),
        (
            "a.jsonl",
            '{"query": "a", "positive": "b", "neg": ["c"]}\n{"query": "a", "positive": "b", "neg": []}\n',
            r"line 2: want 3 columns as in line 1 of .*, got 2",
        ),
    ],
)
def test_what_is_no_row_is_refused_by_its_line(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        read(tmp_path / name)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
@pytest.mark.parametrize("model", ["pairs", "simcse"])
def test_a_training_has_the_rows_of_every_kind_of_file(name, model, tmp_path, monkeypatch, capsys):
    if (name, model) == ("a.parquet", "simcse"):
        pytest.skip("a table is sentences for simcse")
    monkeypatch.chdir(tmp_path)
    write(tmp_path / name)
    lines = ["\t".join(text.replace("\t", " ") for text in row) for row in WANTED]
    (tmp_path / "a.tsv").write_text("".join(f"{line}\n" for line in lines))
    small = ["--batch-size", "3", "--word-dim", "8", "--steps", "2"]
    for corpus in ("a.tsv", name):
        assert main(["train", corpus, "--model", model, *small, "--out", f"run-{corpus}"]) == 0
    weights = [(tmp_path / f"run-{corpus}" / "model.safetensors").read_bytes() for corpus in ("a.tsv", name)]
    assert weights[0] == weights[1]
    assert main(["train", name, "--model", "pairs", *small, "--column", "anchor", "--out", "x"]) == 2
    assert "column: want" in capsys.readouterr().err
