"""What a training learns: from which batches, by which loss, and which figures are reported of it."""

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
Vectors = tuple[Tensor, Tensor]


class Objective(ABC, Generic[B]):
    """A model, what it is trained on, and for what.

    Args:
        config: the settings.
        corpus: files to train on.
        vocabulary: how to encode them.
        device: where to compute.

    Attributes:
        model: what is trained.
        smallest: fewest sentences that make a batch.
    """

    def __init__(
        self, config: TrainConfig, corpus: list[str], vocabulary: Lexicon, device: torch.device
    ) -> None:
        self.config, self.corpus, self.vocabulary, self.device = config, corpus, vocabulary, device
        self.smallest = 2
        torch.manual_seed(config.seed)
        # A checkpoint's model comes in evaluation mode.
        self.model: Any = self._model().to(device).train()
        self.held_out = list(self._held_out())

    def _model(self) -> Model:
        return build_model(self.config, len(self.vocabulary))

    def optimizer(self) -> Adam:
        """What takes the steps."""
        return Adam(self.model.parameters(), lr=self.config.learning_rate)

    def constrain(self, batch: B) -> None:
        """Brings the model back to where it has to lie, after a step on a batch."""
        return

    def steps(self, sentences: int) -> int:
        """Batches of one pass over so many sentences."""
        full, rest = divmod(sentences, self.config.batch_size)
        return full + (rest >= self.smallest)

    @abstractmethod
    def batches(self, progress: Progress) -> Iterator[tuple[B, Position | None]]:
        """What is left of a pass, batch by batch, and where in the corpus one goes on after each."""

    @abstractmethod
    def loss(self, batch: B | Batch) -> tuple[Tensor, Vectors]:
        """The loss of a batch, a scalar, and what it is a loss of."""

    @abstractmethod
    def measure(self, vectors: Vectors) -> dict[str, float]:
        """Figures of what a loss was of."""

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Means of the loss and its figures over the held-out batches."""
        rows = []
        with self._validating():
            for batch in self.held_out:
                loss, vectors = self.loss(batch)
                rows.append({"loss": loss.item(), **self.measure(vectors)})
        return {f"validation_{name}": sum(row[name] for row in rows) / len(rows) for name in rows[0]}

    @contextlib.contextmanager
    def _validating(self) -> Iterator[None]:
        self.model.eval()
        yield
        self.model.train()

    def _held_out(self) -> Iterator[Batch]:
        config = self.config
        if config.valid is None:
            return
        found = batches([config.valid], self.vocabulary, config.batch_size, smallest=config.batch_size)
        for _, batch in zip(range(config.valid_batches), found, strict=False):
            yield batch


class ContextObjective(Objective[Batch]):
    """QuickThoughts: tell a sentence's neighbours from all others of a batch in the corpus's order."""

    def __init__(
        self, config: TrainConfig, corpus: list[str], vocabulary: Lexicon, device: torch.device
    ) -> None:
        super().__init__(config, corpus, vocabulary, device)
        self.smallest = config.context_size + 1

    def batches(self, progress: Progress) -> Iterator[tuple[Batch, Position | None]]:
        size = self.config.batch_size
        for batch in batches(
            self.corpus, self.vocabulary, size, start=progress.position, smallest=self.smallest
        ):
            yield batch, batch.position

    def loss(self, batch: Batch) -> tuple[Tensor, Vectors]:
        queries, candidates = self.model(batch.tokens.to(self.device), batch.lengths.to(self.device))
        documents = batch.document_ids.to(self.device) if self.config.documents == "cut" else None
        loss = contrastive_loss(
            queries, candidates, context_size=self.config.context_size, document_ids=documents
        )
        return loss, (queries, candidates)

    def measure(self, vectors: Vectors) -> dict[str, float]:
        forward, backward = context_accuracy(*vectors)
        return {"forward_accuracy": forward, "backward_accuracy": backward, "chance": 1 / len(vectors[0])}


class ShuffledObjective(Objective[Sample]):
    """Batches of sentences in random order, from a corpus in memory."""

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
            smallest=self.smallest,
        ):
            yield sample, None


class ViewsObjective(ShuffledObjective):
    """SimCSE and MixCSE: tell a sentence's second view from all others of a batch."""

    def loss(self, batch: Batch | Sample) -> tuple[Tensor, Vectors]:
        views = self.model(batch.tokens.to(self.device), batch.lengths.to(self.device))
        return self.model.loss(*views), views

    def measure(self, vectors: Vectors) -> dict[str, float]:
        return view_figures(*vectors, mix=self.config.mix)

    @contextlib.contextmanager
    def _validating(self) -> Iterator[None]:
        # Without dropout there is but one view: let it be the same one whenever it is looked at.
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(self.config.seed)
            yield


class GlossObjective(ShuffledObjective):
    """GLOSS: name each sentence's words from a latent vector of its own."""

    def __init__(
        self, config: TrainConfig, corpus: list[str], vocabulary: Lexicon, device: torch.device
    ) -> None:
        super().__init__(config, corpus, vocabulary, device)
        self.smallest = 1

    def _model(self) -> Model:
        return build_model(self.config, len(self.vocabulary), sentences=len(self.sentences))

    def optimizer(self) -> Adam:
        kind = RowAdam if self.config.latents == "rows" else Adam
        return kind(self.model.parameters(), lr=self.config.learning_rate)

    def constrain(self, batch: Sample) -> None:
        self.model.project(batch.rows.to(self.device) if self.config.latents == "rows" else None)

    def loss(self, batch: Batch | Sample) -> tuple[Tensor, Vectors]:
        """The loss, and of what is held out that of inferred vectors; these, and the loss of a word."""
        tokens, lengths = batch.tokens.to(self.device), batch.lengths.to(self.device)
        if isinstance(batch, Sample):
            latents = self.model.latents_of(batch.rows.to(self.device))
        else:
            latents = self.model.infer(tokens, lengths)
        loss = self.model.loss(latents, tokens, lengths)
        words = self.model.targets(tokens, lengths).sum().clamp(min=1)
        return loss, (latents, loss * len(lengths) / words)

    def measure(self, vectors: Vectors) -> dict[str, float]:
        latents, loss_per_word = vectors
        return {"loss_per_word": loss_per_word.item(), "latent_norm": latents.norm(dim=1).mean().item()}


def objective(
    config: TrainConfig, corpus: list[str], vocabulary: Lexicon, device: torch.device
) -> Objective[Any]:
    """What a run's settings ask for."""
    kinds: dict[str, type[Objective[Any]]] = {"quickthoughts": ContextObjective}
    kinds |= {"gloss-bow": GlossObjective, "gloss-pos": GlossObjective}
    return kinds.get(config.model, ViewsObjective)(config, corpus, vocabulary, device)
