"""contrastive_loss and sigmoid_loss: the oracle's value and gradients, or a refusal that names an argument.

Half of the inputs are problems of tests/shared/problems.py, made from the fuzzer's bytes. In the other half
some arguments of such a problem are replaced by whatever users may pass by mistake.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

import fastqt
from fastqt.exclusions import OfIds
from tests.fuzz.refusals import check_argument_refusal
from tests.fuzz.source import Bytes
from tests.shared.problem_check import check
from tests.shared.problems import ALL_DTYPES, Maker, Problem

MOST = 8  # rows; embeddings have as many columns at most
ARGUMENTS = (
    "queries",
    "candidates",
    "targets",
    "context_size",
    "document_ids",
    "diagonal",
    "scale",
    "bias",
    "normalize",
    "negatives",
    "row_negatives",
    "row_scores",
    "similarity",
    *["exclude"] * 3,  # which may be of more kinds than the others
    "reduction",
    "memory",
    "backend",
)
NAMES = {*ARGUMENTS, "size", "offsets", "csr_tensor", "partners", "mix", "guide"}  # and those of targets


def _csr(starts: list[int], columns: list[int], shape: tuple[int, int]) -> torch.Tensor:
    return torch.sparse_csr_tensor(
        torch.tensor(starts), torch.tensor(columns), torch.ones(len(columns)), shape, check_invariants=False
    )


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # sparse and nested tensors are in beta state
    WRONG: tuple[Any, ...] = (
        None,
        True,
        0,
        1,
        -1,
        3,
        10**9,
        2**63,
        10**400,
        0.5,
        -0.0,
        1e39,
        1e-320,
        float("nan"),
        float("inf"),
        "",
        "mean",
        "keep",
        "cpu",
        "\ud800",
        b"x",
        [],
        [[1.0, 2.0]],
        (1, 2),
        {},
        object,
        1j,
        *(torch.tensor(x) for x in (0, 1.0, -2.0, float("nan"), float("inf"), True, 1j)),
        *(torch.zeros(shape) for shape in ((0,), (0, 2), (2, 0), (2,), (1, 1), (2, 2), (3, 3), (2, 2, 2))),
        *(torch.zeros(2, 2, dtype=x) for x in (torch.int64, torch.bool, torch.complex64, torch.float16)),
        *(torch.zeros(2, dtype=x) for x in (torch.int8, torch.uint64, torch.bool)),
        torch.tensor([2**64 - 100, 2**64 - 1], dtype=torch.uint64),
        torch.zeros(2, 2, device="meta"),
        torch.zeros(2, dtype=torch.int64, device="meta"),
        torch.eye(2).to_sparse(),
        torch.eye(2).to_sparse_csr(),
        torch.eye(2).to_sparse_csc(),
        *(torch.full((2, 2), x) for x in (-1.0, float("nan"), float("inf"), 3e38, 1e-45)),
        torch.full((2, 2), 5e307, dtype=torch.float64),
        torch.full((2, 2), 1e-309, dtype=torch.float64),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        torch.quantize_per_tensor(torch.zeros(2, 2), 0.1, 0, torch.qint8),
        *(_csr(x, [0, 1], (2, 2)) for x in ([0, 1, 2], [0, 2, 1], [0, -1, 2], [0, 1, 9], [1, 1, 2])),
        *(_csr([0, 1, 2], columns, (2, 2)) for columns in ([0, 2], [0, -1], [0, 2**40])),
        fastqt.Window(3),
        fastqt.Window(offsets=[0]),
        fastqt.Diagonal(),
        fastqt.Mixed(1.0),
        fastqt.Mixed(0.5, torch.tensor([5, -1])),
        fastqt.smoothed(torch.eye(2)),
        fastqt.smoothed(fastqt.smoothed(torch.tensor([0, 1])), 1e300),
    )


IDS = torch.tensor([0, 1, 0])
# Filters that are right each for itself, of which a mistake may be one, or two.
FILTERS: tuple[Any, ...] = (
    fastqt.Margin(0.1),
    fastqt.Margin(-2, "relative"),
    fastqt.Above(torch.zeros(3)),
    *(kind(*ids) for kind in OfIds.__subclasses__() for ids in ((IDS,), (IDS[:2], IDS), (IDS,) * 3)),
    fastqt.Same(torch.zeros(0, dtype=torch.int64)),
    fastqt.Guide(torch.ones(2, 2), torch.ones(3, 2)),
    fastqt.Guide(torch.ones(3, 1), torch.ones(3, 1), negatives=torch.ones(2, 1)),
    torch.zeros(3, 3, dtype=torch.bool),
)


def run_contrastive_loss(data: bytes) -> bool:
    source = Bytes(data)
    # These come first, so that the same bytes mean the same mistake, however problems are made.
    mistakes = {source.choice(ARGUMENTS): source.choice(WRONG) for _ in range(source.integer(0, 3) - 1)}
    if "exclude" in mistakes and source.flag():
        mistakes["exclude"] = [source.choice(FILTERS), source.choice((*FILTERS, *WRONG))]
    problem = Maker(source, ALL_DTYPES, MOST).problem
    if not mistakes:
        return check(problem)
    problem.arguments |= {name: problem.arguments[name].detach().requires_grad_() for name in problem.needs}
    problem.arguments |= mistakes
    return _computes(problem)


def _computes(problem: Problem) -> bool:
    """Whether a call with any arguments computes a loss of the right shape, and its gradients."""
    loss = fastqt.sigmoid_loss if problem.link == "sigmoid" else fastqt.contrastive_loss
    try:
        value = loss(**problem.arguments)
    except (ValueError, TypeError) as error:
        check_argument_refusal(error, NAMES)
        return False
    rows = len(problem.arguments["queries"])
    assert value.shape == ((rows,) if problem.arguments["reduction"] == "none" else ())
    if value.requires_grad:
        value.sum().backward()
    return True
