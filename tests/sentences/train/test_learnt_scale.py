"""SimCSE and MixCSE learn their scale as CLIP does: its logarithm, clamped to a limit."""

import json
import math
import signal
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from fastqt.errors import InputError
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.progress import Progress
from fastqt.sentences.text import Vocabulary
from fastqt.sentences.train import train
from fastqt.sentences.train.loop import Trainer
from tests.sentences.train.test_resume import Signalling, assert_same_run
from tests.shared.tolerances import FLOAT64

SMALL = {"word_dim": 6, "batch_size": 50, "report_every": 1, "learn_scale": True}


@pytest.mark.parametrize("chunk", [None, 13])
def test_steps_are_those_of_a_logarithm_that_is_clamped(planted, tmp_path, chunk):
    config = TrainConfig(
        (planted[0],),
        model="simcse",
        scale=5.0,
        max_scale=5.07,
        learning_rate=0.01,
        clip=0.0,
        chunk=chunk,
        **SMALL,
    )
    vocabulary = Vocabulary.build(Path(planted[0]).read_text().splitlines(), config.vocab_size)
    progress = Progress(sentences=500)
    trainer = Trainer(config, [planted[0]], vocabulary, tmp_path, progress)
    trainer.model.double()
    learnt = torch.nn.Parameter(torch.tensor(math.log(5.0)).double())
    adam = torch.optim.Adam([learnt], lr=0.01)
    scales = []
    for _, turn in zip(range(6), trainer.objective.turns(progress), strict=False):
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


class Early(Signalling):
    AT = 4


@pytest.mark.parametrize("model", ["simcse", "mixcse"])
def test_a_resumed_training_has_the_bits_of_a_whole_one(planted, tmp_path, model):
    config = TrainConfig((planted[0],), model=model, keep_checkpoint=True, **SMALL)
    train(config, tmp_path / "whole")
    assert train(config, tmp_path / "parts", display=Early).stopped_by == signal.SIGTERM
    train(config, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    assert len({json.loads(line)["scale"] for line in lines}) == 10
    assert SentenceEncoder.load(tmp_path / "whole").model.loss.log_scale is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "learn_scale: want it with model simcse, mixcse or pairs alone, got quickthoughts"),
        ({"model": "simcse", "max_scale": 10.0}, "max_scale: want at least the scale 20, got 10"),
        ({"model": "simcse", "scale": 200.0}, "max_scale: want at least the scale 200, got 100"),
        ({"model": "simcse", "learn_scale": False, "max_scale": 50.0}, "max_scale: want it with learn_scale"),
    ],
    ids=str,
)
def test_a_scale_that_is_not_learnt_or_beyond_its_limit_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        TrainConfig(("x",), **{"learn_scale": True} | settings)
