"""Plans are kept between calls: never for another kind of call, never in place of a check of values."""

import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastqt
from fastqt.engines import cpu, plans
from fastqt.functional import computed
from fastqt.torch_modes import input_dtype
from tests.shared.tolerances import FLOAT32, UNIT_ROUNDOFF, relative

N, M, D = 7, 9, 5
LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "contrastive": fastqt.contrastive_loss,
    "sigmoid": fastqt.sigmoid_loss,
    "log_sum_exp": lambda *x, **more: fastqt.log_sum_exp(*x, **more).sum(),
    "clip": lambda a, b, **more: fastqt.clip_loss(a, b[: len(a)], scale=2.0, **more),
    "info_nce": fastqt.info_nce_loss,
}
by_loss = pytest.mark.parametrize("name", LOSSES)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """Plans from the beginning, on a CPU that computes 16 bits in float32."""
    monkeypatch.setattr(cpu, "has_bfloat16_products", lambda: False)
    monkeypatch.setattr(plans, "known", {})
    return plans.known


def embeddings(n: int = N, m: int = M, d: int = D, seed: int = 0, dtype: torch.dtype = torch.float32) -> list:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(k, d, generator=generator).to(dtype).requires_grad_() for k in (n, m)]


def value_and_gradients(loss: Callable[..., torch.Tensor], leaves: list, **more: Any) -> list[torch.Tensor]:
    value = loss(*leaves, **more)
    wanted = [x for x in leaves if x.requires_grad]
    return [value.detach(), *(torch.autograd.grad(value, wanted) if wanted else ())]


def assert_as_reference(loss: Callable[..., torch.Tensor], leaves: list, **more: Any) -> None:
    """The reference computes in float64, of values that were rounded as autocast does."""
    found = value_and_gradients(loss, leaves, **more)
    half = any(input_dtype(x).itemsize < 4 for x in leaves)
    copies = [x.detach().to(input_dtype(x)).double().requires_grad_(x.requires_grad) for x in leaves]
    with torch.autocast("cpu", enabled=False):
        expected = value_and_gradients(loss, copies, **more, backend="reference")
    wanted = [x for x in leaves if x.requires_grad]
    assert [x.dtype for x in found[1:]] == [x.dtype for x in wanted]
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert relative(a, b) < (2 * UNIT_ROUNDOFF[torch.bfloat16] if half and a.dim() else FLOAT32)


def test_what_bfloat16_is_computed_in_is_asked_in_every_call(monkeypatch):
    given = embeddings(64, 64, dtype=torch.bfloat16)
    dtypes = []
    whole = computed.computed_loss
    monkeypatch.setattr(
        computed, "computed_loss", lambda p, *more: dtypes.append(p.queries.dtype) or whole(p, *more)
    )
    for has_products in (False, True, False):
        monkeypatch.setattr(cpu, "has_bfloat16_products", lambda has_products=has_products: has_products)
        fastqt.contrastive_loss(*given)
    assert dtypes == [torch.float32, torch.bfloat16, torch.float32]


@by_loss
def test_a_second_call_of_a_kind_has_a_plan(name, known):
    for seed in range(3):
        LOSSES[name](*embeddings(seed=seed))
        assert len(known) == 1


@by_loss
def test_calls_of_changing_kinds_equal_the_reference(name):
    """Shapes, dtypes, strides, autocast and what wants a gradient change from call to call."""
    choose = random.Random(0)
    for seed in range(60):
        n = choose.choice((1, 4, 7))
        dtype = choose.choice((torch.float32, torch.float64, torch.bfloat16))
        leaves = embeddings(max(n, 2), max(n, 2) + choose.choice((0, 3)), choose.choice((3, 5)), seed, dtype)
        leaves = [x.detach().requires_grad_(choose.random() < 0.7) for x in leaves]
        if choose.random() < 0.3:
            leaves = [x.detach().t().contiguous().t().requires_grad_() for x in leaves]
        if choose.random() < 0.3:
            leaves = [torch.nn.Parameter(x) for x in leaves]
        normalize = choose.random() < 0.5
        with torch.autocast("cpu", torch.bfloat16, enabled=choose.random() < 0.3):
            assert_as_reference(LOSSES[name], leaves, normalize=normalize, **memory_of(choose))


def memory_of(choose: random.Random) -> dict[str, Any]:
    return {"memory": choose.choice(("fast", "low", 2**24))}


def unchanged(x: list) -> list:
    return x


def bad_calls() -> dict[str, tuple[Callable[[list], list], dict[str, Any], type[Exception], str]]:
    """What is wrong with a call that differs from a good one in one thing alone."""
    eye = torch.eye(M, D)
    return {
        "columns": (lambda x: [x[0], torch.randn(M, D + 1)], {}, ValueError, "columns"),
        "dtype": (lambda x: [x[0], x[1].double()], {}, TypeError, "dtype"),
        "layout": (lambda x: [x[0], eye.to_sparse()], {}, TypeError, "layout"),
        "nested": (lambda x: [x[0], torch.nested.nested_tensor([eye])], {}, TypeError, "nested"),
        "no tensor": (lambda x: [x[0], x[1].tolist()], {}, TypeError, "tensor"),
        "normalize": (unchanged, {"normalize": 1}, TypeError, "normalize"),
        "memory": (unchanged, {"memory": float(2**24)}, TypeError, "memory"),
        "scale": (unchanged, {"scale": -1.0}, ValueError, "scale"),
        "scale tensor": (unchanged, {"scale": torch.tensor(float("nan"))}, ValueError, "scale"),
        "bias": (unchanged, {"bias": float("inf")}, ValueError, "bias"),
        "negatives": (unchanged, {"negatives": torch.randn(3, D + 1)}, ValueError, "negatives"),
        "mask": (unchanged, {"exclude": torch.zeros(N, N, dtype=torch.bool)}, ValueError, "exclude"),
        "groups": (unchanged, {"exclude": fastqt.Same(torch.arange(N))}, ValueError, "candidate_ids"),
        "backend": (unchanged, {"backend": "gpu"}, ValueError, "backend"),
        "index": (unchanged, {"targets": torch.full((N,), M), "diagonal": "keep"}, ValueError, "targets"),
        "weight": (unchanged, {"targets": -torch.ones(N, M), "diagonal": "keep"}, ValueError, "targets"),
        "pairs": (unchanged, {"targets": fastqt.Diagonal()}, ValueError, "diagonal"),
    }


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("name", bad_calls())
def test_errors_are_raised_in_every_call_before_and_after_a_good_one(name):
    change, options, error, words = bad_calls()[name]
    good = embeddings()
    for _ in range(3):
        for _ in range(2):
            with pytest.raises(error, match=words):
                fastqt.contrastive_loss(*change(good), **options)
        assert_as_reference(fastqt.contrastive_loss, good)


def test_an_index_that_changes_in_place_is_checked_again():
    leaves, targets = embeddings(), torch.arange(N)
    for column, fits in ((M - 1, True), (M, False), (-100, True), (-1, False), (0, True)):
        targets[3] = column
        if fits:
            assert_as_reference(fastqt.contrastive_loss, leaves, targets=targets, diagonal="keep")
        else:
            with pytest.raises(ValueError, match=rf"^targets: row 3's target column {column} is outside"):
                fastqt.contrastive_loss(*leaves, targets, diagonal="keep")


def test_rows_of_clips_sides_are_compared_whatever_other_losses_were_given():
    a, b = embeddings()
    for _ in range(2):
        fastqt.contrastive_loss(a, b)
        fastqt.clip_loss(a, b[:N], scale=1.0)
        with pytest.raises(ValueError, match=r"^b: want a row for each of the 7 rows of a, got 9"):
            fastqt.clip_loss(a, b, scale=1.0)


def test_a_dtype_that_autocast_alone_allows_is_refused_without_it():
    queries, candidates = embeddings()[0].bfloat16(), embeddings()[1]
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            fastqt.contrastive_loss(queries, candidates)
        with pytest.raises(TypeError, match=r"^candidates: want dtype torch.bfloat16"):
            fastqt.contrastive_loss(queries, candidates)


def test_the_environment_is_asked_in_every_call(monkeypatch):
    leaves = embeddings()
    assert fastqt.contrastive_loss(*leaves).grad_fn.name() == "_LossBackward"
    monkeypatch.setenv("FASTQT_BACKEND", "reference")
    assert fastqt.contrastive_loss(*leaves).grad_fn.name() != "_LossBackward"
    assert fastqt.contrastive_loss(*leaves, backend="cpu").grad_fn.name() == "_LossBackward"
    monkeypatch.setenv("FASTQT_BACKEND", "gpu")
    with pytest.raises(ValueError, match=r"^FASTQT_BACKEND"):
        fastqt.contrastive_loss(*leaves)


@by_loss
def test_plans_hold_no_tensor(name, known):
    leaves = embeddings()
    LOSSES[name](*leaves).backward()
    assert known
    references = [weakref.ref(x) for x in leaves]
    del leaves
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert not any(isinstance(x, torch.Tensor) for key, plan in known.items() for x in (*key, *plan))


def test_plans_are_bounded(known, monkeypatch):
    monkeypatch.setattr(plans, "MOST_KNOWN", 4)
    for n in range(2, 20):
        assert_as_reference(fastqt.contrastive_loss, embeddings(n, n))
        assert len(known) <= 4


def test_threads_share_plans(monkeypatch):
    """They make, use and forget plans at once, of kinds that differ and of the same kinds."""
    monkeypatch.setattr(plans, "MOST_KNOWN", 2)
    cases = [embeddings(n, n + 1, d, seed=n) for n in (2, 3, 5) for d in (2, 4)]
    expected = [value_and_gradients(fastqt.contrastive_loss, leaves) for leaves in cases]
    failed = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(100):
            i = choose.randrange(len(cases))
            found = value_and_gradients(fastqt.contrastive_loss, cases[i])
            if not all(torch.equal(a, b) for a, b in zip(found, expected[i], strict=True)):
                failed.append(i)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


class Named(torch.Tensor):
    """A subclass, which may do anything with an operator."""


def test_no_plan_is_kept_for_a_subclass(known):
    a, b = (x.detach() for x in embeddings())
    for pair in ((a.as_subclass(Named), b), (a, b.as_subclass(Named))):
        fastqt.contrastive_loss(*pair)
        assert not known


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [True, False])
def test_a_compiled_loss_neither_makes_nor_uses_a_plan(wanted, known):
    leaves = [x.detach().requires_grad_(wanted) for x in embeddings()]
    compiled = torch.compile(lambda x, y: fastqt.contrastive_loss(x, y), backend="eager", fullgraph=True)
    for _ in range(2):
        expected = value_and_gradients(fastqt.contrastive_loss, leaves, backend="reference")
        known.clear()
        for a, b in zip(value_and_gradients(compiled, leaves), expected, strict=True):
            assert relative(a, b) < FLOAT32
        assert not known
        fastqt.contrastive_loss(*leaves)
        assert len(known) == 1


def test_a_transform_may_find_the_plan_of_a_plain_call():
    queries, candidates = (torch.randn(3, n, D) for n in (N, M))

    def loss(q, c):
        return fastqt.contrastive_loss(q, c, normalize=True)

    plain = [
        value_and_gradients(loss, [x.requires_grad_() for x in pair])
        for pair in zip(queries.clone(), candidates.clone(), strict=True)
    ]
    mapped = torch.vmap(torch.func.grad_and_value(loss, (0, 1)))(queries, candidates)
    (d_queries, d_candidates), values = mapped
    for i, (value, dq, dc) in enumerate(plain):
        for a, b in ((values[i], value), (d_queries[i], dq), (d_candidates[i], dc)):
            assert relative(a, b) < FLOAT32
