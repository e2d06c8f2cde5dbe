"""Lightning's trainer takes the steps of a loop that is written by hand."""

import importlib.util
import math

import pytest
import torch

import fastqt

pytestmark = [
    pytest.mark.slow,  # Importing lightning takes several seconds, so only the tests do it.
    pytest.mark.skipif(
        importlib.util.find_spec("lightning") is None, reason="the extra lightning is not installed"
    ),
    # Lightning's advice about loaders, and what it does itself.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
N, WIDTH, D, STEPS = 12, 6, 4, 3


def batches():
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(N, WIDTH, generator=generator) for _ in range(2)] for _ in range(STEPS)]


def module_of(*arguments, **options):
    from fastqt.integrations.lightning import ContrastiveModule

    return ContrastiveModule(*arguments, **options)


def trainer_of(**options):
    import lightning

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(accelerator="cpu", devices=1, **quiet, **options)


def trained(module, data):
    trainer = trainer_of(max_steps=STEPS, enable_checkpointing=False)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    return trainer


def encoders():
    torch.manual_seed(0)
    return [torch.nn.Linear(WIDTH, D) for _ in range(2)]


def test_takes_the_steps_of_a_loop():
    """With two encoders and a learnt scale, which does not decay."""
    left, right = encoders()
    loss = fastqt.nn.CLIPLoss()
    of_encoders = {"params": [*left.parameters(), *right.parameters()]}
    of_loss = {"params": loss.parameters(), "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([of_encoders, of_loss], lr=0.1, weight_decay=0.5)
    for a, b in batches():
        optimizer.zero_grad()
        value = loss(left(a), right(b))
        value.backward()
        optimizer.step()

    module = module_of(encoders(), fastqt.nn.CLIPLoss(), learning_rate=0.1, weight_decay=0.5)
    trainer = trained(module, batches())
    assert trainer.logged_metrics["train_loss"] == value
    assert 1 < trainer.logged_metrics["scale"] < 100
    wanted = [*left.parameters(), *right.parameters(), *loss.parameters()]
    for x, y in zip(module.parameters(), wanted, strict=True):
        assert torch.equal(x, y)
    assert module.loss.log_scale != math.log(1 / 0.07)


@pytest.mark.parametrize("form", ["tuple", "mapping"])
def test_views_of_several_arguments(form):
    """One encoder for both views, of token ids and lengths."""
    torch.manual_seed(0)
    encoder = fastqt.nn.BagOfWords(N, D)
    tokens, lengths = torch.randint(N, (N, 3)), torch.full((N,), 3)
    view = (tokens, lengths) if form == "tuple" else {"tokens": tokens, "lengths": lengths}
    module = module_of(encoder, fastqt.nn.SimCSELoss())
    found = module(view, view)
    assert len(found) == 2
    assert torch.equal(found[0], encoder(tokens, lengths))
    before = [x.clone() for x in encoder.parameters()]
    trained(module, [(view, view)] * STEPS)
    assert not all(torch.equal(x, y) for x, y in zip(encoder.parameters(), before, strict=True))


def test_validates():
    module = module_of(encoders(), fastqt.nn.CLIPLoss(learn_scale=False))
    loader = torch.utils.data.DataLoader(batches(), batch_size=None)
    trainer = trainer_of(fast_dev_run=True)
    (found,) = trainer.validate(module, loader, verbose=False)
    with torch.no_grad():
        assert found["val_loss"] == pytest.approx(module.loss(*module(*batches()[0])).item())


def test_refuses():
    mean_squares, group = torch.nn.MSELoss(), {"shards": "uneven"}
    with pytest.raises(ValueError, match="encoders: want at least one, got none"):
        module_of([], fastqt.nn.SimCSELoss())
    with pytest.raises(TypeError, match="group: want None or 'auto' for a loss that is not fastqt's"):
        module_of(encoders(), mean_squares, group=group)
    with pytest.raises(ValueError, match="batch: want a view for each of 2 encoders, got 3"):
        module_of(encoders(), fastqt.nn.CLIPLoss())(*[torch.ones(N, WIDTH)] * 3)
