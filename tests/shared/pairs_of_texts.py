"""Rows of texts for trainings on pairs: queries and documents that no word has in common."""

import random
from pathlib import Path

import numpy as np

TOPICS = 25


def write_rows(path, count, columns=2, seed=0):
    """Writes rows of a query, its positive and hard negatives, and returns the path as a text.

    A query has words of its topic, and a positive other words of the same topic, so that fresh weights find
    no pair. Hard negatives are documents of the next topics.
    """
    draw = random.Random(seed)
    lines = []
    for number in range(count):
        topic = number % TOPICS
        query = " ".join(f"ask{topic}x{draw.randrange(3)}" for _ in range(3))
        topics = ((topic + step) % TOPICS for step in range(columns - 1))
        texts = [" ".join(f"say{each}y{draw.randrange(3)}" for _ in range(3)) for each in topics]
        lines.append("\t".join([query, *texts]))
    Path(path).write_text("\n".join(lines) + "\n")
    return str(path)


def columns_of(path):
    rows = [line.split("\t") for line in Path(path).read_text().splitlines()]
    return [list(column) for column in zip(*rows, strict=True)]


def write_teacher(folder, rows, columns, width=7, seed=0):
    """Writes random vectors of each column, float32, and returns the paths and the vectors."""
    vectors = np.random.default_rng(seed).normal(size=(columns, rows, width)).astype(np.float32)
    paths = tuple(str(folder / f"teacher{column}.npy") for column in range(columns))
    for path, each in zip(paths, vectors, strict=True):
        np.save(path, each)
    return paths, vectors
