import numpy as np
import pytest
import torch
from clip_oracle import assembled, clip as oracle
from tolerances import relative
from fastqt.engines.triton import clip
from tests.engines.test_clip_rectangles import batch, SIZES, WEIGHTS

@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16,torch.float16])
@pytest.mark.parametrize("state", ["random", "converged"])
def test_x(state, dtype, blocks, normalize):
    a,b,scale=batch(state,dtype)
    shards = list(zip(a.split(SIZES), b.split(SIZES), strict=True))
    exact = oracle(*(x.double().numpy() for x in (a, b)), float(scale), WEIGHTS, normalize)
    found = assembled(clip, shards, scale, WEIGHTS, blocks=blocks,normalize=normalize)
    print(state, dtype, blocks, normalize, exact[0], [relative(x, y) for x, y in zip(found, exact)])
