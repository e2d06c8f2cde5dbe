"""Modules that are made on the meta device: `reset_parameters` gives them what a constructor gives."""

import copy

import pytest
import torch

from fastqt import nn

VECTORS = torch.arange(60.0).view(10, 6)
SIZES = (10, 6, 8)
ENCODERS = {
    "bag": lambda: nn.BagOfWords(10, 6),
    "torch's bag": lambda: nn.BagOfWords(10, 6, init="torch"),
    "static": lambda: nn.StaticEmbedding(10, 6),
    "gru": lambda: nn.GRUEncoder(*SIZES, bidirectional=True),
    "torch's gru": lambda: nn.GRUEncoder(*SIZES, init="torch"),
    "lstm": lambda: nn.LSTMEncoder(*SIZES),
    "vectors": lambda: nn.MultiChannel(VECTORS, hidden_size=8),
    "transformer": lambda: nn.Transformer(10, 6, layers=2, heads=2, feedforward=12, pooling="first"),
}
MODULES = {
    **ENCODERS,
    "layer": lambda: nn.GRU(6, 8, bias="single", bidirectional=True),
    "quickthoughts": lambda: nn.QuickThoughts(ENCODERS["gru"](), ENCODERS["lstm"]()),
    "combined": lambda: nn.CombinedQuickThoughts(nn.QuickThoughts(ENCODERS["bag"](), ENCODERS["bag"]())),
    "simcse": lambda: nn.SimCSE(
        ENCODERS["transformer"](), head=nn.MaskedWordHead(10, 6), learn_scale=True, scale=3.0
    ),
    "skip-thoughts": lambda: nn.SkipThoughts(*SIZES),
    "gloss": lambda: nn.Gloss(10, 6, sentences=5, decoder="pos", radius=0.5),
    "queue": lambda: nn.Queue(4, 3, labels=True),
    "clip": nn.CLIPLoss,
    "siglip": nn.SigLIPLoss,
    "info_nce": lambda: nn.InfoNCELoss(learn_scale=True),
    "cached": lambda: nn.CachedContrastive(ENCODERS["lstm"](), nn.CLIPLoss()),
}


def of_each(module: torch.nn.Module) -> None:
    """What FSDP's and others' loops over modules do, in which the outer ones come first."""
    for each in module.modules():
        if hasattr(each, "reset_parameters"):
            each.reset_parameters()


@pytest.mark.parametrize("reset", [lambda module: module.reset_parameters(), of_each], ids=["whole", "each"])
@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_the_meta_device_is_as_the_constructor_makes_it(name, reset):
    """Numbers that are drawn have the same mean size, and all others are equal."""
    torch.manual_seed(0)
    ordinary = MODULES[name]()
    with torch.device("meta"):
        module = MODULES[name]()
    module.to_empty(device="cpu")
    with torch.no_grad():
        for values in (*module.parameters(), *module.buffers()):
            values.fill_(77)
    reset(module)

    wanted, found = ordinary.state_dict(), module.state_dict()
    assert list(wanted) == list(found)
    drawn = _drawn(name)
    for key, values in wanted.items():
        if key not in drawn:
            assert torch.equal(found[key], values), key
            continue
        assert not torch.equal(found[key], values), key
        # Of uniform or normal numbers; 5 standard errors of the mean size of n, of which each has one of 0.8.
        error = 5 * 0.8 * (2 / values.numel()) ** 0.5
        assert abs(found[key].abs().mean() / values.abs().mean() - 1) < error, key
        assert found[key].abs().max() < 4 * values.abs().max()
    assert [p.requires_grad for p in module.parameters()] == [p.requires_grad for p in ordinary.parameters()]


def _drawn(name: str) -> set[str]:
    """The entries of a module's state that two constructors make unequal."""
    a, b = (MODULES[name]().state_dict() for _ in range(2))
    return {key for key in a if not torch.equal(a[key], b[key])}


def test_a_queue_of_the_meta_device_is_empty():
    with torch.device("meta"):
        queue = nn.Queue(4, 3)
    queue.to_empty(device="cpu").enqueued.fill_(9)
    assert queue.filled == 4
    queue.reset_parameters()
    assert queue.filled == 0
    queue.enqueue(torch.ones(2, 3))
    assert torch.equal(queue.embeddings, torch.ones(2, 3))


def test_vectors_that_were_not_kept_are_not_lost():
    encoder = nn.MultiChannel(VECTORS, kind="bow")
    before = copy.deepcopy(encoder.state_dict())
    with pytest.raises(
        RuntimeError, match="reset_parameters: want a table that was drawn, got one of vectors"
    ):
        encoder.reset_parameters()
    assert all(torch.equal(x, before[key]) for key, x in encoder.state_dict().items())


def test_an_encoder_of_a_user_needs_the_method_where_it_has_parameters():
    class Mean(nn.Encoder):
        embedding_dim = 6

        def __init__(self):
            super().__init__()
            self.table = torch.nn.Sequential(torch.nn.Embedding(10, 6), torch.nn.ParameterList([VECTORS]))

    with pytest.raises(TypeError, match="ParameterList: want a method reset_parameters, got none"):
        nn.SimCSE(Mean()).reset_parameters()
