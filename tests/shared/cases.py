"""Contrastive problems as arguments for fastqt and, written out, for the numpy oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fastqt
from tests.shared import oracle
from tests.shared.excluding import excluding

N, M, D, K = 13, 17, 6, 5


@dataclass
class Case:
    name: str
    arguments: dict[str, Any]  # of its function
    targets: oracle.Array  # what they mean
    options: dict[str, Any] = field(default_factory=dict)  # of oracle.contrastive
    tensors: tuple[str, ...] = ()  # further inputs that want a gradient
    square: bool = True
    link: str = "softmax"
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of inputs that have another one

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
        """Random leaf tensors of the right shapes that all require a gradient."""
        generator = torch.Generator().manual_seed(seed)
        shapes = {
            "queries": (N, D),
            "candidates": (N if self.square else M, D),
            "negatives": (K, D),
            "row_negatives": (N, D),
            "scale": (),
            "bias": (N if self.square else M,),
            "row_scores": (N,),
            **self.shapes,
        }
        names = ("queries", "candidates", *self.tensors)
        return {
            name: (
                torch.randn(shapes[name], generator=generator, dtype=torch.float64) + (name == "scale") * 2
            )
            .to(dtype)
            .requires_grad_()
            for name in names
        }

    @property
    def function(self) -> Callable[..., Tensor]:
        functions = {"sigmoid": fastqt.sigmoid_loss, "log_sum_exp": fastqt.log_sum_exp}
        return functions.get(self.link, fastqt.contrastive_loss)

    def loss(self, inputs: dict[str, Tensor], **more: Any) -> Tensor:
        return self.function(**inputs, **excluding(self.arguments), **more)

    def expected(self, inputs: dict[str, Tensor], row_weights: oracle.Array | None = None) -> oracle.Result:
        given = {name: x.detach().double().numpy() for name, x in inputs.items()}
        options = {"link": self.link, **self.options, **{name: given[name] for name in self.tensors}}
        return oracle.contrastive(
            given["queries"], given["candidates"], self.targets, row_weights=row_weights, **options
        )


def make_cases() -> list[Case]:
    rng = np.random.default_rng(0)
    document_ids = [0] * 4 + [1] + [2] * 8
    indices = [3, -100, 0, 1, 2, 16, 7, 8, 12, -100, 4, 5, 6]
    one_hot = np.zeros((N, M))
    for i, j in enumerate(indices):
        if j >= 0:
            one_hot[i, j] = 1
    sparse = np.where(rng.random((N, M)) < 0.3, rng.random((N, M)), 0)
    sparse[:, :N] *= 1 - np.eye(N)
    sparse[4] = 0  # a row without targets
    full = rng.random((N, M)) / M
    groups = rng.integers(0, 4, N)
    candidate_groups = rng.integers(0, 4, M)
    mask = (rng.random((N, M)) < 0.3) & (sparse == 0)
    mask[4] = True  # with all of its candidates excluded
    banded = oracle.window(N, N, [-1, 1])
    neighbours = oracle.window(N, N, [-1, 1], normalize=False)
    sigmoid = {"link": "sigmoid"}
    keep = {"diagonal": "keep"}
    return [
        Case("default", {}, banded),
        Case("context of 3", {"context_size": 3}, oracle.window(N, N, [-3, -2, -1, 1, 2, 3])),
        Case("exclude", {"diagonal": "exclude"}, banded, {"diagonal": "exclude"}),
        Case("keep", keep, banded, keep),
        Case("next only", {"targets": fastqt.Window(offsets=[1])}, oracle.window(N, N, [1])),
        Case(
            "weighted window",
            {"targets": fastqt.Window(offsets=[-2, -1, 1, 2], weights=[1, 10, 10, 1])},
            oracle.window(N, N, [-2, -1, 1, 2], [1, 10, 10, 1]),
        ),
        Case(
            "unnormalised window",
            {"targets": fastqt.Window(2, normalize=False)},
            oracle.window(N, N, [-2, -1, 1, 2], normalize=False),
        ),
        Case(
            "documents",
            {"context_size": 2, "document_ids": torch.tensor(document_ids)},
            oracle.window(N, N, [-2, -1, 1, 2], document_ids=document_ids),
        ),
        Case(
            "more candidates",
            {"targets": fastqt.Window(offsets=[1, 4])},
            oracle.window(N, M, [1, 4]),
            square=False,
        ),
        Case("diagonal targets", {"targets": fastqt.Diagonal(), **keep}, np.eye(N, M), keep, square=False),
        Case("class indices", {"targets": torch.tensor(indices), **keep}, one_hot, keep, square=False),
        Case(
            "sparse targets",
            {"targets": fastqt.Sparse(torch.from_numpy(sparse).to_sparse_csr())},
            sparse,
            square=False,
        ),
        Case("dense targets", {"targets": torch.from_numpy(sparse)}, sparse, square=False),
        Case("dense and full", {"targets": torch.from_numpy(full), **keep}, full, keep, square=False),
        Case(
            "smoothed by the window",
            {"targets": fastqt.Window(offsets=[1], smoothing=0.1)},
            oracle.smoothed(oracle.window(N, N, [1], normalize=False), 0.1),
        ),
        Case(
            "smoothed by a weighted window of documents, with negatives",
            {
                "targets": fastqt.Window(
                    weights=[10, 1], smoothing=0.3, document_ids=torch.tensor(document_ids)
                ),
                **keep,
            },
            oracle.smoothed(oracle.window(N, N, [-1, 1], [10, 1], False, document_ids), 0.3),
            keep,
            ("negatives", "scale"),
        ),
        Case("smoothed window", {"targets": fastqt.smoothed(fastqt.Window())}, oracle.smoothed(banded, 0.1)),
        Case(
            "smoothed sparse, kept, with negatives",
            {"targets": fastqt.smoothed(torch.from_numpy(sparse), 0.2, normalize=False), **keep},
            oracle.smoothed(sparse, 0.2, normalize=False),
            keep,
            ("negatives",),
            square=False,
        ),
        Case("negatives", {}, banded, {}, ("negatives",)),
        Case("row negatives", keep, banded, keep, ("row_negatives",)),
        Case(
            "all at once",
            {
                "targets": fastqt.Sparse(torch.from_numpy(sparse).to_sparse_csr()),
                "query_groups": torch.from_numpy(groups),
                "candidate_groups": torch.from_numpy(candidate_groups),
                "mask": torch.from_numpy(mask),
            },
            sparse,
            {"query_groups": groups, "candidate_groups": candidate_groups, "mask": mask},
            ("negatives", "row_negatives", "scale"),
            square=False,
        ),
        Case("row scores", {}, banded, {}, ("row_scores", "scale")),
        Case(
            "row scores with smoothed targets",
            {"targets": fastqt.smoothed(torch.from_numpy(sparse), 0.2), **keep},
            oracle.smoothed(sparse, 0.2),
            keep,
            ("negatives", "row_scores"),
            square=False,
        ),
        Case(
            "several row negatives and row scores, of excluded rows too",
            {"targets": torch.from_numpy(sparse).to_sparse_csr(), "mask": torch.from_numpy(mask)},
            sparse,
            {"mask": mask},
            ("row_negatives", "row_scores", "scale", "bias"),
            square=False,
            shapes={"row_negatives": (N, 3, D), "row_scores": (N, 2)},
        ),
        Case("learnt scale", {}, banded, {}, ("scale",)),
        Case(
            "groups",
            {"query_groups": torch.from_numpy(groups), "candidate_groups": torch.from_numpy(groups), **keep},
            banded,
            {"query_groups": groups, "candidate_groups": groups, **keep},
        ),
        Case("biases", {}, banded, {}, ("scale", "bias")),
        Case(
            "biases of classes",
            {"targets": torch.tensor(indices), **keep},
            one_hot,
            keep,
            ("negatives", "bias"),
            square=False,
        ),
        Case("sigmoid", {}, neighbours, keep, ("scale", "bias"), **sigmoid),
        Case("sigmoid, zero", {"diagonal": "zero"}, neighbours, **sigmoid),
        Case("sigmoid, row scores", {}, neighbours, keep, ("row_scores", "bias"), **sigmoid),
        Case(
            "sigmoid, row scores with a target matrix",
            {"targets": torch.from_numpy(sparse)},
            sparse,
            keep,
            ("row_negatives", "row_scores"),
            square=False,
            shapes={"row_scores": (N, 2)},
            **sigmoid,
        ),
        Case(
            "sigmoid of documents, exclude",
            {"context_size": 2, "document_ids": torch.tensor(document_ids), "diagonal": "exclude"},
            oracle.window(N, N, [-2, -1, 1, 2], document_ids=document_ids, normalize=False),
            {"diagonal": "exclude"},
            **sigmoid,
        ),
        Case(
            "sigmoid, class indices",
            {"targets": torch.tensor(indices)},
            one_hot,
            keep,
            ("bias",),
            square=False,
            **sigmoid,
        ),
        Case(
            "sigmoid, smoothed",
            {"targets": fastqt.smoothed(torch.from_numpy(sparse), 0.2)},
            oracle.smoothed(sparse, 0.2),
            keep,
            ("negatives", "bias"),
            square=False,
            **sigmoid,
        ),
        Case(
            "sigmoid, all at once",
            {
                "targets": fastqt.Sparse(torch.from_numpy(sparse).to_sparse_csr()),
                "query_groups": torch.from_numpy(groups),
                "candidate_groups": torch.from_numpy(candidate_groups),
                "mask": torch.from_numpy(mask),
                "diagonal": "zero",
            },
            sparse,
            {"query_groups": groups, "candidate_groups": candidate_groups, "mask": mask},
            ("negatives", "row_negatives", "scale", "bias"),
            square=False,
            **sigmoid,
        ),
    ]


CASES = make_cases()
