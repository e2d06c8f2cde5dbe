"""What `fastqt check` computes: losses, their formulas in plain PyTorch, and inputs of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.functional import contrastive_loss, sigmoid_loss
from fastqt.losses.clip import clip_loss
from fastqt.losses.info_nce import info_nce_loss
from fastqt.losses.siglip import siglip_loss

LEARNT = 24.0  # the score of each pair of converged inputs, beside which all others are small

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A loss at one size. Its formula has the same arguments, and gives the losses of the rows, (N,)."""

    name: str
    loss: Callable[..., Tensor]
    formula: Callable[..., Tensor]
    inputs: Callable[[int, int, int, int], Inputs]  # of N, M, K and D; float32, on the CPU
    N: int
    M: int
    D: int
    K: int = 0  # negatives of all rows
    beyond_eager: bool = False  # not for an engine that is plain PyTorch
    in_float32_alone: bool = False  # the first of the dtypes, because it takes long

    def at(self, divisor: int) -> Case:
        """The same loss with fewer rows and columns."""
        N, M, K = (-(-size // divisor) for size in (self.N, self.M, self.K))
        return replace(self, N=N, M=M, K=K, D=max(self.D // divisor, 9))

    def make(self) -> Inputs:
        """The inputs: the same ones whenever they are made."""
        return self.inputs(self.N, self.M, self.K, self.D)


def window_matrix(size: int, context_size: int) -> Tensor:
    """The targets of QuickThoughts as a dense matrix, (size, size) float32.

    Each row is uniform over the sentence's neighbours, and 0 elsewhere.
    """
    numbers = torch.arange(size, device="cpu")
    offset = numbers[:, None] - numbers
    near = ((offset.abs() <= context_size) & (offset != 0)).float()
    return near / near.sum(dim=1, keepdim=True)


def of_window(queries: Tensor, candidates: Tensor) -> Tensor:
    """The divergence of QuickThoughts' loss, with the neighbours of each row as targets."""
    T = _window(queries)
    scores = _without_diagonal(queries @ candidates.T)
    return F.kl_div(scores.log_softmax(1), T, reduction="none").sum(1)


def of_binary_window(queries: Tensor, candidates: Tensor) -> Tensor:
    """The binary cross-entropy of every query with every candidate, of which its neighbours are targets."""
    T = (_window(queries) > 0).to(queries)
    scores = queries @ candidates.T
    return F.binary_cross_entropy_with_logits(scores, T, reduction="none").sum(1)


def of_cosines(queries: Tensor, candidates: Tensor, negatives: Tensor) -> Tensor:
    """InfoNCE of cosines, 20 times as large, among all candidates and negatives."""
    columns = F.normalize(torch.cat([candidates, negatives]), dim=1)
    return _of_pairs(20 * F.normalize(queries, dim=1) @ columns.T)


def of_products(queries: Tensor, candidates: Tensor) -> Tensor:
    """InfoNCE of inner products."""
    return _of_pairs(queries @ candidates.T)


def of_siglip(a: Tensor, b: Tensor) -> Tensor:
    """SigLIP with a scale of 10 and a bias of -5."""
    scores = 10 * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T - 5
    T = torch.eye(*scores.shape, device=a.device, dtype=a.dtype)
    return F.binary_cross_entropy_with_logits(scores, T, reduction="none").sum(1)


def of_clip(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """CLIP with a learnt scale: the mean of the losses of both directions."""
    scores = scale.to(a.dtype) * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
    return (_of_pairs(scores) + _of_pairs(scores.T)) / 2


def of_products_of_both(a: Tensor, b: Tensor) -> Tensor:
    """CLIP of inner products."""
    scores = a @ b.T
    return (_of_pairs(scores) + _of_pairs(scores.T)) / 2


def _of_pairs(scores: Tensor) -> Tensor:
    """The cross-entropy of each row of scores, whose target is on the diagonal."""
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device), reduction="none")


def _window(queries: Tensor) -> Tensor:
    return window_matrix(len(queries), 1).to(queries)


def _without_diagonal(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.eye(len(scores), dtype=torch.bool, device=scores.device), 0)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _rows(rows: int, D: int, generator: torch.Generator) -> Tensor:
    """Random rows whose products with each other are of the size of 1."""
    return torch.randn(rows, D, generator=generator, device="cpu") / float(D**0.25)


def two_sides(N: int, M: int, K: int, D: int, names: tuple[str, str] = ("queries", "candidates")) -> Inputs:
    """Random queries and candidates, and negatives if there are any."""
    generator = _generator()
    sides = {name: _rows(rows, D, generator) for name, rows in zip(names, (N, M), strict=True)}
    return {**sides, "negatives": _rows(K, D, generator)} if K else sides


def converged(N: int, M: int, K: int, D: int, names: tuple[str, str] = ("queries", "candidates")) -> Inputs:
    """Each query scores `LEARNT` with its own candidate.

    Here a loss that subtracts the score of the target from a logsumexp with it has no digit left.
    """
    candidates = F.normalize(_rows(M, D, _generator()), dim=1)
    return dict(zip(names, (LEARNT * candidates[:N], candidates), strict=True))


def two_views(N: int, M: int, K: int, D: int) -> Inputs:
    """Random inputs of CLIP, with a scale of 14.3, as a float32 parameter."""
    sides = two_sides(N, M, K, D, ("a", "b"))
    return {**sides, "scale": torch.tensor(14.3, device="cpu")}


_INFO_NCE = partial(info_nce_loss, scale=1.0, normalize=False)
_CLIP = partial(clip_loss, scale=1.0, normalize=False)
_SIGLIP = partial(siglip_loss, scale=10.0, bias=-5.0)
_OF_BOTH = partial(converged, names=("a", "b"))

# Sizes that no tile of a kernel divides.
CASES = (
    Case("contrastive, window", contrastive_loss, of_window, two_sides, 301, 301, 77),
    Case("InfoNCE, cosines, negatives", info_nce_loss, of_cosines, two_sides, 257, 300, 96, K=129),
    Case("InfoNCE, converged", _INFO_NCE, of_products, converged, 256, 261, 128, beyond_eager=True),
    Case("CLIP, learnt scale", clip_loss, of_clip, two_views, 333, 333, 100),
    Case("SigLIP", _SIGLIP, of_siglip, partial(two_sides, names=("a", "b")), 203, 310, 65),
    Case("CLIP, converged", _CLIP, of_products_of_both, _OF_BOTH, 255, 255, 128, beyond_eager=True),
    Case("sigmoid, window", sigmoid_loss, of_binary_window, two_sides, 190, 190, 50),
    # So many cells that memory="low" takes some of the rows at a time on a CPU.
    Case(
        "contrastive, several chunks",
        contrastive_loss,
        of_window,
        two_sides,
        2309,
        2309,
        64,
        beyond_eager=True,
        in_float32_alone=True,
    ),
)
QUICK_CASES = tuple(case.at(5) for case in CASES[:-1])
