"""Skip-thoughts against a loop over sentences and words with torch's GRU cell, in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastqt.nn import SkipThoughts
from tests.shared.tolerances import FLOAT64, relative

V, W, H = 23, 5, 6
LENGTHS = torch.tensor([3, 1, 5, 0, 2, 5])


def model() -> SkipThoughts:
    torch.manual_seed(0)
    return SkipThoughts(V, W, H).double()


def batch() -> tuple[Tensor, Tensor]:
    return torch.randint(V, (len(LENGTHS), 5), generator=torch.Generator().manual_seed(1)), LENGTHS


def step(layer, word: Tensor, state: Tensor) -> Tensor:
    """One step of torch's GRU cell with the weights of `layer`."""
    weights = (getattr(layer, f"{name}_l0") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    return torch.gru_cell(word[None], state[None], *weights)[0]


def loss_by_definition(thoughts: SkipThoughts, sentences: list[list[int]]) -> Tensor:
    table, total, count = thoughts.encoder.embedding.weight, 0.0, 0
    for i, sentence in enumerate(sentences):
        vector = table.new_zeros(H)
        for word in sentence:
            vector = step(thoughts.encoder.recurrent, table[word], vector)
        for decoder, j in ((thoughts.previous, i - 1), (thoughts.next, i + 1)):
            if not 0 <= j < len(sentences):
                continue
            state, last = vector, table.new_zeros(W)
            for word in sentences[j]:
                state = step(decoder.recurrent, last, state)
                total = total + F.cross_entropy(decoder.output @ state, torch.tensor(word))
                count += 1
                last = table[word]
    return total / count


def test_loss_and_gradients_equal_a_loop_over_words():
    thoughts = model()
    tokens, lengths = batch()
    sentences = [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    loss, wanted = thoughts.loss(tokens, lengths), loss_by_definition(thoughts, sentences)
    assert relative(loss, wanted) <= FLOAT64
    names, parameters = zip(*thoughts.named_parameters(), strict=True)
    for name, got, want in zip(
        names, *(torch.autograd.grad(x, parameters) for x in (loss, wanted)), strict=True
    ):
        assert relative(got, want) <= FLOAT64, name


def test_padding_does_not_change_the_loss():
    thoughts = model()
    tokens, lengths = batch()
    junk = torch.where(torch.arange(5) < lengths.unsqueeze(1), tokens, -1)
    wide = torch.cat([junk, torch.full((len(tokens), 4), V + 99)], dim=1)
    wanted = thoughts.loss(tokens, lengths)
    assert torch.equal(thoughts.loss(junk, lengths), wanted)
    assert torch.equal(thoughts.loss(wide, lengths), wanted)
    assert torch.equal(thoughts(wide, lengths), thoughts.encoder(tokens, lengths))


def test_batch_without_a_word_to_predict_raises():
    tokens, lengths = batch()
    for rows in (1, 0):
        with pytest.raises(ValueError, match="lengths: want at least two sentences, with words"):
            model().loss(tokens[:rows], lengths[:rows])
    with pytest.raises(ValueError, match="got no word to predict"):
        model().loss(tokens, torch.zeros_like(lengths))
    # Only one of the two decoders has words here.
    assert model().loss(tokens[2:4], lengths[2:4]).isfinite()


def test_the_loss_of_documents_is_that_of_each_alone():
    thoughts = model()
    tokens, lengths = batch()
    documents = torch.tensor([4, 4, 4, 1, 1, 9])
    parts = [thoughts.summed_loss(tokens[rows], lengths[rows]) for rows in (slice(0, 3), slice(3, 5))]
    wanted = sum(loss for loss, _ in parts) / sum(words for _, words in parts)
    assert relative(thoughts.loss(tokens, lengths, documents), wanted) <= FLOAT64
    with pytest.raises(ValueError, match="got no word to predict"):
        thoughts.loss(tokens, lengths, torch.arange(6))


@pytest.mark.parametrize("wrong", [torch.zeros(5, dtype=torch.int64), torch.zeros(6)])
def test_document_ids_of_another_kind_are_refused(wrong):
    with pytest.raises(ValueError, match=r"document_ids: want \(6,\) int64, got \("):
        model().loss(*batch(), wrong)
