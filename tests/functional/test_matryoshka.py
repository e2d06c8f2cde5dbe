"""Losses of several prefixes of the embeddings: their sum, in the products of one loss."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import fastqt
from fastqt.engines import ENGINES, chunked
from fastqt.engines.chunked import walk
from tests.shared.ring_memory import Live
from tests.shared.tolerances import REORDERED, relative

BACKENDS = [name for name, engine in ENGINES.items() if engine.takes_prefixes]


def operations(x: torch.Size, y: torch.Size, *_: object, **__: object) -> int:
    return 2 * x[0] * x[1] * y[1]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dims", [(192,), (96, 192), (12, 24, 48, 96, 192)], ids=len)
@pytest.mark.parametrize("function", [fastqt.contrastive_loss, fastqt.sigmoid_loss])
def test_all_prefixes_take_the_products_of_one(function, dims, normalize, monkeypatch):
    """6 N M D operations whatever their number, a little room for the scores of targets; and no (N, M)."""
    N, M, K, width = 256, 320, 64, 192
    monkeypatch.setattr(walk, "ROOM", {"cpu": (2**20, 2**20)})
    given = [torch.randn(n, width, requires_grad=True) for n in (N, M, K)]
    in_place = {torch.ops.aten.addmm_: lambda _, *shapes, **more: operations(*shapes)}
    options = {"normalize": normalize, "matryoshka_dims": dims, "backend": "torch", "diagonal": "keep"}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counted, Live(*given) as live:
        function(*given[:2], fastqt.Diagonal(), negatives=given[2], **options).backward()
    one = 6 * N * (M + K) * width
    assert 0.98 * one < counted.get_total_flops() < 1.02 * one
    gradients = 3 * 4 * (N + M + K) * width  # and what they are added up in
    assert live.most < gradients + 2 * 2**20


@pytest.mark.parametrize("memory", ["fast", "low", 2**24])
def test_no_chunk_holds_more_than_the_memory(memory):
    N, M, width, dims = 1000, 10**5, 64, (8, 16, 32, 64)
    targets = fastqt.Diagonal().rows(N, M, torch.device("cpu"))
    stand_in = torch.empty(1, width)
    p = fastqt.problem.Problem(
        *(stand_in.expand(N, width), stand_in.expand(M, width), None, None, 1.0, targets, "keep"),
        *(None, None, None),
        **{"memory": memory, "prefix_dims": dims, "prefix_weights": (1.0,) * 4},
    )
    needs = fastqt.problem.Needs(queries=True)
    room = {"fast": walk.ROOM["cpu"][0], "low": walk.ROOM["cpu"][1]}.get(memory, memory)
    made = chunked.PrefixWalk(p, 1.0, needs)
    rooms = {x.data_ptr(): x.numel() for prefix in made.prefixes for x in (prefix.cells,)}
    assert len(rooms) == len(dims)
    assert 0 < 4 * (sum(rooms.values()) + 2 * made.height * M) <= room


WRONG = [
    ({"matryoshka_dims": ()}, "matryoshka_dims: want at least one number of columns"),
    ({"matryoshka_dims": (2, 2)}, r"matryoshka_dims: want numbers in ascending order, got \(2, 2\)"),
    ({"matryoshka_dims": (3, 2)}, "matryoshka_dims: want numbers in ascending order"),
    ({"matryoshka_dims": (0, 2)}, "matryoshka_dims: want at least 1, got 0"),
    ({"matryoshka_dims": (2, 9)}, "matryoshka_dims: want at most D=4, the embeddings' columns, got 9"),
    ({"matryoshka_weights": (1.0,)}, "matryoshka_weights: want None without matryoshka_dims"),
    ({"matryoshka_dims": (2, 4), "matryoshka_weights": (1.0,)}, "matryoshka_weights: want one for each of"),
    (
        {"matryoshka_dims": (2,), "matryoshka_weights": (0.0,)},
        "matryoshka_weights: want numbers > 0, got 0.0",
    ),
    ({"matryoshka_dims": (2,), "matryoshka_weights": (-1,)}, "matryoshka_weights: want numbers > 0, got -1"),
    ({"matryoshka_dims": (2,), "matryoshka_weights": (np.inf,)}, "matryoshka_weights: want a finite number"),
]
WRONG_TYPES = [
    ({"matryoshka_dims": 4}, "matryoshka_dims: want a sequence of integers, got 4"),
    ({"matryoshka_dims": (2.0,)}, "matryoshka_dims: want an integer, got 2.0"),
    ({"matryoshka_dims": "24"}, "matryoshka_dims: want a sequence of integers, got '24'"),
    ({"matryoshka_dims": (2,), "matryoshka_weights": 1.0}, "matryoshka_weights: want a sequence of numbers"),
    ({"matryoshka_dims": (2,), "matryoshka_weights": ("1",)}, "matryoshka_weights: want a number, got str"),
]


@pytest.mark.parametrize(
    ("options", "message", "error"),
    [*((*wrong, ValueError) for wrong in WRONG), *((*wrong, TypeError) for wrong in WRONG_TYPES)],
    ids=str,
)
def test_misuse_is_refused_in_words(options, message, error):
    x, labels = torch.randn(6, 4), torch.arange(6) // 2
    for function, second in ((fastqt.info_nce_loss, x), (fastqt.clip_loss, x), (fastqt.supcon_loss, labels)):
        with pytest.raises(error, match=f"^{message}"):
            function(x, second, scale=2.0, **options)


def test_an_engine_without_them_is_left_out_and_says_so():
    x = torch.randn(6, 4)
    without = [name for name in ENGINES if name not in BACKENDS]
    for name in without:
        with pytest.raises(ValueError, match=f"^backend: '{name}' is not available"):
            fastqt.info_nce_loss(x, x, matryoshka_dims=(2, 4), backend=name)
    assert "torch" in BACKENDS
    assert "reference" in BACKENDS


JOINED = {
    "euclidean": {"similarity": "euclidean"},
    "mixed": {"row_negatives": fastqt.Mixed(0.3)},
    "several row negatives": {
        "row_negatives": torch.randn(9, 3, 6, generator=torch.Generator().manual_seed(1))
    },
    "row negatives and scores": {
        "row_negatives": torch.randn(9, 6, generator=torch.Generator().manual_seed(1)),
        "row_scores": torch.arange(9.0),
    },
    "mean of targets": {"reduction": "mean_of_targets"},
}


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", JOINED)
def test_options_that_no_walk_shares(name, normalize):
    """Each prefix is then a loss of its own, among whose cells those of its own prefix are."""
    options = {**JOINED[name], "diagonal": "keep", "normalize": normalize, "scale": 3.0}
    targets = torch.tensor([0, -100, 2, 3, 4, -100, 6, 7, 8])
    rows = options.get("row_negatives")
    inputs = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = fastqt.contrastive_loss(*inputs, targets, **options, matryoshka_dims=(2, 6))
    wanted = 0.0
    for dim in (2, 6):
        if isinstance(rows, Tensor):
            options["row_negatives"] = rows[..., :dim]
        wanted = wanted + fastqt.contrastive_loss(*inputs[..., :dim], targets, **options)
    assert relative(found, wanted) < REORDERED[torch.float32]
    a, b = (torch.autograd.grad(x, inputs)[0] for x in (found, wanted))
    assert relative(a, b) < REORDERED[torch.float32]


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_each_prefix_has_false_negatives_of_its_own(backend):
    """A margin is compared with the similarities of the prefix."""
    generator = torch.Generator().manual_seed(0)
    queries, candidates = (
        torch.randn(12, 8, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    options = {"scale": 5.0, "false_negative_margin": 0.05, "backend": backend}
    loss = fastqt.info_nce_loss(queries, candidates, matryoshka_dims=(3, 8), **options)
    prefixes = [fastqt.info_nce_loss(queries[:, :dim], candidates[:, :dim], **options) for dim in (3, 8)]
    whole = fastqt.info_nce_loss(queries, candidates, scale=5.0, matryoshka_dims=(3, 8), backend=backend)
    assert not torch.isclose(loss, whole)
    found, wanted = (torch.autograd.grad(x, (queries, candidates)) for x in (loss, sum(prefixes)))
    for a, b in ((loss, sum(prefixes)), *zip(found, wanted, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
