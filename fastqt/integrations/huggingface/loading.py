"""Loads models and tokenizers of the `transformers` library from directories; nothing is ever downloaded."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fastqt.checks import check_size, shown
from fastqt.errors import InputError, one_line
from fastqt.integrations._libraries import load_library
from fastqt.nn.tokens import Encoded, list_of_texts

# A tokenizer of transformers sets its library's truncation and padding before it encodes: two threads that do
# so at the same time have each other's, or an error.
_TOKENIZING = threading.Lock()


class CheckpointVocabulary:
    """The tokenizer of a checkpoint as a training's vocabulary, with the configuration of the model.

    Args:
        tokenizer: a tokenizer of the `transformers` library.
        config: the model's configuration.
        max_length: the number of tokens of a sentence that are kept, including special ones.

    Raises:
        TypeError, ValueError: naming the argument, what is wanted and what came.

    Example:
        >>> from fastqt.integrations.huggingface import CheckpointVocabulary, HuggingFaceEncoder
        >>> encoder = HuggingFaceEncoder("bert", pooling="mean")  # the directory of a checkpoint
        >>> vocabulary = CheckpointVocabulary(encoder.tokenizer, encoder.model.config, max_length=8)
        >>> ids, lengths = vocabulary.encode(["the cat sat", "a mat"])
        >>> len(ids) == int(lengths.sum())
        True
    """

    def __init__(self, tokenizer: Any, config: Any, *, max_length: int) -> None:
        check_tokenizer(tokenizer)
        if not hasattr(config, "hidden_size"):
            raise TypeError(f"config: want the configuration of a model of transformers, got {shown(config)}")
        check_size("max_length", max_length)
        self.tokenizer, self.config, self.max_length = tokenizer, config, max_length

    @classmethod
    def load(cls, directory: str | Path, *, max_length: int) -> CheckpointVocabulary:
        """Reads a checkpoint's directory, or one that `save` wrote. It need not hold weights.

        Raises:
            ImportError, InputError: as in `HuggingFaceEncoder`.
        """
        path = directory_of("directory", directory)
        config, tokenizer = _from_pretrained(path, "AutoConfig", "AutoTokenizer")
        return cls(tokenizer, config, max_length=max_length)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def special_ids(self) -> list[int]:
        """The ids of the tokenizer's special tokens."""
        return list(self.tokenizer.all_special_ids)

    def encode(self, sentences: Sequence[str]) -> Encoded:
        """Encodes sentences with special tokens, at most `max_length` tokens each."""
        sentences = list_of_texts("sentences", sentences)
        rows: list[list[int]] = []
        if sentences:  # which its tokenizer wants
            with _TOKENIZING:
                options = {"truncation": True, "max_length": self.max_length}
                rows = self.tokenizer(sentences, **options)["input_ids"]
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        ids = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(lengths.sum()))
        return Encoded(ids, lengths)

    def save(self, directory: str | Path) -> None:
        """Writes the tokenizer and the model's configuration to a directory."""
        self.tokenizer.save_pretrained(directory)
        self.config.save_pretrained(directory)


def untrained(directory: str | Path) -> tuple[nn.Module, Any]:
    """A model with the configuration of a checkpoint but random weights, and its tokenizer.

    Raises:
        ImportError, InputError: as in `HuggingFaceEncoder`.

    Example:
        >>> from fastqt.integrations.huggingface import HuggingFaceEncoder, untrained
        >>> encoder = HuggingFaceEncoder(*untrained("bert"))  # its configuration, and random weights
        >>> encoder(*encoder.tokenize(["the cat sat"])).shape == (1, encoder.embedding_dim)
        True
    """
    path = directory_of("directory", directory)
    config, tokenizer = _from_pretrained(path, "AutoConfig", "AutoTokenizer")
    model: nn.Module = transformers().AutoModel.from_config(config)
    return model.float(), tokenizer


def check_tokenizer(tokenizer: object) -> None:
    """Raises TypeError unless this can be called, as the tokenizers of `transformers` are."""
    if not callable(tokenizer):
        raise TypeError(f"tokenizer: want a tokenizer of transformers, got {shown(tokenizer)}")


def directory_of(name: str, directory: object) -> Path:
    """The directory that an argument names; InputError if there is none."""
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(f"{name}: want the directory of a checkpoint, got {shown(directory)}")
    path = Path(directory)
    if not path.is_dir():
        raise InputError(f"{name}: want the directory of a checkpoint, got {str(path)!r}")
    return path


def tensors_of(directory: Path, prefix: str) -> dict[str, Tensor]:
    """The tensors in a checkpoint's files whose names begin with a prefix, by the rest of their names."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118  # no dict
                tensors |= {name.removeprefix(prefix): file.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path} is damaged: {one_line(error)}") from error
    return tensors


def load_model(directory: Path) -> tuple[nn.Module, Any]:
    """The model of a checkpoint, in float32, and its tokenizer; errors as of `HuggingFaceEncoder`."""
    model, tokenizer = _from_pretrained(directory, "AutoModel", "AutoTokenizer")
    return model.float(), tokenizer


def _from_pretrained(directory: Path, *classes: str) -> list[Any]:
    """Loads an object of each of the named `transformers` classes from a local directory."""
    library = transformers()
    try:
        return [getattr(library, name).from_pretrained(directory, local_files_only=True) for name in classes]
    except (OSError, ValueError) as error:
        raise InputError(f"model: {directory} holds no checkpoint that can be loaded: {error}") from error


def transformers() -> Any:
    """The `transformers` library, or ImportError that says how it is installed."""
    return load_library("transformers")
