"""Whether MixCSE is better than SimCSE: intervals by a paired bootstrap over the pairs of sentences.

What is resampled are the pairs of sentences within each STS task, with replacement, and as many as the task
has. A resample takes the same pairs for both losses and for all seeds. Its figure for a loss is Spearman's
coefficient of the cosines with the gold scores, averaged over the tasks and then over the seeds. Seeds are
averaged and not resampled, so that the interval does not say what other seeds would do; how far the seeds are
apart is stored beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from benchmarks.papers.parts import NotReadyError, made
from benchmarks.papers.plans import LONGER, SEEDS, VIEWS
from benchmarks.papers.runs import STS, Places, figure
from benchmarks.papers.store import stored
from fastqt.sentences.evaluation.data import Pairs
from fastqt.sentences.evaluation.encoders import load_encoder
from fastqt.sentences.evaluation.similarity import cosines
from fastqt.sentences.evaluation.tasks import Options, Similar, read_tasks
from fastqt.sentences.evaluation.vectors import Cache, embed

BASES = {"minilm": tuple(VIEWS), "masked-words": tuple(VIEWS), "masked-words-longer": LONGER}
AGAINST = "simcse"
INTERVAL = (2.5, 97.5)  # per cent
AGREEMENT = 0.01  # per cent: how far a stored figure may be from that of the cosines, which are rounded

Cosines = Mapping[str, NDArray[np.float64]]  # by task


@dataclass(frozen=True)
class Comparison:
    """A form of MixCSE against SimCSE, from one encoder.

    Attributes:
        base: the encoder and how it was trained, one of `BASES`.
        form: one of the base's.
        resamples: how many.
        seed: of the resamples.
    """

    base: str
    form: str
    resamples: int = 1000
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.base} {self.form}"

    def settings(self) -> dict[str, Any]:
        return {**asdict(self), "against": AGAINST, "tasks": [*STS], "seeds": [*SEEDS]}

    def perform(self, places: Places) -> dict[str, Any]:
        tasks = {task: _tested(places, task) for task in STS}
        gold = {task: pairs.gold for task, pairs in tasks.items()}
        rows = draws({task: len(g) for task, g in gold.items()}, self.resamples, self.seed)
        whole = {task: np.arange(len(g))[None] for task, g in gold.items()}

        digests: dict[str, str] = {}
        resampled: dict[str, list[NDArray[np.float64]]] = {}
        points: dict[str, list[float]] = {}

        for loss in (AGAINST, self.form):
            for seed in SEEDS:
                run = f"{loss}-seed{seed}"
                record = _record(self.base, run)
                digests[run] = record["sha256"]
                scores = _cosines(self.base, run, record, tasks, places)
                resampled.setdefault(loss, []).append(mean_of_tasks(scores, gold, rows))
                points.setdefault(loss, []).append(float(mean_of_tasks(scores, gold, whole)[0]))

        differences = np.mean(resampled[self.form], axis=0) - np.mean(resampled[AGAINST], axis=0)
        of_seeds = np.array(points[self.form]) - np.array(points[AGAINST])

        return {
            **{"settings": self.settings(), "sha256": digests, "made": made()},
            "difference": float(of_seeds.mean()),
            "mean_of_resamples": float(differences.mean()),
            "interval": np.percentile(differences, INTERVAL).tolist(),
            "difference_of_seeds": of_seeds.tolist(),
        }


def plan() -> list[Comparison]:
    """All forms of MixCSE from each encoder."""
    return [Comparison(base, form) for base, forms in BASES.items() for form in forms if form != AGAINST]


def draws(pairs: Mapping[str, int], resamples: int, seed: int) -> dict[str, NDArray[np.int64]]:
    """Which pairs each resample has.

    Args:
        pairs: the number of pairs of each task.
        resamples: R.
        seed: of the draws.

    Returns:
        For each task the numbers of the drawn pairs, (R, n).
    """
    generator = np.random.default_rng(seed)
    return {task: generator.integers(n, size=(resamples, n)) for task, n in pairs.items()}


def mean_of_tasks(
    scores: Cosines, gold: Cosines, rows: Mapping[str, NDArray[np.int64]]
) -> NDArray[np.float64]:
    """The mean over the tasks of Spearman's coefficient in per cent, of each resample.

    Args:
        scores: the cosines of each task, (n,).
        gold: its gold scores, (n,).
        rows: the pairs of its resamples, (R, n).

    Returns:
        (R,).
    """
    return np.mean([spearmans(scores[task], gold[task], rows[task]) for task in rows], axis=0)


def spearmans(
    scores: NDArray[np.float64], gold: NDArray[np.float64], rows: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Spearman's coefficient in per cent of each resample, (R,); 0 where one side is constant."""
    a, b = (rankdata(values[rows], axis=1) - (rows.shape[1] + 1) / 2 for values in (scores, gold))
    norms = np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
    return 100 * np.asarray((a * b).sum(axis=1) / np.where(norms > 0, norms, 1))


def _tested(places: Places, task: str) -> Pairs:
    """The pairs that a task tests."""
    read = read_tasks(places.data / "eval", [task], Options())[task]
    assert isinstance(read, Similar)
    return read.parts["test"]


def _record(base: str, run: str) -> Mapping[str, Any]:
    table = f"views-{base}"
    if run not in (records := stored(table)):
        raise NotReadyError(f"{run} of the table {table} is not stored yet")
    return records[run]


def _cosines(
    base: str, run: str, record: Mapping[str, Any], tasks: Mapping[str, Pairs], places: Places
) -> dict[str, NDArray[np.float64]]:
    """The cosines of all tasks' pairs by a run's model, from the vectors that its evaluation kept."""
    folder, digest = f"views-{base}/{run}", record["sha256"]
    if not (places.work / folder).is_dir():
        raise NotReadyError(f"{places.work / folder} is not there: the model of {folder} is needed")
    encoder = load_encoder(str(places.work / folder))
    if encoder.key != digest:
        raise NotReadyError(f"{folder}: the model in the work folder is not the one whose figures are stored")
    texts: Iterable[str] = (text for pairs in tasks.values() for text in [*pairs.first, *pairs.second])
    vectors = embed(encoder.encode, texts, cache=Cache(places.vectors, digest), progress=False)
    of_tasks = {task: cosines(vectors(pairs.first), vectors(pairs.second)) for task, pairs in tasks.items()}
    for task, pairs in tasks.items():
        whole = np.arange(len(pairs.gold))[None]
        difference = abs(
            spearmans(of_tasks[task], pairs.gold, whole)[0] - figure(task, record["tasks"][task])
        )
        if difference > AGREEMENT:
            raise RuntimeError(f"{run}: {task} differs from the stored figure by {difference:.3f} per cent")
    return of_tasks
