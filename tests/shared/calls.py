"""A valid call of every public function that takes tensors, with all of its tensor arguments."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import fastqt
from fastqt.exclusions import OfIds
from fastqt.nn import (
    GRU,
    BagOfWords,
    Gloss,
    GRUEncoder,
    LSTMEncoder,
    MultiChannel,
    SkipThoughts,
    StaticEmbedding,
    Transformer,
)
from tests.shared.every_loss import EVERY_LOSS
from tests.shared.loss_options import LOSSES, units, values

N, D = 6, 4
F, G, H = (torch.randn(N, D, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
IDS = torch.arange(N) // 2
OF_IDS = OfIds.__subclasses__()
TOKENS = torch.tensor([0, 1, 2, 3, 4, 5])
SENTENCES = torch.arange(2 * N).reshape(N, 2) % N


def of_losses() -> Iterator[tuple[str, tuple[Callable[..., Any], dict[str, Any]]]]:
    """Each loss with the tensors that it has to be given, and with each tensor that it may be given."""
    for name in LOSSES:
        given = EVERY_LOSS[name].inputs(N, torch.Generator().manual_seed(0), False)
        yield name, (getattr(fastqt, name), given)
        for unit in units(name):
            added = {option: _tensor(name, option) for option in unit if option not in given}
            if added and all(x is not None for x in added.values()):
                yield f"{name}, {' and '.join(unit)}", (getattr(fastqt, name), given | added)


def _tensor(name: str, option: str) -> Tensor | None:
    """A value of an option that is a tensor, in float32; None where it has none."""
    found = next((x for x in values(name, option) if isinstance(x, Tensor)), None)
    return found.float() if found is not None and found.is_floating_point() else found


# Every public function and all of its tensor arguments.
CALLS = {
    **dict(of_losses()),
    "Noise": (fastqt.Noise, {"counts": F[:, 0].abs()}),
    "Guide": (fastqt.Guide, {"queries": F, "candidates": G, "negatives": H, "thresholds": F[:, 0]}),
    **{
        kind.__name__: (kind, {"query_ids": IDS, "candidate_ids": IDS, "negative_ids": IDS})
        for kind in OF_IDS
    },
    "Above": (fastqt.Above, {"thresholds": F[:, 0]}),
    "Mixed": (fastqt.Mixed, {"partners": TOKENS}),
    "Window": (fastqt.Window, {"document_ids": IDS}),
    "smoothed": (fastqt.smoothed, {"targets": TOKENS}),
    "Sparse": (fastqt.Sparse, {"csr_tensor": torch.eye(N).to_sparse_csr()}),
    "BagOfWords": (BagOfWords(N, D), {"tokens": SENTENCES, "lengths": torch.full((N,), 2)}),
    "StaticEmbedding": (StaticEmbedding(N, D), {"ids": TOKENS, "offsets": torch.tensor([0, 2])}),
    "GRUEncoder": (GRUEncoder(N, D, D), {"tokens": SENTENCES, "lengths": torch.full((N,), 2)}),
    "LSTMEncoder": (LSTMEncoder(N, D, D), {"tokens": SENTENCES, "lengths": torch.full((N,), 2)}),
    "Transformer": (
        Transformer(N, D, heads=2, layers=1, dropout=0.0),
        {"tokens": SENTENCES, "lengths": torch.full((N,), 2)},
    ),
    "MultiChannel": (MultiChannel, {"vectors": F, "hidden_size": 4}),
    "GRU": (GRU(D, D), {"input": F, "hx": G[:1]}),
    "SkipThoughts": (SkipThoughts(N, D, D).loss, {"tokens": SENTENCES, "lengths": torch.full((N,), 2)}),
    "Gloss": (
        Gloss(N, D, sentences=N),
        {"rows": TOKENS, "tokens": SENTENCES, "lengths": torch.full((N,), 2)},
    ),
}
