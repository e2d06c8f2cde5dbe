"""A step on pairs equals the formulas in numpy, and a training learns to rank pairs that were held out."""

import json
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

from fastqt.errors import InputError
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.model import build_model
from fastqt.sentences.text import Prompts, Vocabulary
from fastqt.sentences.train import train
from fastqt.sentences.train.loop import Trainer
from fastqt.sentences.train.preparation import read_corpus
from tests.sentences.train.test_chunk import assert_equal
from tests.sentences.train.test_resume import Signalling, assert_same_run
from tests.shared.pairs_of_texts import columns_of, write_rows, write_teacher
from tests.shared.ranking_oracle import ranking
from tests.shared.trained_on_ranks import chunked_gradients

SMALL = {"model": "pairs", "word_dim": 12, "batch_size": 50, "report_every": 1, "clip": 0.0}
ALL = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
OF_RANKING = ("partition_mode", "hardness_mode", "hardness_strength", "false_negative_margin")


def metrics(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"]]  # without that of fresh weights


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def log_softmax(scores):
    scores = scores - scores.max(axis=1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


def ranking_loss(z, config, scale):
    """Multiple negatives ranking of all prefixes that the settings name."""
    dims = config.matryoshka_dims or (z[0].shape[1],)
    weights = config.matryoshka_weights or (1.0,) * len(dims)
    options = {name: getattr(config, name) for name in OF_RANKING}
    options["false_negative_margin_strategy"] = config.margin_strategy
    losses = [
        ranking(
            z[0][:, :dim],
            [each[:, :dim] for each in z[1:]],
            scale=scale,
            normalize=True,
            directions=config.directions or ALL[:1],
            weights=np.ones(len(z[0])),
            **options,
        ).loss.mean()
        for dim in dims
    ]
    return np.dot(weights, losses)


def distilled(z, teacher, scale, teacher_scale):
    """The divergence of the softmaxes over all documents from those of the teacher."""
    (q, *d), (t, *e) = (list(map(unit, each)) for each in (z, teacher))
    log_P = log_softmax(scale * q @ np.concatenate(d).T)
    log_T = log_softmax(teacher_scale * t @ np.concatenate(e).T)
    return (np.exp(log_T) * (log_T - log_P)).sum(axis=1).mean()


def guided(z, teacher, scale, margin, directions):
    """GISTEmbed: the cells that the teacher finds above a pair's own cosine less the margin are left out."""
    (q, p, *more), (t, u, *others) = (list(map(unit, each)) for each in (z, teacher))
    blocks = [(q, p, t, u), *((q, x, t, y) for x, y in zip(more, others, strict=True))]
    blocks += [(q, q, t, t)] if "query_to_query" in directions else []
    blocks += [(p, p, u, u)] if "doc_to_doc" in directions else []
    most = (t * u).sum(axis=1)[:, None] - margin
    scores = [np.where(c @ d.T > most, -np.inf, scale * a @ b.T) for a, b, c, d in blocks]
    own = scale * (q * p).sum(axis=1)
    np.fill_diagonal(scores[0], own)
    return (np.log(np.exp(np.concatenate(scores, axis=1)).sum(axis=1)) - own).mean()


@pytest.mark.parametrize(
    ("columns", "settings"),
    [
        (2, {}),
        (4, {"scale": 7.0, "query_prompt": "query: ", "document_prompt": "a passage: "}),
        (3, {"directions": ALL}),
        (2, {"directions": (ALL[0], ALL[2]), "partition_mode": "per_direction"}),
        (3, {"matryoshka_dims": (4, 12), "matryoshka_weights": (0.5, 2.0)}),
        (3, {"false_negative_margin": -0.1}),
        (3, {"false_negative_margin": 0.5, "margin_strategy": "relative", "directions": ALL[:2]}),
        (4, {"hardness_mode": "hard_negatives", "hardness_strength": 5.0}),
        (3, {"teacher_weight": 0.5, "teacher_scale": 9.0}),
        (3, {"loss": "gist", "guide_margin": 0.2}),
        (2, {"loss": "gist", "directions": ALL[:2], "teacher_weight": 2.0}),
        (4, {"loss": "distillation", "teacher_scale": 5.0}),
    ],
    ids=str,
)
def test_a_step_agrees_with_the_formulas(tmp_path, columns, settings):
    rows = write_rows(tmp_path / "rows.txt", 50, columns)
    taught = "loss" in settings or "teacher_weight" in settings
    paths, teacher = write_teacher(tmp_path, 50, columns)
    config = TrainConfig((rows,), **SMALL, **settings, teacher=paths if taught else None, steps=1)
    train(config, tmp_path / "run")
    vocabulary = Vocabulary.load(tmp_path / "run" / "vocabulary.json")
    torch.manual_seed(config.seed)
    fresh = build_model(config, len(vocabulary)).double().eval()
    encode = SentenceEncoder(fresh, vocabulary, torch.device("cpu")).encode

    order = np.random.default_rng([0, 0]).permutation(50)
    prompts = [config.query_prompt, *[config.document_prompt] * (columns - 1)]
    texts = zip(prompts, columns_of(rows), strict=True)
    z = [encode([prompt + text for text in column]).astype(np.float64)[order] for prompt, column in texts]
    of_teacher = teacher.astype(np.float64)[:, order]

    weight = {"gist": 0.0, "distillation": 1.0}.get(config.loss, 1.0)
    weight = weight if config.teacher_weight is None else config.teacher_weight
    loss = 0.0
    if config.loss == "ranking":
        loss = ranking_loss(z, config, config.scale)
    elif config.loss == "gist":
        directions = config.directions or ALL
        loss = guided(z, of_teacher, config.scale, config.guide_margin, directions)
    if taught:
        loss += weight * distilled(z, of_teacher, config.scale, config.teacher_scale)

    line = metrics(tmp_path / "run")[0]
    assert line["loss"] == pytest.approx(loss, rel=1e-5)
    cosines = z[0] @ np.concatenate(z[1:]).T
    assert line["positive_cosine"] == pytest.approx(cosines.diagonal().mean(), rel=1e-4, abs=1e-6)
    assert ("hard_negative_cosine" in line) == (columns > 2)


def test_a_training_ranks_held_out_pairs(tmp_path):
    rows = write_rows(tmp_path / "rows.tsv", 400)
    held = write_rows(tmp_path / "held.tsv", 25, seed=1)
    config = TrainConfig((rows,), valid=held, **SMALL | {"batch_size": 25}, learning_rate=0.02, epochs=3)
    train(config, tmp_path / "run")
    fresh, *_, last = (json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert fresh["validation_accuracy"] < 0.2
    assert last["validation_accuracy"] > 0.8
    assert last["validation_chance"] == 1 / 25
    assert last["validation_loss"] < 0.5 * fresh["validation_loss"]

    encode = SentenceEncoder.load(tmp_path / "run").encode
    q, d = (encode(texts).astype(np.float64) for texts in columns_of(held))
    order = np.argsort(-(q @ d.T), axis=1)
    ranks = 1 + (order == np.arange(25)[:, None]).argmax(axis=1)
    assert last["validation_mrr"] == pytest.approx((1 / ranks).mean(), abs=0.01)
    assert last["validation_accuracy"] == pytest.approx((ranks == 1).mean(), abs=0.041)


class Early(Signalling):
    AT = 4


def test_a_resumed_training_has_the_bits_of_a_whole_one(tmp_path):
    rows = write_rows(tmp_path / "rows.tsv", 200, 3)
    paths, _ = write_teacher(tmp_path, 200, 3)
    settings = {"learn_scale": True, "schedule": "cosine", "warmup": 3.0, "epochs": 2, "valid": rows}
    settings |= {"encoder": "transformer", "layers": 1, "heads": 2, "feedforward": 8, "teacher": paths}
    config = TrainConfig((rows,), **SMALL, **settings, keep_checkpoint=True)
    train(config, tmp_path / "whole")
    assert train(config, tmp_path / "parts", display=Early).stopped_by == signal.SIGTERM
    train(config, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")

    with pytest.raises(InputError, match="cannot resume: teacher is None, but the run was started with"):
        train(replace(config, teacher=None), tmp_path / "parts", resume=True)
    np.save(paths[1], np.load(paths[1])[::-1])
    with pytest.raises(InputError, match=r"teacher1.npy has other contents than when the run started"):
        train(config, tmp_path / "parts", resume=True)


@pytest.mark.parametrize("loss", ["ranking", "gist"])
def test_gradients_in_chunks_are_those_of_the_whole_batch(tmp_path, loss):
    rows = write_rows(tmp_path / "rows.tsv", 60, 3)
    paths, _ = write_teacher(tmp_path, 60, 3)
    config = TrainConfig((rows,), **SMALL, loss=loss, teacher=paths, teacher_weight=0.5, chunk=7)
    assert_equal(*chunked_gradients(config))


def test_the_teacher_is_not_rounded_to_16_bits(tmp_path):
    """Embeddings of an autocast may be of 16 bits, in which this teacher's vectors are equal."""
    rows = write_rows(tmp_path / "rows.tsv", 50)
    paths, teacher = write_teacher(tmp_path, 50, 2)
    for path, vectors in zip(paths, teacher, strict=True):
        np.save(path, 1 + 0.0019 * (vectors > 0).astype(np.float32))
    config = TrainConfig((rows,), **SMALL, loss="distillation", teacher=paths, teacher_scale=1e8)
    vocabulary, progress = read_corpus(config, [rows], 1)
    objective = Trainer(config, [rows], vocabulary, tmp_path, progress).objective
    (turn,) = objective.turns(progress)
    embeddings = torch.randn(100, 12, generator=torch.Generator().manual_seed(0)).bfloat16()
    short, long = (objective.loss_of([x], turn.batch, None)[0] for x in (embeddings, embeddings.float()))
    assert short == pytest.approx(long.item(), rel=1e-5)
    assert long > 1


def test_prompts_stand_in_front_of_texts_of_their_side(tmp_path):
    rows = write_rows(tmp_path / "rows.tsv", 50)
    config = TrainConfig((rows,), **SMALL, query_prompt="query: ", document_prompt="passage: ", steps=1)
    train(config, tmp_path / "run")
    encoder = SentenceEncoder.load(tmp_path / "run")
    assert encoder.prompts == Prompts("query: ", "passage: ")
    plain = replace(encoder, prompts=Prompts())
    for side, prompt in (("query", "query: "), ("document", "passage: ")):
        assert np.array_equal(encoder.encode(["say1y1"], side=side), plain.encode([f"{prompt}say1y1"]))
    vectors = [encoder.encode(["say1y1"], side=side) for side in ("query", "document")]
    assert not np.array_equal(*vectors)


def test_files_that_a_loss_cannot_use_are_refused(tmp_path):
    rows = write_rows(tmp_path / "rows.tsv", 60, 3)
    paths, vectors = write_teacher(tmp_path, 60, 3)
    for name, text in (("ragged", "a\tb\nc\td\te\n"), ("empty", "a\tb\nc\t \n"), ("one", "a\nb\n")):
        (tmp_path / f"{name}.tsv").write_text(text)
    np.save(tmp_path / "short.npy", vectors[0][:59])
    np.save(tmp_path / "nan.npy", np.full((60, 4), np.nan))
    np.save(tmp_path / "flat.npy", vectors[0][:, 0])
    np.save(tmp_path / "wide.npy", np.zeros((60, 8)))
    names = ("short", "nan", "flat", "absent", "wide")
    short, nan, flat, absent, wide = (str(tmp_path / f"{name}.npy") for name in names)
    for corpus, settings, message in (
        ("ragged.tsv", {}, "ragged.tsv: line 2: want 2 columns as in line 1 of .*, got 3"),
        ("empty.tsv", {}, "empty.tsv: line 2: want text in each column, got none in column 2"),
        ("one.tsv", {}, "one.tsv: line 1: want an anchor, a positive and any hard negatives"),
        ("rows.parquet", {}, "corpus: want files of rows with tabs between their texts, got a table"),
        ("rows.tsv", {"batch_size": 61}, "the corpus is shorter than a batch: 60 sentences"),
        ("rows.tsv", {"teacher": paths[:2]}, "teacher: want a file for each of the 3 columns .*, got 2"),
        ("rows.tsv", {"teacher": (*paths[:2], short)}, "teacher: want a vector for each of the 60 rows"),
        ("rows.tsv", {"teacher": (*paths[:2], flat)}, "flat.npy: want 2 dimensions"),
        ("rows.tsv", {"teacher": (*paths[:2], absent)}, "cannot read .*absent.npy"),
        (
            "rows.tsv",
            {"teacher": (*paths[:2], nan)},
            "teacher: want finite numbers, .* row 1 of .*nan.npy",
        ),
        (
            "rows.tsv",
            {"teacher": (*paths[:2], wide)},
            "teacher: want vectors of width 7, got 8 in .*wide.npy",
        ),
        ("rows.tsv", {"matryoshka_dims": (4, 13)}, "matryoshka_dims: want at most D=12, .*, got 13"),
        ("rows.tsv", {"matryoshka_dims": (4, 4)}, "matryoshka_dims: want numbers in ascending order"),
        (
            "rows.tsv",
            {"matryoshka_dims": (4, 8), "matryoshka_weights": (1.0,)},
            "matryoshka_weights: want one for each of the 2 matryoshka_dims, got 1",
        ),
        ("rows.tsv", {"valid": str(tmp_path / "ragged.tsv")}, "ragged.tsv: line 1: want 3 columns, got 2"),
    ):
        with pytest.raises(InputError, match=message):
            train(TrainConfig((str(tmp_path / corpus),), **SMALL | settings), tmp_path / "run")
        assert not (tmp_path / "run" / "model.safetensors").exists()
    assert rows == str(tmp_path / "rows.tsv")
