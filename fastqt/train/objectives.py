"""Training objectives: for each kind of model its batches, its loss and the metrics that are reported."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fastqt.functional import contrastive_loss
from fastqt.metrics import context_accuracy, view_figures
from fastqt.runs.checkpoint import Progress
from fastqt.runs.config import TrainConfig
from fastqt.runs.model import Model, build_model
from fastqt.text import Batch, Corpus, Lexicon, Position, Sample, batches
from fastqt.train.optim import Adam, RowAdam

B = TypeVar("B", bound=Batch | Sample)
Measured = tuple[Tensor, Tensor]  # two tensors of a step, from which `Objective.measure` computes metrics


class Objective(ABC, Generic[B]):
    """A model together with its batches, its loss and its metrics.

    Args:
        config: the settings.
        corpus: paths of the text files to train on.
        vocabulary: turns their sentences into token ids.
        device: where to compute.

    Attributes:
        model: the model to train, freshly initialised with the seed of the settings.
        held_out: the batches of the validation text; empty if the settings name none.
        min_batch_size: the last batch of an epoch is dropped if it has fewer sentences.
    """

    def __init__(
        self, config: TrainConfig, corpus: list[str], vocabulary: Lexicon, device: torch.device
    ) -> None:
        self.config, self.corpus, self.vocabulary, self.device = config, corpus, vocabulary, device
        self.min_batch_size = 2
        torch.manual_seed(config.seed)
        # transformers returns a checkpoint's model in evaluation mode.
        self.model: Any = self._build_model().to(device).train()
        self.held_out = list(self._held_out_batches())

    def _build_model(self) -> Model:
        return build_model(self.config, len(self.vocabulary))

    def optimizer(self) -> Adam:
        """The optimiser of the model's parameters."""
        return Adam(self.model.parameters(), lr=self.config.learning_rate)

    def constrain(self, batch: B) -> None:
        """Projects the model onto its constraints after a step on `batch`. Most models have none."""
        return

    def steps(self, sentences: int) -> int:
        """The number of batches in one epoch over this many sentences."""
        full, rest = divmod(sentences, self.config.batch_size)
        return full + (rest >= self.min_batch_size)

    @abstractmethod
    def batches(self, progress: Progress) -> Iterator[tuple[B, Position | None]]:
        """The remaining batches of the current epoch.

        Args:
            progress: how far the training has come.

        Yields:
            A batch, and the position in the corpus from which a resumed training continues after it (None for
            objectives whose batches follow from the seed and the step alone).
        """

    @abstractmethod
    def loss(self, batch: B | Batch) -> tuple[Tensor, Measured]:
        """Computes the loss of a batch.

        Args:
            batch: B sentences, as token ids (B, L) and lengths (B,); for validation always a `Batch`.

        Returns:
            The loss, a scalar, and the tensors for `measure`.
        """

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

    @contextlib.contextmanager
    def _validation_mode(self) -> Iterator[None]:
        self.model.eval()
        yield
        self.model.train()

    def _held_out_batches(self) -> Iterator[Batch]:
        config = self.config
        if config.valid is None:
            return
        found = batches([config.valid], self.vocabulary, config.batch_size, smallest=config.batch_size)
        for _, batch in zip(range(config.valid_batches), found, strict=False):
            yield batch


class ContextObjective(Objective[Batch]):
    """QuickThoughts: find each sentence's neighbours among all sentences of a batch in corpus order."""

    def __init__(
        self, config: TrainConfig, corpus: list[str], vocabulary: Lexicon, device: torch.device
    ) -> None:
        super().__init__(config, corpus, vocabulary, device)
        self.min_batch_size = config.context_size + 1

    def batches(self, progress: Progress) -> Iterator[tuple[Batch, Position | None]]:
        size = self.config.batch_size
        for batch in batches(
            self.corpus, self.vocabulary, size, start=progress.position, smallest=self.min_batch_size
        ):
            yield batch, batch.position

    def loss(self, batch: Batch) -> tuple[Tensor, Measured]:
        queries, candidates = self.model(batch.tokens.to(self.device), batch.lengths.to(self.device))
        documents = batch.document_ids.to(self.device) if self.config.documents == "cut" else None
        loss = contrastive_loss(
            queries, candidates, context_size=self.config.context_size, document_ids=documents
        )
        return loss, (queries, candidates)

    def measure(self, measured: Measured) -> dict[str, float]:
        forward, backward = context_accuracy(*measured)
        return {"forward_accuracy": forward, "backward_accuracy": backward, "chance": 1 / len(measured[0])}


class ShuffledObjective(Objective[Sample]):
    """An objective on batches of sentences in random order. The corpus is held in memory."""

    def __init__(
        self, config: TrainConfig, corpus: list[str], vocabulary: Lexicon, device: torch.device
    ) -> None:
        self.sentences = Corpus(corpus, vocabulary)
        super().__init__(config, corpus, vocabulary, device)

    def batches(self, progress: Progress) -> Iterator[tuple[Sample, Position | None]]:
        first = progress.step - progress.epoch * self.steps(len(self.sentences))
        for sample in self.sentences.shuffled(
            self.config.batch_size,
            seed=self.config.seed,
            epoch=progress.epoch,
            first=first,
            smallest=self.min_batch_size,
        ):
            yield sample, None


class ViewsObjective(ShuffledObjective):
    """SimCSE and MixCSE: find each sentence's second view among the second views of a batch."""

    def loss(self, batch: Batch | Sample) -> tuple[Tensor, Measured]:
        views = self.model(batch.tokens.to(self.device), batch.lengths.to(self.device))
        return self.model.loss(*views), views

    def measure(self, measured: Measured) -> dict[str, float]:
        return view_figures(*measured, mix=self.config.mix)

    @contextlib.contextmanager
    def _validation_mode(self) -> Iterator[None]:
        # Dropout stays on, because without it both views would be equal. A fixed seed gives the same dropout
        # masks in every validation, so that the validations of a training can be compared.
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(self.config.seed)
            yield


class GlossObjective(ShuffledObjective):
    """GLOSS: predict the words of each sentence from a latent vector of its own."""

    def __init__(
        self, config: TrainConfig, corpus: list[str], vocabulary: Lexicon, device: torch.device
    ) -> None:
        super().__init__(config, corpus, vocabulary, device)
        self.min_batch_size = 1

    def _build_model(self) -> Model:
        return build_model(self.config, len(self.vocabulary), sentences=len(self.sentences))

    def optimizer(self) -> Adam:
        optimizer_class = RowAdam if self.config.latents == "rows" else Adam
        return optimizer_class(self.model.parameters(), lr=self.config.learning_rate)

    def constrain(self, batch: Sample) -> None:
        self.model.project(batch.rows.to(self.device) if self.config.latents == "rows" else None)

    def loss(self, batch: Batch | Sample) -> tuple[Tensor, Measured]:
        """Computes the loss of a batch.

        The latent vectors of held-out sentences are not learnt, so they are inferred first.

        Args:
            batch: B sentences; a `Batch` holds held-out sentences.

        Returns:
            The loss, a scalar; the latent vectors (B, d) and the loss per word, a scalar.
        """
        tokens, lengths = batch.tokens.to(self.device), batch.lengths.to(self.device)
        if isinstance(batch, Sample):
            latents = self.model.latents_of(batch.rows.to(self.device))
        else:
            latents = self.model.infer(tokens, lengths)
        loss = self.model.loss(latents, tokens, lengths)
        words = self.model.targets(tokens, lengths).sum().clamp(min=1)
        return loss, (latents, loss * len(lengths) / words)

    def measure(self, measured: Measured) -> dict[str, float]:
        latents, loss_per_word = measured
        return {"loss_per_word": loss_per_word.item(), "latent_norm": latents.norm(dim=1).mean().item()}


def build_objective(
    config: TrainConfig, corpus: list[str], vocabulary: Lexicon, device: torch.device
) -> Objective[Any]:
    """The objective of the model that the settings name. For the arguments see `Objective`."""
    classes: dict[str, type[Objective[Any]]] = {"quickthoughts": ContextObjective}
    classes |= {"gloss-bow": GlossObjective, "gloss-pos": GlossObjective}
    return classes.get(config.model, ViewsObjective)(config, corpus, vocabulary, device)
