"""MaxSim's kernels, interpreted: which products are the largest, where, and the sums of these tokens."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fastqt.kernels import maxsim, maxsim_gradients
from fastqt.kernels.maxsim import maxima, operand
from fastqt.kernels.maxsim_gradients import add_gradients_of_documents, gradients_of_queries

R, M = 37, 5  # tokens of queries, and documents
# The tokens of documents: less than a block, a block and some, whole blocks.
LENGTHS = (7, 21, 32)


def tokens(U, D, dtype=torch.float32):
    """Small integers, whose products are exact in whatever order they are added up, and often equal."""
    generator = torch.Generator().manual_seed(U)
    queries, documents = (torch.randint(-3, 4, (n, D), generator=generator).to(dtype) for n in (R, M * U))
    mask = torch.rand(M, U, generator=generator) < 0.6
    mask[2, U // 2 :], mask[3] = False, False
    return queries, documents, torch.zeros(M, U).masked_fill(~mask, -math.inf)


def exact(queries, documents, bias):
    products = (queries.double() @ documents.double().T).view(len(queries), M, -1)
    return (products if bias is None else products + bias).max(2)


def lengths_of(bias):
    return ((bias == 0) * torch.arange(1, bias.shape[1] + 1)).amax(1).int()


@pytest.mark.parametrize("U", LENGTHS)
@pytest.mark.parametrize("D", [16, 40, 5], ids=["a step", "several steps", "odd"])
@pytest.mark.parametrize("masked", ["", "mask", "mask, lengths"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.thinned(4)
def test_are_the_first_of_the_largest_products(U, D, masked, dtype):
    queries, documents, bias = tokens(U, D, dtype)
    bias = bias if masked else None
    lengths = lengths_of(bias) if "lengths" in masked else None
    operands = [operand(x, dtype, rounded=False) for x in (queries, documents)]
    largest, places = maxima(*operands, U, bias, lengths, wants_places=True)
    wanted, first = exact(queries, documents, bias)
    assert torch.equal(largest.double(), wanted.T)
    assert torch.equal(places.long(), first.T)
    alone, nothing = maxima(*operands, U, bias, lengths, wants_places=False)
    assert torch.equal(alone, largest)
    assert nothing is None


@pytest.mark.parametrize("processors", [1, 64])
def test_programs_share_documents(processors, monkeypatch):
    """One program for each block of tokens, or one for each block and document."""
    monkeypatch.setattr(maxsim, "multiprocessors", lambda _: processors)
    monkeypatch.setattr(maxsim, "WAVES", 1)
    queries, documents, bias = tokens(21, 16)
    largest, places = maxima(queries, documents, 21, bias, None, wants_places=True)
    wanted, first = exact(queries, documents, bias)
    assert torch.equal(largest.double(), wanted.T)
    assert torch.equal(places.long(), first.T)


@pytest.mark.parametrize("token", [0, 20], ids=["first block", "last block"])
def test_nan_stays_and_its_place_is_one_of_the_document(token):
    queries, documents, _ = tokens(21, 16)
    queries[3, 2] = math.nan
    documents[2 * 21 + token, 1] = math.nan
    largest, places = maxima(queries, documents, 21, None, None, wants_places=True)
    wanted, first = exact(queries, documents, None)
    assert torch.equal(largest.double().isnan(), wanted.T.isnan())
    assert ((places >= 0) & (places < 21)).all()
    number = ~largest.isnan()
    assert torch.equal(places.long()[number], first.T[number])


def test_long_documents_have_places_of_32_bits(monkeypatch):
    # A tile of many tokens, which the interpreter takes in one turn.
    monkeypatch.setattr(maxsim, "WHEN_INTERPRETED", replace(maxsim.WHEN_INTERPRETED, rows=1, columns=2**15))
    documents = torch.zeros(2**15 + 1, 16)
    documents[-1] = 1
    _, places = maxima(torch.ones(1, 16), documents, len(documents), None, None, wants_places=True)
    assert places.item() == 2**15
    assert places.dtype is torch.int32
    _, places = maxima(torch.ones(1, 16), documents[2:], 2**15 - 1, None, None, wants_places=True)
    assert places.item() == 2**15 - 2
    assert places.dtype is torch.int16


N, T = 4, 9  # queries and their tokens
U = 40


def bags(D):
    """Places of maxima in documents, of which one has few and one has none but the first, and weights."""
    generator = torch.Generator().manual_seed(D)
    queries, documents = (
        operand(torch.randint(-3, 4, (n, D), generator=generator), torch.float32, rounded=False)
        for n in (N * T, M * U)
    )
    places = torch.randint(U, (M, N * T), generator=generator).to(torch.int16)
    places[2], places[3] = 0, places[3] % 3
    weights = torch.randint(-3, 4, (N, M), generator=generator).float()
    lengths = places.amax(1).int() + 1
    lengths[2] = 0
    return queries, documents, places, weights, lengths


def weighted(places, weights):
    """By how much each document's token counts for each query's token, (N T, M, U)."""
    return F.one_hot(places.long(), U).permute(1, 0, 2) * weights.repeat_interleave(T, 0)[:, :, None]


by_width = pytest.mark.parametrize(
    "D", [16, 5, 140], ids=["a step", "odd", "two steps"]
)  # rows of 5 are padded


@by_width
def test_a_query_has_the_tokens_of_its_maxima(D):
    _, documents, places, weights, _ = bags(D)
    gradient = torch.full((N * T + 1, D), 2.0)  # with a row that is not to be written
    gradients_of_queries(documents, places, weights, gradient[:-1])
    wanted = torch.einsum("rmu,mud->rd", weighted(places, weights), documents[:, :D].view(M, U, D))
    assert torch.equal(gradient[:-1], wanted)
    assert (gradient[-1] == 2).all()


@by_width
@pytest.mark.parametrize("has_lengths", [True, False])
@pytest.mark.parametrize("at_once", [8, 128], ids=["several steps", "all"])
def test_a_document_has_the_tokens_whose_maximum_it_is(D, has_lengths, at_once, monkeypatch):
    """Added to what is there; the numbers are small integers, so that no order is seen."""
    monkeypatch.setattr(maxsim_gradients, "MAXIMA", at_once)
    monkeypatch.setattr(maxsim_gradients, "ROWS", 4)
    queries, _, places, weights, lengths = bags(D)
    gradient = torch.full((M + 1, U, D), 2.0)
    add_gradients_of_documents(queries, places, lengths if has_lengths else None, weights, gradient[:-1])
    wanted = torch.einsum("rmu,rd->mud", weighted(places, weights), queries[:, :D])
    assert torch.equal(gradient[:-1], wanted + 2)
    assert (gradient[-1] == 2).all()
