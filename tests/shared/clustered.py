"""A made-up corpus whose sentences are numbers of rows, and whose vectors lie in clusters."""

import numpy as np


class Clustered:
    """Encodes a sentence by the number that it ends with: the row of a matrix.

    Args:
        rows: of the matrix.
        width: of the matrix.
        clusters: around which the rows lie.
    """

    identity = "clustered"

    def __init__(self, rows, width=16, clusters=30, seed=0):
        generator = np.random.default_rng(seed)
        centers = generator.standard_normal((clusters, width))
        noise = 0.5 * generator.standard_normal((rows, width))
        self.matrix = (centers[generator.integers(clusters, size=rows)] + noise).astype(np.float32)

    def encode(self, sentences, **_):
        return self.matrix[[int(sentence.split()[-1]) for sentence in sentences]]


def write_corpus(path, numbers):
    """A text with a sentence for each number, and blank lines; returns its path as a list of one file."""
    path.write_text("".join(f"zażółć 句 {n}\n" + "\n" * (n % 5 == 0) for n in numbers), encoding="utf-8")
    return [str(path)]
