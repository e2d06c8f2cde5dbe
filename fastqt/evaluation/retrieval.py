"""Images by their captions and captions by their images, through a linear map of each side."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

ROWS = 1024


class Retrieval(NamedTuple):
    """Of one direction: the share of queries with an answer among the first so many, and the median rank."""

    r1: float
    r5: float
    r10: float
    median_rank: float  # from 1


class LinearMaps(nn.Module):
    """Images and captions mapped into one space, where similarity is cosine.

    Args:
        image_dim, caption_dim: widths of the vectors given.
        dim: width of the common space.
    """

    def __init__(self, image_dim: int, caption_dim: int, dim: int = 1000) -> None:
        super().__init__()
        self.image = nn.Linear(image_dim, dim)
        self.caption = nn.Linear(caption_dim, dim)

    def forward(self, images: Tensor, captions: Tensor) -> tuple[Tensor, Tensor]:
        """Unit vectors (n, dim) and (m, dim)."""
        return F.normalize(self.image(images), dim=1), F.normalize(self.caption(captions), dim=1)

    @torch.no_grad()
    def retrieve(
        self,
        images: NDArray[np.floating],  # (I, image_dim)
        captions: NDArray[np.floating],  # (N, caption_dim)
        owners: NDArray[np.int64],  # (N,)
    ) -> tuple[Retrieval, Retrieval]:
        """Figures for finding captions by their image (the best of its captions counts), and the reverse."""
        x, y = self(_tensor(images), _tensor(captions))
        own = torch.from_numpy(owners)
        best = torch.full((len(x),), len(y), dtype=torch.int64)
        reverse = []
        for begin in range(0, len(y), ROWS):
            rows = slice(begin, begin + ROWS)
            scores = y[rows] @ x.T  # (rows, I)
            reverse.append(_rank(scores, scores.gather(1, own[rows, None])))
        for begin in range(0, len(x), ROWS):
            scores = x[begin : begin + ROWS] @ y.T
            theirs = own == torch.arange(begin, begin + len(scores))[:, None]
            highest = scores.masked_fill(~theirs, -torch.inf).amax(dim=1, keepdim=True)
            best[begin : begin + ROWS] = _rank(scores, highest)
        return _figures(best[torch.unique(own)]), _figures(torch.cat(reverse))


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
    progress: bool = True,
) -> LinearMaps:
    """Learns the maps: an image is to be nearer to its caption than to another's by a margin, and reversely.

    A pair's loss is the sum of max(0, margin − s(i, c) + s(i, c')) over contrasting captions c' and of
    max(0, margin − s(i, c) + s(i', c)) over contrasting images i'. (Kiros et al. 2015, section 3.4.)

    Args:
        images: (I, image_dim).
        captions: (N, caption_dim).
        owners: (N,) the image of each caption.
        dim: width of the common space.
        margin: by which a pair's cosine is to be higher.
        contrasts: how many of each kind a pair has, sampled from the others of its batch.
        epochs, batch_size, learning_rate: of Adam; a batch holds so many captions with their images.
        seed: of the initial maps, the batches and the contrasts.
        progress: show a bar on a terminal.
    """
    if len(owners) != len(captions) or owners.min() < 0 or owners.max() >= len(images):
        raise ValueError(
            f"owners: wanted one of {len(images)} images for each of {len(captions)} captions, "
            f"got {len(owners)} from {owners.min()} to {owners.max()}"
        )
    x, y, own = _tensor(images), _tensor(captions), torch.from_numpy(owners)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        maps = LinearMaps(x.shape[1], y.shape[1], dim)
        optimizer = torch.optim.Adam(maps.parameters(), learning_rate)
        for _ in tqdm(range(epochs), desc="maps", unit="epoch", disable=None if progress else True):
            for rows in torch.randperm(len(y)).split(batch_size):
                shown, told = maps(x[own[rows]], y[rows])
                loss = _margin_loss(shown, told, own[rows], margin, contrasts)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return maps.eval()


def _margin_loss(
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
        # Random keys in place of sampling: each row's highest few among those that are not its own.
        keys = torch.rand(scores.shape).masked_fill(~others, -1)
        chosen = keys.topk(min(contrasts, len(scores)), dim=1).indices
        loss = loss + (violations * others).gather(1, chosen).sum(dim=1).mean()
    return loss


def _rank(scores: Tensor, reached: Tensor) -> Tensor:
    """1 and how many scores of a row are higher than the one reached."""
    return 1 + (scores > reached).sum(dim=1)


def _figures(ranks: Tensor) -> Retrieval:
    shares = [float((ranks <= limit).double().mean()) for limit in (1, 5, 10)]
    return Retrieval(shares[0], shares[1], shares[2], float(np.median(ranks.numpy())))


def _tensor(array: NDArray[np.floating]) -> Tensor:
    return torch.from_numpy(np.array(array, dtype=np.float32))
