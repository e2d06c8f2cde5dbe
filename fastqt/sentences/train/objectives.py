"""Training objectives: for each kind of model its batches, its loss and the metrics that are reported."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastqt.cached import cached_backward
from fastqt.nn.modes import evaluating
from fastqt.optim import Adam
from fastqt.optim.adam import Rows
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.model import Model, build_model, choose_device
from fastqt.sentences.runs.progress import Progress
from fastqt.sentences.text import Batch, Corpus, Lexicon, Sample, Span, batches
from fastqt.sentences.text.batches import equal_shares
from fastqt.sentences.text.duplicates import apart
from fastqt.sentences.train.ranks import Ranks, Share
from fastqt.sentences.train.schedule import parameter_groups

B = TypeVar("B", bound=Batch | Sample)
Measured = tuple[Tensor, ...]  # tensors of a step, from which `Objective.measure` computes metrics


@dataclass
class Training:
    """What a training begins with, or goes on with."""

    config: TrainConfig
    corpus: list[str]  # paths of the text files and tables
    vocabulary: Lexicon
    directory: Path  # where the model, the metrics and the checkpoints are written
    progress: Progress  # where to go on; it is changed in place
    ranks: Ranks = field(default_factory=Ranks)  # by default this process trains alone
    begins: Literal["anew", "at a checkpoint", "at the end"] = "anew"

    @cached_property
    def device(self) -> torch.device:
        """The device to compute on."""
        return choose_device(self.config.device)


class Turn(NamedTuple):
    """What a rank takes in one step."""

    batch: Any  # a Batch or a Sample
    sizes: list[int]  # the number of sentences of each rank
    rest: tuple[Span, ...] = ()  # what remains of the epoch for this rank, if the corpus is read in its order


class Objective(ABC, Generic[B]):
    """A model together with its batches, its loss and its metrics.

    Attributes:
        model: the model to train, freshly initialised with the seed of the settings.
        held_out: the batches of the validation text; empty if the settings name none, and on all ranks but 0.
        min_batch_size: if a rank has fewer sentences left in an epoch, they make no batch. One process drops
            them. Several take them in the step before, because then each sentence of an epoch has its turn.
        reads_in_order: whether the corpus is read in its order, and a checkpoint says what remains of it.
        validates_fresh: whether the model is validated before its first step too.
    """

    reads_in_order = False
    validates_fresh = True

    def __init__(self, training: Training) -> None:
        self.training, self.config, self.vocabulary = training, training.config, training.vocabulary
        self.device, self.ranks = training.device, training.ranks
        self.min_batch_size = self.config.kind.smallest_batch(self.config)
        self._read_corpus()
        torch.manual_seed(self.config.seed)
        # transformers returns a checkpoint's model in evaluation mode.
        self.model: Any = self._build_model().to(self.device).train()
        self.held_out = list(self._held_out_batches())

    def _read_corpus(self) -> None:
        """Reads the corpus into memory, before the model is built; not where it is streamed."""
        return

    def _build_model(self) -> Model:
        return build_model(self.config, len(self.vocabulary), pretrained=self.config.init_from is None)

    def clip_groups(self) -> list[list[Tensor]]:
        """The parameters of which each group has a norm of the gradient that is limited."""
        if self.config.clip_by == "global":
            return [list(self.model.parameters())]
        return [[parameter] for parameter in self.model.parameters()]

    def optimizer(self) -> Adam:
        """The optimiser of the model's parameters."""
        config = self.config
        return Adam(
            parameter_groups(self.model, config),
            lr=config.learning_rate,
            betas=config.betas,
            decoupled_weight_decay=config.optimizer == "adamw",
            rows=self._moved_rows,
        )

    @property
    def _moved_rows(self) -> Rows:
        """What a step does to the rows of a table that have no gradient, as `rows` of `fastqt.optim.Adam`.

        Ranks read other rows each, and would move them by other sums.
        """
        return "all" if self.ranks.size > 1 else "replayed"

    def constrain(self, batch: B) -> None:
        """Projects the model onto its constraints after a step on `batch`. Most models have none."""
        return

    def steps(self, sentences: int) -> int:
        """The number of steps over this many sentences, or over the rest of an epoch that has as many."""
        full, rest = divmod(max(equal_shares(sentences, self.ranks.size)), self.config.batch_size)
        # With at least 2 sentences on the rank that has the most, no rank is without one.
        least = self.min_batch_size if self.ranks.size == 1 else max(self.min_batch_size, 2)
        return full + (rest >= least)

    def sizes(self, sentences: int) -> Iterator[list[int]]:
        """The number of sentences of each rank in each step over this many sentences."""
        ranks, size, steps = self.ranks.size, self.config.batch_size, self.steps(sentences)
        for _ in range(steps - 1):
            yield [size] * ranks
        if steps > 0:
            last = equal_shares(sentences - (steps - 1) * size * ranks, ranks)
            yield last if ranks > 1 else [min(size, *last)]

    @abstractmethod
    def turns(self, progress: Progress) -> Iterator[Turn]:
        """This rank's part of the remaining steps of the current epoch."""

    @abstractmethod
    def loss(self, batch: B | Batch, share: Share | None = None) -> tuple[Tensor, Measured]:
        """The loss of all ranks' sentences, and the tensors for `measure`.

        The gradients of the loss are this rank's part, and the tensors are those of its sentences. A batch
        has B sentences, as token ids (B, L) and lengths (B,); for validation it is always a `Batch`. `share`
        is this rank's part in a step; None where it computes the loss of its batch alone.
        """

    def encoders(self) -> list[Callable[..., Tensor]]:
        """The encoders of `inputs` whose embeddings `loss_of` takes, for models that may run in chunks.

        Settings with `chunk` are refused for the other models, so that nobody asks these.
        """
        raise NotImplementedError(f"{type(self).__name__} does not run in chunks")

    def inputs(self, batch: B | Batch) -> tuple[Tensor, Tensor]:
        """What each encoder is given: tokens (R, L) and lengths (R,), on the model's device."""
        return batch.tokens.to(self.device), batch.lengths.to(self.device)

    def loss_of(
        self, embeddings: Sequence[Tensor], batch: B | Batch, share: Share | None
    ) -> tuple[Tensor, Measured]:
        """What `loss` returns, from the embeddings (R, D) of each encoder, for the same models."""
        raise NotImplementedError(f"{type(self).__name__} does not run in chunks")

    def backward_in_chunks(
        self, batch: B | Batch, share: Share | None, scaler: torch.amp.GradScaler | None = None
    ) -> tuple[Tensor, Measured]:
        """What `loss` returns, without graph, after its gradients were added to those of the parameters.

        The encoders run twice over `config.chunk` rows at a time; the loss sees the embeddings of all.
        """
        measured: list[Measured] = []

        def loss(*embeddings: Tensor) -> Tensor:
            value, tensors = self.loss_of(embeddings, batch, share)
            measured.append(tensors)
            return value

        encoders, chunk = self.encoders(), self.config.chunk
        assert chunk is not None  # for mypy: the settings have it
        inputs = [self.inputs(batch)] * len(encoders)
        value = cached_backward(encoders, inputs, loss, chunk_size=chunk, scaler=scaler)
        return value, measured[0]

    @abstractmethod
    def measure(self, measured: Measured) -> dict[str, float]:
        """The metrics of a batch by name, from the tensors that `loss` returned."""

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Means of the loss and of the metrics over the held-out batches; names begin with `validation_`."""
        rows = []
        with self._validation_mode():
            for batch in self.held_out:
                loss, measured = self.loss(batch)
                rows.append({"loss": loss.item(), **self.measure(measured)})
        return {f"validation_{name}": sum(row[name] for row in rows) / len(rows) for name in rows[0]}

    def _validation_mode(self) -> AbstractContextManager[None]:
        return evaluating(self.model)

    def _held_out_batches(self) -> Iterator[B | Batch]:
        config = self.config
        if config.valid is None or not self.ranks.is_first:
            return
        size, most = config.batch_size, config.valid_batches
        yield from batches([config.valid], self.vocabulary, size, most=most, column=self.config.column)


class ShuffledObjective(Objective[Sample]):
    """An objective on batches of sentences in random order. The corpus is held in memory."""

    sentences: Any  # a `Corpus`, or another that has its methods

    def _read_corpus(self) -> None:
        self.sentences = Corpus(self.training.corpus, self.vocabulary, column=self.config.column)

    def turns(self, progress: Progress) -> Iterator[Turn]:
        taken, order = progress.taken, self.order(progress.epoch)
        for sizes in self.sizes(len(order) - taken):
            first = taken + sum(sizes[: self.ranks.rank])
            yield Turn(self.sentences.sample(order[first : first + sizes[self.ranks.rank]]), sizes)
            taken += sum(sizes)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """The indices of all sentences, (n,), in the order of an epoch."""
        order: NDArray[np.int64] = self.sentences.order(self.config.seed, epoch)
        if self.config.batch_sampler == "random":
            return order
        return apart(order, self.sentences.texts, self.config.batch_size * self.ranks.size)


class GlossObjective(ShuffledObjective):
    """GLOSS: predict the words of each sentence from a latent vector of its own."""

    validates_fresh = False  # Held-out sentences need hundreds of steps each for their latent vectors.

    def _build_model(self) -> Model:
        return build_model(self.config, len(self.vocabulary), sentences=len(self.sentences))

    @property
    def _moved_rows(self) -> Rows:
        return "touched" if self.config.latents == "rows" else "all"

    def constrain(self, batch: Sample) -> None:
        self.model.project(batch.rows.to(self.device) if self.config.latents == "rows" else None)

    def loss(self, batch: Batch | Sample, share: Share | None = None) -> tuple[Tensor, Measured]:
        """As of `Objective.loss`, where a `Batch` has held-out sentences.

        Their latent vectors are not learnt, so they are inferred first. The tensors are the latent vectors
        (B, d) and the loss per word, a scalar; with position_loss "mean" the mean over sentences of it, which
        is the loss.
        """
        tokens, lengths = batch.tokens.to(self.device), batch.lengths.to(self.device)
        if isinstance(batch, Sample):
            latents = self.model.latents_of(batch.rows.to(self.device))
        else:
            latents = self.model.infer(tokens, lengths)
        loss = self.model.loss(latents, tokens, lengths)
        loss_per_word = loss
        if self.model.position_loss == "sum":
            words = self.model.targets(tokens, lengths).sum().clamp(min=1)
            loss_per_word = loss * len(lengths) / words
        if share is not None and share.group is not None:
            # A sentence's loss depends on no other sentence.
            part = loss * (len(lengths) / share.sentences)
            loss = part + (self.ranks.total(part) - part.detach())
        return loss, (latents, loss_per_word)

    def measure(self, measured: Measured) -> dict[str, float]:
        latents, loss_per_word = measured
        return {"loss_per_word": loss_per_word.item(), "latent_norm": latents.norm(dim=1).mean().item()}


def group_options(share: Share | None) -> dict[str, Any]:
    """The options of a loss for this rank's part in a step."""
    return {} if share is None or share.group is None else {"group": share.group}
