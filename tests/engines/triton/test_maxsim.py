"""MaxSim by kernels, interpreted: in how many digits tokens are read, and maxima and gradients added up.

All tokens are integers, so that all products and gradients are exact in float32.
"""

import pytest
import torch

from fastqt.engines.triton.maxsim import TokenKernels

N, T, M, U, D = 3, 8, 4, 21, 16
# An odd number of 12 bits, and what it is with 11, which TF32 has.
WIDE, ROUNDED = 2_051, 2_052
PLACE = 5  # of all maxima
SOME = slice(1, N)  # queries


@pytest.fixture(params=["highest", "high"])
def in_tf32(request):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param == "high"
    torch.set_float32_matmul_precision(before)


def wide_tokens():
    """Queries of wide numbers, and documents that have one at a place and negative ones elsewhere."""
    queries, documents = torch.zeros(N, T, D), torch.zeros(M, U, D)
    queries[:, :, 0] = WIDE
    documents[:, :, 0] = -1
    documents[:, PLACE, 0] = WIDE
    return queries, documents


def test_maxima_are_added_up_in_more_digits_than_float32_has():
    """Their sum is odd and has 25 bits, so that no float32 is equal to it, in whatever order it was made."""
    maxima = 2**24, 2, 3, 4, 5, 6, 7, 8
    queries = torch.zeros(1, T, D)
    queries[0, :, 0] = torch.tensor(maxima)
    sums, _ = TokenKernels(queries, torch.ones(M, U, D), torch.float32, None).maxima(slice(0, 1), False)
    assert sums.tolist() == [[sum(maxima)] * M]


def test_products_have_all_digits_of_tokens_or_those_of_tf32(in_tf32):
    kernels = TokenKernels(*wide_tokens(), torch.float32, None)
    sums, places = kernels.maxima(SOME, True)
    assert sums.tolist() == [[T * (ROUNDED if in_tf32 else WIDE) ** 2] * M] * (N - 1)
    assert (places == PLACE).all()


def test_gradients_have_all_digits_of_tokens(in_tf32):
    """Also where products are in TF32, which is of products alone."""
    queries, documents = wide_tokens()
    kernels = TokenKernels(queries, documents, torch.float32, None)
    _, places = kernels.maxima(SOME, True)
    weights = torch.arange(1.0, 2 * M + 1).view(2, M)
    d_queries, d_documents = torch.zeros(N, T, D), torch.zeros(M, U, D)
    kernels.add_gradients(SOME, places, weights, d_queries, d_documents)

    wanted = torch.zeros_like(d_queries)
    wanted[SOME, :, 0] = WIDE * weights.sum(1)[:, None]
    assert torch.equal(d_queries, wanted)

    wanted = torch.zeros_like(d_documents)
    wanted[:, PLACE, 0] = WIDE * T * weights.sum(0)
    assert torch.equal(d_documents, wanted)
