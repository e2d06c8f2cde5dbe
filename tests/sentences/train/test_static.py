"""Static embeddings are trained as sentence-transformers trains them, and go on with the same bits."""

import itertools
import random
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from fastqt.sentences.cli import main
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.model import build_model
from fastqt.sentences.text import TripletCorpus
from fastqt.sentences.train import train
from tests.shared.tolerances import relative
from tests.shared.trainings import assert_same_run, metrics

V, BATCH, ROWS, DIMS = 500, 16, 160, (24, 12, 6)


@pytest.fixture
def corpus(tmp_path):
    """Rows of a query and a positive that share words, of which a few are frequent, and their tokenizer."""
    draw = random.Random(0)
    texts = [[f"w{int(V * draw.random() ** 3)}" for _ in range(draw.randint(2, 9))] for _ in range(ROWS + 1)]
    rows = [f"{' '.join(one)}\t{' '.join(one[1:] + other[:2])}" for one, other in itertools.pairwise(texts)]
    (tmp_path / "pairs.tsv").write_text("\n".join(rows) + "\n")

    ids = {"[UNK]": 0} | {f"w{i}": i for i in range(1, V)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "pairs.tsv"


def config_of(corpus, **settings):
    values = {
        "word_dim": DIMS[0],
        "batch_size": BATCH,
        "learning_rate": 0.02,
        "matryoshka_dims": DIMS,
        "clip": 1.0,
        "scale": 4.0,  # higher ones have gradients that are rounding errors, which Adam magnifies
        "report_every": 1,
        "keep_checkpoint": True,
        "epochs": 4,
    }
    tokenizer = str(corpus.parent / "tokenizer.json")
    static = {"model": "pairs", "encoder": "static", "vocabulary": tokenizer}
    return TrainConfig((str(corpus),), **static, **values | settings)


def test_the_defaults_are_those_of_static_embeddings(corpus):
    config = TrainConfig((str(corpus),), model="pairs", encoder="static", vocabulary="tokenizer.json")
    chosen = config.word_dim, config.init, config.batch_size, config.learning_rate
    assert chosen == (1024, "torch", 2048, 0.2)
    bow = TrainConfig((str(corpus),), model="pairs", encoder="bow")
    assert (bow.word_dim, bow.init, bow.batch_size, bow.learning_rate) == (300, "paper", 64, 5e-4)


def trained_by_the_library(config, table, rows, folder):
    """The model of sentence-transformers that its trainer makes of a table, (V, D), and its losses.

    Its batches are those of rows in their order.
    """
    import datasets
    import sentence_transformers as st
    from sentence_transformers.base.sampler import DefaultBatchSampler
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    class InOrder(st.SentenceTransformerTrainer):
        def get_batch_sampler(self, dataset, batch_size, drop_last, **kwargs):
            sampler = torch.utils.data.SequentialSampler(dataset)
            return DefaultBatchSampler(sampler, batch_size=batch_size, drop_last=drop_last)

    module = StaticEmbedding(Tokenizer.from_file(config.vocabulary), embedding_weights=table.clone())
    model = st.SentenceTransformer(modules=[module], device="cpu")
    ranking = losses.MultipleNegativesRankingLoss(model, config.scale)
    loss, values = losses.MatryoshkaLoss(model, ranking, [*DIMS]), []
    loss.register_forward_hook(lambda *call: values.append(call[-1].item()))
    arguments = st.SentenceTransformerTrainingArguments(
        str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=config.clip,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
    )
    pairs = datasets.Dataset.from_dict({"anchor": [a for a, _ in rows], "positive": [b for _, b in rows]})
    InOrder(model, arguments, train_dataset=pairs, loss=loss).train()
    return model, torch.tensor(values)


def test_a_training_is_that_of_sentence_transformers(corpus, tmp_path):
    """By value: the losses of 40 steps from the same table on the same batches, and the last table."""
    for name in ("sentence_transformers", "datasets", "accelerate"):
        pytest.importorskip(name, reason="the extra st is not installed")
    config = config_of(corpus)
    train(config, tmp_path / "run")
    ours = torch.tensor([line["loss"] for line in metrics(tmp_path / "run")])

    rows = [line.split("\t") for line in corpus.read_text().splitlines()]
    orders = [np.random.default_rng([config.seed, epoch]).permutation(ROWS) for epoch in range(config.epochs)]
    ordered = [rows[i] for order in orders for i in order]
    torch.manual_seed(config.seed)
    start = build_model(config, V).encoder.embedding.weight.detach()
    model, theirs = trained_by_the_library(config, start, ordered, tmp_path / "theirs")

    assert len(ours) == len(theirs) == 40
    assert relative(ours, theirs) < 1e-6
    assert ours[-1] < 0.8 * ours[0]
    table = load_file(tmp_path / "run" / "model.safetensors")["encoder.embedding.weight"]
    moved, wanted = (each - start for each in (table, model[0].embedding.weight.detach()))
    assert relative(moved, wanted) < 2e-5
    texts = ["w1 w2 w2", *rows[0]]
    vectors = SentenceEncoder.load(tmp_path / "run").encode(texts, normalize=False)
    np.testing.assert_allclose(vectors, model.encode(texts), rtol=0, atol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"precision": "bfloat16", "betas": (0.8, 0.99)}], ids=str)
@pytest.mark.parametrize("pause", [7, 10])  # within the first pass, and at its end
def test_a_run_in_two_parts_has_the_same_bits(corpus, tmp_path, settings, pause):
    config = config_of(corpus, **settings)
    train(config, tmp_path / "whole")
    train(config_of(corpus, **settings, steps=pause), tmp_path / "parts")
    assert train(config, tmp_path / "parts", resume=True).step == 40
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_texts_that_are_tokenised_during_the_first_pass_change_no_bit(corpus, tmp_path, monkeypatch):
    config = config_of(corpus, epochs=2)
    train(config, tmp_path / "during")
    # As it is for a corpus that is too large to be held as text.
    monkeypatch.setattr(sys.modules[TripletCorpus.__module__], "MOST_WAITING", 0)
    train(config, tmp_path / "before")
    assert_same_run(tmp_path / "during", tmp_path / "before")


def test_the_command_line(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = "train pairs.tsv --model pairs --encoder static --out"
    options = "--matryoshka 24,12 --word-dim 24 --batch-size 16 --steps 3"
    assert main([*words.split(), "run", "--tokenizer", "tokenizer.json", *options.split()]) == 0
    config = TrainConfig.load(tmp_path / "run" / "config.json")
    assert (config.vocabulary, config.matryoshka_dims) == ("tokenizer.json", (24, 12))
    (tmp_path / "texts.txt").write_text("abc\nhg fe\n")
    assert main(["embed", "run", "texts.txt", "--out", "vectors.npy"]) == 0
    assert np.load("vectors.npy").shape == (2, 24)

    capsys.readouterr()
    for arguments, message in (
        ([], "vocabulary: want a tokenizer.json with encoder static, got None"),
        (["--tokenizer", "none.json"], "no vocabulary: none.json is missing"),
        (["--tokenizer", "pairs.tsv"], "pairs.tsv is damaged"),
        (
            ["--tokenizer", "tokenizer.json", "--matryoshka", "24,99", *options.split()[2:]],
            "matryoshka_dims: want",
        ),
    ):
        assert main([*words.split(), "other", *arguments]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"fastqt: {message}"), error
