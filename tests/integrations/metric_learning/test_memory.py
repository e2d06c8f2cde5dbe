"""CrossBatchMemory with fastqt's losses equals the library's, batch after batch."""

import pytest
import torch

from tests.shared.ring_memory import Live
from tests.shared.tolerances import relative

pytest.importorskip("pytorch_metric_learning", reason="the extra metric is not installed")

from pytorch_metric_learning import losses, miners

import fastqt.integrations.metric_learning as ours

by_loss = pytest.mark.parametrize("name", ["NTXentLoss", "SupConLoss"])
WIDTH = 6


def batches(memory, rows: int, count: int, *, mask: bool = False):
    """The value and the gradient of each of `count` batches."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
        labels = torch.randint(5, (rows,), generator=generator)
        options = {"enqueue_mask": torch.rand(rows, generator=generator) < 0.5} if mask else {}
        value = memory(x, labels, **options)
        yield value.detach(), torch.autograd.grad(value, x)[0]


@by_loss
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(("size", "rows"), [(20, 7), (21, 7), (8, 8), (50, 2)])
@pytest.mark.parametrize("miner", [None, miners.MultiSimilarityMiner])
def test_equals_the_librarys(name, size, rows, mask, miner):
    made = [
        module.CrossBatchMemory(getattr(module, name)(), WIDTH, size, miner and miner())
        for module in (ours, losses)
    ]
    for found, wanted in zip(*(batches(memory, rows, 9, mask=mask) for memory in made), strict=True):
        for a, b in zip(found, wanted, strict=True):
            assert relative(a, b) < 1e-11
    assert torch.equal(made[0].embedding_memory, made[1].embedding_memory)
    assert made[0].queue_idx == made[1].queue_idx


@by_loss
def test_a_batch_of_one_row_is_not_compared_with_itself(name):
    """The library takes its row for a positive of itself."""
    memory = ours.CrossBatchMemory(getattr(ours, name)(), WIDTH, 10)
    first, second = torch.eye(WIDTH)[:1], torch.eye(WIDTH)[1:2]
    memory(first, torch.tensor([0]))
    assert memory(second, torch.tensor([1])) == 0


def test_other_losses_are_given_lists():
    memory = ours.CrossBatchMemory(losses.ContrastiveLoss(), WIDTH, 20)
    wanted = losses.CrossBatchMemory(losses.ContrastiveLoss(), WIDTH, 20)
    for a, b in zip(batches(memory, 6, 5), batches(wanted, 6, 5), strict=True):
        assert torch.equal(a[0], b[0])


@by_loss
def test_no_lists_of_all_pairs(name):
    """128 rows against 20,000: their scores take 10 MB in float32, and lists of all pairs 40 MB."""
    memory = ours.CrossBatchMemory(getattr(ours, name)(), 8, 20_000)
    memory.add_to_memory(torch.randn(20_000, 8), torch.arange(20_000) % 4000, 20_000)
    x, labels = torch.randn(128, 8, requires_grad=True), torch.arange(128)
    with Live(x) as live:
        memory(x, labels).backward()
    assert live.most < 6 * 2**20
