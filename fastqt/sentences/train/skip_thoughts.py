"""The objective of skip-thoughts: predict the words of each sentence's neighbours from its vector."""

from __future__ import annotations

import torch
from torch import Tensor

from fastqt.sentences.text import Batch
from fastqt.sentences.train.objectives import ContextObjective, Measured
from fastqt.sentences.train.ranks import Share


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
