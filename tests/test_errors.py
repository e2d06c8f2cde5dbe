"""Bad arguments are refused in words: the argument, what is wanted, what came, and what users can do."""

import inspect

import pytest
import torch

import fastqt
from fastqt import Diagonal, Margin, Same, Sparse, Window, Within, nn, smoothed
from fastqt.engines import ops, plans
from tests.shared.tolerances import FLOAT64

F, G = torch.randn(2, 8, 16)
OWN = torch.arange(8)
X = torch.zeros(8, 8, dtype=torch.bool)
NEXT = torch.eye(8).roll(1, 1)  # as targets, the next candidate
HUGE = torch.full((8, 8), 1e308, dtype=torch.float64)


def loss(queries=F, candidates=G, targets=None, **options):
    return lambda: fastqt.contrastive_loss(queries, candidates, targets, **options)


# Typical mistakes of users: a call, and what its message begins with, wants, got, and says that helps.
MISTAKES = [
    (
        lambda: fastqt.info_nce_loss(F, G, temperature=0.05),
        "temperature: no option of info_nce_loss; want scale",
    ),
    (
        lambda: nn.InfoNCELoss(temperature=0.05),
        "temperature: no option of InfoNCELoss; want .* 1 / temperature",
    ),
    (loss(candidates=G[:, :12]), "candidates: want D=16 columns as queries has, got 12"),
    (
        lambda: fastqt.info_nce_loss(F, G[:5]),
        "candidates: want at least N=8 rows, one for each row of queries, got 5",
    ),
    (loss(F[0]), r"queries: want shape \(rows, D\), got \(16,\).* make a row of it by unsqueeze\(0\)"),
    (
        loss(F @ G.T, OWN),
        r"candidates: want shape \(rows, D\), got \(8,\).* give embeddings, not scores and labels",
    ),
    (
        lambda: fastqt.simcse_loss(F[None], G[None]),
        r"z1: want .*\(rows, D\), got \(1, 8, 16\).* flatten .* or pool over",
    ),
    (loss(F[:0], G[:0]), r"queries: want at least one row.*, got shape \(0, 16\).* skip such a batch"),
    (
        loss(F.long(), G.long()),
        r"queries: want a floating-point dtype.*, got torch\.int64.* convert it by float\(\)",
    ),
    (loss(F.numpy(), G.numpy()), "queries: want a tensor, got ndarray.* convert it by torch.as_tensor"),
    (
        lambda: fastqt.clip_loss(F, G.half(), scale=20.0),
        r"b: want dtype torch.float32 as a, got torch\.float16.* by to\(\)",
    ),
    (
        loss(F, G.to("meta")),
        "candidates: want a tensor with values.*on the device meta.* load the model's weights",
    ),
    (
        lambda: fastqt.supcon_loss(F, OWN.float()),
        r"labels: want an integer dtype.*torch\.float32.*by long\(\)",
    ),
    (
        lambda: fastqt.ntxent_loss(F, OWN[:, None]),
        r"labels: want a 1-D tensor of integers.*\(8, 1\).* by flatten\(\)",
    ),
    (
        lambda: fastqt.ntxent_loss(F, G),
        r"labels: want a 1-D .*\(8, 16\).*torch\.cat\(.*torch\.arange.*repeat\(2\)",
    ),
    (lambda: fastqt.supcon_loss(F, OWN[:5]), "labels: want one .*for each of the 8 embeddings.*got 5"),
    (
        loss(F, G, Diagonal()),
        r"targets: Diagonal\(\) .*on the diagonal.* diagonal='zero'.* use diagonal='keep'",
    ),
    (loss(F, G, torch.eye(5), diagonal="keep"), r"targets: want shape \(N, M\) = \(8, 8\), got \(5, 5\)"),
    (
        lambda: Sparse(torch.eye(8).to_sparse()),
        r"csr_tensor: want .*sparse_csr.*got .*sparse_coo.*to_sparse_csr\(\)",
    ),
    (loss(scale=float("nan")), "scale: want a finite number, which is 1 / temperature, got nan"),
    (loss(scale=-20.0), r"scale: want a positive number, which is 1 / temperature, got -20\.0"),
    (loss(scale=torch.ones(1)), r"scale: want a number or a 0-d tensor, .*got shape \(1,\).* by squeeze\(\)"),
    (loss(reduction="avg"), "reduction: want one of 'mean', 'sum', 'none', 'mean_of_targets', got 'avg'"),
    (
        loss(backend="cudnn"),
        r"backend: want one of cpu, cuda, .*got 'cudnn'.*show_config\(\) says which work",
    ),
    (loss(backend="cuda"), "backend: 'cuda' is not available: .*without one the best that works is taken"),
    (loss(document_ids=OWN[:5]), "document_ids: want one id for each of N=8 queries, .*got 5 ids"),
    (loss(context_size=0), "context_size: want at least 1, got 0"),
    (
        loss(context_size=8),
        r"size \(context_size\): want a reach of fewer rows .*got 8.* smaller one, or a larger batch",
    ),
    (loss(negatives=G[:, :12]), "negatives: want D=16 columns as queries has, got 12"),
    (
        loss(exclude=torch.zeros(8, 8)),
        r"exclude: want dtype torch\.bool.*, got torch\.float32.* convert it by bool\(\)",
    ),
    (loss(group="world"), r"group: want a Group, a ProcessGroup.*got str.*torch\.distributed\.group\.WORLD"),
    (loss(memory=1024), "memory: want at least 16777216 bytes, got 1024"),
    (
        lambda: fastqt.multiple_negatives_ranking_loss(F, G, directions="query_to_doc"),
        "directions: want a sequence of names.*got 'query_to_doc'.* put the name into a list",
    ),
    (
        lambda: nn.InfoNCELoss()(F, G, reduction="sum"),
        "reduction: want it when InfoNCELoss is made, not in a call",
    ),
    (
        lambda: nn.ContrastiveLoss(document_ids=OWN),
        "document_ids: no option of ContrastiveLoss, want it in each call",
    ),
    (
        lambda: fastqt.clip_loss(F, G, scale=1.0, reducton="sum"),
        "reducton: no option of clip_loss; the nearest is reduction",
    ),
    (lambda: nn.SimCSELoss(reducton="sum"), "reducton: no option of SimCSELoss; the nearest is reduction"),
]


@pytest.mark.parametrize(("call", "words"), MISTAKES, ids=[words[:30] for _, words in MISTAKES])
def test_the_message_says_what_to_do(call, words):
    with pytest.raises((TypeError, ValueError), match=f"^{words}") as raised:
        call()
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 200


# Refusals by the kind of error and their words.
TYPE, VALUE = TypeError, ValueError
REFUSED = [
    (loss(candidates=G[:0]), VALUE, "candidates: want at least one row"),
    (loss(F[:, :0]), VALUE, "queries: want at least one row and one column"),
    (loss(candidates=G[None]), VALUE, r"candidates: .* got \(1, 8, 16\)"),
    (loss(row_negatives=G[:5]), VALUE, "row_negatives: .* N=8 queries, got 5"),
    (loss(context_size=1.5), TYPE, "context_size: want an integer, got 1.5"),
    (loss(context_size=True), TYPE, "context_size: want an integer, got True"),
    (loss(context_size=10**12), VALUE, r"size .*got 10{12}"),
    (
        loss(targets=Window(2), context_size=2),
        VALUE,
        r"context_size: want it in Window\(...\) when targets are",
    ),
    (loss(targets=Window(offsets=[1, -8])), VALUE, "offsets: want a reach of fewer rows .* got 8"),
    (loss(diagonal="none"), VALUE, "diagonal: want one of 'zero', .* got 'none'"),
    (loss(memory="none"), VALUE, "memory: want one of 'fast', 'low', got 'none'"),
    (
        loss(memory=1e9),
        TYPE,
        "memory: want 'fast' or 'low', or a number of bytes as an integer, got 1000000000.0",
    ),
    (loss(memory=True), TYPE, "memory: want 'fast' or 'low', .*, got True"),
    (loss(scale=torch.tensor(torch.inf)), VALUE, "scale: want a finite number"),
    (loss(scale=0), VALUE, "scale: want a positive number, .* 1 / temperature, got 0"),
    (loss(scale=1e39), VALUE, r"scale: want .* float32 holds, .* got 1e\+39"),
    (loss(bias=-1e39), VALUE, r"bias: want .* float32 holds, .* got -1e\+39"),
    (loss(scale="20"), TYPE, "scale: want a number or a 0-d tensor, got str"),
    (loss(document_ids=X.long()), VALUE, "document_ids: want a 1-D"),
    (loss(document_ids=F[:, 0]), TYPE, "document_ids: want an integer dtype"),
    (loss(targets=Window(), document_ids=OWN), VALUE, "document_ids: want it in Window"),
    (loss(targets="diagonal"), TYPE, "targets: want fastqt targets or a tensor"),
    (loss(targets=torch.zeros(1, 8, 8)), VALUE, r"targets: want \(N,\) .* got 3-D"),
    (loss(targets=X.long()), TYPE, "targets: want a floating-point"),
    (loss(targets=OWN[:5]), VALUE, "targets: want a class index .* got 5"),
    (loss(targets=F[:, 0]), TYPE, "targets: want an integer dtype"),
    (loss(targets=Window(offsets=[0, 1])), VALUE, "targets: Window has offset 0"),
    (
        loss(targets=smoothed(Window()), diagonal="exclude"),
        VALUE,
        "targets: smoothed .* diagonal='exclude' forbids",
    ),
    (loss(targets=smoothed(Window()), exclude=X), VALUE, "exclude: want None with smoothed targets"),
    (loss(candidates=G[:5], exclude=Same(OWN)), VALUE, "exclude: want candidate_ids where .* got M=5, N=8"),
    (loss(exclude=Same(OWN, OWN[:5])), VALUE, "exclude: want 8 candidate_ids, got 5"),
    (loss(exclude=Within(OWN[:5], OWN)), VALUE, "exclude: want 8 query_ids, got 5"),
    (loss(exclude=Within(OWN, negative_ids=OWN)), VALUE, "exclude: want negative_ids with negatives alone"),
    (loss(negatives=G[:3], exclude=Same(OWN, negative_ids=OWN)), VALUE, "exclude: want 3 negative_ids, .* 8"),
    (loss(exclude=X[:5]), VALUE, r"exclude: want shape \(N, M\) = \(8, 8\), got \(5, 8\)"),
    (loss(exclude="mask"), TYPE, "exclude: want Margin, .* or a sequence of them, got 'mask'"),
    (loss(exclude=0.1), TYPE, "exclude: want Margin, .* or a sequence of them, got 0.1"),
    (loss(exclude=[X, X]), VALUE, r"exclude: want at most one bool tensor, got several; join them by \|"),
    (loss(exclude=[Margin(0.1), Margin(0.2)]), VALUE, "exclude: want at most one Margin, got several"),
    (lambda: Same(F[:, 0]), TYPE, "query_ids: want an integer dtype"),
    (lambda: Within(OWN, OWN[None]), VALUE, "candidate_ids: want a 1-D"),
    (lambda: Same(OWN, negative_ids=[1, 2]), TYPE, "negative_ids: want a tensor, got list"),
    (lambda: Window(0), VALUE, "size .*: want an integer >= 1, got 0"),
    (lambda: Window(2, offsets=[1]), VALUE, "size .*: want None beside offsets, got 2"),
    (
        lambda: Window(weights=[1e-309, 1.0]),
        VALUE,
        "weights: want a ratio of at least 1e-250 .* got 1e-309 and 1.0",
    ),
    (lambda: Window(weights=[10**400, 1]), VALUE, "weights: want one positive number"),
    (lambda: Window(weights=[float("nan"), 1]), VALUE, "weights: want one positive number"),
    (lambda: Window(weights=[1.0]), VALUE, r"weights: .* 2 offsets, got \[1.0\]"),
    (lambda: Window(weights=[1.0, -1.0]), VALUE, "weights: want one positive number"),
    (lambda: Window(offsets=[]), VALUE, "offsets: want distinct integers, at least one"),
    (lambda: Window(offsets=[1, 1]), VALUE, "offsets: want distinct integers"),
    (lambda: Sparse(torch.eye(2)), VALUE, "csr_tensor: .* torch.sparse_csr"),
    (lambda: Sparse(torch.eye(2).long().to_sparse_csr()), TYPE, "csr_tensor: want a floating"),
    (lambda: Sparse([[1.0]]), TYPE, "csr_tensor: want a tensor, got list"),
    (lambda: smoothed(Window(), 0), VALUE, "smoothing: want a positive number, .* got 0"),
    (
        lambda: smoothed(Window(), 1e-309),
        VALUE,
        "smoothing: want a positive number, at least 1e-290, got 1e-309",
    ),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED, ids=[words[:30] for *_, words in REFUSED])
def test_refused(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


# Targets whose values are wrong, which each engine has to find.
OF_VALUES = [
    (
        loss(targets=OWN + 1, diagonal="keep"),
        r"row 7's target column 8 is outside .*0\.\.7.*-100 for no target",
    ),
    (loss(targets=OWN.roll(1).index_fill(0, OWN[1], -1)), "row 1's target column -1 is outside"),
    (
        loss(targets=OWN.roll(-1).index_fill(0, OWN[2], 2)),
        "row 2's .*column 2 is on the diagonal that diagonal='zero'",
    ),
    (
        loss(targets=torch.eye(8), diagonal="exclude"),
        "row 0's .*column 0 is on the diagonal that diagonal='exclude'",
    ),
    (loss(targets=-NEXT), "row 0's target column 1 has a weight that is negative"),
    (loss(targets=torch.where(NEXT > 0, torch.inf, 0.0)), "row 0's target column 1 has an infinite weight"),
    (
        loss(targets=HUGE.to_sparse_csr(), diagonal="keep"),
        r"row 0's .*column \d has an infinite weight, or makes the sum",
    ),
    (loss(exclude=NEXT.bool()), "row 0's target column 1 is a cell that exclude takes out"),
]


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize(("call", "words"), OF_VALUES, ids=[words[:40] for _, words in OF_VALUES])
def test_targets_are_refused_for_their_values(call, words, backend, monkeypatch):
    monkeypatch.setenv("FASTQT_BACKEND", backend)
    with pytest.raises(ValueError, match=f"^targets: {words}"):
        call()


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize(
    ("paired", "message"),
    [
        (fastqt.info_nce_loss, "candidates: want at least N=8 rows, .* of queries"),
        (lambda a, b: fastqt.siglip_loss(a, b, scale=1.0, bias=0.0), "b: want at least N=8 rows, .* of a"),
        (lambda a, b: fastqt.clip_loss(a, b, scale=1.0), "b: want a row for each of the 8 rows of a"),
    ],
)
def test_a_row_without_its_pair_is_refused(paired, message, rows):
    with pytest.raises(ValueError, match=f"^{message}, got {rows}$"):
        paired(F, G[:rows])
    assert loss(F, G[:rows], Diagonal(), diagonal="keep")().isfinite()


@pytest.mark.parametrize(
    "name", [name for name in fastqt.__all__ if name.endswith("_loss") or name == "log_sum_exp"]
)
def test_every_loss_says_what_stands_for_a_temperature(name):
    function = getattr(fastqt, name)
    advice = "; want scale, which is 1 / temperature" * ("scale" in inspect.signature(function).parameters)
    with pytest.raises(TypeError, match=f"^temperature: no option of {name}{advice}"):
        function(temperature=0.05)


def test_numbers_beyond_float32_are_taken_with_float64():
    found = loss(F.double() * 1e-39, G.double(), scale=1e39)()
    assert found.item() == pytest.approx(loss(F.double(), G.double())().item(), rel=FLOAT64)


def test_an_unknown_environment_is_named(monkeypatch):
    monkeypatch.setenv("FASTQT_BACKEND", "gpu")
    message = "FASTQT_BACKEND: want one of cpu, cuda, triton, torch, reference, got 'gpu'"
    with pytest.raises(ValueError, match=message):
        loss()()


def test_without_the_extension(monkeypatch, capsys):
    """The reference engine computes everything. Asking for the C++ engine is an error that says why."""
    fastqt.show_config()
    out = capsys.readouterr().out
    assert f"fastqt   {fastqt.__version__}" in out
    assert "not built" not in out
    expected = loss(F.double(), G.double())().item()
    monkeypatch.setattr(plans, "known", {})
    monkeypatch.setattr(ops, "native_error", "the extension fastqt._C is not built")
    assert loss(F.double(), G.double())().item() == pytest.approx(expected, rel=FLOAT64)
    with pytest.raises(ValueError, match=r"backend: 'cpu' is not available: .*not built"):
        loss(backend="cpu")()
    fastqt.show_config()
    out = capsys.readouterr().out
    assert "not built" in out
    assert torch.__version__ in out
