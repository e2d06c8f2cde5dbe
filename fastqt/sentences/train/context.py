"""The objectives of models that learn from the sentences around each sentence of a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fastqt.functional import contrastive_loss
from fastqt.sentences.metrics import context_accuracy
from fastqt.sentences.runs.progress import Progress
from fastqt.sentences.text import Batch, Position, Span
from fastqt.sentences.text.batches import span_batches, split
from fastqt.sentences.train.objectives import Measured, Objective, Turn, group_options
from fastqt.sentences.train.ranks import Share


class ContextObjective(Objective[Batch]):
    """QuickThoughts: find each sentence's neighbours among all sentences of a batch in corpus order."""

    reads_in_order = True
    _whole: tuple[tuple[Span, ...], ...] | None = None

    def turns(self, progress: Progress) -> Iterator[Turn]:
        spans = progress.spans or self._spans(progress.sentences)
        sizes = list(self.sizes(progress.sentences - progress.taken))
        local_sizes = (each[self.ranks.rank] for each in sizes)
        local_batches = span_batches(
            self.training.corpus, self.vocabulary, local_sizes, spans[self.ranks.rank], self.config.column
        )
        for each, (batch, rest) in zip(sizes, local_batches, strict=True):
            yield Turn(batch, each, rest)

    def _spans(self, sentences: int) -> tuple[tuple[Span, ...], ...]:
        """The part of the corpus that each rank reads in an epoch."""
        if self._whole is None:
            whole, size = [Span(Position(), sentences)], self.ranks.size
            self._whole = self.ranks.first(
                lambda: split(self.training.corpus, whole, size, self.config.column)
            )
        return self._whole

    def loss(self, batch: Batch, share: Share | None = None) -> tuple[Tensor, Measured]:
        inputs = self.inputs(batch)
        return self.loss_of([encoder(*inputs) for encoder in self.encoders()], batch, share)

    def encoders(self) -> list[Callable[..., Tensor]]:
        return [self.model.query_encoder, self.model.candidate_encoder]

    def loss_of(
        self, embeddings: Sequence[Tensor], batch: Batch, share: Share | None
    ) -> tuple[Tensor, Measured]:
        queries, candidates = embeddings
        return self.context_loss(queries, candidates, batch, share), (queries, candidates)

    def context_loss(self, queries: Tensor, candidates: Tensor, batch: Batch, share: Share | None) -> Tensor:
        return contrastive_loss(
            queries,
            candidates,
            context_size=self.config.context_size,
            document_ids=self._documents(batch, share),
            **group_options(share),
        )

    def _documents(self, batch: Batch, share: Share | None) -> Tensor | None:
        """What windows stop at."""
        if self.config.documents == "cut":
            return batch.document_ids.to(self.device)
        # Sentences of two spans are no neighbours. All ranks have to give ids where one does.
        pieces = batch.pieces
        if pieces is None and share is not None and share.group is not None:
            pieces = torch.zeros_like(batch.lengths)
        return None if pieces is None else pieces.to(self.device)

    def measure(self, measured: Measured) -> dict[str, float]:
        forward, backward = context_accuracy(*measured)
        return {"forward_accuracy": forward, "backward_accuracy": backward, "chance": 1 / len(measured[0])}


class CombinedObjective(ContextObjective):
    """Several QuickThoughts models on the same batches, each trained as if it were alone.

    The loss is the sum of the models' losses, and the gradients of each model are clipped apart.
    """

    def clip_groups(self) -> list[list[Tensor]]:
        if self.config.clip_by == "global":
            return [list(model.parameters()) for model in self.model.parts]
        return super().clip_groups()

    def encoders(self) -> list[Callable[..., Tensor]]:
        return [each for model in self.model.parts for each in (model.query_encoder, model.candidate_encoder)]

    def loss_of(
        self, embeddings: Sequence[Tensor], batch: Batch, share: Share | None
    ) -> tuple[Tensor, Measured]:
        queries, candidates = embeddings[::2], embeddings[1::2]
        losses = [self.context_loss(*each, batch, share) for each in zip(queries, candidates, strict=True)]
        return torch.stack(losses).sum(), (torch.cat([*queries], dim=1), torch.cat([*candidates], dim=1))

    def measure(self, measured: Measured) -> dict[str, float]:
        """The accuracies of the sum of the models' scores, and of each model under its encoder's name."""
        figures, names = super().measure(measured), self.config.encoder_kind.parts
        for name, queries, candidates in zip(names, *map(self.model.split, measured), strict=True):
            forward, backward = context_accuracy(queries, candidates)
            figures |= {f"{name}_forward_accuracy": forward, f"{name}_backward_accuracy": backward}
        return figures


class SkipThoughtsObjective(ContextObjective):
    """Skip-thoughts on batches in corpus order, which are read and cut at documents as QuickThoughts' are.

    The loss is the mean over all words of the neighbours in a batch. A batch without such a word, for
    instance one of documents of a single sentence, has loss 0 and gradients of zeros.

    Source: Kiros et al., "Skip-thought vectors" (arXiv:1506.06726).
    """

    def loss(self, batch: Batch, share: Share | None = None) -> tuple[Tensor, Measured]:
        """As `Objective.loss`; what is measured is the loss of this rank's words, and their number."""
        documents = self._documents(batch, share)
        tokens, lengths = batch.tokens.to(self.device), batch.lengths.to(self.device)
        summed, number = self.model.summed_loss(tokens, lengths, documents)
        words = torch.tensor(float(number), device=self.device)
        measured = summed.detach(), words
        if share is None or share.group is None:
            return summed / words.clamp(min=1), measured
        # Neighbours are sentences of one rank, so that a rank's part depends on the others' words by their
        # number alone.
        part = summed / self.ranks.total(words).clamp(min=1)
        return part + (self.ranks.total(part) - part.detach()), measured

    def measure(self, measured: Measured) -> dict[str, float]:
        summed, words = measured
        return {"loss_per_word": (summed / words.clamp(min=1)).item()}

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """The mean loss over all words to predict in the held-out batches."""
        with self._validation_mode():
            sums = [self.loss(batch)[1] for batch in self.held_out]
        loss, words = (torch.stack(each).double().sum() for each in zip(*sums, strict=True))
        mean = (loss / words.clamp(min=1)).item()
        return {"validation_loss": mean, "validation_loss_per_word": mean}
