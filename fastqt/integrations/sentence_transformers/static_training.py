"""The library's trainer of static embeddings, with sparse gradients and texts that are tokenised once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, get_args

import datasets
import numpy as np
import pyarrow as pa
import torch
from datasets.table import InMemoryTable
from sentence_transformers.base.data_collator import BaseDataCollator
from sentence_transformers.base.trainer import BaseTrainer
from sentence_transformers.sentence_transformer.modules.static_embedding import (
    StaticEmbedding as _StaticEmbedding,
)
from torch import Tensor, nn

import fastqt.optim
from fastqt.checks import check_option
from fastqt.integrations.sentence_transformers.static_embedding import (
    Features,
    StaticEmbedding,
    encoded,
    features,
)
from fastqt.optim.adam import Rows

Trainer = TypeVar("Trainer", bound=Any)
DATA_SETS = "train_dataset", "eval_dataset"  # of a trainer
TEXTS_AT_ONCE = 16_384  # of which the tokenizer has objects at a time


def accelerate_static(trainer: Trainer, *, rows: Rows = "replayed") -> Trainer:
    """Lets a trainer of the library train static embeddings as fast as `fastqt train` does.

    The model, its loss, the arguments of the trainer and the files that it writes stay as they are. Three
    things change:

    - Each StaticEmbedding of the model becomes one of this package, with the same parameter. Its gradient has
      the rows of the batch alone, summed once over all columns.
    - The optimiser, AdamW, is that of `fastqt.optim`, with the trainer's groups of parameters, learning
      rates, schedule and weight decay. The trainer's clipping (`max_grad_norm`) reads the sparse gradients.
    - Texts of the data sets are tokenised here, each distinct text once, and kept as arrays of ids: the
      columns of text hold then the number of a text, which the collator knows, in place of the text.
      Tokenised batch by batch as before are iterable data sets, those that have a transform, and those of a
      model that does not begin with its StaticEmbedding, such as one with a Router.

    The loss is not replaced: give the trainer one of fastqt, or call `patch` before.

    Args:
        trainer: a SentenceTransformerTrainer of one process that has not trained yet.
        rows: what a step does to the rows of the table that are not in the batch, as of `fastqt.optim.Adam`:
            "replayed" and "all" equal the AdamW that the trainer has otherwise, but for rounding; "touched"
            leaves them as they are.

    Returns:
        The same trainer.

    Raises:
        TypeError: no trainer of the library, or one with a collator of another kind.
        ValueError: a model without a StaticEmbedding; a trainer that makes models (`model_init`), that has
            its optimizer already, that is to have another one than AdamW, or that is one of several
            processes; unknown rows; or a text that is None.

    Example:
        >>> from datasets import Dataset
        >>> from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
        >>> from tokenizers import Tokenizer
        >>> from fastqt.integrations import sentence_transformers as ours
        >>> module = ours.StaticEmbedding(Tokenizer.from_file("bert/tokenizer.json"), embedding_dim=16)
        >>> model = SentenceTransformer(modules=[module], device="cpu")
        >>> pairs = Dataset.from_dict({"anchor": ["the cat", "a mat"], "positive": ["cats", "mats"]})
        >>> loss = ours.MatryoshkaLoss(model, ours.MultipleNegativesRankingLoss(model), [16, 8])
        >>> trainer = SentenceTransformerTrainer(model, train_dataset=pairs, loss=loss)
        >>> trainer = ours.accelerate_static(trainer)
        >>> trainer.train_dataset["anchor"][:]
        [0, 1]
    """
    check_option("rows", rows, get_args(Rows))
    _check(trainer)
    places = _places(trainer.model)
    if not places:
        raise ValueError("trainer: want a model with a StaticEmbedding, got one without")
    for parent, name, module in places:
        setattr(parent, name, StaticEmbedding.of(module, sparse=True))
    _set_optimizer(trainer, rows)
    _set_clipping(trainer.accelerator)
    if isinstance(trainer.model[0], StaticEmbedding):
        _embed_together(trainer, trainer.model[0])
        _tokenize_once(trainer, trainer.model[0].tokenizer)
    return trainer


def _check(trainer: Any) -> None:
    if not isinstance(trainer, BaseTrainer):
        raise TypeError(f"trainer: want a SentenceTransformerTrainer, got {type(trainer).__name__}")
    if not isinstance(trainer.data_collator, BaseDataCollator):
        kind = type(trainer.data_collator).__name__
        raise TypeError(f"trainer: want the library's data collator, got {kind}")
    if trainer.model_init is not None:
        raise ValueError("trainer: want one with a model, got one with model_init")
    if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        raise ValueError("trainer: want one without an optimizer of its own, got one that has one")
    if (processes := max(trainer.args.world_size, trainer.args.n_gpu)) > 1:
        raise ValueError(f"trainer: want one process with one device, got {processes}")
    kind = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)[0]
    if kind is not torch.optim.AdamW:
        raise ValueError(f"trainer: want optim adamw_torch or adamw_torch_fused, got {trainer.args.optim}")


def _places(model: nn.Module) -> list[tuple[nn.Module, str, _StaticEmbedding]]:
    """The modules that hold a StaticEmbedding, and the names that they hold it by."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, _StaticEmbedding)
    ]


def _set_optimizer(trainer: Any, rows: Rows) -> None:
    """Lets the trainer make our AdamW from the settings and groups that it has for torch's."""
    theirs = trainer.get_optimizer_cls_and_kwargs

    def ours(*args: Any, **kwargs: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        _, options = theirs(*args, **kwargs)
        options.pop("fused", None)  # which ours is
        return fastqt.optim.AdamW, {**options, "rows": rows}

    trainer.get_optimizer_cls_and_kwargs = ours


def _set_clipping(accelerator: Any) -> None:
    """Lets the trainer clip sparse gradients, whose norm torch's own function cannot compute.

    The trainer asks for the norm in each step, also where it does not clip.
    """

    def clip(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        if norm_type != 2:
            raise ValueError(f"norm_type: want 2, got {norm_type}")
        accelerator.unscale_gradients()
        return fastqt.optim.clip_grad_norm_(parameters, max_norm)

    accelerator.clip_grad_norm_ = clip


def _embed_together(trainer: Any, module: StaticEmbedding) -> None:
    """Gives the table one gradient of all columns of a step, where several would have to be added up.

    What the loss asks of the model stays as it is, and so do the vectors that it gets.
    """
    theirs = trainer.compute_loss

    def compute_loss(model: nn.Module, inputs: Features, *args: Any, **kwargs: Any) -> Any:
        columns, _ = trainer.collect_features(inputs)
        with module.together(columns):
            return theirs(model, inputs, *args, **kwargs)

    trainer.compute_loss = compute_loss


class TokenizedTexts:
    """Distinct texts by their numbers, as token ids: what the collator calls in place of the model."""

    def __init__(self, tokenizer: Any, texts: pa.LargeStringArray, prompts: set[str | None]) -> None:
        self.tokenizer = tokenizer
        self.of_prompt = {prompt: self._tokenized(texts, prompt) for prompt in prompts}

    def _tokenized(self, texts: pa.LargeStringArray, prompt: str | None) -> tuple[np.ndarray, ...]:
        """The ids of all texts in one, where each text begins, and the length of each."""
        parts = [
            encoded(self.tokenizer, texts[i : i + TEXTS_AT_ONCE].to_pylist(), prompt)
            for i in range(0, len(texts), TEXTS_AT_ONCE)
        ]
        lengths = np.concatenate([np.zeros(0, np.int64), *(lengths for _, lengths in parts)])
        ids = np.concatenate([np.zeros(0, np.int32), *(ids for ids, _ in parts)])
        return ids, lengths.cumsum() - lengths, lengths

    def __call__(
        self, inputs: Sequence[int] | Sequence[str], prompt: str | None = None, **kwargs: Any
    ) -> Features:
        """The features of texts that are given by their numbers, or of others by themselves."""
        if isinstance(inputs[0], str):
            return features(*encoded(self.tokenizer, inputs, prompt))  # type: ignore[arg-type]  # all are texts
        all_ids, all_starts, all_lengths = self.of_prompt[prompt or None]
        numbers = np.array(inputs)
        lengths, starts = all_lengths[numbers], all_starts[numbers]

        # Positions run on within a text, and jump to the beginning of the next one after it.
        jumps = np.repeat(starts - (lengths.cumsum() - lengths), lengths)
        return features(all_ids[np.arange(len(jumps)) + jumps], lengths)


def _tokenize_once(trainer: Any, tokenizer: Any) -> None:
    """Puts the numbers of texts in the place of texts, and makes the collator know them.

    Equal texts have the same number, in all columns, so that batch samplers find duplicates as before.
    """
    collator = trainer.data_collator
    sets = [part for name in DATA_SETS for part in _parts(getattr(trainer, name)) if _keeps_texts(part)]
    tables = [part.with_format("arrow")[:] for part in sets]
    places = [
        (i, name)
        for i, table in enumerate(tables)
        for name in table.column_names
        if name not in collator.valid_label_columns and pa.types.is_string(table.schema.field(name).type)
    ]
    if not places:
        return
    columns = [_texts(tables[i], name) for i, name in places]
    texts = pa.concat_arrays(columns).dictionary_encode()
    collator.preprocess_fn = TokenizedTexts(tokenizer, texts.dictionary, _prompts(collator.prompts))

    begin = 0
    for (i, name), column in zip(places, columns, strict=True):
        numbers = texts.indices[begin : begin + len(column)]
        tables[i] = tables[i].set_column(tables[i].column_names.index(name), name, numbers)
        begin += len(column)
    # Without metadata, which say that the columns are text.
    numbered = {
        id(part): datasets.Dataset(InMemoryTable(table.replace_schema_metadata(None)))
        for part, table in zip(sets, tables, strict=True)
    }
    for name in DATA_SETS:
        value = getattr(trainer, name)
        if isinstance(value, dict):
            parts = {key: numbered.get(id(part), part) for key, part in value.items()}
            setattr(trainer, name, type(value)(parts))
        else:
            setattr(trainer, name, numbered.get(id(value), value))


def _parts(value: Any) -> list[Any]:
    """The data sets of an argument of the trainer."""
    return [*value.values()] if isinstance(value, dict) else [value]


def _keeps_texts(part: Any) -> bool:
    """Whether a data set's texts are the same in each epoch, and known before the training."""
    return isinstance(part, datasets.Dataset) and part.format["type"] != "custom"


def _texts(table: pa.Table, name: str) -> pa.LargeStringArray:
    column = table.column(name)
    if column.null_count:
        raise ValueError(f"trainer: want a text in each row, got {column.null_count} None in column {name!r}")
    chunks = [chunk.cast(pa.large_string()) for chunk in column.chunks]
    return pa.concat_arrays([pa.array([], pa.large_string()), *chunks])


def _prompts(prompts: Any) -> set[str | None]:
    """All prompts that a collator may give a text: that of all columns, or of some columns or data sets."""
    if isinstance(prompts, dict):
        return {None}.union(*(_prompts(prompt) for prompt in prompts.values()))
    return {prompts or None}
