"""Logistic regression of many training sets at once: all folds of a cross-validation, C by C.

The folds share their examples, so one matrix product serves all of them. The solver is Newton's method with
conjugate gradients; its objective is that of scikit-learn's LogisticRegression:

    C Σᵢ cross_entropy(tᵢ, softmax(xᵢ W + b)) + ½ ‖W‖²        over the examples of a training set,

with one column and a sigmoid in place of the softmax where there are two classes, and b free.

scikit-learn is not used instead, because it fits the training sets one by one. In the protocols of MR, CR and
TREC, its fastest solver takes 12 to 19 times the CPU time to come near the same minimum.
The stored run is benchmarks/results/logistic.json; docs/benchmarks.md shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

# Half the squared Newton decrement estimates how far the mean loss is from its minimum.
EXCESS = {torch.float32: 1e-7, torch.float64: 1e-13}
NEWTON_STEPS, CONJUGATE_STEPS, HALVINGS = 60, 60, 12
# Conjugate gradients end at this share of a Newton step's first residual.
RESIDUAL = 0.1


class Classifiers(NamedTuple):
    """The solutions of P training sets at one C, in the dtype of the features."""

    weight: Tensor  # (P, d, K)
    bias: Tensor  # (P, 1, K)

    def log_probs(self, features: Tensor) -> Tensor:
        """(P, n, classes) for features (n, d)."""
        logits = features @ self.weight + self.bias
        if logits.shape[2] == 1:
            return F.logsigmoid(torch.cat([-logits, logits], dim=2))
        return logits.log_softmax(dim=2)


def one_hot(labels: NDArray[np.int64], classes: int) -> NDArray[np.float64]:
    """Class numbers (n,) as targets (n, classes)."""
    return np.eye(classes)[labels]


def fit(
    features: Tensor,  # (n, d)
    targets: NDArray[np.float64],  # (n, classes)
    rows: NDArray[np.bool_],  # (P, n)
    grid: Sequence[float],
) -> Iterator[Classifiers]:
    """Fits a classifier to each of P sets of rows, for each C; yields the classifiers of each C, in order.

    The classifiers of the sets are independent of one another. Ascending values of C are fastest, since each
    fit begins at the solution before.
    """
    P, K = len(rows), targets.shape[1]
    binary = K == 2
    columns = 1 if binary else K
    target = torch.from_numpy(targets[:, 1:] if binary else targets).to(features.dtype)
    basis, center, design, spread = _rotated(features)
    shares = torch.from_numpy(rows).to(features.dtype).T[:, :, None]  # (n, P, 1)
    problem = _Problem(design, target[:, None], shares / shares.sum(dim=0), spread)
    weight = design.new_zeros(design.shape[1], P, columns)
    for C in grid:
        ridge = 1 / (C * shares.sum(dim=0))
        for _ in range(NEWTON_STEPS):
            if not problem.improve(weight, ridge):
                break
        weights = (basis @ weight[1:].flatten(1)).view(-1, P, columns)
        bias = weight[0] - torch.tensordot(center, weights, dims=1)
        yield Classifiers(weights.transpose(0, 1).contiguous(), bias[:, None])


def _rotated(features: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Centred features in the basis of their principal axes, where the Hessian is nearly diagonal.

    A rotation leaves the penalty unchanged, and b makes up for the translation. Where there are more features
    than rows, axes without variance are left out, because the minimum has no weight on them.
    """
    center = features.mean(dim=0)
    centered = features - center
    n, d = centered.shape
    if d <= n:
        basis = torch.linalg.eigh((centered.T @ centered).double())[1].to(features.dtype)
    else:
        wide = centered.double()
        values, vectors = torch.linalg.eigh(wide @ wide.T)
        kept = vectors[:, values > values[-1] * n * torch.finfo(wide.dtype).eps]
        basis = F.normalize(wide.T @ kept, dim=0).to(features.dtype)
    design = torch.cat([centered.new_ones(n, 1), centered @ basis], dim=1)
    return basis, center, design, design.square().mean(dim=0)[:, None, None]


class _Problem:
    """The mean loss of each training set plus ½ `ridge` ‖W‖², and its Newton step.

    Shapes: weights (r + 1, P, K), the bias first; logits (n, P, K); a figure a set (P, 1).
    """

    def __init__(self, design: Tensor, target: Tensor, shares: Tensor, spread: Tensor) -> None:
        self.design, self.target, self.shares, self.spread = design, target, shares, spread

    def improve(self, weight: Tensor, ridge: Tensor) -> bool:
        """Takes a Newton step in place for each set that is not at its minimum; False if all sets are."""
        logits = self._forward(weight)
        probs = self._probs(logits)
        slope = self._backward(self.shares * (probs - self.target)) + self._penalty(weight, ridge)
        curvature = (self.shares * probs * (1 - probs)).sum(dim=0)  # (P, K)
        scale = self.spread * curvature + ridge
        excess = (slope.square() / scale).sum(dim=(0, 2)) / 2
        going = torch.nonzero(excess > EXCESS[weight.dtype])[:, 0]
        if not len(going):
            return False
        part = _Problem(self.design, self.target, self.shares[:, going], self.spread)
        ridge, logits, start = ridge[going], logits[:, going], weight[:, going]
        step = part._newton_step(slope[:, going], probs[:, going], scale[:, going], ridge)
        length = part._line_search(start, logits, step, ridge)
        weight[:, going] = start + length * step
        return bool(length.any())

    def _newton_step(self, slope: Tensor, probs: Tensor, scale: Tensor, ridge: Tensor) -> Tensor:
        """Conjugate gradients on Hessian · step = −slope, preconditioned by its estimated diagonal."""
        step = torch.zeros_like(slope)
        residual = -slope
        scaled = residual / scale
        direction = scaled
        power = _dot(residual, scaled)
        enough = power * RESIDUAL**2
        for _ in range(CONJUGATE_STEPS):
            curved = self._curved(direction, probs, ridge)
            # A set that has converged would divide 0 by 0.
            rate = torch.where(power > enough, power / _dot(direction, curved), 0)
            step = step + rate * direction
            residual = residual - rate * curved
            scaled = residual / scale
            before, power = power, _dot(residual, scaled)
            if not (power > enough).any():
                break
            direction = scaled + torch.where(before > 0, power / before, 0) * direction
        return step

    def _line_search(self, weight: Tensor, logits: Tensor, step: Tensor, ridge: Tensor) -> Tensor:
        """The first of 1, ½, ¼, … that does not raise a set's loss; 0 if there is none. (P, 1)"""
        along = self._forward(step)
        here = self._loss(weight, logits, ridge)
        allowed = here + 4 * torch.finfo(here.dtype).eps * here.abs()
        length = torch.ones_like(here)
        for _ in range(HALVINGS):
            loss = self._loss(weight + length * step, logits + length * along, ridge)
            worse = ~(loss <= allowed)
            if not worse.any():
                return length
            length = torch.where(worse, length / 2, length)
        return torch.where(worse, 0, length)

    def _loss(self, weight: Tensor, logits: Tensor, ridge: Tensor) -> Tensor:
        if logits.shape[2] == 1:
            losses = F.softplus(logits) - self.target * logits
        else:
            losses = logits.logsumexp(dim=2, keepdim=True) - (self.target * logits).sum(dim=2, keepdim=True)
        return (self.shares * losses).sum(dim=0) + ridge * weight[1:].square().sum(dim=(0, 2))[:, None] / 2

    def _curved(self, direction: Tensor, probs: Tensor, ridge: Tensor) -> Tensor:
        weighted = probs * self._forward(direction)
        if probs.shape[2] == 1:
            weighted = weighted * (1 - probs)
        else:
            weighted = weighted - probs * weighted.sum(dim=2, keepdim=True)
        return self._backward(self.shares * weighted) + self._penalty(direction, ridge)

    def _forward(self, weight: Tensor) -> Tensor:
        return (self.design @ weight.flatten(1)).view(len(self.design), *weight.shape[1:])

    def _backward(self, logits: Tensor) -> Tensor:
        return (self.design.T @ logits.flatten(1)).view(-1, *logits.shape[1:])

    @staticmethod
    def _probs(logits: Tensor) -> Tensor:
        return logits.sigmoid() if logits.shape[2] == 1 else logits.softmax(dim=2)

    @staticmethod
    def _penalty(weight: Tensor, ridge: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(weight[:1]), ridge * weight[1:]])


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=(0, 2))[:, None]
