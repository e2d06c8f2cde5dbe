"""What the rounding errors of sums in float32 may be."""

import numpy as np


def bound(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What sums of at most 192 terms in float32, which are then added up, may be off by."""
    terms = min(a.shape[1], 192) + a.shape[1] // 192 + 3
    return np.float64(terms * 2.0**-24) * (np.abs(a).astype(np.float64) @ np.abs(b)) + 1e-30
