"""A step on pairs equals the formulas in numpy, and a training learns to rank pairs that were held out."""

import itertools
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
from fastqt.sentences.text import Vocabulary
from fastqt.sentences.train import train
from fastqt.sentences.train.loop import Trainer
from fastqt.sentences.train.objectives import Training
from fastqt.sentences.train.preparation import read_corpus
from tests.shared.pair_oracle import ranking
from tests.shared.pairs_of_texts import columns_of, write_rows, write_teacher
from tests.shared.trainings import assert_same_run, metrics, on_ranks, stopping

SMALL = {"model": "pairs", "word_dim": 12, "batch_size": 50, "report_every": 1, "clip": 0.0}
ALL = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def log_softmax(scores):
    scores = scores - scores.max(axis=1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


def ranking_loss(z, config, scale):
    """Multiple negatives ranking of all prefixes that the settings name."""
    dims = config.matryoshka_dims or (z[0].shape[1],)
    weights = config.matryoshka_weights or (1.0,) * len(dims)
    options = {"margin": config.false_negative_margin, "margin_strategy": config.margin_strategy}
    options |= {"scale": scale, "normalize": True, "directions": config.directions or ALL[:1]}
    prefixes = ([each[:, :dim] for each in z] for dim in dims)
    losses = [ranking(q, d, weights=np.ones(len(q)), **options).loss.mean() for q, *d in prefixes]
    return np.dot(weights, losses)


def debiased_loss(z, scale, tau_plus):
    """The positive among other queries' positives and the query's own hard negatives."""
    q, p, *negatives = map(unit, z)
    S = np.exp(scale * q @ p.T)
    positive, count = S.diagonal(), len(q) - 1 + len(negatives)
    R = S.sum(axis=1) - positive + sum(np.exp(scale * (q * n).sum(axis=1)) for n in negatives)
    G = np.maximum((R - tau_plus * count * positive) / (1 - tau_plus), count * np.exp(-scale))
    return np.log1p(G / positive).mean()


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


def quantised(z, precision):
    """Vectors of norm 1 in levels of the documents' ranges, or as signs."""
    z = [unit(each) for each in z]
    if precision == "binary":
        return [2.0 * (each > 0) - 1 for each in z]
    documents = np.concatenate(z[1:])
    least, greatest = documents.min(axis=0), documents.max(axis=0)
    return [np.floor(255 * (each - least) / (greatest - least)).clip(0, 255) - 128 for each in z]


@pytest.mark.parametrize(
    ("columns", "settings"),
    [
        (2, {}),
        (4, {"scale": 7.0, "query_prompt": "query: ", "document_prompt": "a passage: "}),
        (3, {"directions": ALL}),
        (2, {"directions": (ALL[0], ALL[2])}),
        (3, {"matryoshka_dims": (4, 12), "matryoshka_weights": (0.5, 2.0)}),
        (3, {"false_negative_margin": -0.1}),
        (3, {"false_negative_margin": 0.5, "margin_strategy": "relative", "directions": ALL[:2]}),
        (4, {"hard_negatives": "alone"}),
        (3, {"hard_negatives": "alone", "tau_plus": 0.01, "scale": 3.0}),
        (2, {"tau_plus": 0.02, "scale": 3.0}),
        (3, {"teacher_weight": 0.5, "teacher_scale": 9.0}),
        (3, {"loss": "gist", "guide_margin": 0.2}),
        (2, {"loss": "gist", "directions": ALL[:2], "teacher_weight": 2.0}),
        (4, {"loss": "distillation", "teacher_scale": 5.0}),
        (3, {"quantize": ("binary",), "matryoshka_dims": (4, 12)}),
        (2, {"quantize": ("int8", "binary"), "teacher_weight": 0.5}),
        (2, {"quantize": ("int8",), "loss": "gist"}),
        (4, {"quantize": ("binary",), "hard_negatives": "alone"}),
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
    without_prompts = replace(config, query_prompt="", document_prompt="")
    encode = SentenceEncoder(fresh, vocabulary, torch.device("cpu"), without_prompts).encode

    order = np.random.default_rng([0, 0]).permutation(50)
    prompts = [config.query_prompt, *[config.document_prompt] * (columns - 1)]
    texts = zip(prompts, columns_of(rows), strict=True)
    z = [encode([prompt + text for text in column]).astype(np.float64)[order] for prompt, column in texts]
    of_teacher = teacher.astype(np.float64)[:, order]

    weight = {"gist": 0.0, "distillation": 1.0}.get(config.loss, 1.0)
    weight = weight if config.teacher_weight is None else config.teacher_weight
    loss = 0.0
    for vectors in (z, *(quantised(z, precision) for precision in config.quantize or ())):
        if config.tau_plus or config.hard_negatives == "alone":
            loss += debiased_loss(vectors, config.scale, config.tau_plus)
        elif config.loss == "ranking":
            loss += ranking_loss(vectors, config, config.scale)
        elif config.loss == "gist":
            directions = config.directions or ALL
            loss += guided(vectors, of_teacher, config.scale, config.guide_margin, directions)
        if taught:
            loss += weight * distilled(vectors, of_teacher, config.scale, config.teacher_scale)

    line = metrics(tmp_path / "run")[0]
    # In float32 a few numbers, those at the edge of a level, are in the next one.
    levels = "int8" in (config.quantize or ())
    assert line["loss"] == pytest.approx(loss, rel=2e-4 if levels else 1e-5)
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


def test_a_resumed_training_has_the_bits_of_a_whole_one(tmp_path):
    rows = write_rows(tmp_path / "rows.tsv", 200, 3)
    paths, _ = write_teacher(tmp_path, 200, 3)
    settings = {"learn_scale": True, "schedule": "cosine", "warmup": 3.0, "epochs": 2, "valid": rows}
    settings |= {"encoder": "transformer", "layers": 1, "heads": 2, "feedforward": 8, "teacher": paths}
    config = TrainConfig((rows,), **SMALL, **settings, keep_checkpoint=True)
    train(config, tmp_path / "whole")
    assert train(config, tmp_path / "parts", display=stopping(4)).stopped_by == signal.SIGTERM
    train(config, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")

    with pytest.raises(InputError, match="cannot resume: teacher is None, but the run was started with"):
        train(replace(config, teacher=None), tmp_path / "parts", resume=True)
    np.save(paths[1], np.load(paths[1])[::-1])
    with pytest.raises(InputError, match=r"teacher1.npy has other contents than when the run started"):
        train(config, tmp_path / "parts", resume=True)


def test_the_teacher_is_not_rounded_to_16_bits(tmp_path):
    """Embeddings of an autocast may be of 16 bits, in which this teacher's vectors are equal."""
    rows = write_rows(tmp_path / "rows.tsv", 50)
    paths, teacher = write_teacher(tmp_path, 50, 2)
    for path, vectors in zip(paths, teacher, strict=True):
        np.save(path, 1 + 0.0019 * (vectors > 0).astype(np.float32))
    config = TrainConfig((rows,), **SMALL, loss="distillation", teacher=paths, teacher_scale=1e8)
    vocabulary, progress = read_corpus(config, [rows], 1)
    objective = Trainer(Training(config, [rows], vocabulary, tmp_path, progress)).objective
    (turn,) = objective.turns(progress)
    embeddings = torch.randn(100, 12, generator=torch.Generator().manual_seed(0)).bfloat16()
    short, long = (objective.loss_of([x], turn.batch, None)[0] for x in (embeddings, embeddings.float()))
    assert short == pytest.approx(long.item(), rel=1e-5)
    assert long > 1


@pytest.mark.parametrize(
    "settings",
    [
        {"directions": ("query_to_doc", "doc_to_query"), "teacher_weight": 0.3, "false_negative_margin": 0.1},
        {"loss": "gist", "teacher_weight": 1.0, "chunk": 7},
        {"loss": "distillation", "learn_scale": True},
        {"quantize": ("int8", "binary"), "matryoshka_dims": (4, 12)},
    ],
    ids=str,
)
def test_ranks_train_on_pairs_and_a_teacher_as_one_process_does(tmp_path, pool, settings):
    rows = write_rows(tmp_path / "rows.tsv", 111, 3)
    paths = None if "quantize" in settings else write_teacher(tmp_path, 111, 3)[0]
    small = {"model": "pairs", "word_dim": 12, "batch_size": 20, "report_every": 1, "epochs": 2}
    config = TrainConfig((rows,), **small, **settings, teacher=paths)
    on_ranks(pool, 2, replace(config, batch_size=10), tmp_path / "two")
    train(config, tmp_path / "one")
    ours, theirs = ([line["loss"] for line in metrics(tmp_path / run)] for run in ("two", "one"))
    assert len(ours) == 12  # of which each sixth has 11 rows, which are uneven shares
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_files_that_a_loss_cannot_use_are_refused(tmp_path):
    write_rows(tmp_path / "rows.tsv", 60, 3)
    paths, vectors = write_teacher(tmp_path, 60, 3)
    for name, text in (("ragged", "a\tb\nc\td\te\n"), ("empty", "a\tb\nc\t \n"), ("one", "a\nb\n")):
        (tmp_path / f"{name}.tsv").write_text(text)
    others = {"short": vectors[0][:59], "nan": np.full((60, 4), np.nan), "flat": vectors[0][:, 0]}
    others["wide"] = np.zeros((60, 8))
    for name, array in others.items():
        np.save(tmp_path / f"{name}.npy", array)

    def taught(name):
        return {"teacher": (*paths[:2], str(tmp_path / f"{name}.npy"))}

    for corpus, settings, message in (
        ("ragged", {}, "ragged.tsv: line 2: want 2 columns as in line 1 of .*, got 3"),
        ("empty", {}, "empty.tsv: line 2: want text in each column, got none in column 2"),
        ("one", {}, "one.tsv: line 1: want an anchor, a positive and any hard negatives"),
        ("rows", {"batch_size": 61}, "the corpus is shorter than a batch: 60 sentences"),
        ("rows", {"teacher": paths[:2]}, "teacher: want a file for each of the 3 columns .*, got 2"),
        ("rows", taught("short"), "teacher: want a vector for each of the 60 rows"),
        ("rows", taught("flat"), "flat.npy: want rows"),
        ("rows", taught("absent"), "cannot read .*absent.npy"),
        ("rows", taught("nan"), "teacher: want finite numbers, .* row 1 of .*nan.npy"),
        ("rows", taught("wide"), "teacher: want vectors of width 7, got 8 in .*wide.npy"),
        ("rows", {"matryoshka_dims": (4, 13)}, "matryoshka_dims: want at most D=12, .*, got 13"),
        ("rows", {"matryoshka_dims": (4, 4)}, "matryoshka_dims: want different numbers"),
        (
            "rows",
            {"matryoshka_dims": (4, 8), "matryoshka_weights": (1.0,)},
            "matryoshka_weights: want 2, one for each of dims, got 1",
        ),
        ("rows", {"valid": str(tmp_path / "ragged.tsv")}, "ragged.tsv: line 1: want 3 columns, got 2"),
    ):
        settings = {"corpus": (str(tmp_path / f"{corpus}.tsv"),), **SMALL, **settings}
        with pytest.raises(InputError, match=message):
            train(TrainConfig(**settings), tmp_path / "run")
        assert not (tmp_path / "run" / "model.safetensors").exists()


def consecutive(path, rows):
    """Pairs of sentences of which each is the positive of one row and the query of the next."""
    texts = [f"w{i % 37} w{i % 11} w{i}" for i in range(rows + 1)]
    path.write_text("".join(f"{a}\t{b}\n" for a, b in itertools.pairwise(texts)))
    return str(path)


@pytest.mark.parametrize("sampler", ["random", "no-duplicates"])
def test_batches_without_duplicates_are_drawn_if_asked_for(sampler, tmp_path, capsys):
    corpus = consecutive(tmp_path / "pairs.tsv", 400)
    config = TrainConfig(corpus=(corpus,), **SMALL, valid=corpus, batch_sampler=sampler, epochs=1)
    train(config, tmp_path / "run")
    said = capsys.readouterr().err
    assert ("--batch-sampler no-duplicates keeps such rows apart" in said) == (sampler == "random")
    vocabulary, progress = read_corpus(config, [corpus], 1)
    objective = Trainer(Training(config, [corpus], vocabulary, tmp_path, progress)).objective
    in_order = [range(begin, begin + 50) for begin in range(0, 400, 50)]
    trained = [turn.batch.rows.tolist() for turn in objective.turns(progress)]
    assert sorted(row for rows in trained for row in rows) == list(range(400))
    neighbours = [any(row + 1 in rows for row in rows) for rows in trained]
    assert any(neighbours[:-1]) == (sampler == "random")
    held_out = [batch.rows.tolist() for batch in objective.held_out]
    assert (held_out == [list(rows) for rows in in_order]) == (sampler == "random")
    assert any(row + 1 in rows for rows in held_out[:4] for row in rows) == (sampler == "random")
