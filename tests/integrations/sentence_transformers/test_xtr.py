"""XTR's loss beside the library's scores, which have a matrix of all pairs of tokens."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from fastqt.losses import maxsim
from fastqt.losses.xtr import xtr_loss
from tests.shared.largest import Largest
from tests.shared.tolerances import FLOAT64, relative

pytest.importorskip("sentence_transformers", reason="the extra st is not installed")

# The library can be imported after the skip alone.
from sentence_transformers.multi_vector_encoder import scoring

N, T, M, U, D = 6, 4, 12, 5, 8


def tokens(dtype=torch.float64):
    """Queries and documents, of which some have fewer tokens, one query none, and one hard negative none."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(N, T, D, generator=generator, dtype=torch.float64)
    documents = torch.randn(M, U, D, generator=generator, dtype=torch.float64)
    documents[:N, :T] += 0.5 * queries
    query_mask = torch.rand(N, T, generator=generator) < 0.7
    document_mask = torch.rand(M, U, generator=generator) < 0.7
    query_mask[2], document_mask[:N, 0], document_mask[M - 1] = False, True, False
    return queries.to(dtype), documents.to(dtype), query_mask, document_mask


def steps(loss, queries, documents, scale=2.0):
    leaves = [queries.clone(), documents.clone(), torch.tensor(scale, dtype=queries.dtype)]
    leaves = [x.requires_grad_() for x in leaves]
    value = loss(*leaves)
    return [value.detach(), *torch.autograd.grad(3 * value, leaves)]


def of_library(query_mask, document_mask, top_k):
    def loss(queries, documents, scale):
        scores = scoring.xtr_scores(queries, documents[:, None], query_mask, document_mask[:, None], top_k)
        return F.cross_entropy(scale * scores.to(queries.dtype), torch.arange(N))

    return loss


def of_fastqt(query_mask, document_mask, top_k):
    def loss(queries, documents, scale):
        return xtr_loss(queries, documents, query_mask, document_mask, scale=scale, top_k=top_k)

    return loss


@pytest.mark.parametrize("at_once", [2**22, 1])
@pytest.mark.parametrize("top_k", [1, 3, 7, 20, 1000])
def test_value_and_gradients_are_the_librarys(top_k, at_once):
    queries, documents, *masks = tokens()
    # The library adds up in float32.
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        wanted = steps(of_library(*masks, top_k), queries, documents)
    room = maxsim.CPU_ROOM if at_once > 1 else maxsim.Room(1, 1, 1)
    with (
        mock.patch("fastqt.losses.xtr.CPU_SCORES_AT_ONCE", at_once),
        mock.patch("fastqt.losses.maxsim.CPU_ROOM", room),
    ):
        ours = steps(of_fastqt(*masks, top_k), queries, documents)
    for x, y in zip(ours, wanted, strict=True):
        assert relative(x, y) <= FLOAT64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_as_near_to_float64_as_the_library(dtype):
    queries, documents, *masks = tokens(dtype)
    exact = steps(of_fastqt(*masks, 7), queries.double(), documents.double())
    theirs = steps(of_library(*masks, 7), queries, documents)
    ours = steps(of_fastqt(*masks, 7), queries, documents)
    for x, y, z in zip(ours, theirs, exact, strict=True):
        assert relative(x, z) <= 1.5 * relative(y, z) + torch.finfo(dtype).eps


def test_no_matrix_of_tokens():
    queries, documents = torch.randn(128, 16, 8), torch.randn(256, 64, 8, requires_grad=True)
    masks = torch.ones(128, 16, dtype=torch.bool), torch.ones(256, 64, dtype=torch.bool)
    with Largest() as largest:
        xtr_loss(queries, documents, *masks, scale=1.0, top_k=9).backward()
    assert largest.elements <= 2**22 < queries[..., 0].numel() * documents[..., 0].numel()


def test_a_query_needs_a_document_with_tokens():
    queries, documents, query_mask, document_mask = tokens()
    document_mask[1] = False
    with pytest.raises(ValueError, match="want at least one token of the document of each query"):
        xtr_loss(queries, documents, query_mask, document_mask, scale=1.0, top_k=3)
