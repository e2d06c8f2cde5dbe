"""GLOSS: one latent vector per sentence, optimised as a parameter, and a decoder of the sentence's words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastqt.checks import INTEGERS, as_ids, check_number, check_option, check_size, check_tensor
from fastqt.distributed.group import GroupLike
from fastqt.losses import gloss_bow_loss, gloss_pos_loss
from fastqt.losses.gloss import factored_pos_loss
from fastqt.losses.gloss_factored import PositionScores, score_positions

DECODERS = ("bow", "pos")
STEP_GROWTH = 1.2  # a step size grows by this factor after each step that is accepted
# Inference pads a batch to a multiple of so many sentences. Most BLAS libraries then run the same kernels for
# batches of any size, so that a sentence's result has the same bits in each; others differ by rounding.
ROW_MULTIPLE = 16


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

    Attributes:
        latents: (n, d), drawn from N(0, I) and projected. Its gradient is sparse and holds the rows of the
            batch.
        weight: (V, d), drawn from U[-1/sqrt(d), 1/sqrt(d)] as in `torch.nn.Linear`.
        bias: (V,), drawn likewise.
        positions: (L, d), drawn likewise; None for the decoder "bow".

    Raises:
        ValueError: an unknown decoder, or a size or radius out of range.

    Source: Singh, Fan and Auli, "GLOSS: Generative latent optimization of sentence representations" (2019).
    """

    radius: Tensor

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        sentences: int = 0,
        decoder: str = "bow",
        max_length: int = 50,
        radius: float = 2.0,
        unknown_id: int | None = 0,
    ) -> None:
        check_option("decoder", decoder, DECODERS)
        sizes = {"vocab_size": (vocab_size, 1), "dim": (dim, 1), "sentences": (sentences, 0)}
        for name, (size, least) in (sizes | {"max_length": (max_length, 1)}).items():
            check_size(name, size, least)
        check_number("radius", radius)
        if radius <= 0:
            raise ValueError(f"radius: want a positive number, got {radius}")
        super().__init__()
        self.unknown_id = unknown_id
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        self.bias = nn.Parameter(torch.empty(vocab_size))
        self.positions = nn.Parameter(torch.empty(max_length, dim)) if decoder == "pos" else None
        self.latents = nn.Parameter(torch.empty(sentences, dim))
        self.register_buffer("radius", torch.tensor(float(radius)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new initial values for all parameters."""
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
    def decoder(self) -> str:
        """ "bow" or "pos"."""
        return "bow" if self.positions is None else "pos"

    def extra_repr(self) -> str:
        V, d = self.weight.shape
        places = "" if self.positions is None else f", max_length={len(self.positions)}"
        return (
            f"{V}, {d}, sentences={len(self.latents)}, decoder={self.decoder!r}{places}, radius={self.radius}"
        )

    def forward(
        self,
        rows: Tensor,
        tokens: Tensor,
        lengths: Tensor,
        *,
        reduction: str = "mean",
        group: GroupLike | None = None,
    ) -> Tensor:
        """The loss of training sentences, with their own latent vectors.

        Args:
            rows: (B,) int64 in [0, n), the indices of the sentences.
            tokens, lengths, reduction, group: as in `loss`.

        Returns:
            A scalar, or (B,) for reduction="none". Its gradient for `latents` is sparse.

        Raises:
            ValueError: as in `loss`.
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
        reduction: str = "mean",
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
        self._check(tokens, lengths)
        options: dict[str, Any] = {"reduction": reduction, "group": group}
        if self.positions is None:
            return self._bow_loss(latents, self.weight, self.bias, tokens, lengths, **options)
        return _pos_loss(latents, self.positions, self.weight, self.bias, tokens, lengths, **options)

    def targets(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Which tokens the decoder should predict: all in the sentence, for "bow" without the unknown id.

        Args:
            tokens: (B, L) int64, token ids.
            lengths: (B,) int64 in [0, L].

        Returns:
            (B, L) bool.
        """
        within = _within(lengths, tokens.shape[1])
        if self.positions is not None or self.unknown_id is None:
            return within
        return within & (tokens != self.unknown_id)

    def project(self, rows: Tensor | None = None) -> None:
        """Projects latent vectors onto the ball, in place.

        Args:
            rows: (B,) int64, the sentences whose vectors are projected; all by default.
        """
        with torch.no_grad():
            if rows is None:
                self.latents.copy_(self._projected(self.latents))
            else:
                self.latents.index_copy_(0, rows, self._projected(self.latents[rows]))

    def encode(self, tokens: Tensor, lengths: Tensor, *, normalize: bool = True) -> Tensor:
        """The sentence vectors for downstream use: `infer` with its default options.

        Args:
            tokens: (B, L) int64, token ids.
            lengths: (B,) int64 in [0, L].
            normalize: scale each vector to norm 1.

        Returns:
            (B, d), without gradient.

        Raises:
            ValueError: as in `loss`.
        """
        latents = self.infer(tokens, lengths)
        return F.normalize(latents, dim=1) if normalize else latents

    def infer(
        self,
        tokens: Tensor,
        lengths: Tensor,
        *,
        steps: int = 250,
        learning_rate: float = 1.0,
        seed: int = 0,
        safeguard: bool = True,
    ) -> Tensor:
        """Finds latent vectors of any sentences by projected gradient descent; the decoder stays fixed.

        The initial vector of a sentence is random and depends on the seed and on the sentence's own words.
        The result therefore depends neither on the other sentences of the batch nor on their order, but for
        rounding with some BLAS libraries.

        Args:
            tokens, lengths: as in `loss`.
            steps: number of gradient steps on the loss of each sentence, each followed by a projection.
            learning_rate: step size.
            seed: >= 0, for the random initial vectors.
            safeguard: undo a step that overshot and halve the step size of that sentence; after each accepted
                step it grows by a fifth, up to `learning_rate`. A step overshot if the gradient at its end
                has a positive inner product with the step: the loss is convex, so its minimum along the step
                lies before the end. If no step overshoots, this option changes nothing.

        Returns:
            (B, d), without gradient.

        Raises:
            ValueError: as in `loss`.
        """
        self._check(tokens, lengths)
        B = len(tokens)
        extra = -B % ROW_MULTIPLE
        # Autograd refuses tensors that the caller made in inference mode, so `pad` copies them outside of it.
        with torch.inference_mode(False), torch.enable_grad():
            tokens, lengths = F.pad(tokens, (0, 0, 0, extra)), F.pad(lengths, (0, extra))
            loss = self._loss_of_latents(tokens, lengths)
            latents = self._initial_latents(tokens, lengths, seed)
            if not safeguard:
                for _ in range(steps):
                    latents = self._projected(latents - learning_rate * _gradient(loss, latents))
                return latents[:B]
            gradients = _gradient(loss, latents)
            rates = torch.full_like(latents[:, :1], learning_rate)
            for _ in range(steps):
                proposed = self._projected(latents - rates * gradients)
                end_gradients = _gradient(loss, proposed)
                overshot = (end_gradients * (proposed - latents)).sum(1, keepdim=True) > 0
                latents = proposed.where(~overshot, latents)
                gradients = end_gradients.where(~overshot, gradients)
                rates = torch.where(overshot, rates / 2, rates * STEP_GROWTH).clamp(max=learning_rate)
        return latents[:B]

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
        return words.where(_within(lengths, L), 0)

    def _loss_of_latents(self, tokens: Tensor, lengths: Tensor) -> Callable[[Tensor], Tensor]:
        """The summed loss of the sentences as a function of their latent vectors, the decoder being fixed."""
        # memory="low" uses tiles of fixed width, so that a sentence's loss does not depend on its batch.
        options = {"reduction": "sum", "memory": "low"}
        weight, bias = self.weight.detach(), self.bias.detach()
        if self.positions is None:
            return lambda latents: self._bow_loss(latents, weight, bias, tokens, lengths, **options)
        positions = self.positions.detach()
        scores = score_positions(positions[: tokens.shape[1]], weight)
        return lambda latents: _pos_loss(
            latents, positions, weight, bias, tokens, lengths, position_scores=scores, **options
        )

    def _bow_loss(
        self,
        latents: Tensor,
        weight: Tensor,
        bias: Tensor,
        tokens: Tensor,
        lengths: Tensor,
        **options: Any,
    ) -> Tensor:
        is_target = self.targets(tokens, lengths)
        counts = is_target.sum(1)
        ids, offsets = tokens[is_target], counts.cumsum(0) - counts
        return gloss_bow_loss(latents, weight, bias, ids, offsets, **options)

    def _check(self, tokens: Tensor, lengths: Tensor) -> None:
        check_tensor("tokens", tokens)
        as_ids("lengths", lengths)
        V, most = len(self.weight), math.inf if self.positions is None else len(self.positions)
        if tokens.dim() != 2 or tokens.shape[1] > most:
            raise ValueError(f"tokens: want shape (B, L), L at most {most}, got {tuple(tokens.shape)}")
        if tokens.dtype not in INTEGERS:
            raise TypeError(f"tokens: want an integer dtype, got {tokens.dtype}")
        B, L = tokens.shape
        if lengths.shape != (B,) or bool(((lengths < 0) | (lengths > L)).any()):
            raise ValueError(f"lengths: want one in 0..{L} for each of B={B} sentences")
        used = tokens[_within(lengths, L)]
        if bool(((used < 0) | (used >= V)).any()):
            raise ValueError(f"tokens: want integers in 0..{V - 1}, got {int(used.min())}..{int(used.max())}")

    def _projected(self, latents: Tensor) -> Tensor:
        norms = torch.linalg.vector_norm(latents, dim=1, keepdim=True)
        factors: Tensor = self.radius / norms.clamp(min=self.radius)
        return latents * factors.to(latents.dtype)

    def _initial_latents(self, tokens: Tensor, lengths: Tensor, seed: int) -> Tensor:
        """One projected draw from N(0, I) per sentence, determined by the seed and the sentence's targets."""
        rows = []
        for ids, length in zip(tokens.tolist(), lengths.tolist(), strict=True):
            words = ids[:length]
            if self.positions is None:
                words = sorted(set(words) - {self.unknown_id})
            generator = np.random.default_rng([seed, len(words), *words])
            rows.append(generator.standard_normal(self.embedding_dim))
        return self._projected(torch.from_numpy(np.stack(rows)).to(self.weight))


def _gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    at = at.detach().requires_grad_()
    return torch.autograd.grad(loss(at), at)[0]


def _within(lengths: Tensor, L: int) -> Tensor:
    """Whether position l lies inside sentence b, (B, L) bool."""
    return torch.arange(L, device=lengths.device) < lengths[:, None]


def _pos_loss(
    latents: Tensor,
    positions: Tensor,
    weight: Tensor,
    bias: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    *,
    position_scores: PositionScores | None = None,
    **options: Any,
) -> Tensor:
    """`gloss_pos_loss` of checked arguments, whose positions' scores may be known already."""
    L = tokens.shape[1]
    arguments = latents, positions[:L], weight, bias, tokens
    loss = None
    if position_scores is not None:
        loss = factored_pos_loss(*arguments, _within(lengths, L), options["reduction"], position_scores)
    if loss is None:
        loss = gloss_pos_loss(*arguments, lengths, **options)
    return loss
