"""docs/quick-start.md: what is written before and what is written after have one value and one gradient."""

import pytest
import torch

from tests.shared.page_blocks import PAGES, blocks
from tests.shared.tolerances import FLOAT32, relative

PAGE = blocks(PAGES["quick-start.md"], "python")
LEAVES = ("queries", "candidates", "images", "texts", "log_scale")
# Sums of some hundred terms that are nearly as large as their result, in another order.
FLOAT64 = 1e-12


def run(code: str, names: dict) -> dict[str, torch.Tensor]:
    """Runs a block and returns the loss, and the gradients that it has given to the leaves."""
    for leaf in LEAVES:
        if leaf in names:
            names[leaf].grad = None
    exec(code, names)
    grads = {leaf: names[leaf].grad for leaf in LEAVES if leaf in names and names[leaf].grad is not None}
    return {"loss": names["loss"].detach(), **{name: grad.clone() for name, grad in grads.items()}}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, FLOAT64), (torch.float32, FLOAT32)])
def test_before_and_after_are_one_loss(dtype, tolerance, capsys):
    names: dict = {}
    found = None
    compared = 0
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        for block in PAGE:
            result = run(block.code, names) if "loss" in block.code else exec(block.code, names)
            if block.above == "After:":
                assert set(result) == set(found)
                assert len(result) >= 3
                for name, value in result.items():
                    assert value.dtype is dtype
                    assert relative(value, found[name]) < tolerance, name
                compared += 1
            found = result if block.above == "Before:" else None
    finally:
        torch.set_default_dtype(default)
    assert compared == 2
    first, last = names["losses"][0], names["losses"][-1]
    assert last < first / 2

    # The page prints each loss before and after, in four digits, of which rounding may change the last one.
    *printed, end = capsys.readouterr().out.splitlines()
    before, after = ([float(line) for line in printed[start::2]] for start in (0, 1))
    assert before == pytest.approx(after, abs=1.1e-4)
    assert len(before) == compared
    assert end == f"{first:.2f} at the beginning, {last:.2f} at the end"
