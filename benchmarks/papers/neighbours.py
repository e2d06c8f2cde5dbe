"""Nearest sentences of the validation novels, by two kinds of vectors beside each other.

The queries are drawn from the novels with a seed, among sentences of `LENGTHS` words, as the paper draws its
own from its corpus. A query itself, and sentences of the same words, are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.papers.parts import load, made
from benchmarks.papers.runs import Places
from fastqt.sentences.evaluation.baselines import tokens
from fastqt.sentences.evaluation.pools import nearest_rows
from fastqt.sentences.evaluation.vectors import embed
from fastqt.sentences.text import read_blocks

POOL = "@data/corpus/valid.txt.xz"
SYSTEMS = {
    "mean of GloVe": "word-vectors:@glove",
    "bag of words from GloVe": "@quickthoughts/bow from GloVe",
}
LENGTHS = (8, 16)


@dataclass(frozen=True)
class Neighbours:
    """The nearest sentences of each query.

    Attributes:
        system: one of `SYSTEMS`.
        queries: how many are drawn.
        k: neighbours of each.
        seed: of the draw.
    """

    system: str
    queries: int = 5
    k: int = 3
    seed: int = 0

    @property
    def name(self) -> str:
        return self.system

    def settings(self) -> dict[str, Any]:
        about = {"encoder": SYSTEMS[self.system], "pool": POOL, "lengths": [*LENGTHS]}
        return {**asdict(self), **about}

    def perform(self, places: Places) -> dict[str, Any]:
        pool = distinct(places.resolve(POOL))
        chosen = drawn(pool, self.queries, self.seed)
        encoder = load(SYSTEMS[self.system], places)
        vectors = embed(encoder.encode, pool, progress=False)
        rows, cosines = nearest_rows(vectors([pool[row] for row in chosen]), vectors(pool), self.k + 1)
        neighbours = {}
        for query, near, scores in zip(chosen, rows.tolist(), cosines.tolist(), strict=True):
            others = [
                {"cosine": score, "sentence": pool[row]}
                for row, score in zip(near, scores, strict=True)
                if row != query
            ]
            neighbours[pool[query]] = others[: self.k]
        return {"settings": self.settings(), "sha256": encoder.key, "made": made(), "neighbours": neighbours}


def plan() -> list[Neighbours]:
    """Both kinds of vectors."""
    return [Neighbours(system) for system in SYSTEMS]


def distinct(path: str) -> list[str]:
    """The sentences of a text, one for each sequence of words."""
    by_words: dict[tuple[str, ...], str] = {}
    for block in read_blocks([path]):
        for sentence in block.sentences:
            by_words.setdefault(tuple(word for word in tokens(sentence) if word.isalnum()), sentence)
    return list(by_words.values())


def drawn(pool: list[str], queries: int, seed: int) -> list[int]:
    """The rows of sentences of `LENGTHS` words that are drawn as queries."""
    least, most = LENGTHS
    fitting = [row for row, sentence in enumerate(pool) if least <= len(sentence.split()) <= most]
    return sorted(np.random.default_rng(seed).choice(fitting, queries, replace=False).tolist())


def text(records: Mapping[str, Mapping[str, Any]]) -> str:
    """The queries, each with its neighbours by both kinds of vectors."""
    lines = []
    for query in next(iter(records.values()))["neighbours"]:
        lines.append(query)
        for system, record in records.items():
            lines.append(f"  {system}")
            lines += [f"    {n['cosine']:.3f}  {n['sentence']}" for n in record["neighbours"][query]]
        lines.append("")
    return "\n".join(["```", *lines[:-1], "```"])
