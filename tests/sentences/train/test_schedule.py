"""Learning rates, weight decay and the optimiser are torch's own, step by step, also after a pause."""

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR

from fastqt.errors import InputError
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.progress import Progress
from fastqt.sentences.text import Vocabulary, batches
from fastqt.sentences.train import train
from fastqt.sentences.train.loop import Trainer
from fastqt.sentences.train.schedule import Factor
from tests.sentences.train.test_resume import Signalling, assert_same_run

SMALL = {"word_dim": 6, "hidden_size": 4, "batch_size": 50, "context_size": 2, "report_every": 1}
STEPS = 30
TRANSFORMER = {"encoder": "transformer", "layers": 1, "heads": 2, "feedforward": 8, "dropout": 0.0}


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


def matrices(model):
    """The weights of the Transformer that decay, by their names: all matrices of its layers."""
    return [weight for name, weight in model.named_parameters() if weight.dim() == 2 and "layers" in name]


@pytest.mark.parametrize(("optimizer", "schedule"), [("adamw", "linear"), ("adam", "cosine")])
def test_each_step_is_that_of_torchs_optimiser_and_schedule(planted, tmp_path, optimizer, schedule):
    config = TrainConfig(
        (planted[0],),
        schedule=schedule,
        warmup=3,
        optimizer=optimizer,
        betas=(0.8, 0.95),
        weight_decay=0.3,
        learning_rate=0.02,
        **SMALL | TRANSFORMER,
    )
    vocabulary = Vocabulary.build(Path(planted[0]).read_text().splitlines(), config.vocab_size)
    ours, theirs = (
        Trainer(config, [planted[0]], vocabulary, tmp_path, Progress(sentences=500)) for _ in range(2)
    )
    decays = matrices(theirs.model)
    assert len(decays) == 8  # four of each encoder
    kept = {id(weight) for weight in decays}
    groups = [
        {"params": decays, "weight_decay": 0.3},
        {"params": [weight for weight in theirs.parameters if id(weight) not in kept], "weight_decay": 0.0},
    ]
    torch_class = torch.optim.AdamW if optimizer == "adamw" else torch.optim.Adam
    torch_optimizer = torch_class(groups, lr=0.02, betas=(0.8, 0.95), foreach=False)
    torch_rates = torch_schedule(torch_optimizer, schedule, 3, ours.last_step)

    assert ours.last_step == 10
    for batch in batches([planted[0]], vocabulary, 50):
        ours.step(batch)
        torch_optimizer.zero_grad()
        theirs.objective.loss(batch)[0].backward()
        for weight in theirs.parameters:
            weight.grad = weight.grad.to_dense()
        torch.nn.utils.clip_grad_norm_(theirs.parameters, config.clip)
        torch_optimizer.step()
        torch_rates.step()
        for one, other in zip(ours.parameters, theirs.parameters, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        # From here on, both have the same weights, so that rounding does not grow.
        theirs.model.load_state_dict(ours.model.state_dict())


class Early(Signalling):
    """Stops the training in the middle of its warm-up."""

    AT = 4


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "cosine", "warmup": 0.4, "optimizer": "adamw", **TRANSFORMER},
        {"schedule": "linear", "warmup": 8, "optimizer": "adamw", "weight_decay": 0.0, "betas": (0.9, 0.98)},
        {"model": "gloss-bow", "schedule": "linear", "warmup": 8, "context_size": 1},
    ],
    ids=str,
)
def test_a_training_resumed_in_its_warm_up_has_the_bits_of_a_whole_one(planted, tmp_path, options):
    settings = SMALL | {"checkpoint_every": 100, "keep_checkpoint": True, "epochs": 2} | options
    config = TrainConfig((planted[0],), **settings)
    train(config, tmp_path / "whole")
    assert train(config, tmp_path / "parts", display=Early).stopped_by == signal.SIGTERM
    train(TrainConfig.load(tmp_path / "parts" / "config.json"), tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    rates = [
        json.loads(line)["learning_rate"]
        for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()
    ]
    factor = Factor(config, 20)
    assert rates == [config.learning_rate * factor(step) for step in range(20)]
    assert max(rates) == rates[7] == config.learning_rate


def test_a_schedule_is_not_resumed_towards_another_end(planted, tmp_path):
    config = TrainConfig((planted[0],), schedule="linear", steps=4, keep_checkpoint=True, **SMALL)
    train(config, tmp_path / "run")
    with pytest.raises(InputError, match=r"cannot resume: steps is 9, but .* with 4, and its learning rate"):
        train(replace(config, steps=9), tmp_path / "run", resume=True)
    constant = replace(config, schedule="constant", warmup=6)
    train(constant, tmp_path / "constant")
    assert train(replace(constant, steps=9), tmp_path / "constant", resume=True).step == 9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "step"}, "schedule: want one of constant, linear, cosine, got 'step'"),
        (
            {"warmup": 2.5},
            r"warmup: want a whole number of steps, or a share of the training below 1, got 2\.5",
        ),
        ({"warmup": -1}, "warmup: want at least 0 and less than .*, got -1"),
        ({"optimizer": "sgd"}, "optimizer: want one of adam, adamw, got 'sgd'"),
        ({"weight_decay": -0.1}, "weight_decay: want at least 0 and less than"),
        ({"betas": (0.9, 1.0)}, r"betas: want at least 0 and less than 1, got 1\.0"),
        ({"betas": (0.9,)}, r"betas: want two numbers, got \(0\.9,\)"),
        ({"betas": (0.9, "x")}, "betas: want a number, got 'x'"),
    ],
    ids=str,
)
def test_settings_outside_their_range_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        TrainConfig(("x",), **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "cosine", "warmup": 10}, "warmup: want less than the 10 steps of the training, got 10"),
        ({"weight_decay": 0.1}, "weight_decay: want 0 with model quickthoughts and encoder bow, whose"),
        ({"optimizer": "adamw"}, "weight_decay: want 0 with .* encoder bow, .* got 0.01"),
        (
            {"model": "gloss-pos", "context_size": 1, "weight_decay": 0.1},
            "weight_decay: want 0 with model gloss",
        ),
    ],
    ids=str,
)
def test_what_the_model_or_the_training_cannot_have_is_refused(planted, tmp_path, settings, message):
    with pytest.raises(InputError, match=message):
        train(TrainConfig((planted[0],), **SMALL | settings), tmp_path)
