"""Retrieval of images by captions and of captions by images, with a linear map of each side."""

from __future__ import annotations

import copy
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

BLOCK_ROWS = 1024  # queries that are compared at once
ROUNDING = 1e-9  # of a product of probabilities


class Retrieval(NamedTuple):
    """The results of one direction."""

    r1: float  # recall@1: the share of queries whose best answer has rank 1
    r5: float
    r10: float
    median_rank: float  # ranks are counted from 1; among equal scores, the right one has the middle rank


class Pairs(NamedTuple):
    """Images, and their captions."""

    images: NDArray[np.floating]  # (I, image_dim)
    captions: NDArray[np.floating]  # (N, caption_dim)
    owners: NDArray[np.int64]  # (N,) the number of each caption's image


class LinearMaps(nn.Module):
    """Maps images and captions into a common space, in which their similarity is the cosine.

    Attributes:
        epochs: the number of passes that `fit_maps` made to get these maps.

    Args:
        image_dim: width of the image vectors.
        caption_dim: width of the caption vectors.
        dim: width of the common space.

    Example:
        >>> import torch
        >>> from fastqt.sentences.evaluation import LinearMaps
        >>> maps = LinearMaps(32, 16, dim=8)
        >>> images, captions = maps(torch.randn(4, 32), torch.randn(12, 16))
        >>> images.shape, captions.shape
        (torch.Size([4, 8]), torch.Size([12, 8]))
    """

    def __init__(self, image_dim: int, caption_dim: int, dim: int = 1000) -> None:
        super().__init__()
        self.image = nn.Linear(image_dim, dim)
        self.caption = nn.Linear(caption_dim, dim)
        self.epochs = 0

    def forward(self, images: Tensor, captions: Tensor) -> tuple[Tensor, Tensor]:
        """Maps images (n, image_dim) and captions (m, caption_dim) to unit vectors (n, dim) and (m, dim)."""
        return F.normalize(self.image(images), dim=1), F.normalize(self.caption(captions), dim=1)

    @torch.no_grad()
    def retrieve(
        self,
        images: NDArray[np.floating],  # (I, image_dim)
        captions: NDArray[np.floating],  # (N, caption_dim)
        owners: NDArray[np.int64],  # (N,)
    ) -> tuple[Retrieval, Retrieval]:
        """Measures the retrieval in both directions; `owners` are the numbers of the captions' images.

        The results are of finding captions by their image, where the image's best caption counts, and of
        finding images by their caption.
        """
        x, y = self(_tensor(images), _tensor(captions))
        image_of_caption = torch.from_numpy(owners)
        image_ranks = torch.full((len(x),), float(len(y)), dtype=torch.float64, device="cpu")
        caption_ranks = []
        for begin in range(0, len(y), BLOCK_ROWS):
            rows = slice(begin, begin + BLOCK_ROWS)
            scores = y[rows] @ x.T  # (rows, I)
            right = scores.gather(1, image_of_caption[rows, None])
            caption_ranks.append(_rank(scores.scatter(1, image_of_caption[rows, None], -torch.inf), right))
        for begin in range(0, len(x), BLOCK_ROWS):
            scores = x[begin : begin + BLOCK_ROWS] @ y.T
            theirs = image_of_caption == torch.arange(begin, begin + len(scores), device="cpu")[:, None]
            highest = scores.masked_fill(~theirs, -torch.inf).amax(dim=1, keepdim=True)
            image_ranks[begin : begin + BLOCK_ROWS] = _rank(scores.masked_fill(theirs, -torch.inf), highest)
        return _figures(image_ranks[torch.unique(image_of_caption)]), _figures(torch.cat(caption_ranks))


def fit_maps(
    images: NDArray[np.floating],  # (I, image_dim)
    captions: NDArray[np.floating],  # (N, caption_dim)
    owners: NDArray[np.int64],  # (N,)
    *,
    dim: int = 1000,
    margin: float = 0.2,
    contrasts: int = 50,
    epochs: int = 15,
    batch_size: int = 128,
    learning_rate: float = 1e-3,
    seed: int = 0,
    dev: Pairs | None = None,
    patience: int = 5,
    progress: bool = True,
) -> LinearMaps:
    """Learns the maps with a margin loss in both directions.

    The loss of a pair is the sum of max(0, margin − s(i, c) + s(i, c')) over contrasting captions c', and of
    max(0, margin − s(i, c) + s(i', c)) over contrasting images i'.

    Args:
        images: (I, image_dim).
        captions: (N, caption_dim).
        owners: (N,) the number of each caption's image.
        dim: width of the common space.
        margin: how much higher the cosine of a pair should be than that of its contrasts.
        contrasts: number of contrasting captions, and of images, for each pair; sampled from its batch.
        epochs: number of passes over the captions.
        batch_size: number of captions in a batch; their images are the batch's images.
        learning_rate: of Adam.
        seed: seed of the initial maps, the batches and the contrasts.
        dev: pairs on which the maps are tried after each pass. The best ones are returned: those with the
            highest sum of R@1, R@5 and R@10 in both directions; the earliest of several.
        patience: with `dev`, stop after so many passes without better maps.
        progress: show a bar on a terminal.

    Returns:
        The maps, in evaluation mode.

    Raises:
        ValueError: `owners` does not name an image for each caption.

    Example:
        >>> import numpy as np
        >>> from fastqt.sentences.evaluation import fit_maps
        >>> images, owners = np.eye(8, dtype=np.float32), np.arange(16) % 8
        >>> captions = images[owners]  # two for each image
        >>> maps = fit_maps(images, captions, owners, dim=8, epochs=3, progress=False)
        >>> maps.epochs, len(maps.retrieve(images, captions, owners))
        (3, 2)

    Source: Kiros et al. (2015), section 3.4.
    """
    if len(owners) != len(captions) or owners.min() < 0 or owners.max() >= len(images):
        raise ValueError(
            f"owners: want one of {len(images)} images for each of {len(captions)} captions, "
            f"got {len(owners)} from {owners.min()} to {owners.max()}"
        )

    x, y, image_of_caption = _tensor(images), _tensor(captions), torch.from_numpy(owners)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        maps = LinearMaps(x.shape[1], y.shape[1], dim)
        optimizer = torch.optim.Adam(maps.parameters(), learning_rate)

        best, highest = copy.deepcopy(maps), -1.0
        bar = tqdm(range(1, epochs + 1), desc="maps", unit="epoch", disable=None if progress else True)
        for maps.epochs in bar:  # a copy of the maps keeps it
            for rows in torch.randperm(len(y), device="cpu").split(batch_size):
                u, v = maps(x[image_of_caption[rows]], y[rows])
                loss = margin_loss(u, v, image_of_caption[rows], margin, contrasts)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

            if dev is None:
                continue
            if (score := sum(sum(figures[:3]) for figures in maps.retrieve(*dev))) > highest:
                best, highest = copy.deepcopy(maps), score
            elif maps.epochs - best.epochs >= patience:
                break
    return (maps if dev is None else best).eval()


def chance(owners: NDArray[np.int64], images: int) -> tuple[Retrieval, Retrieval]:
    """What `LinearMaps.retrieve` finds on average, in both directions, where all orders are equally likely.

    `owners` (N,) are the numbers of the captions' images. Half of the ranks are at most the median.
    """
    N = len(owners)
    counts, times = np.unique(np.unique(owners, return_counts=True)[1], return_counts=True)
    drawn = np.arange(N)
    # The chance that none of an image's c captions is among the first r: a product over the first r draws.
    missed = np.clip((N - counts[:, None] - drawn) / (N - drawn), 0, 1).cumprod(axis=1)
    recalls = 1 - times @ missed / times.sum()
    shares = [float(recalls[min(limit, N) - 1]) for limit in (1, 5, 10)]
    median = 1 + int(np.argmax(recalls >= 0.5 - ROUNDING))
    by_caption = [min(limit / images, 1.0) for limit in (1, 5, 10)]
    return (
        Retrieval(shares[0], shares[1], shares[2], median),
        Retrieval(by_caption[0], by_caption[1], by_caption[2], (images + 1) // 2),
    )


def margin_loss(
    images: Tensor,  # (B, dim)
    captions: Tensor,  # (B, dim)
    owners: Tensor,  # (B,)
    margin: float,
    contrasts: int,
) -> Tensor:
    scores = images @ captions.T
    others = owners[:, None] != owners
    loss = scores.new_zeros(())
    for direction in (scores, scores.T):
        violations = (margin - direction.diagonal()[:, None] + direction).clamp(min=0)
        # Sampling without replacement: each row takes the contrasts with the highest random keys. A caption
        # of the same image has the key -1, and counts 0 if it is taken nevertheless.
        keys = torch.rand(scores.shape, device="cpu").masked_fill(~others, -1)
        chosen = keys.topk(min(contrasts, len(scores)), dim=1).indices
        loss = loss + (violations * others).gather(1, chosen).sum(dim=1).mean()
    return loss


def _rank(others: Tensor, right: Tensor) -> Tensor:
    """The rank, counted from 1, that the score of the right answer has among those of other answers.

    Among equal scores it is the middle one, so that vectors which are all alike do not count as found.
    """
    return 1 + (others > right).sum(dim=1) + (others == right).sum(dim=1).double() / 2


def _figures(ranks: Tensor) -> Retrieval:
    shares = [float((ranks <= limit).double().mean()) for limit in (1, 5, 10)]
    return Retrieval(shares[0], shares[1], shares[2], float(np.median(ranks.numpy())))


def _tensor(array: NDArray[np.floating]) -> Tensor:
    return torch.from_numpy(np.array(array, dtype=np.float32))
