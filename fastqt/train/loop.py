"""The training loop, which can be stopped and resumed at any step."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from fastqt.errors import InputError
from fastqt.runs import checkpoint
from fastqt.runs.checkpoint import Progress
from fastqt.runs.config import TrainConfig
from fastqt.runs.model import SentenceEncoder, choose_device, lexicon_digest, load_lexicon, save_lexicon
from fastqt.text import Batch, Lexicon, Sample
from fastqt.text.reader import check_rereadable
from fastqt.train.log import MetricsLog
from fastqt.train.objectives import Measured, build_objective
from fastqt.train.optim import clip_gradients
from fastqt.train.preparation import check_corpus, check_directory, corpus_files, own_directory, read_corpus
from fastqt.train.progress import Display, StopRequest

if TYPE_CHECKING:
    from fastqt.evaluation.development import DevelopmentPairs


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended."""

    step: int  # the number of steps taken, over all calls
    stopped_by: int | None  # the signal that stopped the training before its last step
    metrics: dict[str, float]  # the last line of metrics.jsonl that this call wrote


def train(
    config: TrainConfig, out: str | Path, *, resume: bool = False, display: type[Display] = Display
) -> Outcome:
    """Trains a model and writes it to a directory.

    The directory receives config.json, vocabulary.json, metrics.jsonl, model.safetensors (the last model, or
    the best one if `config.dev` is given) and checkpoint.safetensors. SIGTERM and Ctrl-C save a checkpoint
    and end the training. A resumed training computes the same bits as an uninterrupted one on the same
    machine with the same number of threads. Only one training at a time can use a directory.

    Args:
        config: the settings. QuickThoughts streams its corpus, which may be larger than memory. The other
            models shuffle their corpus, and therefore hold it in memory at four bytes per word.
        out: the directory. It is created if it does not exist. It must not hold a run unless `resume` is set.
        resume: continue from the last checkpoint in `out`, or start if there is none.
        display: the class that shows the progress.

    Returns:
        The last step, the signal that stopped the training if one did, and the last metrics.

    Raises:
        InputError: the text, the settings or the directory cannot be used, or the loss is not finite.
    """
    directory = Path(out)
    check_rereadable("corpus", config.corpus)
    with own_directory(directory):
        check_directory(directory, config, resume)
        return _trainer(config, directory, resume, display).run(display)


def _trainer(config: TrainConfig, directory: Path, resume: bool, display: type[Display]) -> Trainer:
    """A training at its start or at its last checkpoint, whose settings and vocabulary are stored."""
    path = directory / checkpoint.CHECKPOINT
    progress = checkpoint.read_progress(path) if resume and path.exists() else None
    corpus = corpus_files(config, directory, resume)
    if progress is None:
        display.note(f"reading {', '.join(corpus)} to build the vocabulary")
        vocabulary, progress = read_corpus(config, corpus)
        trainer = Trainer(config, corpus, vocabulary, directory, progress)
        checkpoint.write_text(directory / checkpoint.CONFIG, config.to_json())
        save_lexicon(vocabulary, directory)
    else:
        check_corpus(corpus, progress)
        vocabulary = load_lexicon(config, directory)
        if progress.vocabulary_digest not in ("", lexicon_digest(config, directory)):
            raise InputError(
                f"cannot resume: the vocabulary in {directory} is not the one that the run was started with"
            )
        trainer = Trainer(config, corpus, vocabulary, directory, progress)
        checkpoint.load_checkpoint(path, trainer.model, trainer.optimizer)
        checkpoint.write_text(directory / checkpoint.CONFIG, config.to_json())
    progress.vocabulary_digest = lexicon_digest(config, directory)
    return trainer


class Trainer:
    """One training: its model, its optimiser and its progress.

    Args:
        config: the settings.
        corpus: paths of the text files.
        vocabulary: turns their sentences into token ids.
        directory: where the metrics, the checkpoints and the model are written.
        progress: where to continue; `Progress()` to start.
    """

    def __init__(
        self,
        config: TrainConfig,
        corpus: list[str],
        vocabulary: Lexicon,
        directory: Path,
        progress: Progress,
    ) -> None:
        self.config, self.corpus, self.vocabulary = config, corpus, vocabulary
        self.directory, self.progress = directory, progress
        self.objective = build_objective(config, corpus, vocabulary, choose_device(config.device))
        self.model = self.objective.model
        self.parameters = list(self.model.parameters())
        self.optimizer = self.objective.optimizer()
        self.dev_pairs = None if config.dev is None else _development_pairs(config.dev)
        self.can_validate = bool(self.objective.held_out) or self.dev_pairs is not None
        self.last_step = config.epochs * self.objective.steps(progress.sentences)
        if config.steps is not None:
            self.last_step = min(self.last_step, config.steps)

    def run(self, display_class: type[Display] = Display) -> Outcome:
        """Trains until the last step or until a signal arrives, then saves a checkpoint.

        Args:
            display_class: what shows the progress.

        Returns:
            As `train`.

        Raises:
            InputError: the loss is not finite.
        """
        config, progress = self.config, self.progress
        log = MetricsLog(self.directory / checkpoint.METRICS, progress.metrics_length)
        line: dict[str, float] = {}
        sentences, began = 0, time.perf_counter()
        size = config.batch_size
        with (
            contextlib.closing(log),
            display_class(self.last_step * size, progress.step * size) as display,
            StopRequest() as stop,
        ):
            for batch in self._remaining_batches():
                loss, measured = self.step(batch)
                sentences += len(batch.lengths)
                display.advance(len(batch.lengths))
                ends, stops = progress.step == self.last_step, stop.signal is not None
                validates = self.can_validate and (ends or progress.step % config.valid_every == 0)
                reports = ends or validates or progress.step % config.report_every == 0
                saves = ends or stops or progress.step % config.checkpoint_every == 0
                if reports or saves:
                    self._check_finite(loss)
                if reports:
                    rate = sentences / (time.perf_counter() - began)
                    line = self._measure(loss, measured, validates)
                    progress.seconds += time.perf_counter() - began
                    sentences, began = 0, time.perf_counter()
                    line |= {"sentences_per_second": rate, "seconds": progress.seconds}
                    log.write(line)
                    display.report(line)
                if saves:
                    self._save(log, time.perf_counter() - began)
                if stops:
                    break
        return Outcome(progress.step, None if progress.step == self.last_step else stop.signal, line)

    def step(self, batch: Batch | Sample) -> tuple[Tensor, Measured]:
        """Takes one step of the optimiser.

        Args:
            batch: B sentences, as token ids (B, L) and lengths (B,).

        Returns:
            The loss, a scalar, and the tensors for `Objective.measure`; all detached.
        """
        self.optimizer.zero_grad()
        loss, (a, b) = self.objective.loss(batch)
        loss.backward()
        groups = [self.parameters] if self.config.clip_by == "global" else [[p] for p in self.parameters]
        for group in groups if self.config.clip else ():
            clip_gradients(group, self.config.clip)
        self.optimizer.step()
        self.objective.constrain(batch)
        return loss.detach(), (a.detach(), b.detach())

    def _remaining_batches(self) -> Iterator[Batch | Sample]:
        progress = self.progress
        first_pass = True  # after a checkpoint at the end of an epoch, nothing remains of it
        while progress.step < self.last_step:
            before = progress.step
            for batch, position in self.objective.batches(progress):
                progress.step += 1
                progress.position = position
                yield batch
                if progress.step == self.last_step:
                    return
            if progress.step == before and not first_pass:
                raise InputError(f"the corpus has changed: no batch in {', '.join(self.corpus)}")
            first_pass = False
            progress.epoch += 1
            progress.position = None

    def _measure(self, loss: Tensor, measured: Measured, validates: bool) -> dict[str, float]:
        line = {"step": self.progress.step, "loss": loss.item(), **self.objective.measure(measured)}
        if validates and self.objective.held_out:
            line |= self.objective.validate()
        if validates and self.dev_pairs is not None:
            line |= self._evaluate_pairs(self.dev_pairs)
        return line

    def _evaluate_pairs(self, pairs: DevelopmentPairs) -> dict[str, float]:
        """Evaluates the model on the development pairs, and saves it if it is the best so far."""
        self.model.eval()
        figures = pairs.evaluate(SentenceEncoder(self.model, self.vocabulary, self.objective.device).encode)
        self.model.train()
        if figures["dev_spearman"] > self.progress.best:
            self.progress.best = figures["dev_spearman"]
            checkpoint.save_model(self.directory / checkpoint.MODEL, self.model)
        return figures

    def _check_finite(self, loss: Tensor) -> None:
        if not math.isfinite(loss.item()):
            step = self.progress.step
            raise InputError(
                f"the loss is {loss.item()} at step {step}: start again with a lower learning_rate"
            )

    def _save(self, log: MetricsLog, seconds: float) -> None:
        self.progress.metrics_length = log.sync()
        progress = replace(self.progress, seconds=self.progress.seconds + seconds)
        # The checkpoint comes last. After a crash between the two, the resumed training writes the model
        # again; the other way round, a finished training could keep an old model. With development pairs,
        # model.safetensors holds the best model, once there is one.
        if self.progress.best == -math.inf:
            checkpoint.save_model(self.directory / checkpoint.MODEL, self.model)
        checkpoint.save_checkpoint(
            self.directory / checkpoint.CHECKPOINT, self.model, self.optimizer, progress
        )


def _development_pairs(path: str) -> DevelopmentPairs:
    try:
        from fastqt.evaluation.development import DevelopmentPairs
    except ModuleNotFoundError as error:
        raise InputError(f"dev: needs {error.name}: pip install 'fastqt[eval]'") from error
    return DevelopmentPairs(path)
