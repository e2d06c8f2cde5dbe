"""docs/faq.md: messages that are headings are what fastqt says, and causes have the effects that it names."""

import re

import pytest
import torch
import torch.nn.functional as F

import fastqt
from fastqt.engines import ops
from fastqt.sentences.cli import main
from tests.shared.migrating_on_ranks import losses_of_rows
from tests.shared.page_blocks import DOCS
from tests.shared.ranks import RankError, Ranks
from tests.shared.tolerances import FLOAT32, relative

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


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.slow
def test_another_number_of_rows(two):
    with pytest.raises(RankError, match="queries: want 12 rows as in the calls before, got 6"):
        two.run(losses_of_rows, 12, 6)
