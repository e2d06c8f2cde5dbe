"""Masked words with a checkpoint: its own head equals that of transformers, and a fresh one is trained."""

import json

import pytest
import torch

from fastqt.errors import InputError
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.train import train
from tests.shared.tolerances import FLOAT32, relative

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "a", "mat", "."]
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SIZES |= {"max_position_embeddings": 20, "initializer_range": 0.5, "vocab_size": len(WORDS)}


def save(folder, model, words=WORDS):
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
    from fastqt.integrations.huggingface import HuggingFaceEncoder
    from fastqt.integrations.huggingface.masked_words import load_masked_word_head
    from fastqt.nn import MaskedWordHead, SimCSE
    from fastqt.nn.masked_words import Masking

    config = getattr(transformers, f"{kind}Config")(**SIZES, hidden_dropout_prob=0.0, layer_norm_eps=1e-12)
    whole = getattr(transformers, f"{kind}ForMaskedLM")(config).eval()
    save(tmp_path, whole)
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


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("the cat sat.\na mat.\nthe mat sat on a cat.\na cat sat\n" * 10)
    return str(path)


def test_a_checkpoint_without_a_head_gets_a_fresh_one(corpus, tmp_path):
    checkpoint = save(tmp_path / "bert", transformers.BertModel(transformers.BertConfig(**SIZES)))
    settings = {"model": "simcse", "encoder": "huggingface", "checkpoint": str(checkpoint)}
    settings |= {"batch_size": 8, "max_length": 8, "report_every": 1, "masked_words": 0.1}
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
    checkpoint = save(tmp_path / "bert", transformers.BertModel(config), words)
    settings = {"model": "simcse", "encoder": "huggingface", "checkpoint": str(checkpoint)}
    with pytest.raises(InputError, match="masked_words: want a checkpoint with a mask token, got "):
        train(TrainConfig((corpus,), **settings, batch_size=8, masked_words=0.1), tmp_path / "run")
