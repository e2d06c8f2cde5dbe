"""What is no ordinary tensor or number is refused by name; integers of all dtypes are taken as int64."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fastqt
from fastqt.checks import INTEGERS
from fastqt.ids import as_ids
from fastqt.targets import as_targets
from tests.shared.calls import CALLS, D, F, G, N

# Of each function each argument once, in the first call that has it.
ARGUMENTS = {
    (function, argument): (name, argument)
    for name, (function, arguments) in reversed(CALLS.items())
    for argument, value in arguments.items()
    if isinstance(value, torch.Tensor)
}
KINDS = {
    "list": lambda x: x.tolist(),
    "array": lambda x: x.numpy(),
    "coo": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
    "meta": lambda x: x.to("meta"),
    "complex": lambda x: x.to(torch.complex64),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "mkldnn": lambda x: x.float().to_mkldnn(),
    "8 bits": lambda x: x.float().to(torch.float8_e4m3fn),
}
FEWER = {"Sparse": ("meta", "complex"), "GRU": ("list", "array")}


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS.values())
def test_a_tensor_of_another_kind_is_refused_by_name(name, argument):
    function, arguments = CALLS[name]
    function(**arguments)
    for kind in FEWER.get(name, KINDS):
        if arguments[argument].dim() == 0 and kind in ("list", "coo", "nested", "jagged", "mkldnn"):
            continue  # There is none of a single number.
        other = KINDS[kind](arguments[argument])
        with pytest.raises((TypeError, ValueError), match=rf"^{argument}: want .*"):
            function(**{**arguments, argument: other})


@pytest.mark.parametrize("argument", ["candidates", "exclude", "bias"])
def test_another_device_is_named(argument):
    shapes = {"queries": (N, D), "candidates": (N, D), "exclude": (N, N), "bias": (N,)}
    with FakeTensorMode():
        made = {
            name: torch.zeros(
                shape,
                dtype=torch.bool if name == "exclude" else torch.float32,
                device="cuda" if name == argument else "cpu",
            )
            for name, shape in shapes.items()
        }
    with pytest.raises(ValueError, match=rf"^{argument}: want device cpu as queries, got cuda"):
        fastqt.contrastive_loss(**made)


def test_a_sparse_matrix_of_another_layout_is_refused():
    with pytest.raises(TypeError, match=r"targets: want a dense tensor .* torch.sparse_csc"):
        as_targets(torch.eye(3).to_sparse_csc())


@pytest.mark.parametrize("value", [10**400, -(10**400), float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(value):
    with pytest.raises(ValueError, match="margin: want a finite number"):
        fastqt.max_margin_loss(F, G, margin=value)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int64])
def test_numbers_of_numpy_are_numbers(kind):
    loss, numbers = fastqt.multiple_negatives_ranking_loss, {"scale": 20, "hardness_strength": 5}
    options = {"hardness_mode": "all_negatives"}
    wanted = loss(F, G, **options, **numbers)
    numbers = {name: kind(value) for name, value in numbers.items()}
    assert torch.equal(loss(F, G, **options, **numbers), wanted)
    assert torch.equal(fastqt.nn.MultipleNegativesRankingLoss(**options, **numbers)(F, G), wanted)
    guides = [fastqt.Guide(F, G, margin=margin).row_thresholds() for margin in (kind(2), 2.0)]
    assert torch.equal(*guides)


def test_other_numbers_and_flags_of_numpy():
    given = {"normalize": np.bool_(True), "memory": np.int64(2**25), "reduction": np.str_("sum")}
    wanted = fastqt.info_nce_loss(F, G, normalize=True, memory=2**25, reduction="sum")
    assert torch.equal(fastqt.info_nce_loss(F, G, **given), wanted)


@pytest.mark.parametrize("dtype", sorted(INTEGERS, key=str))
def test_ids_of_all_integer_dtypes_are_taken(dtype):
    assert as_ids("ids", torch.tensor([3, 0, 5]).to(dtype)).tolist() == [3, 0, 5]


def test_unsigned_ids_that_int64_does_not_hold_are_refused():
    """2**64 - 100 wraps to -100, which means that a row has no target."""
    ids = torch.tensor([0, 2**64 - 100], dtype=torch.uint64)
    for targets in (ids, fastqt.Diagonal()):
        same = {} if targets is ids else {"query_ids": ids}
        with pytest.raises(ValueError, match=r"^(targets|query_ids): want values below 2\*\*63"):
            fastqt.contrastive_loss(
                *(F[:2], G[:2], targets), diagonal="keep", exclude=fastqt.Same(**same) if same else None
            )
    assert as_ids("ids", torch.tensor([2**63 - 1], dtype=torch.uint64)).item() == 2**63 - 1
