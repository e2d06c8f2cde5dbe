"""Training learns a planted order, each step agrees with the formulas, and wrong settings are refused."""

import io
import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from fastqt.errors import InputError
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.model import build_model
from fastqt.sentences.runs.model_settings import ENCODERS
from fastqt.sentences.runs.progress import Progress
from fastqt.sentences.text import Corpus, Vocabulary, batches, read_blocks
from fastqt.sentences.train.loop import Trainer, train
from tests.shared.tolerances import ADAM_STEPS, FELT_BY_ADAM

SMALL = {"word_dim": 12, "hidden_size": 8, "layers": 2, "heads": 3, "feedforward": 16, "dropout": 0.0}
SMALL |= {"batch_size": 48, "context_size": 1, "report_every": 10}


def metrics(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"]]  # without that of fresh weights


def test_training_learns_a_planted_order(planted, tmp_path):
    corpus, valid = planted
    config = TrainConfig(
        (corpus,), valid=valid, **SMALL | {"word_dim": 32}, learning_rate=0.02, epochs=30, valid_every=50
    )
    outcome = train(config, tmp_path / "run")
    lines = metrics(tmp_path / "run")
    first, last = lines[0], lines[-1]
    assert outcome.step == last["step"] == 300
    assert outcome.stopped_by is None
    assert outcome.metrics == last
    assert last["chance"] == 1 / 48
    assert last["loss"] < 0.5 * first["loss"]
    assert last["forward_accuracy"] + last["backward_accuracy"] > 0.8
    held_out = last["validation_forward_accuracy"] + last["validation_backward_accuracy"]
    assert held_out > 10 * 2 * last["chance"]
    assert [line["step"] for line in lines] == list(range(10, 301, 10))
    assert [line["step"] for line in lines if "validation_loss" in line] == list(range(50, 301, 50))
    assert all(line["sentences_per_second"] > 0 for line in lines)
    assert all(a["seconds"] < b["seconds"] for a, b in pairwise(lines))


@pytest.mark.parametrize("encoder", ENCODERS[:6])  # others need files
@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "documents": "cross",
            "clip_by": "variable",
            "init": "torch",
            "cell": "reset-before",
            "unknown": "drop",
        },
    ],
)
def test_two_steps_agree_with_the_formulas(planted, tmp_path, encoder, options):
    config = TrainConfig((planted[0],), encoder=encoder, **SMALL | options, vocab_size=30, clip=0.5, steps=2)
    train(config, tmp_path / "run")
    vocabulary = Vocabulary.load(tmp_path / "run" / "vocabulary.json", unknown=config.unknown)
    torch.manual_seed(config.seed)
    model = build_model(config, len(vocabulary)).double()
    weights = list(model.parameters())
    adam = torch.optim.Adam(weights, lr=5e-4)
    felt = [torch.ones_like(weight, dtype=torch.bool) for weight in weights]
    for _, batch in zip(range(2), batches([planted[0]], vocabulary, 48), strict=False):
        loss = oracle_loss(*model(batch.tokens, batch.lengths), batch.document_ids, config)
        adam.zero_grad()
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.grad = gradient.to_dense()
        for known, weight in zip(felt, weights, strict=True):
            size = weight.grad.abs()
            known &= (size > FELT_BY_ADAM * size.max()) | (size == 0)
        for group in [[w] for w in weights] if config.clip_by == "variable" else [weights]:
            norm = math.sqrt(sum(float(weight.grad.square().sum()) for weight in group))
            for weight in group:
                weight.grad *= min(1.0, config.clip / norm)
        adam.step()
    trained = build_model(config, len(vocabulary))
    load_weights(tmp_path / "run", trained)
    for (name, ours), wanted, known in zip(trained.named_parameters(), weights, felt, strict=True):
        # For instance the bias of a Transformer's keys has no effect: its gradient is rounding alone.
        assert known.double().mean() > 0.6, name
        assert ((ours.double() - wanted).abs()[known] < ADAM_STEPS).all(), name


@pytest.mark.parametrize("clip_by", ["global", "variable"])
@pytest.mark.parametrize("clip", [1e-4, 0.0])
def test_the_gradient_is_clipped(planted, tmp_path, clip_by, clip):
    config = TrainConfig((planted[0],), **SMALL, encoder="gru", clip=clip, clip_by=clip_by)
    with open(planted[0]) as file:
        vocabulary = Vocabulary.build(file)
    trainer = Trainer(config, [planted[0]], vocabulary, tmp_path, Progress())
    norms = []

    def measure(*_):
        norms[:] = [float(weight.grad.to_dense().norm()) for weight in trainer.parameters]

    trainer.optimizer.register_step_pre_hook(measure)
    trainer.step(next(batches([planted[0]], vocabulary, 48)))
    if not clip:
        assert math.hypot(*norms) > 0.01
    elif clip_by == "global":
        assert math.hypot(*norms) == pytest.approx(clip, rel=1e-3)
        assert max(norms) < 0.99 * clip
    else:
        assert norms == pytest.approx([clip] * len(norms), rel=0.02)


def load_weights(run, model):
    model.load_state_dict(SentenceEncoder.load(run).model.state_dict())


def oracle_loss(queries, candidates, documents, config):
    N = len(queries)
    near = torch.zeros(N, N, dtype=torch.float64)
    for i in range(N):
        for j in (i - 1, i + 1):
            if 0 <= j < N and (config.documents == "cross" or documents[i] == documents[j]):
                near[i, j] = 1
    targets = near / near.sum(1, keepdim=True)
    scores = (queries @ candidates.T) * (1 - torch.eye(N, dtype=torch.float64))
    return F.kl_div(F.log_softmax(scores, dim=1), targets, reduction="batchmean")


def test_standard_input_is_kept_for_later_epochs(planted, tmp_path, monkeypatch):
    text = Path(planted[0]).read_bytes()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
    config = TrainConfig(("-",), **SMALL, epochs=2, keep_checkpoint=True)
    train(config, tmp_path / "piped")
    train(replace(config, corpus=(planted[0],)), tmp_path / "named")
    assert (tmp_path / "piped" / "corpus.txt").read_bytes() == text
    model = (tmp_path / "named" / "model.safetensors").read_bytes()
    assert (tmp_path / "piped" / "model.safetensors").read_bytes() == model
    # Resuming does not read standard input again, which is at its end now.
    train(replace(config, epochs=3), tmp_path / "piped", resume=True)
    assert metrics(tmp_path / "piped")[-1]["step"] == 30


def test_the_seed_determines_the_weights(planted, tmp_path):
    weights = []
    for run, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(TrainConfig((planted[0],), **SMALL, seed=seed, steps=3), tmp_path / run)
        weights.append((tmp_path / run / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_a_short_last_batch_is_used_if_the_window_fits_into_it(planted, tmp_path):
    sentences = sum(len(block.sentences) for block in read_blocks([planted[0]]))
    for rest, context_size, steps in ((3, 2, 2), (3, 3, 1)):
        size = sentences - rest
        config = TrainConfig((planted[0],), **SMALL | {"batch_size": size, "context_size": context_size})
        assert train(config, tmp_path / str(steps)).step == steps


def test_the_defaults_are_those_of_the_papers():
    bow, gru = TrainConfig(("x",)), TrainConfig(("x",), encoder="gru")
    assert (bow.batch_size, bow.context_size, bow.word_dim) == (1500, 3, 300)
    assert (gru.batch_size, gru.context_size, gru.hidden_size) == (400, 1, 1000)
    assert (bow.vocab_size, bow.max_length, bow.learning_rate, bow.clip) == (50_000, 50, 5e-4, 5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"encoder": "cnn"},
            "encoder: want one of bow, gru, .*, combine, got 'cnn'",
        ),
        ({"batch_size": -1}, "batch_size: want at least 2, got -1"),
        ({"learning_rate": math.nan}, "learning_rate: want at least 0, got nan"),
        ({"context_size": 9, "batch_size": 9}, "context_size: want less than batch_size 9, got 9"),
        ({"encoder": "bigru", "hidden_size": 7}, "hidden_size: want an even number for bigru, got 7"),
        ({"steps": 0}, "steps: want at least 1, got 0"),
        ({"corpus": ()}, "corpus: want at least one file, got none"),
    ],
)
def test_settings_outside_their_range_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        TrainConfig(**{"corpus": ("x",)} | settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_missing_device_is_refused(planted, tmp_path):
    with pytest.raises(InputError, match="device: want cuda, but torch sees no CUDA device"):
        train(TrainConfig((planted[0],), **SMALL, device="cuda"), tmp_path / "run")


@pytest.mark.parametrize("every", [{"report_every": 2}, {"checkpoint_every": 2}])
def test_a_loss_that_is_not_finite_ends_the_training(planted, tmp_path, every):
    config = TrainConfig((planted[0],), **SMALL | every, learning_rate=1e30)
    with pytest.raises(
        InputError, match=r"the loss is (nan|inf) at step \d+: start again with a lower learning_rate"
    ):
        train(config, tmp_path / "run")


def test_an_unusable_corpus_leaves_no_run(planted, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(InputError, match="shorter than a batch: 480 sentences"):
        train(TrainConfig((planted[0],), batch_size=500), run)
    with pytest.raises(InputError, match="shorter than a batch: 120 sentences"):
        train(TrainConfig((planted[0],), valid=planted[1], batch_size=200), run)
    with pytest.raises(InputError, match=r"cannot read absent\.txt: No such file"):
        train(TrainConfig((planted[0], "absent.txt")), run / "deeper")
    assert not run.exists()
    run.mkdir()
    with pytest.raises(InputError, match="no such file: absent"):
        train(TrainConfig((planted[0],), valid="absent", **SMALL), run)
    assert list(run.iterdir()) == []  # what was there before stays
    assert train(TrainConfig((planted[0],), **SMALL), run).step == 10


def test_a_directory_that_holds_a_run_is_not_changed(planted, tmp_path):
    config = TrainConfig((planted[0],), **SMALL, steps=2)
    train(config, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InputError, match="already holds a run: resume it, or choose another directory"):
        train(config, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_directory_that_cannot_be_created_is_refused(planted, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write to .*file/run: Not a directory"):
        train(TrainConfig((planted[0],), **SMALL), tmp_path / "file" / "run")


@pytest.mark.parametrize("model", ["simcse", "mixcse"])
def test_training_brings_two_views_of_a_sentence_together(planted, tmp_path, model):
    corpus, valid = planted
    config = TrainConfig(
        (corpus,),
        valid=valid,
        model=model,
        encoder="transformer",
        **SMALL | {"word_dim": 24, "dropout": 0.3},
        learning_rate=0.01,
        epochs=8,
        valid_every=40,
    )
    outcome = train(config, tmp_path / "run")
    first, last = (metrics(tmp_path / "run")[index] for index in (0, -1))
    assert outcome.step == 80
    assert last["loss"] < 0.7 * first["loss"]
    assert last["positive_cosine"] - last["negative_cosine"] > 0.5
    assert last["negative_cosine"] < last["mixed_cosine"] < last["positive_cosine"]
    assert last["alignment"] == pytest.approx(2 - 2 * last["positive_cosine"], rel=1e-6)
    assert last["validation_uniformity"] < -1
    # A loaded model encodes without dropout.
    encoder = SentenceEncoder.load(tmp_path / "run")
    assert encoder.model.embedding_dim == 24
    text = ["topic0word1 topic0word2", "topic3word1"]
    assert (encoder.encode(text) == encoder.encode(text)).all()


def test_a_step_of_mixcse_agrees_with_its_formula(planted, tmp_path):
    config = TrainConfig(
        (planted[0],), model="mixcse", encoder="gru", **SMALL | {"context_size": 1}, clip=0, steps=1
    )
    train(config, tmp_path / "run")
    vocabulary = Vocabulary.load(tmp_path / "run" / "vocabulary.json", unknown=config.unknown)
    torch.manual_seed(config.seed)
    model = build_model(config, len(vocabulary))
    corpus = Corpus([planted[0]], vocabulary)
    sample = corpus.sample(corpus.order(seed=0, epoch=0)[:48])
    z1, z2 = (F.normalize(z.double(), dim=1) for z in model(sample.tokens, sample.lengths))
    mixed = F.normalize(0.2 * z2 + 0.8 * z2.roll(-1, 0), dim=1).detach()
    scores = torch.cat([z1 @ z2.T, (z1 * mixed).sum(1, keepdim=True)], dim=1) / 0.05
    loss = F.cross_entropy(scores, torch.arange(48))
    assert metrics(tmp_path / "run")[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_the_model_that_ranks_the_development_pairs_best_is_kept(planted, tmp_path):
    pairs = tmp_path / "dev.tsv"
    lines = [
        f"planted\t{5 if a == b else 0}\ttopic{a}word0 topic{a}word1\ttopic{b}word2"
        for a in range(12)
        for b in range(12)
    ]
    pairs.write_text("\n".join(lines) + "\n")
    config = TrainConfig(
        (planted[0],), dev=str(pairs), model="simcse", **SMALL | {"dropout": 0.2}, valid_every=1
    )
    # With this learning rate the model becomes worse again before the end.
    config = replace(config, learning_rate=0.3, epochs=2, report_every=1, keep_checkpoint=True)
    train(config, tmp_path / "run")
    scores = [line["dev_spearman"] for line in metrics(tmp_path / "run")]
    best = scores.index(max(scores)) + 1
    assert len(scores) == 20
    assert best < 20
    train(replace(config, steps=best, dev=None), tmp_path / "best")
    kept, wanted = (SentenceEncoder.load(tmp_path / run) for run in ("run", "best"))
    assert all(
        torch.equal(a, b) for a, b in zip(kept.model.parameters(), wanted.model.parameters(), strict=True)
    )
    # A resumed training remembers the best score of the time before.
    train(replace(config, steps=best), tmp_path / "parts")
    train(config, tmp_path / "parts", resume=True)
    one, other = ((tmp_path / run / "model.safetensors").read_bytes() for run in ("run", "parts"))
    assert one == other
