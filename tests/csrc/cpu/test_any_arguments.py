"""Operators that are given anything refuse it or stay within their tensors, as sanitizers see.

Of a right call some arguments are replaced by tensors of other dtypes, sizes, layouts and values, or by other
numbers. A tensor's memory ends with its last element.
"""

import contextlib
import random

import pytest
import torch
from torch import Tensor

from fastqt.engines import ops
from tests.csrc.cpu import test_operators
from tests.nn.gru.test_native import GATES
from tests.nn.gru.test_native import arguments as of_gates
from tests.optim.test_adam import arguments as of_optimisers

pytestmark = pytest.mark.skipif(ops.native_error is not None, reason=str(ops.native_error))
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)
INTEGERS = (0, -1, 1, 2, 7, -100, 2**32, 2**61, 2**63 - 2, 2**63 - 1, -(2**63))
MOST = torch.finfo(torch.float64).max
NUMBERS = (
    0.0,
    -0.0,
    -1.0,
    1e30,
    1e39,
    1e-46,
    1e-309,
    5e-324,
    MOST,
    -MOST,
    *map(float, ("inf", "-inf", "nan")),
)


def laid_out(draw: random.Random, x: Tensor) -> Tensor:
    """The same numbers in another layout, or the first row again and again."""
    layout = draw.choice(("transposed", "gaps", "one row", "end of memory"))
    if layout == "transposed" and x.dim() == 2:
        return x.t().contiguous().t()
    if layout == "gaps" and x.numel():
        strides = [2 * stride for stride in x.contiguous().stride()]
        size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True))
        return torch.zeros(size, dtype=x.dtype).as_strided(x.shape, strides).copy_(x)
    if layout == "one row" and x.dim() and len(x):
        return x[:1].expand(x.shape)
    return torch.cat([x, x])[len(x) :] if x.dim() else x.clone()


def resized(draw: random.Random, x: Tensor) -> Tensor:
    shape = list(x.shape)
    if not shape or draw.random() < 0.2:
        shape.append(1)
    elif draw.random() < 0.2:
        shape.pop()
    else:
        at = draw.randrange(len(shape))
        shape[at] = draw.choice((0, 1, max(shape[at] - 1, 0), shape[at] + 1))
    return torch.resize_as_(x.clone(), torch.empty(shape, dtype=x.dtype)).fill_(1)


def with_other_values(draw: random.Random, x: Tensor) -> Tensor:
    """Up to three numbers, those of integers among them as the dtype has them."""
    x = x.clone()
    numbers = INTEGERS if x.dtype is torch.int64 else NUMBERS
    for _ in range(min(3, x.numel())):
        number = torch.tensor(draw.choice(numbers), dtype=torch.int64 if x.dtype is torch.int64 else None)
        x[tuple(draw.randrange(n) for n in x.shape)] = number.to(x.dtype)
    return x


def altered(draw: random.Random, x: object) -> object:
    if isinstance(x, Tensor):
        if draw.random() < 0.3:
            return x.to(draw.choice(DTYPES))
        return draw.choice((laid_out, resized, with_other_values))(draw, x)
    if isinstance(x, bool):
        return not x
    if isinstance(x, int):
        return draw.choice(INTEGERS)
    if isinstance(x, float):
        return draw.choice(NUMBERS)
    if isinstance(x, list):
        return [draw.random() < 0.5 for _ in range(draw.randrange(10))]
    return x


def right_calls() -> dict[str, list[object]]:
    """The arguments of each operator that takes the tensors of a problem, in the order of its schema."""
    by_name = {name: {**test_operators.problem(), **more} for name, more in test_operators.OPERATORS.items()}
    calls = {
        name: [given[x.name] for x in getattr(torch.ops.fastqt, name).default._schema.arguments]
        for name, given in (by_name | test_operators.WALKS).items()
    }
    calls |= {name: list(of_gates(name, torch.float32, optional=True)) for name in GATES}
    ids, offsets = torch.tensor([3, 0, 3, 1]), torch.tensor([0, 1, 1])
    calls["bag_sum"] = [torch.ones(4, 3), ids, offsets, True]
    calls["sum_by_row"] = [ids, offsets, torch.ones(3, 3), 4, True]
    calls |= {name: list(of_optimisers(name).values()) for name in ("adam_rows_", "replay_rows_")}
    left, matrix = torch.ones(5, 40), torch.ones(40, 30)
    calls["pack_matrix"] = [matrix, 5, False]
    packed = torch.ops.fastqt.pack_matrix(matrix, 5)
    calls["packed_product_"] = [torch.ones(5, 30), left, matrix, packed, False, False]
    return calls


RIGHT = right_calls() if ops.native_error is None else {}


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(100, 1000, 100))]
)
@pytest.mark.parametrize("operator", RIGHT)
def test_nothing_is_read_or_written_elsewhere(operator, first):
    function, right, accepted = getattr(torch.ops.fastqt, operator).default, RIGHT[operator], 0
    for seed in range(first, first + 100):
        draw = random.Random(seed)
        arguments = [x.clone() if isinstance(x, Tensor) else x for x in right]
        for place in draw.sample(range(len(right)), draw.randint(1, 3)):
            arguments[place] = altered(draw, arguments[place])
        with contextlib.suppress(RuntimeError):
            function(*arguments)
            accepted += 1
    assert accepted > 0
