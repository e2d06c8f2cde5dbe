"""Alignment and uniformity through the training of SimCSE and MixCSE, as a path in the plane of both.

    python examples/alignment_and_uniformity.py --out paths.svg
    python examples/alignment_and_uniformity.py --corpus sentences.txt --steps 300 --out paths.svg

Alignment is the mean squared distance of the two views of a sentence. Uniformity is the logarithm of the mean
of exp(-2 d²) over the distances d of different sentences (Wang and Isola, 2020). Less is better of both. By
default the text is that of the docstrings of Python's library. The drawing needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from toy_data import write_library

from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.train import train

MODELS = {"simcse": "SimCSE", "mixcse": "MixCSE"}
REPORTS = 12  # of each training


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--corpus", help="a text with a sentence on each line")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", required=True, help="the drawing: .svg, .png or .pdf")
    return parser.parse_args(arguments)


def draw(paths: dict[str, list[tuple[float, float]]], out: str) -> None:
    """Draws a path for each model; its last point is filled."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "fastqt"  # the same drawing is the same file
    figure, axes = pyplot.subplots(figsize=(5, 4), layout="constrained")
    for (name, path), marker in zip(paths.items(), "os", strict=True):
        uniformity, alignment = zip(*path, strict=True)
        (line,) = axes.plot(uniformity, alignment, marker=marker, fillstyle="none", label=MODELS[name])
        axes.plot(uniformity[-1], alignment[-1], marker=marker, color=line.get_color())
    axes.set(xlabel="uniformity", ylabel="alignment")
    axes.legend(frameon=False)
    figure.savefig(out, metadata={"Date": None} if out.endswith(".svg") else None)


def main(arguments: Sequence[str] | None = None) -> dict[str, list[tuple[float, float]]]:
    """Trains both models; returns (uniformity, alignment) of each report, and draws them."""
    settings, paths = options(arguments), {}
    with TemporaryDirectory() as folder:
        corpus = settings.corpus or write_library(Path(folder))[0]
        for model in MODELS:
            config = TrainConfig(
                (corpus,),
                **{"model": model, "encoder": "transformer", "layers": 2, "word_dim": 128, "heads": 4},
                **{"feedforward": 256, "batch_size": 64, "steps": settings.steps},
                report_every=max(settings.steps // REPORTS, 1),
            )
            train(config, Path(folder) / model)
            reports = map(json.loads, (Path(folder) / model / "metrics.jsonl").read_text().splitlines())
            paths[model] = [(line["uniformity"], line["alignment"]) for line in reports]
    draw(paths, settings.out)
    return paths


if __name__ == "__main__":
    main()
