"""A checkpoint as a sentence encoder, to train with fastqt's losses and to evaluate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fastqt.checks import check_option, check_size
from fastqt.integrations.huggingface.loading import (
    CheckpointVocabulary,
    check_tokenizer,
    directory_of,
    load_model,
)
from fastqt.nn.encoders import Encoder, check_batch
from fastqt.nn.modes import evaluating
from fastqt.nn.tokens import list_of_texts, pad

Pooling = Literal["cls", "cls_before_pooler", "mean"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


class HuggingFaceEncoder(Encoder):
    """A checkpoint of the `transformers` library (the extra `hf`) as a sentence encoder.

    It takes the checkpoint's own token ids, which `tokenize` makes from text. Two calls in training mode give
    the two views that `fastqt.simcse_loss` needs, because the model's dropout differs between them.

    Args:
        model: a directory with a model and its tokenizer, as `save` writes it; nothing is ever downloaded. Or
            a loaded model, which keeps its dtype and device.
        tokenizer: the tokenizer of a loaded model; by default that of the directory.
        pooling: "cls" takes the first token's vector from the model's pooler, which starts from random
            weights if the checkpoint has none; "cls_before_pooler" takes the last hidden state of the first
            token; "mean" takes the mean of the last hidden states of all tokens, including special ones.
        max_length: the number of tokens of a sentence that `tokenize` keeps, including special ones.

    Raises:
        ImportError: the `transformers` library is not installed.
        InputError: the directory does not exist or holds no checkpoint.
        ValueError: an unknown pooling, "cls" for a model without a pooler, max_length below 1, or a loaded
            model without a tokenizer.

    Example:
        >>> from fastqt.integrations.huggingface import HuggingFaceEncoder
        >>> encoder = HuggingFaceEncoder("bert", pooling="mean")  # the directory of a checkpoint
        >>> tokens, lengths = encoder.tokenize(["the cat sat", "a mat"])
        >>> encoder(tokens, lengths).shape == (2, encoder.embedding_dim)
        True

    Source: Gao et al., "SimCSE" (arXiv:2104.08821), for the three poolings and their names.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        tokenizer: Any = None,
        *,
        pooling: Pooling = "cls",
        max_length: int = 128,
    ) -> None:
        check_option("pooling", pooling, POOLINGS)
        check_size("max_length", max_length)

        loaded: Any = model
        if not isinstance(model, nn.Module):
            loaded, own_tokenizer = load_model(directory_of("model", model))
            tokenizer = own_tokenizer if tokenizer is None else tokenizer
        elif tokenizer is None:
            raise ValueError("tokenizer: want the loaded model's, got None")

        if pooling == "cls" and getattr(loaded, "pooler", None) is None:
            raise ValueError(
                f"pooling: want 'cls_before_pooler' or 'mean' for a {type(loaded).__name__}, which has "
                "no pooler, got 'cls'"
            )

        check_tokenizer(tokenizer)

        super().__init__()
        self.model = loaded
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.max_length = max_length
        self.embedding_dim = int(self.model.config.hidden_size)

    def tokenize(self, sentences: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Converts B sentences to token ids, with special tokens.

        Returns:
            tokens: (B, L) int64, padded on the right with 0, on the CPU.
            lengths: (B,) int64, on the CPU.
        """
        config = self.model.config
        return pad(CheckpointVocabulary(self.tokenizer, config, max_length=self.max_length).encode(sentences))

    @property
    def word_table(self) -> Tensor:
        """(V, embedding_dim), the word vectors of the model."""
        table: Tensor = self.model.get_input_embeddings().weight
        return table

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        check_batch(tokens, lengths)
        if not len(lengths) or not lengths.any():
            return torch.zeros(len(tokens), self.embedding_dim, device=tokens.device, dtype=self.model.dtype)
        output, valid = self._output(tokens, lengths)
        vectors = self.pooled(output, valid)
        result: Tensor = vectors.masked_fill((lengths == 0).unsqueeze(1), 0)
        return result

    def states(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """The last hidden states of all n tokens, one sentence after the other, (n, embedding_dim).

        Arguments and errors are those of `Encoder.forward`.
        """
        check_batch(tokens, lengths)
        if not len(lengths) or not lengths.any():
            return torch.zeros(0, self.embedding_dim, device=tokens.device, dtype=self.model.dtype)
        output, valid = self._output(tokens, lengths)
        states: Tensor = output.last_hidden_state[valid]
        return states

    def _output(self, tokens: Tensor, lengths: Tensor) -> tuple[Any, Tensor]:
        """The model's output for sentences of which one has a token, and (B, longest), where tokens are."""
        longest = int(lengths.max())
        tokens = tokens[:, :longest]
        valid = torch.arange(longest, device=tokens.device) < lengths.unsqueeze(1)
        # Some models derive the positions of words from which ids are padding ids.
        padded = tokens.masked_fill(~valid, self.tokenizer.pad_token_id or 0)
        # A softmax over no key is NaN. An empty sentence attends to its padding, which nothing reads.
        attended = valid | (lengths == 0).unsqueeze(1)
        return self.model(input_ids=padded, attention_mask=attended.long()), valid

    def embed(self, input_ids: Tensor, attention_mask: Tensor | None = None, **features: Tensor) -> Tensor:
        """Encodes a batch as the models of `transformers` take it.

        Args:
            input_ids: (B, L) int64, padded on the right.
            attention_mask: (B, L), 1 for tokens and 0 for padding; by default nothing is padding.
            **features: what else the model takes, such as token_type_ids (B, L).

        Returns:
            (B, embedding_dim).
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return self.pooled(self.model(input_ids=input_ids, attention_mask=mask, **features), mask.bool())

    def pooled(self, output: Any, valid: Tensor) -> Tensor:
        """The sentence vectors (B, embedding_dim) in a model's output; valid is (B, L), False for padding."""
        if self.pooling == "cls":
            vectors: Tensor = output.pooler_output
        elif self.pooling == "cls_before_pooler":
            vectors = output.last_hidden_state[:, 0]
        else:
            states = output.last_hidden_state.masked_fill(~valid.unsqueeze(2), 0)
            vectors = states.sum(1) / valid.sum(1, keepdim=True).clamp(min=1)
        return vectors

    @torch.inference_mode()
    def encode(
        self, sentences: str | Sequence[str], *, normalize: bool = False, batch_size: int = 64
    ) -> NDArray[np.float32]:
        """Encodes n sentences of text, without dropout: (n, embedding_dim) float32, in their order.

        One text in place of a list has one vector, (embedding_dim,). `normalize` scales each vector to norm
        1. Batches of `batch_size` are made of sentences of similar length. Several threads may encode at the
        same time, but not while another one trains.
        """
        if isinstance(sentences, str):
            one: NDArray[np.float32] = self.encode([sentences], normalize=normalize, batch_size=batch_size)[0]
            return one
        sentences = list_of_texts("sentences", sentences)
        check_size("batch_size", batch_size)

        result = np.empty((len(sentences), self.embedding_dim), dtype=np.float32)
        order = sorted(range(len(sentences)), key=lambda row: len(sentences[row]))
        with evaluating(self):
            for begin in range(0, len(order), batch_size):
                rows = order[begin : begin + batch_size]
                tokens, lengths = self.tokenize([sentences[row] for row in rows])
                vectors = self(tokens.to(self.model.device), lengths.to(self.model.device)).float()
                result[rows] = (F.normalize(vectors, dim=1) if normalize else vectors).cpu().numpy()
        return result

    def save(self, directory: str | Path) -> None:
        """Writes model and tokenizer to a directory that this class and `transformers` itself can load."""
        self.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
