"""GLOSS's inference in several ways: what each costs and finds, and whether batches change vectors.

    python -m benchmarks.gloss_inference ../shared/data/corpus/valid.txt.xz    # ten minutes
    python -m benchmarks.render

It trains both decoders on the first sentences of the text, and infers others of it: all in one batch, and
some alone. "batch" shapes are those that a plain implementation has, of as many sentences and positions as
the batch has; "fixed" ones are those of the library.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import lzma
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks.measure.machine import processor_and_versions
from benchmarks.paths import RESULTS
from fastqt.nn import Gloss, gloss_inference
from fastqt.nn.gloss_decoder import Decoder
from fastqt.nn.gloss_inference import Inference
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.text import pad
from fastqt.sentences.train import train

OUT = RESULTS / "gloss-inference.json"
TRAINED, INFERRED, ALONE = 2500, 128, 8  # sentences
SETTINGS: dict[str, Any] = {
    "word_dim": 100,
    "vocab_size": 5000,
    "learning_rate": 1e-2,
    "epochs": 40,
    "batch_size": 64,
    "report_every": 1000,
    "device": "cpu",
}
ROW_MULTIPLE = 16


class Way(NamedTuple):
    """A way to infer."""

    how: Inference
    shapes: str
    dtype: torch.dtype


WAYS = (
    Way(Inference(), "batch", torch.float32),
    Way(Inference(steps=1000), "batch", torch.float32),
    Way(Inference(), "batch", torch.float64),
    Way(Inference(), "fixed", torch.float32),
    Way(Inference(), "fixed", torch.float64),
    Way(Inference(safeguard=False), "fixed", torch.float32),
)


@contextlib.contextmanager
def shapes_of_the_batch(sentences: int) -> Iterator[None]:
    """Has the library infer a batch as one block, with as many positions as the longest sentence has."""

    def one_block(decoder: Decoder, lengths: Tensor) -> Iterator[tuple[Tensor, int]]:
        yield torch.arange(len(lengths)), max(int(lengths.max()), 1)

    rows = sentences + -sentences % ROW_MULTIPLE
    with (
        mock.patch.object(gloss_inference, "_blocks", one_block),
        mock.patch.object(gloss_inference, "_block_rows", return_value=rows),
    ):
        yield


def timed(gloss: Gloss, way: Way, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, float]:
    """The latent vectors of a batch, and the seconds of the processor that they took, on one thread."""
    gloss.inference = way.how
    shapes = shapes_of_the_batch(len(tokens)) if way.shapes == "batch" else contextlib.nullcontext()
    with shapes:
        start = time.process_time()
        latents = gloss.infer(tokens[:, : int(lengths.max())], lengths)
        return latents, time.process_time() - start


def measure(gloss: Gloss, way: Way, tokens: Tensor, lengths: Tensor) -> dict[str, Any]:
    """What a way costs and finds."""
    gloss = gloss.to(way.dtype)
    together, seconds = timed(gloss, way, tokens, lengths)

    differences, alone_seconds = [], []
    for row in range(0, len(tokens), len(tokens) // ALONE):
        one = slice(row, row + 1)
        alone, spent = timed(gloss, way, tokens[one], lengths[one])
        differences.append((alone[0] - together[row]).norm().item())
        alone_seconds.append(spent)

    return {
        "decoder": gloss.decoder,
        "steps": way.how.steps,
        "learning_rate": way.how.learning_rate,
        "safeguard": way.how.safeguard,
        "shapes": way.shapes,
        "dtype": str(way.dtype).removeprefix("torch."),
        "seconds": seconds,
        "seconds_alone": sorted(alone_seconds)[len(alone_seconds) // 2],
        "largest_difference": max(differences),
        "mean_norm": together.norm(dim=1).mean().item(),
        "mean_loss": gloss.loss(together, tokens, lengths).item(),
    }


def main() -> None:
    """Trains, measures, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, help="a .txt.xz with a sentence per line")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    with lzma.open(arguments.text, "rt", encoding="utf-8") as file:
        sentences = [line.strip() for line in file if line.strip()]

    unseen = sentences[TRAINED : TRAINED + INFERRED]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.txt"
        corpus.write_text("\n".join(sentences[:TRAINED]) + "\n")

        for model in ("gloss-bow", "gloss-pos"):
            train(TrainConfig((str(corpus),), model=model, **SETTINGS), Path(folder) / model)
            encoder = SentenceEncoder.load(Path(folder) / model, "cpu")
            tokens, lengths = pad(encoder.vocabulary.encode(unseen))
            assert isinstance(encoder.model, Gloss)
            for way in WAYS:
                rows.append(measure(encoder.model, way, tokens, lengths))
                print(rows[-1], flush=True)

    numbers = {"trained": TRAINED, "inferred": INFERRED, "alone": len(range(0, INFERRED, INFERRED // ALONE))}
    settings = {name: value for name, value in SETTINGS.items() if name != "device"}
    made = {"machine": processor_and_versions(), "settings": settings, "sentences": numbers, "rows": rows}
    arguments.out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
