"""The pages for users: their blocks and commands run in order."""

import shutil

import pytest
import torch
import torch.distributed as dist

from fastqt.sentences.cli import main
from tests.shared.migrating_on_ranks import run, trained_retriever
from tests.shared.page_blocks import DOCS, PAGES, blocks, commands
from tests.shared.ranks import Ranks

HOW_TO = ("train", "embed", "evaluate", "search", "retriever", "export", "distributed", "16-bit", "gpu")
NAMES = ("migrating.md", "choosing.md", "faq.md", *(f"how-to/{name}.md" for name in HOW_TO))
# Libraries that a page's blocks import beside torch and fastqt.
NEEDS = {
    "migrating.md": ("sentence_transformers", "pytorch_metric_learning"),
    "how-to/evaluate.md": ("sklearn",),
    "how-to/export.md": ("sentence_transformers", "onnx", "onnxscript", "onnxruntime"),
}
SLOW = ("migrating.md", "how-to/embed.md", "how-to/evaluate.md", "how-to/search.md", "how-to/export.md")
COMMANDS = ("train", "embed", "evaluate", "search", "retriever", "export")
WITH_COMMANDS = tuple(f"how-to/{name}.md" for name in COMMANDS)
each_page = pytest.mark.parametrize("page", NAMES)


def test_all_pages_are_listed():
    assert {f"how-to/{path.name}" for path in DOCS.glob("how-to/*.md")} <= set(NAMES)


@pytest.mark.parametrize(
    "page", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in NAMES]
)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    for library in NEEDS.get(page, ()):
        pytest.importorskip(library, reason=f"{library} is not installed")
    monkeypatch.chdir(tmp_path)
    python = blocks(PAGES[page], "python")
    assert python or page == "how-to/train.md"  # which has commands alone
    before = torch.random.get_rng_state()
    try:
        run(python, {})
    finally:
        torch.random.set_rng_state(before)
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_retriever_on_two_ranks():
    """Its losses are those of both ranks' rows, so that both have the same bits, and the same weights."""
    two = Ranks(2)
    try:
        (loss, weights), (other_loss, other_weights) = two.run(trained_retriever)
    finally:
        two.close()
    assert torch.equal(loss, other_loss)
    assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))


@each_page
def test_blocks_name_their_language(page):
    assert {block.language for block in blocks(PAGES[page])} <= {"python", "sh", "text"}


def write_inputs(folder, planted) -> None:
    """The files that the commands of the pages name."""
    for source, name in zip(planted, ("corpus.txt", "held-out.txt"), strict=True):
        shutil.copyfile(source, folder / name)
    shutil.copyfile(planted[1], folder / "sentences.txt")
    words = [f"topic{topic}word{word}" for topic in range(30) for word in range(3)]
    numbers = torch.randn(len(words), 4, generator=torch.Generator().manual_seed(0)).tolist()
    lines = [f"{word} " + " ".join(map(str, row)) for word, row in zip(words, numbers, strict=True)]
    (folder / "vectors.txt").write_text("\n".join(lines) + "\n")
    for name, line in (("MR/all", "{0}\tplace{1}"), ("STSB/dev", "g\t{1}\ta {1}\tb {0}")):
        path = folder / "eval" / f"{name}.tsv"
        path.parent.mkdir(parents=True)
        path.write_text("".join(line.format(number % 2, number % 6) + "\n" for number in range(40)))
    (folder / "eval/STSB/test.tsv").write_text((folder / "eval/STSB/dev.tsv").read_text())
    lines = [line for line in (folder / "corpus.txt").read_text().splitlines() if line][:60]
    pairs = zip(lines[::2], lines[1::2], strict=True)
    (folder / "pairs.tsv").write_text("".join(f"{query}\t{positive}\n" for query, positive in pairs))
    shutil.copyfile(folder / "pairs.tsv", folder / "held-out.tsv")
    for name, column in (("queries", lines[::2]), ("documents", lines[1::2])):
        (folder / f"{name}.txt").write_text("\n".join(column))
    (folder / "eval/films/qrels").mkdir(parents=True)
    for name in ("corpus", "queries"):
        (folder / f"eval/films/{name}.jsonl").write_text(
            '{"_id": "1", "text": "one"}\n{"_id": "2", "text": "a"}\n'
        )
    (folder / "eval/films/qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n1\t2\t1\n")


QUICK = ["--batch-size", "30", "--hidden-size", "6", "--layers", "1", "--steps", "3"]
NARROW = ["--word-dim", "10"]  # where no option of a page depends on the width


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_run(page, planted, tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn", reason="the extra eval is not installed")
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    for library in NEEDS.get(page, ()):
        pytest.importorskip(library, reason=f"{library} is not installed")
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_inputs(folder, planted)
    said = [words for block in blocks(PAGES[page], "sh") for words in commands(block.code)]
    own = [words[1:] for words in said if words[0] == "fastqt"]
    if page != "how-to/train.md":
        own.insert(0, ["train", "corpus.txt", "--out", "run"])
    for words in own:
        quick = QUICK if words[0] == "train" and "--resume" not in words else []
        quick = quick + (NARROW if quick and "--matryoshka-dims" not in words else [])
        assert main([*words, *quick]) == 0, capsys.readouterr().err
