"""MaxSim over the documents of all ranks has the value and gradients of one process with the whole batch."""

from dataclasses import replace

import pytest
import torch

from tests.shared.maxsim_on_ranks import Case, compare, lengths
from tests.shared.ranks import RankError
from tests.shared.tolerances import FLOAT32, FLOAT64, UNIT_ROUNDOFF

UNEVEN = Case(counts=(4, 0, 3), documents=(9, 2, 3), tokens=(3, 5, 4))
EVEN = Case(counts=(3,) * 3, documents=(5,) * 3, tokens=(4,) * 3)


def check(ranks, case: Case, tolerance: float) -> None:
    for rank, errors in enumerate(ranks(len(case.counts)).run(compare, case)):
        assert max(errors.values()) < tolerance, f"rank {rank}: {errors}"


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"reduction": "sum"}])
@pytest.mark.parametrize("case", [UNEVEN, EVEN], ids=["uneven", "even"])
def test_is_one_process(ranks, case, options):
    check(ranks, replace(case, options=options), FLOAT64)


@pytest.mark.parametrize("case", [UNEVEN, EVEN], ids=["uneven", "even"])
def test_without_masks(ranks, case):
    """Documents that ranks pad to other lengths have no tokens of the padding."""
    check(ranks, replace(case, masked=False, group={"gradients": "sum"}), FLOAT64)


def test_learnt_and_in_other_dtypes(ranks):
    check(ranks, replace(UNEVEN, converged=True), 1e2 * FLOAT64)
    check(ranks, replace(UNEVEN, dtype=torch.float32), FLOAT32)
    check(ranks, replace(UNEVEN, dtype=torch.bfloat16), 3 * UNIT_ROUNDOFF[torch.bfloat16])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(counts=(4,), documents=(6,), tokens=(3,)),
        Case(counts=(1, 5), documents=(4, 5), tokens=(3, 3)),
        Case(counts=(2,) * 4, documents=(2,) * 4, tokens=(6,) * 4),
        Case(counts=(3, 1, 0, 2), documents=(3, 1, 4, 5), tokens=(1, 2, 4, 3)),
    ],
)
def test_other_numbers_of_ranks(ranks, case):
    check(ranks, case, FLOAT64)
    check(ranks, replace(case, group={"check": "always"}), FLOAT64)


def test_equal_shards_are_padded_alike(ranks):
    with pytest.raises(RankError, match=r"tokens of documents: want 2 .* as in the calls before, got 3"):
        ranks(2).run(lengths, 3)
