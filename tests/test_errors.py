"""Bad arguments are refused with a message that names the argument, what was wanted and what came."""

import pytest
import torch

import fastqt
from fastqt.engines import ops, plans
from tests.shared.tolerances import FLOAT64

Q = torch.randn(6, 4)
C = torch.randn(6, 4)
X = torch.zeros(6, 6, dtype=torch.bool)

REFUSED = {
    "queries not a tensor": ({"queries": [[1.0]]}, TypeError, r"queries: want a tensor, got list"),
    "queries of rank 1": ({"queries": Q[0]}, ValueError, r"queries: want shape \(rows, D\), got \(4,\)"),
    "candidates of rank 3": ({"candidates": C[None]}, ValueError, r"candidates: .* got \(1, 6, 4\)"),
    "another D": (
        {"candidates": C[:, :3]},
        ValueError,
        r"candidates: want D=4 columns as queries has, got 3",
    ),
    "another D of negatives": ({"negatives": C[:, :3]}, ValueError, r"negatives: want D=4"),
    "another dtype": ({"candidates": C.double()}, TypeError, r"candidates: want dtype torch.float32"),
    "integers": (
        {"queries": Q.long()},
        TypeError,
        r"queries: want a floating-point dtype .* got torch.int64",
    ),
    "a tensor without values": ({"candidates": C.to("meta")}, ValueError, r"candidates: want .* values, got"),
    "no queries": ({"queries": Q[:0]}, ValueError, r"queries: want at least one row .* \(0, 4\)"),
    "no candidates": ({"candidates": C[:0]}, ValueError, r"candidates: want at least one row"),
    "no columns": ({"queries": Q[:, :0]}, ValueError, r"queries: want at least one row and one column"),
    "row negatives short": ({"row_negatives": C[:5]}, ValueError, r"row_negatives: .* N=6 queries, got 5"),
    "context 0": ({"context_size": 0}, ValueError, r"context_size.*: want an integer >= 1, got 0"),
    "context 1.5": ({"context_size": 1.5}, ValueError, r"context_size.*: want an integer >= 1, got 1.5"),
    "context N": ({"context_size": 6}, ValueError, r"context_size\): want a reach .* N=6 .* got 6"),
    "context far beyond memory": (
        {"context_size": 10**12},
        ValueError,
        r"context_size\): .* got 10{12}",
    ),
    "context True": ({"context_size": True}, ValueError, r"context_size\): want an integer >= 1, got True"),
    "context beside targets": (
        {"targets": fastqt.Window(2), "context_size": 2},
        ValueError,
        r"context_size: want it in Window\(...\) when targets are given",
    ),
    "offsets beyond the batch": (
        {"targets": fastqt.Window(offsets=[1, -6])},
        ValueError,
        r"offsets: want a reach of fewer rows .* got 6",
    ),
    "diagonal": ({"diagonal": "none"}, ValueError, r"diagonal: want one of 'zero', .* got 'none'"),
    "reduction": ({"reduction": "max"}, ValueError, r"reduction: want one of 'mean', .* got 'max'"),
    "memory": ({"memory": "none"}, ValueError, r"memory: want one of 'fast', 'low', got 'none'"),
    "memory of few bytes": ({"memory": 64}, ValueError, r"memory: want at least 16777216 bytes, got 64"),
    "memory of no integer": (
        {"memory": 1e9},
        TypeError,
        r"memory: want 'fast' or 'low', or a number of bytes as an integer, got 1000000000.0",
    ),
    "memory as a flag": ({"memory": True}, TypeError, r"memory: want 'fast' or 'low', .*, got True"),
    "backend": (
        {"backend": "cudnn"},
        ValueError,
        r"backend: want one of cpu, cuda, triton, torch, reference, got 'cudnn'",
    ),
    "scale nan": (
        {"scale": float("nan")},
        ValueError,
        r"scale: want a finite number, .* got nan",
    ),
    "scale inf tensor": ({"scale": torch.tensor(torch.inf)}, ValueError, r"scale: want a finite number"),
    "scale 0": ({"scale": 0}, ValueError, r"scale: want a positive number, .* 1 / temperature, got 0"),
    "scale negative": ({"scale": -0.05}, ValueError, r"scale: want a positive number, .* got -0.05"),
    "scale beyond float32": ({"scale": 1e39}, ValueError, r"scale: want .* float32 holds, .* got 1e\+39"),
    "bias beyond float32": ({"bias": -1e39}, ValueError, r"bias: want .* float32 holds, .* got -1e\+39"),
    "scale text": ({"scale": "20"}, TypeError, r"scale: want a number or a 0-d tensor, got str"),
    "scale vector": ({"scale": torch.ones(1)}, ValueError, r"scale: .* 0-d .* got shape \(1,\)"),
    "document ids of rank 2": ({"document_ids": X.long()}, ValueError, r"document_ids: want a 1-D"),
    "document ids as floats": ({"document_ids": Q[:, 0]}, TypeError, r"document_ids: want an integer dtype"),
    "document ids short": (
        {"document_ids": torch.zeros(5, dtype=torch.long)},
        ValueError,
        r"document_ids: .* N=6 queries",
    ),
    "document ids beside targets": (
        {"targets": fastqt.Window(), "document_ids": torch.zeros(6, dtype=torch.long)},
        ValueError,
        r"document_ids: want it in Window",
    ),
    "targets of another kind": (
        {"targets": "diagonal"},
        TypeError,
        r"targets: want fastqt targets or a tensor",
    ),
    "targets of rank 3": ({"targets": torch.zeros(1, 6, 6)}, ValueError, r"targets: want \(N,\) .* got 3-D"),
    "targets of another shape": (
        {"targets": torch.zeros(6, 5)},
        ValueError,
        r"targets: want shape \(N, M\) = \(6, 6\), got \(6, 5\)",
    ),
    "target matrix of integers": ({"targets": X.long()}, TypeError, r"targets: want a floating-point"),
    "indices short": ({"targets": torch.arange(5)}, ValueError, r"targets: want a class index .* got 5"),
    "indices as floats": ({"targets": Q[:, 0]}, TypeError, r"targets: want an integer dtype"),
    "index outside": (
        {"targets": torch.tensor([1, 2, 3, 4, 5, 6])},
        ValueError,
        r"targets: row 5's target column 6 is outside the M=6 candidates",
    ),
    "index negative": (
        {"targets": torch.tensor([1, -1, 3, 4, 5, 0])},
        ValueError,
        r"targets: row 1's target column -1 is outside",
    ),
    "index on the diagonal": (
        {"targets": torch.tensor([1, 2, 2, 4, 5, 0])},
        ValueError,
        r"targets: row 2's target column 2 is on the diagonal that diagonal='zero' replaces",
    ),
    "matrix on the diagonal": (
        {"targets": torch.eye(6), "diagonal": "exclude"},
        ValueError,
        r"targets: row 0's target column 0 is on the diagonal that diagonal='exclude' replaces",
    ),
    "negative weight": (
        {"targets": -torch.eye(6).roll(1, 1)},
        ValueError,
        r"targets: row 0's target column 1 has a weight that is negative",
    ),
    "infinite weight": (
        {"targets": torch.where(torch.eye(6).roll(1, 1) > 0, torch.inf, 0.0)},
        ValueError,
        r"targets: row 0's target column 1 has an infinite weight",
    ),
    "infinite sum of weights": (
        {"targets": torch.full((6, 6), 1e308, dtype=torch.float64).to_sparse_csr(), "diagonal": "keep"},
        ValueError,
        r"targets: row 0's target column \d has an infinite weight, or makes the sum",
    ),
    "masked target": (
        {"mask": torch.eye(6).roll(1, 1).bool()},
        ValueError,
        r"targets: row 0's target column 1 is a cell that mask excludes",
    ),
    "diagonal targets": (
        {"targets": fastqt.Diagonal()},
        ValueError,
        r"targets: Diagonal\(\) .*diagonal='keep'",
    ),
    "offset 0": ({"targets": fastqt.Window(offsets=[0, 1])}, ValueError, r"targets: Window has offset 0"),
    "smoothed and exclude": (
        {"targets": fastqt.smoothed(fastqt.Window()), "diagonal": "exclude"},
        ValueError,
        r"targets: smoothed targets .* diagonal='exclude' forbids",
    ),
    "smoothed and mask": (
        {"targets": fastqt.smoothed(fastqt.Window()), "mask": X},
        ValueError,
        r"mask: want None",
    ),
    "one group": ({"query_groups": torch.arange(6)}, ValueError, r"candidate_groups: want it together"),
    "groups short": (
        {"query_groups": torch.arange(6), "candidate_groups": torch.arange(5)},
        ValueError,
        r"candidate_groups: want 6 ids, got 5",
    ),
    "mask of floats": ({"mask": X.float()}, TypeError, r"mask: want dtype torch.bool"),
    "mask of another shape": (
        {"mask": X[:5]},
        ValueError,
        r"mask: want shape \(N, M\) = \(6, 6\), got \(5, 6\)",
    ),
}


@pytest.mark.parametrize("default_backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, default_backend, monkeypatch):
    monkeypatch.setenv("FASTQT_BACKEND", default_backend)
    arguments, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        fastqt.contrastive_loss(**{"queries": Q, "candidates": C, **arguments})


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: fastqt.Window(0), ValueError, r"size .*: want an integer >= 1, got 0"),
        (lambda: fastqt.Window(2, offsets=[1]), ValueError, r"size .*: want None beside offsets, got 2"),
        (
            lambda: fastqt.Window(weights=[1e-309, 1.0]),
            ValueError,
            r"weights: want a ratio of at least 1e-250 .* got 1e-309 and 1.0",
        ),
        (lambda: fastqt.Window(weights=[10**400, 1]), ValueError, r"weights: want one positive number"),
        (lambda: fastqt.Window(weights=[float("nan"), 1]), ValueError, r"weights: want one positive number"),
        (lambda: fastqt.Window(offsets=[]), ValueError, r"offsets: want distinct integers, at least one"),
        (lambda: fastqt.Window(offsets=[1, 1]), ValueError, r"offsets: want distinct integers"),
        (lambda: fastqt.Window(weights=[1.0]), ValueError, r"weights: .* 2 offsets, got \[1.0\]"),
        (lambda: fastqt.Window(weights=[1.0, -1.0]), ValueError, r"weights: want one positive number"),
        (lambda: fastqt.Sparse(torch.eye(2)), ValueError, r"csr_tensor: .* torch.sparse_csr"),
        (
            lambda: fastqt.Sparse(torch.eye(2).long().to_sparse_csr()),
            TypeError,
            r"csr_tensor: want a floating",
        ),
        (
            lambda: fastqt.smoothed(fastqt.Window(), 0),
            ValueError,
            r"smoothing: want a positive number, .* got 0",
        ),
        (
            lambda: fastqt.smoothed(fastqt.Window(), 1e-309),
            ValueError,
            r"smoothing: want a positive number, at least 1e-290, got 1e-309",
        ),
        (lambda: fastqt.Sparse([[1.0]]), TypeError, r"csr_tensor: want a tensor, got list"),
    ],
)
def test_targets_refuse(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda a, b: fastqt.info_nce_loss(a, b), r"candidates: want at least N=6 rows, .* of queries"),
        (lambda a, b: fastqt.siglip_loss(a, b, scale=1.0, bias=0.0), r"b: want at least N=6 rows, .* of a"),
        (lambda a, b: fastqt.clip_loss(a, b, scale=1.0), r"b: want a row for each of the 6 rows of a"),
    ],
)
def test_a_row_without_its_pair_is_refused(loss, message, rows):
    with pytest.raises(ValueError, match=f"^{message}, got {rows}$"):
        loss(Q, C[:rows])
    assert fastqt.contrastive_loss(Q, C[:rows], fastqt.Diagonal(), diagonal="keep").isfinite()


def test_numbers_beyond_float32_are_taken_with_float64():
    loss = fastqt.contrastive_loss(Q.double() * 1e-39, C.double(), scale=1e39)
    assert loss.item() == pytest.approx(fastqt.contrastive_loss(Q.double(), C.double()).item(), rel=FLOAT64)


def test_an_unknown_environment_is_named(monkeypatch):
    monkeypatch.setenv("FASTQT_BACKEND", "gpu")
    message = "FASTQT_BACKEND: want one of cpu, cuda, triton, torch, reference, got 'gpu'"
    with pytest.raises(ValueError, match=message):
        fastqt.contrastive_loss(Q, C)


def test_without_the_extension(monkeypatch, capsys):
    """The reference engine computes everything. Asking for the C++ engine is an error that says why."""
    expected = fastqt.contrastive_loss(Q.double(), C.double()).item()
    monkeypatch.setattr(plans, "known", {})
    monkeypatch.setattr(ops, "native_error", "the extension fastqt._C is not built")
    assert fastqt.contrastive_loss(Q.double(), C.double()).item() == pytest.approx(expected, rel=FLOAT64)
    with pytest.raises(ValueError, match=r"backend: 'cpu' is not available: .*not built"):
        fastqt.contrastive_loss(Q, C, backend="cpu")
    fastqt.show_config()
    out = capsys.readouterr().out
    assert "not built" in out
    assert torch.__version__ in out


def test_show_config_of_a_whole_build(capsys):
    fastqt.show_config()
    out = capsys.readouterr().out
    assert f"fastqt   {fastqt.__version__}" in out
    assert "not built" not in out
