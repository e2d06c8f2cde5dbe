"""Pairs from the command line: the run is embedded, searched, mined with and evaluated, with its prompts."""

import json
import lzma
import shutil

import numpy as np
import pytest

from fastqt.sentences.cli import main
from tests.shared.command_lines import error_line
from tests.shared.pairs_of_texts import columns_of, write_rows, write_teacher

SIZES = ["--word-dim", "12", "--batch-size", "25", "--learning-rate", "0.02"]
PROMPTS = {"query": "query: ", "document": "a passage: "}


@pytest.fixture
def rows(tmp_path):
    """Paths of 200 pairs, compressed, and of 25 that are held out."""
    path = write_rows(tmp_path / "rows.tsv", 200)
    with lzma.open(f"{path}.xz", "wt") as file, open(path) as text:
        file.write(text.read())
    return f"{path}.xz", write_rows(tmp_path / "held.tsv", 25, seed=1)


@pytest.fixture
def run(rows, tmp_path, capsys):
    """A trained run with prompts, which knows their words."""
    words = ["train", rows[0], "--model", "pairs", "--valid", rows[1], *SIZES, "--epochs", "4"]
    prompts = [f"--{side}-prompt={prompt}" for side, prompt in PROMPTS.items()]
    assert main([*words, *prompts, "--out", str(tmp_path / "run")]) == 0
    captured = capsys.readouterr()
    assert "held out: loss" in captured.err
    assert "accuracy" in captured.out
    return tmp_path / "run"


@pytest.fixture
def plain(run, tmp_path):
    """The same model, which puts nothing in front of texts."""
    shutil.copytree(run, tmp_path / "plain")
    path = tmp_path / "plain" / "config.json"
    config = json.loads(path.read_text()) | {"query_prompt": "", "document_prompt": ""}
    path.write_text(json.dumps(config))
    return tmp_path / "plain"


def test_options_train(rows, tmp_path):
    paths, _ = write_teacher(tmp_path, 200, 2)
    words = ["train", rows[0], "--model", "pairs", *SIZES, "--out", str(tmp_path / "run"), "--steps", "3"]
    words += ["--directions", "query_to_doc,doc_to_query", "--matryoshka-dims", "4, 8,12"]
    words += ["--matryoshka-weights", "1,1,0.5", "--false-negative-margin", "0.1", "--learn-scale"]
    words += ["--teacher", paths[0], "--teacher", paths[1], "--teacher-weight", "0.5"]
    words += ["--precision", "bfloat16", "--schedule", "linear", "--warmup", "1", "--chunk", "10"]
    pairs = zip(*columns_of(rows[1]), strict=True)
    lines = [f"g\t{n % 6}\t{query}\t{document}" for n, (query, document) in enumerate(pairs)]
    (tmp_path / "dev.tsv").write_text("\n".join(lines))
    words += ["--dev", str(tmp_path / "dev.tsv"), "--encoder", "gru", "--hidden-size", "12"]
    assert main(words) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["teacher"] == [*paths]
    assert config["matryoshka_dims"] == [4, 8, 12]
    assert config["directions"] == ["query_to_doc", "doc_to_query"]
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    figures = {"accuracy", "mrr", "chance", "positive_cosine", "scale", "learning_rate", "dev_spearman"}
    assert figures < line.keys()


def test_vectors_of_each_side(run, plain, rows, tmp_path):
    for side, texts in zip(PROMPTS, columns_of(rows[1]), strict=True):
        (tmp_path / "texts.txt").write_text("\n".join(texts))
        (tmp_path / "prompted.txt").write_text("\n".join(PROMPTS[side] + text for text in texts))
        for model, name, words in ((run, "texts", ["--side", side]), (plain, "prompted", [])):
            words = ["embed", str(model), str(tmp_path / f"{name}.txt"), *words]
            assert main([*words, "--out", str(tmp_path / f"{name}.npy")]) == 0
        ours, wanted = (np.load(tmp_path / f"{name}.npy") for name in ("texts", "prompted"))
        assert np.array_equal(ours, wanted)


def test_a_search_and_an_index_find_the_documents_of_queries(run, plain, rows, tmp_path, capsys):
    queries, documents = columns_of(rows[1])
    corpus, index = tmp_path / "documents.txt", tmp_path / "documents.index"
    corpus.write_text("\n".join(documents))
    (tmp_path / "prompted.txt").write_text("\n".join(PROMPTS["document"] + text for text in documents))
    assert main(["index", str(run), str(corpus), "--out", str(index)]) == 0
    capsys.readouterr()

    answers = []
    for model, prompt, where in (
        (run, "", [corpus]),
        (run, "", ["--index", index]),
        (plain, PROMPTS["query"], [tmp_path / "prompted.txt"]),
    ):
        asked = [word for query in queries for word in ("--query", prompt + query)]
        assert main(["neighbors", str(model), *map(str, where), *asked, "-k", "1"]) == 0
        answers.append([line.split("  ")[1:3] for line in capsys.readouterr().out.splitlines()[1::2]])
    assert answers[0] == answers[1]
    assert [[cosine, PROMPTS["document"] + text] for cosine, text in answers[0]] == answers[2]
    assert np.mean([text == own for (_, text), own in zip(answers[0], documents, strict=True)]) > 0.8


def test_negatives_are_mined_with_the_prompts(run, plain, rows, tmp_path):
    pairs = list(zip(*columns_of(rows[1]), strict=True))
    prompted = [(PROMPTS["query"] + query, PROMPTS["document"] + text) for query, text in pairs]
    (tmp_path / "prompted.tsv").write_text("".join("\t".join(row) + "\n" for row in prompted))
    for model, source, out in ((run, rows[1], "ours.tsv"), (plain, tmp_path / "prompted.tsv", "wanted.tsv")):
        words = ["mine", str(model), str(source), "--format", "tuples", "--negatives", "2"]
        assert main([*words, "--out", str(tmp_path / out)]) == 0
    ours, wanted = (columns_of(tmp_path / out) for out in ("ours.tsv", "wanted.tsv"))
    assert len(ours) == 4
    assert [[PROMPTS["document"] + text for text in column] for column in ours[1:]] == wanted[1:]
    words = ["train", str(tmp_path / "ours.tsv"), "--model", "pairs", "--out", str(tmp_path / "next"), *SIZES]
    assert main(words) == 0


def test_an_evaluation_has_the_prompts(run, plain, rows, tmp_path):
    """Documents of a retrieval set have theirs; all texts of other tasks are queries."""
    pytest.importorskip("sklearn", reason="the extra eval is not installed")
    queries, documents = columns_of(rows[1])[0], columns_of(tmp_path / "rows.tsv")[1]
    for name, query, document in (("data", "", ""), ("prompted", *PROMPTS.values())):
        folder = tmp_path / name / "asked"
        (folder / "qrels").mkdir(parents=True)
        for file, prompt, texts in (("queries", query, queries), ("corpus", document, documents)):
            names = (f"{file}{n}" for n in range(len(texts)))
            each = zip(names, texts, strict=True)
            lines = [json.dumps({"_id": name, "text": prompt + text}) for name, text in each]
            (folder / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
        # Eight documents are of the topic of each query.
        judged = (f"queries{n % 25}\tcorpus{n}\t1\n" for n in range(len(documents)))
        (folder / "qrels" / "test.tsv").write_text("".join(judged))
        (tmp_path / name / "STSB").mkdir()
        for part in ("dev", "test"):
            lines = [f"g\t{n % 6}\t{query}{queries[n]}\t{query}{documents[n - n % 6]}" for n in range(25)]
            (tmp_path / name / "STSB" / f"{part}.tsv").write_text("\n".join(lines) + "\n")

    results = []
    for model, data in ((run, "data"), (plain, "prompted")):
        out = tmp_path / f"{data}.json"
        words = ["--data", str(tmp_path / data), "--tasks", "asked,STSB", "--json", str(out)]
        assert main(["evaluate", str(model), *words]) == 0
        results.append(json.loads(out.read_text())["tasks"])
    assert results[0] == results[1]
    assert results[0]["asked"]["MAP@1000"] > 0.8


def test_errors_take_one_line(rows, tmp_path, capsys):
    out = ["--out", tmp_path / "run"]
    train = ["train", rows[0], "--model", "pairs", *out]
    for words, message in (
        ([*train, "--matryoshka-dims", "4,x"], "argument --matryoshka-dims: want a whole number, got 'x'"),
        ([*train, "--directions", "query_to_doc,up"], "directions: want one of query_to_doc, "),
        ([*train, "--teacher", ""], "argument --teacher: want a path, got an empty text"),
        ([*train, "--matryoshka-dims", "4,400"], "matryoshka_dims: want at most D=300"),
        (["train", rows[0], *out, "--teacher", "q.npy"], "teacher: want None with model quickthoughts"),
        (["embed", "m", "c", "--out", "x.npy", "--side", "both"], "argument --side: invalid choice: 'both'"),
    ):
        assert message in error_line(capsys, *words), words
