"""The records of encoders say of each encoder what its class says."""

import pytest
from torch import nn

from fastqt.nn.masked_words import TokenEncoder
from fastqt.sentences.options.encoders import ENCODERS
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.encoders import form_of, load_form
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
    assert type(form_of(encoder)) is type(load_form(kind))
    assert isinstance(encoder, TokenEncoder) == kind.has_states
    assert all(isinstance(x, nn.Embedding) for x in encoder.children()) == kind.is_table
    frozen = [weight for weight in encoder.parameters() if not weight.requires_grad]
    assert bool(frozen) == bool(kind.channel)
