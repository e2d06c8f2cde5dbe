"""Every loss over ranks is that of one process; so are options of labels, samples and tokens."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.shared.parts_on_ranks import ON_RANKS, lengths, of_labels, of_table, pairs, unmasked, windows
from tests.shared.ranks import RankError
from tests.shared.tolerances import FLOAT64, UNIT_ROUNDOFF

slow = pytest.mark.slow
each = pytest.mark.parametrize("name", ON_RANKS)
OF_16_BITS = (torch.bfloat16, torch.float16)
# A sum over ranks in another order, and what a learnt batch leaves of it.
OF_DTYPE = {
    torch.float64: FLOAT64,
    torch.float32: 3e-6,
    **{dtype: 3 * UNIT_ROUNDOFF[dtype] for dtype in OF_16_BITS},
}


def check(ranks, name, counts, dtype=torch.float64, converged=False, **group):
    found = ranks(len(counts)).run(partial(of_table, **group), name, counts, dtype, converged)
    # The gradients of several walks are rounded each.
    walks = 2 if name.startswith(("dcl_loss", "hcl_loss")) and dtype in OF_16_BITS else 1
    for rank, (value, errors) in enumerate(found):
        tolerance = (1e2 if converged else walks) * OF_DTYPE[dtype]
        assert max(errors.values()) < tolerance, f"rank {rank}: {errors}"
        if value.dim() == 0:
            assert torch.equal(value, found[0][0]), "the value has other bits on other ranks"


@each
@pytest.mark.thinned(4)
def test_uneven_shards(ranks, name):
    check(ranks, name, (5, 0, 11))
    check(ranks, name, (5, 0, 11), gradients="sum")
    check(ranks, name, (5, 0, 11), torch.bfloat16)
    check(ranks, name, (5, 0, 11), torch.float16)
    if not name.startswith("gist_"):  # whose guide is gathered
        check(ranks, name, (5, 0, 11), exchange="ring")
    check(ranks, name, (5, 3, 8), converged=True)
    check(ranks, name, (6, 9), check="always")


@each
@pytest.mark.thinned(4)
def test_equal_shards(ranks, name):
    for dtype in (torch.float64, torch.float32):
        check(ranks, name, (5, 5, 5), dtype)


@slow
@pytest.mark.parametrize("counts", [(7,), (1, 1, 4), (0, 5, 6), (8, 8), (5, 1, 7, 2), (3, 0, 0, 13)])
@each
def test_other_numbers_of_ranks(ranks, name, counts):
    check(ranks, name, counts)


@pytest.mark.parametrize("counts", [(6, 5), pytest.param((6, 0, 7), marks=slow)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("loss", [pairs, windows], ids=lambda f: f.__name__)
def test_sampled_negatives(ranks, loss, reduction, counts):
    for _, errors in ranks(len(counts)).run(loss, counts, reduction):
        assert max(errors.values()) < FLOAT64, errors


@pytest.mark.parametrize(
    ("counts", "others", "reduction", "listed"),
    [
        ([5, 5], False, "mean", True),
        pytest.param([5, 5], False, "none", False, marks=slow),
        pytest.param([6, 0, 7], False, "mean", False, marks=slow),
        pytest.param([6, 0, 7], True, "sum", True, marks=slow),
        pytest.param([1, 8, 3], True, "mean", False, marks=slow),
        pytest.param([1, 8, 3], False, "none", True, marks=slow),
    ],
)
@pytest.mark.parametrize("loss", ["supcon_loss", "ntxent_loss"])
def test_labels(ranks, loss, counts, others, reduction, listed):
    call = partial(of_labels, reduction=reduction)
    for _, errors in ranks(len(counts)).run(call, loss, counts, others, listed):
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize(("reduction", "listed"), [("mean", True), ("sum", False), ("none", True)])
def test_prefixes_of_labels(ranks, reduction, listed):
    call = partial(of_labels, reduction=reduction, matryoshka=(2, 6))
    for _, errors in ranks(3).run(call, "supcon_loss", [1, 8, 3], True, listed):
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("counts", [(4, 0, 3), (3, 3, 3)], ids=str)
def test_maxsim_without_masks(ranks, counts, reduction):
    """Documents that ranks pad to other lengths have no tokens of the padding."""
    for _, errors in ranks(len(counts)).run(partial(unmasked, reduction=reduction), counts):
        assert max(errors.values()) < 1e2 * FLOAT64, errors


def test_maxsim_equal_shards_are_padded_alike(ranks):
    with pytest.raises(RankError, match=r"tokens of documents: want 2 .* as in the calls before, got 3"):
        ranks(2).run(lengths, 3)
