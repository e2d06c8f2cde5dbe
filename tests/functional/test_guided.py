"""Losses with a guide equal the oracle's without the cells that it excludes, in memory for a few rows."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fastqt
from fastqt.functional import guided
from tests.shared import oracle
from tests.shared.ring_memory import Live
from tests.shared.tolerances import EAGER_FACTOR, FLOAT32, FLOAT64, HALF_ULP, THREE_ROUNDINGS, relative

N, M, D, E, K = 13, 17, 6, 5, 4
ENGINES = [
    ("cpu", torch.float64, FLOAT64),
    ("cpu", torch.float32, FLOAT32),
    ("torch", torch.float64, FLOAT64),
    ("reference", torch.float64, FLOAT64),
    ("triton", torch.float32, FLOAT32),
    ("triton", torch.float16, THREE_ROUNDINGS[torch.float16]),
]
by_engine = pytest.mark.parametrize(("backend", "dtype", "tolerance"), ENGINES, ids=str)
LOSSES = {
    "softmax": fastqt.contrastive_loss,
    "sigmoid": fastqt.sigmoid_loss,
    "log_sum_exp": fastqt.log_sum_exp,
}


@pytest.fixture
def chunks(monkeypatch):
    """Chunks of 4 rows and tiles of 3 columns, so that these problems have several of each."""
    monkeypatch.setattr(guided, "ROOM", {"cpu": (0, 0)})
    monkeypatch.setattr(guided, "MIN_ROWS", 4)
    monkeypatch.setattr(guided, "MIN_COLUMNS", 3)


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Problem:
    """A loss with a guide in numpy's float64 by the definition, and its arguments."""

    def __init__(self, link, *, diagonal="keep", rows=N, columns=M, guides=torch.float32, **guide_options):
        self.link, self.diagonal = link, diagonal
        rng = np.random.default_rng(0)
        shapes = {
            "queries": (rows, D),
            "candidates": (columns, D),
            "negatives": (K, D),
            "row_negatives": (rows, D),
            "scale": (),
            "bias": (columns,),
        }
        self.leaves = {name: drawn(*shape, seed=k) for k, (name, shape) in enumerate(shapes.items())}
        self.leaves["scale"] = self.leaves["scale"].abs() + 0.5
        sizes = {"queries": rows, "candidates": columns, "negatives": K}
        given = {name: drawn(n, E, seed=10 + k).to(guides) for k, (name, n) in enumerate(sizes.items())}
        self.guide = fastqt.Guide(**given, **guide_options)
        exact = {name: x.double().numpy() for name, x in given.items()}
        normalize = guide_options.get("normalize", True)
        scores = oracle.guide_scores(exact["queries"], exact["candidates"], normalize)
        thresholds = guide_options.get("thresholds")
        if thresholds is None:
            options = guide_options.get("margin", 0.0), guide_options.get("margin_strategy", "absolute")
            thresholds = oracle.guide_thresholds(scores, *options)
        self.T = np.zeros((rows, columns))
        if link != "log_sum_exp":
            self.T = rng.random((rows, columns)) * (rng.random((rows, columns)) < 0.2)
        if diagonal != "keep":
            np.fill_diagonal(self.T, 0)
        self.mask = (rng.random((rows, columns)) < 0.1) & (self.T == 0)
        self.groups = rng.integers(0, 9, rows), rng.integers(0, 9, columns)
        self.excluded = oracle.guide_excludes(scores, thresholds, self.T)
        of_negatives = oracle.guide_scores(exact["queries"], exact["negatives"], normalize)
        self.excluded_negatives = oracle.guide_excludes(of_negatives, thresholds)
        self.weights = np.linspace(-1, 2, rows)

    def truth(self, leaves):
        given = {name: x.detach().double().numpy() for name, x in leaves.items()}
        return oracle.contrastive(
            given.pop("queries"),
            given.pop("candidates"),
            self.T,
            diagonal=self.diagonal,
            mask=self.mask | self.excluded,
            negatives_mask=self.excluded_negatives,
            query_groups=self.groups[0],
            candidate_groups=self.groups[1],
            link=self.link,
            row_weights=self.weights,
            **given,
        )

    def loss(self, leaves, **options):
        targets = {} if self.link == "log_sum_exp" else {"targets": torch.from_numpy(self.T)}
        return LOSSES[self.link](
            **leaves,
            **targets,
            diagonal=self.diagonal,
            mask=torch.from_numpy(self.mask),
            query_groups=torch.from_numpy(self.groups[0]),
            candidate_groups=torch.from_numpy(self.groups[1]),
            guide=self.guide,
            **options,
        )


GUIDES = {
    "absolute": {"margin": 0.1},
    "relative": {"margin": 0.3, "margin_strategy": "relative"},
    "products": {"margin": 0.2, "normalize": False},
    "thresholds": {"thresholds": drawn(N, seed=20) / 2},
    "bfloat16": {"guides": torch.bfloat16, "margin": 0.05},
    "float64": {"guides": torch.float64},
}


def compare(problem, backend, dtype, tolerance, **options):
    leaves = {name: x.to(dtype).requires_grad_() for name, x in problem.leaves.items()}
    truth = problem.truth(leaves)
    if problem.link != "log_sum_exp":
        options["reduction"] = "none"
    rows = problem.loss(leaves, backend=backend, **options)
    assert relative(rows, truth.loss) < tolerance
    upstream = torch.from_numpy(problem.weights).to(rows.dtype)
    found = torch.autograd.grad(rows, list(leaves.values()), upstream)
    for name, gradient in zip(leaves, found, strict=True):
        assert relative(gradient, getattr(truth, name)) < tolerance, name
    return rows, found


@pytest.mark.usefixtures("chunks")
@by_engine
@pytest.mark.parametrize("link", LOSSES)
@pytest.mark.parametrize("diagonal", ["zero", "exclude", "keep"])
@pytest.mark.thinned(3)
@pytest.mark.pairwise
def test_is_the_oracles(diagonal, link, backend, dtype, tolerance):
    compare(Problem(link, diagonal=diagonal, margin=0.1), backend, dtype, tolerance)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("name", GUIDES)
def test_is_the_oracles_for_each_kind_of_guide(name, backend):
    problem = Problem("softmax", **GUIDES[name])
    assert 0.1 < problem.excluded.mean() < 0.9
    assert 0.1 < problem.excluded_negatives.mean() < 0.9
    compare(problem, backend, torch.float64, FLOAT64)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("diagonal", ["zero", "exclude", "keep"])
def test_there_may_be_more_queries_than_candidates(diagonal, backend):
    problem = Problem("softmax", diagonal=diagonal, columns=7, thresholds=drawn(N, seed=20) / 2)
    compare(problem, backend, torch.float64, FLOAT64)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("memory", ["fast", "low", 2**25])
@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_a_scalar_loss_has_the_gradients_of_its_rows(link, memory, backend):
    """They are taken in the forward pass."""
    problem = Problem(link, diagonal="zero", margin=0.1)
    leaves = {name: x.float().requires_grad_() for name, x in problem.leaves.items()}
    problem.weights = np.full(N, 1 / N)
    truth = problem.truth(leaves)
    loss = problem.loss(leaves, backend=backend, memory=memory)
    assert relative(loss, truth.loss.mean()) < FLOAT32
    for name, gradient in zip(leaves, torch.autograd.grad(3 * loss, list(leaves.values())), strict=True):
        assert relative(gradient / 3, getattr(truth, name)) < FLOAT32, name


TARGETS = {
    "window": fastqt.Window(2),
    "classes": torch.tensor([3, -100, 0, 12, 7, -100, 1, 2, 9, 11, 5, 4, 11]),
    "sparse": torch.from_numpy(np.eye(N, N, 3) + np.eye(N, N, -1)).to_sparse_csr(),
}


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("diagonal", ["zero", "keep"])
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.thinned(2)
def test_no_target_leaves(name, diagonal, backend):
    """Thresholds of -2 exclude all else, so that a row has its targets alone, and its zero."""
    targets = TARGETS[name]
    queries, candidates = (drawn(N, D, seed=k).float().requires_grad_() for k in range(2))
    guide = fastqt.Guide(drawn(N, E, seed=2), drawn(N, E, seed=3), thresholds=torch.full((N,), -2.0))
    T = fastqt.targets.as_targets(targets).to_dense(N, N).numpy()
    truth = oracle.contrastive(
        queries.detach().double().numpy(),
        candidates.detach().double().numpy(),
        T,
        diagonal=diagonal,
        mask=T == 0,
    )
    loss = fastqt.contrastive_loss(
        queries, candidates, targets, diagonal=diagonal, guide=guide, backend=backend
    )
    assert abs(float(loss.detach()) - truth.loss.mean()) < FLOAT32
    found = torch.autograd.grad(loss, (queries, candidates))
    for gradient, wanted in zip(found, (truth.queries, truth.candidates), strict=True):
        assert np.abs(gradient.numpy() - wanted).max() < FLOAT32


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("width", [3, 64, 384, 1023])
def test_a_copy_of_the_positive_stays_in_whatever_order_its_score_is_summed(width, dtype):
    """Its score is the threshold and not above it. The loss of embeddings of zeros counts what stays."""
    positives, copies = drawn(N, width, seed=width).to(dtype), torch.arange(N).roll(5)
    columns = torch.cat([positives, positives[copies]])
    queries = drawn(N, width, seed=1).to(dtype)
    guide = fastqt.Guide(queries, columns, negatives=positives[copies])
    zeros = torch.zeros(2 * N, 1)
    staying = fastqt.log_sum_exp(zeros[:N], zeros, negatives=zeros[:N], guide=guide).exp().round()
    scores = oracle.guide_scores(*(x.double().numpy() for x in (queries, columns)))
    wanted = ~oracle.guide_excludes(scores, oracle.guide_thresholds(scores, 0.0, "absolute"))
    assert wanted[:, N:].any(1).all()
    assert staying.tolist() == (wanted.sum(1) + wanted[:, N:].sum(1)).tolist()


@pytest.mark.parametrize("guide", ["itself", "another"])
def test_learnt_positives_keep_their_digits(guide):
    """Where the probability of positives is above 0.999, also with a guide that is the model itself."""
    errors = {"ours": [], "eager": []}
    for seed in range(10):
        candidates = F.normalize(drawn(32, 64, seed=seed), dim=1).float()
        queries = F.normalize(candidates + 0.02 * drawn(32, 64, seed=100 + seed).float(), dim=1)
        others = drawn(32, E, seed=5), drawn(32, E, seed=6)
        of_guide, margin = ((queries, candidates), 0.3) if guide == "itself" else (others, -0.2)
        scores = oracle.guide_scores(*(x.double().numpy() for x in of_guide))
        thresholds = oracle.guide_thresholds(scores, margin, "absolute")
        excluded = oracle.guide_excludes(scores, thresholds, np.eye(32))
        exact = queries.double().numpy(), candidates.double().numpy()
        truth = oracle.contrastive(*exact, np.eye(32), diagonal="keep", scale=20.0, mask=excluded)
        assert truth.loss.mean() < 1e-3
        leaves = [x.clone().requires_grad_() for x in (queries, candidates)]
        ours = fastqt.info_nce_loss(
            *leaves, normalize=False, guide=fastqt.Guide(*of_guide, margin=margin), backend="cpu"
        )
        all_scores = (20 * leaves[0] @ leaves[1].T).masked_fill(torch.from_numpy(excluded), -torch.inf)
        for name, loss in (("ours", ours), ("eager", F.cross_entropy(all_scores, torch.arange(32)))):
            found = zip(torch.autograd.grad(loss, leaves), (truth.queries, truth.candidates), strict=True)
            errors[name].append([np.linalg.norm(a.numpy() - b) / np.linalg.norm(b) for a, b in found])
    ours, eager = (np.mean(errors[name], 0) for name in ("ours", "eager"))
    assert (ours <= EAGER_FACTOR * eager + HALF_ULP[torch.float32]).all()


def test_an_error_names_the_row_of_the_problem(chunks):
    x, mask = torch.randn(N, D), torch.zeros(N, N, dtype=torch.bool)
    mask[9, 10] = True
    guide = fastqt.Guide(x, x)
    with pytest.raises(ValueError, match="row 9's target column 10 is a cell that mask excludes"):
        fastqt.contrastive_loss(x, x, fastqt.Window(offsets=[1]), mask=mask, guide=guide)
    labels = torch.arange(N).where(torch.arange(N) != 11, N + 1)
    guide = fastqt.Guide(x, x, negatives=x)
    with pytest.raises(ValueError, match=f"row 11's target column {N + 1} is outside the M={N} candidates"):
        fastqt.contrastive_loss(x, x, labels, diagonal="keep", negatives=x, guide=guide)
    with pytest.raises(ValueError, match="row 0's target column 0 is on the diagonal"):
        fastqt.contrastive_loss(x, x, torch.arange(N), diagonal="exclude", guide=fastqt.Guide(x, x))


class Products(TorchDispatchMode):
    """Counts the cells of the products of a guide's embeddings, which have a width of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and args[0].shape[1] == E and args[0].dtype is torch.float64:
            self.cells += found.numel()
        return found


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_a_wrong_scale_is_named_before_a_wrong_target(backend):
    f = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    guide = fastqt.Guide(f, f, thresholds=torch.zeros(4))
    with pytest.raises(ValueError, match="scale: want a positive number where"):
        fastqt.contrastive_loss(
            f,
            f,
            torch.tensor([1, 2, 2, 0]),  # row 2's is on the diagonal
            diagonal="exclude",
            scale=torch.tensor(-1.0),
            guide=guide,
            false_negative_margin=0.1,
            backend=backend,
        )


@pytest.mark.usefixtures("chunks")
def test_a_scalar_loss_takes_the_guides_product_once_and_rows_twice():
    x, of_guide = torch.randn(N, D, requires_grad=True), drawn(N, E, seed=0)
    guide = fastqt.Guide(of_guide, of_guide)
    for reduction, times in (("mean", 1), ("sum", 1), ("none", 2)):
        with Products() as products:
            fastqt.contrastive_loss(x, x, guide=guide, reduction=reduction).sum().backward()
        assert products.cells == times * N * N


@pytest.mark.parametrize("loss", ["sigmoid_loss", "info_nce_loss"])
def test_no_part_of_the_memory_grows_with_both_sides(loss):
    """At 4,096 rows a mask alone would take 16 MiB, and the guide's scores 64."""
    rows, room = 4096, 2**24
    tensors = [torch.randn(rows, 8, requires_grad=True) for _ in range(2)]
    of_guide = [torch.randn(rows, 8, dtype=torch.bfloat16) for _ in range(2)]

    def step() -> None:
        guide = fastqt.Guide(*of_guide)
        torch.autograd.grad(getattr(fastqt, loss)(*tensors, guide=guide, memory=room), tensors)

    step()
    with Live(*tensors, *of_guide) as live:
        step()
    columns = rows * (8 * 4 * 4 + 64)  # gradients and their sums, and what is found of each row
    assert live.most < room // 4 + columns


MEASURE = """
import resource, torch, fastqt
def step(N):
    queries, candidates, q, c = (torch.randn(N, 16).mul_(0.1) for _ in range(4))
    queries.requires_grad_(), candidates.requires_grad_()
    fastqt.info_nce_loss(queries, candidates, guide=fastqt.Guide(q, c)).backward()
    fastqt.log_sum_exp(queries, candidates, guide=fastqt.Guide(q, c)).sum().backward()
step(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(8192)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
def test_peak_memory_of_a_process():
    """At N = 8,192 a mask takes 64 MiB, scores 256."""
    run = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 96


def guided_loss(queries, candidates, of_queries, of_candidates):
    guide = fastqt.Guide(of_queries, of_candidates, margin=0.2)
    return (
        fastqt.info_nce_loss(2 * queries, candidates, guide=guide)
        + fastqt.log_sum_exp(queries, candidates, guide=guide)[1]
    )


def tensors() -> list[torch.Tensor]:
    return [drawn(N, n, seed=k) for k, n in enumerate((D, D, E, E))]


# torch's own, where a tensor with a graph crosses a break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.slow
def test_under_compile_the_graph_breaks_and_the_result_is_the_same():
    torch._dynamo.reset()
    given = tensors()
    leaves = [x.requires_grad_() for x in given[:2]]
    found, wanted = torch.compile(guided_loss)(*given), guided_loss(*given)
    assert relative(found, wanted) < FLOAT64
    for a, b in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, leaves), strict=True):
        assert relative(a, b) < FLOAT64
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        torch.compile(guided_loss, fullgraph=True)(*given)


def test_transforms_of_torch_func():
    given = tensors()
    queries = given[0].requires_grad_()
    (wanted,) = torch.autograd.grad(guided_loss(*given), queries)
    found = torch.func.grad(guided_loss)(*[x.detach() for x in given])
    assert relative(found, wanted) < FLOAT64
    guides = torch.stack([given[2], given[2].flip(0)])
    each = torch.func.vmap(guided_loss, (None, None, 0, None))(*given[:2], guides, given[3])
    for one, of_queries in zip(each, guides, strict=True):
        assert relative(one, guided_loss(*given[:2], of_queries, given[3])) < FLOAT64


def test_negatives_under_torch_func():
    given, negatives = tensors(), drawn(K, D, seed=9)

    def loss(candidates, negatives):
        guide = fastqt.Guide(*given[2:], negatives=given[2][:K])
        return fastqt.contrastive_loss(given[0], candidates, negatives=negatives, guide=guide)

    found = torch.func.grad(loss, (0, 1))(given[1], negatives)
    leaves = given[1].requires_grad_(), negatives.requires_grad_()
    for a, b in zip(found, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        assert relative(a, b) < FLOAT64


def test_a_guide_that_is_changed_before_a_recomputing_backward_is_torchs_error():
    given = tensors()
    rows = fastqt.log_sum_exp(given[0].requires_grad_(), given[1], guide=fastqt.Guide(*given[2:]))
    given[2].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rows.sum().backward()


def test_an_engine_that_takes_no_mask_is_refused_in_words():
    x = torch.randn(3, 2)
    with pytest.raises(ValueError, match="backend: 'cuda' is not available"):
        fastqt.contrastive_loss(x, x, guide=fastqt.Guide(x, x), backend="cuda")
