"""A training in 16 bits takes the steps of torch's autocast and scaler, but for those that overflow."""

import signal
from pathlib import Path

import pytest
import torch

from fastqt.errors import InputError
from fastqt.sentences.runs.checkpoint import read_progress
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.progress import Progress
from fastqt.sentences.text import Vocabulary, batches
from fastqt.sentences.train import train
from fastqt.sentences.train.loop import Trainer
from tests.sentences.train.test_resume import Signalling, assert_same_run

SMALL = {"word_dim": 6, "hidden_size": 4, "batch_size": 50, "context_size": 1, "report_every": 1}
SMALL |= {"layers": 1, "heads": 2, "feedforward": 8, "dropout": 0.0}
SHORT = ["bfloat16", "float16"]


def trainers(planted, folder, number=2, progress=None, **options):
    """Trainings from equal weights, and the batches of their text."""
    config = TrainConfig((planted[0],), **SMALL | options)
    vocabulary = Vocabulary.build(Path(planted[0]).read_text().splitlines(), config.vocab_size)
    made = [
        Trainer(config, [planted[0]], vocabulary, folder, progress or Progress(sentences=500))
        for _ in range(number)
    ]
    return made, list(batches([planted[0]], vocabulary, 50))


@pytest.mark.parametrize("precision", SHORT)
@pytest.mark.parametrize(("encoder", "chunk"), [("gru", None), ("transformer", 50)])
def test_each_step_is_that_of_torchs_autocast_and_scaler(planted, tmp_path, precision, encoder, chunk):
    """Also where all sentences are one chunk, whose computation is that of a batch."""
    (ours, theirs), read = trainers(planted, tmp_path, precision=precision, encoder=encoder, chunk=chunk)
    optimizer = torch.optim.Adam(theirs.parameters, lr=5e-4)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "float16")
    for batch in read[:3]:
        our_loss, measured = ours.step(batch)
        optimizer.zero_grad()
        with torch.autocast("cpu", getattr(torch, precision)):
            loss, _ = theirs.objective.loss(batch)
        assert torch.equal(our_loss, loss)
        scaler.scale(loss).backward()
        for weight in theirs.parameters:
            weight.grad = weight.grad.to_dense()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(theirs.parameters, 5.0)
        scaler.step(optimizer)
        scaler.update()
        for one, other in zip(ours.parameters, theirs.parameters, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        theirs.model.load_state_dict(ours.model.state_dict())
        exact, _ = theirs.objective.loss(batch)
        assert our_loss.dtype == measured[0].dtype == ours.parameters[0].dtype == torch.float32
    assert exact.item() != loss.item()


@pytest.mark.parametrize("precision", SHORT)
@pytest.mark.parametrize(
    "options",
    [
        {"encoder": "lstm"},
        {"encoder": "gru", "cell": "reset-before"},
        {"model": "simcse", "encoder": "transformer", "masked_words": 0.1},
        {"model": "mixcse", "form": "released"},
        {"model": "skip-thoughts", "encoder": "gru"},
        {"model": "gloss-pos"},
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
    progress = Progress(sentences=500, loss_scale=2.0**120)
    (trainer,), _ = trainers(planted, tmp_path, 1, progress, precision="float16", **options)
    before = [weight.clone() for weight in trainer.parameters]
    turn = next(trainer.objective.turns(progress))
    trainer.step(turn.batch, turn.sizes)
    assert all(map(torch.equal, before, trainer.parameters))
    trainer.precision.store(progress)
    assert (progress.loss_scale, progress.steps_at_scale) == (2.0**119, 0)
    progress.loss_scale, progress.steps_at_scale = 2.0**10, 5
    (trainer,), _ = trainers(planted, tmp_path, 1, progress, precision="float16", **options)
    trainer.step(turn.batch, turn.sizes)
    assert not all(map(torch.equal, before, trainer.parameters))
    trainer.precision.store(progress)
    assert (progress.loss_scale, progress.steps_at_scale) == (2.0**10, 6)


class Early(Signalling):
    AT = 4


@pytest.mark.parametrize("precision", SHORT)
def test_a_resumed_training_has_the_bits_of_a_whole_one(planted, tmp_path, precision):
    options = {"model": "simcse", "encoder": "transformer", "dropout": 0.2, "precision": precision}
    config = TrainConfig((planted[0],), valid=planted[1], keep_checkpoint=True, **SMALL | options)
    train(config, tmp_path / "whole")
    assert train(config, tmp_path / "parts", display=Early).stopped_by == signal.SIGTERM
    stored = read_progress(tmp_path / "parts" / "checkpoint.safetensors")
    assert (stored.loss_scale > 0) == (precision == "float16")
    train(config, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    ends = [read_progress(tmp_path / run / "checkpoint.safetensors") for run in ("whole", "parts")]
    assert ends[0].loss_scale == ends[1].loss_scale
    assert ends[0].steps_at_scale == ends[1].steps_at_scale
    assert (ends[0].steps_at_scale > stored.steps_at_scale) == (precision == "float16")


def test_another_precision_is_refused(planted, tmp_path):
    with pytest.raises(InputError, match="precision: want one of float32, bfloat16, float16, got 'float64'"):
        TrainConfig(("x",), precision="float64")
    config = TrainConfig((planted[0],), steps=1, keep_checkpoint=True, **SMALL)
    train(config, tmp_path)
    other = TrainConfig((planted[0],), steps=2, precision="bfloat16", **SMALL)
    with pytest.raises(
        InputError, match="cannot resume: precision is 'bfloat16', but the run was started with"
    ):
        train(other, tmp_path, resume=True)
