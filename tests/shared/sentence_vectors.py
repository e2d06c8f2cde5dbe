"""The vectors of a text's sentences, one sentence at a time, for tests of embedding and searching."""

import numpy as np
import torch


def lines(path):
    with open(path) as file:
        return [(number, line.strip()) for number, line in enumerate(file, start=1) if line.strip()]


def vectors(encoder, path):
    """One sentence after the other, (N, 2D) float64, not normalised."""
    rows = []
    for _, sentence in lines(path):
        ids = torch.tensor([encoder.vocabulary.encode([sentence]).ids.tolist()])
        rows.append(
            torch.cat([half(ids, torch.tensor([ids.shape[1]])) for half in encoder.model.children()], 1)
        )
    return torch.cat(rows).double().detach().numpy()


def normalized_halves(matrix):
    return np.concatenate(
        [half / np.linalg.norm(half, axis=1, keepdims=True) for half in np.split(matrix, 2, axis=1)], 1
    )
