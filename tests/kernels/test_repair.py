"""Repairs, interpreted: rows whose sums have overflowed get another shift and mean the same."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from fastqt.engines.triton.operands import Operands
from fastqt.engines.triton.softmax import Softmax
from fastqt.kernels import row_stats
from fastqt.kernels.scores import exp_scores
from fastqt.problem import Needs, Problem
from fastqt.targets import NoTargets, Window
from tests.shared.tolerances import FLOAT32, relative

N, K, D = 37, 20, 5
CHUNK = slice(16, N)  # whose last block of rows is not whole
FLAGGED = {
    "of all blocks": [20, 31, 32, 36],
    "all": list(range(16, N)),
}


def problem(name: str) -> Problem:
    generator = torch.Generator().manual_seed(0)
    queries, candidates, row_negatives = (torch.randn(N, D, generator=generator) for _ in range(3))
    negatives = torch.randn(K, D, generator=generator)
    plain = Problem(
        *(queries, candidates, None, None, 1.3, Window(1).rows(N, N, queries.device)),
        *("keep", None, None, None, "fast"),
    )
    groups = torch.randint(5, (2, N), generator=generator)
    everything = replace(
        plain,
        negatives=negatives,
        row_negatives=row_negatives,
        diagonal="zero",
        query_groups=groups[0],
        candidate_groups=groups[1],
        bias=torch.randn(N, generator=generator),
    )
    everything.thresholds = torch.randn(N, generator=generator)
    scores = replace(everything, row_negatives=None, row_scores=torch.randn(N, generator=generator))
    mask = torch.rand(N, N, generator=generator) < 0.2
    mask[torch.arange(N - 1), torch.arange(1, N)] = mask[torch.arange(1, N), torch.arange(N - 1)] = False
    masked = replace(plain, diagonal="exclude", mask=mask)
    masked.mask[30] = True  # a row of which nothing is left
    return {
        "plain": plain,
        "everything": everything,
        "row scores": scores,
        "mask": masked,
        "logsumexp": replace(
            masked, targets=NoTargets().rows(N, N, queries.device), link="log_sum_exp", negatives=negatives
        ),
    }[name]


class Watched(Softmax):
    """A link that keeps the sums from which it has concluded rows."""

    def conclude_rows(self, rows, tile_row_sums, E=None):
        self.sums = tile_row_sums.clone()
        super().conclude_rows(rows, tile_row_sums, E)


@dataclass
class Known:
    """What is known of a chunk of rows."""

    E: torch.Tensor  # (rows, columns)
    shift: torch.Tensor  # (N,), to base 2
    of_rows: list[torch.Tensor]  # (N,)
    of_targets: torch.Tensor

    def copy(self) -> "Known":
        return Known(
            self.E.clone(), self.shift.clone(), [x.clone() for x in self.of_rows], self.of_targets.clone()
        )


def concluded(p: Problem) -> tuple[Watched, Known]:
    """A link that has concluded the chunk, and what it knows, of which repairs change the memory."""
    link = Watched(Operands(p, 1 / N, Needs(queries=True)))
    width = link.operands.width
    E = p.queries.new_full((CHUNK.stop - CHUNK.start, width + 3), math.nan)
    link.whole_rows(CHUNK, E)
    state, cells = link.scores.state, link.scores.cells
    of_rows = [state.loss, state.logsumexp, state.mass]
    if cells.row_negatives is not None:
        of_rows.append(cells.row_negatives.coefficients)
    of_targets = cells.coefficients[cells.starts[CHUNK.start] :]
    known = Known(E[:, :width], state.row_shift_log2, of_rows, of_targets)
    return link, known


def repaired(link: Watched, known: Known, flagged: list[int]) -> None:
    """Concludes the chunk once more, from sums of which those of some rows have overflowed."""
    sums = link.sums.clone()
    sums[:, [row - CHUNK.start for row in flagged]] = math.inf
    link.conclude_rows(CHUNK, sums, known.E._base)
    assert link.scores.state.shift_overflowed[CHUNK].nonzero().flatten().tolist() == [
        row - CHUNK.start for row in flagged
    ]


@pytest.mark.parametrize("flagged", FLAGGED.values(), ids=FLAGGED)
@pytest.mark.parametrize("name", ["plain", "everything", "row scores", "mask", "logsumexp"])
@pytest.mark.thinned(3)
def test_a_repair_changes_the_shift_and_nothing_that_the_row_means(name, flagged):
    p = problem(name)
    link, known = concluded(p)
    before = known.copy()
    repaired(link, known, flagged)
    others = torch.ones(N, dtype=torch.bool)
    others[flagged] = False
    for a, b in ((known.shift, before.shift), *zip(known.of_rows, before.of_rows, strict=True)):
        assert torch.equal(a[CHUNK][others[CHUNK]], b[CHUNK][others[CHUNK]])
    assert torch.equal(known.E[others[CHUNK]], before.E[others[CHUNK]])
    mine = torch.tensor([i for i in flagged if before.shift[i].isfinite()], dtype=torch.int64)
    if name == "logsumexp":  # of a row without any cell that counts
        mine = mine[before.of_rows[1][mine].isfinite()]
    at = mine - CHUNK.start
    for a, b in zip(known.of_rows, before.of_rows, strict=True):
        assert relative(a[mine], b[mine]) < FLOAT32
    assert relative(known.of_targets, before.of_targets) < FLOAT32
    moved = (before.shift - known.shift)[mine]
    expected = before.E[at].double() * moved.double().exp2()[:, None]
    assert relative(known.E[at], expected) < FLOAT32
    # The shift is the largest score, rounded up.
    assert (known.shift[mine] == known.shift[mine].round()).all()
    largest = torch.maximum(
        known.E[at].amax(1), (link.scores.state.exact_max_log2 - known.shift)[mine].exp2()
    )
    assert ((largest > 0.49) & (largest <= 1)).all()


@pytest.mark.parametrize("name", ["everything", "logsumexp"])
@pytest.mark.thinned(2)
def test_the_result_is_the_same_however_many_programs_share_a_block(name, monkeypatch):
    found = []
    for count in (1, 7, 100):
        monkeypatch.setattr(row_stats, "multiprocessors", lambda _, count=count: count)
        link, known = concluded(problem(name))
        repaired(link, known, FLAGGED["of all blocks"])
        found.append(known)
    for known in found[1:]:
        assert torch.equal(known.E, found[0].E)
        for a, b in zip(known.of_rows, found[0].of_rows, strict=True):
            assert torch.equal(a[CHUNK], b[CHUNK])


def test_what_is_stored_is_rounded_once():
    """As if it had been computed against the row's shift at once; only some last digits of exp differ."""
    plain = problem("plain")
    halves = (x.bfloat16() for x in (plain.queries, plain.candidates))
    link, known = concluded(replace(plain, **dict(zip(("queries", "candidates"), halves, strict=True))))
    repaired(link, known, FLAGGED["all"])
    at_once = torch.empty_like(known.E)
    tile = link.scores.tile(link.operands.blocks[0], CHUNK)
    exp_scores(
        *(tile, link.operands.p.queries, link.operands.scale, known.shift, link.scores.config),
        exponentials=at_once,
    )
    assert (at_once != known.E).double().mean() < 0.01
