"""SimCSE and MixCSE from the command line, with their options, on a few hundred sentences of novels."""

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from fastqt.sentences.cli import main
from tests.shared.novels import novel

SIZES = ["--word-dim", "24", "--layers", "1", "--heads", "3", "--feedforward", "32", "--batch-size", "32"]
SIZES += ["--epochs", "3", "--report-every", "1", "--learning-rate", "0.005"]


@pytest.fixture(scope="module")
def novels(tmp_path_factory):
    """Paths of 400 sentences, of rows with two hard negatives made of them, and of development pairs."""
    folder = tmp_path_factory.mktemp("novels")
    lines = Path(novel(folder / "novel.txt", 600)).read_text(encoding="utf-8").splitlines()
    lines = [line.strip() for line in lines if line.strip()][:400]
    (folder / "text.txt").write_text("\n".join(lines))
    rows = zip(lines, lines[1:], lines[20:], lines[40:], strict=False)
    with lzma.open(folder / "rows.tsv.xz", "wt", encoding="utf-8") as file:
        file.write("\n".join("\t".join(row) for row in rows))
    pairs = [f"novels\t{5 - n % 6}\t{lines[n]}\t{lines[n + n % 6]}" for n in range(60)]
    (folder / "dev.tsv").write_text("\n".join(pairs))
    return folder


@pytest.mark.parametrize(
    ("corpus", "options"),
    [
        ("text.txt", ["--model", "simcse", "--masked-words", "0.1"]),
        ("rows.tsv.xz", ["--model", "simcse", "--hard-negative-weight", "0.7", "--scale", "10"]),
        (
            "text.txt",
            ["--model", "mixcse", "--form", "released", "--partner", "random", "--masked-cell", "exclude"],
        ),
        ("text.txt", ["--model", "mixcse", "--form", "released", "--blocks", "candidates"]),
        ("text.txt", ["--model", "mixcse", "--stop-gradient", "no", "--mix", "0.3"]),
    ],
    ids=str,
)
def test_options_train_and_the_model_embeds(novels, tmp_path, capsys, corpus, options):
    run, out = str(tmp_path / "run"), str(tmp_path / "x.npy")
    paths = [str(novels / corpus), "--valid", str(novels / corpus), "--dev", str(novels / "dev.tsv")]
    assert main(["train", *paths, "--out", run, "--encoder", "transformer", *SIZES, *options]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["step"]]  # without that of fresh weights
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert {"validation_loss", "dev_spearman", "mixed_cosine"} < lines[-1].keys()
    assert ("masked_word_loss" in lines[-1]) == ("--masked-words" in options)
    assert ("hard_negative_cosine" in lines[-1]) == corpus.endswith(".xz")
    assert main(["embed", run, str(novels / "text.txt"), "--out", out]) == 0
    vectors = np.load(out)
    assert vectors.shape == (400, 24)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    query = (novels / "text.txt").read_text().splitlines()[3]
    capsys.readouterr()
    assert main(["neighbors", run, str(novels / "text.txt"), "--query", query, "-k", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("  1.000  ")


def test_a_wrong_row_is_an_error_of_one_line(tmp_path, capsys):
    path = tmp_path / "rows.tsv"
    path.write_text("one\ttwo\tthree\nfour\tfive\n")
    assert main(["train", str(path), "--model", "simcse", "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err == f"fastqt: {path}: line 2: want 3 columns as in line 1 of {path}, got 2"
