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
# Arguments of torch.testing.assert_close for recurrent layers and encoders. Both sides in float64 differ by
# rounding only, some 1e-15 a step of the recurrence.
RNN_FLOAT64 = {"rtol": 1e-10, "atol": 1e-12}
# In float32: sums of up to a few hundred terms of order 1, in another order.
RNN_FLOAT32 = {"rtol": 1e-4, "atol": 1e-5}
# An encoder's vectors, in float32, with elements of about 0.1.
ENCODED_FLOAT32 = {"rtol": 1e-4, "atol": 1e-6}
# Probabilities of a logistic regression whose mean loss is within 1e-7 (1e-13) of its minimum: the distance
# to the minimum goes with the root of that.
FITTED = {torch.float32: 3e-3, torch.float64: 1e-5}

# By how much one rounding to nearest changes a number, relatively, at most.
UNIT_ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
# The Triton engine rounds three times to the inputs' dtype: the exponentials E, the weighted rows that E
# multiplies, and the result. Its interpreter cuts bfloat16 off where a GPU rounds to nearest.
THREE_ROUNDINGS = {torch.float16: 3 * 2.0**-11, torch.bfloat16: 3 * 2.0**-7, torch.float32: 0.0}
# For CLIP's loss and the three-block form it rounds twice: the scores' gradient, and the result.
TWO_ROUNDINGS = {torch.float16: 2 * 2.0**-11, torch.bfloat16: 2 * 2.0**-7, torch.float32: 0.0}
# The CUDA engine rounds three times to nearest.
CUDA_ROUNDINGS = {torch.float32: 0.0, torch.bfloat16: 3 * 2.0**-9, torch.float16: 3 * 2.0**-11}
# Where eager PyTorch rounds to nearest and the interpreter cuts off, the error is twice as large.
CUT_OFF = {torch.float16: 1.0, torch.bfloat16: 2.0, torch.float32: 1.0}
# Exponentials below the smallest normal number are flushed to zero: 1e-308 or 1e-38, times embeddings and
# scales of up to 1e5. In float16 results have a smallest subnormal of 6e-8.
FLUSHED = {torch.float64: 1e-303, torch.float32: 1e-33, torch.bfloat16: 1e-33, torch.float16: 6e-8}

# Adam divides a gradient by its size. A sum of some hundred terms in float32 is wrong by about 1e-6
# of the largest gradient of its parameter: one below this part of it can get a step of a wrong direction ...
FELT_BY_ADAM = 1e-4
# ... and those above have steps of 5e-4 that are wrong by 1e-6 / 1e-4, twice.
ADAM_STEPS = 2e-5

FOR_DTYPE = {torch.float32: FLOAT32, torch.float64: FLOAT64}
REORDERED = {torch.float32: REORDERED_FLOAT32, torch.float64: REORDERED_FLOAT64}


def relative(a: object, b: object) -> float:
    """The largest difference of two arrays, relative to the largest value of the second."""
    a, b = (x.detach().double().numpy() if isinstance(x, torch.Tensor) else np.asarray(x) for x in (a, b))
    largest = np.abs(b).max(initial=0.0)
    difference = np.abs(a - b).max(initial=0.0)
    return float(difference / largest) if largest > 0 else float(difference)
