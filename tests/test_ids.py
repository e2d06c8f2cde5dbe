"""Integers of all dtypes are taken as int64, where that holds them."""

import pytest
import torch

import fastqt
from fastqt.checks import INTEGERS
from fastqt.ids import as_ids
from tests.shared.calls import F, G


@pytest.mark.parametrize("dtype", sorted(INTEGERS, key=str))
def test_ids_of_all_integer_dtypes_are_taken(dtype):
    assert as_ids("ids", torch.tensor([3, 0, 5]).to(dtype)).tolist() == [3, 0, 5]


def test_unsigned_ids_that_int64_does_not_hold_are_refused():
    """2**64 - 100 wraps to -100, which means that a row has no target."""
    ids = torch.tensor([0, 2**64 - 100], dtype=torch.uint64)
    for targets in (ids, fastqt.Diagonal()):
        groups = {} if targets is ids else {"query_groups": ids, "candidate_groups": ids}
        with pytest.raises(ValueError, match=r"^(targets|query_groups): want values below 2\*\*63"):
            fastqt.contrastive_loss(F[:2], G[:2], targets, diagonal="keep", **groups)
    assert as_ids("ids", torch.tensor([2**63 - 1], dtype=torch.uint64)).item() == 2**63 - 1
