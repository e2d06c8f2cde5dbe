"""What a training tells before its first step: what it has read, and what it is about to do."""

from __future__ import annotations

from typing import Any

import torch

from fastqt.sentences.text import Lexicon, Vocabulary
from fastqt.sentences.train.objectives import Objective


def opening(objective: Objective[Any], last_step: int) -> str:
    """The lines that a training begins with: corpus, vocabulary, model, device, steps, and any held-out text.

    The vocabulary tells how many words the corpus has if it was built from it.
    """
    training, config = objective.training, objective.config
    vocabulary, progress = training.vocabulary, training.progress
    epoch = objective.steps(progress.sentences)
    batch = f"{config.batch_size:,} sentences"
    if objective.ranks.size > 1:
        batch = f"{batch} in each of {objective.ranks.size} processes"
    parameters = sum(each.numel() for each in objective.model.parameters())

    rows = {
        "corpus": f"{', '.join(training.corpus)}: {progress.sentences:,} sentences{_words(vocabulary)}",
        "vocabulary": f"{len(vocabulary):,} entries",
        "model": f"{config.model}, encoder {config.encoder}: {parameters:,} parameters",
        "device": _device(objective.device),
        "training": f"{epoch:,} batches an epoch, of {batch}; up to step {last_step:,}",
    }

    if progress.step:
        rows["training"] += f", from step {progress.step:,}"
    if config.teacher is not None:
        rows["teacher"] = ", ".join(config.teacher)
    if config.valid is not None:
        rows["held out"] = f"{config.valid}: {len(objective.held_out):,} batches"
    if config.dev is not None:
        rows["pairs"] = config.dev
    return "\n".join(f"{name:<11} {text}" for name, text in rows.items())


def _words(vocabulary: Lexicon) -> str:
    counts = vocabulary.counts if isinstance(vocabulary, Vocabulary) else None
    if counts is None:
        return ""
    total = int(counts.sum())
    return f", {total:,} words, {counts[0] / max(total, 1):.2%} of them not in the vocabulary"


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device}, {torch.cuda.get_device_name(device)}"
    threads = torch.get_num_threads()
    return f"{device}, {threads} thread{'s' if threads > 1 else ''}"
