"""The memory bank keeps the last rows, and a loss with them is that of the rows joined by hand."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F

import fastqt
from fastqt.nn import Queue
from tests.shared.loss_views import check, views

N, D, SCALE = 6, 5, 4.0
DOUBLE = {"dtype": torch.float64}


def batches(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, D, generator=generator, dtype=torch.float64) for n in sizes]


def as_set(x):
    return sorted(map(tuple, x.tolist()))


@pytest.mark.parametrize("size", [1, 4, 7, 12])
def test_keeps_the_last_rows_and_their_labels(size):
    queue, everything, every_label = Queue(size, D, labels=True, **DOUBLE), [], []
    assert queue.filled == 0
    assert queue.embeddings is None
    assert queue.labels is None
    for step, rows in enumerate(batches(3, 4, 0, 1, 20, 5, 12, 2, 7)):
        labels = torch.arange(len(rows), dtype=torch.int32) + 100 * step
        queue.enqueue(rows, labels)
        everything += rows.tolist()
        every_label += labels.tolist()
        last = everything[-size:]
        assert queue.filled == len(last)
        assert as_set(queue.embeddings) == sorted(map(tuple, last))
        held = dict(zip(queue.labels.tolist(), queue.embeddings.tolist(), strict=True))
        assert held == dict(zip(every_label[-size:], last, strict=True))
        if len(everything) <= size:
            assert queue.embeddings.tolist() == everything  # in this order


def test_stores_rows_without_their_graphs():
    queue = Queue(8, D)
    rows = batches(3)[0].requires_grad_()
    graph = weakref.ref(rows)
    queue.enqueue(2 * rows)
    assert queue.embeddings.dtype is torch.float32
    assert torch.equal(queue.embeddings, 2 * rows.detach().float())
    assert not queue.embeddings.requires_grad
    assert not list(queue.parameters())
    del rows
    gc.collect()
    assert graph() is None


@pytest.mark.parametrize("noise", [0.01, 1.0])
def test_moco(noise):
    """A query's candidates are its own key and the last keys, of which there are none at first.

    The other keys of the batch are taken out as those of one class.
    """
    queue, held = Queue(15, D, **DOUBLE), torch.zeros(0, D, **DOUBLE)
    own = torch.zeros(N, dtype=torch.int64)
    options = {"diagonal": "keep", "scale": 20.0, "exclude": fastqt.Same(own)}
    for seed in range(6):
        x, more = batches(N, N, seed=seed)
        q, keys = F.normalize(x).requires_grad_(), F.normalize(x + noise * more)
        loss = fastqt.contrastive_loss(q, keys, fastqt.Diagonal(), negatives=queue.embeddings, **options)
        scores = 20 * torch.cat([(q * keys).sum(1, keepdim=True), q @ held.T], 1)
        check(loss, F.cross_entropy(scores, own), [q])
        queue.enqueue(keys)
        held = torch.cat([held, keys])[-15:]
    assert as_set(queue.embeddings) == as_set(held)


@pytest.mark.parametrize(
    "loss",
    [
        lambda q, c, x: fastqt.info_nce_loss(q, c, negatives=x),
        lambda q, c, x: fastqt.info_nce_loss(q, c, negatives=x, reduction="none").sum(),
        lambda q, c, x: fastqt.info_nce_loss(q, c, negatives=x, backend="reference"),
        lambda q, c, x: fastqt.log_sum_exp(q, x).sum() + 0 * c.sum(),
    ],
    ids=["mean", "none", "reference", "log_sum_exp"],
)
def test_enqueue_before_backward_changes_no_gradient(loss):
    queue = Queue(8, D, **DOUBLE)
    queue.enqueue(*batches(8))
    q, c = views(N, N)
    wanted = torch.autograd.grad(loss(q, c, queue.embeddings), (q, c))
    value = loss(q, c, queue.embeddings)
    queue.enqueue(c)
    for x, y in zip(torch.autograd.grad(value, (q, c)), wanted, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("before", [1, 4])
def test_goes_on_from_a_state_dict(before):
    """In a queue that is not yet full, and in one whose oldest row is in its midst."""
    rows = batches(*[5] * 8)
    whole, first, fresh = (Queue(13, D, labels=True) for _ in range(3))
    fresh.enqueue(torch.randn(30, D), torch.zeros(30, dtype=torch.int64))
    assert fresh.filled == 13
    for step, x in enumerate(rows):
        labels = torch.full((5,), step)
        whole.enqueue(x, labels)
        if step < before:
            first.enqueue(x, labels)
            continue
        if step == before:
            fresh.load_state_dict(copy.deepcopy(first.state_dict()))
            assert torch.equal(fresh.embeddings, first.embeddings)
        fresh.enqueue(x, labels)
    assert torch.equal(fresh.embeddings, whole.embeddings)
    assert torch.equal(fresh.labels, whole.labels)


def filled(rows, **options):
    queue = Queue(4, D, labels=True, **options)
    queue.enqueue(torch.randn(rows, D, generator=torch.Generator().manual_seed(rows)), torch.arange(rows))
    return queue


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("prefix", ["", "bank."])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("enqueued", torch.tensor(-3), r"want how many rows were enqueued, from 0 to 2\*\*62, got -3"),
        ("enqueued", torch.tensor(2**63 - 1), "want how many rows were enqueued, .*, got"),
        ("enqueued", torch.tensor(2.5), "want dtype torch.int64, got torch.float32"),
        ("enqueued", torch.tensor([2, 1]), r"want shape \(\), got \(2,\)"),
        ("rows", torch.zeros(5, D), r"want shape \(4, 5\), got \(5, 5\)"),
        ("rows", torch.zeros(4, D).long(), "want a floating-point dtype of 16 to 64 bits, got torch.int64"),
        ("row_labels", torch.zeros(3).long(), r"want shape \(4,\), got \(3,\)"),
        ("row_labels", None, "Missing key"),
    ],
)
def test_a_wrong_state_dict_is_refused_in_words_and_changes_nothing(name, value, message, prefix, assign):
    queue = filled(3)
    module = torch.nn.ModuleDict({"bank": queue}) if prefix else queue
    before = copy.deepcopy(queue.state_dict())
    state = {prefix + key: x for key, x in filled(6).state_dict().items()} | {prefix + name: value}
    if message.startswith("Missing"):
        del state[prefix + name]
    wanted = f"{message}.*{prefix}{name}" if "key" in message else f"{prefix}{name}: {message}"
    with pytest.raises(RuntimeError, match=rf"(?s){wanted}"):
        module.load_state_dict(state, assign=assign)
    assert queue.state_dict().keys() == before.keys()
    assert all(torch.equal(x, before[key]) for key, x in queue.state_dict().items())
    assert queue.filled == 3


def test_a_part_of_a_state_dict_is_not_loaded_without_the_rest():
    """Rows without their number would be negatives that nobody enqueued."""
    queue, before = filled(3), filled(3).state_dict()
    state = {"enqueued": torch.tensor(4)}
    assert queue.load_state_dict(state, strict=False).missing_keys == ["rows", "row_labels"]
    assert all(torch.equal(x, before[key]) for key, x in queue.state_dict().items())


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_more_rows_than_it_holds_were_enqueued(assign):
    """The count is of all rows, those that have been overwritten included; other keys may be left out."""
    queue = filled(1)
    queue.load_state_dict(filled(6).state_dict() | {"others": 1}, strict=False, assign=assign)
    wanted = filled(6)
    for each in (wanted, queue):
        each.enqueue(ROWS, torch.arange(3))
    assert queue.filled == 4
    assert torch.equal(queue.embeddings, wanted.embeddings)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda queue: pickle.loads(pickle.dumps(queue))], ids=["deepcopy", "pickle"]
)
def test_copies_go_on_by_themselves(copied):
    queue = Queue(4, D)
    queue.enqueue(*batches(3))
    twin = copied(queue)
    twin.enqueue(*batches(3, seed=1))
    assert queue.filled == 3
    assert torch.equal(queue.embeddings, batches(3)[0].float())
    assert twin.filled == 4


def step(queue, q, c):
    loss = fastqt.info_nce_loss(q, c, negatives=queue.embeddings)
    queue.enqueue(c)
    return loss


@pytest.mark.slow
def test_a_step_compiles():
    """Once the queue is full the step is one graph, which is compiled once."""
    torch._dynamo.reset()
    queue = Queue(8, D)
    queue.enqueue(*batches(9))
    twin = copy.deepcopy(queue)
    assert queue.filled == twin.filled == 8
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=graphs)
    for seed in range(4):
        q, c = (x.float().requires_grad_() for x in batches(3, 3, seed=seed))
        found, wanted = compiled(queue, q, c), step(twin, q, c)
        torch.testing.assert_close(found, wanted)
        for x, y in zip(torch.autograd.grad(found, (q, c)), torch.autograd.grad(wanted, (q, c)), strict=True):
            torch.testing.assert_close(x, y)
        assert torch.equal(queue.embeddings, twin.embeddings)
    assert graphs.frame_count == 1


ROWS = torch.randn(3, D)
REFUSED = {
    "size": (lambda: Queue(0, D), ValueError, "size: want at least 1, got 0"),
    "dtype": (lambda: Queue(4, D, dtype=torch.int64), TypeError, "dtype: want a floating-point dtype"),
    "shape": (lambda: Queue(4, D).enqueue(ROWS[:, :4]), ValueError, r"want shape \(n, 5\), got \(3, 4\)"),
    "integers": (lambda: Queue(4, D).enqueue(ROWS.long()), TypeError, "embeddings: want a floating-point"),
    "device": (lambda: Queue(4, D, device="meta").enqueue(ROWS), ValueError, "embeddings: want device meta"),
    "no labels": (lambda: Queue(4, D, labels=True).enqueue(ROWS), ValueError, "labels: want a label for"),
    "labels": (
        lambda: Queue(4, D).enqueue(ROWS, torch.arange(3)),
        ValueError,
        "labels: want None, got labels",
    ),
    "number of labels": (
        lambda: Queue(4, D, labels=True).enqueue(ROWS, torch.arange(2)),
        ValueError,
        "labels: want 3, one a row, got 2",
    ),
    "kind of labels": (
        lambda: Queue(4, D, labels=True).enqueue(ROWS, torch.ones(3)),
        TypeError,
        "labels: want an integer dtype",
    ),
    "group": (
        lambda: Queue(4, D).enqueue(ROWS, group="all"),
        TypeError,
        "group: want a Group, a ProcessGroup",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    call, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        call()
    queue = Queue(4, D, labels=True)
    with pytest.raises(ValueError, match="labels: want 3"):
        queue.enqueue(ROWS, torch.arange(2))
    assert queue.filled == 0


def test_rows_that_are_copied_into_the_buffers_are_its_rows():
    """Of a queue that has been full and is no more, too."""
    full, short = Queue(3, 2), Queue(3, 2)
    for queue, rows in ((full, 5), (short, 1)):
        queue.enqueue(torch.randn(rows, 2))
        assert queue.filled == min(rows, 3)
    for ours, theirs in zip(full.buffers(), short.buffers(), strict=True):
        ours.copy_(theirs)
    assert torch.equal(full.embeddings, short.embeddings)
    full.enqueue(torch.randn(4, 2))
    assert full.filled == 3
