"""The operators of the GRU: native ones against those in torch, and all of them under opcheck."""

import inspect

import numpy as np
import pytest
import torch
from torch import Tensor

from fastqt.nn.gru import gates as torch_gates
from fastqt.nn.gru import native as native_gru
from fastqt.nn.gru import sequence
from tests.shared.tolerances import FLOAT32, relative

native = pytest.mark.skipif(not native_gru.NATIVE, reason="the native extension is not built")
GATES = [name for name in vars(torch_gates) if name.startswith("gru_")]

# b rows are active, and `live` of them have a nonzero state. 70 is no multiple of a vector register's lanes.
b, live, H = 5, 3, 70


def rows(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def arguments(name: str, dtype: torch.dtype, *, optional: bool) -> list[Tensor]:
    """Random arguments for a gate function, chosen by the names of its parameters.

    Results and gradients that may be absent have no rows if not `optional`.
    """
    torch.manual_seed(0)
    state = rows(b, H, dtype=dtype)
    state[live:] = 0
    some = b if optional else 0
    recurrent = {"gru_reset_after_": 3 * H, "gru_reset_before_": 2 * H, "gru_reset_before_candidate_": H}
    shapes = {
        "gates": (b, 3 * H),
        "bias": (4, H),
        "recurrent": (live, recurrent.get(name, H)),
        "hidden_n": (b if "backward" in name else some, H),
        "next": (2, H),
        "final": (b + 1, H),
        "output": (some, H),
        "grad_output": (some, H),
        "reset_state": (b, H),
        "grad_reset_state": (live, H),
        "carry": (b + 1, H),
        "grad_gates": (b, 4 * H),
    }
    values = {key: rows(*shape, dtype=dtype) for key, shape in shapes.items()} | {"state": state}
    if "backward" in name:
        values["gates"].sigmoid_()
    return [values[parameter] for parameter in inspect.signature(getattr(torch_gates, name)).parameters]


@native
@pytest.mark.parametrize("optional", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", GATES)
def test_native_gates_equal_torch_gates(name, dtype, optional):
    want, got = (arguments(name, dtype, optional=optional) for _ in range(2))
    getattr(torch_gates, name)(*want)
    getattr(torch.ops.fastqt, name)(*got)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=tolerance, atol=tolerance)


@native
@pytest.mark.parametrize("optional", [True, False])
@pytest.mark.parametrize("name", GATES)
@pytest.mark.thinned(3)
def test_native_gates_pass_opcheck(name, optional):
    operator = getattr(torch.ops.fastqt, name).default
    torch.library.opcheck(operator, tuple(arguments(name, torch.float32, optional=optional)))


@native
@pytest.mark.parametrize("name", GATES)
def test_native_gates_raise_on_wrong_layout_or_dtype(name):
    for change in (lambda t: t[:, 1:], lambda t: t.t(), lambda t: t.half()):
        broken = arguments(name, torch.float32, optional=True)
        broken[0] = change(broken[0])
        with pytest.raises(RuntimeError, match="gates: want a contiguous matrix on the CPU"):
            getattr(torch.ops.fastqt, name)(*broken)


@native
def test_activations_are_accurate_to_a_few_ulp():
    x = torch.cat([torch.linspace(-30, 30, 20_001), torch.linspace(-1, 1, 20_001)]).view(1, -1)
    n = x.shape[1]
    gates, none, zeros = x.repeat(1, 3), torch.empty(0, 3 * n), torch.zeros(4, n)
    empty, final = torch.empty(0, n), torch.empty(1, n)
    torch.ops.fastqt.gru_reset_after_(gates, none, zeros, torch.zeros(1, n), empty, empty, final, empty)
    r, z, candidate = gates.view(3, n).numpy()
    exact = x[0].double().numpy()
    for got, want, ulps in ((r, 1 / (1 + np.exp(-exact)), 4), (candidate, np.tanh(exact), 2)):
        assert (np.abs(got - want) <= ulps * np.spacing(np.abs(want).astype(np.float32))).all()
    assert (r == z).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(("K", "N"), [(100, 300), (300, 100), (1, 7), (7, 1)])
def test_packed_product_for_any_number_of_rows(dtype, transposed, K, N):
    torch.manual_seed(0)
    matrix = rows(N, K, dtype=dtype).t() if transposed else rows(K, N, dtype=dtype)
    product = native_gru.PackedProduct(matrix, 40)
    for count in (40, 39, 17, 2, 1, 0, 64):
        # As in the recurrence, `left` is a block of columns and `out` the first rows of a buffer.
        left, out = rows(count, K + 5, dtype=dtype)[:, 5:], rows(count + 3, N, dtype=dtype)
        before, exact = out.clone(), left.double() @ matrix.double()
        product(left, out[:count])
        torch.testing.assert_close(out[:count].double(), exact, rtol=1e-4, atol=1e-4)
        product(left, out[:count], accumulate=True)
        torch.testing.assert_close(out[:count].double(), 2 * exact, rtol=1e-4, atol=1e-4)
        assert torch.equal(out[count:], before[count:])


@native
def test_packed_product_passes_opcheck():
    # opcheck runs the operator on copies, so this also tests a packed matrix at another address.
    matrix, left = rows(8, 6, dtype=torch.float32), rows(3, 8, dtype=torch.float32)
    packed = torch.ops.fastqt.pack_matrix(matrix, 3)
    if packed.numel() == 0:
        pytest.skip("nothing here packs matrices")
    # The padding bytes of the packed matrix are not initialised, so its values cannot be compared.
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.fastqt.pack_matrix.default, (matrix, 3), test_utils=tests)
    for accumulate in (True, False):
        out = rows(3, 6, dtype=torch.float32)
        torch.library.opcheck(
            torch.ops.fastqt.packed_product_.default, (out, left, matrix, packed, accumulate)
        )
        moved, stayed = out.clone(), out.clone()
        torch.ops.fastqt.packed_product_(moved, left, matrix, packed.clone(), accumulate)
        torch.ops.fastqt.packed_product_(stayed, left, matrix, packed, accumulate)
        assert torch.equal(moved, stayed)


@pytest.mark.parametrize("reset_after", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("everything", [True, False])
@pytest.mark.thinned(3)
def test_sequence_operators_pass_opcheck(reset_after, reverse, everything):
    W, H, batch_sizes = 3, 2, torch.tensor([3, 2, 2, 1])
    N, B = int(batch_sizes.sum()), 3
    weights = rows(3 * H, W), rows(3 * H, H)
    h0, biases = (rows(B, H), [rows(3 * H), rows(3 * H)]) if everything else (None, [None, None])
    x = rows(N, W)
    forward = (x, batch_sizes, B, h0, *weights, *biases, reverse, reset_after, everything, False)
    for save in (True, False):
        torch.library.opcheck(sequence.gru_fwd, (*forward, save))
    saved = sequence.gru_fwd(*forward, True)[2:]
    upstream = (rows(N, H), None) if everything else (None, rows(B, H))
    for needs in ((True, True), (False, True), (True, False)):
        options = everything, reverse, reset_after, False
        backward = (*upstream, B, x, batch_sizes, *weights, *saved, *options, *needs)
        torch.library.opcheck(sequence.gru_bwd, backward)


@native
def test_a_packed_matrix_of_another_shape_is_not_read():
    """Its memory is shorter than what the product would read."""
    small = torch.ops.fastqt.pack_matrix(rows(2, 3, dtype=torch.float32), 4)
    if small.numel() == 0:
        pytest.skip("nothing here packs matrices")
    left, matrix = rows(4, 600, dtype=torch.float32), rows(600, 700, dtype=torch.float32)
    for packed in (small, small.new_zeros(17), small.new_zeros(100).byte(), small.new_zeros(0)):
        out = torch.empty(4, 700)
        torch.ops.fastqt.packed_product_(out, left, matrix, packed, False)
        assert relative(out, left @ matrix) < FLOAT32
