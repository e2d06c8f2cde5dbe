"""Commands that encode take a folder of sentence-transformers in the place of a run."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fastqt.errors import InputError
from fastqt.sentences.cli import main
from fastqt.sentences.evaluation import load_encoder
from fastqt.sentences.inference.library_encoder import LibraryEncoder
from tests.shared.tiny_bert import write_tiny_bert

TEXTS = ["the cat sat", "a mat", "the cats sat on a mat .", "on the mat", "cat cat cat"]
PROMPTS = {"query": "cat . ", "document": "mat . "}


@pytest.fixture(scope="module")
def library():
    return pytest.importorskip("sentence_transformers", reason="the extra st is not installed")


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "prompts"])
def model(request, library, tmp_path_factory):
    """A model of the library and its folder."""
    folder = tmp_path_factory.mktemp("library")
    write_tiny_bert(folder / "bert")
    made = library.SentenceTransformer(str(folder / "bert"), device="cpu", local_files_only=True)
    if request.param:
        made.prompts = dict(PROMPTS)
    made.save(str(folder / "saved"))
    return made, str(folder / "saved")


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("\n".join([*TEXTS, "", "a cat"]) + "\n")
    return str(path)


def theirs(made, texts, side):
    prompt = PROMPTS[side] if made.prompts.get(side) else ""
    return made.encode([prompt + text for text in texts], normalize_embeddings=True)


@pytest.mark.parametrize("side", ["query", "document"])
def test_vectors_are_those_of_the_library(model, side, lines, tmp_path):
    made, folder = model
    assert main(["embed", folder, "--side", side, "--out", str(tmp_path / "x.npy"), lines]) == 0
    vectors = np.load(tmp_path / "x.npy")
    assert vectors.shape == (7, 8)
    assert (vectors[5] == 0).all()
    wanted = theirs(made, [*TEXTS, "a cat"], side)
    np.testing.assert_allclose(vectors[[0, 1, 2, 3, 4, 6]], wanted, atol=1e-6)
    assert (LibraryEncoder(folder, "cpu").encode([" ", "a cat"], side=side)[0] == 0).all()


def test_searches_compare_queries_with_documents(model, lines, tmp_path, capsys):
    made, folder = model
    cosines = theirs(made, ["a cat"], "query") @ theirs(made, [*TEXTS, "a cat"], "document").T
    best = [*TEXTS, "a cat"][int(cosines.argmax())]
    assert main(["index", folder, lines, "--out", str(tmp_path / "x.index")]) == 0
    capsys.readouterr()
    for where in ([lines], ["--index", str(tmp_path / "x.index")]):
        assert main(["neighbors", folder, *where, "--query", "a cat", "-k", "1"]) == 0
        assert f"{cosines.max():.3f}  {best}" in capsys.readouterr().out


def test_negatives_are_mined(model, tmp_path):
    _, folder = model
    (tmp_path / "pairs.tsv").write_text("".join(f"{text}\t{text} .\n" for text in TEXTS))
    words = [
        "mine",
        folder,
        str(tmp_path / "pairs.tsv"),
        "--negatives",
        "2",
        "--out",
        str(tmp_path / "m.tsv"),
    ]
    assert main(words) == 0
    rows = [line.split("\t") for line in (tmp_path / "m.tsv").read_text().splitlines()]
    assert [row[:2] for row in rows] == [[text, f"{text} ."] for text in TEXTS]
    assert all(len(set(row[1:])) == 3 for row in rows)


def test_an_evaluation_has_the_prompts_and_an_identity(model, tmp_path, capsys):
    made, folder = model
    data = tmp_path / "set"
    (data / "qrels").mkdir(parents=True)
    write = {"corpus.jsonl": [{"_id": str(i), "title": "", "text": text} for i, text in enumerate(TEXTS)]}
    write["queries.jsonl"] = [{"_id": "q", "text": "a cat"}]
    for name, rows in write.items():
        (data / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    cosines = theirs(made, ["a cat"], "query") @ theirs(made, TEXTS, "document").T
    second = int(np.argsort(-cosines[0])[1])
    (data / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\nq\t{second}\t1\n")
    out = tmp_path / "results.json"
    assert main(["evaluate", folder, "--data", str(data), "--json", str(out)]) == 0
    results = json.loads(out.read_text())
    assert results["identity"] == load_encoder(folder).identity
    assert results["identity"] != load_encoder(folder, raw=True).identity
    assert f"{1 / np.log2(3):.4f}"[:5] in str(results)


def test_what_such_a_model_has_not_is_refused_in_words(model, tmp_path, lines, capsys):
    _, folder = model
    words = ["embed", folder, "--inference-steps", "3", "--out", str(tmp_path / "x.npy"), lines]
    assert main(words) == 2
    assert "inference: want a trained gloss model" in capsys.readouterr().err
    with pytest.raises(InputError, match="inference: want a trained gloss model"):
        load_encoder(folder, inference=object())
    assert main(["evaluate", folder, "--baseline", "--data", str(tmp_path)]) == 2
    assert "baseline: want a directory that train wrote" in capsys.readouterr().err
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "modules.json").write_text("[{]")
    assert main(["embed", str(broken), "--out", str(tmp_path / "x.npy"), lines]) == 2
    assert str(broken) in capsys.readouterr().err
