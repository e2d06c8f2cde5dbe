"""A run whose encoder is a Hugging Face checkpoint: resumed, and with damaged files."""

import json
from dataclasses import replace

import pytest

from fastqt.errors import InputError
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.train import train


@pytest.fixture
def run(checkpoint, tmp_path):
    """The directory and the settings of a training of two steps."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the cat sat.\na mat.\nthe mats sat on a cat.\na cat sat\n" * 10)
    config = TrainConfig(
        (str(corpus),),
        model="simcse",
        encoder="huggingface",
        checkpoint=str(checkpoint),
        batch_size=8,
        max_length=8,
        steps=2,
        keep_checkpoint=True,
    )
    train(config, tmp_path / "run")
    return tmp_path / "run", config


def test_a_checkpoint_is_trained_on_pairs_with_prompts(checkpoint, tmp_path):
    rows = tmp_path / "rows.tsv"
    rows.write_text("the cat sat\ta mat\ta cat\nthe mats\tsat on a cat\tthe mat\n" * 10)
    settings = {"model": "pairs", "encoder": "huggingface", "checkpoint": str(checkpoint), "pooling": "mean"}
    settings |= {"batch_size": 8, "max_length": 8, "query_prompt": "the ", "matryoshka_dims": (4, 8)}
    config = TrainConfig((str(rows),), valid=str(rows), **settings, optimizer="adamw", steps=2)
    assert config.learning_rate == 2e-5
    assert "validation_mrr" in train(config, tmp_path / "run").metrics
    encoder = SentenceEncoder.load(tmp_path / "run")
    assert (encoder.encode(["cat sat"]) == encoder.encode(["the cat sat"], side="document")).all()


def test_a_changed_tokenizer_is_not_resumed_with(run):
    directory, config = run
    path = directory / "huggingface" / "tokenizer.json"
    text = path.read_text()
    assert '"cat"' in text
    path.write_text(text.replace('"cat"', '"dog"'))
    with pytest.raises(InputError, match="cannot resume: the vocabulary in "):
        train(replace(config, steps=3), directory, resume=True)
    path.write_text(text)
    assert train(replace(config, steps=3), directory, resume=True).step == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 1 << 24}, r"does not fit its config\.json"),
        ({"intermediate_size": 10**12}, r"does not fit its config\.json"),
        ({"vocab_size": 10**12}, r"does not fit its config\.json"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers: want at most \d+, .* got 1000000000"),
        ({"hidden_size": -1}, "holds no usable Hugging Face checkpoint"),
        ({"hidden_act": "none"}, "holds no usable Hugging Face checkpoint: 'none'"),
        ({"layer_norm_eps": "small"}, "holds no usable Hugging Face checkpoint"),
        ({"model_type": "none"}, "holds no checkpoint that can be loaded"),
    ],
    ids=str,
)
def test_a_damaged_configuration_is_refused(run, change, message):
    directory, _ = run
    path = directory / "huggingface" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=message):
        SentenceEncoder.load(directory)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', "[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_damaged_file_is_refused(run, name, text):
    directory, _ = run
    (directory / "huggingface" / name).write_text(text)
    with pytest.raises(InputError, match="huggingface holds no "):
        SentenceEncoder.load(directory)


def test_evaluation_tells_runs_with_other_files_apart(run):
    """The key of cached vectors depends on the tokenizer too; such a run has no vocabulary.json."""
    from fastqt.sentences.evaluation import load_encoder

    directory, _ = run
    named = load_encoder(str(directory))
    assert (named.encode(["the cat"]) == SentenceEncoder.load(directory).encode(["the cat"])).all()
    keys = [named.key, load_encoder(f"random:{directory}").key]
    assert keys == [load_encoder(str(directory)).key, load_encoder(f"random:{directory}").key]
    path = directory / "huggingface" / "tokenizer.json"
    path.write_text(path.read_text().replace('"cat"', '"dog"'))
    keys += [load_encoder(str(directory)).key, load_encoder(f"random:{directory}").key]
    assert len(set(keys)) == 4
