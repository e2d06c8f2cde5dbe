"""The training loop, which can be stopped and resumed at any step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from torch import Tensor

from fastqt.errors import InputError
from fastqt.optim import clip_grad_norm_
from fastqt.sentences.runs import checkpoint
from fastqt.sentences.runs.metrics_file import MetricsLog
from fastqt.sentences.runs.progress import FINISHED, save_finished
from fastqt.sentences.text import Batch, Sample, Span
from fastqt.sentences.train.loggers import Log, logger
from fastqt.sentences.train.measurements import Measurements
from fastqt.sentences.train.objectives import Measured, Objective, Training, Turn
from fastqt.sentences.train.progress import (
    Display,
    Moment,
    Parts,
    Silent,
    StopRequest,
    begin_peak,
    peak_memory,
)
from fastqt.sentences.train.ranks import Share
from fastqt.sentences.train.schedule import Factor, Precision, schedule_of
from fastqt.sentences.train.summary import opening

FIRST_REPORT = 5.0  # seconds of the processors after which the first report is shown, though not stored


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended."""

    step: int  # the number of steps taken, over all calls
    stopped_by: int | None  # the signal that stopped the training before its last step
    metrics: dict[str, float]  # the last line of metrics.jsonl that this call wrote, on rank 0
    rank: int = 0  # the number of this process among those that trained together
    taken: int = 0  # the number of steps that this call took
    stalled: bool = False  # whether `early_stop` ended the training
    memory: str = ""  # the peak of this process, in words


class Trainer:
    """Takes the steps of a training: its model, its optimiser, and what is measured of them."""

    def __init__(self, training: Training) -> None:
        self.training, self.config, self.directory = training, training.config, training.directory
        self.progress, self.ranks = training.progress, training.ranks
        config, progress = self.config, self.progress
        module, name = config.kind.objective_of(config).split(".")
        self.objective: Objective[Any] = getattr(import_module(f"{__package__}.{module}"), name)(training)
        self.model = self.objective.model
        self.parameters = list(self.model.parameters())
        self.optimizer = self.objective.optimizer()

        self.measurements = Measurements(training, self.objective)

        left = self.objective.steps(progress.sentences - progress.taken)
        epochs_after = config.epochs - progress.epoch - 1
        self.last_step = progress.step + left + epochs_after * self.objective.steps(progress.sentences)
        if config.steps is not None:
            self.last_step = min(self.last_step, config.steps)

        self.parts = Parts()
        self.precision = Precision(config.precision, training.device, progress)
        self.factor = Factor(config, self.last_step)
        self.schedule = schedule_of(self.optimizer, config.learning_rate, self.factor, progress.step)
        self._log: Log = lambda line: None
        self._rest: tuple[Span, ...] | None = None  # what remains of the epoch for this rank

    def run(self, display_class: type[Display] = Display) -> Outcome:
        """Trains until the last step or until a signal arrives, then saves a checkpoint."""
        config, progress, ranks = self.config, self.progress, self.ranks
        measurements, line = self.measurements, dict[str, float]()
        self._announce(display_class)
        sentences, tokens, first_step = 0, 0, progress.step
        begin_peak(self.objective.device)

        with (
            contextlib.ExitStack() as stack,
            self._display(display_class) as display,
            StopRequest(insists=ranks.size == 1) as stop,
        ):
            log = None
            if ranks.is_first:
                path = self.directory / checkpoint.METRICS
                log = stack.enter_context(contextlib.closing(MetricsLog(path, progress.metrics_length)))
                self._log = stack.enter_context(logger(config, self.directory))
            line = self._measure_fresh_weights(log, display)

            stopped_by, silent, began = None, log is not None, Moment.now()
            for turn in self.parts.reading(self._remaining_turns()):
                loss, measured = self.step(turn.batch, turn.sizes)
                sentences += sum(turn.sizes)
                tokens += int(turn.batch.lengths.sum())
                display.advance(sum(turn.sizes))

                stopped_by = ranks.stop_signal(stop.signal)
                ends, stops = progress.step == self.last_step, stopped_by is not None
                validates = measurements.can_validate and (ends or progress.step % config.valid_every == 0)
                reports = ends or validates or progress.step % config.report_every == 0
                saves = ends or stops or progress.step % config.checkpoint_every == 0

                if log is not None and (reports or saves):
                    measurements.check_finite(loss)

                measurements.add(loss, measured, sum(turn.sizes), reports=reports)

                if reports:
                    silent = False
                    spent = Moment.now().since(began)
                    speed = {"sentences_per_second": sentences / spent.seconds, **self.parts.take()}
                    speed["tokens_per_second"] = tokens / spent.seconds
                    with self.optimizer.up_to_date() if validates else contextlib.nullcontext():
                        line = measurements.line(validates) | self._changing()
                    Moment.now().since(began).add_to(progress)
                    sentences, tokens, began = 0, 0, Moment.now()
                    line = self._report(line | speed, log, display)
                    measurements.interval.begin()
                elif silent and (spent := Moment.now().since(began)).cpu_seconds >= FIRST_REPORT:
                    silent = False
                    early = measurements.early_line(measured)
                    display.report(early | {"sentences_per_second": sentences / spent.seconds})

                if saves or self.has_ended:
                    self._save(log, began)
                if stops:
                    break

        taken, stalled = progress.step - first_step, measurements.best.has_stalled
        stopped_by = None if self.has_ended else stopped_by
        memory = peak_memory(self.objective.device)
        return Outcome(progress.step, stopped_by, line, ranks.rank, taken, stalled, memory)

    @property
    def has_ended(self) -> bool:
        """Whether the last step was taken, or the training has stopped to improve and is to end then."""
        return self.progress.step >= self.last_step or self.measurements.best.has_stalled

    def _announce(self, display_class: type[Display]) -> None:
        """Tells what was read and what is about to be done, unless the run has ended already."""
        if self.ranks.is_first and not self.has_ended:
            checkpoint.check_space(self.directory, self.model)
            display_class.say(opening(self.objective, self.last_step))

    def _measure_fresh_weights(self, log: MetricsLog | None, display: Display) -> dict[str, float]:
        """Validates the model before the first step; the line of metrics, which is empty otherwise."""
        if self.progress.step or not (self.measurements.can_validate and self.objective.validates_fresh):
            return {}
        return self._report(self.measurements.of_fresh_weights(), log, display)

    def _report(
        self, figures: dict[str, float], log: MetricsLog | None, display: Display
    ) -> dict[str, float]:
        """Writes and shows a line of metrics, to which it adds the time that the training has taken."""
        line = figures | {"seconds": self.progress.seconds, "cpu_seconds": self.progress.cpu_seconds}
        if log is not None:
            log.write(line)
            self._log(line)
        display.report(line)
        return line

    def check_nothing_is_left(self) -> None:
        """Checks that a run that has ended without a checkpoint is not asked for further steps."""
        if not self.has_ended:
            raise InputError(
                f"cannot resume: {self.directory} ended at step {self.progress.step} and kept no checkpoint "
                f"from which it could go on to step {self.last_step}; --keep-checkpoint would have kept one"
            )

    def _display(self, display_class: type[Display]) -> Display:
        """What shows the progress, in sentences of all ranks."""
        size = self.config.batch_size * self.ranks.size
        done = self.progress.step * size
        if self.ranks.size > 1:  # before, another number of ranks may have taken the steps
            done = self.progress.epoch * self.progress.sentences + self.progress.taken
        total = done + (self.last_step - self.progress.step) * size
        return (display_class if self.ranks.is_first else Silent)(total, done)

    def step(self, batch: Batch | Sample, sizes: Sequence[int] | None = None) -> tuple[Tensor, Measured]:
        """Takes one step of the optimiser; returns the loss and the tensors for `Objective.measure`.

        `sizes` are the numbers of sentences of all ranks; by default those of the batch, on one rank.
        """
        self.optimizer.zero_grad()
        share = self.ranks.share(sizes or [len(batch.lengths)])
        with self.parts.of("gradients"):
            loss, measured = self._gradients(batch, share)
            self.ranks.sum_gradients(self.parameters)

        with self.parts.of("optimiser"):
            self.precision.scaler.unscale_(self.optimizer)
            for group in self.objective.clip_groups() if self.config.clip else ():
                clip_grad_norm_(group, self.config.clip)
            self.precision.step(self.optimizer, self.schedule)
            self.objective.constrain(batch)
        return loss.detach(), tuple(map(_as_measured, measured))

    def _gradients(self, batch: Batch | Sample, share: Share) -> tuple[Tensor, Measured]:
        """Adds this rank's gradients of a step to those of the parameters; returns as `Objective.loss`."""
        scaler = self.precision.scaler
        with self.precision.autocast():
            if self.config.chunk is not None:
                return self.objective.backward_in_chunks(batch, share, scaler)
            loss, measured = self.objective.loss(batch, share)
        scaler.scale(loss).backward()
        return loss, measured

    def _changing(self) -> dict[str, float]:
        """What changes from step to step, for metrics.jsonl: the last learning rate, and a learnt scale."""
        figures = {}
        if self.config.has_schedule:
            figures["learning_rate"] = self.config.learning_rate * self.factor(self.progress.step - 1)
        if self.precision.has_scale:
            figures["loss_scale"] = self.precision.scaler.get_scale()
        if self.config.learn_scale:
            figures["scale"] = self.model.loss.scale.detach().item()
        return figures

    def _remaining_turns(self) -> Iterator[Turn]:
        progress = self.progress
        first_pass = True  # after a checkpoint at the end of an epoch, nothing remains of it
        while not self.has_ended:
            before = progress.step
            for turn in self.objective.turns(progress):
                progress.step += 1
                progress.taken += sum(turn.sizes)
                self._rest = turn.rest
                yield turn
                if self.has_ended:
                    return
            if progress.step == before and not first_pass:
                raise InputError(f"the corpus has changed: no batch in {', '.join(self.training.corpus)}")
            first_pass = False
            progress.epoch += 1
            progress.taken, progress.spans = 0, ()

    def _save(self, log: MetricsLog | None, began: Moment) -> None:
        """Has rank 0 write the model, and a checkpoint of all ranks; times are added from `began` on."""
        reads_in_order = self.objective.reads_in_order
        local_state = self._rest if reads_in_order else None, checkpoint.generator_states()
        rests, generators = zip(*self.ranks.gather(local_state), strict=True)

        def write() -> None:
            assert log is not None  # for mypy: this is rank 0
            self.measurements.check_weights()
            self.progress.metrics_length = log.sync()
            self.measurements.interval.store()
            progress = replace(self.progress)
            self.precision.store(progress)
            Moment.now().since(began).add_to(progress)
            if reads_in_order:
                progress.spans = rests
            # The checkpoint comes last. After a crash between the two, the resumed training writes the model
            # again; the other way round, a finished training could keep an old model.
            if not self.measurements.best.is_kept:
                with self.optimizer.up_to_date():
                    checkpoint.save_model(self.directory / checkpoint.MODEL, self.model)

            path = self.directory / checkpoint.CHECKPOINT
            if not self.has_ended or self.config.keep_checkpoint:
                # As they are: a training that is not stopped here does not move what is behind, either.
                with self.optimizer.ignoring_reads():
                    checkpoint.save_checkpoint(path, self.model, self.optimizer, progress, generators)
                (self.directory / FINISHED).unlink(missing_ok=True)
            else:
                save_finished(self.directory, progress)
                path.unlink(missing_ok=True)

        self.ranks.first(write)


def _as_measured(tensor: Tensor) -> Tensor:
    """A tensor for `Objective.measure`: without graph, and not of 16 bits, which would round the figures."""
    is_short = tensor.is_floating_point() and tensor.dtype.itemsize < 4
    return tensor.detach().float() if is_short else tensor.detach()
