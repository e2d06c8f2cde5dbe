"""Each step is torch's own: rates, optimisers, 16 bits, learnt scales."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR

from fastqt.errors import InputError
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.progress import Progress
from fastqt.sentences.text import batches
from fastqt.sentences.train import train
from fastqt.sentences.train.schedule import Factor
from tests.shared.tolerances import FLOAT64
from tests.shared.trainings import trainer_of

SMALL = {"word_dim": 6, "hidden_size": 4, "batch_size": 50, "context_size": 1, "report_every": 1}
SMALL |= {"layers": 1, "heads": 2, "feedforward": 8, "dropout": 0.0}
STEPS = 30
SHORT = ["bfloat16", "float16"]


def torch_schedule(optimizer, name, warmup, steps):
    """torch's schedulers one after the other: the first step has an equal part of the rate, not nothing."""
    falling = steps - warmup
    after = {
        "constant": lambda: ConstantLR(optimizer, 1.0, 1),
        "linear": lambda: LinearLR(optimizer, 1.0, 0.0, falling),
        "cosine": lambda: CosineAnnealingLR(optimizer, falling),
    }[name]()
    if warmup < 2:
        return after
    return SequentialLR(optimizer, [LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1), after], [warmup])


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("warmup", "warm_steps"), [(0, 0), (7, 7), (0.3, 9)])
def test_the_rates_are_those_of_torchs_schedulers(schedule, warmup, warm_steps):
    config = TrainConfig(("x",), schedule=schedule, warmup=warmup)
    factor = Factor(config, STEPS)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    theirs = torch_schedule(optimizer, schedule, warm_steps, STEPS)
    for step in range(STEPS):
        assert factor(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-14)
        theirs.step()
    assert warm_steps == 0 or factor(0) == 1 / warm_steps
    assert schedule == "constant" or factor(STEPS) == pytest.approx(0, abs=1e-15)


def torch_step(trainer, optimizer, batch, scaler=None):
    """The loss of a step that torch takes with the weights of a training."""
    optimizer.zero_grad()
    is_short = trainer.config.precision in SHORT
    with torch.autocast("cpu", getattr(torch, trainer.config.precision) if is_short else None, is_short):
        loss, _ = trainer.objective.loss(batch)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(loss).backward()
    for weight in trainer.parameters:
        weight.grad = weight.grad.to_dense()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(trainer.parameters, trainer.config.clip)
    scaler.step(optimizer)
    scaler.update()
    return loss


def assert_near_and_make_equal(ours, theirs):
    """Afterwards both have the same weights, so that rounding does not grow."""
    ours.optimizer.catch_up()
    for one, other in zip(ours.parameters, theirs.parameters, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    theirs.model.load_state_dict(ours.model.state_dict())


@pytest.mark.parametrize(("optimizer", "schedule"), [("adamw", "linear"), ("adam", "cosine")])
def test_each_step_is_that_of_torchs_optimiser_and_schedule(planted, tmp_path, optimizer, schedule):
    settings = {"schedule": schedule, "warmup": 3, "optimizer": optimizer, "betas": (0.8, 0.95)}
    settings |= {"encoder": "transformer", "weight_decay": 0.3, "learning_rate": 0.02, "context_size": 2}
    config = TrainConfig((planted[0],), **SMALL | settings)
    ours, theirs = (trainer_of(config, tmp_path) for _ in range(2))
    weights = dict(theirs.model.named_parameters())
    names = [name for name, weight in weights.items() if weight.dim() == 2 and "layers" in name]
    assert len(names) == 8  # the matrices of the layers decay, four of each encoder
    groups = [
        {"params": [weights[name] for name in names], "weight_decay": 0.3},
        {"params": [weight for name, weight in weights.items() if name not in names], "weight_decay": 0.0},
    ]
    torch_class = torch.optim.AdamW if optimizer == "adamw" else torch.optim.Adam
    torch_optimizer = torch_class(groups, lr=0.02, betas=(0.8, 0.95), foreach=False)
    assert ours.last_step == 10
    torch_rates = torch_schedule(torch_optimizer, schedule, 3, 10)
    for batch in batches([planted[0]], ours.training.vocabulary, 50):
        ours.step(batch)
        torch_step(theirs, torch_optimizer, batch)
        torch_rates.step()
        assert_near_and_make_equal(ours, theirs)


@pytest.mark.parametrize("precision", SHORT)
@pytest.mark.parametrize(("encoder", "chunk"), [("gru", None), ("transformer", 50)])
def test_each_step_is_that_of_torchs_autocast_and_scaler(planted, tmp_path, precision, encoder, chunk):
    """Also where all sentences are one chunk, whose computation is that of a batch."""
    config = TrainConfig((planted[0],), precision=precision, encoder=encoder, chunk=chunk, **SMALL)
    ours, theirs = (trainer_of(config, tmp_path) for _ in range(2))
    optimizer = torch.optim.Adam(theirs.parameters, lr=5e-4)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "float16")
    for _, batch in zip(range(3), batches([planted[0]], ours.training.vocabulary, 50), strict=False):
        our_loss, measured = ours.step(batch)
        loss = torch_step(theirs, optimizer, batch, scaler)
        assert torch.equal(our_loss, loss)
        assert_near_and_make_equal(ours, theirs)
        assert our_loss.dtype == measured[0].dtype == ours.parameters[0].dtype == torch.float32
    exact, _ = theirs.objective.loss(batch)
    assert exact.item() != loss.item()


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("bfloat16", {"encoder": "lstm"}),
        ("float16", {"encoder": "gru", "cell": "reset-before"}),
        *((each, {"model": "simcse", "encoder": "transformer", "masked_words": 0.1}) for each in SHORT),
        ("bfloat16", {"model": "mixcse", "form": "released"}),
        *((each, {"model": "skip-thoughts", "encoder": "gru"}) for each in SHORT),
        *((each, {"model": "gloss-pos"}) for each in SHORT),
    ],
    ids=str,
)
def test_every_kind_of_model_has_the_loss_of_float32_but_for_rounding(planted, tmp_path, precision, options):
    losses = []
    for name in ("float32", precision):
        config = TrainConfig((planted[0],), precision=name, steps=1, **SMALL | options)
        losses.append(train(config, tmp_path / name).metrics["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


@pytest.mark.parametrize("options", [{"encoder": "gru"}, {"model": "gloss-bow"}], ids=str)
def test_a_step_whose_gradients_overflow_changes_the_scale_alone(planted, tmp_path, options):
    """GLOSS moves the rows of a table by an optimiser of its own."""
    config = TrainConfig((planted[0],), precision="float16", **SMALL | options)
    progress = Progress(sentences=500)
    for stored, changes, after in (((2.0**120, 0), False, (2.0**119, 0)), ((2.0**10, 5), True, (2.0**10, 6))):
        progress.loss_scale, progress.steps_at_scale = stored
        trainer = trainer_of(config, tmp_path, progress)
        before = [weight.clone() for weight in trainer.parameters]
        turn = next(trainer.objective.turns(progress))
        trainer.step(turn.batch, turn.sizes)
        assert all(map(torch.equal, before, trainer.parameters)) != changes
        trainer.precision.store(progress)
        assert (progress.loss_scale, progress.steps_at_scale) == after


@pytest.mark.parametrize("chunk", [None, 13])
def test_a_scale_is_learnt_as_a_logarithm_that_is_clamped(planted, tmp_path, chunk):
    """As CLIP learns it."""
    settings = {"model": "simcse", "learn_scale": True, "scale": 5.0, "max_scale": 5.07, "chunk": chunk}
    settings |= {"encoder": "bow", "learning_rate": 0.01, "clip": 0.0}
    trainer = trainer_of(TrainConfig((planted[0],), **SMALL | settings), tmp_path)
    trainer.model.double()
    learnt = torch.nn.Parameter(torch.tensor(math.log(5.0)).double())
    adam = torch.optim.Adam([learnt], lr=0.01)
    scales = []
    for _, turn in zip(range(6), trainer.objective.turns(trainer.progress), strict=False):
        _, (z1, z2, *_) = trainer.step(turn.batch, turn.sizes)
        scores = learnt.exp() * F.normalize(z1, dim=1) @ F.normalize(z2, dim=1).T
        adam.zero_grad()
        F.cross_entropy(scores, torch.arange(len(z1))).backward()
        adam.step()
        learnt.data.clamp_(max=math.log(5.07))
        scales.append(trainer.model.loss.scale.detach().item())
        assert scales[-1] == pytest.approx(learnt.detach().exp().item(), rel=FLOAT64)
    assert max(scales) == pytest.approx(5.07), "the limit was not reached"
    assert len(set(scales)) > 1


def test_a_schedule_is_not_resumed_towards_another_end(planted, tmp_path):
    config = TrainConfig((planted[0],), schedule="linear", steps=4, keep_checkpoint=True, **SMALL)
    train(config, tmp_path / "run")
    with pytest.raises(InputError, match=r"cannot resume: steps is 9, but .* with 4, and its learning rate"):
        train(replace(config, steps=9), tmp_path / "run", resume=True)
    constant = replace(config, schedule="constant", warmup=6)
    train(constant, tmp_path / "constant")
    assert train(replace(constant, steps=9), tmp_path / "constant", resume=True).step == 9


def test_what_the_model_or_the_training_cannot_have_is_refused(planted, tmp_path):
    for settings, message in (
        ({"schedule": "cosine", "warmup": 10}, "warmup: want less than the 10 steps of the training, got 10"),
        ({"weight_decay": 0.1}, "weight_decay: want 0 with model quickthoughts and encoder bow, whose"),
        ({"optimizer": "adamw"}, "weight_decay: want 0 with .* encoder bow, .* got 0.01"),
        ({"model": "gloss-pos", "weight_decay": 0.1}, "weight_decay: want 0 with model gloss"),
    ):
        with pytest.raises(InputError, match=message):
            train(TrainConfig((planted[0],), **SMALL | settings), tmp_path / "run")
