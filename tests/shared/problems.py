"""Random problems: arguments of any make for the losses, valid or not, and their targets as a matrix.

tests/functional/test_random_problems.py runs the same few in every run, benchmarks.random_problems draws
others for as long as one likes, and the fuzzer makes them from its bytes. problem_check.py compares them with
the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

import fastqt
from tests.shared import oracle
from tests.shared.draws import Drawn, Draws, Source
from tests.shared.filters import OF_IDS

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ALL_DTYPES = (*DTYPES, torch.float64)
MAGNITUDES = (1.0, 0.01, 8.0, 1.0, 1e-12, 1e6)
SCALES = (20.0, 0.5, 3.0, 1.0, -1.0, 0.0, 1e-20, 1e4, 1e15)
ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)
WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(repr=False)
class Problem:
    """A call of a loss.

    Attributes:
        link: "softmax" for `contrastive_loss`, "sigmoid" for `sigmoid_loss`.
        arguments: of the call.
        targets: the target matrix (N, M), or None where no loss may accept the targets.
        upstream: the gradient that arrives at the loss, () or (N,).
        autocast: the dtype to which autocast rounds during the call.
        needs: the arguments whose gradients are wanted.
        refusals: the arguments that a refusal may name. The loss accepts all else.
        excluded, excluded_negatives: which candidates (N, M) and negatives (N, K) leave, but for a margin.
        margin: for false negatives, with its strategy.
        makes: what is particular to the problem, for those who count.
    """

    link: str = "softmax"
    arguments: dict[str, Any] = field(default_factory=dict)
    targets: np.ndarray | None = None
    upstream: Tensor = torch.ones(())  # noqa: RUF009
    autocast: torch.dtype | None = None
    needs: tuple[str, ...] = ()
    refusals: set[str] = field(default_factory=set)
    excluded: np.ndarray | None = None
    excluded_negatives: np.ndarray | None = None
    margin: fastqt.Margin | None = None
    makes: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"Problem({', '.join(self.makes)})"

    def exclude(self, filter_: Any, cells: np.ndarray, of_negatives: np.ndarray | None = None) -> None:
        """Adds a filter, and the cells that leave by it."""
        self.arguments["exclude"] = [*self.arguments.get("exclude", ()), filter_]
        self.excluded = cells if self.excluded is None else self.excluded | cells
        if of_negatives is not None:
            others = self.excluded_negatives
            self.excluded_negatives = of_negatives if others is None else others | of_negatives


@st.composite
def problems(
    draw: Callable[[Any], Any], dtypes: Sequence[torch.dtype] = ALL_DTYPES, most: int = 12
) -> Problem:
    return Maker(Drawn(draw), dtypes, most).problem


class Maker(Draws):
    """Makes one problem, of at most `most` rows and columns and of one of `dtypes`."""

    def __init__(self, source: Source, dtypes: Sequence[torch.dtype] = ALL_DTYPES, most: int = 12) -> None:
        super().__init__(source)
        self.problem = Problem(link=self.choice(("softmax", "sigmoid")), makes=self.makes)
        self.N, self.D = source.integer(1, most), source.integer(1, most)
        self.M = self.N if self.flag() else source.integer(1, most + 2)
        self.rng = np.random.default_rng(source.integer(0, 65535))
        self.dtype = self.choice(dtypes)
        arguments = self.problem.arguments
        self.noted(f"{self.problem.link}, {str(self.dtype).removeprefix('torch.')}")
        arguments["diagonal"] = self.choice(("zero", "exclude", "keep"))
        arguments["queries"] = self.matrix(self.N)
        arguments["candidates"] = self.matrix(self.M)
        self.add_targets()
        self.add_scores()
        self.add_negatives()
        self.add_similarity()
        self.add_exclusions()
        self.add_guide()
        if self.problem.targets is not None and self.rarely(6):
            self.converge()
        self.add_reduction()
        self.add_margin()
        self.add_prefixes()
        self.add_ids()

    def matrix(self, rows: int) -> Tensor:
        return self.laid_out(self.rng.normal(size=(rows, self.D)) * self.choice(MAGNITUDES), self.dtype)

    def ids(self, length: int) -> Tensor:
        return self.vector(self.rng.integers(0, 3, length), self.choice(ID_DTYPES))

    def add_targets(self) -> None:
        kind = self.choice(("window", "offsets", "diagonal", "indices", "dense", "sparse"))
        problem, arguments = self.problem, self.problem.arguments
        problem.targets = getattr(self, f"add_{kind}")()
        if kind != "window" and self.rarely(5):
            kind += ", smoothed"
            self.smooth()
        self.noted(f"targets {kind}")
        if problem.targets is None:
            return
        on_diagonal = np.diagonal(problem.targets).any()
        replaced = arguments["diagonal"] != "keep"
        window = arguments.get("targets")
        offset_zero = isinstance(window, fastqt.Window) and 0 in window.offsets
        if replaced and (on_diagonal or offset_zero or "diagonal" in kind):
            problem.refusals.add("targets")

    def add_window(self) -> np.ndarray:
        arguments = self.problem.arguments
        size = arguments["context_size"] = self.source.integer(1, 4)
        ids = arguments["document_ids"] = self.ids(self.N) if self.flag() and self.N == self.M else None
        self.check_reach(size)
        offsets = [o for o in range(-size, size + 1) if o]
        return oracle.window(self.N, self.M, offsets, None, self.problem.link == "softmax", _list(ids))

    def check_reach(self, reach: int) -> None:
        """A window that reaches beyond the batch is refused."""
        if reach >= max(self.N, self.M):
            self.problem.refusals |= {"offsets", "size", "context_size"}

    def replaces(self) -> bool:
        """Whether targets avoid the diagonal, where no loss accepts any. At times they do not."""
        return self.problem.arguments["diagonal"] != "keep" and not self.rarely(8)

    def add_offsets(self) -> np.ndarray:
        offsets = list(dict.fromkeys(self.source.integer(-4, 4) for _ in range(self.source.integer(1, 4))))
        if self.replaces() and len(offsets) > 1 and 0 in offsets:
            offsets.remove(0)
        weights = [self.choice((1.0, 0.25, 10.0)) for _ in offsets] if self.flag() else None
        ids = self.ids(self.N) if self.flag() and self.N == self.M else None
        normalize = self.flag()
        self.check_reach(max(map(abs, offsets)))
        self.problem.arguments["targets"] = fastqt.Window(
            offsets=offsets, weights=weights, normalize=normalize, document_ids=ids
        )
        return oracle.window(self.N, self.M, offsets, weights, normalize, _list(ids))

    def add_diagonal(self) -> np.ndarray:
        if not self.rarely(8):
            self.problem.arguments["diagonal"] = "keep"
        self.problem.arguments["targets"] = fastqt.Diagonal()
        return np.eye(self.N, self.M)

    def add_indices(self) -> np.ndarray | None:
        columns = self.rng.integers(-1, self.M + self.rarely(10), self.N)
        if self.replaces():
            columns[columns == np.arange(self.N)] = -1
        columns[columns == -1] = -100
        indices = self.problem.arguments["targets"] = self.vector(columns, self.choice(ID_DTYPES))
        T = np.zeros((self.N, self.M))
        for i, j in enumerate(indices.tolist()):
            if j != -100 and not 0 <= j < self.M:
                self.problem.refusals.add("targets")
                return None
            if j != -100:
                T[i, j] = 1.0
        return T

    def weights(self) -> np.ndarray:
        """A matrix of weights (N, M), most of them 0."""
        T = np.where(self.rng.random((self.N, self.M)) < 0.4, self.rng.random((self.N, self.M)), 0)
        if self.replaces():
            np.fill_diagonal(T, 0)
        return T * self.choice((1.0, 1.0, 1e-3, 1e3))

    def add_dense(self) -> np.ndarray:
        T = self.problem.arguments["targets"] = self.laid_out(self.weights(), self.choice(WEIGHT_DTYPES))
        return T.double().numpy()

    def add_sparse(self) -> np.ndarray:
        """Compressed rows whose columns are in any order, with zeros, and at times with a column twice."""
        dtype, twice = self.choice(WEIGHT_DTYPES[:2]), self.rarely(4)
        W = torch.from_numpy(self.weights()).to(dtype).double().numpy()
        starts, columns, values = [0], [], []
        for i in range(self.N):
            chosen = [int(j) for j in self.rng.permutation(self.M) if W[i, j] or self.rng.random() < 0.1]
            chosen += chosen[:1] if twice else []
            columns += chosen
            values += [W[i, j] for j in chosen]
            starts.append(len(columns))
        T = np.zeros((self.N, self.M))
        np.add.at(T, (np.repeat(np.arange(self.N), np.diff(starts)), np.array(columns, np.int64)), values)
        index = self.choice((torch.int64, torch.int32))
        self.problem.arguments["targets"] = torch.sparse_csr_tensor(
            torch.tensor(starts, dtype=index),
            torch.tensor(columns, dtype=index),
            torch.tensor(values, dtype=dtype),
            (self.N, self.M),
            check_invariants=False,  # a column that occurs twice violates them
        )
        if twice and columns:
            self.noted("targets sparse, a column twice")
            self.problem.refusals |= {"targets", "csr_tensor"}  # refused or summed up
        return T

    def smooth(self) -> None:
        problem = self.problem
        smoothing, normalize = self.choice((0.1, 0.3, 5.0)), self.flag()
        if "csr_tensor" in problem.refusals:
            return
        problem.arguments["targets"] = fastqt.smoothed(
            problem.arguments["targets"], smoothing, normalize=normalize
        )
        if problem.targets is not None:
            problem.targets = oracle.smoothed(problem.targets, smoothing, normalize)
        if problem.arguments["diagonal"] == "exclude" and self.rarely(8):
            problem.refusals.add("targets")
        elif problem.arguments["diagonal"] == "exclude":
            problem.arguments["diagonal"] = "zero"
        self.noted("smoothed")

    def add_scores(self) -> None:
        arguments = self.problem.arguments
        if self.flag():
            scale = arguments["scale"] = self.choice(SCALES)
            if self.flag():
                arguments["scale"] = torch.tensor(scale, dtype=self.choice((torch.float32, torch.float64)))
            elif scale <= 0 and self.rarely(4):
                self.problem.refusals.add("scale")
            elif scale <= 0:
                arguments["scale"] = scale = 10.0
            self.noted(f"scale {scale:g}" + ", tensor" * isinstance(arguments["scale"], Tensor))
        if self.rarely(3):
            biases = self.rng.normal(size=self.M) * 5
            bias = self.vector(biases, self.choice((torch.float32, torch.float64)))
            arguments["bias"] = self.choice((bias, bias[0], float(bias[0])))
            self.noted("bias")
        if self.rarely(4):
            arguments["normalize"] = True
            self.noted("normalize")

    def add_negatives(self) -> None:
        arguments = self.problem.arguments
        if self.rarely(3):
            arguments["negatives"] = self.matrix(self.source.integer(1, 5))
            self.noted("negatives")
        kind = self.choice(("none", "given", "mixed", "none"))
        if kind == "given":
            arguments["row_negatives"] = self.matrix(self.N)
        elif kind == "mixed":
            partners = torch.from_numpy(self.rng.integers(0, self.M, self.N)) if self.flag() else None
            arguments["row_negatives"] = fastqt.Mixed(self.choice((0.2, 0.5, 0.9)), partners)
            if self.N > self.M:
                self.problem.refusals.add("row_negatives")
        self.noted(f"row negatives {kind}")
        if self.rarely(3):
            self.add_row_cells(kind)

    def add_row_cells(self, kind: str) -> None:
        """Several row negatives in place of one, and row scores."""
        arguments = self.problem.arguments
        if kind == "given":
            several = self.source.integer(1, 3)
            rows = self.matrix(self.N * several).reshape(self.N, several, self.D)
            arguments["row_negatives"] = (
                rows.transpose(0, 1).contiguous().transpose(0, 1) if self.flag() else rows
            )
            self.noted("several row negatives")
        if kind == "none" or self.flag():
            dtype = self.choice((torch.float32, torch.float64, torch.bfloat16))
            scores = self.rng.normal(size=(self.N, self.source.integer(1, 3))) * 5
            if self.rarely(4):
                scores[self.rng.random(scores.shape) < 0.3] = -np.inf
            given = self.laid_out(scores, dtype)
            arguments["row_scores"] = given[:, 0] if self.flag() else given
            self.noted("row scores")

    def add_similarity(self) -> None:
        """Distances, for which the diagonal must not be zero; a sigmoid has none."""
        arguments = self.problem.arguments
        if self.problem.link == "sigmoid" or not self.rarely(5):
            return
        arguments["similarity"] = "euclidean"
        self.noted("euclidean")
        if arguments["diagonal"] == "zero":
            self.problem.refusals.add("diagonal")
        if isinstance(arguments.get("row_negatives"), fastqt.Mixed):
            self.problem.refusals.add("row_negatives")

    def add_exclusions(self) -> None:
        problem, arguments = self.problem, self.problem.arguments
        smoothed = "smoothed" in problem.makes
        if smoothed and not self.rarely(8):
            return
        no_target = np.ones((self.N, self.M), bool) if problem.targets is None else problem.targets == 0
        if self.rarely(3):
            of_queries, of_candidates = self.ids(self.N), self.ids(self.M)
            cells = of_queries.numpy()[:, None] == of_candidates.numpy()
            problem.exclude(fastqt.Same(of_queries, of_candidates), cells & no_target)
            self.noted("groups")
        if self.rarely(4):
            chosen = self.rng.random((self.N, self.M)) < 0.2
            if problem.targets is not None and not self.rarely(8):
                chosen &= no_target
            mask = self.laid_out(chosen, torch.bool)
            problem.exclude(mask, mask.numpy())
            if problem.targets is not None and (problem.targets[mask.numpy()] > 0).any():
                problem.refusals.add("targets")
            self.noted("mask")
        if smoothed and "exclude" in arguments:
            problem.refusals.add("exclude")

    def add_guide(self) -> None:
        """A guide, and the cells that it excludes; its scores have distances that no rounding bridges."""
        problem, arguments = self.problem, self.problem.arguments
        smoothed = "smoothed" in problem.makes
        if not self.rarely(4) or (smoothed and not self.rarely(8)):
            return
        if "negatives" in arguments and "similarity" in arguments:
            return  # refused, since negatives are then a problem of their own
        rows = {"queries": self.N, "candidates": self.M}
        if "negatives" in arguments:
            rows["negatives"] = len(arguments["negatives"])
        E, dtype = self.source.integer(1, 5), self.choice(ALL_DTYPES)
        given = {name: torch.from_numpy(self.rng.normal(size=(n, E))).to(dtype) for name, n in rows.items()}
        exact = {name: x.double().numpy() for name, x in given.items()}
        normalize = self.flag()
        scores = oracle.guide_scores(exact["queries"], exact["candidates"], normalize)
        options: dict[str, Any] = {"normalize": normalize}
        if self.flag():
            margin, strategy = self.choice((0.05, 0.2, -0.1)), self.choice(("absolute", "relative"))
            options |= {"margin": margin, "margin_strategy": strategy}
            if self.N > self.M:
                problem.refusals.add("exclude")
                thresholds = np.zeros(self.N)
            else:
                thresholds = oracle.guide_thresholds(scores, margin, strategy)
        else:
            thresholds = self.rng.normal(size=self.N) / 2
            options["thresholds"] = torch.from_numpy(thresholds)
        of_candidates, of_negatives = oracle.guide_excludes(scores, thresholds, problem.targets), None
        if "negatives" in given:
            of_negatives = oracle.guide_scores(exact["queries"], exact["negatives"], normalize)
            of_negatives = oracle.guide_excludes(of_negatives, thresholds)
        problem.exclude(fastqt.Guide(**given, **options), of_candidates, of_negatives)
        problem.refusals |= {"exclude"} if smoothed else set()
        self.noted("guide")

    def add_ids(self) -> None:
        """One filter of ids or two, beside those that there are, at times of ids of negatives too."""
        problem, arguments = self.problem, self.problem.arguments
        smoothed = "smoothed" in problem.makes
        if not self.rarely(4) or (smoothed and not self.rarely(8)):
            return
        no_target = np.ones((self.N, self.M), bool) if problem.targets is None else problem.targets == 0
        for _ in range(self.source.integer(1, 2)):
            ids = [self.ids(self.N), self.ids(self.M)]
            # Negatives are a problem of their own where there are distances.
            if "negatives" in arguments and "similarity" not in arguments and self.flag():
                ids.append(self.ids(len(arguments["negatives"])))
            kind, compare = self.choice(tuple(OF_IDS.items()))
            of_query, *of_columns = (x.numpy() for x in ids)
            cells = [compare(of_query[:, None], x) for x in of_columns]
            problem.exclude(kind(*ids), cells[0] & no_target, *cells[1:])
        problem.refusals |= {"exclude"} if smoothed else set()
        self.noted("ids")

    def add_margin(self) -> None:
        """A margin for false negatives, from whose thresholds similarities differ by more than rounding."""
        problem, arguments = self.problem, self.problem.arguments
        if problem.link == "sigmoid" or not self.rarely(4):
            return
        if isinstance(arguments.get("row_negatives"), fastqt.Mixed):
            return  # whose similarities the oracle has later
        near, strategy = self.choice((0.05, -0.3, 0.0, 0.5)), self.choice(("absolute", "relative"))
        self.noted("margin")
        if float(arguments.get("scale", 1.0)) <= 0:
            problem.refusals.add("scale")
        targets = arguments.get("targets")
        is_matrix = isinstance(targets, Tensor) and targets.dim() == 2 and targets.layout is torch.strided
        if "similarity" in arguments or "smoothed" in problem.makes or is_matrix:
            if not self.rarely(4):
                problem.makes.remove("margin")
                return
            problem.refusals.add("exclude")
        given = bool(problem.refusals) or problem.targets is None
        margin = near if given else self.clear_margin(near, strategy)
        if margin is None:
            problem.makes.remove("margin")
            return
        problem.margin = fastqt.Margin(margin, strategy)
        arguments["exclude"] = [*arguments.get("exclude", ()), problem.margin]

    def clear_margin(self, near: float, strategy: str) -> float | None:
        problem, arguments = self.problem, self.problem.arguments
        rounds = problem.autocast is not None and self.dtype is not torch.float64
        x = {
            name: arguments[name].to(problem.autocast if rounds else self.dtype).double()
            for name in ("queries", "candidates", "negatives", "row_negatives")
            if name in arguments
        }
        if arguments.get("normalize"):
            x = {name: torch.nn.functional.normalize(value, dim=-1) for name, value in x.items()}
        similar = x["queries"] @ x["candidates"].T
        cells = [similar]
        if "negatives" in x:
            cells.append(x["queries"] @ x["negatives"].T)
        if "row_negatives" in x:
            rows = x["row_negatives"].reshape(self.N, -1, self.D)
            cells.append((rows * x["queries"][:, None]).sum(2))
        every = torch.cat(cells, 1)
        scale = abs(float(arguments.get("scale", 1.0)))
        # What a score may be wrong by, and where it is no normal number any more.
        largest = max(v.norm(dim=-1).max().item() for v in x.values()) ** 2
        unit = 2.0**-8 if torch.bfloat16 in (self.dtype, problem.autocast) else 2.0**-18
        gap = max(4 * unit * largest, 1e-30 / max(scale, 1e-30))
        if not every.isfinite().all():
            return None
        own = similar.masked_fill(torch.from_numpy(problem.targets == 0), torch.inf).amin(1)
        return oracle.clear_margin(every.numpy(), own.numpy(), strategy, near, gap)

    def converge(self) -> None:
        """Makes the queries score 20 with their targets, which then have most of the probability."""
        arguments, T = self.problem.arguments, self.problem.targets
        scale = abs(float(arguments.get("scale", 1.0)))
        candidates = arguments["candidates"].double().numpy()
        length = np.square(candidates).sum(1, keepdims=True)
        if not (np.isfinite(length).all() and length.all() and scale > 1e-3):
            return
        wanted = T / np.maximum(T.sum(1, keepdims=True), 1e-3) @ (candidates / length)
        arguments["queries"] = self.laid_out(20 / scale * wanted, self.dtype)
        self.noted("converged")

    def add_reduction(self) -> None:
        problem, arguments = self.problem, self.problem.arguments
        arguments["reduction"] = self.choice(("mean", "sum", "none"))
        arguments["memory"] = self.choice(("fast", "low"))
        dtype = torch.promote_types(self.dtype, torch.float32)
        if arguments["reduction"] == "none":
            problem.upstream = self.vector(self.rng.normal(size=self.N), dtype)
        else:
            problem.upstream = torch.tensor(self.choice((1.0, -0.5, 1024.0)), dtype=dtype)
        self.noted(f"reduction {arguments['reduction']}, memory {arguments['memory']}")
        if self.rarely(6):
            problem.autocast = self.choice((torch.bfloat16, torch.float16))
            self.noted("autocast")
        names = ("queries", "candidates", "negatives", "row_negatives", "row_scores", "scale", "bias")
        given = [name for name in names if isinstance(arguments.get(name), Tensor)]
        problem.needs = tuple(name for name in given if not self.rarely(5))

    def add_prefixes(self) -> None:
        """Numbers of columns of which each has a loss; at times one that the embeddings do not have."""
        if not self.rarely(4) or self.problem.margin is not None:
            return  # Those of a prefix may be within rounding of the margin.
        dims = sorted({self.source.integer(1, self.D) for _ in range(self.source.integer(1, 3))})
        if self.rarely(12):
            dims.append(self.D + 1)
            self.problem.refusals.add("matryoshka")
        self.problem.arguments["matryoshka"] = dims
        if self.flag():
            weights = [self.choice((1.0, 0.5, 3.0)) for _ in dims]
            self.problem.arguments["matryoshka"] = fastqt.Matryoshka(dims, weights)
        self.noted("prefixes")


def _list(ids: Tensor | None) -> list[int] | None:
    return None if ids is None else ids.tolist()
