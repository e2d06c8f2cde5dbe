"""Random problems: arguments of any make for the losses, and the check that a result is the oracle's.

tests/functional/test_random_problems.py runs the same few in every run, and
`python -m benchmarks.random_problems` draws others for as long as one likes.
"""

import numpy as np
import oracle
import torch
from hypothesis import strategies as st
from tolerances import FLUSHED, THREE_ROUNDINGS, UNIT_ROUNDOFF

import fastqt

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@st.composite
def problems(draw, dtypes=(*DTYPES, torch.float64), most=12):
    """A link and random arguments for its loss, valid or not, of at most `most` rows and columns."""
    N, D = draw(st.integers(1, most)), draw(st.integers(1, most))
    M = N if draw(st.booleans()) else draw(st.integers(1, most + 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(dtypes))
    layout = st.sampled_from(["plain", "transposed", "spread", "expanded"])

    def matrix(rows: int) -> torch.Tensor:
        x = torch.from_numpy(rng.normal(size=(rows, D)) * draw(st.sampled_from([0.01, 1.0, 8.0]))).to(dtype)
        match draw(layout):
            case "transposed":
                x = x.T.contiguous().T
            case "spread":
                x = x.repeat_interleave(3, 1)[:, ::3]
            case "expanded":
                x = x[:1].expand(rows, D)
        return x

    arguments: dict = {"queries": matrix(N), "candidates": matrix(M)}
    kind = draw(st.sampled_from(["window", "offsets", "diagonal", "indices", "dense", "sparse", "smoothed"]))
    if kind == "window":
        arguments["context_size"] = draw(st.integers(1, 4))
        if draw(st.booleans()):
            arguments["document_ids"] = torch.from_numpy(np.sort(rng.integers(0, 3, N)))
    elif kind == "offsets":
        offsets = draw(st.lists(st.integers(-4, 4), min_size=1, max_size=4, unique=True))
        arguments["targets"] = fastqt.Window(offsets=offsets, normalize=draw(st.booleans()))
    elif kind == "diagonal":
        arguments["targets"] = fastqt.Diagonal()
    elif kind == "indices":
        arguments["targets"] = torch.from_numpy(rng.integers(-1, M + (rng.random() < 0.1), N))
        arguments["targets"][arguments["targets"] == -1] = -100
    else:
        T = torch.from_numpy(np.where(rng.random((N, M)) < 0.4, rng.random((N, M)), 0))
        if draw(st.booleans()):
            T[torch.eye(N, M, dtype=torch.bool)] = 0
        arguments["targets"] = {
            "dense": lambda: T,
            "sparse": lambda: fastqt.Sparse(T.to_sparse_csr()),
            "smoothed": lambda: fastqt.smoothed(T, 0.3),
        }[kind]()
    arguments["diagonal"] = draw(st.sampled_from(["zero", "exclude", "keep"]))
    if draw(st.booleans()):
        arguments["scale"] = draw(st.sampled_from([0.5, 3.0, 20.0, 1e-3]))
    if draw(st.booleans()):
        arguments["negatives"] = matrix(draw(st.integers(1, 5)))
    if draw(st.booleans()):
        arguments["row_negatives"] = matrix(N)
    if draw(st.booleans()):
        arguments["query_groups"] = torch.from_numpy(rng.integers(0, 3, N))
        arguments["candidate_groups"] = torch.from_numpy(rng.integers(0, 3, M))
    if draw(st.integers(0, 3)) == 0:
        arguments["mask"] = torch.from_numpy(rng.random((N, M)) < 0.2)
    arguments["reduction"] = draw(st.sampled_from(["mean", "sum", "none"]))
    arguments["memory"] = draw(st.sampled_from(["fast", "low"]))
    link = draw(st.sampled_from(["softmax", "sigmoid"]))
    if link == "sigmoid" and draw(st.booleans()):
        biases = torch.from_numpy(rng.normal(size=M) * 5)
        arguments["bias"] = biases if draw(st.booleans()) else biases[0]
    return link, arguments


def dense_targets(link: str, arguments: dict) -> np.ndarray:
    """The targets as fastqt writes them out, which tests/test_targets.py tests."""
    targets = arguments.get("targets")
    if targets is None:
        targets = fastqt.Window(
            arguments["context_size"],
            document_ids=arguments.get("document_ids"),
            normalize=link == "softmax",
        )
    N, M = len(arguments["queries"]), len(arguments["candidates"])
    return fastqt.targets.as_targets(targets).to_dense(N, M).numpy()


def expected(link: str, arguments: dict) -> oracle.Result:
    embeddings = {
        name: arguments[name].double().numpy()
        for name in ("queries", "candidates", "negatives", "row_negatives")
        if name in arguments
    }
    groups = {
        name: arguments[name].numpy()
        for name in ("query_groups", "candidate_groups", "mask")
        if name in arguments
    }
    N = len(arguments["queries"])
    return oracle.contrastive(
        embeddings.pop("queries"),
        embeddings.pop("candidates"),
        dense_targets(link, arguments),
        diagonal=arguments["diagonal"],
        scale=arguments.get("scale", 1.0),
        row_weights=np.full(N, 1 / N if arguments["reduction"] == "mean" else 1.0),
        bias=arguments["bias"].numpy() if "bias" in arguments else 0.0,
        link=link,
        **embeddings,
        **groups,
    )


def outcome(link: str, arguments: dict) -> tuple[torch.Tensor | None, str]:
    """The loss, or None and the message of a ValueError."""
    loss = fastqt.sigmoid_loss if link == "sigmoid" else fastqt.contrastive_loss
    try:
        return loss(**arguments), ""
    except ValueError as error:
        return None, str(error)


def check(link: str, arguments: dict) -> bool:
    """Whether there is a loss, which is then the oracle's."""
    names = [name for name in ("queries", "candidates", "negatives", "row_negatives") if name in arguments]
    inputs = {name: arguments[name].detach().requires_grad_() for name in names}
    loss, refusal = outcome(link, {**arguments, **inputs})
    if loss is None:
        _, reference_refusal = outcome(link, {**arguments, **inputs, "backend": "reference"})
        assert refusal.partition(":")[0] == reference_refusal.partition(":")[0] != refusal
        return False
    exact = expected(link, arguments)
    bounds = Bounds(link, arguments)
    value = {"mean": exact.loss.mean(), "sum": exact.loss.sum(), "none": exact.loss}[arguments["reduction"]]
    assert (np.abs(loss.detach().double().numpy() - value) <= bounds.of_loss()).all()
    gradients = torch.autograd.grad(loss.sum(), list(inputs.values()))
    for name, gradient in zip(inputs, gradients, strict=True):
        assert gradient.dtype == arguments[name].dtype
        wanted = getattr(exact, name)
        error = np.abs(gradient.double().numpy() - wanted)
        assert (error <= bounds.of_gradient(wanted, exact.magnitudes[name])).all(), name
    return True


class Bounds:
    """How far rounding can bring the loss and each element of the gradients from the truth.

    Let u be the unit roundoff of the dtype of the computation.

    - A score is a sum of D products, scaled, with a bias. Its error is at most (D + 4) u times the largest
      score that is possible, which is |scale| max_ij sum_d |f_id g_jd| + |bias|.
    - The relative error of a probability is twice that, because the logsumexp has the same error.
    - An element of a gradient is a sum of at most n terms, each a coefficient times an embedding's element.
      The sum adds a relative error of n u. It is relative to the absolute values of the terms, which the
      oracle sums up as well: where terms cancel each other, their errors remain.
    - What else is rounded once (the exponential, the coefficient, its product with the scale) adds 8 u.
    """

    def __init__(self, link: str, arguments: dict) -> None:
        self.arguments, self.targets = arguments, dense_targets(link, arguments)
        self.dtype = arguments["queries"].dtype
        self.unit = UNIT_ROUNDOFF[torch.promote_types(self.dtype, torch.float32)]
        names = ("queries", "candidates", "negatives", "row_negatives")
        size = {name: np.abs(arguments[name].double().numpy()) for name in names if name in arguments}
        columns = [size[name] for name in ("candidates", "negatives") if name in size]
        products = [size["queries"] @ x.T for x in columns]
        if "row_negatives" in size:
            products.append((size["queries"] * size["row_negatives"]).sum(1))
        N, D = size["queries"].shape
        self.largest_score = abs(arguments.get("scale", 1.0)) * max(x.max() for x in products)
        if "bias" in arguments:
            self.largest_score += float(arguments["bias"].abs().max())
        self.score_error = (D + 4) * self.unit * self.largest_score
        self.sum_error = (N + sum(map(len, columns)) + 8) * self.unit
        self.cells = (
            self.targets.sum(1).max() if link == "softmax" else sum(map(len, columns)) + 1
        )  # how often a score or a logsumexp enters the loss of a row

    def of_loss(self) -> float:
        rows = len(self.targets) if self.arguments["reduction"] == "sum" else 1
        return rows * self.cells * (2 * self.score_error + self.sum_error * (1 + 2 * self.largest_score))

    def of_gradient(self, exact: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
        factor = 2 * self.score_error + self.sum_error
        result = 2 * UNIT_ROUNDOFF[self.dtype] * np.abs(exact)  # rounded, or cut off, to the input's dtype
        if self.arguments.get("backend") == "triton":
            factor += THREE_ROUNDINGS[self.dtype]
        return factor * magnitude + result + FLUSHED[self.dtype]
