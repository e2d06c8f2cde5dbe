"""A tiny BERT checkpoint, made locally so that nothing is downloaded."""

from pathlib import Path

import pytest
import torch

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "on", "a", "mat", "##s", "."]


def write_tiny_bert(folder: Path) -> None:
    """Saves a model with random weights and its tokenizer; skips the test where transformers is missing."""
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        initializer_range=0.5,
    )
    transformers.BertModel(config).save_pretrained(folder)
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(folder)
