"""Runs with random weights, written to a directory as a training writes them, in no time."""

from pathlib import Path
from typing import Any

import torch

from fastqt.sentences.runs.checkpoint import CONFIG, MODEL, save_model, write_text
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.lexicon import load_tokenizer, save_lexicon
from fastqt.sentences.runs.model import build_model
from fastqt.sentences.text import Lexicon, Vocabulary

TEXT = ["the cat sat on a mat.", "a dog ran far away", "the mats", "on", "far away the dog sat and sat"]
# What a user may send: blank lines, unknown words, white space around and within, and more than max_length.
LINES = [
    "the cat sat",
    "",
    "an ünknown zebra sat on\u00a0the mat .",
    "  on  ",
    " \t",
    "dog " * 30,
    "zebra",
    ".",
]
SIZES = {"word_dim": 8, "hidden_size": 6, "heads": 2, "layers": 2, "feedforward": 12, "max_length": 9}


def write_run(folder: Path, **settings: Any) -> Path:
    """Writes a run with weights of some size to a new directory, and returns it."""
    folder.mkdir()
    config = TrainConfig(**{"corpus": ("corpus.txt",), **SIZES, **settings})
    lexicon: Lexicon
    if config.checkpoint is not None:
        from fastqt.integrations.huggingface import CheckpointVocabulary

        lexicon = CheckpointVocabulary.load(config.checkpoint, max_length=config.max_length)
    elif config.vocabulary is not None:
        lexicon = load_tokenizer(config, Path(config.vocabulary))
    else:
        lexicon = Vocabulary.build(TEXT, 50, unknown=config.unknown, max_length=config.max_length)

    torch.manual_seed(0)
    model = build_model(config, len(lexicon), sentences=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))

    write_text(folder / CONFIG, config.to_json())
    save_lexicon(lexicon, folder)
    save_model(folder / MODEL, model)
    return folder
