"""Training with masked words adds their cross-entropy, and leaves vocabularies and encoders as they are."""

import json
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from fastqt.errors import InputError
from fastqt.nn import masked_words
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.expand import add_words
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.model import build_model
from fastqt.sentences.text import Corpus, Vocabulary
from fastqt.sentences.train import train
from tests.shared.rank_pool import Pool
from tests.shared.trained_on_ranks import Seen, trained

SMALL = {
    "keep_checkpoint": True,
    "model": "simcse",
    "encoder": "transformer",
    "word_dim": 12,
    "layers": 1,
    "heads": 3,
}
SMALL |= {"feedforward": 16, "dropout": 0.0, "batch_size": 48, "report_every": 1}


def metrics(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"]]  # without that of fresh weights


def mask_all(rank=None):
    """Every word becomes the mask token, so that nothing is left to chance."""
    masked_words.CHOSEN = masked_words.MASKED = 1.0


@pytest.fixture
def all_masked(monkeypatch):
    monkeypatch.setattr(masked_words, "CHOSEN", 1.0)
    monkeypatch.setattr(masked_words, "MASKED", 1.0)


@pytest.mark.parametrize("model", ["simcse", "mixcse"])
def test_a_step_adds_the_cross_entropy_of_masked_words(planted, tmp_path, all_masked, model):
    config = TrainConfig((planted[0],), **SMALL | {"model": model}, masked_words=0.3, steps=1)
    train(config, tmp_path / "run")
    line = metrics(tmp_path / "run")[0]
    vocabulary = Vocabulary.load(tmp_path / "run" / "vocabulary.json")
    torch.manual_seed(config.seed)
    built = build_model(config, len(vocabulary)).double()
    corpus = Corpus([planted[0]], vocabulary)
    sample = corpus.sample(corpus.order(seed=0, epoch=0)[:48])
    table, head = built.encoder.embedding.weight, built.head
    assert len(table) == len(vocabulary) + 1
    losses = []
    for tokens, length in zip(sample.tokens, sample.lengths, strict=True):
        masks = torch.full((1, int(length)), len(vocabulary))
        hidden = head.norm(F.gelu(head.dense(built.encoder.states(masks, length[None]))))
        losses.append(F.cross_entropy(hidden @ table.T + head.bias, tokens[:length], reduction="none"))
    words = torch.cat(losses).mean().item()
    assert line["masked_word_loss"] == pytest.approx(words, rel=1e-5)
    views = built.loss(*built(sample.tokens, sample.lengths)).item()
    assert line["loss"] == pytest.approx(views + 0.3 * words, rel=1e-5)


def test_words_are_learnt_and_a_resumed_training_has_the_bits_of_a_whole_one(planted, tmp_path):
    config = TrainConfig(
        (planted[0],),
        valid=planted[1],
        **SMALL,
        masked_words=1.0,
        learning_rate=0.01,
        epochs=12,
        valid_every=60,
    )
    train(config, tmp_path / "whole")
    lines = metrics(tmp_path / "whole")
    first, last = (lines[index]["masked_word_loss"] for index in (0, -1))
    assert last < 0.8 * first
    assert lines[-1]["validation_masked_word_loss"] < 0.8 * first
    train(replace(config, steps=17), tmp_path / "parts")
    train(config, tmp_path / "parts", resume=True)
    one, other = ((tmp_path / run / "model.safetensors").read_bytes() for run in ("whole", "parts"))
    assert one == other


def test_vectors_do_not_depend_on_the_head(planted, tmp_path):
    config = TrainConfig((planted[0],), **SMALL, masked_words=0.1, steps=2)
    train(config, tmp_path / "run")
    train(replace(config, masked_words=0.0), tmp_path / "without")
    texts = [(tmp_path / run / "vocabulary.json").read_bytes() for run in ("run", "without")]
    assert texts[0] == texts[1]
    encoder = SentenceEncoder.load(tmp_path / "run")
    sentences = ["topic0word1 topic0word2", "topic3word1 new"]
    before = encoder.encode(sentences)
    with torch.no_grad():
        for parameter in encoder.model.head.parameters():
            parameter.fill_(torch.nan)
        encoder.model.encoder.embedding.weight[-1] = torch.nan  # the mask token's vector
    assert (encoder.encode(sentences) == before).all()
    with pytest.raises(InputError, match="run: want a model that was trained without masked words"):
        add_words(tmp_path / "run", ["a"], torch.zeros(1, 2).numpy(), tmp_path / "more")


def test_ranks_predict_words_as_one_process_does(planted, tmp_path, all_masked):
    config = TrainConfig((planted[0],), **SMALL, masked_words=0.5, epochs=1)
    pool = Pool(2)
    try:
        # Before the first step of each rank all words become masked ones there too.
        answers = pool.run(2, trained, replace(config, batch_size=24), tmp_path / "two", False, mask_all, 1)
    finally:
        pool.close()
    assert all(isinstance(answer, Seen) for answer in answers), answers
    assert answers[0].parameters == answers[1].parameters
    train(config, tmp_path / "one")
    for name in ("loss", "masked_word_loss"):
        ours, theirs = ([line[name] for line in metrics(tmp_path / run)] for run in ("two", "one"))
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "quickthoughts"}, "masked_words: want 0.0 with model quickthoughts, got 0.1"),
        ({"encoder": "bow"}, "masked_words: want encoder transformer or huggingface, .* got bow"),
        ({"masked_words": -1.0}, "masked_words: want at least 0"),
    ],
)
def test_what_has_no_states_of_words_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        TrainConfig(("x",), **SMALL | {"masked_words": 0.1} | settings)
