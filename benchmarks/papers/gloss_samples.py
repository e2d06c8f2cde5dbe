"""Sentences that GLOSS generates, and how many of their pairs of neighbouring words occur in real text.

python -m benchmarks.papers.gloss_samples           # trains what is not stored yet, and stores the samples
python -m benchmarks.render                 # writes docs/papers.md from what is stored

The decoder by position learns short sentences of the novels. Sentences are then generated at latent vectors
between two sentences, and at random ones. All of them are drawn with a fixed seed, and none is chosen.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.measure.machine import processor_and_versions
from benchmarks.papers.gloss_sentences import (
    INFERENCE_RATE,
    INFERENCE_STEPS,
    WORDS,
    Decoder,
    joined,
    new_words,
    pairs,
    split,
    statements,
)
from benchmarks.papers.phrases import Phrases, Words, by_position, in_another_order
from benchmarks.papers.runs import STORED
from benchmarks.papers.word_order import order_limit
from benchmarks.paths import ROOT
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.files import write_atomically
from fastqt.sentences.runs.model import model_digest
from fastqt.sentences.train import train

FIGURES, TEXT = STORED / "gloss-samples.json", STORED / "gloss-samples.txt"
FILES = ("corpus/train.txt.xz", "extra/train_extra.txt.xz")
UNSEEN = 500  # sentences that are not trained on
COUNT = 500  # pairs of sentences, and random vectors, of which figures are computed
SHOWN = 8
TIMED = 8  # sentences whose inference is timed


class Setting(NamedTuple):
    """A decoder to train, and its sentences."""

    name: str
    statement: str  # a pattern of the sentences
    dim: int
    epochs: int
    batch_size: int = 256


WAYS: dict[str, dict[str, bool]] = {
    "linear": {},
    "spherical": {"slerp": True},
    "linear, each word once": {"once": True},
}
# Five words without quotation marks, commas and apostrophes, the first of them a pronoun, and a full stop.
PRONOUN = r"(?:I|He|She|It|We|You|They)(?: [A-Za-z]+){4}\."
ANY = r"[A-Z][A-Za-z]*(?: [A-Za-z]+){4}\."
SETTINGS = (
    Setting("pronoun", PRONOUN, 100, 280),
    Setting("pronoun, fewer epochs", PRONOUN, 100, 40),
    Setting("pronoun, d=20", PRONOUN, 20, 100),
    Setting("any beginning", ANY, 100, 60),
)
SHOWN_SETTING = SETTINGS[0]


def options(setting: Setting) -> dict[str, Any]:
    """Of the training."""
    return {
        "model": "gloss-pos",
        "word_dim": setting.dim,
        "vocab_size": WORDS + 1,
        "max_length": 9,
        "learning_rate": 1e-2,
        "epochs": setting.epochs,
        "batch_size": setting.batch_size,
    }


def settings(setting: Setting) -> dict[str, Any]:
    """What decides the figures; those that were stored with others are made anew."""
    inference = {"inference_steps": INFERENCE_STEPS, "inference_rate": INFERENCE_RATE}
    return {"statement": setting.statement, "files": [*FILES], **inference, **options(setting)}


def measure(decoder: Decoder, unseen: Sequence[Words]) -> dict[str, Any]:
    """What a decoder reproduces, and how its sentences compare with the text."""
    phrases, known = Phrases(decoder.trained), {tuple(words) for words in decoder.trained}

    at_unseen = decoder.infer(unseen)
    first = decoder.trained[:UNSEEN]
    reproduced = {
        "trained": decoder.reproduced(decoder.latents, decoder.trained),
        "trained, inferred anew": decoder.reproduced(decoder.infer(first), first),
        "unseen": decoder.reproduced(at_unseen, unseen),
    }

    lengths = [len(words) for words in unseen]
    real = {
        "unseen sentences": unseen,
        "unseen, in another order": in_another_order(unseen),
        "a random word for each position": by_position(decoder.trained, lengths),
    }

    made = {
        "normal": decoder.drawn(COUNT),
        "fitted normal": decoder.drawn(COUNT, fitted=True),
        "fitted normal, each word once": decoder.drawn(COUNT, fitted=True, once=True),
    }

    neither = {}
    for kind, latents, sentences in (
        ("trained", decoder.latents, decoder.trained),
        ("unseen", at_unseen, unseen),
    ):
        ends = pairs(len(sentences), COUNT)
        for way, how in WAYS.items():
            made_on = decoder.between(latents, sentences, ends, **how)
            name = f"between {kind}, {way}"
            made[name] = [words for of_pair in made_on for words in of_pair]
            neither[name] = new_words(made_on, [[*sentences[a], *sentences[b]] for a, b in ends])

    return {
        "reproduced": {
            name: {"right": right, "in_sentence": there} for name, (right, there) in reproduced.items()
        },
        "real": {name: phrases.shares(sentences) for name, sentences in real.items()},
        "made": {
            name: {
                **phrases.shares(sentences),
                "in_another_order": phrases.shares(in_another_order(sentences)),
                "in_text": float(np.mean([tuple(words) in known for words in sentences])),
                "distinct": len({tuple(words) for words in sentences}) / len(sentences),
                "of_neither": neither.get(name),
            }
            for name, sentences in made.items()
        },
    }


def inference_ways(decoder: Decoder, unseen: Sequence[Words]) -> list[dict[str, float]]:
    """What the paper's steps cost and find, and what ours do."""
    rows = []
    for steps, rate in ((250, 1.0), (INFERENCE_STEPS, INFERENCE_RATE)):
        began = time.process_time()
        latents = decoder.infer(unseen, steps, rate)
        seconds = time.process_time() - began
        rows.append(
            {
                "steps": steps,
                "learning_rate": rate,
                "sentences": len(unseen),
                "cpu_seconds": seconds,
                "loss": decoder.model.loss(latents, *decoder.ids(unseen)).item(),
                "right": decoder.reproduced(latents, unseen)[0],
            }
        )
    return rows


def samples(decoder: Decoder, unseen: Sequence[Words]) -> str:
    """The sentences that are shown: the first pairs, and the first random vectors."""
    lines = []
    at_unseen = decoder.infer(unseen)

    for kind, latents, sentences in (
        ("training sentences", decoder.latents, decoder.trained),
        ("unseen sentences", at_unseen, unseen),
    ):
        ends = pairs(len(sentences), SHOWN)
        for way, how in WAYS.items():
            lines.append(f"Between {kind}, {way}:")
            ways = decoder.between(latents, sentences, ends, **how)
            for (a, b), made in zip(ends, ways, strict=True):
                shown = [f"[{joined(sentences[a])}]", *map(joined, made), f"[{joined(sentences[b])}]"]
                lines.append("  " + "  ".join(shown))
            lines.append("")

    fitted = "the normal distribution of the trained vectors"
    for name, drawn in (
        ("N(0, I)", decoder.drawn(SHOWN)),
        (fitted, decoder.drawn(SHOWN, fitted=True)),
        (f"{fitted}, each word once", decoder.drawn(SHOWN, fitted=True, once=True)),
    ):
        lines += [f"From {name}:", *(f"  {joined(words)}" for words in drawn), ""]

    return "\n".join(lines)


def perform(setting: Setting, sentences: Sequence[str], work: Path) -> tuple[dict[str, Any], str]:
    """Trains a decoder, or goes on with a training, and measures its sentences.

    Returns:
        The settings and figures, and the sentences that are shown, if they are of this setting.
    """
    trained, unseen = sentences[:-UNSEEN], [split(sentence) for sentence in sentences[-UNSEEN:]]
    folder = work / setting.name.replace(" ", "-").replace(",", "")
    folder.parent.mkdir(parents=True, exist_ok=True)

    corpus = folder.with_suffix(".txt")
    write_atomically(corpus, lambda path: path.write_text("\n".join(trained) + "\n"))

    outcome = train(
        TrainConfig((str(corpus),), **options(setting), report_every=200, device="cpu"), folder, resume=True
    )
    if outcome.stopped_by is not None:
        raise SystemExit(f"stopped by signal {outcome.stopped_by}; the same command goes on")

    decoder = Decoder(folder, trained)
    figures = {
        "settings": settings(setting),
        "trained": len(trained),
        "unseen": len(unseen),
        "loss_per_word": last_metrics(folder)["loss_per_word"],
        "cpu_minutes": last_metrics(folder)["cpu_seconds"] / 60,
        "sha256": model_digest(folder),
        "machine": processor_and_versions(),
        "order_limit": order_limit(decoder.trained),
        **measure(decoder, unseen),
    }

    if setting != SHOWN_SETTING:
        return figures, ""
    figures["inference"] = inference_ways(decoder, unseen[:TIMED])
    return figures, samples(decoder, unseen[: 2 * SHOWN])


def last_metrics(folder: Path) -> dict[str, float]:
    """The last report of a training."""
    line: dict[str, float] = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return line


def stored() -> dict[str, dict[str, Any]]:
    """The figures of each setting by its name; none if nothing is stored."""
    return json.loads(FIGURES.read_text()) if FIGURES.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", metavar="DIR")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "papers" / "samples", metavar="DIR")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    texts: dict[str, list[str]] = {}
    for setting in SETTINGS:
        if stored().get(setting.name, {}).get("settings") == settings(setting):
            continue
        pattern = setting.statement
        if pattern not in texts:
            texts[pattern] = statements([arguments.data / file for file in FILES], pattern)
        figures, shown = perform(setting, texts[pattern], arguments.work)
        known = {**stored(), setting.name: figures}
        ordered = {each.name: known[each.name] for each in SETTINGS if each.name in known}
        FIGURES.write_text(json.dumps(ordered, indent=1) + "\n")
        if shown:
            TEXT.write_text(shown)


if __name__ == "__main__":
    main()
