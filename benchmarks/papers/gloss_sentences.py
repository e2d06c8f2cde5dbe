"""Short sentences of the novels, and what a trained GLOSS decoder makes of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.papers.phrases import Words
from fastqt.nn import Gloss
from fastqt.nn.gloss_decoder import projected
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.interpolate import vectors_between
from fastqt.sentences.text.reader import read_blocks

WORDS = 3000  # of the vocabulary; sentences with another word are left out
SHARES = tuple(step / 5 for step in range(1, 5))  # of the paper
# The paper's 250 steps of 1 find hardly a lower loss; `inference_ways` of gloss_samples.py compares them.
INFERENCE_STEPS, INFERENCE_RATE = 100, 0.02


def statements(files: Iterable[Path], pattern: str) -> list[str]:
    """The distinct sentences of a pattern that have only the most frequent words, in a random order."""
    matches = re.compile(pattern).fullmatch
    distinct: dict[str, None] = {}
    for block in read_blocks([str(file) for file in files]):
        distinct.update(dict.fromkeys(sentence for sentence in block.sentences if matches(sentence)))
    counts = Counter(word for sentence in distinct for word in split(sentence))
    known = set(sorted(counts, key=lambda word: (-counts[word], word))[:WORDS])
    kept = [sentence for sentence in distinct if known.issuperset(split(sentence))]
    return [kept[number] for number in np.random.default_rng(0).permutation(len(kept))]


def split(sentence: str) -> Words:
    """The words of a statement and its full stop."""
    return [*sentence[:-1].split(), "."]


def joined(words: Sequence[str]) -> str:
    """Words as a line of text."""
    return " ".join(words).replace(" .", ".")


class Decoder:
    """A trained model and its sentences.

    Args:
        folder: of the training.
        trained: the sentences, in the order of the model's latent vectors.
    """

    def __init__(self, folder: Path, trained: Sequence[str]) -> None:
        encoder = SentenceEncoder.load(folder, "cpu")
        assert isinstance(encoder.model, Gloss)
        self.model, self.tokenizer = encoder.model, encoder.vocabulary.tokenizer
        self.trained = [split(sentence) for sentence in trained]
        self.latents = self.model.latents.detach()

    def ids(self, sentences: Sequence[Words]) -> tuple[Tensor, Tensor]:
        """Token ids (B, L) and lengths (B,)."""
        lengths = torch.tensor([len(words) for words in sentences])
        tokens = torch.zeros(len(sentences), int(lengths.max()), dtype=torch.int64)
        for row, words in zip(tokens, sentences, strict=True):
            row[: len(words)] = torch.tensor([self.tokenizer.token_to_id(word) or 0 for word in words])
        return tokens, lengths

    def infer(
        self, sentences: Sequence[Words], steps: int = INFERENCE_STEPS, rate: float = INFERENCE_RATE
    ) -> Tensor:
        return self.model.infer(*self.ids(sentences), steps=steps, learning_rate=rate)

    def generate(self, latents: Tensor, lengths: Sequence[int], *, once: bool = False) -> list[Words]:
        """The likeliest word at each position; with `once` the likeliest sentence of different words."""
        if once:
            return [self._different(z, length) for z, length in zip(latents, lengths, strict=True)]
        ids = self.model.generate(latents, torch.tensor(lengths)).tolist()
        return [
            [self.tokenizer.id_to_token(number) for number in row[:length]]
            for row, length in zip(ids, lengths, strict=True)
        ]

    @torch.no_grad()
    def _different(self, latent: Tensor, length: int) -> Words:
        """The words of one sentence, none of them twice."""
        # Pages are rendered without SciPy, which the extra `papers` brings.
        from scipy.optimize import linear_sum_assignment

        model = self.model
        assert model.positions is not None
        scores = F.linear(latent + model.positions[:length], model.weight, model.bias).log_softmax(dim=1)
        _, chosen = linear_sum_assignment(scores.numpy(), maximize=True)
        return [self.tokenizer.id_to_token(int(number)) for number in chosen]

    def reproduced(self, latents: Tensor, sentences: Sequence[Words]) -> tuple[float, float]:
        """What is generated at the sentences' latent vectors: the shares of right words, and of words that
        the sentence has at this place or another."""
        made = self.generate(latents, [len(words) for words in sentences])
        whole = list(zip(made, sentences, strict=True))
        right = [a == b for one, words in whole for a, b in zip(one, words, strict=True)]
        there = [word in words for one, words in whole for word in one]
        return float(np.mean(right)), float(np.mean(there))

    def between(
        self,
        latents: Tensor,
        sentences: Sequence[Words],
        ends: Sequence[tuple[int, int]],
        *,
        slerp: bool = False,
        once: bool = False,
    ) -> list[list[Words]]:
        """Of each pair of sentences, given by their rows, the sentences on the way at SHARES."""
        shares = torch.tensor(SHARES)
        ways = [vectors_between(latents[a], latents[b], shares, slerp=slerp) for a, b in ends]
        lengths = [
            round((1 - share) * len(sentences[a]) + share * len(sentences[b]))
            for a, b in ends
            for share in SHARES
        ]
        made = iter(self.generate(torch.cat(ways), lengths, once=once))
        return [[next(made) for _ in SHARES] for _ in ends]

    def drawn(self, count: int, *, fitted: bool = False, once: bool = False) -> list[Words]:
        """Sentences at random vectors: of N(0, I), or of the normal distribution of the trained vectors."""
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(count, self.latents.shape[1], generator=generator)
        if fitted:
            factor = torch.linalg.cholesky(self.latents.T.cov().double()).float()
            noise = self.latents.mean(dim=0) + noise @ factor.T
        rows = torch.randint(len(self.trained), (count,), generator=generator).tolist()
        lengths = [len(self.trained[row]) for row in rows]
        return self.generate(projected(noise, self.model.radius), lengths, once=once)


def pairs(sentences: int, most: int) -> list[tuple[int, int]]:
    """Pairs of sentences, drawn with the seed 0; no sentence is in two of them."""
    rows = np.random.default_rng(0).permutation(sentences)[: 2 * most].tolist()
    return list(zip(rows[::2], rows[1::2], strict=False))


def new_words(ways: Sequence[Sequence[Words]], ends: Sequence[Words]) -> float:
    """The share of the words on the way that neither of the two sentences has."""
    is_new = [word not in words for way, words in zip(ways, ends, strict=True) for one in way for word in one]
    return float(np.mean(is_new))
