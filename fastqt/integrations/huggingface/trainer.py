"""An encoder with a loss of fastqt as a model that `transformers.Trainer` trains."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastqt.checks import check_option, shown
from fastqt.distributed.group import GROUPS, GroupLike, as_group
from fastqt.integrations.huggingface.encoder import HuggingFaceEncoder, Pooling
from fastqt.integrations.huggingface.loading import directory_of, tensors_of, transformers
from fastqt.losses import simcse_loss
from fastqt.nn.losses.base import Loss, check_options

_library: Any = transformers()
if TYPE_CHECKING:  # What a type checker, which does not read the library, has to know of its classes.
    _ModelOutput = dict[str, Any]
    _PreTrainedModel = nn.Module
else:
    _ModelOutput, _PreTrainedModel = _library.utils.ModelOutput, _library.PreTrainedModel

# How names begin in the state of ContrastiveModel: those of the checkpoint's own weights, and those of the
# loss's parameters, which have the same names in files.
INNER, LOSS = "encoder.model.", "loss."
Self = TypeVar("Self", bound="ContrastiveModel")


@dataclass
class ContrastiveOutput(_ModelOutput):
    """What `ContrastiveModel` returns.

    Attributes:
        loss: a scalar.
        embeddings: (B, V, D) the sentence vectors: of two views of each sentence, or of each column.

    Example:
        >>> import fastqt
        >>> from fastqt.integrations.huggingface import ContrastiveModel
        >>> model = ContrastiveModel("bert", fastqt.simcse_loss)
        >>> inputs = model.encoder.tokenizer(["the cat sat", "a mat"], padding=True, return_tensors="pt")
        >>> model(**inputs).embeddings.shape[:2]  # two views of two sentences
        torch.Size([2, 2])
    """

    loss: Tensor | None = None
    embeddings: Tensor | None = None


class ContrastiveModel(_PreTrainedModel):
    """An encoder with a contrastive loss, for `transformers.Trainer(model=...)`.

    A batch with one column of sentences gives two views of each, which differ by the model's dropout
    (SimCSE); in evaluation mode, without dropout, both are equal. Two and three columns are pairs and
    triplets, whose third column is given to a loss as its third argument, among its `documents`, or as its
    `negatives`. Where gradients are accumulated over several batches, each of them has its own negatives,
    and the Trainer takes the mean of their losses.

    Args:
        encoder: a `HuggingFaceEncoder`, or the directory of a checkpoint. What `save_pretrained` wrote there
            of the loss, such as its learnt scale, is read too.
        loss: a module such as `fastqt.nn.SimCSELoss(learn_scale=True)`, or a function such as
            `fastqt.clip_loss`, of one (B, D) tensor for each view or column. If it has an argument `labels`,
            it is given the labels of the batch too, and one view of each sentence.
        pooling, max_length: as of `HuggingFaceEncoder`, for the directory of a checkpoint.
        group: "auto" takes the loss over the batch of all processes of the default group of
            torch.distributed, if there are several and the loss has an argument `group`; or an argument of
            that name; or None for the loss of each process alone. The Trainer averages gradients over the
            processes, and so has to do the group.
        **options: keyword arguments of a loss function.

    Raises:
        ImportError: the `transformers` library is not installed.
        InputError, ValueError, TypeError: as in `HuggingFaceEncoder`; options that the loss does not have or
            refuses, or a loss that is not one scalar.

    Example:
        >>> import fastqt
        >>> from fastqt.integrations.huggingface import ContrastiveModel
        >>> model = ContrastiveModel("bert", fastqt.nn.SimCSELoss(learn_scale=True))
        >>> inputs = model.encoder.tokenizer(["the cat sat", "a mat"], padding=True, return_tensors="pt")
        >>> model(**inputs).loss.shape
        torch.Size([])
    """

    accepts_loss_kwargs = False  # the Trainer then divides the loss by the batches that it accumulates

    def __init__(
        self,
        encoder: HuggingFaceEncoder | str | Path,
        loss: nn.Module | Callable[..., Tensor] = simcse_loss,
        *,
        pooling: Pooling | None = None,
        max_length: int | None = None,
        group: GroupLike | str | None = "auto",
        **options: Any,
    ) -> None:
        directory = None
        if isinstance(encoder, HuggingFaceEncoder):
            for name, value in (("pooling", pooling), ("max_length", max_length)):
                if value is not None:
                    raise TypeError(f"{name}: want it when the HuggingFaceEncoder is made, got {value!r}")
        else:
            directory = directory_of("encoder", encoder)
            longest = 128 if max_length is None else max_length
            encoder = HuggingFaceEncoder(directory, pooling=pooling or "cls", max_length=longest)

        function, fixed = _function(loss)
        _check_options(loss, fixed, options)
        parameters = inspect.signature(function).parameters

        if fixed.get("group") is not None:  # the module passes it itself
            group = None
        elif isinstance(group, str):
            check_option("group", group, ("auto",))
        elif group is not None and not isinstance(group, GROUPS):
            raise TypeError(
                f"group: want 'auto', None, a Group, a ProcessGroup or a DeviceMesh, got {shown(group)}"
            )
        elif group is not None and "group" not in parameters:
            raise ValueError("group: want 'auto' or None for a loss without this argument, got another")

        # The class of transformers chooses how a configuration that it is given computes attention, which is
        # not to change that of the encoder's model.
        super().__init__(_library.PreTrainedConfig())

        self.config, self.name_or_path = encoder.model.config, encoder.model.config.name_or_path
        self._no_split_modules = getattr(encoder.model, "_no_split_modules", None)
        self.supports_gradient_checkpointing = getattr(
            encoder.model, "supports_gradient_checkpointing", False
        )

        self.encoder, self.loss, self.options, self.group = encoder, loss, options, group
        self._takes_labels, self._takes_group = "labels" in parameters, "group" in parameters
        self._takes_third = _third(parameters)

        if encoder.pooling != "cls" and getattr(encoder.model, "pooler", None) is not None:
            encoder.model.pooler.requires_grad_(False)  # DDP would wait for its gradients

        if directory is not None:
            self._load_loss(directory)

    @classmethod
    def from_pretrained(cls: type[Self], directory: str | Path, **options: Any) -> Self:
        """Reads a directory that `save_pretrained` or `Trainer.save_model` wrote.

        The options are the arguments of the class, `loss` too; none of them is stored.
        """
        return cls(directory, **options)

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        **options: Any,
    ) -> None:
        """Writes a checkpoint that `transformers`, `HuggingFaceEncoder` and `from_pretrained` load.

        Only the main process writes, and the others take part. `state_dict` is what to write, by default the
        state of this model. The options are those of the method of `transformers`.
        """
        state = self.state_dict() if state_dict is None else state_dict
        # The Trainer resumes by the names of this model, not by those that older versions gave its weights.
        options.setdefault("save_original_format", False)
        named = {name.removeprefix(INNER): tensor for name, tensor in state.items()}
        self.encoder.model.save_pretrained(
            save_directory, is_main_process=is_main_process, state_dict=named, **options
        )
        if is_main_process:
            self.encoder.tokenizer.save_pretrained(save_directory)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads a state; the names may also be those of the files that `save_pretrained` writes."""
        if not set(state_dict) <= set(self.state_dict()):
            state_dict = {
                name if name.startswith(LOSS) else INNER + name: tensor for name, tensor in state_dict.items()
            }
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        positive_input_ids: Tensor | None = None,
        positive_attention_mask: Tensor | None = None,
        positive_token_type_ids: Tensor | None = None,
        negative_input_ids: Tensor | None = None,
        negative_attention_mask: Tensor | None = None,
        negative_token_type_ids: Tensor | None = None,
        return_loss: bool = True,
        return_dict: bool | None = None,
        **others: Tensor,
    ) -> ContrastiveOutput | tuple[Tensor, ...]:
        """The loss of a batch and its sentence vectors.

        Args:
            input_ids: (B, L) int64, padded on the right; or V columns at once, (B, V, L).
            attention_mask: of the same shape, 1 for tokens and 0 for padding; by default there is none.
            token_type_ids: of the same shape, for models that take them.
            positive_input_ids, positive_attention_mask, positive_token_type_ids: the second column.
            negative_input_ids, negative_attention_mask, negative_token_type_ids: the third column.
            return_loss: otherwise the vectors alone, one of each sentence.
            return_dict: False for a tuple.
            **others: `labels`, for a loss that takes them; other losses do without. The Trainer would want
                labels for the loss of an evaluation if an argument had this name.

        Returns:
            The output, whose loss is a scalar.

        Raises:
            TypeError: an argument that there is not.
            ValueError: a loss that takes labels and has none, columns of other numbers of rows, or as of the
                loss.
        """
        if unknown := sorted(others.keys() - {"labels"}):
            raise TypeError(f"{', '.join(unknown)}: no argument of ContrastiveModel")
        columns = [
            _named(input_ids, attention_mask, token_type_ids),
            _named(positive_input_ids, positive_attention_mask, positive_token_type_ids),
            _named(negative_input_ids, negative_attention_mask, negative_token_type_ids),
        ]
        columns = [column for column in columns if "input_ids" in column]
        vectors = self._vectors(columns, makes_views=return_loss and not self._takes_labels)
        loss = self._loss_of(vectors, others.get("labels")) if return_loss else None
        embeddings = torch.stack(vectors, dim=1)
        if return_dict is not False:
            return ContrastiveOutput(loss=loss, embeddings=embeddings)
        return (embeddings,) if loss is None else (loss, embeddings)

    def get_input_embeddings(self) -> nn.Module:
        """The table of the model's word vectors."""
        table: nn.Module = self.encoder.model.get_input_embeddings()
        return table

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the table of the model's word vectors."""
        self.encoder.model.set_input_embeddings(value)

    def _vectors(self, columns: list[dict[str, Tensor]], makes_views: bool) -> list[Tensor]:
        """The sentence vectors (B, D) of each column, or of two views of the only one."""
        first = columns[0]
        if first["input_ids"].dim() == 3:
            if len(columns) > 1:
                raise ValueError("input_ids: want (B, L) where positive_input_ids is given, got (B, V, L)")
            if first["input_ids"].shape[1] > 1:
                rows, width = first["input_ids"].shape[:2]
                flat = {name: feature.flatten(0, 1) for name, feature in first.items()}
                return list(self.encoder.embed(**flat).view(rows, width, -1).unbind(1))
            columns = [{name: feature[:, 0] for name, feature in first.items()}]
        if len(columns) > 1 or not makes_views:
            return [self.encoder.embed(**column) for column in columns]
        if self.training:
            twice = {name: torch.cat([feature, feature]) for name, feature in columns[0].items()}
            return list(self.encoder.embed(**twice).chunk(2))
        return [self.encoder.embed(**columns[0])] * 2

    def _loss_of(self, vectors: list[Tensor], labels: Tensor | None) -> Tensor:
        """The loss of the sentence vectors of views or columns, over the batch of all processes."""
        arguments: dict[str, Any] = {}
        if self._takes_labels:
            if labels is None:
                raise ValueError("labels: want those of the batch, because the loss takes labels, got None")
            arguments["labels"] = labels
        if (group := self._group()) is not None:
            arguments["group"] = group
        loss: Any = self.loss
        if group is not None and isinstance(self.loss, Loss):
            # A module refuses in a call what is an option.
            loss, arguments = type(self.loss).function, {**self.loss.function_options(), **arguments}

        columns: list[Any] = list(vectors)
        if len(columns) > 2 and self._takes_third == "documents":
            columns = [columns[0], columns[1:]]
        elif len(columns) > 2 and self._takes_third == "negatives":
            arguments["negatives"] = columns.pop()
        value: Tensor = loss(*columns, **self.options, **arguments)
        if value.dim():
            raise ValueError(f"loss: want one that returns a scalar, got shape {tuple(value.shape)}")
        return value

    def _group(self) -> GroupLike | None:
        """What the loss is to be given as its `group`; None for nothing."""
        if not isinstance(self.group, str):
            return self.group
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        everyone: Any = dist.group.WORLD if several else None
        return as_group(everyone) if several and self._takes_group else None

    def _load_loss(self, directory: Path) -> None:
        """Loads the parameters of the loss that a checkpoint holds."""
        if isinstance(self.loss, nn.Module) and (wanted := self.loss.state_dict()):
            stored = tensors_of(directory, LOSS)
            self.loss.load_state_dict({name: stored.get(name, tensor) for name, tensor in wanted.items()})


def _named(
    input_ids: Tensor | None, attention_mask: Tensor | None, token_type_ids: Tensor | None
) -> dict[str, Tensor]:
    """The features of a column that are given, by the names that models have for them."""
    names = ("input_ids", "attention_mask", "token_type_ids")
    features = zip(names, (input_ids, attention_mask, token_type_ids), strict=True)
    return {name: feature for name, feature in features if feature is not None}


def _function(loss: nn.Module | Callable[..., Tensor]) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """What a loss computes, and the options that it fixes itself."""
    if isinstance(loss, Loss):
        return type(loss).function, loss.options
    if not callable(loss):
        raise TypeError(f"loss: want a module or a function, got {type(loss).__name__}")
    return (loss.forward if isinstance(loss, nn.Module) else loss), {}


def _third(parameters: Mapping[str, inspect.Parameter]) -> str | None:
    """The argument that takes the negatives of triplets, where it is not a third one by place."""
    by_place = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if by_place[1:] == ["documents"]:
        return "documents"  # a sequence: the positives, and then the negatives
    return "negatives" if len(by_place) == 2 and "negatives" in parameters else None


def _check_options(
    loss: nn.Module | Callable[..., Tensor], fixed: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Checks the options of a loss: those that it fixes itself, and those that are given with it."""
    if options and isinstance(loss, nn.Module):
        raise TypeError(f"{', '.join(options)}: want it when {type(loss).__name__} is made")
    if not isinstance(loss, nn.Module):
        check_options(loss, options)
    if {**fixed, **options}.get("reduction") == "none":
        raise ValueError("reduction: want one that gives a scalar, got 'none'")
