"""The objective of skip-thoughts against its definition in numpy's float64, and its trainings."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.progress import Progress
from fastqt.sentences.text import Batch, Vocabulary
from fastqt.sentences.train.context import SkipThoughtsObjective
from fastqt.sentences.train.objectives import Training
from tests.shared.tolerances import FLOAT64
from tests.shared.trainings import trainer_of

SMALL = {"model": "skip-thoughts", "word_dim": 4, "hidden_size": 6, "batch_size": 9, "device": "cpu"}
WORDS = [f"w{number}" for number in range(12)]
LENGTHS = [3, 1, 4, 2, 0, 2, 1, 3]
DOCUMENTS = [5, 5, 5, 6, 7, 7, 7, 7]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gru(weights, prefix, words, state, suffix=""):
    """The states after each word: r and z with their biases, and r inside of the candidate."""
    W, U, b = (weights[f"{prefix}.{name}_l0{suffix}"] for name in ("weight_ih", "weight_hh", "bias_ih"))
    c = weights.get(f"{prefix}.bias_hh_l0{suffix}", np.zeros_like(b))
    H, states = U.shape[1], []
    for x in words:
        a, d = W @ x + b, U @ state + c
        r, z = sigmoid(a[:H] + d[:H]), sigmoid(a[H : 2 * H] + d[H : 2 * H])
        n = np.tanh(a[2 * H :] + r * d[2 * H :])
        state = (1 - z) * n + z * state
        states.append(state)
    return states


def loss_by_definition(weights, sentences, documents):
    """The summed cross-entropy of all words of all neighbours, and their number."""
    table, total, count = weights["encoder.embedding.weight"], 0.0, 0
    directions = ("", "_reverse") if "encoder.recurrent.weight_ih_l0_reverse" in weights else ("",)
    width = weights["encoder.recurrent.weight_hh_l0"].shape[1]
    for i, sentence in enumerate(sentences):
        parts = []
        for suffix in directions:
            words = [table[word] for word in (sentence[::-1] if suffix else sentence)]
            start = np.zeros(width)
            parts.append([start, *gru(weights, "encoder.recurrent", words, start, suffix)][-1])
        vector = np.concatenate(parts)
        for name, j in (("previous", i - 1), ("next", i + 1)):
            if not 0 <= j < len(sentences) or documents[i] != documents[j]:
                continue
            read = [np.zeros(table.shape[1]), *(table[word] for word in sentences[j])][: len(sentences[j])]
            states = gru(weights, f"{name}.recurrent", read, vector)
            for state, word in zip(states, sentences[j], strict=True):
                scores = weights[f"{name}.output"] @ state
                total += np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[word]
                count += 1
    return total, count


def objective_of(planted, **options):
    config = TrainConfig((planted[0],), **SMALL | options)
    vocabulary = Vocabulary.build([" ".join(WORDS)])
    objective = SkipThoughtsObjective(Training(config, [planted[0]], vocabulary, Path(), Progress()))
    objective.model.double()
    return objective


def batch_of(documents=DOCUMENTS, pieces=None):
    tokens = torch.randint(12, (8, 4), generator=torch.Generator().manual_seed(1))
    pieces = None if pieces is None else torch.tensor(pieces)
    return Batch(tokens, torch.tensor(LENGTHS), torch.tensor(documents), pieces)


@pytest.mark.parametrize("encoder", ["gru", "bigru"])
@pytest.mark.parametrize(
    ("settings", "pieces", "apart"),
    [
        ({"documents": "cut"}, None, DOCUMENTS),
        ({"documents": "cross"}, None, [0] * 8),
        ({"documents": "cross"}, [0] * 5 + [1] * 3, [0] * 5 + [1] * 3),
    ],
    ids=["cut", "cross", "spans"],
)
def test_loss_and_gradients_of_a_batch_agree_with_the_definition(planted, encoder, settings, pieces, apart):
    objective, batch = objective_of(planted, encoder=encoder, **settings), batch_of(pieces=pieces)
    loss, measured = objective.loss(batch)
    loss.backward()
    weights = {name: p.detach().numpy().copy() for name, p in objective.model.named_parameters()}
    sentences = [row[:n] for row, n in zip(batch.tokens.tolist(), LENGTHS, strict=True)]
    total, count = loss_by_definition(weights, sentences, apart)
    assert loss.item() == pytest.approx(total / count, rel=FLOAT64)
    assert objective.measure(measured) == {"loss_per_word": pytest.approx(total / count, rel=1e-6)}
    # The derivative of the definition along a direction in the space of each parameter. Central differences
    # of a step of 1e-5 err by about its square, and by 1e-16 / 1e-5 of rounding.
    generator = np.random.default_rng(0)
    for name, parameter in objective.model.named_parameters():
        direction = generator.standard_normal(parameter.shape)
        ends = [
            loss_by_definition(weights | {name: weights[name] + step * direction}, sentences, apart)[0]
            for step in (1e-5, -1e-5)
        ]
        wanted = (ends[0] - ends[1]) / 2e-5 / count
        got = float((parameter.grad.to_dense().numpy() * direction).sum())
        assert got == pytest.approx(wanted, rel=1e-6, abs=1e-8), name


def test_a_batch_without_a_neighbour_costs_nothing_and_has_gradients_of_zeros(planted):
    objective = objective_of(planted)
    loss, measured = objective.loss(batch_of(documents=list(range(8))))
    loss.backward()
    assert loss.item() == 0
    assert objective.measure(measured) == {"loss_per_word": 0}
    for name, parameter in objective.model.named_parameters():
        assert not parameter.grad.to_dense().any(), name


def test_the_validation_weighs_batches_by_their_words(planted, tmp_path):
    held_out = tmp_path / "uneven.txt"
    held_out.write_text("place1 place2 place3\n" * 9 + "place1\n\n" * 8 + "place2\n")
    config = TrainConfig((planted[0],), valid=str(held_out), **SMALL, vocab_size=20)
    objective = trainer_of(config, tmp_path).objective
    assert len(objective.held_out) == 2
    objective.model.double()
    weights = {name: p.detach().numpy() for name, p in objective.model.named_parameters()}
    total = count = 0
    for batch in objective.held_out:
        sentences = [row[:n] for row, n in zip(batch.tokens.tolist(), batch.lengths.tolist(), strict=True)]
        summed, words = loss_by_definition(weights, sentences, batch.document_ids.tolist())
        total, count = total + summed, count + words
    wanted = pytest.approx(total / count, rel=1e-6)
    assert objective.validate() == {"validation_loss": wanted, "validation_loss_per_word": wanted}
    assert objective.model.training
