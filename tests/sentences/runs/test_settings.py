"""Settings are read as they were stored and make the models that they name, or are refused in words."""

import json
from dataclasses import replace

import pytest
import torch

from fastqt.errors import InputError
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.options.encoders import ENCODERS
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.model import build_model, outline, tables_of_vectors, word_tables
from fastqt.sentences.text import reader
from fastqt.sentences.train import train

CONFIG = TrainConfig(("x.txt",), encoder="gru", steps=3)
FILE = "v.npz"
TEACHER = ("q.npy", "d.npy")


def write(path, change):
    path.write_text(json.dumps(json.loads(CONFIG.to_json()) | change))


def pairs(**settings):
    return TrainConfig(("x.tsv",), model="pairs", word_dim=8, **settings)


@pytest.mark.parametrize(
    "config",
    [CONFIG, pairs(directions=("query_to_doc",), matryoshka_dims=(2, 4), teacher=TEACHER)],
    ids=["text", "pairs"],
)
def test_settings_are_read_as_they_were_written(tmp_path, config):
    (tmp_path / "config.json").write_text(config.to_json())
    assert TrainConfig.load(tmp_path / "config.json") == config


def test_settings_that_an_older_version_did_not_have_get_their_defaults(tmp_path):
    values = json.loads(CONFIG.to_json())
    del values["latents"], values["dev"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert TrainConfig.load(tmp_path / "config.json") == CONFIG


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 10**9}, "hidden_size: want at least 1 and less than 16777217, got 1000000000"),
        ({"hidden_size": True}, "hidden_size: want an integer, got True"),
        ({"hidden_size": None}, "hidden_size: want an integer, got None"),
        ({"dropout": float("nan")}, "dropout: want at least 0 and less than 1, got nan"),
        ({"learning_rate": "fast"}, "learning_rate: want a number, got 'fast'"),
        ({"model": "x" * 999}, "model: want one of quickthoughts, "),
        ({"corpus": "x.txt"}, "corpus: want paths, got 'x.txt'"),
        ({"corpus": []}, "corpus: want at least one file, got none"),
        ({"format": None}, "format is missing"),
        ({"format": True}, "has format True"),
        ({"fastqt": None}, "fastqt is missing"),
        ({"colour": "red"}, "unknown 'colour'"),
    ],
    ids=str,
)
def test_a_damaged_field_is_named(tmp_path, change, message):
    write(tmp_path / "config.json", change)
    with pytest.raises(InputError, match=rf"config\.json.*{message}"):
        TrainConfig.load(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[]", "want an object, got a list"),
        (b'{"format": 1, "format": 1}', "the key 'format' occurs twice"),
        (b'{"format": "\xff"}', "can't decode byte 0xff"),
        (b"[" * 200_000, "recursion"),
        (b'{"format": ' + b"9" * 5000 + b"}", "4300 digits"),
        (b" " * (1 << 20) + b" ", "want at most 1,048,576 bytes, got 1,048,577"),
    ],
    ids=range(6),
)
def test_a_file_that_is_no_json_object_is_refused(tmp_path, data, message):
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(InputError, match=rf"config\.json.*{message}"):
        TrainConfig.load(tmp_path / "config.json")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(InputError, match=r"cannot read .*config\.json: Is a directory"):
        TrainConfig.load(tmp_path / "config.json")


LEARNT, SKIP, VECTORS = {"learn_scale": True}, {"model": "skip-thoughts"}, {"vectors": FILE}
MIXCSE, SIMCSE, TOKENS = {"model": "mixcse"}, {"model": "simcse"}, {"vocabulary": "tokenizer.json"}
MASKED = {"masked_words": 0.1, "encoder": "transformer"}
PAIRS = {"model": "pairs", "corpus": ("x.tsv",), "word_dim": 8}
GIST = PAIRS | {"teacher": TEACHER, "loss": "gist"}
REFUSED = [
    ({"encoder": "rnn"}, "encoder: want one of bow, static, .*, combine, got 'rnn'"),
    ({"batch_size": -1}, "batch_size: want at least 2, got -1"),
    ({"steps": 0}, "steps: want at least 1, got 0"),
    ({"context_size": 9, "batch_size": 9}, "context_size: want less than batch_size 9, got 9"),
    ({"encoder": "bigru", "hidden_size": 7}, "hidden_size: want an even number for bigru, got 7"),
    ({"encoder": "combine", "hidden_size": 7}, "hidden_size: want an even number for combine, got 7"),
    ({"encoder": "combine", "model": "simcse"}, "encoder: want one of .* with model simcse, got 'combine'"),
    ({"early_stop": 3}, "early_stop: want it with dev or valid, .*, got 3"),
    ({"early_stop": 0, "valid": "y"}, "early_stop: want at least 1, got 0"),
    ({"learning_rate": float("nan")}, "learning_rate: want at least 0, got nan"),
    ({"warmup": 2.5}, "warmup: want a whole number of steps, or a share of .* below 1, got 2.5"),
    ({"warmup": -1}, "warmup: want at least 0 and less than .*, got -1"),
    ({"weight_decay": -0.1}, "weight_decay: want at least 0 and less than"),
    ({"betas": (0.9, 1.0)}, "betas: want at least 0 and less than 1, got 1.0"),
    ({"betas": (0.9,)}, r"betas: want two numbers, got \(0.9,\)"),
    ({"betas": (0.9, "x")}, "betas: want a number, got 'x'"),
    ({"chunk": 0}, "chunk: want at least 1, got 0"),
    ({"chunk": 8, "model": "skip-thoughts"}, "chunk: want none with model skip-thoughts, .*; got 8"),
    ({"chunk": 8, "model": "gloss-bow"}, "chunk: want none with model gloss-bow, .*; got 8"),
    (LEARNT | {"model": "simcse", "max_scale": 10.0}, "max_scale: want at least the scale 20, got 10"),
    (LEARNT | {"model": "simcse", "scale": 200.0}, "max_scale: want at least the scale 200, got 100"),
    (LEARNT | {"model": "simcse", "learn_scale": False, "max_scale": 50.0}, "max_scale: want it with"),
    (MASKED | {"model": "simcse", "encoder": "bow"}, "masked_words: want encoder transformer or"),
    (MASKED | {"model": "simcse", "masked_words": -1.0}, "masked_words: want at least 0"),
    (MASKED | {"model": "simcse", "chunk": 8}, "chunk: want none with masked_words, .* got 8"),
    (SKIP | {"encoder": "bow"}, "encoder: want one of gru, bigru with model skip-thoughts, got 'bow'"),
    (SKIP | {"init": "torch"}, "init: want paper with model skip-thoughts, got torch"),
    (TOKENS | {"encoder": "huggingface", "checkpoint": "c"}, "vocabulary: want none with encoder"),
    (TOKENS | {"model": "gloss-bow"}, "vocabulary: want none with model gloss"),
    ({"encoder": "static"}, "vocabulary: want a tokenizer.json with encoder static, got None"),
    (TOKENS | {"encoder": "static", "checkpoint": "c"}, "checkpoint: want with encoder huggingface alone"),
    (TOKENS | {"encoder": "static", "trained_dim": 8}, "trained_dim: want it with an mc- encoder alone"),
    (TOKENS | {"vectors": FILE}, "vectors: want none with a vocabulary of a file, got 'v.npz'"),
    ({"encoder": "mc-bow"}, "vectors: want a file of word vectors with encoder mc-bow, got None"),
    ({"freeze_vectors": True}, "vectors: want a file of word vectors with freeze_vectors, got None"),
    ({"vectors_scale": 2.0}, "vectors: want a file of word vectors with vectors_scale, got None"),
    ({"trained_dim": 8}, "trained_dim: want it with an mc- encoder alone, got 8"),
    (VECTORS | {"model": "gloss-bow"}, "vectors: want none with model gloss-bow, got 'v.npz'"),
    (VECTORS | {"encoder": "huggingface", "checkpoint": "c"}, "vectors: want none with encoder huggingface"),
    (VECTORS | {"freeze_vectors": True}, "freeze_vectors: want none with encoder bow, which has no other"),
    (VECTORS | {"freeze_vectors": True, "encoder": "mc-gru"}, "freeze_vectors: want none with encoder"),
    (VECTORS | {"vectors_scale": 0.0}, "vectors_scale: want at least 1e-06"),
    (VECTORS | {"freeze_vectors": 1}, "freeze_vectors: want true or false, got 1"),
    (VECTORS | {"encoder": "mc-bigru", "hidden_size": 7}, "hidden_size: want an even number"),
    (
        MIXCSE | {"model": "simcse", "partner": "random"},
        "partner: want it with model mixcse alone, got 'random'",
    ),
    (
        MIXCSE | {"model": "quickthoughts", "stop_gradient": "no"},
        "stop_gradient: want it with model mixcse alone",
    ),
    (MIXCSE | {"blocks": "candidates"}, "blocks: want 'both' with form slides of mixcse, got 'candidates'"),
    (MIXCSE | {"masked_cell": "exclude"}, "masked_cell: want 'zero' with form slides of mixcse, got"),
    (MIXCSE | {"hard_negative_weight": 1.0}, "hard_negative_weight: want 0.0 with form slides of mixcse"),
    (MIXCSE | {"corpus": ("a.txt", "b.tsv.gz")}, "corpus: want all files or none to end in .*, got 'a.txt'"),
    (
        SIMCSE | {"hard_negative_weight": 1.0},
        "hard_negative_weight: want 0.0 with model simcse",
    ),
    (SIMCSE | {"corpus": ("a.tsv", "b.txt")}, "corpus: want all .* .tsv, .csv or .jsonl, .*, got 'b.txt'"),
    (SIMCSE | {"corpus": ("a.tsv",), "valid": "held.txt"}, "valid: want rows as the corpus has,"),
    (SIMCSE | {"valid": "held.tsv"}, "valid: want sentences, got 'held.tsv'"),
    (
        PAIRS | {"hard_negative_weight": 1.0},
        "hard_negative_weight: want it with model simcse or mixcse alone, got 1.0",
    ),
    (PAIRS | {"encoder": "combine"}, "encoder: want one of .* with model pairs, got 'combine'"),
    (PAIRS | {"guide_margin": 0.1}, "guide_margin: want 0.0 with loss ranking of pairs, got 0.1"),
    (PAIRS | {"directions": ("doc_to_doc",)}, "directions: want query_to_doc among them, got doc_to_doc"),
    (PAIRS | {"directions": ("doc",)}, "directions: want one of query_to_doc, .*, got 'doc'"),
    (PAIRS | {"directions": ()}, r"directions: want one value or several, got \(\)"),
    (PAIRS | {"matryoshka_dims": (0, 2)}, "matryoshka_dims: want at least 1"),
    (PAIRS | {"matryoshka_dims": (2.5,)}, "matryoshka_dims: want an integer, got 2.5"),
    (PAIRS | {"matryoshka_weights": (1.0,)}, "matryoshka_weights: want matryoshka_dims too"),
    (PAIRS | {"margin_strategy": "relative"}, "margin_strategy: want it with a false_negative_margin alone"),
    (PAIRS | {"loss": "gist"}, "teacher: want .npy files with loss gist, got None"),
    (PAIRS | {"loss": "distillation"}, "teacher: want .npy files with loss distillation, got None"),
    (PAIRS | {"teacher_weight": 1.0}, "teacher_weight: want it with a teacher alone, got 1"),
    (PAIRS | {"query_prompt": "\udcff"}, "query_prompt: want UTF-8"),
    (GIST | {"loss": "ranking", "teacher_weight": 0.0}, "teacher_weight: want more than 0 with loss"),
    (GIST | {"teacher_scale": 5.0}, "teacher_scale: want it with a teacher whose scores are learnt, got 5"),
    (GIST | {"directions": ("query_to_doc", "doc_to_query")}, "directions: want no doc_to_query with loss"),
    (GIST | {"false_negative_margin": 0.1}, "false_negative_margin: want None with loss gist of pairs, got"),
    (GIST | {"loss": "distillation", "matryoshka_dims": (2, 4)}, "matryoshka_dims: want None with loss"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=str)
def test_settings_that_are_out_of_range_or_do_not_go_together_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        TrainConfig(**{"corpus": ("x",)} | settings)


def test_the_defaults_are_those_of_the_papers():
    bow, gru = TrainConfig(("x",)), TrainConfig(("x",), encoder="gru")
    assert (bow.batch_size, bow.context_size, bow.word_dim) == (1500, 3, 300)
    assert (gru.batch_size, gru.context_size, gru.hidden_size) == (400, 1, 1000)
    assert (bow.vocab_size, bow.max_length, bow.learning_rate, bow.clip) == (50_000, 50, 5e-4, 5)
    channels = TrainConfig(("x",), encoder="mc-bow", vectors=FILE)
    assert (channels.batch_size, channels.context_size) == (1500, 3)
    skip = TrainConfig(("x",), model="skip-thoughts")
    assert (skip.encoder, skip.word_dim, skip.hidden_size) == ("gru", 300, 1000)
    assert (skip.batch_size, skip.vocab_size, skip.clip, skip.max_length) == (128, 20_000, 10, 30)
    # Views are validated every 125 steps.
    for model, every in (("quickthoughts", 500), ("gloss-bow", 500), ("simcse", 125), ("mixcse", 125)):
        assert TrainConfig(("x",), model=model).valid_every == every
        assert TrainConfig(("x",), model=model, valid_every=7).valid_every == 7


def test_the_width_is_that_of_the_file_which_a_stored_run_knows(tmp_path):
    assert TrainConfig(("x",)).word_dim == 300
    config = TrainConfig(("x",), vectors=FILE)
    assert config.word_dim is None
    (tmp_path / "config.json").write_text(config.to_json())
    with pytest.raises(InputError, match=r"config\.json: word_dim: want an integer, got None"):
        TrainConfig.load(tmp_path / "config.json")
    values = json.loads(config.to_json()) | {"word_dim": 50}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert TrainConfig.load(tmp_path / "config.json") == TrainConfig(("x",), vectors=FILE, word_dim=50)


def test_a_run_is_resumed_with_its_vectors_wherever_they_lie():
    stored = TrainConfig(("x",), encoder="gru", vectors=FILE, word_dim=50)
    TrainConfig(("x",), encoder="gru", vectors="elsewhere", word_dim=50).check_resumes(stored)
    without = TrainConfig(("x",), encoder="gru", word_dim=50)
    for one, other in ((stored, without), (without, stored)):
        with pytest.raises(InputError, match=f"cannot resume: vectors is {one.vectors!r}, but"):
            one.check_resumes(other)
    with pytest.raises(InputError, match="cannot resume: freeze_vectors is True"):
        replace(stored, freeze_vectors=True).check_resumes(stored)


def test_a_renamed_corpus_stays_what_it_was():
    rows, sentences = (TrainConfig((name,), model="simcse") for name in ("x.tsv", "x.txt"))
    with pytest.raises(InputError, match=r"corpus: want names that end as in x.tsv, got x.txt"):
        sentences.check_resumes(rows)


def test_options_reach_the_losses_of_views():
    given = {"partner": "random", "blocks": "candidates", "masked_cell": "exclude"}
    given |= {"hard_negative_weight": 0.5, "mix": 0.4, "scale": 7.0}
    config = TrainConfig(("x",), model="mixcse", form="released", **given, stop_gradient="no", word_dim=4)
    options = build_model(config, 9).loss.function_options()
    assert options == {"form": "released", "stop_gradient": False, **given}


OF_MODEL = {"word_dim": 8, "hidden_size": 4, "batch_size": 48, "steps": 1}


@pytest.mark.parametrize(
    "settings",
    [
        {"word_dim": 1 << 24},
        {"encoder": "bilstm", "hidden_size": 1 << 24},
        {"encoder": "transformer", "feedforward": 1 << 24, "word_dim": 1 << 10, "heads": 1, "layers": 9},
        {"model": "gloss-pos", "word_dim": 1 << 12, "max_length": 1 << 24},
    ],
    ids=str,
)
def test_a_model_larger_than_memory_is_refused_with_its_size(settings):
    config = TrainConfig(("x",), **settings)
    with pytest.raises(InputError, match=r"size of the model, of which .* bytes, got [\d,]{14,}$"):
        build_model(config, 50_000, sentences=3)


def test_settings_that_do_not_fit_the_weights_take_no_memory(planted, tmp_path, monkeypatch):
    train(TrainConfig((planted[0],), **OF_MODEL), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"word_dim": 1 << 20}))
    built = []
    monkeypatch.setattr("fastqt.sentences.runs.model.check_size", built.append)
    with pytest.raises(InputError, match=r"does not fit its config\.json: the shape of .* differs"):
        SentenceEncoder.load(tmp_path)
    assert not built


@pytest.mark.parametrize("encoder", [x for x, kind in ENCODERS.items() if "checkpoint" not in kind.needs])
def test_an_outline_draws_no_random_numbers(encoder):
    """The seed of a training then gives the weights that it always gave."""
    files = dict.fromkeys(ENCODERS[encoder].needs, "v.npz")
    config = TrainConfig(("x",), encoder=encoder, heads=2, **files, **OF_MODEL)
    before = torch.get_rng_state()
    shapes = {name: tensor.shape for name, tensor in outline(config, 9).state_dict().items()}
    assert torch.equal(torch.get_rng_state(), before)
    model = build_model(config, 9)
    assert shapes == {name: tensor.shape for name, tensor in model.state_dict().items()}


def test_half_of_the_memory_is_the_limit(monkeypatch):
    monkeypatch.setattr(reader, "machine_memory", lambda: 2000)
    reader.check_bytes(1000, "x")
    message = "x: want at most half of this machine's memory, 1,000 bytes, got 1,001"
    with pytest.raises(InputError, match=message):
        reader.check_bytes(1001, "x")


V, W, H = 11, 4, 6
OF_VECTORS = TrainConfig(("x",), encoder="gru", vectors="v.npz", word_dim=W, hidden_size=H, layers=1, heads=2)
GRU = 3 * H * (W + H + 1)  # weights of a uni-GRU
BIGRU = 3 * H * (W + H // 2 + 1)


@pytest.mark.parametrize("build", [build_model, outline])
@pytest.mark.parametrize(
    ("settings", "tables", "started", "frozen", "trained_weights"),
    [
        ({"encoder": "bow"}, 2, 2, 0, 2 * V * W),
        ({"encoder": "gru"}, 2, 2, 0, 2 * (V * W + GRU)),
        ({"encoder": "gru", "freeze_vectors": True}, 1, 1, 1, 2 * GRU),
        ({"encoder": "bigru", "model": "simcse", "freeze_vectors": True}, 1, 1, 1, BIGRU),
        ({"encoder": "mc-bow"}, 3, 1, 1, 2 * V * W),
        ({"encoder": "mc-gru"}, 3, 1, 1, 2 * (V * W + 2 * GRU)),
        ({"encoder": "mc-bigru"}, 3, 1, 1, 2 * (V * W + 2 * BIGRU)),
        ({"encoder": "mc-bigru", "model": "mixcse"}, 2, 1, 1, V * W + 2 * BIGRU),
        ({"encoder": "combine"}, 4, 4, 0, 4 * V * W + 2 * GRU + 2 * BIGRU),
        ({"encoder": "combine", "freeze_vectors": True}, 2, 2, 2, 2 * GRU + 2 * BIGRU),
    ],
    ids=range(10),
)
def test_each_table_is_counted_once(build, settings, tables, started, frozen, trained_weights):
    config = replace(OF_VECTORS, **settings)
    model = build(config, V)
    assert len(word_tables(model)) == tables
    assert len(tables_of_vectors(model, config)) == started
    assert sum(not table.weight.requires_grad for table in word_tables(model)) == frozen
    assert sum(name.endswith("embedding.weight") for name in model.state_dict()) == tables
    weights = [weight for name, weight in model.named_parameters() if "bias_hh" not in name]
    assert sum(weight.numel() for weight in weights if weight.requires_grad) == trained_weights


def test_positions_are_no_words():
    model = build_model(replace(OF_VECTORS, encoder="transformer", model="simcse", feedforward=5), V)
    (table,) = word_tables(model)
    assert table.weight.shape == (V, W)
