"""A small GLOSS model in float64, and random sentences for it."""

import torch

from fastqt.nn import Gloss

V, D, L, N = 13, 5, 6, 7
DECODERS = ("bow", "pos")


def sentences(count=N, seed=0):
    """Random tokens (count, L), with unknown and repeated words, and lengths in 0..L."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, V, (count, L), generator=generator)
    return tokens, torch.randint(0, L + 1, (count,), generator=generator)


def model(decoder, **options):
    """A model of N training sentences."""
    torch.manual_seed(1)
    return Gloss(V, D, decoder=decoder, **{"sentences": N, "max_length": L} | options).double()
