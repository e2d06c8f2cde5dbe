"""A Trainer on several processes gives what one process with the whole batch gives."""

import pytest
import torch

from tests.shared.ranks import Ranks

pytest.importorskip("transformers", reason="the extra hf is not installed")
pytest.importorskip("accelerate", reason="the extra hf is not installed")

from tests.shared.huggingface_on_ranks import BATCH, trained, trained_on_ranks  # after the skips


@pytest.mark.slow  # transformers is imported in each process
@pytest.mark.parametrize(
    "arguments",
    [{}, {"gradient_checkpointing": True}],
    ids=["plain", "gradient_checkpointing"],
)
def test_a_run_on_two_ranks_has_their_rows_in_one_batch(checkpoint, tmp_path, arguments):
    ranks = Ranks(2)
    try:
        found = ranks.run(trained_on_ranks, str(checkpoint), str(tmp_path), arguments)
    finally:
        ranks.close()
    wanted = trained(str(checkpoint), str(tmp_path), 2 * BATCH)
    for rank in found:
        assert rank.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(rank[name], tensor, rtol=1e-6, atol=1e-9, msg=name)
