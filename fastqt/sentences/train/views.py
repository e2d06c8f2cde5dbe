"""The training objectives of SimCSE and MixCSE: views of each sentence by dropout, or rows of texts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from fastqt.errors import InputError
from fastqt.losses.mixcse import drawn_partners
from fastqt.nn import mask_words
from fastqt.nn.masked_words import Masking
from fastqt.nn.modes import evaluating
from fastqt.sentences.metrics import view_figures
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.model import prompts_of
from fastqt.sentences.text import Batch, Corpus, Lexicon, Sample, TripletCorpus, Vocabulary
from fastqt.sentences.text.batches import too_short
from fastqt.sentences.text.duplicates import apart, repeating_rows
from fastqt.sentences.train.objectives import Measured, ShuffledObjective, group_options
from fastqt.sentences.train.ranks import Share

if TYPE_CHECKING:
    from fastqt.integrations.huggingface import CheckpointVocabulary


LOOKED_AT = 10_000  # rows of a corpus, for words about its repetitions


class OneEncoderObjective(ShuffledObjective):
    """An objective of one encoder, which encodes all texts of a batch together.

    They are two views of each sentence, which differ by dropout, or the columns of rows: anchors, positives
    and any hard negatives, one after the other. The settings say which; a subclass has the loss of them.
    """

    sentences: Corpus | TripletCorpus

    def _read_corpus(self) -> None:
        if not self.config.reads_rows:
            super()._read_corpus()
            return
        prompts, progress = prompts_of(self.config), self.training.progress
        # The tokenizer of a checkpoint is not for several threads.
        waits = isinstance(self.vocabulary, Vocabulary)
        self.sentences = TripletCorpus(self.training.corpus, self.vocabulary, prompts=prompts, waits=waits)
        # Batches without duplicates have nearly this order.
        order = self.sentences.order(self.config.seed, progress.epoch)
        self.sentences.encode_ahead(np.roll(order, -progress.taken))

    def repetitions(self) -> tuple[int, int]:
        """How many rows of the first batches repeat a text of another row, and how many rows these are."""
        size, order = self.config.batch_size * self.ranks.size, self.order(0)[:LOOKED_AT]
        return repeating_rows(np.array_split(order, range(size, len(order), size)), self.sentences.texts)

    @property
    def width(self) -> int:
        """How many texts there are of each row of a batch."""
        return self.sentences.width if isinstance(self.sentences, TripletCorpus) else 2

    def encoders(self) -> list[Callable[..., Tensor]]:
        return [self.model.view]

    def inputs(self, batch: Batch | Sample) -> tuple[Tensor, Tensor]:
        tokens, lengths = super().inputs(batch)
        if self.config.reads_rows:
            return tokens, lengths
        return torch.cat([tokens, tokens]), torch.cat([lengths, lengths])

    def loss(self, batch: Batch | Sample, share: Share | None = None) -> tuple[Tensor, Measured]:
        (encoder,) = self.encoders()
        return self.loss_of([encoder(*self.inputs(batch))], batch, share)

    @contextlib.contextmanager
    def _validation_mode(self) -> Iterator[None]:
        # A fixed seed gives the same dropout masks and partners in every validation, so that the validations
        # of a training can be compared. Views differ by dropout, without which both would be equal.
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(self.config.seed)
            with evaluating(self.model) if self.config.reads_rows else contextlib.nullcontext():
                yield

    def _held_out_batches(self) -> Iterator[Batch | Sample]:
        config = self.config
        if not config.reads_rows:
            yield from super()._held_out_batches()
            return
        if config.valid is None or not self.ranks.is_first:
            return
        rows = TripletCorpus([config.valid], self.vocabulary, width=self.width, prompts=prompts_of(config))
        size = config.batch_size
        if len(rows) < size:
            raise InputError(too_short([config.valid], len(rows), size))
        order = np.arange(len(rows))
        if config.batch_sampler == "no-duplicates":
            order = apart(order, rows.texts, size)
        for begin in range(0, min(len(rows) // size, config.valid_batches) * size, size):
            yield rows.sample(order[begin : begin + size])


class ViewsObjective(OneEncoderObjective):
    """SimCSE and MixCSE: find each text's second view, or positive, among those of a batch."""

    def loss_of(
        self, embeddings: Sequence[Tensor], batch: Batch | Sample, share: Share | None
    ) -> tuple[Tensor, Measured]:
        """As of `Objective.loss_of`.

        The tensors are of this rank's sentences: both views, (B, D) each, the partners of their mixed
        negatives, (B,), as numbers of sentences of all ranks, the loss of masked words, or nothing (0,), and
        any hard negatives.
        """
        z1, z2, *negatives = embeddings[0].chunk(self.width)
        module, options = self.model.loss, group_options(share)
        N = len(z1) if share is None else share.sentences

        if self.config.partner == "random":
            # Two generators of one seed: the loss draws with one, and the log has the same draw from another.
            seed = int(torch.randint(1 << 62, (), device="cpu"))
            first, second = (torch.Generator("cpu").manual_seed(seed) for _ in range(2))
            options["generator"] = first
            partners = drawn_partners(N, z1.device, second)
        else:
            partners = torch.arange(1, N + 1, device=z1.device) % N

        options |= module.function_options()
        hard = [torch.stack(negatives, 1)] if negatives else []
        loss = type(module).function(z1, z2, *hard, **options)

        words = loss.new_zeros(0)
        if self.config.masked_words:
            words = self._masked_words(batch, share)
            loss = loss + self.config.masked_words * words

        # Metrics are of rank 0, whose sentences are the first of all ranks.
        return loss, (z1, z2, partners[: len(z1)], words.detach(), *negatives)

    def _masked_words(self, batch: Batch | Sample, share: Share | None) -> Tensor:
        """The mean cross-entropy of the masked words of all ranks, whose gradients are this rank's part."""
        model, tokens = self.model, batch.tokens
        table = len(model.encoder.word_table)
        masking = mask_words(
            tokens,
            batch.lengths,
            vocab_size=len(self.vocabulary),
            mask_id=mask_token(self.config, self.vocabulary, table),
            kept=self.vocabulary.special_ids(),
        )
        masking = Masking(*(each.to(self.device) for each in masking))
        loss: Tensor = model.masked_word_loss(tokens.to(self.device), batch.lengths.to(self.device), masking)
        chosen = masking.chosen.sum()
        if share is None or share.group is None:
            return loss / chosen.clamp(min=1)
        part = loss / self.ranks.total(chosen).clamp(min=1)
        return part + (self.ranks.total(part) - part.detach())

    def measure(self, measured: Measured) -> dict[str, float]:
        z1, z2, partners, words, *negatives = measured
        config = self.config
        figures = view_figures(
            z1,
            z2,
            mix=config.mix,
            partners=partners,
            mixes_unit_rows=config.form == "slides",
            negatives=negatives,
        )
        return figures | ({"masked_word_loss": words.item()} if words.dim() == 0 else {})


def mask_token(config: TrainConfig, vocabulary: Lexicon, words: int) -> int:
    """The id of the mask token, for an encoder whose word table has `words` rows.

    An encoder that is trained from scratch has one row more than its vocabulary has words, for this token
    alone. A checkpoint has one of its own, in its tokenizer and with a vector in its model.
    """
    if config.checkpoint is None:
        return len(vocabulary)
    token_id: int | None = cast("CheckpointVocabulary", vocabulary).tokenizer.mask_token_id
    if token_id is None or token_id >= words:
        raise InputError(f"masked_words: want a checkpoint with a mask token, got {config.checkpoint!r}")
    return token_id
