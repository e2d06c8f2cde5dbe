"""open_clip's plain loss under DDP is the same in the block, however its features are gathered."""

import pytest
import torch

from tests.shared.fused_on_ranks import step


@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("local_loss", [False, True])
def test_a_step_of_open_clip(ranks, with_gradient, local_loss):
    plain = ranks(2).run(step, False, with_gradient, local_loss)
    fused = ranks(2).run(step, True, with_gradient, local_loss)
    for (wanted, _), (found, report) in zip(plain, fused, strict=True):
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
        assert ("clip_loss" if not local_loss else "contrastive_loss") in report
