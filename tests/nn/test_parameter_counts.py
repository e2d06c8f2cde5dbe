"""The numbers of parameters that Logeswaran and Lee (arXiv:1803.02893) report, counted on the meta device."""

import torch
from torch import nn

from fastqt.nn import GRUEncoder, QuickThoughts, SkipThoughts

H, W, V = 1000, 300, 20_000


def count(model: nn.Module) -> int:
    assert all(parameter.is_meta for parameter in model.parameters())
    return sum(parameter.numel() for parameter in model.parameters())


def test_quickthoughts_has_as_many_parameters_as_in_the_paper():
    with torch.device("meta"):
        model = QuickThoughts(GRUEncoder(V, W, H), GRUEncoder(V, W, H))
    assert count(model) == 6 * H * (H + W + 1) + 2 * V * W == 19_806_000


def test_skip_thoughts_has_as_many_parameters_as_in_the_paper():
    with torch.device("meta"):
        model = SkipThoughts(V, W, H)
    assert count(model) == 9 * H * (H + W + 1) + V * W + 2 * H * V == 57_709_000
