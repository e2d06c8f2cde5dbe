"""fastqt analogy, index, mine and retrieve, on a planted text, and with the prompts of pairs."""

import json
import lzma
import shutil
from pathlib import Path

import numpy as np
import pytest

from fastqt.sentences.cli import main
from tests.shared.command_lines import SMALL
from tests.shared.pairs_of_texts import columns_of, write_rows, write_teacher


def ask(model, pool, a, b, c, *options):
    return main(["analogy", model, pool, "--a", a, "--b", b, "--c", c, *options])


def test_answers_are_printed_like_neighbours(model, planted, capsys):
    lines = Path(planted[0]).read_text().splitlines()
    a, c = lines[0], lines[8]
    assert ask(model, planted[0], a, a, c, "-k", "3") == 0
    question, first, *others = capsys.readouterr().out.splitlines()
    assert question == f"{a} : {a} :: {c} :"
    assert first == f"  1.000  {c}  ({planted[0]}:9)"
    assert len(others) == 2
    assert ask(model, planted[0], a, a, c, "-k", "2", "--exclude") == 0
    assert f"  {c}  (" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["flat", "ivf"])
def test_neighbors_of_an_index_are_those_of_a_search_without_index(model, planted, tmp_path, capsys, kind):
    if kind != "flat":
        pytest.importorskip("faiss", reason="the extra faiss is not installed")
    out, queries = str(tmp_path / "x.index"), ["place3 topic4word1", "place1 topic2word0"]
    words = [word for query in queries for word in ("--query", query)]
    assert main(["index", model, *planted, "--out", out, "--kind", kind, "--min-recall", "1"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{out}: 600 sentences x 16, {kind}")
    assert ("recall@10 1.0000 of 600 sentences" in said) == (kind != "flat")
    assert main(["neighbors", model, *planted, *words, "-k", "3"]) == 0
    wanted = capsys.readouterr().out
    for path in planted:
        Path(path).unlink()
    assert main(["neighbors", model, "--index", out, *words, "-k", "3"]) == 0
    found = capsys.readouterr().out
    # Sentences of equal cosines may be found in another order.
    assert [line[:8] for line in found.splitlines()] == [line[:8] for line in wanted.splitlines()]
    if kind == "flat":
        assert found == wanted


def test_what_mine_writes_is_trained_on(model, planted, tmp_path, capsys):
    lines = list(dict.fromkeys(filter(None, Path(planted[0]).read_text().splitlines())))[:80]
    pairs, out = tmp_path / "pairs.tsv", tmp_path / "mined.tsv"
    rows = zip(lines[::2], lines[1::2], strict=True)  # neighbouring lines
    pairs.write_text("".join(f"{query}\t{positive}\n" for query, positive in rows))
    words = ["mine", model, str(pairs), "--out", str(out), "--corpus", planted[1], "--format", "tuples"]
    assert main([*words, "--negatives", "2", "--range-min", "1", "--sampling", "random", "--seed", "4"]) == 0
    printed = capsys.readouterr().out
    rows = [line.split("\t") for line in out.read_text().splitlines()]
    assert printed.startswith(f"{out}: {len(rows)} rows of 40 pairs, with negatives among ")
    assert len(rows) == 40
    assert all(len(set(row)) == 4 for row in rows)
    assert ["\t".join(row[:2]) for row in rows] == pairs.read_text().splitlines()
    assert main(["train", str(out), "--model", "simcse", "--out", str(tmp_path / "run"), *SMALL[:6]]) == 0


QUICK = ["--dim", "64", "--epochs", "200", "--patience", "60"]


@pytest.fixture
def files(model, planted, tmp_path):
    """Features of images, and the captions of all of them: distinct lines of the planted text."""
    lines = list(dict.fromkeys(line for line in Path(planted[0]).read_text().splitlines() if line))[:120]
    captions = tmp_path / "captions.txt"
    captions.write_text("\n".join(lines) + "\n")
    assert main(["embed", model, str(captions), "--out", str(tmp_path / "sentences.npy")]) == 0
    vectors = np.load(tmp_path / "sentences.npy")
    generator = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", vectors @ generator.standard_normal((vectors.shape[1], 9)))
    return str(tmp_path / "x.npy"), str(captions)


def figures(capsys):
    """The table that was printed: {direction: {figure: value}}."""
    found = {}
    for line in capsys.readouterr().out.splitlines():
        if line.startswith(("captions by image", "images by caption")):
            name, value = line[17:].rsplit(maxsplit=1)
            assert value.endswith("%") != name.strip().endswith("rank")  # which is no share
            number = float(value.rstrip("%")) / (100 if value.endswith("%") else 1)
            found.setdefault(line[:17], {})[name.strip()] = number
    return found


def test_parts_by_share_and_results_in_json(model, files, tmp_path, capsys):
    features, captions = files
    out = tmp_path / "out.json"
    words = ["retrieve", model, "--features", features, "--captions", captions, *QUICK, "--json", str(out)]
    capsys.readouterr()
    assert main([*words, "--share", "0.2"]) == 0
    printed = figures(capsys)
    stored = json.loads(out.read_text())
    for direction in ("captions by image", "images by caption"):
        assert printed[direction]["R@10"] == pytest.approx(stored["tasks"][direction]["R@10"], abs=1e-4)
        assert printed[direction]["chance R@1"] == pytest.approx(1 / 24, abs=1e-4)
        assert printed[direction]["R@10"] > 0.8
    assert stored["settings"]["parts"]["train"] == {"images": 72, "captions": 72}
    assert {"date", "machine", "versions", "identity", "features", "share"} < stored.keys()


def test_parts_of_files(model, files, tmp_path, capsys):
    """The captions as three tables, whose images are 0 to 79, 80 to 99 and 100 to 119."""
    lines = Path(files[1]).read_text().splitlines()
    for name, begin, end in (("train", 0, 80), ("dev", 80, 100), ("test", 100, 120)):
        rows = [f"{lines[number]}\t{number}\n" for number in range(begin, end)]
        (tmp_path / f"{name}.tsv").write_text("".join(rows[::-1]))
    parts = (("--captions", "train"), ("--dev", "dev"), ("--test", "test"))
    words = [word for option, name in parts for word in (option, str(tmp_path / f"{name}.tsv"))]
    capsys.readouterr()
    assert main(["retrieve", model, "--features", files[0], *words, *QUICK, "--raw"]) == 0
    found = figures(capsys)
    assert found["images by caption"]["chance median rank"] == 10.5  # of 20
    assert found["images by caption"]["R@5"] > 0.7


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
    words += ["--quantize", "int8,binary"]
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
    assert config["quantize"] == ["int8", "binary"]
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
    # Eight documents are of the topic of each query.
    judged = "".join(f"queries{n % 25}\tcorpus{n}\t1\n" for n in range(len(documents)))
    results = []
    for model, query, document in ((run, "", ""), (plain, *PROMPTS.values())):
        folder = tmp_path / f"data of {model.name}"
        for name in ("asked/qrels", "STSB"):
            (folder / name).mkdir(parents=True)
        for file, prompt, texts in (("queries", query, queries), ("corpus", document, documents)):
            lines = (json.dumps({"_id": f"{file}{n}", "text": prompt + text}) for n, text in enumerate(texts))
            (folder / "asked" / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "asked" / "qrels" / "test.tsv").write_text(judged)
        lines = [f"g\t{n % 6}\t{query}{queries[n]}\t{query}{documents[n - n % 6]}\n" for n in range(25)]
        for part in ("dev", "test"):
            (folder / "STSB" / f"{part}.tsv").write_text("".join(lines))
        words = ["--data", str(folder), "--tasks", "asked,STSB", "--json", str(tmp_path / "out.json")]
        assert main(["evaluate", str(model), *words]) == 0
        results.append(json.loads((tmp_path / "out.json").read_text())["tasks"])
    assert results[0] == results[1]
    assert results[0]["asked"]["MAP@1000"] > 0.8
