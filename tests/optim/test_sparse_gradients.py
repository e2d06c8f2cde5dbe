"""Steps of all rows, and the clipping of sparse gradients, are those of torch with dense ones."""

import pytest
import torch
from torch.nn import functional as F

from fastqt.nn.sparse_gradients import bag_sum
from fastqt.optim import Adam, clip_grad_norm_

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
        norms = clip_grad_norm_(ours, max_norm), torch.nn.utils.clip_grad_norm_(theirs, max_norm)
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
    torch.testing.assert_close(clip_grad_norm_([parameter, other], 1.0), torch.tensor(3.0).sqrt())
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
    clip_grad_norm_([ours], 1e-7)
    torch.nn.utils.clip_grad_norm_([theirs], 1e-7)
    torch.testing.assert_close(ours.grad.to_dense(), theirs.grad, rtol=1e-7, atol=0)
