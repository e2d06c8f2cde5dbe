"""SigLIP's loss equals its definition with the whole matrix of scores, value and gradients."""

import pytest
import torch
import torch.nn.functional as F

import fastqt
from tests.shared.loss_views import N, by_backend, by_memory, check, cosines, views
from tests.shared.tolerances import FLOAT32


@by_backend
@by_memory
def test_is_the_definition(backend, memory):
    a, b = inputs = views(N, N)
    scale = torch.tensor(10.0, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(-10.0, dtype=torch.float64, requires_grad=True)
    signs = 2 * torch.eye(N, dtype=torch.float64) - 1
    expected = -F.logsigmoid(signs * (scale * cosines(a, b) + bias)).sum() / N
    loss = fastqt.siglip_loss(a, b, scale=scale, bias=bias, backend=backend, memory=memory)
    check(loss, expected, [*inputs, scale, bias])


def with_captions(images, texts, scale, bias, positives):
    """Every pair's binary cross-entropy, as the paper has it of one positive: sign 1 or -1."""
    scores = scale * cosines(images, texts) + bias
    return -F.logsigmoid((2 * positives - 1) * scores).sum() / len(images)


def several_captions(converged):
    """Images, three texts of each, and which text is of which image; once learnt nearly the images' own."""
    owners = torch.arange(3 * N) % N
    images, texts = views(N, 3 * N)
    if converged:
        texts = (images[owners] + 0.01 * texts).detach().requires_grad_()
    numbers = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (10.0, -8.0))
    return [images, texts, *numbers], F.one_hot(owners, N).T.double()


@by_backend
@by_memory
@pytest.mark.parametrize("converged", [False, True])
def test_several_texts_of_an_image_are_all_positives(backend, memory, converged):
    """`sigmoid_loss` with targets of 0 and 1, of which the zeros are not stored."""
    inputs, positives = several_captions(converged)
    images, texts, scale, bias = inputs
    loss = fastqt.sigmoid_loss(
        *(images, texts, fastqt.Sparse(positives.to_sparse_csr())),
        **{"scale": scale, "bias": bias, "normalize": True, "diagonal": "keep"},
        **{"backend": backend, "memory": memory},
    )
    check(loss, with_captions(*inputs, positives), inputs)


@by_backend
def test_several_texts_in_float32_once_learnt(backend):
    """Positives score 10 and the bias is half of it off, so that p - t is a small difference."""
    inputs, positives = several_captions(converged=True)
    wanted = with_captions(*inputs, positives)
    narrow = [x.detach().float().requires_grad_() for x in inputs]
    images, texts, scale, bias = narrow
    targets = fastqt.Sparse(positives.to_sparse_csr())
    options = {"normalize": True, "diagonal": "keep", "backend": backend}
    loss = fastqt.sigmoid_loss(images, texts, targets, scale=scale, bias=bias, **options)
    check(loss, wanted, narrow, 4 * FLOAT32, of_expected=inputs)
