"""PyLate's contrastive losses of ColBERT models, without the scores of all pairs of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastqt.cached import cached_embeddings
from fastqt.checks import check_flag, check_number, check_size, shown
from fastqt.integrations._gathering import group_of
from fastqt.losses import maxsim_loss

__all__ = ["CachedContrastive", "Contrastive"]

MAXSIM = ("ColBERTScores", "colbert_scores")  # what PyLate calls the score that is computed here


class Contrastive(nn.Module):
    """A loss with the arguments, values and gradients of `pylate.losses.Contrastive`, in the trainer's place.

    As in PyLate, a token that is not scored has the similarity 0 with all tokens, so that no maximum over
    a padded document is below 0. With `gather_across_devices` the value is, times the number of devices, the
    mean over all devices' queries, where PyLate's is that over the own ones; the gradients that
    DistributedDataParallel averages are the same. On a GPU it has kernels of its own, whose time
    beside those of PyLate 1.5.1 and later nobody has measured.

    Args:
        model: a `pylate.models.ColBERT`, or another module that maps features to a dict with
            "token_embeddings", (B, T, D), and has a `skiplist`.
        score_metric: PyLate's ColBERT score or None, which is the same.
        score_mini_batch_size: is not needed, and changes nothing.
        size_average: the mean over the queries, otherwise their sum.
        gather_across_devices: the documents of all devices are candidates.
        temperature: what scores are divided by.

    Raises:
        TypeError, ValueError: naming the argument; a score of another kind needs PyLate's own loss.

    Example:
        >>> import torch
        >>> from fastqt.integrations.pylate import Contrastive
        >>> class Model(torch.nn.Embedding):
        ...     skiplist, do_query_expansion = [3], True
        ...     def forward(self, features):
        ...         return {"token_embeddings": super().forward(features["input_ids"])}
        >>> features = {"input_ids": torch.randint(9, (2, 5)), "attention_mask": torch.ones(2, 5)}
        >>> Contrastive(Model(9, 4))([features, features]).shape
        torch.Size([])
    """

    def __init__(
        self,
        model: nn.Module,
        score_metric: Callable[..., Tensor] | None = None,
        score_mini_batch_size: int | None = None,
        size_average: bool = True,
        gather_across_devices: bool = False,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: want a ColBERT model of PyLate or another module, got {shown(model)}")
        name = getattr(score_metric, "__name__", type(score_metric).__name__)
        if score_metric is not None and name not in MAXSIM:
            raise ValueError(
                f"score_metric: want None or PyLate's ColBERTScores, got {shown(score_metric)}; others need "
                "PyLate's own loss"
            )
        if score_mini_batch_size is not None:
            check_size("score_mini_batch_size", score_mini_batch_size)
        check_flag("size_average", size_average)
        check_flag("gather_across_devices", gather_across_devices)
        check_number("temperature", temperature)
        if temperature <= 0:
            raise ValueError(f"temperature: want a positive number, got {temperature}")

        self.model = model
        self.score_metric = score_metric
        self.score_mini_batch_size = score_mini_batch_size
        self.size_average = size_average
        self.gather_across_devices = gather_across_devices
        self.temperature = temperature

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The loss, a scalar, of the columns of queries, of documents, and of any number of hard negatives.

        The trainer passes labels to every loss; they are ignored.
        """
        columns = list(sentence_features)
        owner: Any = self.model if hasattr(self.model, "skiplist") else self.model.module  # of DDP
        vectors = [F.normalize(x, dim=2) for x in self.embed(columns)]
        masks = [_scored(features, owner.skiplist) for features in columns[1:]]
        masks.insert(0, columns[0]["attention_mask"].bool())

        # A vector of zeros has the similarity 0 with all.
        expands = getattr(owner, "do_query_expansion", True)
        queries = vectors[0] if expands else vectors[0] * masks[0][:, :, None]
        most = max(x.shape[1] for x in vectors[1:])
        documents = [
            F.pad(x * mask[:, :, None], (0, 0, 0, most - x.shape[1]))
            for x, mask in zip(vectors[1:], masks[1:], strict=True)
        ]
        group = group_of(self)
        loss = maxsim_loss(
            queries,
            torch.cat(documents),
            scale=1 / self.temperature,
            normalize=False,
            reduction="mean" if self.size_average else "sum",
            group=group,
        )
        return loss if group is None else loss * group.size

    def embed(self, columns: list[dict[str, Tensor]]) -> Sequence[Tensor]:
        """The vectors of each column's tokens, (B, T, D)."""
        return [self.model(features)["token_embeddings"] for features in columns]


class CachedContrastive(Contrastive):
    """The same for batches whose graph does not fit into the memory: it holds that of one mini-batch.

    It has the arguments and values of `pylate.losses.CachedContrastive`. Its gradients are of the value.
    PyLate's are so with `size_average=False` alone: with the mean they are those of the sum, larger by the
    number of queries. The model runs twice on all mini-batches but one, as `fastqt.cached_backward` says.

    Args:
        mini_batch_size: the most texts of a column that the model embeds at once.
        show_progress_bar: is not needed, and shows nothing.
        model, score_metric, score_mini_batch_size, size_average, gather_across_devices, temperature: as of
            `Contrastive`.

    Raises:
        TypeError, ValueError: naming the argument.

    Example:
        >>> import torch
        >>> from fastqt.integrations.pylate import CachedContrastive
        >>> class Model(torch.nn.Embedding):
        ...     skiplist, do_query_expansion = [3], True
        ...     def forward(self, features):
        ...         return {"token_embeddings": super().forward(features["input_ids"])}
        >>> features = {"input_ids": torch.randint(9, (4, 5)), "attention_mask": torch.ones(4, 5)}
        >>> CachedContrastive(Model(9, 4), mini_batch_size=2)([features, features]).backward()
    """

    def __init__(
        self,
        model: nn.Module,
        score_metric: Callable[..., Tensor] | None = None,
        mini_batch_size: int = 32,
        score_mini_batch_size: int | None = None,
        size_average: bool = True,
        gather_across_devices: bool = False,
        show_progress_bar: bool = False,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(
            model, score_metric, score_mini_batch_size, size_average, gather_across_devices, temperature
        )
        check_size("mini_batch_size", mini_batch_size)
        check_flag("show_progress_bar", show_progress_bar)
        self.mini_batch_size = mini_batch_size
        self.show_progress_bar = show_progress_bar

    def embed(self, columns: list[dict[str, Tensor]]) -> Sequence[Tensor]:
        """The vectors of each column's tokens, whose backward pass embeds the mini-batches again."""
        model = self.model

        def encoder(**features: Any) -> Tensor:
            vectors: Tensor = model(features)["token_embeddings"]
            return vectors

        return cached_embeddings([encoder] * len(columns), columns, chunk_size=self.mini_batch_size)


def _scored(features: dict[str, Tensor], skiplist: Iterable[int]) -> Tensor:
    """Which tokens of documents are scored, (B, T) bool."""
    tokens = features["input_ids"]
    skipped = torch.isin(tokens, torch.as_tensor(list(skiplist), dtype=tokens.dtype, device=tokens.device))
    return features["attention_mask"].bool() & ~skipped
