"""What the processes of a `rank_pool.Pool` do for the tests of training on several ranks."""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from fastqt.sentences.train import loop, train
from fastqt.sentences.train.measurements import Measurements
from fastqt.sentences.train.objectives import Objective, Training
from fastqt.sentences.train.preparation import read_corpus
from fastqt.sentences.train.progress import Display
from fastqt.sentences.train.ranks import joined, sum_gradients


class Seen(NamedTuple):
    """What a rank has seen of a training."""

    step: int
    stopped_by: int | None
    rank: int
    batches: list  # of each, the first word and the document of each sentence
    generator: str  # the state of the random generator at the first step
    parameters: str  # a digest of their bits at the end
    shown: int  # the number of reports that this rank has shown


class Counting(Display):
    """Counts the reports."""

    shown = 0

    def report(self, line):
        Counting.shown += 1


def digest(tensors):
    """SHA-256 of the bits of tensors."""
    bits = hashlib.sha256()
    for tensor in tensors:
        bits.update(tensor.detach().contiguous().numpy().tobytes())
    return bits.hexdigest()


def trained(config, out, resume=False, spoil=None, at=0, place="step"):
    """Trains on this rank.

    Args:
        config: the settings, or a list of those of each rank.
        out, resume: as in `train`.
        spoil: called with the rank in the call number `at` of `place`.
        place: "step", "validate" or "save" on all ranks, or "work", where the others wait for rank 0.
    """
    if isinstance(config, list):
        config = config[int(os.environ["RANK"])]
    batches, states, parameters, calls = [], [], [], []
    places = {
        "step": (loop.Trainer, "step"),
        "validate": (Measurements, "line"),
        "save": (loop.Trainer, "_save"),
        "work": (Objective, "validate"),
    }
    originals = {name: getattr(*where) for name, where in places.items()}

    def watched(name):
        def call(self, *arguments):
            calls.append(name)
            if name == "step":
                note(self, *arguments)
            if spoil is not None and name == place and calls.count(name) == at:
                spoil(int(os.environ["RANK"]))
            return originals[name](self, *arguments)

        return call

    def note(trainer, batch, sizes):
        if not batches:
            states.append(torch.get_rng_state())
        tokenizer = trainer.training.vocabulary.tokenizer
        words = [tokenizer.id_to_token(int(token)) for token in batch.tokens[:, 0]]
        documents = getattr(batch, "document_ids", batch.lengths)
        if trainer.config.documents == "cross":
            documents = batch.lengths * 0 if batch.pieces is None else batch.pieces
        batches.append(list(zip(words, documents.tolist(), strict=True)))
        parameters[:] = trainer.parameters

    for name, where in places.items():
        setattr(*where, watched(name))
    Counting.shown = 0
    try:
        outcome = train(config, out, resume=resume, display=Counting)
    finally:
        for name, where in places.items():
            setattr(*where, originals[name])
    return Seen(
        outcome.step,
        outcome.stopped_by,
        outcome.rank,
        batches,
        digest(states),
        digest(parameters),
        Counting.shown,
    )


def summed_gradients():
    """The sums of gradients of different kinds: sparse, dense, strided, none, and of another dtype."""
    with joined("cpu", 2, 60):
        rank = dist.get_rank()
        table = torch.zeros(5, 2, requires_grad=True)
        rows = [[1, 1, 1], [3, 3], [4, 3, 4]][rank]
        torch.nn.functional.embedding(torch.tensor(rows), table, sparse=True).sum().backward()
        dense, strided, none = (torch.zeros(shape, requires_grad=True) for shape in ((2, 1), (2, 2), 3))
        half = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        dense.grad = torch.tensor([[float(rank)], [10.0 + rank]])
        strided.grad = (torch.tensor([[0.0, 20.0], [10.0, 30.0]]) + rank).t()
        half.grad = torch.tensor([rank + 1.0], dtype=torch.float64)
        parameters = [table, dense, none, strided, half]
        sum_gradients(parameters)
        assert none.grad is None
        assert table.grad.is_coalesced()
        assert len(table.grad.values()) == 3
        return [table.grad.to_dense(), dense.grad, strided.grad, half.grad]


def chunked_gradients(config):
    """The loss, gradients and measured tensors of a step in float64, in chunks and with the batch at once."""
    with joined("cpu", config.batch_size, 60) as ranks:
        corpus = list(config.corpus)
        vocabulary, progress = read_corpus(config, corpus, ranks.size)
        trainer = loop.Trainer(Training(config, corpus, vocabulary, Path(), progress, ranks))
        objective = trainer.objective
        trainer.model.double()
        turn = next(iter(objective.turns(progress)))
        share = ranks.share(turn.sizes)

        answers = []
        for in_chunks in (True, False):
            trainer.optimizer.zero_grad()
            torch.manual_seed(0)
            if in_chunks:
                loss, measured = objective.backward_in_chunks(turn.batch, share)
            else:
                loss, measured = objective.loss(turn.batch, share)
                loss.backward()
            ranks.sum_gradients(trainer.parameters)
            gradients = [x.grad.to_dense().clone() for x in trainer.parameters if x.grad is not None]
            answers.append([loss.detach(), *gradients, *(each.detach() for each in measured)])
        return answers
