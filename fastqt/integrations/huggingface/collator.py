"""Makes batches of text for `ContrastiveModel`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastqt.checks import check_size, shown
from fastqt.integrations.huggingface.loading import check_tokenizer

PREFIXES = ("", "positive_", "negative_")  # of the names of the arguments of `ContrastiveModel`, by column
FEATURES = ("input_ids", "attention_mask", "token_type_ids")
LABELS = ("labels", "label", "label_ids")


class ContrastiveCollator:
    """Tokenises and pads the columns of a data set, for `transformers.Trainer(data_collator=...)`.

    The columns may also be tokenised already: input_ids, attention_mask and token_type_ids, and the same
    names after positive_ and negative_. With columns of text the Trainer needs `remove_unused_columns=False`,
    because it would otherwise remove what the model's forward does not name.

    Args:
        tokenizer: that of the checkpoint; the Trainer saves it with the model.
        columns: the names of the columns of text, the anchors first; by default all that hold text, in their
            order. More than three are stacked as (B, V, L).
        max_length: the number of tokens of a text that are kept, including special ones.

    Raises:
        ValueError: no column, or one twice; max_length below 1.

    Example:
        >>> from fastqt.integrations.huggingface import ContrastiveCollator, HuggingFaceEncoder
        >>> encoder = HuggingFaceEncoder("bert", pooling="mean")  # the directory of a checkpoint
        >>> collate = ContrastiveCollator(encoder.tokenizer, columns=["text", "match"])
        >>> rows = [{"text": "the cat sat", "match": "a cat"}, {"text": "a mat", "match": "the mat"}]
        >>> len(collate(rows)["input_ids"])
        2
    """

    def __init__(
        self, tokenizer: Any, columns: Sequence[str] | None = None, *, max_length: int = 128
    ) -> None:
        check_size("max_length", max_length)
        check_tokenizer(tokenizer)
        if columns is not None:
            named = isinstance(columns, Sequence) and all(isinstance(name, str) for name in columns)
            if not named or isinstance(columns, str) or not columns:
                raise ValueError(f"columns: want the names of columns, got {shown(columns)}")
        if columns is not None and len(set(columns)) < len(columns):
            raise ValueError(f"columns: want distinct ones, got {columns!r}")
        self.tokenizer, self.columns, self.max_length = tokenizer, columns, max_length

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """The arguments of `ContrastiveModel.forward` for a batch.

        Labels, if there are any, are in `label`, `labels` or `label_ids`. ValueError where there is no column
        of text, or a row without text in one.
        """
        first = rows[0]
        batch = self._of_ids(rows) if "input_ids" in first else self._of_text(rows, self._names(first))
        for name in LABELS:
            if name in first and not isinstance(first[name], str):
                batch["labels"] = torch.as_tensor([row[name] for row in rows], device="cpu")
                break
        return batch

    def _names(self, row: dict[str, Any]) -> Sequence[str]:
        """The columns of text."""
        names = self.columns or [name for name, value in row.items() if isinstance(value, str)]
        missing = [name for name in names if name not in row]
        if missing or not names:
            raise ValueError(
                f"columns: want {', '.join(missing) or 'columns of text'}, got {', '.join(row) or 'none'}; "
                "the Trainer removes columns of text unless it is given remove_unused_columns=False"
            )
        return names

    def _of_text(self, rows: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Tensor]:
        for name in names:
            for row in rows:
                if not isinstance(row[name], str):
                    raise ValueError(f"{name}: want a text in every row, got {row[name]!r:.100}")
        if len(names) <= len(PREFIXES):
            return {
                prefix + feature: tensor
                for prefix, name in zip(PREFIXES, names, strict=False)
                for feature, tensor in self._tokenized([row[name] for row in rows]).items()
            }
        # A row's columns follow each other, so that they can be stacked.
        flat = self._tokenized([row[name] for row in rows for name in names])
        return {feature: tensor.view(len(rows), len(names), -1) for feature, tensor in flat.items()}

    def _tokenized(self, sentences: list[str]) -> dict[str, Tensor]:
        features = self.tokenizer(sentences, truncation=True, max_length=self.max_length)
        return self._padded({name: features[name] for name in FEATURES if name in features})

    def _of_ids(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = {}
        for prefix in PREFIXES:
            features = {
                name: [list(row[prefix + name]) for row in rows]
                for name in FEATURES
                if prefix + name in rows[0]
            }
            if features:
                batch |= {prefix + name: tensor for name, tensor in self._padded(features).items()}
        return batch

    def _padded(self, features: dict[str, list[list[int]]]) -> dict[str, Tensor]:
        padded: dict[str, Tensor] = dict(
            self.tokenizer.pad(features, padding_side="right", return_tensors="pt")
        )
        return padded
