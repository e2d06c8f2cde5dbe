"""Optimisers of sparse gradients take the steps of torch's, row by row, and clip as torch does."""

import pytest
import torch
from torch.nn import functional as F

from fastqt.nn.sparse_gradients import bag_sum
from fastqt.sentences.train.optim import Adam, RowAdam, clip_gradients
from tests.shared.tolerances import FLOAT64, relative

V, D = 40, 6


def bags(seed):
    """Random token ids in nine bags, some of them empty, and the gradient of a loss by the bags' sums."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 7, (9,), generator=generator)
    ids = torch.randint(0, V, (int(lengths.sum()),), generator=generator)
    upstream = torch.randn(9, D, generator=generator, dtype=torch.float64)
    return ids, lengths.cumsum(0) - lengths, upstream


def test_bag_sum_refuses_a_second_derivative():
    ids, offsets, upstream = bags(0)
    weight = torch.rand(V, D, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(bag_sum(weight, ids, offsets), weight, upstream, create_graph=True)


def dense_lookup(weight, ids, offsets):
    return F.embedding_bag(ids, weight, offsets, mode="sum")


def sparse_lookup(weight, ids, offsets):
    """torch's own sparse gradient, in which a row occurs as often as its token."""
    return F.embedding_bag(ids, weight, offsets, mode="sum", sparse=True)


@pytest.mark.parametrize("lookup", [bag_sum, sparse_lookup])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_many_steps_agree_with_torch(lookup, max_norm):
    start = torch.rand(V, D, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
    ours, theirs = ([torch.nn.Parameter(tensor.clone()) for tensor in start] for _ in range(2))
    our_adam, their_adam = Adam(ours, lr=0.01), torch.optim.Adam(theirs, lr=0.01)
    for seed in range(30):
        ids, offsets, upstream = bags(seed)
        for (table, dense), adam, read in ((ours, our_adam, lookup), (theirs, their_adam, dense_lookup)):
            adam.zero_grad()
            ((read(table, ids, offsets) * upstream).sum() * dense.sum()).backward()
        norms = clip_gradients(ours, max_norm), torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        torch.testing.assert_close(*norms)
        our_adam.step()
        their_adam.step()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)


def test_a_parameter_without_gradient_is_not_changed():
    parameter = torch.nn.Parameter(torch.ones(3))
    other = torch.nn.Parameter(torch.ones(3))
    other.sum().backward()
    adam = Adam([parameter, other], lr=0.1)
    torch.testing.assert_close(clip_gradients([parameter, other], 1.0), torch.tensor(3.0).sqrt())
    adam.step()
    assert torch.equal(parameter, torch.ones(3))
    torch.testing.assert_close(other.detach(), torch.full((3,), 0.9))


@pytest.mark.parametrize("lookup", [bag_sum, dense_lookup])
@pytest.mark.parametrize("size", [1e-7, 0.0])
def test_tiny_gradients_are_clipped_as_in_torch(lookup, size):
    """At a tiny norm, the constant that prevents the division 0 / 0 changes the result."""
    ids, offsets, upstream = bags(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(V, D, dtype=torch.float64)) for _ in range(2))
    (lookup(ours, ids, offsets) * upstream * size).sum().backward()
    (dense_lookup(theirs, ids, offsets) * upstream * size).sum().backward()
    clip_gradients([ours], 1e-7)
    torch.nn.utils.clip_grad_norm_([theirs], 1e-7)
    torch.testing.assert_close(ours.grad.to_dense(), theirs.grad, rtol=1e-7, atol=0)


@pytest.mark.parametrize("lookup", [bag_sum, sparse_lookup])
def test_each_row_takes_the_steps_of_its_own_adam(lookup):
    """The oracle has a torch Adam for each row, which takes a step only when the row has a gradient."""
    start = torch.rand(V, D, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
    table, dense = (torch.nn.Parameter(tensor.clone()) for tensor in start)
    ours = RowAdam([table, dense], lr=0.01)
    rows = [torch.nn.Parameter(row.clone()) for row in start[0]]
    dense_row = torch.nn.Parameter(start[1].clone())
    theirs = [torch.optim.Adam([parameter], lr=0.01) for parameter in (*rows, dense_row)]
    counts = torch.zeros(V)
    for seed in range(30):
        ids, offsets, upstream = bags(seed)
        ids %= 1 + seed  # the last rows never have a gradient, and the first ones often
        ((lookup(table, ids, offsets) * upstream).sum() * dense.sum()).backward()
        wanted = dense_lookup(torch.stack(list(rows)), ids, offsets)
        ((wanted * upstream).sum() * dense_row.sum()).backward()
        named = ids.unique().tolist()
        counts[named] += 1
        before = table.detach().clone()
        ours.step()
        assert table.grad is None
        still = torch.ones(V, dtype=torch.bool).index_fill(0, torch.tensor(named), False)
        assert torch.equal(table[still], before[still])
        for row in (*named, V):
            theirs[row].step()
        ours.zero_grad()
        for optimizer in theirs:
            optimizer.zero_grad()
        assert relative(table, torch.stack(list(rows))) < FLOAT64
        assert relative(dense, dense_row) < FLOAT64
    assert torch.equal(ours.state[table]["step"], counts)
    assert counts.unique().numel() > 5
