"""An untrained model with encoders that are bags of words or GRUs."""

import pytest
import torch

from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.model import build_model
from fastqt.sentences.text import Vocabulary


@pytest.fixture(params=["bow", "bigru"])
def encoder(request, planted):
    config = TrainConfig((planted[0],), encoder=request.param, word_dim=8, hidden_size=6)
    with open(planted[0]) as file:
        vocabulary = Vocabulary.build(file, 60)
    torch.manual_seed(0)
    return SentenceEncoder(
        build_model(config, len(vocabulary)).eval(), vocabulary, torch.device("cpu"), config
    )
