"""Bags of a table's rows and their sparse gradients equal torch's, on the extension and without it."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastqt.engines import ops
from fastqt.nn import BagOfWords, StaticEmbedding, sparse_gradients
from fastqt.nn.sparse_gradients import bag_sum, bag_sums, distinct_rows, sum_by_row
from tests.shared.tolerances import FLOAT64, UNIT_ROUNDOFF, relative

native = pytest.mark.skipif(ops.native_error is not None, reason=str(ops.native_error))
# A table of more rows than one digit of the sort has, and widths on both sides of the blocks of columns: of
# gradients and, the widest, of bags.
V = 5000
WIDTHS = (1, 7, 128, 300, 1100)
MODES = ("sum", "mean")


@pytest.fixture(params=["native", "torch"])
def path(request, monkeypatch):
    """Both ways to compute. That of torch is the way of other devices, which are not here."""
    if request.param == "native" and ops.native_error is not None:
        pytest.skip(ops.native_error)
    if request.param == "torch":
        monkeypatch.setattr(sparse_gradients, "NATIVE_DTYPES", ())


def bags(D: int, dtype: torch.dtype, bags: int = 60) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A table, ids of which some occur often, offsets of bags of which some are empty, and a gradient."""
    draw = torch.Generator().manual_seed(D)
    lengths = torch.randint(0, 30, (bags,), generator=draw)
    lengths[[0, 7, 8, -1]] = 0
    ids = (V * torch.rand(int(lengths.sum()), generator=draw) ** 6).long()
    table, upstream = (torch.randn(rows, D, generator=draw, dtype=dtype) for rows in (V, bags))
    return table, ids, lengths.cumsum(0) - lengths, upstream


def in_float64(table, ids, offsets, upstream, mode):
    """What torch makes of the same numbers in float64: the bags, and the dense gradient."""
    exact = table.double().requires_grad_()
    result = F.embedding_bag(ids, exact, offsets, mode=mode)
    result.backward(upstream.double())
    return result, exact.grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("D", WIDTHS)
def test_bags_and_their_gradients_are_those_of_torch(D, dtype, mode, path):
    table, ids, offsets, upstream = bags(D, dtype)
    weight = table.clone().requires_grad_()
    result = bag_sum(weight, ids, offsets, mode)
    result.backward(upstream)
    wanted, gradient = in_float64(table, ids, offsets, upstream, mode)

    assert result.dtype == weight.grad.dtype == dtype
    rows, values = distinct_rows(weight.grad)
    assert torch.equal(rows, ids.unique())
    assert values.data_ptr() == weight.grad._values().data_ptr()  # nothing is summed a second time
    uses = int(ids.bincount().max())  # in the longest sum
    # Sums in 16 bits are rounded once.
    roundings = uses * UNIT_ROUNDOFF[torch.float32] + UNIT_ROUNDOFF[dtype]
    tolerance = FLOAT64 if dtype is torch.float64 else roundings
    assert relative(result.double(), wanted) < tolerance
    assert relative(weight.grad.to_dense().double(), gradient) < tolerance


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_of_several_columns_has_each_row_once(mode, path):
    """Of three columns, of which the loss reads two: the third one's rows have no gradient by it."""
    table, ids, offsets, upstream = bags(7, torch.float64)
    others = V - 1 - ids[: len(ids) // 2], offsets[:20].clamp(max=len(ids) // 2)
    columns = [(ids, offsets), (torch.arange(1000, 1100), torch.tensor([0, 40])), others]
    weight, exact = table.clone().requires_grad_(), table.clone().requires_grad_()

    first, unused, last = bag_sums(weight, columns, mode)
    wanted = [F.embedding_bag(*bag[:1], exact, bag[1], mode=mode) for bag in columns]
    for ours, theirs in zip((first, unused, last), wanted, strict=True):
        assert relative(ours, theirs) < FLOAT64
    for one, _, other in ((first, unused, last), wanted):
        ((one * upstream).sum() + (other * upstream[:20]).sum()).backward()

    rows, values = distinct_rows(weight.grad)
    assert torch.equal(rows, torch.cat([ids, others[0]]).unique())
    assert values.data_ptr() == weight.grad._values().data_ptr()  # nothing is summed a second time
    assert relative(weight.grad.to_dense(), exact.grad) < FLOAT64


@native
@pytest.mark.parametrize("D", [130, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_in_the_order_of_the_ids_have_the_bits_of_float32(dtype, D):
    """One row after the other in float32, which a result in bfloat16 is rounded from once."""
    table, ids, offsets, _ = bags(D, dtype)
    result = bag_sum(table, ids, offsets)
    for bag, begin in enumerate(offsets):
        end = offsets[bag + 1] if bag + 1 < len(offsets) else len(ids)
        total = torch.zeros(D)
        for row in table[ids[begin:end]].float():
            total += row
        assert torch.equal(result[bag], total.to(dtype))


@native
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("D", [5, 300, 1100])
def test_the_number_of_threads_changes_no_bit(D, mode):
    table, ids, offsets, upstream = bags(D, torch.float32, bags=2000)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            summed = torch.ops.fastqt.bag_sum(table, ids, offsets, mode == "mean")
            results.append((summed, *sum_by_row(ids, upstream, V, offsets, mode)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(other, results[0], strict=True))


def test_rows_that_occur_again_are_added_up(path):
    """As in the gradient of `torch.nn.Embedding`, which has a row for each use."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 9, (50,), generator=draw)
    values = torch.randn(50, 4, generator=draw, dtype=torch.float64)
    gradient = torch.sparse_coo_tensor(ids[None], values, (9, 4), check_invariants=False)
    rows, sums = distinct_rows(gradient)
    assert torch.equal(rows, ids.unique())
    assert relative(torch.zeros(9, 4).double().index_add(0, rows, sums), gradient.to_dense()) < FLOAT64


@pytest.mark.parametrize("mode", MODES)
def test_empty_bags_and_no_bags(mode, path):
    table = torch.ones(3, 2, requires_grad=True)
    for offsets in (torch.tensor([0, 0]), torch.zeros(0, dtype=torch.int64)):
        none = torch.zeros(0, dtype=torch.int64)
        result = bag_sum(table, none, offsets, mode)
        result.sum().backward()
        assert torch.equal(result, torch.zeros(len(offsets), 2))
        assert distinct_rows(table.grad)[0].numel() == 0


@native
def test_tables_and_gradients_of_any_layout():
    table, ids, offsets, upstream = bags(6, torch.float64)
    wanted = bag_sum(table, ids, offsets)
    wide = torch.cat([table, table], 1)
    for view in (wide[:, 6:], table.t().contiguous().t(), table.repeat_interleave(2, 1)[:, ::2]):
        assert torch.equal(bag_sum(view, ids, offsets), wanted)
    for other in (upstream.t().contiguous().t(), upstream.repeat_interleave(2, 0)[::2]):
        assert torch.equal(sum_by_row(ids, other, V, offsets)[1], sum_by_row(ids, upstream, V, offsets)[1])
    one = upstream[:1].expand(upstream.shape)  # that of a sum
    assert torch.equal(sum_by_row(ids, one, V, offsets)[1], sum_by_row(ids, one.contiguous(), V, offsets)[1])


@native
@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        ([1, 3], [0], r"ids: index out of range: want 0\.\.2, the rows of the table, got 3 at position 1"),
        ([-1, 2], [0], r"want 0\.\.2, the rows of the table, got -1 at position 0"),
        ([1, 2], [1], "offsets: want the first to be 0"),
        ([1, 2], [], "offsets: want the first to be 0"),
        ([1, 2], [0, 3], "offsets: want ascending numbers up to 2, the number of ids, got 3 before 2"),
        ([1, 2], [0, 2, 1], "offsets: want ascending numbers up to 2, the number of ids, got 2 before 1"),
    ],
)
def test_ids_and_offsets_that_name_nothing_are_refused(ids, offsets, message):
    ids, offsets = (torch.tensor(numbers, dtype=torch.int64) for numbers in (ids, offsets))
    with pytest.raises(RuntimeError, match=message):
        torch.ops.fastqt.bag_sum(torch.ones(3, 2), ids, offsets, False)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.fastqt.sum_by_row(ids, offsets, torch.ones(len(offsets), 2), 3, False)


@native
def test_operators_refuse_other_dtypes_and_sizes():
    ids, table = torch.tensor([0, 1]), torch.ones(3, 2)
    for changed in (table.half(), table.long(), table[0]):
        with pytest.raises(RuntimeError, match="table: want a float32, float64 or bfloat16 matrix"):
            torch.ops.fastqt.bag_sum(changed, ids, ids[:1], False)
    for changed in (ids.int(), ids[:, None], ids.repeat(2)[::2]):
        with pytest.raises(RuntimeError, match="ids: want a contiguous int64 vector"):
            torch.ops.fastqt.bag_sum(table, changed, ids[:1], False)
    with pytest.raises(RuntimeError, match="values: want 2 rows, got"):
        torch.ops.fastqt.sum_by_row(ids, None, table, 3, False)


@native
def test_opcheck():
    ids, offsets = torch.tensor([3, 0, 3, 1]), torch.tensor([0, 1, 1])
    torch.library.opcheck(torch.ops.fastqt.bag_sum, (torch.ones(4, 3), ids, offsets, True))
    for of_bags in (offsets, None):
        values = torch.ones(3 if of_bags is not None else 4, 3)
        torch.library.opcheck(torch.ops.fastqt.sum_by_row, (ids, of_bags, values, 4, True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sparse", [True, False])
def test_a_static_embedding_is_an_embedding_bag(mode, sparse):
    table, ids, offsets, upstream = bags(6, torch.float64)
    ours = StaticEmbedding(V, 6, mode=mode, sparse=sparse).double()
    theirs = nn.EmbeddingBag(V, 6, mode=mode, _weight=table)
    ours.load_state_dict({"embedding.weight": table})
    assert [*ours.state_dict()] == ["embedding.weight"]  # as that of sentence-transformers
    for dtype in (torch.int64, torch.int32):
        results = [module(ids.to(dtype), offsets.to(dtype)) for module in (ours, theirs)]
        torch.testing.assert_close(*results)
    for result in results:
        result.backward(upstream)
    assert ours.embedding.weight.grad.is_sparse == sparse
    torch.testing.assert_close(ours.embedding.weight.grad.to_dense(), theirs.weight.grad)
    torch.testing.assert_close(ours(ids[:60].view(20, 3)), theirs(ids[:60].view(20, 3)))


def test_a_static_embedding_sums_as_a_bag_of_words_does():
    encoder, static = (
        kind(9, 4, vectors=torch.arange(36.0).view(9, 4), sparse=True)
        for kind in (BagOfWords, lambda *sizes, **options: StaticEmbedding(*sizes, mode="sum", **options))
    )
    tokens, lengths = torch.tensor([[1, 2, 8], [3, 3, 0], [0, 0, 0]]), torch.tensor([3, 2, 0])
    found = static(torch.tensor([1, 2, 8, 3, 3]), torch.tensor([0, 3, 5]))
    assert torch.equal(found, encoder(tokens, lengths))


def test_a_static_embedding_refuses():
    embedding = StaticEmbedding(9, 4)
    ids = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="offsets: want where each text begins"):
        embedding(ids)
    with pytest.raises(TypeError, match="ids: want an integer dtype, got"):
        embedding(ids.float(), ids)
    with pytest.raises(TypeError, match="ids: want a tensor"):
        embedding([1, 2], ids)
    with pytest.raises(ValueError, match="mode: want"):
        StaticEmbedding(9, 4, mode="max")


# No compiler knows sparse gradients: the graph breaks there, and says so.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@pytest.mark.parametrize("sparse", [True, False])
def test_a_compiled_static_embedding_has_the_same_gradients(sparse):
    table, ids, offsets, upstream = bags(6, torch.float64)
    module = StaticEmbedding(V, 6, vectors=table.float(), sparse=sparse).double()
    gradients = []
    torch.compiler.reset()
    for call in (module, torch.compile(module, backend="aot_eager", fullgraph=not sparse)):
        module.zero_grad()
        call(ids, offsets).backward(upstream)
        gradients.append(module.embedding.weight.grad.to_dense())
    assert relative(*gradients) < FLOAT64
