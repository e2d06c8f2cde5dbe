"""Makes batches of text for `ContrastiveModel`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isnan
from typing import Any

import numpy as np
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
        columns: the names of the columns of text, the anchors first; by default all that hold a text in a row
            of the batch, or nothing in all of them, but those of labels, in their order. More than three are
            stacked as (B, V, L). Each row has a text in each column, which may be empty.
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

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The arguments of `ContrastiveModel.forward` for a batch.

        Labels, if there are any, are numbers in `label`, `labels` or `label_ids`. ValueError names the column
        and the row of the batch where a value is missing or of another kind than in the other rows.
        """
        if not rows:
            raise ValueError("rows: want at least one, got none")
        held = list(dict.fromkeys(name for row in rows for name in row))
        texts: Sequence[str] = ()
        if "input_ids" in held:
            batch = self._of_ids(rows, held)
        else:
            texts = self._names(rows, held)
            batch = self._of_text(rows, texts)

        for name in LABELS:
            if name in held and name not in texts:
                labels = _column(rows, name, _is_label, "a label")
                try:
                    batch["labels"] = torch.as_tensor(labels, device="cpu")
                except (TypeError, ValueError) as error:
                    raise ValueError(f"{name}: want labels of one shape in a batch: {error}") from error
                break
        return batch

    def _names(self, rows: Sequence[Mapping[str, Any]], held: list[str]) -> Sequence[str]:
        """The columns of text."""
        names = self.columns or [
            name
            for name in held
            if name not in LABELS
            and (_any_text(rows, name) or all(_is_missing(row.get(name)) for row in rows))
        ]
        missing = [name for name in names if name not in held]
        if missing or not names:
            raise ValueError(
                f"columns: want {', '.join(missing) or 'columns of text'}, got {', '.join(held) or 'none'}; "
                "the Trainer removes columns of text unless it is given remove_unused_columns=False"
            )
        return names

    def _of_text(self, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Tensor]:
        if len(names) <= len(PREFIXES):
            return {
                prefix + feature: tensor
                for prefix, name in zip(PREFIXES, names, strict=False)
                for feature, tensor in self._tokenized(rows, [name]).items()
            }
        # A row's columns follow each other, so that they can be stacked.
        flat = self._tokenized(rows, names)
        return {feature: tensor.view(len(rows), len(names), -1) for feature, tensor in flat.items()}

    def _tokenized(self, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Tensor]:
        """The padded tokens of the texts of each row in the named columns, row by row."""
        columns = [_column(rows, name, _is_text, "a text") for name in names]
        texts = [text for row in zip(*columns, strict=True) for text in row]
        features = self.tokenizer(texts, truncation=True, max_length=self.max_length)
        for place, ids in enumerate(features["input_ids"]):
            if not ids:
                row, column = divmod(place, len(names))
                raise ValueError(
                    f"{names[column]}: want a text with a token in every row, got {texts[place]!r:.100} in "
                    f"row {row} of the batch"
                )
        return self._padded({name: features[name] for name in FEATURES if name in features})

    def _of_ids(self, rows: Sequence[Mapping[str, Any]], held: list[str]) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = {}
        for prefix in PREFIXES:
            features = {
                name: [list(ids) for ids in _column(rows, prefix + name, _is_list, "a list of tokens")]
                for name in FEATURES
                if prefix + name in held
            }
            if features:
                batch |= {prefix + name: tensor for name, tensor in self._padded(features).items()}
        return batch

    def _padded(self, features: dict[str, list[list[int]]]) -> dict[str, Tensor]:
        padded: dict[str, Tensor] = dict(
            self.tokenizer.pad(features, padding_side="right", return_tensors="pt")
        )
        return padded


def _column(
    rows: Sequence[Mapping[str, Any]], name: str, fits: Callable[[Any], bool], wanted: str
) -> list[Any]:
    """The values of a column; ValueError where a row, counted from 0, has none or one that does not fit."""
    for number, row in enumerate(rows):
        if name not in row or not fits(row[name]):
            got = f"{row[name]!r:.100}" if name in row else "no such column"
            raise ValueError(
                f"{name}: want {wanted} in every row, got {got} in row {number} of the batch; columns= names "
                "the columns of text, and each of several negatives has a column of its own"
            )
    return [row[name] for row in rows]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and isnan(value))


def _is_label(value: object) -> bool:
    return not _is_missing(value) and not isinstance(value, (str, bytes))


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple, Tensor, np.ndarray)) and len(value) > 0


def _any_text(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Whether a row has a text in a column, or a list of texts, which `_column` refuses."""
    values = [row.get(name) for row in rows]
    parts = [part for value in values for part in (value if isinstance(value, (list, tuple)) else [value])]
    return any(isinstance(part, (str, bytes)) for part in parts)
