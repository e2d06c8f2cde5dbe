"""Training learns a planted order, each step agrees with the formulas, and wrong settings are refused."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fastqt.errors import InputError
from fastqt.sentences.cli import main
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.options.encoders import ENCODERS
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.model import build_model
from fastqt.sentences.text import Vocabulary, batches, read_blocks
from fastqt.sentences.train import train
from tests.shared.tolerances import ADAM_STEPS, FELT_BY_ADAM, FLOAT32, relative
from tests.shared.trainings import metrics, trainer_of
from tests.shared.word_vectors import write_vectors

SMALL = {"word_dim": 12, "hidden_size": 8, "layers": 2, "heads": 3, "feedforward": 16, "dropout": 0.0}
SMALL |= {"batch_size": 48, "context_size": 1, "report_every": 10}
OTHERS = {"documents": "cross", "clip_by": "variable", "init": "torch", "cell": "reset-before"}
OTHERS |= {"unknown": "drop"}


def test_training_learns_a_planted_order(planted, tmp_path):
    corpus, valid = planted
    settings = SMALL | {"word_dim": 32, "learning_rate": 0.02, "epochs": 30, "valid_every": 50}
    config = TrainConfig((corpus,), valid=valid, **settings)
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


@pytest.mark.parametrize("encoder", [x.name for x in ENCODERS.values() if not (x.needs or x.parts)])
@pytest.mark.parametrize("options", [{}, OTHERS], ids=["defaults", "others"])
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
    trained.load_state_dict(SentenceEncoder.load(tmp_path / "run").model.state_dict())
    for (name, ours), wanted, known in zip(trained.named_parameters(), weights, felt, strict=True):
        # For instance the bias of a Transformer's keys has no effect: its gradient is rounding alone.
        assert known.double().mean() > 0.6, name
        assert ((ours.double() - wanted).abs()[known] < ADAM_STEPS).all(), name


@pytest.mark.parametrize("clip_by", ["global", "variable"])
@pytest.mark.parametrize("clip", [1e-4, 0.0])
def test_the_gradient_is_clipped(planted, tmp_path, clip_by, clip):
    config = TrainConfig((planted[0],), **SMALL, encoder="gru", clip=clip, clip_by=clip_by)
    trainer = trainer_of(config, tmp_path)
    norms = []

    def measure(*_):
        norms[:] = [float(weight.grad.to_dense().norm()) for weight in trainer.parameters]

    trainer.optimizer.register_step_pre_hook(measure)
    trainer.step(next(batches([planted[0]], trainer.training.vocabulary, 48)))
    if not clip:
        assert math.hypot(*norms) > 0.01
    elif clip_by == "global":
        assert math.hypot(*norms) == pytest.approx(clip, rel=1e-3)
        assert max(norms) < 0.99 * clip
    else:
        assert norms == pytest.approx([clip] * len(norms), rel=0.02)


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


def test_a_short_last_batch_is_used_if_the_window_fits_into_it(planted, tmp_path):
    sentences = sum(len(block.sentences) for block in read_blocks([planted[0]]))
    for rest, context_size, steps in ((3, 2, 2), (3, 3, 1)):
        size = sentences - rest
        config = TrainConfig((planted[0],), **SMALL | {"batch_size": size, "context_size": context_size})
        assert train(config, tmp_path / str(steps)).step == steps


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_missing_device_is_refused(planted, tmp_path):
    with pytest.raises(InputError, match="device: want cuda, but torch sees no CUDA device"):
        train(TrainConfig((planted[0],), **SMALL, device="cuda"), tmp_path / "run")


@pytest.mark.parametrize("every", [{"report_every": 2}, {"checkpoint_every": 2}])
def test_a_loss_that_is_not_finite_ends_the_training(planted, tmp_path, every):
    config = TrainConfig((planted[0],), **SMALL | every, learning_rate=1e30)
    message = r"the loss is (nan|inf) at step \d+: start again with a lower learning_rate"
    with pytest.raises(InputError, match=message):
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
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write to .*file/run: Not a directory"):
        train(TrainConfig((planted[0],), **SMALL), tmp_path / "file" / "run")
    assert train(TrainConfig((planted[0],), **SMALL), run).step == 10


@pytest.mark.parametrize("model", ["simcse", "mixcse"])
def test_training_brings_two_views_of_a_sentence_together(planted, tmp_path, model):
    corpus, valid = planted
    settings = SMALL | {"word_dim": 24, "dropout": 0.3, "learning_rate": 0.01, "epochs": 8, "valid_every": 40}
    config = TrainConfig((corpus,), valid=valid, model=model, encoder="transformer", **settings)
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


def combined(planted, folder, encoder, **settings):
    """A run of four steps with large gradients, so that clipping matters."""
    large = {"steps": 4, "learning_rate": 0.05, "valid": planted[1], "report_every": 1}
    train(TrainConfig((planted[0],), encoder=encoder, **SMALL | large | settings), folder / encoder)
    return folder / encoder


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "settings",
    [{"clip": 1e-3}, {"clip": 1e-3, "clip_by": "variable", "documents": "cross"}, {"clip": 0.0, "seed": 5}],
    ids=str,
)
def test_each_model_of_a_combined_one_is_that_which_is_trained_alone(planted, tmp_path, settings):
    runs = {name: combined(planted, tmp_path, name, **settings) for name in ("combine", "gru", "bigru")}
    models = {name: SentenceEncoder.load(run).model for name, run in runs.items()}
    for part, name in zip(models["combine"].models, ("gru", "bigru"), strict=True):
        alone = models[name].state_dict()
        assert part.state_dict().keys() == alone.keys()
        for key, weight in part.state_dict().items():
            assert torch.equal(weight, alone[key]), (name, key)
    lines = [metrics(run) for run in runs.values()]
    for joined, uni, bi in zip(*lines, strict=True):
        assert joined["loss"] == pytest.approx(uni["loss"] + bi["loss"], rel=1e-6)
        for way in ("forward_accuracy", "backward_accuracy"):
            assert (joined[f"gru_{way}"], joined[f"bigru_{way}"]) == (uni[way], bi[way])
    last = [each[-1] for each in lines]
    assert last[0]["validation_bigru_forward_accuracy"] == last[2]["validation_forward_accuracy"]


def test_vectors_of_a_combined_model_are_joined_by_halves_of_norm_one(planted, tmp_path):
    runs = [combined(planted, tmp_path, name) for name in ("combine", "gru", "bigru")]
    joined, *alone = (SentenceEncoder.load(run) for run in runs)
    texts = ["place1 topic2word1 topic2word0", "place0 unheard", "topic5word2"]
    raw = [encoder.encode(texts, normalize=False).astype(np.float64) for encoder in alone]
    halves = [half for each in raw for half in np.split(each, 2, axis=1)]
    wanted = np.hstack([half / np.sqrt((half**2).sum(axis=1, keepdims=True)) for half in halves])
    found = joined.encode(texts)
    assert found.shape == (3, 4 * 8) == (3, joined.model.embedding_dim)
    assert relative(torch.from_numpy(found), wanted) <= FLOAT32  # the whole is not normalised again
    assert np.array_equal(joined.encode(texts, normalize=False), np.hstack(raw).astype(np.float32))

    # One of the commands that take it.
    words = [f"topic{topic}word{word}" for topic in range(30) for word in range(3)] + ["zebra"]
    path = write_vectors(tmp_path / "v.txt", words, np.random.default_rng(0).normal(size=(91, 3)))
    assert main(["expand", str(runs[0]), str(path), "--out", str(tmp_path / "more")]) == 0
    after = SentenceEncoder.load(tmp_path / "more")
    assert np.array_equal(found, after.encode(texts))
    assert np.abs(after.encode(["zebra"]) - joined.encode(["zebra"])).max() > 1e-3


def test_the_joined_accuracy_is_that_of_the_sum_of_scores(planted, tmp_path):
    run = combined(planted, tmp_path, "combine", steps=1, learning_rate=0.0, valid=None)
    (line,) = metrics(run)
    encoder = SentenceEncoder.load(run)
    with open(planted[0]) as file:
        sentences = [line.strip() for line in file if line.strip()][:48]
    vectors = encoder.encode(sentences, normalize=False).astype(np.float64)
    f_uni, g_uni, f_bi, g_bi = np.split(vectors, 4, axis=1)
    scores = f_uni @ g_uni.T + f_bi @ g_bi.T
    np.fill_diagonal(scores, 0)
    best = scores.argmax(axis=1)
    assert line["forward_accuracy"] == pytest.approx(np.mean(best[:-1] == np.arange(1, 48)))
    assert line["backward_accuracy"] == pytest.approx(np.mean(best[1:] == np.arange(47)))
