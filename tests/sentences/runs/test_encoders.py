"""The records of encoders say of each encoder what its class says."""

import pytest
import torch
from torch import nn

from fastqt.errors import InputError
from fastqt.nn import Encoder
from fastqt.nn.masked_words import TokenEncoder
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.encoders import ENCODERS
from fastqt.sentences.runs.encoders.forms import form_of
from fastqt.sentences.runs.model import build_encoder
from tests.shared.stored_runs import SIZES
from tests.shared.tiny_bert import write_tiny_bert


@pytest.mark.parametrize("name", [name for name, kind in ENCODERS.items() if not kind.parts])
def test_a_record_agrees_with_the_encoder(tmp_path, name):
    kind = ENCODERS[name]
    if "checkpoint" in kind.needs:
        write_tiny_bert(tmp_path / "checkpoint")
    files = {setting: str(tmp_path / setting) for setting in kind.needs}
    encoder = build_encoder(TrainConfig(("x",), encoder=name, **files, **SIZES), 10)

    assert type(encoder).__name__ == kind.encoder
    assert type(form_of(encoder)) is type(kind.load_form())
    assert isinstance(encoder, TokenEncoder) == kind.has_states
    assert bool(list(form_of(encoder).compiled(encoder))) == kind.compiles
    assert all(isinstance(x, nn.Embedding) for x in encoder.children()) == kind.is_table
    frozen = [weight for weight in encoder.parameters() if not weight.requires_grad]
    assert bool(frozen) == bool(kind.channel)


def test_an_encoder_without_a_record_is_not_exported():
    class Constant(Encoder):
        embedding_dim = 1

        def forward(self, tokens, lengths):
            return torch.ones(len(tokens), 1)

    encoder = Constant()
    for format, export in (("onnx", form_of(encoder).graph), ("safetensors", form_of(encoder).description)):
        wanted = f"format: want one that a Constant can be exported to, got {format}"
        with pytest.raises(InputError, match=wanted):
            export(encoder)
