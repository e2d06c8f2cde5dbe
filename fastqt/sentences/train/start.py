"""Starts a training, or resumes it where it was stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import nn

from fastqt.errors import InputError
from fastqt.sentences.runs import checkpoint
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.lexicon import save_lexicon
from fastqt.sentences.runs.model import tables_of_vectors
from fastqt.sentences.text import Lexicon, Vocabulary
from fastqt.sentences.text.reader import check_exists, check_rereadable
from fastqt.sentences.text.vectors import vectors_of, width_of
from fastqt.sentences.train.earlier_run import start_from_run
from fastqt.sentences.train.loggers import check_logger
from fastqt.sentences.train.loop import Outcome, Trainer
from fastqt.sentences.train.objectives import Training
from fastqt.sentences.train.preparation import check_same_settings, own_run, prepare
from fastqt.sentences.train.progress import Display
from fastqt.sentences.train.ranks import Ranks, joined


def train(
    config: TrainConfig,
    out: str | Path,
    *,
    resume: bool = False,
    stored: TrainConfig | None = None,
    display: type[Display] = Display,
) -> Outcome:
    """Trains a model and writes it to a directory.

    The directory receives config.json, vocabulary.json, metrics.jsonl, model.safetensors (the last model, or
    the best one if `config.dev` or `config.early_stop` is given) and checkpoint.safetensors. Once the
    training has ended, the checkpoint is removed and finished.json takes its place, unless
    `config.keep_checkpoint` is set. SIGTERM and Ctrl-C save a checkpoint and end the training. A resumed
    training computes the same bits as an uninterrupted one on the same machine with the same number of
    threads. Only one training at a time can use a directory, which must not hold a run unless `resume` is
    set.

    Under torchrun, all processes call this function and train one model; rank 0 writes the files. The batch
    of a step is the `config.batch_size` sentences of each process together. A training may be resumed with
    another number of processes; with the same number, the bits are again those of an uninterrupted one.
    OtherRankError where another process has failed.

    With `config.init_from` the model begins with the weights and the vocabulary of that run.

    QuickThoughts streams its corpus, which may be larger than memory. The other models shuffle their corpus,
    and therefore hold it in memory at four bytes per word. A loss that is not finite is refused.

    `stored` is the settings of the run to resume, for who has read them already.
    """
    directory = Path(out)
    with joined(config.device, config.batch_size, config.timeout) as ranks:
        check_same_settings(config, ranks.first(lambda: config))
        if resume and stored is None and ranks.is_first and (directory / checkpoint.CONFIG).exists():
            stored = TrainConfig.load(directory / checkpoint.CONFIG)
        if config.vectors is not None and config.init_from is None:
            width = ranks.first(lambda: _width_of_words(config, stored))
            config = replace(config, word_dim=width)
        with _own(directory, config, ranks):
            prepared = ranks.first(
                lambda: prepare(config, directory, stored, resume, ranks.size, display.note)
            )
            return _trainer(replace(prepared, ranks=ranks), display).run(display)


@contextlib.contextmanager
def _own(directory: Path, config: TrainConfig, ranks: Ranks) -> Iterator[None]:
    """Keeps other trainings out of a directory, which rank 0 alone uses."""
    if not ranks.is_first:
        yield
        return
    check_logger(config)
    check_rereadable("corpus", config.corpus)
    check_rereadable("teacher", config.teacher or ())
    for name, path in (("valid", config.valid), ("dev", config.dev)):  # --resume reads them again
        if path is not None:
            check_rereadable(name, [path])
            check_exists(path)
    with own_run(directory):
        yield


def _trainer(training: Training, display: type[Display]) -> Trainer:
    """A training at its start or at its last checkpoint, whose settings and vocabulary are stored."""
    trainer, ranks, config = Trainer(training), training.ranks, training.config
    if training.begins == "at the end":
        ranks.first(trainer.check_nothing_is_left)
        return trainer

    path, begins_anew = training.directory / checkpoint.CHECKPOINT, training.begins == "anew"
    if ranks.is_first and not begins_anew:
        checkpoint.load_checkpoint(path, trainer.model, trainer.optimizer, verified=True)
    elif begins_anew and config.init_from is not None:
        ranks.first(lambda: start_from_run(trainer.model, config))
    elif begins_anew and config.vectors is not None:
        ranks.first(lambda: _start_from_vectors(trainer.model, training.vocabulary, config, display.say))

    if ranks.size > 1:
        _follow_first(ranks, trainer.model, trainer.optimizer)
        _part_generators(ranks, config.seed, training.progress.step, None if begins_anew else path)

    if ranks.is_first:
        _store(training)
    return trainer


def _store(training: Training) -> None:
    """Writes what is known of a training before its first step."""
    directory = training.directory
    checkpoint.write_text(directory / checkpoint.CONFIG, training.config.to_json())
    if training.begins == "anew":
        training.progress.vocabulary_digest = save_lexicon(training.vocabulary, directory)


def _follow_first(ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gives the model and the optimiser of each rank the state of those of rank 0, in place.

    The optimiser of another rank than 0 must have no state yet.
    """
    ranks.equalize(model.state_dict().values())
    parameters = dict(model.named_parameters())
    kept = ranks.first(
        lambda: [
            (name, key, value.shape, value.dtype, value.device.type)
            for name, parameter in parameters.items()
            for key, value in optimizer.state[parameter].items()
        ]
    )
    for name, key, shape, dtype, device in kept:
        state = optimizer.state[parameters[name]]
        if key not in state:
            state[key] = torch.empty(shape, dtype=dtype, device=device)
        ranks.equalize([state[key]])


def _part_generators(ranks: Ranks, seed: int, step: int, path: Path | None) -> None:
    """Gives torch's random number generators of each rank a state of its own, by seed and number of steps.

    Otherwise dropout would be the same on all ranks. Rank 0 keeps what it has, as one process does. A rank
    gets its generators back from the checkpoint of rank 0, if they are in it.
    """
    stored = ranks.first(lambda: [] if path is None else checkpoint.read_generators(path, verified=True))
    if not ranks.rank:
        return
    sequence = np.random.SeedSequence([seed, ranks.rank, step])
    torch.manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> 1))
    if path is not None and ranks.rank < len(stored):
        checkpoint.set_generator_states(stored[ranks.rank], path)


def _width_of_words(config: TrainConfig, stored: TrainConfig | None) -> int:
    """The width of word vectors: that of the settings, of the run to resume, or of the pre-trained file."""
    if config.vectors is None:
        return config.word_dim
    if stored is not None:
        return stored.word_dim
    width = width_of(config.vectors)
    if config.word_dim not in (None, width):
        raise InputError(f"word_dim: want {width}, the width of {config.vectors}, got {config.word_dim}")
    replace(config, word_dim=width)  # which checks what else depends on it
    return width


def _start_from_vectors(
    model: nn.Module, vocabulary: Lexicon, config: TrainConfig, say: Callable[[str], None]
) -> None:
    """Gives the words of a new model their pre-trained vectors. Other words keep those that were drawn.

    It says which shares of the vocabulary's words and of the corpus's tokens have a vector. The tokens are
    known if the vocabulary was built from them. A file that has none for any word is refused.
    """
    path = cast("str", config.vectors)
    words = _words(cast("Vocabulary", vocabulary))
    pretrained = vectors_of(path, words[1:])  # without the unknown word
    if pretrained.vectors.shape[1] != config.word_dim:
        width = pretrained.vectors.shape[1]
        raise InputError(f"word_dim: want {width}, the width of {path}, got {config.word_dim}")

    known = pretrained.places + 1
    if not len(known):
        raise InputError(f"vectors: want words of the vocabulary, got none of {len(words) - 1} in {path}")

    vectors = torch.from_numpy(pretrained.vectors) * config.vectors_scale
    with torch.no_grad():
        for table in tables_of_vectors(model, config):
            table.weight[torch.from_numpy(known)] = vectors.to(table.weight)

    share = len(known) / (len(words) - 1)
    text = f"{path}: vectors of {len(known):,} of {len(words) - 1:,} words ({share:.1%})"
    counts = cast("Vocabulary", vocabulary).counts
    if counts is not None:
        tokens, covered = int(counts.sum()), int(counts[known].sum())
        text += f", which are {covered / max(tokens, 1):.1%} of the corpus's tokens"
    say(text)


def _words(vocabulary: Vocabulary) -> list[str]:
    """The words in the order of their ids."""
    ids = vocabulary.tokenizer.get_vocab()
    return sorted(ids, key=ids.__getitem__)
