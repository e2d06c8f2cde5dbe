"""The pages for users: their blocks and commands run, and what they say of values and messages is so."""

import re
import shutil

import pytest
import torch
import torch.nn.functional as F

import fastqt
from fastqt.engines import ops
from fastqt.sentences.cli import main
from tests.shared.migrating_on_ranks import losses_of_rows, trained_retriever
from tests.shared.page_blocks import DOCS, PAGES, blocks, commands
from tests.shared.ranks import RankError
from tests.shared.tokenizer_files import word_piece
from tests.shared.tolerances import FLOAT32, relative

# Libraries that a page's blocks import beside torch and fastqt.
NEEDS = {
    "how-to/evaluate.md": ("sklearn",),
    "how-to/static-embeddings.md": ("sentence_transformers",),
    "how-to/export.md": ("sentence_transformers", "onnx", "onnxscript", "onnxruntime"),
}
COMMANDS = ("train", "embed", "evaluate", "search", "retriever", "static-embeddings", "export")
WITH_COMMANDS = ("quick-start.md", *(f"how-to/{name}.md" for name in COMMANDS))


@pytest.mark.slow
def test_a_retriever_on_two_ranks(two_ranks):
    """Its losses are those of both ranks' rows, so that both have the same bits, and the same weights."""
    (loss, weights), (other_loss, other_weights) = two_ranks.run(trained_retriever)
    assert torch.equal(loss, other_loss)
    assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))


def write_inputs(folder, planted) -> None:
    for source, name in zip(planted, ("corpus.txt", "held-out.txt"), strict=True):
        shutil.copyfile(source, folder / name)
    for name in ("sentences.txt", "novels.txt"):
        shutil.copyfile(planted[1], folder / name)
    words = [f"topic{topic}word{word}" for topic in range(30) for word in range(3)]
    numbers = torch.randn(len(words), 4, generator=torch.Generator().manual_seed(0)).tolist()
    lines = [f"{word} " + " ".join(map(str, row)) for word, row in zip(words, numbers, strict=True)]
    (folder / "vectors.txt").write_text("\n".join(lines) + "\n")
    for name, line in (("MR/all", "{0}\tplace{1}"), ("STSB/dev", "g\t{1}\ta {1}\tb {0}")):
        path = folder / "eval" / f"{name}.tsv"
        path.parent.mkdir(parents=True)
        path.write_text("".join(line.format(number % 2, number % 6) + "\n" for number in range(40)))
    (folder / "eval/STSB/test.tsv").write_text((folder / "eval/STSB/dev.tsv").read_text())
    lines = [line for line in (folder / "corpus.txt").read_text().splitlines() if line][:240]
    pairs = zip(lines[::2], lines[1::2], strict=True)
    (folder / "pairs.tsv").write_text("".join(f"{query}\t{positive}\n" for query, positive in pairs))
    shutil.copyfile(folder / "pairs.tsv", folder / "held-out.tsv")
    word_piece().save(str(folder / "tokenizer.json"))
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
    if page not in ("how-to/train.md", "quick-start.md"):
        own.insert(0, ["train", "corpus.txt", "--out", "run"])
    for words in own:
        quick = QUICK if words[0] == "train" and "--resume" not in words else []
        has_widths = any(word.startswith("--matryoshka") for word in words)
        quick = quick + (NARROW if quick and not has_widths else [])
        assert main([*words, *quick]) == 0, capsys.readouterr().err


PAGE = blocks(PAGES["quick-start.md"], "python")
LEAVES = ("queries", "candidates", "images", "texts", "log_scale")
# Sums of some hundred terms that are nearly as large as their result, in another order.
FLOAT64 = 1e-12


def run(code: str, names: dict) -> dict[str, torch.Tensor]:
    """Runs a block and returns the loss, and the gradients that it has given to the leaves."""
    for leaf in LEAVES:
        if leaf in names:
            names[leaf].grad = None
    exec(code, names)
    grads = {leaf: names[leaf].grad for leaf in LEAVES if leaf in names and names[leaf].grad is not None}
    return {"loss": names["loss"].detach(), **{name: grad.clone() for name, grad in grads.items()}}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, FLOAT64), (torch.float32, FLOAT32)])
def test_before_and_after_are_one_loss(dtype, tolerance, capsys):
    names: dict = {}
    found = None
    compared = 0
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        for block in PAGE:
            result = run(block.code, names) if "loss" in block.code else exec(block.code, names)
            if block.above == "After:":
                assert set(result) == set(found)
                assert len(result) >= 3
                for name, value in result.items():
                    assert value.dtype is dtype
                    assert relative(value, found[name]) < tolerance, name
                compared += 1
            found = result if block.above == "Before:" else None
    finally:
        torch.set_default_dtype(default)
    assert compared == 2
    first, last = names["losses"][0], names["losses"][-1]
    assert last < first / 2

    # The page prints each loss before and after, in four digits, of which rounding may change the last one.
    *printed, end = capsys.readouterr().out.splitlines()
    before, after = ([float(line) for line in printed[start::2]] for start in (0, 1))
    assert before == pytest.approx(after, abs=1.1e-4)
    assert len(before) == compared
    assert end == f"{first:.2f} at the beginning, {last:.2f} at the end"


N, D = 64, 16


def embeddings(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    f, g = (torch.randn(N, D, generator=generator, dtype=dtype, requires_grad=True) for _ in range(2))
    return f, g


def double_backward():
    f, g = embeddings()
    (gradient,) = torch.autograd.grad(fastqt.info_nce_loss(f, g), f, create_graph=True)
    gradient.sum().backward()


def with_scale(scale):
    return lambda: fastqt.info_nce_loss(*embeddings(), scale=scale)


RAISED = {
    "scale: want a positive number, which is 1 / temperature, got 0.0": with_scale(0.0),
    "scale: want a finite number, which is 1 / temperature, got nan": with_scale(torch.tensor(float("nan"))),
    "temperature: no option of info_nce_loss; want scale, which is 1 / temperature": (
        lambda: fastqt.info_nce_loss(*embeddings(), temperature=0.05)
    ),
    "candidates: want dtype torch.float32 as queries, got torch.float64": lambda: fastqt.info_nce_loss(
        embeddings()[0], embeddings(torch.float64)[1]
    ),
    "fastqt.contrastive_loss is differentiable once and in reverse mode": double_backward,
    "size (context_size): want a reach of fewer rows than the batch": lambda: fastqt.contrastive_loss(
        *embeddings(), context_size=N
    ),
}
ON_THE_COMMAND_LINE = {
    "the corpus is shorter than a batch": ["--batch-size", "1000"],
    "already holds a run: resume it, or choose another directory": ["--batch-size", "30", "--steps", "1"],
}
ELSEWHERE = {
    "fastqt was built without CUDA: its build found no nvcc, or was to use none",
    "queries: want 12 rows as in the calls before, got 6",
}


def test_each_message_of_the_page_is_tested():
    errors = DOCS.joinpath("faq.md").read_text().split("\n## Values\n")[0]
    found = set(re.findall(r"^### `([^`]+)`$", errors, re.M))
    assert found == {*RAISED, *ON_THE_COMMAND_LINE, *ELSEWHERE}


@pytest.mark.parametrize("message", RAISED)
def test_messages_are_raised(message):
    with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
        RAISED[message]()
    assert message in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("message", ON_THE_COMMAND_LINE)
def test_messages_of_the_command_line(message, planted, tmp_path, capsys):
    command = ["train", planted[0], "--out", str(tmp_path / "run"), "--word-dim", "4"]
    statuses = [main([*command, *ON_THE_COMMAND_LINE[message]]) for _ in range(2)]
    assert statuses[-1] == 2
    assert message in capsys.readouterr().err


def test_a_build_without_cuda_says_so():
    if ops.cuda_error is None or ops.native_error is not None:
        pytest.skip("fastqt was built with CUDA, or without the extension")
    assert ops.cuda_error in ELSEWHERE


def test_nan_reaches_rows_of_queries_and_all_rows_of_candidates():
    f, g = embeddings()
    bad = f.detach().clone()
    bad[3, 2] = float("nan")
    assert fastqt.info_nce_loss(bad, g, reduction="none").isnan().nonzero().flatten().tolist() == [3]
    assert fastqt.info_nce_loss(f, bad, reduction="none").isnan().all()


def test_a_row_of_zeros_has_the_huge_gradient_of_normalize():
    zeros, g = torch.zeros(N, D, requires_grad=True), embeddings()[1]
    (found,) = torch.autograd.grad(fastqt.info_nce_loss(zeros, g), zeros)
    scores = 20 * F.normalize(zeros, dim=1) @ F.normalize(g, dim=1).T
    (wanted,) = torch.autograd.grad(F.cross_entropy(scores, torch.arange(N)), zeros)
    assert wanted.abs().max() > 1e10
    assert relative(found, wanted) < FLOAT32


@pytest.mark.slow
def test_another_number_of_rows(two_ranks):
    with pytest.raises(RankError, match="queries: want 12 rows as in the calls before, got 6"):
        two_ranks.run(losses_of_rows, 12, 6)
