"""Losses that no engine has are operators that pass opcheck, and compile for batches of any size."""

import pytest
import torch

import fastqt
from fastqt.losses import max_margin, negative_sampling
from tests.shared.tolerances import FLOAT64, relative

N, M, D, K = 7, 9, 4, 3


def embeddings(rows: int = N, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(n, D, generator=generator, dtype=torch.float64, requires_grad=True)
        for n in (rows, rows + M - N)
    )


def numbers(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(rows) % M, (torch.arange(rows * K).view(rows, K) * 5) % M


SCALE = torch.tensor(2.0, dtype=torch.float64)
OPERATORS = {
    "negative_sampling": ([SCALE, torch.cat([numbers(N)[0][:, None], numbers(N)[1]], 1)], 3),
    "max_margin of rows": (
        [torch.arange(N + 1), torch.arange(N), torch.ones(N, dtype=torch.float64), None, 0.5, True],
        2,
    ),
    "max_margin of a matrix": ([None, None, None, torch.eye(N, M), 0.5, False], 2),
}
OPERATOR_OF = {
    "negative_sampling": negative_sampling.NEGATIVE_SAMPLING.operator,
    "max_margin": max_margin.MAX_MARGIN.operator,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("weighted", [False, True])
def test_opcheck(name, weighted):
    rest, inputs = OPERATORS[name]
    operator = OPERATOR_OF[name.split()[0]]
    weights = torch.full((N,), 0.5, dtype=torch.float64) if weighted else None
    for needs in ([weighted] * inputs, [weighted] + [False] * (inputs - 1)):
        torch.library.opcheck(operator, (*(x.detach() for x in embeddings()), *rest, weights, needs))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("loss", ["max_margin", "negative_sampling"])
@pytest.mark.slow
def test_a_compiled_loss_of_any_batch_size(loss, reduction):
    """From the second batch size on, torch.compile takes the size to be a variable."""

    def call(queries, candidates):
        if loss == "max_margin":
            targets = torch.arange(len(queries))
            return fastqt.max_margin_loss(queries, candidates, targets, diagonal="keep", reduction=reduction)
        positives, negatives = numbers(len(queries))
        return fastqt.negative_sampling_loss(queries, candidates, positives, negatives, reduction=reduction)

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for rows in (N, 12, 20):
        inputs = embeddings(rows)
        a, b = compiled(*inputs), call(*inputs)
        assert a.dtype == b.dtype
        assert relative(a, b) < FLOAT64
        for x, y in zip(
            torch.autograd.grad(a.square().sum(), inputs),
            torch.autograd.grad(b.square().sum(), inputs),
            strict=True,
        ):
            assert relative(x, y) < FLOAT64


def test_wrong_values_end_a_compiled_loss():
    """The assertion on values has the message of the ValueError, without the sizes of one batch."""

    def call(queries, candidates, positives, negatives):
        return fastqt.negative_sampling_loss(queries, candidates, positives, negatives)

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    positives, negatives = numbers(N)
    compiled(*embeddings(), positives, negatives)
    for wrong in (M, -1):
        with pytest.raises(RuntimeError, match=r"positives, negatives: want values in 0\.\.last"):
            compiled(*embeddings(), positives, negatives.fill_(wrong))
