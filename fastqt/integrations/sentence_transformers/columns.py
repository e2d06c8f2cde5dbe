"""Any loss of fastqt on the columns of a data set."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from fastqt.cached import cached_embeddings
from fastqt.cached.encoding import CHECKS
from fastqt.checks import check_option, check_size, shown
from fastqt.losses import multiple_negatives_ranking_loss, simcse_loss
from fastqt.matryoshka import Matryoshka
from fastqt.nn.losses.base import check_options
from fastqt.options import Recheck

INFO_NCE = """
@misc{oord2019representationlearningcontrastivepredictive,
      title={Representation Learning with Contrastive Predictive Coding},
      author={Aaron van den Oord and Yazhe Li and Oriol Vinyals},
      year={2019},
      eprint={1807.03748},
      archivePrefix={arXiv},
      primaryClass={cs.LG},
      url={https://arxiv.org/abs/1807.03748},
}
"""

# Features that say where sentences lie in tensors that have no row for each of them.
WITHOUT_ROWS = frozenset(("offsets", "cu_seq_lens_q", "image_grid_thw", "video_grid_thw"))


class SentenceTransformerLoss(nn.Module):
    """A fastqt loss of the embeddings of a data set's columns, for `SentenceTransformerTrainer(loss=...)`.

    With the default loss, its values and gradients equal those of the library's
    MultipleNegativesRankingLoss on the columns (anchor, positive, negative_1, ..., negative_n), but the
    matrix of scores is not stored. `MultipleNegativesRankingLoss` of this package takes the library's
    arguments for it.

    Args:
        model: a SentenceTransformer, or another module that maps features to a dict with
            "sentence_embedding", (B, D).
        loss: a function of one (B, D) tensor per column, such as `fastqt.simcse_loss`, `fastqt.mixcse_loss`,
            `fastqt.clip_loss` or `fastqt.contrastive_loss`. The default takes any number of columns of
            negatives.
        **options: keyword arguments of the loss.

    Raises:
        TypeError: an option that the loss does not have, or that has a value of another type.
        ValueError: an option of a loss of fastqt, with a value which that refuses.

    Example:
        >>> from sentence_transformers import SentenceTransformer
        >>> from fastqt.integrations.sentence_transformers import SentenceTransformerLoss
        >>> model = SentenceTransformer("bert", device="cpu", local_files_only=True)
        >>> columns = [model.preprocess(texts) for texts in (["the cat", "a mat"], ["cats", "mats"])]
        >>> SentenceTransformerLoss(model, scale=1 / 0.05)(columns, None).shape
        torch.Size([])
    """

    prefixes: Matryoshka | None = None  # which a MatryoshkaLoss around it sets for a step

    def __init__(
        self, model: nn.Module, loss: Callable[..., Tensor] = multiple_negatives_ranking_loss, **options: Any
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: want a SentenceTransformer or another module, got {shown(model)}")
        if not callable(loss):
            raise TypeError(f"loss: want a function of embeddings, got {shown(loss)}")
        check_options(loss, options)
        self.model = model
        self.loss = loss
        self.options = options

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch, a scalar for the default options.

        `sentence_features` are the tokenised sentences of each column. The trainer passes labels to every
        loss; they are ignored.
        """
        columns = list(sentence_features)
        if self.loss is simcse_loss and len(columns) > 3:
            raise ValueError(
                f"sentence_features: want at most 3 columns for simcse_loss, got {len(columns)}; "
                "MultipleNegativesRankingLoss takes any number of negatives"
            )
        embeddings, options = self.embed(columns), self._options_of_step()
        if self.loss is multiple_negatives_ranking_loss:
            return self.loss(embeddings[0], embeddings[1:], **options)
        return self.loss(*embeddings, **options)

    def _options_of_step(self) -> dict[str, Any]:
        """The options, with those of prefixes at norm 1 if there are any."""
        if self.prefixes is None:
            return self.options
        options = {**self.options, "matryoshka": self.prefixes}
        if "normalize" in inspect.signature(self.loss).parameters:
            options["normalize"] = True
        return options

    def embed(self, columns: list[dict[str, Tensor]]) -> Sequence[Tensor]:
        """The embeddings (B, D) of each column.

        As in the library's own losses, all columns but the first one are embedded at once where they can be,
        so that dropout draws the numbers that it draws there.
        """
        try:
            from sentence_transformers.base.losses.merged_forward import embed_columns
        except ImportError:  # no library, or one before version 6, whose own losses embed a column at a time
            return [self.model(features)["sentence_embedding"] for features in columns]

        embeddings: list[Tensor] = embed_columns(self.model, columns)
        return embeddings

    def get_config_dict(self) -> dict[str, Any]:
        """The settings that the library writes to a model card."""
        return {"loss": getattr(self.loss, "__name__", repr(self.loss)), **self.options}

    @property
    def citation(self) -> str:
        """What the library writes to a model card of where the loss is from.

        Raises:
            AttributeError: only that of the default loss is known; the library then writes none.
        """
        if self.loss is not multiple_negatives_ranking_loss:
            raise AttributeError(f"citation: not known for {getattr(self.loss, '__name__', self.loss)}")
        return INFO_NCE


class CachedLoss(SentenceTransformerLoss):
    """The same, for batches whose graph does not fit into the memory: it holds that of one mini-batch.

    Values and gradients are those of `SentenceTransformerLoss`; only dropout draws other numbers than with
    the whole batch at once. The model runs twice on all mini-batches but one. `fastqt.cached_backward` says
    how it works, also under DistributedDataParallel, which reduces the gradients once a step.

    Args:
        model, loss, **options: as of `SentenceTransformerLoss`.
        mini_batch_size: the most sentences of a column that the model embeds at once.
        check: as of `fastqt.cached_backward`.

    Raises:
        TypeError: as in `SentenceTransformerLoss`, or a mini_batch_size that is no integer.
        ValueError: as in `SentenceTransformerLoss`, a mini_batch_size below 1, or an unknown check.

    Example:
        >>> from sentence_transformers import SentenceTransformer
        >>> from fastqt.integrations.sentence_transformers import CachedLoss
        >>> model = SentenceTransformer("bert", device="cpu", local_files_only=True)
        >>> columns = [model.preprocess(texts) for texts in (["the cat", "a mat"], ["cats", "mats"])]
        >>> CachedLoss(model, mini_batch_size=1)(columns, None).shape
        torch.Size([])
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor] = multiple_negatives_ranking_loss,
        *,
        mini_batch_size: int = 32,
        check: Recheck = "first",
        **options: Any,
    ) -> None:
        super().__init__(model, loss, **options)
        check_size("mini_batch_size", mini_batch_size)
        check_option("check", check, CHECKS)
        self.mini_batch_size = mini_batch_size
        self.check = check

    def embed(self, columns: list[dict[str, Tensor]]) -> Sequence[Tensor]:
        """The embeddings (B, D) of each column, whose backward pass embeds the mini-batches again.

        ValueError for features that are not one row for each sentence, such as those of a StaticEmbedding, of
        images, or of sentences without padding.
        """
        model = self.model

        def encoder(**features: Any) -> Tensor:
            embeddings: Tensor = model(features)["sentence_embedding"]
            return embeddings

        for features in columns:
            for name in WITHOUT_ROWS & features.keys():
                raise ValueError(
                    f"sentence_features: want padded sentences, a row each, got {name!r}; "
                    "SentenceTransformerLoss takes these"
                )
        return cached_embeddings(
            [encoder] * len(columns), columns, chunk_size=self.mini_batch_size, check=self.check
        )

    def get_config_dict(self) -> dict[str, Any]:
        """The settings that the library writes to a model card."""
        return {**super().get_config_dict(), "mini_batch_size": self.mini_batch_size}
