"""Hugging Face checkpoints as sentence encoders: to train with fastqt's losses, and to evaluate."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fastqt.errors import InputError
from fastqt.nn.encoders import Encoder, check_batch
from fastqt.text import Encoded, pad

Pooling = Literal["cls", "cls_before_pooler", "mean"]
POOLINGS = ("cls", "cls_before_pooler", "mean")


class HuggingFaceEncoder(Encoder):
    """A checkpoint of the `transformers` library (the extra `hf`) as an encoder of sentences.

    As an `Encoder` it takes the checkpoint's own token ids, which `tokenize` makes of text. Two calls in
    training mode give the two views under dropout that `fastqt.simcse_loss` wants.

    Args:
        model: a directory with a model and its tokenizer, as `save` writes; nothing is ever downloaded. Or a
            loaded model, whose dtype and device stay as they are.
        tokenizer: of a loaded model; by default that of the directory.
        pooling: "cls": the first token through the model's pooler, which is trained from scratch where the
            checkpoint has none; "cls_before_pooler": the first token's last hidden state; "mean": the mean of
            all tokens' last hidden states, the special ones' among them.
        max_length: tokens of a sentence that `tokenize` keeps, the special ones among them.

    Raises:
        ImportError: without the `transformers` library.
        InputError: a directory that does not exist or holds no checkpoint.
        ValueError: an unknown pooling, "cls" for a model without a pooler, or a model without a tokenizer.

    Source: the three poolings of Gao et al., "SimCSE" (arXiv:2104.08821), whose names these are.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        tokenizer: Any = None,
        *,
        pooling: Pooling = "cls",
        max_length: int = 128,
    ) -> None:
        if pooling not in POOLINGS:
            raise ValueError(f"pooling: expected one of {', '.join(map(repr, POOLINGS))}, got {pooling!r}")
        if max_length < 1:
            raise ValueError(f"max_length: expected at least 1, got {max_length}")
        loaded: Any = model
        if not isinstance(model, nn.Module):
            loaded, own_tokenizer = _load(Path(model))
            tokenizer = own_tokenizer if tokenizer is None else tokenizer
        elif tokenizer is None:
            raise ValueError("tokenizer: expected the loaded model's, got None")
        if pooling == "cls" and getattr(loaded, "pooler", None) is None:
            raise ValueError(
                f"pooling: expected 'cls_before_pooler' or 'mean' for a {type(loaded).__name__}, which has "
                "no pooler, got 'cls'"
            )
        super().__init__()
        self.model = loaded
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.max_length = max_length
        self.embedding_dim = int(self.model.config.hidden_size)

    def tokenize(self, sentences: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids (B, L), special tokens added and padded on the right, and lengths (B,), both int64.

        On the CPU, whatever the model's device.
        """
        shape = self.model.config
        return pad(CheckpointVocabulary(self.tokenizer, shape, max_length=self.max_length).encode(sentences))

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        check_batch(tokens, lengths)
        longest = int(lengths.max()) if len(lengths) else 0
        if longest == 0:
            return torch.zeros(len(tokens), self.embedding_dim, device=tokens.device, dtype=self.model.dtype)
        tokens = tokens[:, :longest]
        valid = torch.arange(longest, device=tokens.device) < lengths.unsqueeze(1)
        # Some models take the places of words from what is padding by its id.
        padded = tokens.masked_fill(~valid, self.tokenizer.pad_token_id or 0)
        # An empty sentence attends to its padding, which is not used, rather than to nothing: no NaN.
        attended = valid | (lengths == 0).unsqueeze(1)
        output = self.model(input_ids=padded, attention_mask=attended.long())
        if self.pooling == "cls":
            vectors = output.pooler_output
        elif self.pooling == "cls_before_pooler":
            vectors = output.last_hidden_state[:, 0]
        else:
            states = output.last_hidden_state.masked_fill(~valid.unsqueeze(2), 0)
            vectors = states.sum(1) / lengths.clamp(min=1).unsqueeze(1)
        result: Tensor = vectors.masked_fill((lengths == 0).unsqueeze(1), 0)
        return result

    @torch.inference_mode()
    def encode(
        self, sentences: Sequence[str], *, normalize: bool = False, batch_size: int = 64
    ) -> NDArray[np.float32]:
        """Vectors (len(sentences), embedding_dim) float32, without dropout, in the order given.

        Args:
            sentences: text.
            normalize: scale each vector to norm 1.
            batch_size: sentences at once, taken in the order of their lengths.
        """
        result = np.empty((len(sentences), self.embedding_dim), dtype=np.float32)
        order = sorted(range(len(sentences)), key=lambda row: len(sentences[row]))
        training = self.training
        self.eval()
        try:
            for begin in range(0, len(order), batch_size):
                rows = order[begin : begin + batch_size]
                tokens, lengths = self.tokenize([sentences[row] for row in rows])
                vectors = self(tokens.to(self.model.device), lengths.to(self.model.device)).float()
                result[rows] = (F.normalize(vectors, dim=1) if normalize else vectors).cpu().numpy()
        finally:
            self.train(training)
        return result

    def save(self, directory: str | Path) -> None:
        """Writes model and tokenizer, for this class and for `transformers` itself to load."""
        self.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)


class CheckpointVocabulary:
    """The tokenizer of a checkpoint as the vocabulary of a training, and the shape of its model.

    Args:
        tokenizer: of the `transformers` library.
        shape: the model's configuration.
        max_length: tokens of a sentence that are kept, the special ones among them.
    """

    def __init__(self, tokenizer: Any, shape: Any, *, max_length: int) -> None:
        self.tokenizer, self.shape, self.max_length = tokenizer, shape, max_length

    @classmethod
    def load(cls, directory: str | Path, *, max_length: int) -> CheckpointVocabulary:
        """Reads a checkpoint's directory, or what `save` wrote; weights are not looked at.

        Raises:
            ImportError, InputError: as of `HuggingFaceEncoder`.
        """
        shape, tokenizer = _from_pretrained(Path(directory), "AutoConfig", "AutoTokenizer")
        return cls(tokenizer, shape, max_length=max_length)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def encode(self, sentences: Sequence[str]) -> Encoded:
        """Ids of the sentences' tokens, special ones added: at most `max_length` each."""
        ids = self.tokenizer(list(sentences), truncation=True, max_length=self.max_length)["input_ids"]
        lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        return Encoded(np.concatenate(ids).astype(np.int64), lengths)

    def save(self, directory: str | Path) -> None:
        """Writes tokenizer and shape."""
        self.tokenizer.save_pretrained(directory)
        self.shape.save_pretrained(directory)


def untrained(directory: str | Path) -> tuple[nn.Module, Any]:
    """A model of a checkpoint's shape with fresh weights, and its tokenizer."""
    shape, tokenizer = _from_pretrained(Path(directory), "AutoConfig", "AutoTokenizer")
    model: nn.Module = _transformers().AutoModel.from_config(shape)
    return model.float(), tokenizer


def _load(directory: Path) -> tuple[nn.Module, Any]:
    """The model, in float32, and the tokenizer of a checkpoint."""
    model, tokenizer = _from_pretrained(directory, "AutoModel", "AutoTokenizer")
    return model.float(), tokenizer


def _from_pretrained(directory: Path, *classes: str) -> list[Any]:
    transformers = _transformers()
    if not directory.is_dir():
        raise InputError(f"model: expected the directory of a checkpoint, got {str(directory)!r}")
    try:
        return [
            getattr(transformers, name).from_pretrained(directory, local_files_only=True) for name in classes
        ]
    except (OSError, ValueError) as error:
        raise InputError(f"model: {directory} holds no checkpoint that can be loaded: {error}") from error


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ImportError(
            "HuggingFaceEncoder needs the transformers library: pip install 'fastqt[hf]'"
        ) from error
