"""GLOSS: a free latent vector for each sentence, and a decoder that names the sentence's words from it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastqt.checks import check_option
from fastqt.losses import gloss_bow_loss, gloss_pos_loss
from fastqt.losses.gloss import factored_pos_loss
from fastqt.losses.gloss_factored import PositionScores, score_positions

DECODERS = ("bow", "pos")
GROWTH = 1.2  # of a step size, after a step that did not go too far
ROWS_AT_ONCE = 16  # inference works on multiples of so many sentences, so that all meet the same kernels


class Gloss(nn.Module):
    """A decoder of sentences and the latent vectors of the sentences that it is trained on.

    The decoder "bow" names the words that a sentence holds, each by a sigmoid of W z + b; "pos" names the
    word at each place l by a softmax of W (z + p_l) + b. All latent vectors z lie in a ball: call `project`
    after each step of an optimiser.

    Args:
        vocab_size: V.
        dim: d, the width of latent vectors.
        sentences: n, how many are trained on; 0 for a decoder alone.
        decoder: "bow" or "pos".
        max_length: L, places of the decoder "pos".
        radius: r, of the ball.
        unknown_id: the id that is no word to "bow", if any.

    Attributes:
        latents: (n, d), begun at N(0, I), projected; its gradient is sparse, of a batch's rows.
        weight: (V, d), bias: (V,), positions: (L, d) or None: the decoder, begun at
            U[-1/sqrt(d), 1/sqrt(d)] as `torch.nn.Linear` is.

    Raises:
        ValueError: an unknown decoder, or a size or radius out of its range.

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
            if size < least:
                raise ValueError(f"{name}: want at least {least}, got {size}")
        if not 0 < radius < math.inf:
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
        """Draws initial values anew."""
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

    def forward(self, rows: Tensor, tokens: Tensor, lengths: Tensor, *, reduction: str = "mean") -> Tensor:
        """The loss of training sentences, by their latent vectors.

        Args:
            rows: (B,) int64 in [0, n), which sentences these are.
            tokens, lengths, reduction: as of `loss`.

        Returns:
            The loss, which has a sparse gradient for `latents`.
        """
        return self.loss(self.latents_of(rows), tokens, lengths, reduction=reduction)

    def latents_of(self, rows: Tensor) -> Tensor:
        """The latent vectors of training sentences, (B, d); their gradient is sparse."""
        return F.embedding(rows, self.latents, sparse=True)

    def loss(self, latents: Tensor, tokens: Tensor, lengths: Tensor, *, reduction: str = "mean") -> Tensor:
        """How badly latent vectors name their sentences' words: `gloss_bow_loss` or `gloss_pos_loss`.

        Args:
            latents: (B, d).
            tokens: (B, L) int64, ids of words; for "pos", L at most its max_length.
            lengths: (B,) int64 in [0, L].
            reduction: "mean" over sentences, "sum", or "none" for (B,).
        """
        self._check(tokens, lengths)
        if self.positions is None:
            return self._bow_loss(latents, self.weight, self.bias, tokens, lengths, reduction=reduction)
        return _pos_loss(
            latents, self.positions, self.weight, self.bias, tokens, lengths, reduction=reduction
        )

    def targets(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Which tokens, (B, L), the decoder is to name: all words of a sentence, of "bow" the known ones."""
        within = _within(lengths, tokens.shape[1])
        if self.positions is not None or self.unknown_id is None:
            return within
        return within & (tokens != self.unknown_id)

    def project(self, rows: Tensor | None = None) -> None:
        """Brings latent vectors, all or those of some rows, back to the ball."""
        with torch.no_grad():
            if rows is None:
                self.latents.copy_(self._projected(self.latents))
            else:
                self.latents.index_copy_(0, rows, self._projected(self.latents[rows]))

    def encode(self, tokens: Tensor, lengths: Tensor, *, normalize: bool = True) -> Tensor:
        """The representation of sentences for use elsewhere: what `infer` finds by default.

        Args:
            tokens: (B, L) int64, ids of words.
            lengths: (B,) int64.
            normalize: scale to unit length.

        Returns:
            (B, d), without gradient.
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
        """Latent vectors of any sentences: gradient descent from a random one, the decoder as it is.

        The random vector is drawn from the seed and the sentence's own targets, so that neither the other
        sentences of a batch nor the place in it has a say.

        Args:
            tokens, lengths: as of `loss`.
            steps: how many, of plain gradient descent on the loss of each sentence, each then projected.
            learning_rate: its step size.
            seed: >= 0, of the random beginnings.
            safeguard: take a step back that went too far, halve the sentence's step size, and let it grow by
                a fifth at each further step, to `learning_rate` at most. The losses are convex, so that it
                shows in the gradient at the step's end: it points back. Without such steps, nothing differs.

        Returns:
            (B, d), without gradient.
        """
        self._check(tokens, lengths)
        B = len(tokens)
        extra = -B % ROWS_AT_ONCE
        # What a caller made in inference mode could not take part in what follows.
        with torch.inference_mode(False), torch.enable_grad():
            tokens, lengths = F.pad(tokens, (0, 0, 0, extra)), F.pad(lengths, (0, extra))
            loss = self._frozen_loss(tokens, lengths)
            latents = self._beginnings(tokens, lengths, seed)
            if not safeguard:
                for _ in range(steps):
                    latents = self._projected(latents - learning_rate * _gradient(loss, latents))
                return latents[:B]
            gradients = _gradient(loss, latents)
            rates = torch.full_like(latents[:, :1], learning_rate)
            for _ in range(steps):
                moved = self._projected(latents - rates * gradients)
                there = _gradient(loss, moved)
                too_far = (there * (moved - latents)).sum(1, keepdim=True) > 0
                latents, gradients = moved.where(~too_far, latents), there.where(~too_far, gradients)
                rates = torch.where(too_far, rates / 2, rates * GROWTH).clamp(max=learning_rate)
        return latents[:B]

    @torch.no_grad()
    def generate(self, latents: Tensor, lengths: Tensor) -> Tensor:
        """The words that latent vectors name.

        Args:
            latents: (B, d).
            lengths: (B,) int64, how many words of each; for "pos" at most its max_length, for "bow" at
                most V - 1.

        Returns:
            (B, max(lengths)) int64 ids, 0 beyond a sentence's length. Of "pos" the likeliest word at each
            place; of "bow" the likeliest words but the unknown one, the likeliest first.
        """
        L = int(lengths.max())
        if self.positions is not None:
            at = (F.linear(latents + place, self.weight, self.bias).argmax(1) for place in self.positions[:L])
            words = torch.stack(list(at), dim=1)
        else:
            logits = F.linear(latents, self.weight, self.bias)
            if self.unknown_id is not None:
                logits[:, self.unknown_id] = -math.inf
            words = logits.topk(L, dim=1).indices
        return words.where(_within(lengths, L), 0)

    def _frozen_loss(self, tokens: Tensor, lengths: Tensor) -> Callable[[Tensor], Tensor]:
        """The sum of sentences' losses as a function of their latent vectors alone."""
        options = {"reduction": "sum", "memory": "low"}  # in tiles whose columns are the same in all batches
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
        *,
        reduction: str,
        memory: str = "fast",
    ) -> Tensor:
        named = self.targets(tokens, lengths)
        counts = named.sum(1)
        ids, offsets = tokens[named], counts.cumsum(0) - counts
        return gloss_bow_loss(latents, weight, bias, ids, offsets, reduction=reduction, memory=memory)

    def _check(self, tokens: Tensor, lengths: Tensor) -> None:
        V, most = len(self.weight), math.inf if self.positions is None else len(self.positions)
        if tokens.dim() != 2 or tokens.shape[1] > most:
            raise ValueError(f"tokens: want shape (B, L), L at most {most}, got {tuple(tokens.shape)}")
        B, L = tokens.shape
        if lengths.shape != (B,) or bool(((lengths < 0) | (lengths > L)).any()):
            raise ValueError(f"lengths: want one in 0..{L} for each of B={B} sentences")
        used = tokens[_within(lengths, L)]
        if bool(((used < 0) | (used >= V)).any()):
            raise ValueError(f"tokens: want integers in 0..{V - 1}, got {int(used.min())}..{int(used.max())}")

    def _projected(self, latents: Tensor) -> Tensor:
        norms = torch.linalg.vector_norm(latents, dim=1, keepdim=True)
        shrunk: Tensor = self.radius / norms.clamp(min=self.radius)
        return latents * shrunk.to(latents.dtype)

    def _beginnings(self, tokens: Tensor, lengths: Tensor, seed: int) -> Tensor:
        """A vector of N(0, I), projected, for each sentence: a function of its targets and the seed."""
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
    """(B, L): whether there is such a place in a sentence."""
    return torch.arange(L, device=lengths.device) < lengths[:, None]


def _pos_loss(
    latents: Tensor,
    positions: Tensor,
    weight: Tensor,
    bias: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    *,
    reduction: str,
    memory: str = "fast",
    position_scores: PositionScores | None = None,
) -> Tensor:
    """`gloss_pos_loss` of checked arguments, whose positions' scores may be known already."""
    L = tokens.shape[1]
    arguments = latents, positions[:L], weight, bias, tokens
    loss = None
    if position_scores is not None:
        loss = factored_pos_loss(*arguments, _within(lengths, L), reduction, position_scores)
    if loss is None:
        loss = gloss_pos_loss(*arguments, lengths, reduction=reduction, memory=memory)
    return loss
