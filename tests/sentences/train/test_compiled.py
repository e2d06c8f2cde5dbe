"""Encoders that torch compiles have the values of those that it does not, and refuse what it cannot."""

import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from fastqt.errors import InputError
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.train import train
from fastqt.sentences.train.loop import Trainer
from fastqt.sentences.train.preparation import read_corpus
from tests.sentences.train.test_resume import Signalling, assert_same_run, metrics_without_times
from tests.shared.tiny_bert import write_tiny_bert

SMALL = {"word_dim": 8, "layers": 2, "heads": 2, "feedforward": 16, "batch_size": 50, "context_size": 1}
SMALL |= {"encoder": "transformer", "compile": True, "report_every": 1, "keep_checkpoint": True}


# torch's compiler looks at gradients of tensors that have none, and hides its own warning, but not an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture
def quick(monkeypatch):
    """Traces modules and differentiates them as the compiler does, but makes no machine code of them."""
    original = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, dynamic, options: original(self, dynamic=dynamic, backend="aot_eager"),
    )
    monkeypatch.setattr("fastqt.sentences.train.compiled._check_compiler", lambda device: None)


def steps(config, folder, number=3):
    """The losses and measured tensors of some steps, and the weights after them."""
    vocabulary, progress = read_corpus(config, list(config.corpus), 1)
    trainer = Trainer(config, list(config.corpus), vocabulary, folder, progress)
    results = []
    for _, turn in zip(range(number), trainer.objective.turns(progress), strict=False):
        loss, measured = trainer.step(turn.batch, turn.sizes)
        results += [loss, *measured]
    return results, trainer.model.state_dict()


def assert_same_steps(config, folder):
    (ours, weights), (theirs, wanted) = (
        steps(each, folder) for each in (config, replace(config, compile=False))
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert weights.keys() == wanted.keys()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"model": "simcse", "chunk": 20}], ids=str)
def test_steps_of_a_transformer_are_those_without_the_compiler(planted, tmp_path, quick, options):
    """With dropout, which draws the same numbers, and with batches of several lengths."""
    assert_same_steps(TrainConfig((planted[0],), dropout=0.2, **SMALL | options), tmp_path)


@pytest.mark.slow
def test_steps_of_a_checkpoint_are_those_without_the_compiler(tmp_path, quick):
    write_tiny_bert(tmp_path / "bert")
    settings = SMALL | {"encoder": "huggingface", "checkpoint": str(tmp_path / "bert"), "model": "simcse"}
    (tmp_path / "text").write_text(
        "\n".join("the cat sat on a mat ."[: 5 + number % 17] for number in range(150))
    )
    assert_same_steps(TrainConfig((str(tmp_path / "text"),), max_length=12, **settings), tmp_path)


class Early(Signalling):
    AT = 4


@pytest.mark.slow
def test_a_resumed_training_has_the_bits_of_a_whole_one(planted, tmp_path):
    """Though it begins with a batch of another shape; with machine code, on this machine's compiler."""
    config = TrainConfig((planted[0],), valid=planted[1], valid_every=5, model="simcse", dropout=0.2, **SMALL)
    train(config, tmp_path / "whole")
    assert train(config, tmp_path / "parts", display=Early).stopped_by == signal.SIGTERM
    train(config, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")

    train(replace(config, compile=False), tmp_path / "eager")
    names = [set(load_file(tmp_path / run / "model.safetensors")) for run in ("whole", "eager")]
    assert names[0] == names[1]
    losses = [
        [line.get("loss", 0) for line in metrics_without_times(tmp_path / run)] for run in ("whole", "eager")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("encoder", ["bow", "gru", "bilstm", "combine"])
def test_encoders_from_which_nothing_is_compiled_are_refused(encoder):
    with pytest.raises(InputError, match=f"compile: want it with encoder transformer or .*; got {encoder}"):
        TrainConfig(("x",), encoder=encoder, compile=True)


def test_a_machine_on_which_torch_cannot_compile_is_told(planted, tmp_path, monkeypatch):
    def fail(*_, **options):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", fail)
    with pytest.raises(InputError, match=r"compile: want a machine .*; it fails with: no C\+\+ compiler"):
        train(TrainConfig((planted[0],), **SMALL), tmp_path / "run")
    assert not (tmp_path / "run").exists()
