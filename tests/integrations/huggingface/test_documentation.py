"""The examples of docs/integrations.md on Hugging Face run as they are written."""

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from fastqt.sentences.cli import main
from tests.shared.tokenizer_files import word_piece

PAGE = (Path(__file__).parents[3] / "docs" / "integrations.md").read_text()


def blocks(heading: str, language: str) -> list[str]:
    """The code in the section of a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(rf"```{language}\n(.*?)```", section, flags=re.DOTALL)
    assert found
    return found


def run(heading: str, options: list[str]) -> None:
    for line in "".join(blocks(heading, "sh")).splitlines():
        words = shlex.split(line)
        assert words.pop(0) == "fastqt"
        assert main([*words, *(options if words[0] == "train" else [])]) == 0, line


LINES = ["the cat sat.", "a cat", "", "a mat", "the mats sat on a cat."] * 30
QUICK = ["--batch-size", "20", "--word-dim", "6", "--hidden-size", "4", "--steps", "2"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*pin_memory.*")
def test_the_trainer(checkpoint, tmp_path, monkeypatch):
    pytest.importorskip("accelerate", reason="the extra hf is not installed")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoint, "bert")
    names = {}
    for block in blocks("The transformers Trainer", "python"):
        exec(block, names)
    assert np.isfinite(names["loss"])
    assert names["vectors"].shape == (1, 8)


def test_corpora(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow", reason="the extra datasets is not installed")
    pq = pytest.importorskip("pyarrow.parquet", reason="the extra datasets is not installed")
    datasets = pytest.importorskip("datasets", reason="the library datasets is not installed")
    monkeypatch.chdir(tmp_path)
    columns = {"text": LINES, "sentence": LINES, "book": [str(row // 20) for row in range(len(LINES))]}
    pq.write_table(pa.table(columns), "sentences.parquet")
    datasets.Dataset.from_dict(columns).save_to_disk("folder")
    run("Corpora of the datasets library", QUICK)


def test_tokenizer_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tokenizer.json").write_text(word_piece().to_str())
    Path("sentences.txt").write_text("\n".join(LINES))
    run("Tokenizer files", QUICK)
    assert np.load("vectors.npy").shape == (len(LINES), 8)
