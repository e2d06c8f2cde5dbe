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

from fastqt.sentences.evaluation.ranking import first_right
from fastqt.sentences.metrics import ROUNDING

BLOCK_ROWS = 1024  # queries that are compared at once
HALF = 1e-9  # by which a sum of probabilities may differ from a half


class Retrieval(NamedTuple):
    """The results of one direction."""

    r1: float  # recall@1: the share of queries whose best answer has rank 1
    r5: float
    r10: float
    # Half of the ranks, counted from 1, are at most this. Equal scores count once in each order.
    median_rank: float


class Pairs(NamedTuple):
    """Images, and their captions."""

    images: NDArray[np.floating]  # (I, image_dim)
    captions: NDArray[np.floating]  # (N, caption_dim)
    owners: NDArray[np.int64]  # (N,) the number of each caption's image


class LinearMaps(nn.Module):
    """Maps images and captions into a common space, in which their similarity is the cosine.

    `epochs` is the number of passes that `fit_maps` made to get these maps.
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
        caption_ranks, image_ranks = _Ranks(len(x)), _Ranks(len(y))
        for begin in range(0, len(y), BLOCK_ROWS):
            scores = y[begin : begin + BLOCK_ROWS] @ x.T  # (rows, I)
            image = image_of_caption[begin : begin + BLOCK_ROWS, None]
            caption_ranks.add(scores, image == torch.arange(len(x), device="cpu"))
        for begin in range(0, len(x), BLOCK_ROWS):
            scores = x[begin : begin + BLOCK_ROWS] @ y.T
            image = torch.arange(begin, begin + len(scores), device="cpu")[:, None]
            image_ranks.add(scores, image_of_caption == image)
        return image_ranks.figures(), caption_ranks.figures()


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
    """Learns the maps with a margin loss in both directions; `owners` (N,) are the captions' images.

    The loss of a pair is the sum of max(0, margin − s(i, c) + s(i, c')) over contrasting captions c', and of
    max(0, margin − s(i, c) + s(i', c)) over contrasting images i'. These are `contrasts` of each, sampled
    from its batch of `batch_size` captions and their images. With `dev`, the maps of the pass with the
    highest sum of R@1, R@5 and R@10 in both directions on these pairs are returned, the earliest of several,
    and `patience` passes without better ones end the training.

    Source: Kiros et al. (2015), section 3.4.
    """
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

    `owners` (N,) are the numbers of the captions' images.
    """
    by_image, by_caption = _Ranks(len(owners)), _Ranks(images)
    for captions, times in zip(*np.unique(np.bincount(owners), return_counts=True), strict=True):
        if captions:
            by_image.count(times, 0, len(owners), captions)
    by_caption.count(len(owners), 0, images, 1)
    return by_image.figures(), by_caption.figures()


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


class _Ranks:
    """How often the first right answer has each of the ranks 1 … n: of equal scores, on average over orders.

    Where b scores are better than that of the best right answer, and t are equal, of which c are right, its
    rank is b plus the place of the first right one among t in a random order (`first_right`).
    """

    def __init__(self, n: int) -> None:
        self.times = np.zeros(n)

    def add(self, scores: Tensor, right: Tensor) -> None:
        """Counts queries with their scores (Q, n), and the right answers; one without any is left out."""
        # Cosines are equal up to the rounding of their products; maps that have diverged find nothing.
        scores = scores.nan_to_num(nan=-2.0)
        best = scores.masked_fill(~right, -torch.inf).amax(dim=1, keepdim=True)
        equal = (scores - best).abs() <= ROUNDING * torch.finfo(scores.dtype).eps
        better = (scores > best) & ~equal
        cases = torch.stack([each.sum(dim=1) for each in (better, equal, equal & right)], dim=1)
        for case, times in zip(
            *np.unique(cases[right.any(dim=1)].numpy(), axis=0, return_counts=True), strict=True
        ):
            self.count(times, *case.tolist())

    def count(self, times: int, better: int, equal: int, right: int) -> None:
        """Counts queries that have such numbers of better, of equal, and of equal right answers."""
        chances = first_right(equal, right)
        self.times[better : better + len(chances)] += times * chances

    def figures(self) -> Retrieval:
        """The shares of queries with a rank of at most 1, 5 and 10, and the median of all ranks."""
        shares = (self.times / self.times.sum()).cumsum()
        reached = [float(shares[min(limit, len(shares)) - 1]) for limit in (1, 5, 10)]
        median = (shares.searchsorted(0.5 - HALF) + shares.searchsorted(0.5 + HALF)) / 2 + 1
        return Retrieval(reached[0], reached[1], reached[2], float(median))


def _tensor(array: NDArray[np.floating]) -> Tensor:
    return torch.from_numpy(np.array(array, dtype=np.float32))
