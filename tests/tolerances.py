"""How close results must come, each with its reason. `relative` is |a - b|_max / |b|_max."""

from __future__ import annotations

import numpy as np
import torch

# A few dozen roundings of a float64 chain of products, exponentials and sums.
FLOAT64 = 1e-12
# As many of float32, in matrix products of up to some hundred terms.
FLOAT32 = 2e-5
# The same sums in another order: chunks, tiles, threads.
REORDERED_FLOAT32 = 5e-6
REORDERED_FLOAT64 = 1e-13
# No error of ours may be over this multiple of eager PyTorch's in the same dtype ...
EAGER_FACTOR = 1.5
# ... or over this where eager happens to round to the truth: half a unit in the last place.
HALF_ULP = {torch.float32: 6e-8, torch.float64: 1.2e-16}
# Probabilities of a logistic regression whose mean loss is within 1e-7 (1e-13) of its minimum: the distance
# to the minimum goes with the root of that.
FITTED = {torch.float32: 3e-3, torch.float64: 1e-5}

FOR_DTYPE = {torch.float32: FLOAT32, torch.float64: FLOAT64}
REORDERED = {torch.float32: REORDERED_FLOAT32, torch.float64: REORDERED_FLOAT64}


def relative(a: object, b: object) -> float:
    """The largest difference of two arrays, relative to the largest value of the second."""
    a, b = (x.detach().double().numpy() if isinstance(x, torch.Tensor) else np.asarray(x) for x in (a, b))
    largest = np.abs(b).max(initial=0.0)
    difference = np.abs(a - b).max(initial=0.0)
    return float(difference / largest) if largest > 0 else float(difference)
