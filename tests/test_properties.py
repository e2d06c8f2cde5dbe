"""Whatever comes in: the oracle's value and gradients, or a clean error. Never a crash, never nonsense."""

import numpy as np
import oracle
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tolerances import FOR_DTYPE, relative

import fastqt

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Of E, of the rows that it multiplies, and of the result; the interpreter cuts bfloat16 off.
ROUNDINGS = {torch.float16: 3 * 2.0**-11, torch.bfloat16: 3 * 2.0**-7, torch.float32: 3 * 2.0**-24}


@st.composite
def problems(draw, dtypes=(*DTYPES, torch.float64), most=12):
    """A link, and arguments of any make for its loss, sensible or not; of `most` rows and columns."""
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
        arguments["scale"] = draw(st.sampled_from([0.5, 3.0, 20.0, -1.0, 0.0]))
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
    """What fastqt says the targets are; test_targets proves that it is right."""
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
    """The loss, or None and the words of a ValueError."""
    loss = fastqt.sigmoid_loss if link == "sigmoid" else fastqt.contrastive_loss
    try:
        return loss(**arguments), ""
    except ValueError as error:
        return None, str(error)


@settings(max_examples=400, deadline=None)
@given(problems())
def test_the_oracles_value_or_a_clean_error(problem):
    check(*problem)


@settings(max_examples=80, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(problems(DTYPES))
def test_the_triton_engine_too(problem):
    link, arguments = problem
    check(link, {**arguments, "backend": "triton"})


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
    dtype = arguments["queries"].dtype
    value = {"mean": exact.loss.mean(), "sum": exact.loss.sum(), "none": exact.loss}[arguments["reduction"]]
    # scores of a few hundred in float32 leave fewer digits to their exponentials
    tolerance = 100 * FOR_DTYPE.get(dtype, FOR_DTYPE[torch.float32])
    assert np.abs(loss.detach().double().numpy() - value).max() <= tolerance * (1 + np.abs(value).max())
    gradients = torch.autograd.grad(loss.sum(), list(inputs.values()))
    half = torch.finfo(dtype).eps if dtype in (torch.float16, torch.bfloat16) else 0.0
    roundings = (
        ROUNDINGS[dtype] * sum_of_parts(link, arguments) if arguments.get("backend") == "triton" else 0.0
    )
    for name, gradient in zip(inputs, gradients, strict=True):
        assert gradient.dtype == dtype
        exact_gradient = getattr(exact, name)
        largest = np.abs(exact_gradient).max()
        if largest > 1e-6:  # below, float16 has only subnormals, and float32 few digits
            assert relative(gradient, exact_gradient) <= tolerance + half + roundings / largest, name
        else:
            assert np.abs(gradient.double().numpy()).max() <= 1e-5 + roundings, name
    return True


def sum_of_parts(link: str, arguments: dict) -> float:
    """No gradient's terms add up to more than this in absolute value: they may cancel, their errors not."""
    N = len(arguments["queries"])
    mass = dense_targets(link, arguments).sum(1)
    weight = 1 / N if arguments["reduction"] == "mean" else 1.0
    embeddings = ("queries", "candidates", "negatives", "row_negatives")
    largest = max(arguments[name].abs().max().item() for name in embeddings if name in arguments)
    return 2 * abs(arguments.get("scale", 1.0)) * weight * float(mass.sum()) * largest
