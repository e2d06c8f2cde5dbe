"""fastqt.nn.GRU against a cell in numpy, torch.nn.GRU, and finite differences."""

import copy
import pickle
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from fastqt.engines import own_products
from fastqt.nn import GRU
from fastqt.nn.gru import module, native, sequence
from tests.shared.tolerances import EAGER_FACTOR, RNN_FLOAT32, RNN_FLOAT64

W, H = 5, 4
LENGTHS = [3, 7, 1, 7, 2, 5]


@pytest.fixture(params=["native", "torch"])
def engine(request, monkeypatch):
    """Native and torch operators, with chunks so small that a batch needs several."""
    monkeypatch.setattr(sequence, "CHUNK_TOKENS", 7)
    if request.param == "torch":
        monkeypatch.setattr(native, "NATIVE", False)
        monkeypatch.setattr(own_products, "levels", lambda: (0, 0))
    elif not native.NATIVE:
        pytest.skip("the native extension is not built")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def sentences(dtype: torch.dtype = torch.float64, width: int = W) -> list[Tensor]:
    return [torch.randn(length, width, dtype=dtype) for length in LENGTHS]


def numpy_cell(x, h, w_ih, w_hh, b_ih, b_hh, reset_after):
    """One step of one sequence, written from the equations."""

    def sigmoid(a):
        return 1 / (1 + np.exp(-a))

    (wr, wz, wn), (ur, uz, un) = np.split(w_ih, 3), np.split(w_hh, 3)
    (br, bz, bn), (cr, cz, cn) = np.split(b_ih, 3), np.split(b_hh, 3)
    r = sigmoid(wr @ x + br + ur @ h + cr)
    z = sigmoid(wz @ x + bz + uz @ h + cz)
    n = np.tanh(wn @ x + bn + (r * (un @ h + cn) if reset_after else un @ (r * h) + cn))
    return (1 - z) * n + z * h


def numpy_gru(layer: GRU, sentence: np.ndarray, h0: np.ndarray, direction: int) -> np.ndarray:
    """The states (L, H) of one sequence in one direction, in the order of its tokens."""
    suffix = "_reverse" if direction else ""
    weights = [getattr(layer, f"{name}_l0{suffix}").detach().numpy() for name in ("weight_ih", "weight_hh")]
    for name in ("bias_ih", "bias_hh"):
        bias = getattr(layer, f"{name}_l0{suffix}", None)
        weights.append(np.zeros(3 * layer.hidden_size) if bias is None else bias.detach().numpy())
    states, h = [], h0
    for x in sentence[::-1] if direction else sentence:
        h = numpy_cell(x, h, *weights, layer.reset_after)
        states.append(h)
    return np.array(states[::-1] if direction else states)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("reset_after", [True, False])
@pytest.mark.parametrize("bias", [True, False, "single"])
@pytest.mark.parametrize("with_h0", [True, False])
def test_states_equal_a_numpy_cell(reset_after, bias, with_h0):
    layer = GRU(W, H, bias=bias, bidirectional=True, reset_after=reset_after, dtype=torch.float64)
    batch = sentences()
    h0 = torch.randn(2, len(batch), H, dtype=torch.float64) if with_h0 else None
    output, h_n = layer(pack_sequence(batch, enforce_sorted=False), h0)
    padded, lengths = pad_packed_sequence(output, batch_first=True)
    assert lengths.tolist() == LENGTHS
    for i, sentence in enumerate(batch):
        for d in range(2):
            start = h0[d, i].numpy() if with_h0 else np.zeros(H)
            want = numpy_gru(layer, sentence.numpy(), start, d)
            got = padded[i, : len(sentence), d * H : (d + 1) * H].detach().numpy()
            np.testing.assert_allclose(got, want, **RNN_FLOAT64)
            # The backward direction ends at the first token.
            np.testing.assert_allclose(h_n[d, i].detach().numpy(), want[0 if d else -1], **RNN_FLOAT64)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("reset_after", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("with_h0", [True, False])
@pytest.mark.thinned(2)
def test_gradients_equal_finite_differences(reset_after, reverse, with_h0):
    W, H, lengths = 2, 3, [4, 4, 2, 1]
    packed = pack_sequence([torch.randn(length, W, dtype=torch.float64) for length in lengths])
    shapes = [(3 * H, W), (3 * H, H), (3 * H,), (3 * H,)]
    inputs = [packed.data, *(torch.randn(shape, dtype=torch.float64) for shape in shapes)]
    h0 = torch.randn(len(lengths), H, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (*inputs, *([h0] if with_h0 else []))]

    def run(x, w_ih, w_hh, b_ih, b_hh, h0=None):
        return sequence.gru_sequence(
            x,
            packed.batch_sizes,
            len(lengths),
            h0,
            w_ih,
            w_hh,
            b_ih,
            b_hh,
            reverse=reverse,
            reset_after=reset_after,
        )

    assert torch.autograd.gradcheck(run, inputs)


def twins(**options) -> tuple[GRU, torch.nn.GRU]:
    dtype = options.pop("dtype", torch.float64)
    width = options.pop("width", W)
    hidden = options.pop("hidden", H)
    ours, theirs = (
        GRU(width, hidden, dtype=dtype, **options),
        torch.nn.GRU(width, hidden, dtype=dtype, **options),
    )
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def results(layer, x, hx, wrap=lambda x: x):
    """By name: output, final state, and the gradients of a fixed linear function of both."""
    x = x.clone().requires_grad_()
    hx = hx.clone().requires_grad_() if hx is not None else None
    layer.zero_grad()
    output, h_n = layer(wrap(x), hx)
    output = output.data if isinstance(output, PackedSequence) else output
    generator = torch.Generator().manual_seed(1)
    weights = [
        torch.randint(-2, 3, t.shape, generator=generator) for t in (output, h_n)
    ]  # exact in any dtype
    sum(
        ((t * w.to(t)).sum() for t, w in zip((output, h_n), weights, strict=True)), torch.zeros(())
    ).backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"output": output, "h_n": h_n, "x": x.grad, **gradients} | (
        {"hx": hx.grad} if hx is not None else {}
    )


def assert_same(got, want, **tolerance):
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(
            got[name], want[name], msg=lambda m, name=name: f"{name}: {m}", **tolerance
        )


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("with_hx", [True, False])
@pytest.mark.parametrize("form", ["packed", "sorted", "padded", "batch_first", "unbatched", "one sequence"])
def test_values_and_gradients_equal_torch(form, bidirectional, bias, with_hx):
    ours, theirs = twins(bidirectional=bidirectional, bias=bias, batch_first=form == "batch_first")
    D, B = 1 + bidirectional, len(LENGTHS)
    hx = torch.randn(D, B, H, dtype=torch.float64) if with_hx else None
    x, wrap = torch.randn(B, 7, W, dtype=torch.float64), lambda x: x
    if form in ("packed", "sorted"):
        order = sorted(LENGTHS, reverse=True) if form == "sorted" else LENGTHS
        packed = pack_sequence([torch.randn(n, W, dtype=torch.float64) for n in order], form == "sorted")
        x, wrap = packed.data, lambda x: packed._replace(data=x)
    elif form == "unbatched":
        x, hx = x[0], None if hx is None else hx[:, 0]
    elif form == "one sequence":
        x, hx = x[:1].transpose(0, 1), None if hx is None else hx[:, :1]
    elif form == "padded":
        x = x.transpose(0, 1)
    assert_same(results(ours, x, hx, wrap), results(theirs, x, hx, wrap), **RNN_FLOAT64)


def replace_data(packed: PackedSequence, data: Tensor) -> PackedSequence:
    return packed._replace(data=data)


def error(got, want):
    """By name: the relative error in the Frobenius norm."""
    return {
        name: float((got[name].double() - w).detach().norm() / w.detach().norm()) for name, w in want.items()
    }


@pytest.mark.skipif(not native.NATIVE, reason="the native extension is not built")
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_fp32_is_as_accurate_as_torch(scale):
    """In the mean over draws: at scale 8 saturated gates enlarge rounding errors by chance, in either."""
    ours_error, theirs_error = Counter(), Counter()
    for seed in range(12):
        torch.manual_seed(seed)
        ours, theirs = twins(dtype=torch.float32, width=48, hidden=96, bidirectional=True)
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter *= scale
        ours.load_state_dict(theirs.state_dict())
        lengths = torch.randint(3, 41, (40,)).sort(descending=True)[0]
        packed = pack_sequence([torch.randn(int(n), 48) for n in lengths])
        wrap = partial(replace_data, packed)
        exact = results(copy.deepcopy(theirs).double(), packed.data.double(), None, wrap)
        for layer, errors in ((ours, ours_error), (theirs, theirs_error)):
            errors.update(error(results(layer, packed.data, None, wrap), exact))
    assert ours_error.total() <= EAGER_FACTOR * theirs_error.total()
    # The gradient of one weight scatters more than the sum over all.
    for name in exact:
        assert ours_error[name] <= 2 * theirs_error[name], name


@pytest.mark.parametrize("reset_after", [True, False])
def test_two_runs_are_bitwise_equal_and_threads_agree(reset_after):
    layer = GRU(48, 96, bidirectional=True, reset_after=reset_after)
    packed = pack_sequence(
        [torch.randn(int(n), 48) for n in torch.randint(1, 30, (64,))], enforce_sorted=False
    )
    threads = torch.get_num_threads()
    runs = []
    try:
        for count in (2, 2, 1):
            torch.set_num_threads(count)
            run = results(layer, packed.data, None, lambda x: packed._replace(data=x))
            runs.append({name: t.clone() for name, t in run.items()})
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert max(error(runs[2], runs[0]).values()) < 1e-5


@pytest.mark.usefixtures("engine")
def test_gradients_of_input_or_parameters_only():
    layer = GRU(W, H, dtype=torch.float64)
    x = torch.randn(6, 3, W, dtype=torch.float64, requires_grad=True)
    everything = torch.autograd.grad(layer(x)[0].sum(), [x, *layer.parameters()])
    layer.requires_grad_(False)
    torch.testing.assert_close(torch.autograd.grad(layer(x)[0].sum(), x)[0], everything[0], **RNN_FLOAT64)
    layer.requires_grad_(True)
    for gradient, want in zip(
        torch.autograd.grad(layer(x.detach())[0].sum(), list(layer.parameters())), everything[1:], strict=True
    ):
        torch.testing.assert_close(gradient, want, **RNN_FLOAT64)
    with torch.no_grad():
        assert not layer(x)[0].requires_grad


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("reset_after", [True, False])
def test_final_states_equal_the_second_result_of_forward(reset_after):
    layer = GRU(W, H, bidirectional=True, reset_after=reset_after, dtype=torch.float64)
    packed = pack_sequence(sentences(), enforce_sorted=False)
    want, got = layer(packed)[1], layer.final_states(packed)
    assert torch.equal(got, want)
    parameters = list(layer.parameters())
    for a, b in zip(
        torch.autograd.grad(got.square().sum(), parameters),
        torch.autograd.grad(want.square().sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(a, b, **RNN_FLOAT64)


def test_noncontiguous_inputs_and_upstream_gradients():
    ours, theirs = twins()
    base = torch.randn(W, 3, 6, dtype=torch.float64)
    one = torch.randn(1, 1, W, dtype=torch.float64)
    for x in (base.permute(2, 1, 0), base.permute(2, 1, 0)[::2], one.expand(6, 3, W)):
        assert_same(results(ours, x, None), results(theirs, x, None), **RNN_FLOAT64)
        x = x.detach().requires_grad_()
        upstream = torch.ones(1, dtype=torch.float64).expand(len(x), 3, H)  # all strides are 0
        got, want = (torch.autograd.grad(layer(x)[0], x, upstream)[0] for layer in (ours, theirs))
        torch.testing.assert_close(got, want, **RNN_FLOAT64)


def test_backward_runs_twice_but_double_backward_raises():
    layer = GRU(W, H)
    x = torch.randn(6, 3, W, requires_grad=True)
    loss = layer(x)[0].square().sum()
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match=r"no second derivative.*create_graph"):
        torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("bias", [True, "single"])
def test_copying_pickling_and_conversion_of_dtype(bias):
    layer = GRU(W, H, bias=bias)
    x = torch.randn(6, 3, W)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x)[0], layer(x)[0])
    assert layer.double()(x.double())[0].dtype == torch.float64
    of_gates = 3 * H * (W + H) + 3 * H * (1 if bias == "single" else 2)
    assert sum(p.numel() for p in layer.parameters()) == of_gates


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_fp32(dtype, monkeypatch):
    monkeypatch.setattr(own_products, "levels", lambda: (0, 0))  # no instructions for bfloat16
    monkeypatch.setattr(native, "supports_native", lambda tensor: False)
    layer = GRU(W, H, bidirectional=True, dtype=dtype)
    x = torch.randn(6, 3, W, dtype=dtype)
    got = results(layer, x, None)
    want = results(copy.deepcopy(layer).float(), x.float(), None)
    assert all(t.dtype == dtype for t in got.values())
    assert_same(got, {name: t.to(dtype) for name, t in want.items()}, rtol=0, atol=0)


@pytest.mark.parametrize("reset_after", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
def test_products_of_bfloat16_have_states_and_sums_of_float32(reset_after, autocast):
    if not own_products.levels()[1]:
        pytest.skip("this processor multiplies no matrices of bfloat16")
    size, steps, batch = 70, 25, 9
    layer = GRU(40, size, bidirectional=True, reset_after=reset_after)
    x = torch.randn(steps, batch, 40)
    if not autocast:
        layer, x = layer.bfloat16(), x.bfloat16()
    truth = results(copy.deepcopy(layer).double(), x.double(), None)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found = results(layer, x, None)
    assert found["output"].dtype is layer.weight_hh_l0.dtype
    exact = error(results(copy.deepcopy(layer).float(), x.float(), None), truth)
    errors = error(found, truth)

    # Every result is rounded, so that it is not that of float32; states do not lose digits from step to step.
    assert all(errors[name] > 4 * exact[name] for name in truth)
    assert max(errors.values()) < 2**-6
    if reset_after and not autocast:
        theirs = torch.nn.GRU(40, size, bidirectional=True, dtype=torch.bfloat16)
        theirs.load_state_dict(layer.state_dict())
        of_torch = error(results(theirs, x, None), truth)
        assert all(errors[name] <= of_torch[name] for name in truth), (errors, of_torch)


def test_saturated_gates_are_finite_and_nan_stays_in_its_sequence():
    layer = GRU(W, H)
    x = 1e4 * torch.randn(6, 3, W)
    x[2, 1] = float("nan")
    output = layer(x)[0]
    assert output[:, [0, 2]].isfinite().all()
    assert output[:2, 1].isfinite().all()
    assert output[2:, 1].isnan().all()


@pytest.mark.parametrize("form", ["packed", "padded"])
@pytest.mark.parametrize("bias", [True, False])
def test_other_devices_use_torch(monkeypatch, form, bias):
    ours, theirs = twins(bidirectional=True, bias=bias)
    monkeypatch.setattr(module, "_uses_torch", lambda reset_after, device: reset_after)
    monkeypatch.setattr(module, "gru_sequence", None)
    packed = pack_sequence(sentences(), enforce_sorted=False)
    x, wrap = torch.randn(6, 3, W, dtype=torch.float64), lambda x: x
    if form == "packed":
        x, wrap = packed.data, lambda x: packed._replace(data=x)
    for hx in (None, torch.randn(2, 6 if form == "packed" else 3, H, dtype=torch.float64)):
        assert_same(results(ours, x, hx, wrap), results(theirs, x, hx, wrap), **RNN_FLOAT64)


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # torch's own, in tracing
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.thinned(2)
def test_compiles_without_a_graph_break(dynamic):
    torch._dynamo.reset()
    layer = GRU(W, H, bidirectional=True, batch_first=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for B, L in ((3, 6), (4, 9)):
        x, hx = torch.randn(B, L, W), torch.randn(2, B, H)
        want = results(layer, x, hx)
        layer_parameters = {
            f"_orig_mod.{name}": t for name, t in want.items() if name.endswith(("l0", "reverse"))
        }
        want = {name: t for name, t in want.items() if f"_orig_mod.{name}" not in layer_parameters}
        assert_same(results(compiled, x, hx), want | layer_parameters, **RNN_FLOAT32)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x)[1], layer(x)[1], **RNN_FLOAT32)


@pytest.mark.parametrize(
    ("x", "hx", "message"),
    [
        (torch.randn(W), None, rf"input: want \(L, B, {W}\).*got \({W},\)"),
        (torch.randn(0, 3, W), None, r"length of at least 1, got \(0, 3, 5\)"),
        (torch.randn(6, 3, W + 1), None, r"got \(6, 3, 6\)"),
        (torch.randn(6, 3, W).double(), None, "input: want the weights' dtype, torch.float32, got"),
        (torch.randn(6, 3, W), torch.randn(2, 3, H), r"hx: want shape \(1, 3, 4\), got \(2, 3, 4\)"),
        (torch.randn(6, W), torch.randn(3, H), r"hx: want shape \(1, 1, 4\), got \(3, 1, 4\)"),
    ],
)
def test_invalid_input_raises(x, hx, message):
    with pytest.raises(ValueError, match=message):
        GRU(W, H)(x, hx)


def test_invalid_bias_raises():
    with pytest.raises(ValueError, match=r"bias: want True, False or 'single', got 'double'"):
        GRU(W, H, bias="double")  # type: ignore[arg-type]


@pytest.mark.parametrize("reset_after", [True, False])
@pytest.mark.parametrize("shape", [(3, 0, W), (0, 3, W)])
def test_no_sequences(reset_after, shape):
    """As torch's layer: states of no sequence, with gradients of 0 to all parameters."""
    options = {"bidirectional": True, "batch_first": shape[0] == 0}
    layer, by_torch = GRU(W, 5, reset_after=reset_after, **options), torch.nn.GRU(W, 5, **options)
    found, wanted = (of(torch.zeros(shape)) for of in (layer, by_torch))
    assert [x.shape for x in found] == [x.shape for x in wanted]
    found[0].sum().backward()
    assert not any(p.grad.any() for p in layer.parameters())


def test_transforms_of_torch_func():
    """They differentiate torch's own layer; the form that it does not have is refused in words."""
    layer, x = GRU(W, 5).double(), torch.randn(4, 2, W, dtype=torch.float64)

    def loss(parameters):
        return torch.func.functional_call(layer, parameters, (x,))[0].square().sum()

    found = torch.func.grad(loss)(dict(layer.named_parameters()))
    loss(dict(layer.named_parameters())).backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, **RNN_FLOAT64)
    other = GRU(W, 5, reset_after=False).double()
    with pytest.raises(RuntimeError, match=r"^reset_after: want True under torch.func's transforms"):
        torch.func.vjp(lambda x: other(x)[0], x)
