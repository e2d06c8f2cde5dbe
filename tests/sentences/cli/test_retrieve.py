"""fastqt retrieve, with features that depend on the captions, from planted text and from novels."""

import json
from pathlib import Path

import numpy as np
import pytest

from fastqt.sentences.cli import main
from tests.shared.command_lines import error_line
from tests.shared.novels import novel

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


def tables(tmp_path, captions):
    """The captions as three tables, whose images are 0 to 79, 80 to 99 and 100 to 119."""
    lines = Path(captions).read_text().splitlines()
    paths = []
    for name, begin, end in (("train", 0, 80), ("dev", 80, 100), ("test", 100, 120)):
        paths.append(tmp_path / f"{name}.tsv")
        rows = [f"{lines[number]}\t{number}\n" for number in range(begin, end)]
        paths[-1].write_text("".join(rows[::-1]))
    return [str(path) for path in paths]


def figures(capsys):
    """The table that was printed: {direction: {figure: value}}."""
    found = {}
    for line in capsys.readouterr().out.splitlines():
        if line.startswith(("captions by image", "images by caption")):
            name, value = line[17:].rsplit(maxsplit=1)
            found.setdefault(line[:17], {})[name.strip()] = float(value)
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
    assert {"date", "machine", "versions", "sha256", "features", "share"} < stored.keys()
    assert main([*words, "--share", "0.2"]) == 0
    again = json.loads(out.read_text())
    assert again["tasks"] == stored["tasks"]


def test_parts_of_files(model, files, tmp_path, capsys):
    train, dev, test = tables(tmp_path, files[1])
    words = ["retrieve", model, "--features", files[0], "--captions", train, "--dev", dev, "--test", test]
    capsys.readouterr()
    assert main([*words, *QUICK, "--raw"]) == 0
    found = figures(capsys)
    assert found["images by caption"]["chance median rank"] == 10.5  # of 20
    assert found["images by caption"]["R@5"] > 0.7


def test_an_untrained_model_on_novels(tmp_path, capsys):
    corpus = novel(tmp_path / "text.txt", 200)
    run, x = str(tmp_path / "run"), str(tmp_path / "x.npy")
    assert (
        main(["train", corpus, "--out", run, "--word-dim", "16", "--batch-size", "50", "--steps", "1"]) == 0
    )
    assert main(["embed", run, corpus, "--out", x]) == 0
    capsys.readouterr()
    words = ["retrieve", f"random:{run}", "--features", x, "--captions", corpus, *QUICK]
    assert main(words) == 0
    assert figures(capsys)["images by caption"]["R@10"] > 0.6


def test_errors(model, files, tmp_path, capsys):
    features, captions = files
    train, dev, _ = tables(tmp_path, captions)
    (tmp_path / "none.txt").write_text("\n")
    (tmp_path / "many.txt").write_text("a\n" * 121)
    np.save(tmp_path / "flat.npy", np.ones(3))
    base = ["retrieve", model, "--features", features, "--captions"]
    for words, message in (
        ([*base, train, "--dev", dev], "test: want both --dev and --test or neither of them"),
        ([*base, train, "--test", dev], "dev: want both --dev and --test or neither of them"),
        ([*base, train, "--dev", dev, "--test", train], "want images that are in no other part, got image 0"),
        ([*base, captions, "--share", "0.5"], "share: want a number between 0 and 0.5, got 0.5"),
        ([*base, captions, "--dim", "0"], "dim: want at least 1, got 0"),
        ([*base, captions, "--seed", "-1"], "seed: want 0 to 4294967295, got -1"),
        ([*base, captions, "--json", "out.txt"], "out.txt: want a name that ends in .json"),
        ([*base, "absent.txt"], "no such file: absent.txt"),
        ([*base, tmp_path / "none.txt"], "none.txt holds no caption"),
        ([*base, tmp_path / "many.txt"], "line 121: want an image from 0 to 119, got 120"),
        (
            ["retrieve", model, "--features", tmp_path / "flat.npy", "--captions", captions],
            "flat.npy: want 2 dimensions",
        ),
        (["retrieve", model, "--captions", captions], "the following arguments are required: --features"),
        (
            ["retrieve", tmp_path, "--features", features, "--captions", captions],
            "config.json is missing",
        ),
    ):
        capsys.readouterr()
        assert message in error_line(capsys, *words), words
