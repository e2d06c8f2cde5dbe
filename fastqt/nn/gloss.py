"""GLOSS: one latent vector per sentence, optimised as a parameter, and a decoder of the sentence's words."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastqt.checks import check_number, check_option, check_size
from fastqt.distributed.group import GroupLike
from fastqt.ids import as_ids
from fastqt.losses.gloss import POSITION_LOSSES, PositionLoss
from fastqt.nn.gloss_decoder import Decoder, projected, within
from fastqt.nn.gloss_inference import Inference, infer_latents
from fastqt.options import Reduction

DecoderKind: TypeAlias = Literal["bow", "pos"]
"""The decoder of a bag of words or of a word for each position."""
DECODERS: tuple[str, ...] = get_args(DecoderKind)


class Gloss(nn.Module):
    """A decoder of sentences, and the latent vectors of the sentences that it is trained on.

    The decoder "bow" predicts the set of a sentence's words: a sigmoid of W z + b for each word. The decoder
    "pos" predicts the word at each position l: a softmax of W (z + p_l) + b. All latent vectors z lie in a
    ball; call `project` after each optimiser step.

    Args:
        vocab_size: V.
        dim: d, the width of latent vectors.
        sentences: n, the number of training sentences; 0 for a decoder without latent vectors.
        decoder: "bow" or "pos".
        max_length: L, the number of positions of the decoder "pos".
        radius: r > 0, the radius of the ball.
        unknown_id: the id that "bow" does not predict, or None.
        position_loss: "sum" over a sentence's positions or their "mean", for the decoder "pos".

    Attributes:
        inference: how `infer` and `encode` find latent vectors, if they are not told; an `Inference`.
        latents: (n, d), drawn from N(0, I) and projected. Its gradient is sparse and holds the rows of the
            batch.
        weight: (V, d), drawn from U[-1/sqrt(d), 1/sqrt(d)] as in `torch.nn.Linear`.
        bias: (V,), drawn likewise.
        positions: (L, d), drawn likewise; None for the decoder "bow".

    Raises:
        ValueError: an unknown decoder, or a size, radius or option out of range.

    Example:
        >>> import torch, fastqt
        >>> model = fastqt.nn.Gloss(100, 16, sentences=2)
        >>> tokens, lengths = torch.tensor([[5, 7, 2], [3, 0, 0]]), torch.tensor([3, 1])
        >>> model(torch.tensor([0, 1]), tokens, lengths).shape  # the loss of the first two sentences
        torch.Size([])
        >>> model.infer(tokens, lengths, steps=10).shape
        torch.Size([2, 16])

    Source: Singh, Fan and Auli, "GLOSS: Generative latent optimization of sentence representations" (2019).
    """

    radius: Tensor

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        sentences: int = 0,
        decoder: DecoderKind = "bow",
        max_length: int = 50,
        radius: float = 2.0,
        unknown_id: int | None = 0,
        position_loss: PositionLoss = "sum",
    ) -> None:
        check_option("decoder", decoder, DECODERS)
        check_option("position_loss", position_loss, POSITION_LOSSES)
        if position_loss != "sum" and decoder != "pos":
            raise ValueError(f"position_loss: want 'sum' for the decoder {decoder!r}, got {position_loss!r}")
        sizes = {"vocab_size": (vocab_size, 1), "dim": (dim, 1), "sentences": (sentences, 0)}
        for name, (size, least) in (sizes | {"max_length": (max_length, 1)}).items():
            check_size(name, size, least)
        check_number("radius", radius)
        if radius <= 0:
            raise ValueError(f"radius: want a positive number, got {radius}")
        super().__init__()
        self.unknown_id, self.position_loss, self.inference = unknown_id, position_loss, Inference()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        self.bias = nn.Parameter(torch.empty(vocab_size))
        self.positions = nn.Parameter(torch.empty(max_length, dim)) if decoder == "pos" else None
        self.latents = nn.Parameter(torch.empty(sentences, dim))
        self._initial_radius = float(radius)
        self.register_buffer("radius", torch.tensor(self._initial_radius))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new initial values for all parameters, for the radius that the model was made with."""
        nn.init.constant_(self.radius, self._initial_radius)
        for parameter in (self.weight, self.bias, self.positions):
            if parameter is not None:
                nn.init.uniform_(parameter, -(self.embedding_dim**-0.5), self.embedding_dim**-0.5)
        nn.init.normal_(self.latents)
        self.project()

    @property
    def embedding_dim(self) -> int:
        """d, the width of latent vectors."""
        return self.weight.shape[1]

    @property
    def decoder(self) -> DecoderKind:
        """ "bow" or "pos"."""
        return "bow" if self.positions is None else "pos"

    def extra_repr(self) -> str:
        V, d = self.weight.shape
        places = "" if self.positions is None else f", max_length={len(self.positions)}"
        mean = "" if self.position_loss == "sum" else f", position_loss={self.position_loss!r}"
        return (
            f"{V}, {d}, sentences={len(self.latents)}, decoder={self.decoder!r}{places}, "
            f"radius={self.radius}{mean}"
        )

    def forward(
        self,
        rows: Tensor,
        tokens: Tensor,
        lengths: Tensor,
        *,
        reduction: Reduction = "mean",
        group: GroupLike | None = None,
    ) -> Tensor:
        """The loss of training sentences, with their own latent vectors, whose gradient is sparse.

        `rows`, (B,) int64 in [0, n), are the indices of the sentences; all else is as in `loss`.
        """
        return self.loss(self.latents_of(rows), tokens, lengths, reduction=reduction, group=group)

    def latents_of(self, rows: Tensor) -> Tensor:
        """The latent vectors (B, d) of the training sentences `rows`, (B,) int64, with a sparse gradient."""
        return F.embedding(as_ids("rows", rows), self.latents, sparse=True)

    def loss(
        self,
        latents: Tensor,
        tokens: Tensor,
        lengths: Tensor,
        *,
        reduction: Reduction = "mean",
        group: GroupLike | None = None,
    ) -> Tensor:
        """The decoder's loss for given latent vectors: `fastqt.gloss_bow_loss` or `fastqt.gloss_pos_loss`.

        Args:
            latents: (B, d).
            tokens: (B, L) int64, token ids; for "pos", L is at most max_length.
            lengths: (B,) int64 in [0, L].
            reduction: "mean" over sentences, "sum", or "none".
            group: the processes whose sentences make up the batch, as of `fastqt.gloss_bow_loss`.

        Returns:
            A scalar, or (B,) for reduction="none".

        Raises:
            ValueError: a wrong shape, or a length or token id out of range.
            TypeError: no tensor of integers.
        """
        decoder = self._decoder()
        decoder.check(tokens, lengths)
        return decoder.loss(latents, tokens, lengths, reduction=reduction, group=group)

    def targets(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Which tokens the decoder should predict: all in the sentence, for "bow" without the unknown id.

        Tokens and lengths are as in `loss`; the result is (B, L) bool.
        """
        return self._decoder().targets(tokens, lengths)

    def project(self, rows: Tensor | None = None) -> None:
        """Projects latent vectors onto the ball, in place.

        Args:
            rows: (B,) int64, the sentences whose vectors are projected; all by default.
        """
        with torch.no_grad():
            if rows is None:
                self.latents.copy_(projected(self.latents, self.radius))
            else:
                self.latents.index_copy_(0, rows, projected(self.latents[rows], self.radius))

    def encode(self, tokens: Tensor, lengths: Tensor, *, normalize: bool = True) -> Tensor:
        """The sentence vectors for downstream use, (B, d), without gradient: `infer` by default options.

        `normalize` scales each vector to norm 1. Tokens, lengths and errors are as in `loss`.
        """
        latents = self.infer(tokens, lengths)
        return F.normalize(latents, dim=1) if normalize else latents

    def infer(
        self,
        tokens: Tensor,
        lengths: Tensor,
        *,
        steps: int | None = None,
        learning_rate: float | None = None,
        seed: int = 0,
        safeguard: bool | None = None,
    ) -> Tensor:
        """Finds latent vectors of any sentences by projected gradient descent; the decoder stays fixed.

        The initial vector of a sentence is random and depends on the seed and on the sentence's own words,
        and matrix products have shapes that do not depend on the batch. The result therefore has the same
        bits whatever the other sentences of the batch and their order are, on one machine with one number
        of threads.

        Args:
            tokens, lengths: as in `loss`.
            steps, learning_rate, safeguard: as of `Inference`; by default those of the attribute `inference`.
            seed: >= 0, for the random initial vectors.

        Returns:
            (B, d), without gradient.

        Raises:
            ValueError: as in `loss`, or an option out of range.
        """
        options = {"steps": steps, "learning_rate": learning_rate, "safeguard": safeguard}
        changes: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        how, decoder = replace(self.inference, **changes), self._decoder()
        decoder.check(tokens, lengths)
        return infer_latents(decoder, self.radius, tokens, lengths, how, seed)

    @torch.no_grad()
    def generate(self, latents: Tensor, lengths: Tensor) -> Tensor:
        """Decodes latent vectors to words.

        Args:
            latents: (B, d).
            lengths: (B,) int64, the number of words of each sentence; at most max_length for "pos", at most
                V - 1 for "bow".

        Returns:
            (B, max(lengths)) int64 token ids, 0 beyond a sentence's length. "pos" gives the most probable
            word at each position; "bow" gives the most probable words in descending order, without the
            unknown id.
        """
        L = int(lengths.max())
        if self.positions is not None:
            # One position at a time, so that no (B, L, V) logits are in memory.
            columns = (F.linear(latents + p, self.weight, self.bias).argmax(1) for p in self.positions[:L])
            words = torch.stack(list(columns), dim=1)
        else:
            logits = F.linear(latents, self.weight, self.bias)
            if self.unknown_id is not None:
                logits[:, self.unknown_id] = -math.inf
            words = logits.topk(L, dim=1).indices
        return words.where(within(lengths, L), 0)

    def _decoder(self) -> Decoder:
        return Decoder(self.weight, self.bias, self.positions, self.unknown_id, self.position_loss)
