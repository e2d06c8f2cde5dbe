"""The sentences of several corpora that are nearest to a query, by one model that has learnt from all.

    python examples/nearest_sentences.py
    python examples/nearest_sentences.py --corpus novels.txt.xz --corpus letters.txt --query "She was ill."

By default the corpora are the docstrings of Python's library, of NumPy and of PyTorch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from toy_data import write_library

from fastqt.sentences.evaluation import nearest
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.train import train

QUERIES = (
    "Raises an error if the file does not exist.",
    "The result has the same shape as the input.",
    "This function is deprecated.",
)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--corpus", action="append", help="a text with a sentence on each line; may be repeated"
    )
    parser.add_argument("--query", action="append", help="a sentence; may be repeated")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("-k", type=int, default=2, help="sentences of each corpus (default: 2)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> list[str]:
    """Trains, and returns the lines that it prints: of each query the nearest sentences of each corpus."""
    settings, lines = options(arguments), []
    with TemporaryDirectory() as folder:
        corpora = settings.corpus or write_library(Path(folder))
        config = TrainConfig(tuple(corpora), batch_size=256, epochs=settings.epochs, learning_rate=2e-3)
        train(config, Path(folder) / "run")
        encoder = SentenceEncoder.load(Path(folder) / "run")
        queries = settings.query or QUERIES
        of_corpus = {corpus: nearest(encoder, queries, [corpus], settings.k) for corpus in corpora}
        for number, query in enumerate(queries):
            lines.append(query)
            for corpus, neighbours in of_corpus.items():
                name = Path(corpus).name.partition(".")[0]
                lines += [f"  {name:8} {cosine:.3f}  {text}" for cosine, text, *_ in neighbours[number]]
    print("\n".join(lines))
    return lines


if __name__ == "__main__":
    main()
