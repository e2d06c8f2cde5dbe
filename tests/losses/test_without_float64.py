"""Every public loss on a device without float64, for which a CPU stands in torch's own operations."""

from __future__ import annotations

import pytest
import torch

from fastqt.targets import cache
from tests.losses.test_every_loss import error, made, with_gradients
from tests.shared.every_loss import EVERY_LOSS, D
from tests.shared.without_float64 import WithoutFloat64

FEW_ROUNDINGS = 2e-5  # of float32, relative to the norm of a gradient


@pytest.mark.parametrize("converged", [False, True], ids=["random", "converged"])
@pytest.mark.parametrize(
    ("name", "backend"),
    # gloss_pos_loss has a walk of its own where no engine is asked for.
    [*((name, "torch") for name in EVERY_LOSS), ("gloss_pos_loss", "")],
)
def test_no_tensor_of_float64_is_made(name, backend, converged, monkeypatch):
    monkeypatch.setenv("FASTQT_BACKEND", backend)
    monkeypatch.setattr(cache, "CACHED", cache.RowsCache(size=8))  # that has float64 of other tests
    loss, inputs = made(name, torch.float32, converged=converged)
    with WithoutFloat64():
        found = with_gradients(loss.function, inputs, **loss.options)

    _, exact = made(name, torch.float64, converged=converged)
    truth = with_gradients(loss.eager, exact)
    truth[0] = truth[0] if found[0].dim() else truth[0].mean()
    for x, y in zip(found, truth, strict=True):
        assert x.dtype is torch.float32
        if x.dim() == 0 and name.startswith("similarity_distillation_loss"):
            # A mean of squared differences of cosines is small beside that of their squares, at least 1 / D.
            assert (x - y).abs() < FEW_ROUNDINGS / D
        else:
            assert error(x, y) < FEW_ROUNDINGS
