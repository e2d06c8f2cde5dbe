"""The moving average of the weights is that of its formula; it is what is validated and kept."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fastqt.errors import InputError
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.progress import Progress
from fastqt.sentences.text import Vocabulary
from fastqt.sentences.train import train
from fastqt.sentences.train.loop import Trainer
from tests.sentences.train.test_resume import Signalling, assert_same_run, metrics_without_times
from tests.shared.tolerances import FLOAT64

SMALL = {"word_dim": 6, "hidden_size": 4, "batch_size": 50, "context_size": 1, "report_every": 1}
SMALL |= {"valid_every": 2, "keep_checkpoint": True, "learning_rate": 0.02}


@pytest.mark.parametrize("decay", [0.0, 0.7, 0.999])
@pytest.mark.parametrize("options", [{"encoder": "gru"}, {"model": "gloss-bow"}], ids=str)
def test_the_average_is_that_of_the_weights_after_each_step(planted, tmp_path, decay, options):
    config = TrainConfig((planted[0],), average=decay, **SMALL | options)
    vocabulary = Vocabulary.build(Path(planted[0]).read_text().splitlines(), config.vocab_size)
    progress = Progress(sentences=500)
    trainer = Trainer(config, [planted[0]], vocabulary, tmp_path, progress)
    assert trainer.average.model is trainer.model
    trainer.model.double()
    trainer.average = type(trainer.average)(trainer.model, decay)

    history = []
    for _, turn in zip(range(6), trainer.objective.turns(progress), strict=False):
        trainer.step(turn.batch, turn.sizes)
        history.append([weight.detach().clone() for weight in trainer.parameters])
    factors = torch.tensor([decay**age for age in reversed(range(6))], dtype=torch.float64)
    averages = list(trainer.average.model.parameters())
    assert len(averages) == len(trainer.parameters)
    for weights, average in zip(zip(*history, strict=True), averages, strict=True):
        wanted = torch.tensordot(factors / factors.sum(), torch.stack(weights), 1)
        torch.testing.assert_close(average.detach(), wanted, rtol=FLOAT64, atol=FLOAT64)


class Early(Signalling):
    AT = 5


@pytest.mark.parametrize(
    "options",
    [{}, {"model": "mixcse", "encoder": "transformer", "layers": 1, "heads": 2, "precision": "float16"}],
    ids=str,
)
def test_a_resumed_training_has_the_bits_of_a_whole_one(planted, tmp_path, options):
    config = TrainConfig((planted[0],), valid=planted[1], average=0.8, **SMALL | options)
    train(config, tmp_path / "whole")
    assert train(config, tmp_path / "parts", display=Early).stopped_by == signal.SIGTERM
    train(config, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")

    # The steps are those without an average, which changes only what is validated and kept.
    train(replace(config, average=None), tmp_path / "plain")
    lines, plain = (metrics_without_times(tmp_path / run) for run in ("whole", "plain"))
    assert [line.get("loss") for line in lines] == [line.get("loss") for line in plain]
    assert lines[0] == plain[0]
    assert lines[-1]["validation_loss"] != plain[-1]["validation_loss"]


def test_the_average_is_kept_and_the_weights_themselves_stay_in_the_checkpoint(planted, tmp_path):
    config = TrainConfig((planted[0],), average=0.8, **SMALL)
    train(config, tmp_path / "run")
    train(replace(config, average=None), tmp_path / "plain")
    kept = load_file(tmp_path / "run" / "model.safetensors")
    stored = load_file(tmp_path / "run" / "checkpoint.safetensors")
    raw = load_file(tmp_path / "plain" / "model.safetensors")
    for name, tensor in kept.items():
        assert torch.equal(tensor, stored[f"average.module.{name}"])
        assert torch.equal(raw[name], stored[f"model.{name}"])
        assert not torch.equal(tensor, raw[name])
    assert SentenceEncoder.load(tmp_path / "run").encode(["topic1word1"]).shape == (1, 12)


def test_another_average_is_refused(planted, tmp_path):
    for decay in (1.0, -0.5):
        with pytest.raises(InputError, match="average: want at least 0 and less than 1, got"):
            TrainConfig(("x",), average=decay)
    config = TrainConfig((planted[0],), steps=1, **SMALL)
    train(config, tmp_path)
    with pytest.raises(InputError, match=r"cannot resume: average is 0\.9, but the run was started"):
        train(replace(config, average=0.9, steps=2), tmp_path, resume=True)
